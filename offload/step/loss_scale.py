# SPDX-License-Identifier: Apache-2.0
"""Loss scaling: by how much engine.backward multiplies the loss, and what a step with non-finite gradients does.

Dynamic scaling as in mixed-precision training (Micikevicius et al., 2018) with the constants of torch.amp.GradScaler:
start at 2**16, halve at an overflow, double after 2000 steps without one. Scales are powers of two, so scaling and
un-scaling change no bit of a gradient that neither overflows nor underflows.
"""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24
MIN_SCALE = 2.0**-14
MOST_LOST_STEPS = 50
"""Steps in a row that may be left out while the scale cannot go lower: beyond them nothing is trained any more."""


@dataclass(slots=True)
class LossScale:
    """`dynamic`: skip and halve at an overflow. `skips`: leave a non-finite step out. Neither: such a step raises."""

    value: float
    dynamic: bool
    skips: bool
    good_step_count: int = 0
    skipped_step_count: int = 0
    lost_step_count: int = 0
    """Steps left out in a row at the lowest scale."""

    @staticmethod
    def of(setting: str | float | None, dtype: str | None) -> LossScale:
        """From `Config.loss_scale` and `Config.dtype`."""
        if setting is None:
            setting = "dynamic" if dtype == "fp16" else 1.0
        if setting == "dynamic":
            return LossScale(INITIAL_SCALE if dtype == "fp16" else 1.0, dynamic=dtype == "fp16", skips=True)
        if setting == "skip":
            return LossScale(1.0, dynamic=False, skips=True)
        return LossScale(float(setting), dynamic=False, skips=False)

    def step_was_finite(self) -> None:
        self.good_step_count += 1
        self.lost_step_count = 0
        if self.dynamic and self.good_step_count % GROWTH_INTERVAL == 0:
            self.value = min(self.value * 2, MAX_SCALE)

    def step_overflowed(self) -> None:
        self.good_step_count = 0
        self.skipped_step_count += 1
        self.lost_step_count += self.value == MIN_SCALE or not self.dynamic
        if self.dynamic:
            self.value = max(self.value / 2, MIN_SCALE)

    @property
    def is_hopeless(self) -> bool:
        return self.lost_step_count >= MOST_LOST_STEPS
