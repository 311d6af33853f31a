# SPDX-License-Identifier: Apache-2.0
"""Lion, Adagrad and SGD: against exact arithmetic, and against the optimizers that users know, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import offload
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import Segment
from offload.model.optimizer_kinds import hyper_of_group
from tests.native import exact

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.05, "eps": 1e-6}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.05, "maximize": True}),
    (offload.Lion, {"lr": 0.01}),
    (offload.Lion, {"lr": 0.01, "weight_decay": 0.3, "betas": (0.95, 0.98), "maximize": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda one: one.__name__ if isinstance(one, type) else str(one))
def test_the_bits_of_the_optimizer_that_users_know(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Moments bitwise; weights too, but for torch's square root, which is not always the nearest. With weight decay as L2
    such a weight reaches the moments."""
    numel, generator = 20_011, torch.Generator().manual_seed(1)
    switches = {} if kind is offload.Lion else {"foreach": False}
    parameter = torch.nn.Parameter(torch.randn(numel, generator=generator))
    optimizer: Any = kind([parameter], **options, **switches)  # type: ignore[arg-type]
    first = torch.full((numel,), options.get("initial_accumulator_value", 0.0))
    arrays = {"master": parameter.detach().clone(), "exp_avg": torch.zeros(numel), "exp_avg_sq": first}
    for step in range(1, 13):
        parameter.grad = exact.rough_values(numel, generator, specials=False).clamp(-1e3, 1e3)
        optimizer.step()
        update([Segment(parameter.grad, arrays, None, hyper_of_group(optimizer, optimizer.param_groups[0]), step)])
    names = {"exp_avg": "exp_avg", "momentum_buffer": "exp_avg", "exp_avg_sq": "exp_avg_sq", "sum": "exp_avg_sq"}
    has_root = kind not in (torch.optim.SGD, offload.Lion)
    for name, value in optimizer.state[parameter].items():
        if name in names and value is not None:
            ours = arrays[names[name]]
            assert exact.same_bits(ours, value) or (has_root and "weight_decay" in options), name
            torch.testing.assert_close(ours, value, rtol=1e-6, atol=1e-6)
    assert has_root or exact.same_bits(arrays["master"], parameter.detach())
    torch.testing.assert_close(arrays["master"], parameter.detach(), rtol=1e-6, atol=1e-6)


def _element(hyper: Hyper, step: int, factor: float, g: float, p: float, m: float, v: float) -> tuple[float, float, float]:
    """(p, m, v) after one step, each operation rounded once."""
    f, fma = np.float32, exact.fma
    g32, p32, m32, v32 = f(g) * f(factor), f(p), f(m), f(v)
    if hyper.rule is not Rule.LION and hyper.weight_decay != 0:
        g32 = fma(p32, f(hyper.weight_decay), g32)
    if hyper.rule is Rule.LION:
        direction = fma(g32, f(1 - hyper.beta1), m32 * f(hyper.beta1))
        p32 = fma(np.sign(direction), f(-hyper.lr), p32 * f(1 - hyper.lr * hyper.weight_decay))
        m32 = fma(g32, f(1 - hyper.beta2), m32 * f(hyper.beta2))
    elif hyper.rule is Rule.ADAGRAD:
        v32 = fma(g32, g32, v32)
        p32 = p32 + (f(-(hyper.lr / (1 + (step - 1) * hyper.lr_decay))) * g32) / (exact.sqrt(v32) + f(hyper.eps))
    else:
        if hyper.beta1 != 0:
            m32 = g32 if step == 1 else fma(g32, f(1 - hyper.beta2), m32 * f(hyper.beta1))
            g32 = fma(m32, f(hyper.beta1), g32) if hyper.nesterov else m32
        p32 = fma(g32, f(-hyper.lr), p32)
    return float(p32), float(m32), float(v32)


@pytest.mark.parametrize(
    ("hyper", "step"),
    [
        (Hyper(Rule.LION, 1e-2, 0.9, 0.99, weight_decay=0.1), 3),
        (Hyper(Rule.ADAGRAD, 1e-2, eps=1e-10, weight_decay=0.05, lr_decay=0.1), 3),
        (Hyper(Rule.SGD, 1e-2, weight_decay=0.05), 3),
        (Hyper(Rule.SGD, 1e-2, 0.9, 0.2, weight_decay=0.05), 1),
        (Hyper(Rule.SGD, 1e-2, 0.9, 0.2), 3),
        (Hyper(Rule.SGD, 1e-2, 0.9, weight_decay=0.05, nesterov=True), 3),
    ],
    ids=lambda one: one.rule.value if isinstance(one, Hyper) else str(one),
)
def test_every_operation_is_rounded_once(hyper: Hyper, step: int) -> None:
    generator = torch.Generator().manual_seed(3)
    g, p, m = (exact.rough_values(300, generator, specials=False) for _ in range(3))
    v = exact.rough_values(300, generator, specials=False).abs()
    expected = [_element(hyper, step, 0.37, *one) for one in zip(*(x.tolist() for x in (g, p, m, v)), strict=True)]
    update([Segment(g, {"master": p, "exp_avg": m, "exp_avg_sq": v}, None, hyper, step, 0.37)])
    for ours, column in zip((p, m, v), zip(*expected, strict=True), strict=True):
        assert exact.same_bits(ours, torch.tensor(column))


def test_what_a_rule_has_no_moment_for_is_left_alone() -> None:
    for hyper in (Hyper(Rule.LION, 0.1), Hyper(Rule.ADAGRAD, 0.1), Hyper(Rule.SGD, 0.1), Hyper(Rule.SGD, 0.1, 0.9)):
        arrays = {name: torch.full((100,), 7.0) for name in ("master", "exp_avg", "exp_avg_sq")}
        update([Segment(torch.ones(100), arrays, None, hyper, 2)])
        untouched = {name for name, array in arrays.items() if bool((array == 7.0).all())}
        assert untouched == {"exp_avg", "exp_avg_sq"} - set(hyper.moments)
