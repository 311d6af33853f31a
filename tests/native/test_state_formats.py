# SPDX-License-Identifier: Apache-2.0
"""Split weights, bf16 and 8-bit moments: their definitions in plain integers, and the same bits on every path."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload import _native
from offload.device.arithmetic import encoding
from offload.device.arithmetic.encoding import AVERAGE, CODES, ROOT, SCALE_GROUP, Code
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.rules import MOMENTS, Hyper, Rule
from offload.device.arithmetic.segment import Segment, StateFormat
from tests.native import exact
from tests.native.paths import at_library_call, simd_levels, torch_form

SPLIT_FORMATS = [StateFormat.SPLIT, StateFormat.BF16, StateFormat.EIGHT_BIT]
ADAMW = Hyper(Rule.ADAM, 1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True)
HYPERS = [
    ADAMW,
    Hyper(Rule.ADAM, 1e-3, 0.4, 0.99, 1e-8, 0.1),
    Hyper(Rule.LION, 1e-3, 0.9, 0.99, weight_decay=0.1),
    Hyper(Rule.ADAGRAD, 1e-2, eps=1e-10, weight_decay=0.1, lr_decay=0.1),
    Hyper(Rule.SGD, 1e-2, 0.9, 0.1, weight_decay=0.1, nesterov=True),
    Hyper(Rule.SGD, 1e-2),
]


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class State:
    """One parameter's weights and record in a format, and what an update does to it. `first_index`: of its first element."""

    def __init__(self, state_format: StateFormat, numel: int, seed: int, *, specials: bool = False, grad: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.format = RecordFormat(state_format)
        self.values = torch.empty(numel, dtype=torch.bfloat16)
        room = -(-numel // SCALE_GROUP) * SCALE_GROUP
        buffer = torch.zeros(self.format.nbytes(room), dtype=torch.uint8)
        self.record = self.format.over(buffer, room)
        weights = exact.rough_values(numel, generator, specials=specials)
        self.format.round_values(self.values, weights)
        self.record.put_master(0, numel, weights)
        for name in MOMENTS:
            moment = exact.rough_values(numel, generator, specials=False).clamp(-1e15, 1e15)
            self.record.put_moment(name, 0, numel, moment.abs() if name == "exp_avg_sq" else moment)
        self.grad = exact.rough_values(numel, generator, specials=specials).to(grad)

    def segment(self, hyper: Hyper, step: int, low: int = 0, high: int | None = None, first_index: int = 0) -> Segment:
        high = self.values.numel() if high is None else high
        arrays = self.record.part(low, high)
        values, state_format = self.values[low:high], self.format.state_format
        return Segment(
            self.grad[low:high], arrays, values, hyper, step, 0.5, state_format, rounding_seed=5, first_index=first_index + low
        )

    def results(self) -> list[torch.Tensor]:
        return [self.values, *self.record.arrays.values()]


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a, b) if not a.is_floating_point() else exact.same_bits(a, b) for a, b in zip(ours, theirs, strict=True)
    )


@given(
    state_format=st.sampled_from(SPLIT_FORMATS),
    numel=st.one_of(st.integers(0, 200), st.sampled_from([4097, 33001])),
    seed=st.integers(0, 2**31),
    hyper=st.sampled_from(HYPERS),
    step=st.sampled_from([1, 2, 1000]),
    grad=st.sampled_from([torch.bfloat16, torch.float32]),
    specials=st.booleans(),
    first_index=st.sampled_from([0, 64, 2**32 - 128, 3 * 2**32]),
)
@settings(max_examples=40)
def test_the_same_bits_on_every_path(
    state_format: StateFormat,
    numel: int,
    seed: int,
    hyper: Hyper,
    step: int,
    grad: torch.dtype,
    specials: bool,
    first_index: int,
) -> None:
    def result() -> list[torch.Tensor]:
        state = State(state_format, numel, seed, specials=specials, grad=grad)
        update([state.segment(hyper, step, first_index=first_index)])
        return state.results()

    with torch_form():
        expected = result()
    for level, count in itertools.product(simd_levels(), (1, 3)):
        _native.set_simd_level(level)
        _native.set_thread_count(count)
        assert _same(result(), expected), (level, count)


@pytest.mark.parametrize("state_format", SPLIT_FORMATS, ids=lambda one: one.value)
def test_no_cut_of_a_parameter_shows(state_format: StateFormat) -> None:
    whole, cut = (State(state_format, 10_000, 1, grad=torch.bfloat16) for _ in range(2))
    for step in (1, 2):
        update([whole.segment(ADAMW, step)])
        pieces = [(0, 64), (64, 4096), (4096, 8192), (8192, 10_000)]
        update([cut.segment(ADAMW, step, low, high) for low, high in reversed(pieces)])
    assert _same(cut.results(), whole.results())


# ---- split weights


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weights of float32 masters, and what they leave."""
    upper, rest = torch.empty(values.numel(), dtype=torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16)
    encoding.put_upper_half(upper, values)
    encoding.put_remainder(rest, values)
    return upper, rest


def test_every_bit_pattern_is_split_and_joined_again() -> None:
    """All upper halves with the lower halves around the ties; of a NaN only that it is one."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.uint32)
    values = torch.from_numpy((upper | lower).reshape(-1).view(np.float32))
    rounded, rest = split(values)
    joined = encoding.joined(rounded, rest)
    assert torch.equal(joined.isnan(), values.isnan()) and torch.equal(rounded.isnan(), values.isnan())
    numbers = ~values.isnan()
    assert torch.equal(joined[numbers].view(torch.int32), values[numbers].view(torch.int32))
    # To the nearest: as torch rounds, but for the ties, which go away from zero.
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded[numbers & ~tie], values[numbers & ~tie].bfloat16())
    ties = numbers & tie
    assert bool((rounded[ties].float().abs() >= values[ties].abs()).all())


def test_the_native_library_splits_and_gives_the_bits_of_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all its threads, whatever the numbers: any bits, NaNs, infinities, zeros of both signs; sizes that end anywhere."""
    numel = 3 * 131_072 + 5
    values = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    values = values.view(torch.float32)
    values[:8] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38])
    with torch_form():
        expected = split(values)
    used: list[int] = []
    at_library_call(monkeypatch, {"offload_update": lambda _, segments, count: used.append(sum(one.numel for one in segments))})
    for level, count in itertools.product(simd_levels(), (1, 3)):
        _native.set_simd_level(level)
        _native.set_thread_count(count)
        upper = torch.full((numel + 1,), 7, dtype=torch.int16)
        rest = upper.clone()
        encoding.put_upper_half(upper[1:].view(torch.bfloat16), values)
        encoding.put_remainder(rest[1:], values)
        assert torch.equal(upper[1:], expected[0].view(torch.int16)) and torch.equal(rest[1:], expected[1]), (level, count)
        assert upper[0] == rest[0] == 7 and sum(used) == 2 * numel
        used.clear()


def test_splitting_makes_no_wide_or_large_temporaries() -> None:
    """Start-up splits every weight: what it writes beside the result stays in the processor's caches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[torch.Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            made.extend(one for one in (result,) if isinstance(one, torch.Tensor))
            return result

    values = torch.linspace(-3, 3, 1_000_003)
    upper, rest = torch.empty(values.numel(), dtype=torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16)
    with Watch():
        encoding.put_upper_half(upper, values)
        encoding.put_remainder(rest, values)
    known = {one.untyped_storage().data_ptr() for one in (values, upper, rest)}
    temporaries = [one for one in made if one.untyped_storage().data_ptr() not in known]
    assert temporaries and max(one.itemsize for one in temporaries) <= 4
    assert max(one.untyped_storage().nbytes() for one in temporaries) <= 2**18
    assert torch.equal(encoding.joined(upper, rest), values)


@pytest.mark.parametrize("hyper", HYPERS, ids=lambda one: one.rule.value)
def test_split_states_follow_fp32_states_to_the_bit(hyper: Hyper) -> None:
    states = State(StateFormat.SPLIT, 5000, 2, grad=torch.bfloat16)
    wide = {name: states.record.moment(name, 0, 5000).clone() for name in MOMENTS}
    wide["master"] = states.record.master(0, 5000, states.values)
    for step in range(1, 6):
        update([states.segment(hyper, step)])
        update([Segment(states.grad, wide, None, hyper, step, 0.5)])
    assert exact.same_bits(states.record.master(0, 5000, states.values), wide["master"])
    assert all(exact.same_bits(states.record.arrays[name][:5000], wide[name]) for name in MOMENTS)
    assert torch.equal(states.values, split(wide["master"])[0])


# ---- stochastic rounding


def _random(seed: int, step: int, index: int, width: int) -> tuple[int, int]:
    """The definition in offload.h, word for word."""
    z = (seed + step * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
    sharing = 32 // width
    w = ((z ^ z >> 31) % 2**32 + index // sharing * 0x9E3779B9) % 2**32
    bits = ((w ^ w >> 16) * 0x85EBCA6B) % 2**32
    parts = [(bits >> width * part) % 2**width for part in range(sharing)]
    return parts[index % sharing], parts[index % sharing ^ 1]


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("first", [0, 5, 2**32 - 3, 3 * 2**33 + 1])
def test_random_bits_are_the_defined_ones(width: int, first: int) -> None:
    low, high = encoding.random_bits(encoding.rounding_key(7, 12), first, 10, width, torch.device("cpu"))
    expected = [_random(7, 12, first + i, width) for i in range(10)]
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == expected


@pytest.mark.parametrize("width", [16, 8])
def test_random_bits_are_uniform_over_steps_and_over_elements(width: int) -> None:
    for name in range(2):
        over_elements = encoding.random_bits(encoding.rounding_key(1, 1), 0, 65536, width, torch.device("cpu"))[name]
        over_steps = torch.tensor([_random(1, step, 77, width)[name] for step in range(1, 20_001)])
        for draws in (over_elements, over_steps):
            counts = torch.bincount(draws >> width - 4, minlength=16).double()
            expected = len(draws) / 16
            assert float(((counts - expected) ** 2 / expected).sum()) < 45  # chi squared of 15 degrees: p < 1e-4
            serial = torch.corrcoef(torch.stack([draws[1:].double(), draws[:-1].double()]))[0, 1]
            assert abs(float(serial)) < 0.03


def test_bf16_moments_round_up_as_often_as_they_should() -> None:
    """0.3 of the way between two bf16 numbers: 0.3 of the draws go up; and each draw as the integers say."""
    low, high = 1.0, 1.0078125
    value = low + 0.3 * (high - low)
    state = State(StateFormat.BF16, 50_000, 1, grad=torch.float32)
    state.grad.fill_(2 * value)  # the factor is 1/2
    hyper = Hyper(Rule.LION, lr=0.0, beta1=0.0, beta2=0.0)
    update([state.segment(hyper, 1)])
    moments = state.record.arrays["exp_avg"][:50_000]
    assert set(moments.float().tolist()) == {low, high}
    assert abs(float((moments.float() == high).double().mean()) - 0.3) < 0.01
    for index in (0, 1, 77, 49_999):
        expected = (_bits(value) + _random(5, 1, index, 16)[0]) >> 16
        assert int(moments[index].view(torch.int16)) == expected


# ---- 8-bit moments


def _expected_codes(group: list[float], code: Code, draws: list[int]) -> tuple[list[int], int]:
    """Codes and k by rational arithmetic."""
    k = {AVERAGE: -110, ROOT: -63}[code]
    largest = max(abs(Fraction(value)) for value in group)
    while largest >= code.largest * Fraction(2) ** k:
        k += 1
    codes = []
    for value, draw in zip(group, draws, strict=True):
        fixed = Fraction(value) / Fraction(2) ** k * 2**8
        nearest = math.floor(fixed)
        rest = fixed - nearest
        if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and nearest % 2):
            nearest += 1
        drawn = (nearest + draw) >> 8
        codes.append(max(drawn, 1) if code is ROOT else drawn)
    return codes, k


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("scale", [1.0, 3e-30, 1e-44, 2e14, 0.0, None])
def test_codes_are_the_defined_ones(moment: str, scale: float | None) -> None:
    """None: a maximum of exactly the largest code times a power of two."""
    code = CODES[moment]
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(3 * SCALE_GROUP + 9, generator=generator) * (1.0 if scale is None else scale)
    values = values.abs() if code is ROOT else values
    values[5] = 0.0
    if scale is None:
        values[[7, 70, 140, 199]] = code.largest * torch.exp2(torch.tensor([0.0, 3.0, -1.0, -2.0]))
    draws = torch.randint(0, 1 << 8, values.shape, generator=generator)
    codes, scale_bytes = encoding.codes_of(values, code, draws)
    for group in range(4):
        part = slice(group * SCALE_GROUP, (group + 1) * SCALE_GROUP)
        expected, k = _expected_codes(values[part].tolist(), code, draws[part].tolist())
        assert codes[part].tolist() == expected
        assert float(code.scales_of(scale_bytes)[group]) == 2.0**k


@given(seed=st.integers(0, 2**31), exponent=st.integers(-140, 100), moment=st.sampled_from(MOMENTS))
@settings(max_examples=60)
def test_what_an_update_left_is_kept_exactly_by_fp32(seed: int, exponent: int, moment: str) -> None:
    """So a checkpoint, which holds fp32, resumes 8-bit moments to the bit."""
    generator = torch.Generator().manual_seed(seed)
    record = RecordFormat(StateFormat.EIGHT_BIT).over(
        torch.zeros(RecordFormat(StateFormat.EIGHT_BIT).nbytes(200), dtype=torch.uint8), 200
    )
    code = CODES[moment]
    spread = torch.exp2(torch.randint(-12, 1, (200,), generator=generator).float())
    values = torch.randn(200, generator=generator) * spread * 2.0 ** min(exponent, 60 if code is ROOT else 100)
    draws = torch.randint(0, 1 << 8, values.shape, generator=generator)
    codes, scale_bytes = encoding.codes_of(values.abs() if code is ROOT else values, code, draws)
    record.arrays[moment].copy_(codes)
    record.arrays[f"{moment}_scale"].copy_(scale_bytes)
    kept = record.moment(moment, 0, 200).clone()
    record.put_moment(moment, 0, 200, kept)
    assert exact.same_bits(record.moment(moment, 0, 200), kept)
    assert bool(kept.isfinite().all())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("state_format", [StateFormat.BF16, StateFormat.EIGHT_BIT], ids=lambda one: one.value)
def test_every_operation_of_a_rounded_update_is_the_defined_one(state_format: StateFormat, decoupled: bool) -> None:
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.05}
    hyper = Hyper(Rule.ADAM, *numbers.values(), decoupled=decoupled)
    numel, step = SCALE_GROUP * 2 + 37, 3
    state = State(state_format, numel, 8, grad=torch.float32)
    state.grad.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(9)))
    is_8bit = state_format is StateFormat.EIGHT_BIT
    width = 8 if is_8bit else 16
    grads, masters = state.grad.tolist(), state.record.master(0, numel, state.values).tolist()
    averages = state.record.moment("exp_avg", 0, numel).tolist()
    if is_8bit:
        scales = ROOT.scales_of(state.record.arrays["exp_avg_sq_scale"]) * float(np.float32(math.sqrt(0.95)))
        roots = state.record.arrays["exp_avg_sq"][:numel].float() * scales.repeat_interleave(SCALE_GROUP)[:numel]
        decayed = (roots * roots).numpy()
    else:
        decayed = state.record.moment("exp_avg_sq", 0, numel).numpy() * np.float32(0.95)
    settings = numbers | {"factor": 0.5, "decoupled": decoupled}
    expected = [exact.rounded_adam_element(grads[i], masters[i], averages[i], decayed[i], settings, step) for i in range(numel)]
    update([state.segment(hyper, step)])
    weights, average, square, root = (torch.tensor([float(one[part]) for one in expected]) for part in range(4))
    assert exact.same_bits(state.record.master(0, numel, state.values), weights)
    draws = [_random(5, step, i, width) for i in range(numel)]
    for part, name in enumerate(MOMENTS):
        stored = state.record.arrays[name][:numel]
        if not is_8bit:
            bits = [
                (_bits(value) + draw[part]) >> 16 for value, draw in zip((average, square)[part].tolist(), draws, strict=True)
            ]
            assert (stored.view(torch.int16).int() & 0xFFFF).tolist() == bits
            continue
        for start in range(0, numel, SCALE_GROUP):
            group = slice(start, start + SCALE_GROUP)
            values = (average, root)[part][group].tolist()
            codes, k = _expected_codes(values, CODES[name], [draw[part] for draw in draws[group]])
            assert stored[group].tolist() == codes
            scale_bytes = state.record.arrays[f"{name}_scale"][start // SCALE_GROUP :][:1]
            assert float(CODES[name].scales_of(scale_bytes)) == 2.0**k


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4e38, -3.4e38])
def test_what_is_too_large_for_a_scale_counts_as_the_largest(value: float) -> None:
    group = torch.ones(SCALE_GROUP)
    group[3] = value
    codes, scale_bytes = encoding.codes_of(group, AVERAGE, torch.zeros(SCALE_GROUP, dtype=torch.int64))
    decoded = encoding.values_of(codes, scale_bytes, AVERAGE)
    expected = 0.0 if math.isnan(value) else math.copysign(127 * 2.0**100, value)
    assert float(decoded[3]) == expected
    codes, scale_bytes = encoding.codes_of(group.abs(), ROOT, torch.zeros(SCALE_GROUP, dtype=torch.int64))
    assert float(encoding.values_of(codes, scale_bytes, ROOT)[3]) == 255 * 2.0**56


def test_8_bit_rounding_is_unbiased() -> None:
    """The mean of many draws of one update is the exact moment, within four standard errors."""
    state = State(StateFormat.EIGHT_BIT, 64 * 500, 3, grad=torch.float32)
    state.grad.copy_(torch.linspace(-1, 1, SCALE_GROUP).repeat(500) * 2)
    update([state.segment(Hyper(Rule.LION, 0.0, 0.0, 0.0), 1)])
    means = state.record.moment("exp_avg", 0, 64 * 500).view(500, SCALE_GROUP).double().mean(0)
    assert float((means - torch.linspace(-1, 1, SCALE_GROUP).double()).abs().max()) < 4 * 2**-6 / 2 / 500**0.5


def test_bytes_kept() -> None:
    """Beside the 2 bytes of the bf16 parameter itself."""
    expected = {StateFormat.FP32: 12, StateFormat.SPLIT: 10, StateFormat.BF16: 6, StateFormat.EIGHT_BIT: 4 + 2 / 64}
    for state_format, nbytes in expected.items():
        assert RecordFormat(state_format).nbytes(1 << 20) == nbytes * (1 << 20)
    assert RecordFormat(StateFormat.EIGHT_BIT, ("exp_avg",)).nbytes(64) == 2 * 64 + 64 + 1
    assert RecordFormat(StateFormat.FP32, (), own_master=False).nbytes(64) == 0
