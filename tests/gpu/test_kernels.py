# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the compiled kernels, and the torch operations in their place, give the CPU kernels' bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from offload.device.arithmetic import compiled_kernels, kernels
from offload.device.arithmetic.ingest_table import IngestTable
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.segment import StateFormat
from offload.device.arithmetic.step_table import JoinedTable, Place, Span, StepTable
from tests.device.kernel_files import no_kernels_loaded
from tests.native import exact
from tests.native.adam_cases import Case, adam

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMEL = 300_017


@pytest.fixture(params=["compiled", "torch operations"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    no_kernels_loaded(monkeypatch)
    device = torch.device("cuda", torch.cuda.current_device())
    if request.param == "compiled":
        compiled_kernels.prepare(device)
        assert compiled_kernels.of(device) is not None, "the kernels did not load"
    yield request.param


def copied_over(case: Case, shift: int = 0) -> Case:
    """The same on the GPU, `shift` elements behind an address that four elements are read at at once."""
    copied = copy.copy(case)
    for name in ("grad", "master", "exp_avg", "exp_avg_sq", "emit"):
        tensor = getattr(case, name)
        if tensor is not None:
            room = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype, device="cuda")
            room[shift:] = tensor.cuda()
            setattr(copied, name, room[shift:])
    return copied


@pytest.mark.parametrize("emit", [None, *DTYPES])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(form: str, grad: torch.dtype, emit: torch.dtype | None, decoupled: bool) -> None:
    hyper = adam(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled)
    case = Case(NUMEL, 7, grad=grad, emit=emit, specials=True)
    on_gpu = copied_over(case)
    update([case.segment(hyper, 3, 0.3)])
    update([on_gpu.segment(hyper, 3, 0.3)])
    for ours, expected in zip(on_gpu.results(), case.results(), strict=True):
        assert exact.same_bits(ours.cpu(), expected)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("target", [None, *DTYPES])
@pytest.mark.parametrize("source", DTYPES)
def test_ingest(form: str, source: torch.dtype, target: torch.dtype | None, accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    src = exact.rough_values(NUMEL, generator, specials=True).to(source)
    dst = None if target is None else exact.rough_values(NUMEL, generator, specials=True).to(target)
    on_gpu = None if dst is None else dst.cuda()
    add = accumulate and dst is not None
    expected = kernels.ingest_async(dst, src, 4032, add)
    ours = kernels.ingest_async(on_gpu, src.cuda(), 4032, add)
    assert exact.same_bits(ours.cpu(), expected)
    if dst is not None and on_gpu is not None:
        assert exact.same_bits(on_gpu.cpu(), dst)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_convert(form: str, source: torch.dtype, target: torch.dtype) -> None:
    src = exact.rough_values(NUMEL, torch.Generator().manual_seed(3), specials=True).to(source)
    expected, ours = torch.empty(NUMEL, dtype=target), torch.empty(NUMEL, dtype=target, device="cuda")
    kernels.convert(expected, src)
    kernels.convert(ours, src.cuda())
    assert exact.same_bits(ours.cpu(), expected)


@pytest.mark.parametrize("emit", [None, torch.bfloat16])
def test_adam_of_many_pieces(form: str, emit: torch.dtype | None) -> None:
    """More than a launch takes, of several sizes, gradients' dtypes, numbers and alignments."""
    hypers = [adam(1e-3, 0.9, 0.999, 1e-8, 0.1, True), adam(1e-2, 0.4, 0.99, 1e-6, 0.1, False)]
    numels = [1, 1023, 1024, 1025, 40_000, 64, 3001]
    cases = [
        Case(numels[number % 7], number, grad=DTYPES[number % 2], emit=emit, specials=True)
        for number in range(2 * compiled_kernels.ADAM_PIECES_MOST + 9)
    ]
    on_gpu = [copied_over(case, number % 3) for number, case in enumerate(cases)]
    for all_of_one in (cases, on_gpu):
        update([case.segment(hypers[number % 3 % 2], 1 + number % 4, 0.3) for number, case in enumerate(all_of_one)])
    for ours, expected in zip(on_gpu, cases, strict=True):
        for result, wanted in zip(ours.results(), expected.results(), strict=True):
            assert exact.same_bits(result.cpu(), wanted)


def test_ingest_of_many_pieces(form: str) -> None:
    """More than a launch takes, of several sizes and dtypes, some with a place to go to."""
    generator = torch.Generator().manual_seed(4)
    numels = [1, 64, 4096, 4097, 90_000, 0, 200]
    parts, ours = [], []
    for number in range(3 * compiled_kernels.INGEST_PIECES_MOST):
        src = exact.rough_values(numels[number % 7], generator, specials=True).to(DTYPES[number % 2])
        dst = torch.full((src.numel(),), 7.0, dtype=torch.bfloat16) if number % 2 else None
        start = 64 * (number * 37 % 200)
        parts.append((dst, src, start))
        ours.append((None if dst is None else dst.cuda(), src.cuda(), start))
    for found, expected in zip(kernels.ingest_all(ours), kernels.ingest_all(parts), strict=True):
        assert exact.same_bits(found.cpu(), expected)
    for (dst, _, _), (wanted, _, _) in zip(ours, parts, strict=True):
        assert dst is None or (wanted is not None and exact.same_bits(dst.cpu(), wanted))


def test_gradients_by_a_table(form: str) -> None:
    """Of a chunk: all of them, and some in another order and of several dtypes."""
    parts, position = [], 0
    for start, numel in ((128, 1000), (1152, 64), (1216, 0), (1216, 90_000)):
        parts.append((start, numel, position))
        position += kernels.touched_block_count(start, numel)
    sums = [torch.full((position,), -1.0, dtype=torch.float64, device=device) for device in ("cpu", "cuda")]
    buffers = [torch.full((91_216,), 3.0, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda")]
    tables = [IngestTable(128, torch.bfloat16, parts, one) for one in sums]
    generator = torch.Generator().manual_seed(4)
    sources = [exact.rough_values(numel, generator, specials=True).bfloat16() for _, numel, _ in parts]
    tables[0].ingest(buffers[0], sources)
    tables[1].ingest(buffers[1], [one.cuda() for one in sources])
    assert exact.same_bits(buffers[1].cpu(), buffers[0]) and exact.same_bits(sums[1].cpu(), sums[0])
    some = [
        exact.rough_values(parts[at][1], generator, specials=True).to(dtype) for at, dtype in ((3, DTYPES[0]), (0, DTYPES[2]))
    ]
    tables[0].ingest_some(buffers[0], some, [3, 0])
    tables[1].ingest_some(buffers[1], [one.cuda() for one in some], [3, 0])
    assert exact.same_bits(buffers[1].cpu(), buffers[0]) and exact.same_bits(sums[1].cpu(), sums[0])


@pytest.mark.parametrize("form", ["compiled"], indirect=True)
@pytest.mark.parametrize("own_master", [True, False])
def test_a_step_by_tables(form: str, own_master: bool) -> None:
    """Of a chunk, and of several; with numbers that differ."""
    numel, record_format = 91_136, RecordFormat(StateFormat.FP32, own_master=own_master)
    spans = [Span(0, 1000, 0, 7), Span(1024, 1024, 0, 8), Span(1024, numel, 64, 9)]
    dtype = torch.bfloat16 if own_master else torch.float32
    generator = torch.Generator().manual_seed(4)
    rough = [exact.rough_values(numel, generator, specials=True).to(dtype) for _ in range(2)]
    one, other = adam(1e-3, 0.9, 0.999, 1e-8, 0.1, True), adam(1e-2, 0.4, 0.99, 1e-6, 0.1, False)
    numbers = [(one, 1), (other, 3), (other, 3), (one, 4), (one, 4), (other, 2)]
    found = []
    for device in (torch.device("cpu"), torch.device("cuda", torch.cuda.current_device())):
        gradients = [gradient.to(device) for gradient in rough]
        records = [torch.zeros(record_format.nbytes(numel), dtype=torch.uint8, device=device) for _ in range(2)]
        values = [torch.linspace(-1, 1, numel).to(dtype).to(device) for _ in range(2)]
        tables = [StepTable(record_format, numel, dtype, spans, device) for _ in range(2)]
        joined = JoinedTable(list(zip(tables, map(Place, records, values), strict=True)))
        joined.update_chunks(gradients, numbers, 0.3)
        joined.update([gradient[span.low : span.high] for gradient in gradients for span in spans], (one, 5), -0.3)
        tables[0].update(None, Place(records[0], values[0]), gradients[0], (one, 6), 1.0)
        tables[0].update([2, 0], Place(records[0], values[0]), gradients[0], [(one, 7), (other, 7)], 1.0)
        found.append([tensor.cpu() for tensor in (*(record.view(torch.float32) for record in records), *values)])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert exact.same_bits(ours, expected)
