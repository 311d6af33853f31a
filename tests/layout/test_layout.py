# SPDX-License-Identifier: Apache-2.0
"""The layout's invariants, for any model, world size and chunk size."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from offload.layout import (
    BLOCK,
    EXTENT_ALIGN,
    SLOT_ALIGN,
    ExtentAllocator,
    Layout,
    ParameterSpec,
    build_layout,
)

KINDS = [("float32", 4), ("bfloat16", 2), ("float16", 2)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[ParameterSpec]], Layout]:
    units: list[list[ParameterSpec]] = []
    index = 0
    for _ in range(draw(st.integers(1, 4))):
        specs, part = [], 0
        for _ in range(draw(st.integers(0, 6))):
            dtype, itemsize = draw(st.sampled_from(KINDS))
            numel = draw(st.integers(0, 3 * BLOCK))
            specs.append(ParameterSpec(index, numel, dtype, itemsize, draw(st.booleans()), draw(st.integers(0, 2)), part))
            index, part = index + 1, part + draw(st.sampled_from([0, 0, 1]))
        units.append(specs)
    world_size = draw(st.sampled_from([1, 2, 3, 8]))
    rank = draw(st.integers(0, world_size - 1))
    chunk_numel = BLOCK * draw(st.integers(1, 4))
    named = [(f"unit{number}", specs) for number, specs in enumerate(units)]
    return units, build_layout(named, world_size=world_size, rank=rank, chunk_numel=chunk_numel)


@given(layouts())
def test_every_parameter_has_one_slot(case: tuple[list[list[ParameterSpec]], Layout]) -> None:
    units, layout = case
    for specs, unit in zip(units, layout.units, strict=True):
        placed = {slot.parameter_index: slot.numel for flat in unit.flats for slot in flat.slots}
        assert placed == {spec.index: spec.numel for spec in specs}
        kinds = [(flat.dtype, flat.trainable) for flat in unit.flats]
        assert len(set(kinds)) == len(kinds)


@given(layouts())
def test_slots_are_disjoint_aligned_and_grouped(case: tuple[list[list[ParameterSpec]], Layout]) -> None:
    units, layout = case
    group = {spec.index: (spec.part_index, spec.group_index) for specs in units for spec in specs}
    for flat in layout.flats:
        end = 0
        for slot in flat.slots:
            assert slot.start % SLOT_ALIGN == 0 and slot.start >= end
            end = slot.stop
        assert end <= flat.numel
        groups = [group[slot.parameter_index] for slot in flat.slots]
        assert groups == sorted(groups), "slots of one optimizer group are contiguous in each part"


@given(layouts())
def test_a_part_is_laid_out_as_if_it_were_alone(case: tuple[list[list[ParameterSpec]], Layout]) -> None:
    """But for where it begins, which is where a block of the sums does: so joining changes no bit of a norm."""
    units, layout = case
    for specs, unit in zip(units, layout.units, strict=True):
        for part in {spec.part_index for spec in specs}:
            own = [spec for spec in specs if spec.part_index == part]
            (alone,) = build_layout([("part", own)], chunk_numel=layout.chunk_numel).units
            joined = {(flat.dtype, flat.trainable): flat for flat in unit.flats}
            for flat in alone.flats:
                within = {slot.parameter_index: slot.start for slot in joined[flat.dtype, flat.trainable].slots}
                begin = within[flat.slots[0].parameter_index]
                assert begin % BLOCK == 0
                assert [slot.start for slot in flat.slots] == [within[slot.parameter_index] - begin for slot in flat.slots]


@given(layouts())
def test_chunks_cover_the_shard_on_block_boundaries(case: tuple[list[list[ParameterSpec]], Layout]) -> None:
    _, layout = case
    for flat in layout.flats:
        assert flat.numel % (BLOCK * layout.world_size) == 0
        assert flat.shard.numel * layout.world_size == flat.numel
        position = flat.shard.start
        for number, chunk in enumerate(flat.chunks):
            assert chunk.index == number and chunk.start == position and 0 < chunk.numel <= layout.chunk_numel
            assert chunk.start % BLOCK == 0 and chunk.numel % BLOCK == 0
            position = chunk.stop
        assert position == flat.shard.start + flat.shard.numel


@given(layouts())
def test_pieces_are_the_slots_cut_to_chunks(case: tuple[list[list[ParameterSpec]], Layout]) -> None:
    _, layout = case
    for flat in layout.flats:
        shard_start, shard_stop = flat.shard.start, flat.shard.start + flat.shard.numel
        found: dict[int, int] = {}
        for chunk in flat.chunks:
            for piece in flat.pieces(chunk):
                assert chunk.start <= piece.start < piece.stop <= chunk.stop
                assert piece.slot.start <= piece.start and piece.stop <= piece.slot.stop
                found[piece.slot.parameter_index] = found.get(piece.slot.parameter_index, 0) + piece.numel
        for slot in flat.slots:
            inside = max(0, min(slot.stop, shard_stop) - max(slot.start, shard_start))
            assert found.get(slot.parameter_index, 0) == inside


@given(layouts())
def test_shards_of_all_ranks_partition_the_flat(case: tuple[list[list[ParameterSpec]], Layout]) -> None:
    units, layout = case
    named = [(f"unit{number}", specs) for number, specs in enumerate(units)]
    ranks = [
        build_layout(named, world_size=layout.world_size, rank=rank, chunk_numel=layout.chunk_numel)
        for rank in range(layout.world_size)
    ]
    for flats in zip(*(list(one.flats) for one in ranks), strict=True):
        assert [flat.shard.start for flat in flats] == [rank * flats[0].shard.numel for rank in range(len(flats))]
        assert len({flat.numel for flat in flats}) == 1


@given(st.lists(st.integers(1, 10**7), max_size=20))
def test_extents_are_aligned_and_consecutive(sizes: list[int]) -> None:
    allocator = ExtentAllocator()
    end = 0
    for nbytes in sizes:
        extent = allocator.take(nbytes)
        assert extent.offset_nbytes == end and extent.nbytes >= nbytes and extent.nbytes - nbytes < EXTENT_ALIGN
        assert extent.offset_nbytes % EXTENT_ALIGN == 0 and extent.nbytes % EXTENT_ALIGN == 0
        end += extent.nbytes
    assert allocator.total_nbytes == end


@pytest.mark.parametrize(("chunk_numel", "rank"), [(0, 0), (BLOCK + 1, 0), (BLOCK, 1)])
def test_impossible_layouts_are_refused(chunk_numel: int, rank: int) -> None:
    with pytest.raises(AssertionError):
        build_layout([("unit", [])], chunk_numel=chunk_numel, rank=rank)
