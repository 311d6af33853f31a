# SPDX-License-Identifier: Apache-2.0
"""The source of the CUDA kernels gives the CPU kernels' bits, run on the host."""

from __future__ import annotations

import copy
import math

import torch
from hypothesis import given, settings, strategies as st

from offload.device.arithmetic import compiled_kernels, kernels
from offload.device.arithmetic.optimizer_step import update
from tests.device.host_kernels import host_kernels
from tests.native import exact
from tests.native.adam_cases import HYPER, Case, adam, segment

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    numel=st.one_of(st.integers(1, 300), st.sampled_from([4096, 8197])),
    seed=st.integers(0, 2**31),
    grad=st.sampled_from(DTYPES),
    emit=st.sampled_from([None, *DTYPES]),
    decoupled=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    beta1=st.sampled_from([0.9, 0.5, 0.4, 0.0]),
    step=st.sampled_from([1, 2, 1000]),
    factor=st.sampled_from([1.0, 1 / 1024, 0.3]),
    at_odd_places=st.booleans(),
)
@settings(max_examples=60)
def test_adam(
    numel: int, seed: int, grad: torch.dtype, emit: torch.dtype | None, decoupled: bool, weight_decay: float,
    beta1: float, step: int, factor: float, at_odd_places: bool,
) -> None:  # fmt: skip
    hyper = adam(1e-3, beta1, 0.999, 1e-8, weight_decay, decoupled)
    expected = Case(numel, seed, grad=grad, emit=emit, specials=True)
    ours = copy.deepcopy(expected)
    if not at_odd_places:  # what torch's allocator gives lies on 64 bytes: the path of four elements at once
        for name in ("grad", "master", "exp_avg", "exp_avg_sq", "emit"):
            tensor = getattr(ours, name)
            setattr(ours, name, None if tensor is None else tensor.clone())
    update([expected.segment(hyper, step, factor)])
    host_kernels().adam(ours.segment(hyper, step, factor))
    for one, other in zip(ours.results(), expected.results(), strict=True):
        assert exact.same_bits(one, other)


@given(
    numel=st.one_of(st.integers(1, 300), st.sampled_from([4096, 8191, 40_001])),
    start=st.sampled_from([0, 64, 4032, 4096 * 3 + 64]),
    source=st.sampled_from(DTYPES),
    target=st.sampled_from([None, *DTYPES]),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_ingest(numel: int, start: int, source: torch.dtype, target: torch.dtype | None, accumulate: bool, seed: int) -> None:
    accumulate = accumulate and target is not None
    generator = torch.Generator().manual_seed(seed)
    src = exact.rough_values(numel, generator, specials=True).to(source)
    dst = None if target is None else exact.rough_values(numel, generator, specials=True).to(target)
    ours = None if dst is None else dst.clone()
    expected_sums = kernels.ingest_async(dst, src, start, accumulate)
    sums = torch.full_like(expected_sums, -1.0)
    host_kernels().ingest(ours, src, start % kernels.BLOCK_NUMEL, accumulate, sums)
    assert exact.same_bits(sums, expected_sums)
    if dst is not None and ours is not None:
        assert exact.same_bits(ours, dst)


def test_the_torch_form_has_no_order_of_its_own() -> None:
    values = exact.rough_values(2 * 4096, torch.Generator().manual_seed(2), specials=True).double().view(2, 128, 32)
    one, other = (kernels._added_in_order(values, by_rows=by_rows) for by_rows in (True, False))
    assert exact.same_bits(one, other)


def test_ingest_in_place() -> None:
    values = exact.rough_values(9000, torch.Generator().manual_seed(1), specials=True)
    before = values.clone()
    sums = torch.empty(3, dtype=torch.float64)
    host_kernels().ingest(values, values, 0, False, sums)
    assert exact.same_bits(values, before) and exact.same_bits(sums, kernels.ingest_async(None, before, 0, False))


def test_every_sixteen_bit_pattern_and_every_tie() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        halves = patterns.view(dtype)
        wide = torch.empty(halves.numel())
        host_kernels().convert(wide, halves)
        assert exact.same_bits(wide, halves.float())
        steps = halves[halves.isfinite()].double().sort().values
        ties = ((steps[1:] + steps[:-1]) / 2).float()
        up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
        for values in (wide, ties, ties.nextafter(up), ties.nextafter(down)):
            narrow, expected = torch.empty(values.numel(), dtype=dtype), torch.empty(values.numel(), dtype=dtype)
            host_kernels().convert(narrow, values)
            kernels.convert(expected, values)
            assert exact.same_bits(narrow, expected)


def test_numbers_that_are_equal_and_not_the_same() -> None:
    """What is kept of a step's numbers is known by their bits: of a learning rate of -0 a weight of -0 becomes another zero."""
    found = []
    for lr in (0.0, -0.0):
        expected, ours = (Case(65, 5, grad=torch.float32, emit=None, specials=False) for _ in range(2))
        for one in (expected, ours):
            one.master.fill_(-0.0)
        hyper = adam(lr, 0.9, 0.999, 1e-8, 0.0, True)
        update([expected.segment(hyper, 1, 1.0)])
        host_kernels().adam(ours.segment(hyper, 1, 1.0))
        for one, other in zip(ours.results(), expected.results(), strict=True):
            assert exact.same_bits(one, other)
        found.append(ours.master)
    assert not exact.same_bits(*found)


def test_a_launch_of_nothing_is_no_launch() -> None:
    def launch(*_: object) -> None:
        raise AssertionError("launched")

    empty = torch.empty(0)
    compiled_kernels.DeviceKernels(launch).convert(empty.bfloat16(), empty)
    compiled_kernels.DeviceKernels(launch).adam(segment(empty, empty, empty, empty, None, HYPER, 1))
