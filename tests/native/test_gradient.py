# SPDX-License-Identifier: Apache-2.0
"""Gradient ingest and casts: against their definition, on every path."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload import _native
from offload.device.arithmetic import kernels
from offload.device.arithmetic.ingest_table import IngestTable
from tests.native import exact
from tests.native.paths import simd_levels, torch_form

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sums_of(dst: torch.Tensor | None, src: torch.Tensor, start: int, accumulate: bool) -> list[float]:
    sums: list[float] = kernels.ingest_async(dst, src, start, accumulate).tolist()
    return sums


def _odd_place(values: torch.Tensor, at: int) -> torch.Tensor:
    base = torch.zeros(values.numel() + 32, dtype=values.dtype)
    base[at : at + values.numel()] = values
    return base[at : at + values.numel()]


@given(
    numel=st.one_of(st.integers(1, 200), st.sampled_from([4096, 4159, 9000])),
    start=st.sampled_from([0, 64, 4032, 4096, 5 * 4096 + 128]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_sums_are_what_the_definition_says(numel: int, start: int, dtype: torch.dtype, seed: int) -> None:
    values = exact.rough_values(numel, torch.Generator().manual_seed(seed), specials=False).to(dtype)
    expected = exact.block_sums(values.float().numpy(), start)
    assert np.array_equal(np.array(sums_of(None, values, start, False)), expected, equal_nan=True)
    with torch_form():
        assert np.array_equal(np.array(sums_of(None, values, start, False)), expected, equal_nan=True)


@given(
    numel=st.one_of(st.integers(0, 200), st.sampled_from([4096, 8191, 70_001])),
    start=st.sampled_from([0, 64, 4032, 4096 * 3 + 64]),
    source=st.sampled_from(DTYPES),
    target=st.sampled_from([None, *DTYPES]),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=50)
def test_the_same_bits_on_every_path(
    numel: int, start: int, source: torch.dtype, target: torch.dtype | None, accumulate: bool, seed: int
) -> None:
    accumulate = accumulate and target is not None

    def result() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        src = _odd_place(exact.rough_values(numel, generator, specials=True).to(source), seed % 7)
        dst = None
        if target is not None:
            dst = _odd_place(exact.rough_values(numel, generator, specials=True).to(target), seed % 5)
        sums = kernels.ingest_async(dst, src, start, accumulate)
        return torch.zeros(0) if dst is None else dst.clone(), sums

    with torch_form():
        expected = result()
    for level, count in itertools.product(simd_levels(), (1, 3)):
        _native.set_simd_level(level)
        _native.set_thread_count(count)
        ours = result()
        assert exact.same_bits(ours[0], expected[0]), (level, count)
        assert exact.same_bits(ours[1], expected[1]), (level, count)


@given(
    numels=st.lists(st.one_of(st.integers(1, 200), st.sampled_from([4096, 9000])), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_side_by_side_they_are_stored_as_each_alone(numels: list[int], dtype: torch.dtype, seed: int) -> None:
    """With gaps before, between and after; what lies in the gaps stays."""
    generator = torch.Generator().manual_seed(seed)
    first_index = 64 * int(torch.randint(0, 200, (1,), generator=generator))
    start, position, parts = first_index + 64, 0, []
    for numel in numels:
        parts.append((start, exact.rough_values(numel, generator, specials=True).to(dtype), position))
        position += kernels.touched_block_count(start, numel)
        start += (numel + 63) // 64 * 64 + 64

    def stored(together: bool) -> tuple[torch.Tensor, torch.Tensor]:
        dst, sums = torch.full((start - first_index,), 7.0, dtype=dtype), torch.full((position + 3,), 7.0, dtype=torch.float64)
        if together:
            table = IngestTable(first_index, dtype, [(begin, src.numel(), at) for begin, src, at in parts], sums)
            table.ingest(dst, [src for _, src, _ in parts])
            return dst, sums
        for begin, src, at in parts:
            low, count = begin - first_index, kernels.touched_block_count(begin, src.numel())
            kernels.ingest_async(dst[low : low + src.numel()], src, begin, False, sums[at : at + count])
        return dst, sums

    alone, together = stored(False), stored(True)
    with torch_form():
        as_torch = stored(True)
    for one in (together, as_torch):
        assert exact.same_bits(one[0], alone[0]) and exact.same_bits(one[1], alone[1])


@pytest.mark.parametrize(
    ("start", "numel", "given", "position", "said"),
    [
        (100, 64, 64, 0, "begin at multiples"),
        (0, 64, 64, 0, "begin at multiples"),
        (192, 100, 100, 0, "a buffer of"),
        (64, 64, 64, 2, "sums must be"),
        (64, 64, 65, 0, "gradients of"),
    ],
)
def test_what_has_no_place_is_not_stored(start: int, numel: int, given: int, position: int, said: str) -> None:
    dst, sums = torch.zeros(192), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match=said):
        IngestTable(64, dst.dtype, [(start, numel, position)], sums).ingest(dst, [torch.ones(given)])
    assert not dst.any() and not sums.any()


def test_a_gradient_cut_in_pieces_has_the_sums_of_the_whole_blocks() -> None:
    values = torch.randn(5 * 4096, generator=torch.Generator().manual_seed(3))
    whole = sums_of(None, values, 0, False)
    first, second = sums_of(None, values[:8192], 0, False), sums_of(None, values[8192:], 8192, False)
    assert whole == first + second


def test_accumulation_adds_in_float32_and_rounds_once() -> None:
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(4)
        a, b = (torch.randn(1000, generator=generator).to(dtype) for _ in range(2))
        expected = (a.float() + b.float()).to(dtype)
        kernels.ingest_async(a, b, 0, True)
        assert exact.same_bits(a, expected)


def test_a_sum_is_finite_exactly_if_every_element_is() -> None:
    values = torch.full((3 * 4096,), 3.4e38)
    assert all(math.isfinite(block) for block in sums_of(None, values, 0, False))
    for bad in (math.inf, -math.inf, math.nan):
        values[5000] = bad
        finite = [math.isfinite(block) for block in sums_of(None, values, 0, False)]
        assert finite == [True, False, True]


@pytest.mark.parametrize("level", [None, *simd_levels()])
def test_every_sixteen_bit_pattern_survives_widening_and_narrowing(level: str | None) -> None:
    if _native.available():
        _native.set_simd_level(level)
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype, canonical in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        halves = patterns.view(dtype)
        wide, back = torch.empty(halves.numel()), torch.empty_like(halves)
        kernels.convert(wide, halves)
        assert exact.same_bits(wide, halves.float())
        kernels.convert(back, wide)
        is_nan = halves.isnan()
        assert exact.same_bits(back[~is_nan], halves[~is_nan])
        assert bool((back.view(torch.int16)[is_nan] == canonical).all())


@pytest.mark.parametrize("level", [None, *simd_levels()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even_around_every_tie(level: str | None, dtype: torch.dtype) -> None:
    if _native.available():
        _native.set_simd_level(level)
    halves = torch.arange(0, 0x7C00 if dtype == torch.float16 else 0x7F80, dtype=torch.int16).view(dtype)
    lower = halves.double()
    upper = torch.cat([lower[1:], lower[-1:] * 2])
    ties = ((lower + upper) / 2).float()
    for values in (ties, ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(0.0)), -ties):
        narrowed = torch.empty(values.numel(), dtype=dtype)
        kernels.convert(narrowed, values)
        assert exact.same_bits(narrowed, values.to(dtype))


def test_convert_between_sixteen_bit_types_goes_through_float32() -> None:
    halves = exact.rough_values(10_000, torch.Generator().manual_seed(8), specials=False).bfloat16()
    out = torch.empty(10_000, dtype=torch.float16)
    kernels.convert(out, halves)
    assert exact.same_bits(out, halves.float().half())


def test_our_own_mistakes_are_assertions() -> None:
    values = torch.zeros(100)
    for broken in (
        lambda: sums_of(None, values, 32, False),
        lambda: sums_of(None, values, 0, True),
        lambda: sums_of(torch.zeros(99), values, 0, False),
        lambda: sums_of(None, values[::2], 0, False),
        lambda: sums_of(None, values.double(), 0, False),
        lambda: kernels.convert(torch.zeros(99), values),
    ):
        with pytest.raises(AssertionError):
            broken()
