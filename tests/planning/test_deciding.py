# SPDX-License-Identifier: Apache-2.0
"""What the planner makes of budgets, on small layouts: within them, no fixed placement moves less; with more, no more moves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

import offload
from offload.build.assembly import Known, lay_out
from offload.config import with_internal_settings
from offload.deepspeed_config import translate
from offload.device.accelerator import Accelerator
from offload.device.cpu import CpuAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.device.host_memory.memory_limits import MemoryLimit
from offload.errors import BudgetError
from offload.layout import CHUNK_NUMEL, LARGEST_CHUNK_NUMEL, MANY_CHUNKS, ParameterSpec, build_layout, large_chunk_numels
from offload.planning import route
from offload.planning.budget import Tier
from offload.planning.deciding import PAIRINGS, Decision
from offload.planning.free_memory import FreeMemory
from offload.planning.placement import Placement, place
from offload.planning.purposes import LANDING, OPTIMIZER_STATES
from offload.planning.route import Memory
from offload.planning.schedule import plan
from offload.planning.spare_host_memory import SpareHostMemory
from offload.planning.tier_choice import Choice
from offload.planning.traffic import Traffic
from offload.planning.use_trace import Expected, Use
from offload.planning.weighing import ABOUT_AS_LONG, ABOUT_AS_LONG_BESIDE_THE_UNKNOWN, ABOUT_AS_LONG_OVER_NVME
from tests.planning.simulation import simulate

NVME = str(Path(__file__).parent)
"""Nothing is made there: what is asked is how much is free."""
KEPT_RECORDS = OPTIMIZER_STATES.kept
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"float32": 4, "bfloat16": 2}


@st.composite
def models(draw: st.DrawFn) -> tuple[Any, Expected]:
    """Units of one to three parameters, some of them frozen, used one after the other."""
    dtype, units, index = draw(st.sampled_from(sorted(DTYPES))), [], 0
    for number in range(draw(st.integers(2, 6))):
        specs = []
        for _ in range(draw(st.integers(0 if number == 0 else 1, 3))):
            numel, trained = draw(st.integers(1, 6)) * 4096, draw(st.integers(0, 4)) > 0
            specs.append(ParameterSpec(index, numel, dtype, DTYPES[dtype], trained, 0))
            index += 1
        units.append((f"unit {number}", specs))
    layout = build_layout(units, chunk_numel=4096)
    return layout, Expected.of(0, [Use(number) for number in range(1, len(units))])


def decision(
    model: Any,
    accelerator: Accelerator,
    pair: tuple[str, str] = ("auto", "auto"),
    accumulates: bool = False,
    tokens: int = 0,
    **fields: Any,
) -> Decision:
    config = offload.Config(**({"parameters": pair[0], "optimizer_states": pair[1], "nvme": NVME} | fields))
    return Decision(config.expecting(2 if accumulates else 1, tokens), accelerator, *model, MOMENTS)


def least(model: Any, accelerator: Accelerator, pair: tuple[Tier, Tier], field: str, **fields: Any) -> int:
    with pytest.raises(BudgetError) as refusal:
        decision(model, accelerator, pair, **fields, **{field: 1}).decide()
    assert refusal.value.smallest_nbytes is not None
    return refusal.value.smallest_nbytes


def require_within(decided: Decision, placement: Placement) -> None:
    problem = decided.problem
    assert problem.excess(placement) is None
    sizes = problem.fetched(placement.routes)
    schedule = plan(problem.expected.trace, sizes, placement.unit_capacity_nbytes or 0, placement.prefetch)
    assert simulate(schedule, sizes) <= (placement.unit_capacity_nbytes or 0)


def moved(decided: Decision, placement: Placement) -> tuple[int, ...]:
    return Traffic.scheduled(decided.problem, placement, decided.problem.micro_batches).slowest_first


BOUND: tuple[tuple[tuple[Tier, Tier], str], ...] = (
    (("cpu", "cpu"), "cpu_memory"),
    (("device", "cpu"), "cpu_memory"),
    (("nvme", "cpu"), "cpu_memory"),
    (("nvme", "nvme"), "cpu_memory"),
    (("cpu", "device"), "device_memory"),
    (("device", "device"), "device_memory"),
)
"""Tiers, and the budget that their sums of micro-batches are in: all but those that go to NVMe."""
FORMATS = st.sampled_from(["fp32", "split"])
SHARES = st.floats(1.0, 12.0)


@settings(max_examples=60, deadline=None)
@given(models(), SHARES, SHARES, st.booleans(), st.booleans(), st.data())
def test_auto_takes_no_longer_than_any_fixed_placement(
    model: Any, on_device: float, in_memory: float, accumulates: bool, unified: bool, data: st.DataObject
) -> None:
    accelerator: Accelerator = CpuAccelerator() if unified else DeferredAccelerator()
    is_narrow = all(flat.dtype == "bfloat16" for flat in model[0].flats)
    fields: dict[str, Any] = {"state_format": data.draw(FORMATS) if is_narrow else "fp32"}
    fields["cpu_memory"] = int(in_memory * least(model, accelerator, ("nvme", "nvme"), "cpu_memory", **fields))
    if not unified:
        fields["device_memory"] = int(on_device * least(model, accelerator, ("nvme", "nvme"), "device_memory", **fields))
    fields["tokens"] = data.draw(st.sampled_from([0, 0, 500, 5000, 50000]))
    try:
        auto = decision(model, accelerator, accumulates=accumulates, **fields)
        chosen = auto.decide()
    except BudgetError:
        return
    require_within(auto, chosen)
    leaves_sums = auto.problem.excess(chosen, with_sums=True) is None
    for pair in PAIRINGS:
        fixed = decision(model, accelerator, pair, accumulates=accumulates, **fields)
        try:
            other = fixed.decide()
        except BudgetError:
            continue
        require_within(fixed, other)
        if leaves_sums and fixed.problem.excess(other, with_sums=True) is not None:
            continue  # of no use to who accumulates
        about = ABOUT_AS_LONG_OVER_NVME if unified or fields["tokens"] else ABOUT_AS_LONG_BESIDE_THE_UNKNOWN
        one, another = auto.weight(chosen), fixed.weight(other)
        assert one.seconds <= about * another.seconds, pair
        assert one.moved[0] <= another.moved[0] or another.seconds > about * one.seconds, pair
        assert one.moved <= another.moved or another.moved[0] > one.moved[0] or another.seconds > one.seconds, pair


@pytest.mark.parametrize("pair", [("cpu", "nvme"), ("device", "nvme")])
@pytest.mark.parametrize("unified", [True, False])
def test_of_records_and_gradients_in_host_memory_what_moves_less_is_taken(unified: bool, pair: tuple[Tier, Tier]) -> None:
    """A gradient in memory needs no buffer either."""
    specs = [ParameterSpec(number, 16 * 4096, "float32", 4, True, 0) for number in range(8)]
    layout = build_layout([("(root)", []), *((f"unit {one.index}", [one]) for one in specs)], chunk_numel=4096)
    model = layout, Expected.of(0, [Use(number) for number in range(1, 9)])
    accelerator: Accelerator = CpuAccelerator() if unified else DeferredAccelerator()
    smallest, compared = least(model, accelerator, pair, "cpu_memory"), 0
    for share in range(8, 64):
        decided = decision(model, accelerator, pair, cpu_memory=smallest * share // 8)
        problem, placement = decided.problem, decided.decide()
        in_memory = place(problem, Choice(*pair, "cpu", prefetch=placement.prefetch))
        if problem.excess(in_memory, with_sums=True) is None:
            spare = SpareHostMemory(problem, lambda one, problem=problem: problem.excess(one, with_sums=True) is None)
            assert moved(decided, placement) <= moved(decided, spare.best(in_memory))
            compared += 1
    assert compared > 3


@pytest.mark.parametrize(
    ("of_buffers", "accumulates", "count"), [(None, True, 80), (900, True, 9), (9000, True, 80), (9000, False, 4)]
)
def test_buffers_in_which_gradients_wait_to_be_added(of_buffers: int | None, accumulates: bool, count: int) -> None:
    """As many as a hundredth of the host memory has room for, where several micro-batches are added up there. The least that a
    step takes has few."""
    specs = [ParameterSpec(index, 20 * 4096, "bfloat16", 2, True, 0) for index in range(4)]
    layout = build_layout([("(root)", []), *((f"unit {one.index}", [one]) for one in specs)], chunk_numel=4096)
    model = layout, Expected.of(0, [Use(number) for number in range(1, 5)])
    accelerator, pair = DeferredAccelerator(), ("device", "cpu")
    nbytes = 4096 * 2
    fields = {} if of_buffers is None else {"cpu_memory": of_buffers * nbytes}
    decided = decision(model, accelerator, pair, accumulates, **fields)
    placement = decided.decide()
    require_within(decided, placement)
    assert placement.staging[LANDING] == (count, nbytes)
    smallest = least(model, accelerator, pair, "cpu_memory", accumulates=accumulates)
    assert decision(model, accelerator, pair, accumulates, cpu_memory=smallest).decide().staging[LANDING] == (4, nbytes)


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(("cpu", "nvme")), SHARES, st.booleans(), st.booleans())
def test_records_are_kept_until_no_other_fits_and_as_many_bytes_as_in_order(
    model: Any, parameters: Tier, share: float, accumulates: bool, unified: bool
) -> None:
    accelerator: Accelerator = CpuAccelerator() if unified else DeferredAccelerator()
    budget = int(share * least(model, accelerator, (parameters, "nvme"), "cpu_memory"))
    placements = []
    for order in (route._in_turn, route._one_after_the_other):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(route, "_in_turn", order)
            decided = decision(model, accelerator, (parameters, "nvme"), accumulates, cpu_memory=budget)
            placements.append(decided.decide())
            require_within(decided, placements[-1])
    evenly, in_order = placements
    planned = [sum(one.nbytes for one in placement.plan.lines if one.purpose == KEPT_RECORDS) for placement in placements]
    assert planned[0] == planned[1] == evenly.kept.record_nbytes == in_order.kept.record_nbytes
    assert sum(one.kept_records for one in evenly.routes) == evenly.kept.record_count
    if evenly.kept.record_count < sum(len(unit.trained) for unit in decided.problem.footprint.units):
        one_more = dataclasses.replace(
            evenly.choice, kept=dataclasses.replace(evenly.kept, record_count=evenly.kept.record_count + 1)
        )
        assert decided.problem.excess(place(decided.problem, one_more), with_sums=True) is not None


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(BOUND), st.one_of(SHARES, st.sampled_from([1.02, 1.1, 1.25, 1.5])))
def test_room_for_several_micro_batches_is_said_and_left_where_it_can_be(
    model: Any, bound: tuple[tuple[Tier, Tier], str], share: float
) -> None:
    """From as many bytes on as the least is said to lack for it, whatever else more memory is spent on; where any tiers leave
    it, "auto" does."""
    accelerator, (pair, field) = DeferredAccelerator(), bound
    drive = NVME if "nvme" in pair else None
    assume(any(flat.trainable for flat in model[0].flats))

    def missing(budget: int, tiers: tuple[str, str]) -> int | None:
        try:
            placement = decision(model, accelerator, tiers, nvme=drive, **{field: budget}).decide()
        except BudgetError:
            return None
        assert placement.verdict is not None and placement.verdict.has_room == (placement.sums_missing_nbytes == 0)
        assert placement.sums_missing_in == ("" if placement.verdict.has_room else field)
        return placement.sums_missing_nbytes

    def has_room(budget: int, tiers: tuple[str, str]) -> bool:
        return missing(budget, tiers) == 0

    one = least(model, accelerator, pair, field, nvme=drive)
    several = one + (missing(one, pair) or 0)
    pairings = [tiers for tiers in PAIRINGS if drive or "nvme" not in tiers]
    for budget in {one, max(one, several - 1), several, int(share * several)}:
        assert has_room(budget, pair) == (budget >= several)
        assert has_room(budget, ("auto", "auto")) == any(has_room(budget, tiers) for tiers in pairings)


@pytest.mark.parametrize("lower", ["device_memory", "cpu_memory"])
def test_of_two_budgets_for_one_memory_the_lower_is_named(lower: str) -> None:
    """Where it lacks room for sums, and where it lacks room at all."""
    layout = build_layout([("", [ParameterSpec(0, 4096, "bfloat16", 2, True)])], chunk_numel=4096)
    model, pair = (layout, Expected.of(0, [])), ("device", "device")
    smallest = least(model, CpuAccelerator(), pair, lower, nvme=None)
    budgets = {"device_memory": 1 << 30, "cpu_memory": 1 << 30, "nvme": None}
    placement = decision(model, CpuAccelerator(), pair, **budgets | {lower: smallest}).decide()
    assert placement.sums_missing_in == lower and placement.sums_missing_nbytes
    with pytest.raises(BudgetError, match=f"^{lower}={smallest - 1} .*The smallest {lower} that can is {smallest}"):
        decision(model, CpuAccelerator(), pair, **budgets | {lower: smallest - 1}).decide()


@pytest.mark.parametrize("accumulates", [False, True])
def test_sums_in_the_parameters_dtype_want_no_room_of_their_own(accumulates: bool) -> None:
    """They lie where the first micro-batch's gradients do: no memory is left to fp32 ones."""
    specs = [(f"unit {number}", [ParameterSpec(number, 16 * 4096, "bfloat16", 2, True, 0)]) for number in range(8)]
    model = build_layout(specs, chunk_numel=4096), Expected.of(0, [Use(number) for number in range(1, 8)])
    config = offload.Config(parameters="cpu", optimizer_states="cpu").expecting(2 if accumulates else 1)
    wide, narrow = (
        Decision(with_internal_settings(config, sums_are_narrow=given), DeferredAccelerator(), *model, MOMENTS)
        .decide()
        .with_sums()
        .plan
        for given in (False, True)
    )
    numel = 8 * 16 * 4096
    assert wide.total_nbytes("cpu") - narrow.total_nbytes("cpu") == (2 if accumulates else 4) * numel


def test_memory_that_is_too_little_for_sums_is_spent_all_the_same() -> None:
    """A loop of single micro-batches has units stay where several would find no room."""
    specs = [(f"unit {number}", [ParameterSpec(number, 16 * 4096, "bfloat16", 2, True, 0)]) for number in range(8)]
    model = build_layout(specs, chunk_numel=4096), Expected.of(0, [Use(number) for number in range(1, 8)])
    accelerator, pair = DeferredAccelerator(), ("cpu", "device")
    one, several = (least(model, accelerator, pair, "device_memory", accumulates=count) for count in (False, True))
    decided = [decision(model, accelerator, pair, device_memory=budget) for budget in (one, several - 1)]
    least_moved, less = (moved(one, one.decide()) for one in decided)
    assert less < least_moved


@pytest.mark.parametrize("device", [0, 1 << 30, 1 << 32])
@pytest.mark.parametrize("host", [0, 1 << 26, 1 << 28, 1 << 34])
def test_auto_without_budgets_goes_by_the_memory_that_is_free(host: int, device: int) -> None:
    """With chunks, and units fetched ahead, that fit into the part of it that is meant for states; where the least does not, it
    is tried all the same: what is free now may be more in a moment."""
    specs = [("", [])] + [(f"block {one}", [ParameterSpec(one, 64 << 20, "bfloat16", 2, True, 0)]) for one in range(16)]
    expected = Expected.of(0, [Use(number) for number in range(1, 17)])
    free = FreeMemory((MemoryLimit("memory", 1 << 40, host),), device, 1 << 50)
    known = Known(DeferredAccelerator(), specs, expected, MOMENTS, free=free)
    with pytest.raises(BudgetError) as refusal:
        lay_out(offload.Config(parameters="nvme", optimizer_states="nvme", nvme=NVME, cpu_memory=1), known)
    least_host = refusal.value.smallest_nbytes
    _, placement = lay_out(offload.Config(nvme=NVME), known)
    assert least_host is not None
    if least_host > 0.8 * host or not device:
        assert (placement.parameters, placement.optimizer_states, placement.prefetch) == ("nvme", "nvme", 0)
    else:
        assert placement.plan.total_nbytes("cpu") <= 0.8 * host and placement.plan.total_nbytes("device") <= 0.4 * device


def test_what_host_memory_lacks_the_device_has() -> None:
    """No pair of tiers fits, but half of the units on the device do: without a drive, and with the least that is said."""
    units = [(f"unit {number}", [ParameterSpec(number, 64 * 4096, "bfloat16", 2, True)]) for number in range(8)]
    model = build_layout(units, chunk_numel=4096), Expected.of(0, [Use(number) for number in range(1, 8)])
    everything = 8 * 64 * 4096 * 16
    for pair in (("cpu", "cpu"), ("device", "cpu"), ("auto", "auto")):
        config = offload.Config(parameters=pair[0], optimizer_states=pair[1], cpu_memory=everything // 2, device_memory="24MiB")
        decided = Decision(config, DeferredAccelerator(), *model, MOMENTS)
        placement = decided.decide()
        require_within(decided, placement)
        on_device = [route.update_in is Memory.DEVICE for route in placement.routes]
        assert any(on_device) and not all(on_device)
        smaller = dataclasses.replace(config, device_memory="8MiB")
        with pytest.raises(BudgetError, match="cpu_memory"):
            Decision(smaller, DeferredAccelerator(), *model, MOMENTS).decide()


def test_what_is_frozen_comes_to_the_device_too_where_host_memory_lacks_the_room() -> None:
    """Beside one unit that is trained, with no drive: budgets that together hold the model do."""
    units = [(f"unit {number}", [ParameterSpec(number, 64 * 4096, "bfloat16", 2, number == 7)]) for number in range(16)]
    model = build_layout(units, chunk_numel=4096), Expected.of(0, [Use(number) for number in range(1, 16)])
    accelerator, pair = DeferredAccelerator(), ("cpu", "cpu")
    frozen = 15 * 64 * 4096 * 2
    for tiers in (pair, ("auto", "auto")):
        decided = decision(model, accelerator, tiers, nvme=None, cpu_memory=frozen // 2, device_memory="11MiB")
        placement = decided.decide()
        require_within(decided, placement)
        on_device = [route.parameters == "device" for route in placement.routes]
        assert any(on_device) and not all(on_device)


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from([*PAIRINGS, ("auto", "auto")]), SHARES, st.booleans(), st.booleans())
def test_a_refusal_says_the_smallest_that_would_do(
    model: Any, pair: tuple[Any, Any], share: float, unified: bool, has_drive: bool
) -> None:
    """Of host memory, beside a budget of the device, which may hold a part."""
    assume(any(flat.trainable for flat in model[0].flats))
    accelerator: Accelerator = CpuAccelerator() if unified else DeferredAccelerator()
    fields: dict[str, Any] = {"nvme": NVME if has_drive or "nvme" in pair else None}
    if not unified:
        fields["device_memory"] = int(share * least(model, accelerator, pair, "device_memory", **fields))
    smallest = least(model, accelerator, pair, "cpu_memory", **fields)
    decided = decision(model, accelerator, pair, cpu_memory=smallest, **fields)
    require_within(decided, decided.decide())
    with pytest.raises(BudgetError):
        decision(model, accelerator, pair, cpu_memory=smallest - 1, **fields).decide()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_states_lies_on_the_device_whatever_the_budgets(share: float) -> None:
    """As DeepSpeed's `offload_optimizer.ratio` asks for it."""
    units = [(f"unit {number}", [ParameterSpec(number, 4096, "bfloat16", 2, True)]) for number in range(10)]
    model = build_layout(units, chunk_numel=4096), Expected.of(0, [Use(number) for number in range(1, 10)])
    sections = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1 - share}, "offload_param": {"device": "cpu"}}
    config = translate({"zero_optimization": sections}, 1).config
    decided = Decision(config, DeferredAccelerator(), *model, MOMENTS)
    placement = decided.decide()
    assert sum(route.update_in is Memory.DEVICE for route in placement.routes) == round(10 * share)
    unified = Decision(config, CpuAccelerator(), *model, MOMENTS)
    assert not any(route.update_in is Memory.DEVICE for route in unified.decide().routes)


def test_large_models_have_fewer_chunks_where_their_buffers_are_a_small_part() -> None:
    """What a chunk costs the host's thread does not grow with it."""
    blocks = 16
    specs = [("", [])] + [
        (f"block {index}", [ParameterSpec(index, 1 << 30, "bfloat16", 2, True, 0)]) for index in range(blocks)
    ]
    expected = Expected.of(0, [Use(number) for number in range(1, blocks + 1)])
    chunks = []
    for cpu_memory in (None, 128 << 30, 4 << 30):
        config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=NVME, cpu_memory=cpu_memory)
        chunks.append(lay_out(config, Known(DeferredAccelerator(), specs, expected, MOMENTS))[0].chunk_numel)
    assert chunks[:2] == [LARGEST_CHUNK_NUMEL] * 2 and chunks[2] <= CHUNK_NUMEL
    assert large_chunk_numels(MANY_CHUNKS * CHUNK_NUMEL) == ()


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(
    ("pair", "field", "said"),
    [
        (("cpu", "cpu"), "cpu_memory", "parameters='nvme', optimizer_states='nvme'"),
        (("cpu", "nvme"), "cpu_memory", "parameters='nvme'"),
        (("nvme", "cpu"), "cpu_memory", "optimizer_states='nvme'"),
        (("nvme", "nvme"), "cpu_memory", None),
        (("device", "device"), "device_memory", "parameters='cpu', optimizer_states='cpu'"),
        (("nvme", "nvme"), "device_memory", None),
    ],
)
def test_a_refusal_says_what_may_lie_further_away_and_that_takes_less(
    pair: tuple[Tier, Tier], field: str, said: str | None, unified: bool
) -> None:
    if unified and field == "device_memory":
        return  # one memory
    specs = [[ParameterSpec(number, 8 * 4096, "bfloat16", 2, True, 0)] for number in range(4)]
    layout = build_layout([(f"unit {number}", one) for number, one in enumerate(specs)], chunk_numel=4096)
    model = (layout, Expected.of(0, [Use(number) for number in range(1, 4)]))
    accelerator: Accelerator = CpuAccelerator() if unified else DeferredAccelerator()
    with pytest.raises(BudgetError) as refusal:
        decision(model, accelerator, pair, **{field: 1}).decide()
    message = str(refusal.value)
    if said is None:
        assert "nothing of it can lie further away" in message and "lie further away:" not in message
        assert ("offload.unit" in message) == (unified or field == "device_memory")
        return
    assert message.endswith(f"or let more lie further away: {said}.")
    moved_away = {name: place.strip("'") for name, place in (one.split("=") for one in said.split(", "))}
    there = (moved_away.get("parameters", pair[0]), moved_away.get("optimizer_states", pair[1]))
    assert refusal.value.smallest_nbytes is not None
    assert least(model, accelerator, there, field) < refusal.value.smallest_nbytes


@pytest.mark.parametrize(
    ("drive", "said"), [(NVME, "'auto' finds nothing that takes less"), (None, "nvme='/path/on/the/drive'")]
)
def test_a_refusal_advises_nothing_that_auto_has_tried(drive: str | None, said: str) -> None:
    """Of a small model, whose buffers on the way to a drive take more than its states."""
    layout = build_layout([("", [ParameterSpec(0, 4096, "bfloat16", 2, True)])], chunk_numel=4096)
    model = layout, Expected.of(0, [])
    with pytest.raises(BudgetError, match="optimizer_states='cpu' need") as refusal:
        decision(model, CpuAccelerator(), nvme=drive, cpu_memory=1).decide()
    assert said in str(refusal.value) and ("further away" in str(refusal.value)) == (drive is None)


def test_what_the_model_computes_hides_what_moves_under_the_backwards() -> None:
    """Of known tokens: records may come to the device before the gradients of all units do, which shortens the forward."""
    specs = [[ParameterSpec(number, 16 * 4096, "bfloat16", 2, True, 0)] for number in range(16)]
    layout = build_layout([(f"unit {number}", one) for number, one in enumerate(specs)], chunk_numel=4096)
    model, accelerator = (layout, Expected.of(0, [Use(number) for number in range(1, 16)])), DeferredAccelerator()
    whole = 16 * 16 * 4096
    first = []
    for share in (4, 6, 8, 10):
        fields: dict[str, Any] = {"state_format": "split", "device_memory": share * whole, "cpu_memory": 2**30}
        blind, seeing = (decision(model, accelerator, accumulates=True, tokens=one, **fields) for one in (0, 20000))
        one, other = blind.decide(), seeing.decide()
        require_within(seeing, other)
        assert seeing.weight(other).seconds <= ABOUT_AS_LONG * seeing.weight(one).seconds
        kept = [len(placement.choice.near.records) for placement in (one, other)]
        first.append(kept[1] > kept[0] and seeing.weight(other).seconds < seeing.weight(one).seconds)
    assert any(first)
