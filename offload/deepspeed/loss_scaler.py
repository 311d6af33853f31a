# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's dynamic loss scale of fp16, hysteresis included.

An overflow first uses up the hysteresis, then halves the scale, not below the minimum. `scale_window` steps without one double
it; they, or with `consecutive_hysteresis` every good step, give the hysteresis back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload.deepspeed_config import Half
from offload.errors import UsageError

FACTOR = 2.0


@dataclass(slots=True)
class LossScaler:
    """The loss scale of fp16, which stays as it is with `dynamic=False`."""

    cur_scale: float
    dynamic: bool
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    cur_hysteresis: int = 2
    raises_at_min: bool = True
    cur_iter: int = 0
    last_overflow_iter: int = -1

    @staticmethod
    def of(half: Half | None, *, hesitates: bool) -> LossScaler:
        """Make it from the config's section "fp16"; None means no scaling. Without ZeRO (`hesitates`: False) there is no
        hysteresis, and an overflow at the lowest scale is no error."""
        if half is None:
            return LossScaler(1.0, dynamic=False)
        if half.loss_scale:
            return LossScaler(half.loss_scale, dynamic=False)
        scaler = LossScaler(2.0**half.initial_scale_power, True, half.loss_scale_window, half.min_loss_scale)
        scaler.delayed_shift = scaler.cur_hysteresis = half.hysteresis if hesitates else 1
        scaler.raises_at_min = hesitates
        scaler.consecutive_hysteresis = half.consecutive_hysteresis
        return scaler

    loss_scale = property(lambda self: self.cur_scale)
    dynamic_loss_scale = property(lambda self: self.dynamic)
    min_loss_scale = property(lambda self: self.min_scale)
    scale_factor = property(lambda self: FACTOR)

    def update_scale(self, overflow: bool) -> None:
        """Call it after a step. It raises `UsageError` (a RuntimeError) for an overflow at the lowest scale."""
        if not self.dynamic:
            return
        if overflow:
            self._overflowed()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            good_steps = self.cur_iter - self.last_overflow_iter - 1
            if good_steps > 0 and good_steps % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= FACTOR
        self.cur_iter += 1

    def _overflowed(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
        elif self.cur_scale == self.min_scale and self.raises_at_min:
            raise UsageError(
                f"gradients overflow at the lowest loss scale, fp16.min_loss_scale={self.min_scale:g}: look for the cause with "
                "torch.autograd.detect_anomaly(); bf16 overflows where fp32 does."
            )
        else:
            self.cur_scale = max(self.cur_scale / FACTOR, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a dynamic scale. A fixed scale is what the config says."""
        if self.dynamic and "cur_iter" in state:
            for name in asdict(self).keys() & state.keys():
                setattr(self, name, state[name])
