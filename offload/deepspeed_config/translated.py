# SPDX-License-Identifier: Apache-2.0
"""What a config in DeepSpeed's keys says."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.config import Config, with_internal_settings
from offload.deepspeed_config.data_types import DataTypes
from offload.deepspeed_config.optimizers import Maker


@dataclass(frozen=True, slots=True)
class Batch:
    """train = micro x accumulation x ranks; None: not said, and not to be derived."""

    train: int | None
    micro: int | None
    accumulation: int


@dataclass(frozen=True, slots=True)
class Half:
    """The section "fp16" where it is on; `loss_scale` 0 is the dynamic one. DeepSpeed's defaults."""

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


def as_there(said: Translation) -> Config:
    """The config, of a run that begins and keeps what DeepSpeed's does."""
    return with_internal_settings(
        said.config,
        masters_begin_rounded=True,
        persistent_numel=said.persistent_numel,
        sums_are_narrow=said.data_types.sums_are_narrow,
        micro_batches=said.batch.accumulation,
    )


@dataclass(frozen=True, slots=True)
class Translation:
    """`without_effect`: keys that were given and make no difference here, as dotted paths."""

    given: Mapping[str, Any]
    """What was translated."""
    config: Config
    half: Half | None
    optimizer: Maker | None
    scheduler: Maker | None
    batch: Batch
    manages_accumulation: bool
    sums_gradients: bool
    """Over the ranks, instead of averaging them."""
    steps_per_print: int | None
    drop_last: bool
    ignores_unused: bool
    allows_untested: bool
    """An optimizer of the script's own, which has no kernel here, with ZeRO."""
    tag_validation: str
    """"fail", "warn" or "ignore"."""
    loads_universal: bool
    """`load_checkpoint` without a tag takes the one that the file "latest_universal" names."""
    activation_checkpointing: Mapping[str, Any]
    data_types: DataTypes
    persistent_numel: tuple[int, int]
    """See `Config`."""
    autocast: torch.dtype | None
    """What torch.autocast around the forward computes in."""
    layer_drop: tuple[float, float] | None
    """theta and gamma of progressive layer dropping."""
    leaf_modules: Mapping[str, Any]
    """Modules that `z3_leaf_module` answers for: by "classes", "names" or "name_suffixes"."""
    without_effect: tuple[str, ...]

    def warn(self, stacklevel: int, besides: tuple[str, ...] = ()) -> None:
        """One warning for all that was given in vain; `besides`: keys that only this caller has no use for."""
        said = []
        if self.without_effect or besides:
            keys = ", ".join((*self.without_effect, *besides))
            said.append(f"{keys}: without effect here, no result depends on them and nothing of it needs tuning.")
        if said:
            warnings.warn(f"DeepSpeed's config: {' '.join(said)}", UserWarning, stacklevel=stacklevel + 1)
