"""Learning rates that warm up, then stay, fall linearly, or fall as half a cosine; with DeepSpeed's numbers.

After i calls of `step` the iteration is i - 1; W is warmup_num_steps, at least 2; T is total_num_steps. The warm-up's share is

    log:     ln(iteration + 1) / ln(W)        linear:  iteration / W          while iteration < W

so that the first two updates of a run (before `step`, and at iteration 0) have the lowest rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from offload.deepspeed.absent import absent
from offload.errors import ConfigError

_WARMUP_TYPES = ("log", "linear")


class _Schedule:
    """Sets the rate of every group when it is made and at every `step`."""

    last_batch_iteration: int

    def _begin(self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: str, iteration: int) -> None:
        if warmup_type not in _WARMUP_TYPES:
            raise ConfigError(f"warmup_type={warmup_type!r} is unknown: expected 'log' or 'linear'.")
        if isinstance(warmup_num_steps, bool) or not isinstance(warmup_num_steps, int) or warmup_num_steps < 1:
            raise ConfigError(f"warmup_num_steps={warmup_num_steps!r} is not a count of steps: expected 1, 2, ...")
        self.optimizer = optimizer
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        self.last_batch_iteration = iteration
        if iteration == -1:
            self._set()

    def _warmup_share(self) -> float:
        if self.warmup_type == "log":
            return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps

    @property
    def _is_warming_up(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps

    def get_lr(self) -> list[float]:
        """The rate of every group at this iteration."""
        raise NotImplementedError

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # others may hold it
            else:
                group["lr"] = lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the given one."""
        next_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = next_iteration if last_batch_iteration is None else last_batch_iteration
        self._set()

    def get_last_lr(self) -> list[float]:
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The groups' rates come back with the optimizer's checkpoint."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class WarmupLR(_Schedule):
    """lr = min + (max - min) x share of the warm-up; then max. `warmup_max_lr=None`: the groups' own rates."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        self.max_lrs = [group["lr"] for group in groups]
        if warmup_max_lr is not None:
            self.max_lrs = _of_groups(warmup_max_lr, len(groups), "warmup_max_lr")
        self.min_lrs = _of_groups(warmup_min_lr, len(groups), "warmup_min_lr")
        self._begin(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._warmup_share() if self._is_warming_up else self._later_share()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _later_share(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`; then lr = min + (max - min) x (T - iteration) / (T - W), not below min."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _later_share(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Of each group's own rate: from warmup_min_ratio to 1 in the warm-up; then down to cos_min_ratio,

    cos_min_ratio + (1 - cos_min_ratio) x (1 + cos(pi x min(1, (iteration - W + 1) / (T - W)))) / 2. The very first is 0.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        self._begin(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self._ratio() if self.last_batch_iteration >= 0 else 0.0
        return [lr * ratio for lr in self.org_lrs]

    def _ratio(self) -> float:
        if self._is_warming_up:
            return self.warmup_min_ratio + self._warmup_share() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


def _of_groups(value: float | Sequence[float], count: int, name: str) -> list[float]:
    if isinstance(value, Sequence):
        if len(value) != count:
            raise ConfigError(f"{name} has {len(value)} numbers, and the optimizer {count} groups: give one for each.")
        return [float(one) for one in value]
    return [value] * count


def __getattr__(name: str) -> Any:
    instead = {
        "LRRangeTest": "take one of torch.optim.lr_scheduler",
        "OneCycle": "take torch.optim.lr_scheduler.OneCycleLR or CyclicLR",
    }
    raise absent("deepspeed.runtime.lr_schedules", name, ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), instead)
