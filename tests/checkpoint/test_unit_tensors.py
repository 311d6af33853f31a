# SPDX-License-Identifier: Apache-2.0
"""Where bytes lie in the file of a unit: as the chunks lie in stores, at places where blocks can be shared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, strategies as st

from offload.checkpoint.format.manifest import VALUE
from offload.checkpoint.format.tensor_file import lay_out
from offload.checkpoint.format.unit_tensors import UnitTensors, tensor_name
from offload.device.arithmetic.records import MOMENTS, RecordFormat
from offload.device.arithmetic.segment import MASTER, StateFormat
from offload.layout import BLOCK, EXTENT_ALIGN, Layout, ParameterSpec, build_layout
from offload.model.chunk import Chunk

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "u8": torch.uint8}
NUMELS = st.one_of(st.integers(0, 300), st.integers(1, 5 * BLOCK), st.sampled_from([64, BLOCK, 2 * BLOCK, 3 * BLOCK + 1]))


@dataclass(eq=False)
class FakeFlat:
    layout: Any
    parameters: list[Any]

    @property
    def chunks(self) -> list[Any]:
        infos = {info.index: info for info in self.parameters}
        cut = {chunk: self.layout.pieces(chunk) for chunk in self.layout.chunks}
        return [Chunk(self, chunk, tuple((infos[one.slot.parameter_index], one) for one in cut[chunk])) for chunk in cut]


def unit_of(layout: Layout, specs: list[ParameterSpec]) -> Any:
    """What of a unit can be known without memory."""
    infos = {
        spec.index: SimpleNamespace(
            index=spec.index, fqn=f"p{spec.index}", numel=spec.numel, shape=torch.Size([spec.numel]), stride=(1,),
            dtype=DTYPES[spec.dtype], trainable=spec.trainable,
        )
        for spec in specs
    }  # fmt: skip
    flats = [FakeFlat(one, [infos[slot.parameter_index] for slot in one.slots]) for one in layout.units[0].flats]
    return SimpleNamespace(index=0, flats=flats, parameters=list(infos.values()))


@st.composite
def units(draw: st.DrawFn) -> tuple[Any, tuple[str, ...]]:
    specs = []
    for index in range(draw(st.integers(1, 6))):
        trainable = draw(st.booleans())
        dtype = draw(st.sampled_from(["fp32", "bf16"] if trainable else sorted(DTYPES)))
        specs.append(ParameterSpec(index, draw(NUMELS), dtype, DTYPES[dtype].itemsize, trainable, draw(st.integers(0, 1))))
    world_size = draw(st.integers(1, 3))
    layout = build_layout(
        [("unit", specs)],
        world_size=world_size,
        rank=draw(st.integers(0, world_size - 1)),
        stage=draw(st.sampled_from([0, 1, 3])),
        chunk_numel=draw(st.sampled_from([BLOCK, 2 * BLOCK])),
    )
    return unit_of(layout, specs), draw(st.sampled_from([MOMENTS, MOMENTS[:1], ()]))


@given(units())
def test_chunks_lie_as_in_stores(drawn: tuple[Any, tuple[str, ...]]) -> None:
    unit, moments = drawn
    tensors = UnitTensors(unit, moments)
    header, offsets = lay_out(list(tensors.specs.values()))
    covered = []
    for flat in unit.flats:
        for chunk in flat.chunks:
            for kind in tensors.arrays_of(chunk):
                name, place = tensors.place(chunk, kind)
                begin = offsets[name] + place
                itemsize = tensors.specs[name].dtype.itemsize
                assert begin % EXTENT_ALIGN == 0 and chunk.numel * itemsize % EXTENT_ALIGN == 0
                covered.append((begin, begin + chunk.numel * itemsize))
                # Every element of every slot, and of every gap, is where it is in the chunk.
                there = 0
                for info, piece in chunk.pieces:
                    of_slot = offsets[tensor_name(info, kind)] - tensors.owned[info.index].start * itemsize
                    place_in_chunk = (piece.start - chunk.start) * itemsize
                    assert of_slot + (piece.start - piece.slot.start) * itemsize == begin + place_in_chunk
                    there += piece.numel
                for gap in tensors.gaps(chunk, kind):
                    assert offsets[gap.name] + gap.start_nbytes == begin + gap.low * itemsize
                    assert gap.nbytes == (gap.high - gap.low) * itemsize
                    there += gap.high - gap.low
                assert there == chunk.numel
    # Chunks are all that is in the file.
    position = len(header)
    for begin, end in sorted(covered):
        assert begin == position
        position = end
    assert position == len(header) + sum(spec.nbytes for spec in tensors.specs.values())
    assert {info.index for info in tensors.infos} == set(tensors.owned)
    assert all(math.prod(spec.shape) for spec in tensors.padding)


@given(st.integers(1, 64), st.sampled_from([MOMENTS, MOMENTS[:1], ()]), st.booleans())
def test_arrays_of_raw_records_are_aligned(blocks: int, moments: tuple[str, ...], own_master: bool) -> None:
    """As far as they can be shared, they begin and end at a multiple of 4096 bytes in their extent."""
    start = 0
    for name, dtype, numel in RecordFormat(StateFormat.FP32, moments, own_master).arrays(blocks * BLOCK):
        assert name in (MASTER, *MOMENTS) and name != VALUE
        assert start % EXTENT_ALIGN == 0 and numel * dtype.itemsize % EXTENT_ALIGN == 0
        start += numel * dtype.itemsize
