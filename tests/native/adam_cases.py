# SPDX-License-Identifier: Apache-2.0
"""Tensors and hyperparameters of one Adam step, for the tests of every form of it."""

from __future__ import annotations

import torch

from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import Segment
from tests.native import exact


def adam(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool) -> Hyper:
    return Hyper(Rule.ADAM, lr, beta1, beta2, eps, weight_decay, decoupled=decoupled)


HYPER = adam(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)


def segment(
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    emit: torch.Tensor | None,
    hyper: Hyper,
    step: int,
    factor: float = 1.0,
) -> Segment:
    return Segment(grad, {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, emit, hyper, step, factor)


class Case:
    """Tensors cut at odd places out of larger ones, so that addresses are not aligned to vectors."""

    def __init__(self, numel: int, seed: int, *, grad: torch.dtype, emit: torch.dtype | None, specials: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, 17, (5,), generator=generator).tolist()

        def cut(values: torch.Tensor, at: int) -> torch.Tensor:
            base = torch.zeros(numel + 32, dtype=values.dtype)
            base[at : at + numel] = values
            return base[at : at + numel]

        self.grad = cut(exact.rough_values(numel, generator, specials=specials).to(grad), cuts[0])
        self.master = cut(exact.rough_values(numel, generator, specials=specials), cuts[1])
        self.exp_avg = cut(exact.rough_values(numel, generator, specials=specials), cuts[2])
        self.exp_avg_sq = cut(exact.rough_values(numel, generator, specials=specials).abs(), cuts[3])
        self.emit = None if emit is None else cut(torch.zeros(numel, dtype=emit), cuts[4])

    def segment(self, hyper: Hyper, step: int, factor: float) -> Segment:
        return segment(self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.emit, hyper, step, factor)

    def results(self) -> list[torch.Tensor]:
        tensors = [self.master, self.exp_avg, self.exp_avg_sq, *([] if self.emit is None else [self.emit])]
        return [tensor.clone() for tensor in tensors]
