# SPDX-License-Identifier: Apache-2.0
"""The source of the CUDA kernels gives the CPU kernels' bits, run on the host."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload.device.arithmetic import kernels
from offload.device.arithmetic.compiled_kernels import ADAM_PIECES_MOST, INGEST_PIECES_MOST, DeviceKernels
from offload.device.arithmetic.ingest_table import IngestTable
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import StateFormat
from offload.device.arithmetic.step_table import JoinedTable, Place, Span, StepTable
from tests.device.host_kernels import HostLauncher, host_kernels, launched_by
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
    with launched_by(host_kernels()):
        update([ours.segment(hyper, step, factor)])
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
    with launched_by(host_kernels()):
        kernels.ingest_async(ours, src, start, accumulate, sums)
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
    with launched_by(host_kernels()):
        kernels.ingest_async(values, values, 0, False, sums)
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


class Counted(HostLauncher):
    """`names`: of what was launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __call__(self, name: str, block_count: int, parameter: bytes) -> None:
        self.names.append(name)
        super().__call__(name, block_count, parameter)


def test_adam_of_many_pieces() -> None:
    """More than one launch takes, of several sizes, dtypes and numbers: those of one dtype together."""
    hypers, numels = [HYPER, adam(1e-2, 0.4, 0.99, 1e-6, 0.0, False)], [1, 1023, 1024, 1025, 4097, 64, 3000]
    made = [
        [
            Case(numels[number % 7] if number else 0, number, grad=DTYPES[number % 2], emit=None, specials=True)
            for number in range(2 * ADAM_PIECES_MOST + 9)
        ]
        for _ in range(2)
    ]
    expected, ours = ([one.segment(hypers[k % 3 % 2], 1 + k % 4, 0.3) for k, one in enumerate(cases)] for cases in made)
    for one in expected:
        update([one])
    launcher = Counted()
    with launched_by(DeviceKernels(launcher)):
        update(ours)
    assert sorted(launcher.names) == 2 * ["offload_adam_pieces_0_3"] + 2 * ["offload_adam_pieces_1_3"]
    for case, other in zip(*made, strict=True):
        for result, wanted in zip(case.results(), other.results(), strict=True):
            assert exact.same_bits(result, wanted)


def test_ingest_of_many_pieces() -> None:
    """More than one launch takes, of several sizes and dtypes, some with a place to go to: those alike together."""
    generator = torch.Generator().manual_seed(4)
    numels = [1, 64, 4096, 4097, 9000, 0, 200]
    parts = []
    for number in range(3 * INGEST_PIECES_MOST):
        src = exact.rough_values(numels[number % 7], generator, specials=True).to(DTYPES[number % 2])
        dst = torch.full((src.numel(),), 7.0, dtype=torch.bfloat16) if number % 2 else None
        parts.append((dst, src, 64 * (number * 37 % 200)))
    ours = [(None if dst is None else dst.clone(), src, start) for dst, src, start in parts]
    expected = [kernels.ingest_async(dst, src, start, False) for dst, src, start in parts]
    launcher = Counted()
    with launched_by(DeviceKernels(launcher)):
        found = kernels.ingest_all(ours)
    assert sorted(launcher.names) == 2 * ["offload_ingest_pieces_0_3"] + 2 * ["offload_ingest_pieces_1_1"]
    for one, other in zip(found, expected, strict=True):
        assert exact.same_bits(one, other)
    for (dst, _, _), (wanted, _, _) in zip(ours, parts, strict=True):
        assert dst is None or (wanted is not None and exact.same_bits(dst, wanted))


def test_a_table_of_gradients_is_one_launch() -> None:
    """For each dtype of theirs; also of some of them, in any order."""
    parts, position = [], 0
    for start, numel in ((128, 1000), (1152, 64), (1216, 0), (1216, 9000)):
        parts.append((start, numel, position))
        position += kernels.touched_block_count(start, numel)
    sums = [torch.full((position,), -1.0, dtype=torch.float64) for _ in range(2)]
    tables = [IngestTable(128, torch.bfloat16, parts, one) for one in sums]
    buffers = [torch.full((10_240,), 3.0, dtype=torch.bfloat16) for _ in range(2)]
    generator = torch.Generator().manual_seed(4)
    for which, dtypes in (([0, 1, 2, 3], 4 * [torch.bfloat16]), ([3, 0], DTYPES), ([1], DTYPES)):
        sources = [
            exact.rough_values(parts[at][1], generator, specials=True).to(k) for at, k in zip(which, dtypes, strict=False)
        ]
        launcher = Counted()
        with launched_by(DeviceKernels(launcher)):
            tables[0].ingest_some(buffers[0], sources, which)
            if len(which) == 4:
                tables[0].ingest(buffers[0], sources)
        tables[1].ingest_some(buffers[1], sources, which)
        assert len(launcher.names) == (2 if len(which) > 1 else 1)
        assert exact.same_bits(*buffers) and exact.same_bits(*sums)
    with launched_by(host_kernels()):
        for wrong in (sources[0][1:], sources[0].to("meta")):
            with pytest.raises(AssertionError):
                tables[0].ingest_some(buffers[0], [wrong], [1])
        with pytest.raises(AssertionError):
            tables[0].ingest_some(buffers[0][1:9000], sources, [1])


@pytest.mark.parametrize("own_master", [True, False])
def test_a_step_by_tables_is_one_launch(own_master: bool) -> None:
    """Of a chunk, and of several; with numbers that differ."""
    numel, form = 5120, RecordFormat(StateFormat.FP32, own_master=own_master)
    spans = [Span(0, 1000, 0, 7), Span(1024, 1024, 0, 8), Span(1024, 5120, 64, 9)]
    dtype = torch.bfloat16 if own_master else torch.float32
    generator = torch.Generator().manual_seed(4)
    others = adam(1e-2, 0.4, 0.99, 1e-6, 0.1, False)

    def places() -> list[Place]:
        return [
            Place(torch.zeros(form.nbytes(numel), dtype=torch.uint8), torch.linspace(-1, 1, numel).to(dtype)) for _ in range(2)
        ]

    both = [places(), places()]
    gradients = [exact.rough_values(numel, generator, specials=True).to(dtype) for _ in range(2)]
    numbers = [(HYPER, 1), (others, 3), (others, 3), (HYPER, 4), (HYPER, 4), (others, 2)]
    launcher = Counted()
    for place, context in zip(both, (nullcontext(), launched_by(DeviceKernels(launcher))), strict=True):
        with context:
            tables = [StepTable(form, numel, dtype, spans) for _ in place]
            joined = JoinedTable(list(zip(tables, place, strict=True)))
            joined.update_chunks(gradients, numbers, 0.3)
            joined.update([one[span.low : span.high] for one in gradients for span in spans], (HYPER, 5), -0.3)
            tables[0].update(None, place[0], gradients[0], (HYPER, 6), 1.0)
            tables[0].update([2, 0], place[0], gradients[0], [(HYPER, 7), (others, 7)], 1.0)
    assert len(launcher.names) == 4
    for (record, values, _), (wanted, own, _) in zip(*both, strict=True):
        assert exact.same_bits(record.view(torch.float32), wanted.view(torch.float32)) and exact.same_bits(values, own)


def test_a_table_that_no_kernel_is_for_is_refused() -> None:
    form, numel = RecordFormat(StateFormat.FP32), 64
    record, values = torch.zeros(form.nbytes(numel), dtype=torch.uint8), torch.zeros(numel, dtype=torch.bfloat16)
    with launched_by(host_kernels()):
        table = StepTable(form, numel, values.dtype, [Span(0, numel, 0, 7)])
        with pytest.raises(AssertionError, match="Adam with fp32 states"):
            table.update(None, Place(record, values), values.clone(), (Hyper(Rule.LION, 0.1, 0.9, 0.99), 1), 1.0)
    with pytest.raises(AssertionError, match="no compiled kernels for cuda:7"):
        StepTable(form, numel, values.dtype, [Span(0, numel, 0, 7)], torch.device("cuda", 7))


def test_numbers_that_are_equal_and_not_the_same() -> None:
    """What is kept of a step's numbers is known by their bits: of a learning rate of -0 a weight of -0 becomes another zero."""
    found = []
    for lr in (0.0, -0.0):
        expected, ours = (Case(65, 5, grad=torch.float32, emit=None, specials=False) for _ in range(2))
        for one in (expected, ours):
            one.master.fill_(-0.0)
        hyper = adam(lr, 0.9, 0.999, 1e-8, 0.0, True)
        update([expected.segment(hyper, 1, 1.0)])
        with launched_by(host_kernels()):
            update([ours.segment(hyper, 1, 1.0)])
        for one, other in zip(ours.results(), expected.results(), strict=True):
            assert exact.same_bits(one, other)
        found.append(ours.master)
    assert not exact.same_bits(*found)


def test_a_launch_of_nothing_is_no_launch() -> None:
    def launch(*_: object) -> None:
        raise AssertionError("launched")

    empty = torch.empty(0)
    with launched_by(DeviceKernels(launch)):
        kernels.convert(empty.bfloat16(), empty)
        update([segment(empty, empty, empty, empty, None, HYPER, 1)])
        kernels.ingest_async(None, empty, 0, False)
        assert [one.numel() for one in kernels.ingest_all([(None, empty, 0)])] == [0]
