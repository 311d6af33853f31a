# SPDX-License-Identifier: Apache-2.0
"""Lion, for those who have no other implementation at hand: `offload.Lion` is to the engine what `torch.optim.AdamW` is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """EvoLved Sign Momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) with decoupled weight decay.

    `step()` works on ordinary parameters, one tensor at a time; given to `offload.initialize` the engine's own kernel
    does the same arithmetic. Usual settings: a learning rate 3 to 10 times smaller than AdamW's, a weight decay as many
    times larger.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0 or not weight_decay >= 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                f"Lion was given lr={lr}, betas={betas}, weight_decay={weight_decay}: expected lr and weight_decay of at "
                "least 0, and betas in [0, 1)."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                average = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = average.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
                parameter.add_(direction, alpha=-group["lr"])
                average.mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss
