# SPDX-License-Identifier: Apache-2.0
"""Optimizer rules: which arithmetic a step is, which moments it keeps, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What a rule may keep of a weight's past. exp_avg: an average of gradients (Adam, Lion), or SGD's momentum buffer.
exp_avg_sq: an average of their squares (Adam), or Adagrad's sum of them."""


class Rule(Enum):
    """The arithmetic of each is fixed operation by operation in `native/include/offload.h`."""

    ADAM = "adam"
    """Adam (weight decay as L2) and AdamW (decoupled)."""
    LION = "lion"
    ADAGRAD = "adagrad"
    SGD = "sgd"
    OWN = "own"
    """No kernel: `Hyper.own` computes it."""


class OwnUpdate(Protocol):
    """An optimizer that comes with its own arithmetic (`offload.model.own_optimizer`)."""

    @property
    def moments(self) -> tuple[str, ...]: ...

    def __call__(self, p: Tensor, g: Tensor, moments: dict[str, Tensor], step: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Hyper:
    """The numbers of one parameter group at one step; what the rule does not use stays at its default.

    beta1, beta2: of Adam and Lion; for SGD the momentum and the dampening. decoupled: AdamW. lr_decay: Adagrad's.
    maximize: the step goes up the gradient.
    """

    rule: Rule
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    decoupled: bool = False
    nesterov: bool = False
    maximize: bool = False
    own: OwnUpdate | None = None

    @property
    def moments(self) -> tuple[str, ...]:
        """Which of `MOMENTS` a step with these numbers reads and writes."""
        if self.own is not None:
            return self.own.moments
        if self.rule is Rule.ADAM:
            return MOMENTS
        if self.rule is Rule.LION or (self.rule is Rule.SGD and self.beta1 != 0):
            return MOMENTS[:1]
        return MOMENTS[1:] if self.rule is Rule.ADAGRAD else ()

    def lr_at(self, step: int) -> float:
        """The learning rate of update `step` (from 1), with Adagrad's decay."""
        return self.lr / (1 + (step - 1) * self.lr_decay)
