# SPDX-License-Identifier: Apache-2.0
"""Adam: against exact arithmetic, against itself on every path, and against torch.optim."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload import _native
from offload.device.arithmetic.optimizer_step import update
from tests.native import exact
from tests.native.adam_cases import HYPER, Case, adam, segment
from tests.native.paths import simd_levels, torch_form

pytestmark = pytest.mark.skipif(not _native.available(), reason="the native library is not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
def test_every_operation_is_rounded_once(decoupled: bool, beta1: float) -> None:
    hyper = adam(lr=1e-2, beta1=beta1, beta2=0.95, eps=1e-8, weight_decay=0.05, decoupled=decoupled)
    scalars = {"lr": 1e-2, "beta1": beta1, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.05}
    scalars |= {"decoupled": decoupled, "factor": 0.37}
    case = Case(300, seed=7, grad=torch.float32, emit=None, specials=False)
    # Squares of very large gradients would overflow, where the oracle knows no infinity.
    before = [tensor.tolist() for tensor in (case.grad, *case.results())]
    update([case.segment(hyper, step=3, factor=0.37)])
    expected = [exact.adam_element(*element, scalars, 3) for element in zip(*before, strict=True)]
    for tensor, column in zip(case.results(), zip(*expected, strict=True), strict=True):
        assert exact.same_bits(tensor, torch.tensor(column))


@given(
    numel=st.one_of(st.integers(0, 100), st.sampled_from([4097, 8193, 33001])),
    seed=st.integers(0, 2**31),
    grad=st.sampled_from(DTYPES),
    emit=st.sampled_from([None, *DTYPES]),
    decoupled=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    beta1=st.sampled_from([0.9, 0.4, 0.0]),
    step=st.sampled_from([1, 2, 1000]),
    factor=st.sampled_from([1.0, 1 / 1024, 0.3]),
)
@settings(max_examples=40)
def test_the_same_bits_on_every_path(
    numel: int,
    seed: int,
    grad: torch.dtype,
    emit: torch.dtype | None,
    decoupled: bool,
    weight_decay: float,
    beta1: float,
    step: int,
    factor: float,
) -> None:
    hyper = adam(1e-3, beta1, 0.999, 1e-8, weight_decay, decoupled)
    start = Case(numel, seed, grad=grad, emit=emit, specials=True)

    def result() -> list[torch.Tensor]:
        case = copy.deepcopy(start)
        update([case.segment(hyper, step, factor)])
        return case.results()

    with torch_form():
        expected = result()
    for level, count in itertools.product(simd_levels(), (1, 3)):
        _native.set_simd_level(level)
        _native.set_thread_count(count)
        for ours, theirs in zip(result(), expected, strict=True):
            assert exact.same_bits(ours, theirs), (level, count)


def test_many_segments_in_one_call_are_as_one_by_one() -> None:
    numels = [1, 64, 768, 3, 100_000, 0, 65, 40_000]
    hypers = [adam(1e-3 * (i + 1), 0.9, 0.99, 1e-8, 0.01 * i, i % 2 == 0) for i in range(len(numels))]

    def cases() -> list[Case]:
        dtypes = itertools.cycle(DTYPES)
        return [Case(n, i, grad=next(dtypes), emit=DTYPES[i % 3], specials=False) for i, n in enumerate(numels)]

    together, alone = cases(), cases()
    update([case.segment(hypers[i], i + 1, 0.5) for i, case in enumerate(together)])
    for i, case in enumerate(alone):
        update([case.segment(hypers[i], i + 1, 0.5)])
    for a, b in zip(together, alone, strict=True):
        assert all(exact.same_bits(x, y) for x, y in zip(a.results(), b.results(), strict=True))


def test_a_flushing_caller_changes_nothing() -> None:
    ordinary, flushing = (Case(50_000, 11, grad=torch.bfloat16, emit=torch.bfloat16, specials=True) for _ in range(2))
    update([ordinary.segment(HYPER, 2, 1.0)])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        update([flushing.segment(HYPER, 2, 1.0)])
    finally:
        torch.set_flush_denormal(False)
    assert all(exact.same_bits(a, b) for a, b in zip(flushing.results(), ordinary.results(), strict=True))


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.999, 0.9999])
def test_bias_correction_is_right_to_double_rounding_at_step_10000(beta: float) -> None:
    step = 10_000
    power = Fraction(beta) ** step
    assert abs(Fraction(beta**step) - power) <= Fraction(math.ulp(float(power)))
    # One element with m = 1 and v = 0 before, no gradient: p moves by exactly lr / bc1 * beta1 / eps.
    hyper = adam(lr=1.0, beta1=beta, beta2=0.5, eps=1.0, weight_decay=0.0, decoupled=True)
    p, m, v = torch.zeros(1), torch.ones(1), torch.zeros(1)
    update([segment(torch.zeros(1), p, m, v, None, hyper, step)])
    expected = exact.float32_of(1 / (1 - power)) * np.float32(m.item())
    assert p.item() == -float(expected)


def _torch_adamw_with_ieee_sqrt(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int) -> None:
    """torch.optim.AdamW's single-tensor step, its operations and order, but for the square root."""
    p.mul_(1 - HYPER.lr * HYPER.weight_decay)
    m.lerp_(g, 1 - HYPER.beta1)
    v.mul_(HYPER.beta2).addcmul_(g, g, value=1 - HYPER.beta2)
    bias_correction1, bias_correction2 = 1 - HYPER.beta1**step, 1 - HYPER.beta2**step
    root = torch.from_numpy(np.sqrt(v.numpy()))
    p.addcdiv_(m, (root / bias_correction2**0.5).add_(HYPER.eps), value=-(HYPER.lr / bias_correction1))


def test_only_the_square_root_differs_from_torch() -> None:
    numel, generator = 50_000, torch.Generator().manual_seed(1)
    start = exact.rough_values(numel, generator, specials=False)
    p, m, v = start.clone(), torch.zeros(numel), torch.zeros(numel)
    p2, m2, v2 = start.clone(), torch.zeros(numel), torch.zeros(numel)
    for step in range(1, 51):
        gradient = exact.rough_values(numel, generator, specials=False)
        _torch_adamw_with_ieee_sqrt(p2, gradient, m2, v2, step)
        update([segment(gradient, p, m, v, None, HYPER, step)])
    assert exact.same_bits(p, p2)
    assert exact.same_bits(m, m2)
    assert exact.same_bits(v, v2)


def test_a_hundred_steps_beside_torch_adamw() -> None:
    """Moments bitwise equal; weights up to 1/2 in magnitude within 1e-7 (measured: 6.0e-8, one unit in the last place),
    because torch's vector library rounds some square roots the other way. Its fused AdamW differs by as much."""
    numel, generator = 1_000_000, torch.Generator().manual_seed(0)
    start = torch.rand(numel, generator=generator) - 0.5
    parameter = torch.nn.Parameter(start.clone())
    betas = (HYPER.beta1, HYPER.beta2)
    optimizer = torch.optim.AdamW([parameter], HYPER.lr, betas, HYPER.eps, HYPER.weight_decay, foreach=False)
    p, m, v = start.clone(), torch.zeros(numel), torch.zeros(numel)
    for step in range(1, 101):
        parameter.grad = torch.randn(numel, generator=generator) * 0.01
        optimizer.step()
        update([segment(parameter.grad, p, m, v, None, HYPER, step)])
    state = optimizer.state[parameter]
    assert exact.same_bits(m, state["exp_avg"])
    assert exact.same_bits(v, state["exp_avg_sq"])
    assert (p - parameter.detach()).abs().max().item() <= 1e-7
