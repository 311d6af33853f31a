# SPDX-License-Identifier: Apache-2.0
"""Learning rates that warm up and then stay, fall linearly or fall as half a cosine; cycles; range tests. DeepSpeed's numbers.

After i calls of `step` the iteration is i - 1; W is warmup_num_steps, at least 2; T is total_num_steps. The warm-up's share is

    log:     ln(iteration + 1) / ln(W)        linear:  iteration / W          while iteration < W

so that the first two updates of a run (before `step`, and at iteration 0) have the lowest rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import ConfigError

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = _WARMUP_TYPES = ("log", "linear")
PARAMS = (
    *("lr_range_test_min_lr", "lr_range_test_step_rate", "lr_range_test_step_size", "lr_range_test_staircase"),
    *("cycle_first_step_size", "cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"),
    *("decay_step_size", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
    *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio"),
    "total_num_steps",
)
"""Keys of a config's scheduler.params. Scripts know each as a constant: CYCLE_MIN_LR, ..."""


class _Schedule:
    """Sets the rate of every group when it is made and at every `step`."""

    def _begin(self, optimizer: torch.optim.Optimizer, iteration: int, rates: list[float] | None = None) -> None:
        """`rates`: those before the first iteration, where `get_lr` does not know them."""
        self.optimizer = optimizer
        self.last_batch_iteration = iteration
        if iteration == -1:
            self._set(rates)

    def get_lr(self) -> list[float]:
        """Return the rate of every group at this iteration."""
        raise NotImplementedError

    def _set(self, rates: list[float] | None = None) -> None:
        self._last_lr = self.get_lr() if rates is None else list(rates)
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
        """Take over the iteration. The rates of the groups come back with the optimizer's checkpoint."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class _WarmUp(_Schedule):
    def _warm_up(self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: str, iteration: int) -> None:
        if warmup_type not in _WARMUP_TYPES:
            raise ConfigError(f"warmup_type={warmup_type!r} is unknown: expected 'log' or 'linear'.")
        _require_count(warmup_num_steps, "warmup_num_steps")
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        self._begin(optimizer, iteration)

    def _warmup_share(self) -> float:
        if self.warmup_type == "log":
            return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps

    @property
    def _is_warming_up(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps


class WarmupLR(_WarmUp):
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
        self.max_lrs = [float(group["lr"]) for group in groups]
        if warmup_max_lr is not None:
            self.max_lrs = _of_groups(warmup_max_lr, len(groups), "warmup_max_lr")
        self.min_lrs = _of_groups(warmup_min_lr, len(groups), "warmup_min_lr")
        self._warm_up(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._warmup_share() if self._is_warming_up else self._later_share()
        return _between(self.min_lrs, self.max_lrs, share)

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


class WarmupCosineLR(_WarmUp):
    """Of each group's own rate: up from warmup_min_ratio in the warm-up, then down to cos_min_ratio as half a cosine.

    The second part is cos_min_ratio + (1 - cos_min_ratio) x (1 + cos(pi x min(1, (iteration - W + 1) / (T - W)))) / 2.
    The very first rate is 0.
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
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._warm_up(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return what each group's own rate is multiplied by."""
        if self.last_batch_iteration < 0:
            return 0.0
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


def _between(lows: Sequence[float], highs: Sequence[float], share: float) -> list[float]:
    return [low + (high - low) * share for low, high in zip(lows, highs, strict=True)]


class LRRangeTest(_Schedule):
    """lr = min x (1 + rate x (iteration + 1) / size), in steps of `size` with `lr_range_test_staircase`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        _require_count(lr_range_test_step_size, "lr_range_test_step_size")
        self.min_lr = _of_groups(lr_range_test_min_lr, len(optimizer.param_groups), "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._begin(optimizer, last_batch_iteration, self.min_lr)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        share = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * share for low in self.min_lr]


class OneCycle(_Schedule):
    """One triangle from min to max and back, then min / (1 + rate x (iterations since) / decay_step_size).

    The first betas go the other way, from max to min and back, then max x (1 + rate x ...), for optimizers that have betas.
    A stair count holds the value over each of that many equal stairs of its half.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        count = len(optimizer.param_groups)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise ConfigError(
                f"cycle_first_step_size={cycle_first_step_size!r} must be positive, and "
                f"cycle_second_step_size={cycle_second_step_size!r} non-negative."
            )
        self.halves, self.total_size = (first, second), first + second
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, second_stairs)
        self.decay_step_size = decay_step_size
        self.min_lrs = _of_groups(cycle_min_lr, count, "cycle_min_lr")
        self.max_lrs = _of_groups(cycle_max_lr, count, "cycle_max_lr")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = _of_groups(cycle_min_mom, count, "cycle_min_mom")
        self.max_moms = _of_groups(cycle_max_mom, count, "cycle_max_mom")
        self._begin(optimizer, last_batch_iteration, self.min_lrs)
        if last_batch_iteration == -1:
            self._set_momentum(self.min_moms)

    @property
    def step_ratio(self) -> float:
        """The first half's share of the cycle."""
        return self.halves[0] / self.total_size

    def _height(self) -> float:
        """From 0 at the ends of the cycle to 1 at its peak."""
        first, second = self.halves
        iteration = (self.last_batch_iteration + 1) % self.total_size
        is_rising = iteration <= first
        way, half = (iteration, first) if is_rising else (self.total_size - iteration, second)
        stairs = self.stairs[0 if is_rising else 1]
        return math.floor(way * stairs / half) / stairs if stairs else way / half

    def _decays(self, rate: float) -> float | None:
        """How far the decay is; None in the cycle."""
        if self.last_batch_iteration < self.total_size:
            return None
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def get_lr(self) -> list[float]:
        decay = self._decays(self.decay_lr_rate)
        if decay is not None:
            return [low / decay for low in self.min_lrs]
        return _between(self.min_lrs, self.max_lrs, self._height())

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of every group; None where they stay."""
        return [(momentum, _SECOND_BETA) for momentum in self._momenta()] if self.cycle_momentum else None

    def _momenta(self) -> list[float]:
        decay = self._decays(self.decay_mom_rate)
        if decay is not None:
            return [high * decay for high in self.max_moms]
        height = self._height()
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def _set_momentum(self, momenta: list[float]) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, _SECOND_BETA)

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        self._set_momentum(self._momenta())


_SECOND_BETA = 0.99


def _require_count(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a count of steps: expected a positive integer.")
