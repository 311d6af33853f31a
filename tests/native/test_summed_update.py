# SPDX-License-Identifier: Apache-2.0
"""An update that takes checksums on its way gives the same bits, and the sums are those of a pass before and one after it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from offload import _native
from offload.device.arithmetic.checksums import SummedMemory
from offload.device.arithmetic.step_table import Place, Span, StepTable
from offload.tiers.verification import checksum, checksum_of_blocks
from tests.native.paths import simd_levels
from tests.native.test_step_table import ADAGRAD, ADAMW, FORMATS

pytestmark = pytest.mark.skipif(not _native.available(), reason="sums are the native library's")


def page_memory(nbytes: int) -> Tensor:
    """Whole pages and the begin of one, with something in them."""
    return torch.randint(0, 256, (-(-nbytes // 4096) * 4096 + 100,), dtype=torch.uint8)


class Taken:
    """Stands for a read: `sums` is what it was compared by."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def arrive(self) -> bool:
        return True

    def compare(self, sums: Tensor) -> None:
        self.sums = sums


def drawn_spans(draw: random.Random, numel: int) -> list[Span]:
    """Pieces as a chunk has them: each begins at a multiple of 64, with gaps."""
    spans, low = [], 0
    while low < numel and len(spans) < 5:
        high = min(numel, low + draw.choice([64, 1000, 4096, 20000, numel]))
        spans.append(Span(low, high, 64 * draw.randrange(4), len(spans)))
        low = -(-high // 64) * 64 + draw.choice([0, 64, 128])
    return spans


@pytest.mark.parametrize("level", simd_levels())
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.state_format.value}-{form.own_master}-{len(form.moments)}")
def test_sums_are_those_of_two_passes(form, level: str) -> None:
    _native.set_simd_level(level)
    hyper = ADAMW if len(form.moments) == 2 else ADAGRAD
    dtype = torch.bfloat16 if form.own_master else torch.float32
    for seed in range(12):
        torch.manual_seed(seed)
        draw = random.Random(seed)
        numel = draw.choice([64, 4096, 4096 + 512, 3 * 4096, 65536, 2 * 65536 + 4096, 100000 // 64 * 64])
        table = StepTable(form, numel, dtype, drawn_spans(draw, numel))
        record = page_memory(form.nbytes(numel))
        record[: form.nbytes(numel)] = 0
        values = torch.linspace(-1, 1, numel).to(dtype)
        gradient = torch.randn(numel).to(draw.choice([torch.float32, torch.bfloat16]))
        which = draw.choice([None, [0]])
        for step in (1, 2):
            numbers = [(hyper, step)] * (1 if which else len(table.low))
            plain_record, plain_values = record.clone(), values.clone()
            gradients = gradient if which is None else [gradient[: int(table._table.rows["numel"][0])]]
            memories = [record, values.view(torch.uint8), gradient.view(torch.uint8)]
            before = [checksum(one) for one in memories]
            readings = [Taken() for _ in memories]
            summed = [SummedMemory(one, reading, stored=True) for one, reading in zip(memories, readings, strict=True)]
            table.update(which, Place(record, values), gradients, numbers, 0.5, summed)
            table.update(which, Place(plain_record, plain_values), gradients, numbers, 0.5)
            assert torch.equal(record, plain_record)
            assert torch.equal(values.view(torch.uint8), plain_values.view(torch.uint8))
            for memory, one, reading, expected in zip(memories, summed, readings, before, strict=True):
                one.compare()
                assert reading.sums is not None and one.after is not None
                assert checksum_of_blocks(reading.sums, memory.numel()) == expected
                assert checksum_of_blocks(one.after, memory.numel()) == checksum(memory)
    assert before[0] != checksum(memories[0])


def test_what_cannot_be_summed_is_refused() -> None:
    for memory in (_native.SummedMemory(0, 1, 0, 0), _native.SummedMemory(1, -1, 0, 0)):
        with pytest.raises(OSError, match="with checksums"):
            _native.update_rows(0, 0, [memory])
