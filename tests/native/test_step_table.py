# SPDX-License-Identifier: Apache-2.0
"""The step of a chunk by its table gives the bits of a step piece by piece."""

from __future__ import annotations

import pytest
import torch

from offload import _native
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.rules import MOMENTS, Hyper, Rule
from offload.device.arithmetic.segment import MASTER, Segment, StateFormat
from offload.device.arithmetic.step_table import JoinedTable, Place, Span, StepTable

pytestmark = pytest.mark.skipif(not _native.available(), reason="the table is the native library's")

NUMEL = 4096 + 512
SPANS = [Span(0, 1000, 0, 7), Span(1024, 1024 + 64, 0, 8), Span(1152, 1152, 0, 9), Span(1216, NUMEL, 128, 10)]
ADAMW = Hyper(Rule.ADAM, 1e-2, 0.9, 0.99, 1e-8, 0.1, decoupled=True)
ADAGRAD = Hyper(Rule.ADAGRAD, 1e-2, eps=1e-10, lr_decay=0.1, maximize=True)
FORMATS = [
    RecordFormat(StateFormat.FP32),
    RecordFormat(StateFormat.FP32, own_master=False),
    RecordFormat(StateFormat.SPLIT),
    RecordFormat(StateFormat.BF16),
    RecordFormat(StateFormat.EIGHT_BIT),
    RecordFormat(StateFormat.FP32, moments=MOMENTS[1:]),
]


def by_segments(
    form: RecordFormat, which: list[int], record: torch.Tensor, values: torch.Tensor, gradients: list[torch.Tensor],
    numbers: list[tuple[Hyper, int]], factor: float,
) -> None:  # fmt: skip
    segments = []
    for position, gradient, (hyper, step) in zip(which, gradients, numbers, strict=True):
        span = SPANS[position]
        arrays, weights = form.over(record, NUMEL).part(span.low, span.high), values[span.low : span.high]
        own = form.state_format.is_split or form.own_master
        segments.append(
            Segment(
                gradient, arrays if own else {**arrays, MASTER: weights}, weights if own else None, hyper, step, factor,
                form.state_format, span.rounding_seed, span.first_index,
            )
        )  # fmt: skip
    update(segments)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.state_format.value}-{form.own_master}-{len(form.moments)}")
@pytest.mark.parametrize("which", [None, [0, 3]])
def test_same_bits_as_piece_by_piece(form: RecordFormat, which: list[int] | None) -> None:
    torch.manual_seed(0)
    hyper = ADAMW if len(form.moments) == 2 else ADAGRAD
    dtype = torch.bfloat16 if form.own_master else torch.float32
    records = [torch.zeros(form.nbytes(NUMEL) + 64, dtype=torch.uint8) for _ in range(2)]
    values = [torch.linspace(-1, 1, NUMEL).to(dtype) for _ in range(2)]
    table, positions = StepTable(form, NUMEL, dtype, SPANS), which or list(range(len(SPANS)))
    others = Hyper(**{name: getattr(hyper, name) for name in hyper.__slots__} | {"lr": 0.5})
    for step in (1, 2, 3):
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
        gradients = [torch.randn(SPANS[at].high - SPANS[at].low).to(kinds[at]) for at in positions]
        numbers = [(others if step == 3 and at == 3 else hyper, step + at % 2 * (step - 1)) for at in positions]
        table.update(which, Place(records[0], values[0]), gradients, numbers, 0.5)
        by_segments(form, positions, records[1], values[1], gradients, numbers, 0.5)
        assert torch.equal(records[0], records[1])
        assert torch.equal(values[0].view(torch.uint8), values[1].view(torch.uint8))
    assert values[0].isfinite().all() and not torch.equal(values[0], torch.linspace(-1, 1, NUMEL).to(dtype))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.state_format.value}-{form.own_master}-{len(form.moments)}")
def test_a_record_that_is_read_elsewhere_stays_as_it_is(form: RecordFormat) -> None:
    """And what is written is what a step in place gives, alone and with another chunk; a piece here is longer than what is
    brought over at a time."""
    torch.manual_seed(1)
    hyper = ADAMW if len(form.moments) == 2 else ADAGRAD
    dtype, numel = torch.bfloat16 if form.own_master else torch.float32, 3 * 4096 + 192
    spans = [Span(0, 1000, 0, 7), Span(1024, numel, 128, 10)]
    tables = [StepTable(form, numel, dtype, spans) for _ in range(4)]
    records = [torch.zeros(form.nbytes(numel), dtype=torch.uint8) for _ in range(6)]
    values = [torch.linspace(-1, 1, numel).to(dtype) for _ in range(4)]
    gradient = torch.randn(numel)
    for table, record, own in zip(tables, records, values, strict=False):
        table.update(None, Place(record, own), gradient, (hyper, 1), 0.5)
    before = records[0].clone()
    tables[0].update(None, Place(records[0], values[0]), gradient, (hyper, 2), 0.5)
    tables[1].update(None, Place(records[4], values[1], records[1]), gradient, (hyper, 2), 0.5)
    joined = JoinedTable([(tables[2], Place(records[5], values[2], records[2])), (tables[3], Place(records[3], values[3]))])
    joined.update_chunks([gradient, gradient], (hyper, 2), 0.5)
    assert torch.equal(records[1], before) and torch.equal(records[2], before) and not torch.equal(records[0], before)
    for record, own in ((records[4], values[1]), (records[5], values[2]), (records[3], values[3])):
        for name, array in form.over(record, numel).arrays.items():
            expected, scale = form.over(records[0], numel).arrays[name], 64 if name.endswith("_scale") else 1
            for span in spans:
                low, high = span.low // scale, -(-span.high // scale)
                assert torch.equal(array[low:high], expected[low:high]), name
        assert torch.equal(own.view(torch.uint8), values[0].view(torch.uint8))


def test_wrong_sizes_never_reach_native_code() -> None:
    form = FORMATS[0]
    table = StepTable(form, NUMEL, torch.bfloat16, SPANS[:1])
    record, values = torch.zeros(form.nbytes(NUMEL), dtype=torch.uint8), torch.zeros(NUMEL, dtype=torch.bfloat16)
    good, numbers = [torch.zeros(1000)], [(ADAMW, 1)]
    for arguments in (
        (Place(record[:-1], values), good, numbers),
        (Place(record, values[:-1]), good, numbers),
        (Place(record, values.float()), good, numbers),
        (Place(record, values, record[:-1]), good, numbers),
        (Place(record, values), [torch.zeros(999)], numbers),
        (Place(record, values), good, [(ADAMW, 0)]),
        (Place(record, values), [], []),
    ):
        with pytest.raises(AssertionError):
            table.update(None, *arguments, 1.0)
    table.update(None, Place(record, values), good, numbers, 1.0)
