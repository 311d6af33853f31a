# SPDX-License-Identifier: Apache-2.0
"""What the planner keeps of its answers, since it asks again and again: they are those of a planner that keeps none."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings, strategies as st

import offload
import offload.planning
from offload.device.cpu import CpuAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.errors import BudgetError
from offload.layout import ParameterSpec, build_layout
from offload.planning.budget import MemoryPlan
from offload.planning.deciding import Decision
from offload.planning.free_memory import FreeMemory
from offload.planning.placement import Placement, Problem, RankGroup, format_of, place
from offload.planning.room_to_undo import Undoable
from offload.planning.route import routes_of
from offload.planning.sizes import Footprint
from offload.planning.tier_choice import Kept, Near
from offload.planning.traffic import Traffic, fetch_counts
from offload.planning.use_trace import Expected, Use

DTYPES = {"float32": 4, "bfloat16": 2}
MOMENTS = ("exp_avg", "exp_avg_sq")
TIERS = st.sampled_from(["device", "cpu", "nvme"])


def kept_in() -> Iterator[Any]:
    """Every function of the planner that keeps answers from one call to the next."""
    for module in pkgutil.iter_modules(offload.planning.__path__, "offload.planning."):
        found = vars(importlib.import_module(module.name)).values()
        yield from (one for one in found if hasattr(one, "cache_clear") and one.__module__ == module.name)


def forget() -> None:
    for one in kept_in():
        one.cache_clear()


@st.composite
def repeating_units(draw: st.DrawFn) -> list[list[ParameterSpec]]:
    """The parameters of each unit; several units have the same, but for their groups and parts."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    parameter = st.tuples(st.sampled_from([100, 2500, 4096, 9000, 20000]), st.sampled_from([True, True, False]))
    shapes = draw(st.lists(st.lists(parameter, min_size=1, max_size=3), min_size=2, max_size=3))
    units, index = [], 0
    for shape in draw(st.lists(st.sampled_from(shapes), min_size=4, max_size=8)):
        specs = []
        for numel, trained in shape:
            group, part = draw(st.integers(0, 1)), draw(st.integers(0, 1))
            specs.append(ParameterSpec(index, numel, dtype, DTYPES[dtype], trained, group, part))
            index += 1
        units.append(specs)
    return units


@st.composite
def orders_of_use(draw: st.DrawFn, unit_count: int) -> list[list[Use]]:
    """Every unit, in any order, and some of them again; and the same uses in other orders."""
    again = draw(st.lists(st.integers(1, unit_count - 1), max_size=3))
    uses = [Use(unit, draw(st.booleans()), draw(st.booleans())) for unit in (*range(1, unit_count), *again)]
    return [uses, *(draw(st.permutations(uses)) for _ in range(draw(st.integers(1, 2))))]


Question = Callable[[], Decision]
"""Makes a decision anew, from equal numbers."""


@st.composite
def questions(draw: st.DrawFn, *, undoable: bool = False) -> list[Question]:
    """About one model, in two or three orders of use, with two or three configurations. `undoable`: updates may begin early."""
    units, ranks, stage = draw(repeating_units()), 1 if undoable else draw(st.integers(1, 2)), draw(st.integers(2, 3))
    layout = build_layout([(f"unit {number}", specs) for number, specs in enumerate(units)], chunk_numel=4096, world_size=ranks)
    orders = draw(orders_of_use(len(units)))
    kind = draw(st.sampled_from([CpuAccelerator, DeferredAccelerator]))

    def config() -> tuple[offload.Config, FreeMemory]:
        fields: dict[str, Any] = {"parameters": draw(TIERS), "optimizer_states": "nvme" if undoable else draw(TIERS)}
        fields |= {"prefetch": draw(st.integers(0, 2)), "update": draw(st.sampled_from(["auto", "backward"]))}
        if draw(st.booleans()):
            fields["device_memory"] = draw(st.integers(4, 64)) * 2**16
        if ranks > 1 and stage < 3:
            fields["parameters"] = "device"
        drive = draw(st.integers(0, 160)) * 2**16
        return offload.Config(nvme=".", **fields).expecting(draw(st.integers(1, 4))), FreeMemory((), None, drive)

    configs = [config() for _ in range(draw(st.integers(2, 3)))]

    def question(order: list[Use], config: offload.Config, free: FreeMemory) -> Question:
        group = RankGroup(stage, ranks, ranks)
        return lambda: Decision(config, kind(), layout, Expected.of(0, order), MOMENTS, group, free)

    return [question(order, *config) for order in orders for config in configs]


def answered(made: Question) -> Any:
    """What is decided, how often each unit is fetched then, and what moves."""
    decision = made()
    try:
        placement = decision.decide()
    except BudgetError as refusal:
        return str(refusal), refusal.smallest_nbytes
    problem = decision.problem
    counts = [fetch_counts(problem, placement, number) for number in (1, 2, 5)]
    return placement, counts, Traffic.scheduled(problem, placement, problem.micro_batches)


def test_there_are_such_functions() -> None:
    assert len({one.__name__ for one in kept_in()}) >= 5


@settings(max_examples=60, deadline=None)
@given(questions(), st.randoms(use_true_random=False))
def test_answers_do_not_depend_on_what_was_asked_before(asked: list[Question], draw: Random) -> None:
    fresh = []
    for made in asked:
        forget()
        fresh.append(answered(made))
    forget()
    for index in draw.sample(range(len(asked)), len(asked)):
        assert answered(asked[index]) == fresh[index]


@settings(max_examples=150, deadline=None)
@given(repeating_units(), st.integers(1, 3), st.sampled_from(["fp32", "split"]), st.booleans())
def test_units_that_are_alike_have_the_sizes_of_each_by_itself(
    units: list[list[ParameterSpec]], ranks: int, state_format: str, wide_gradients: bool
) -> None:
    config = offload.Config(state_format=state_format if units[0][0].dtype == "bfloat16" else "fp32")

    def footprint(units: list[list[ParameterSpec]]) -> Footprint:
        named = [(f"unit {number}", specs) for number, specs in enumerate(units)]
        layout = build_layout(named, chunk_numel=4096, world_size=ranks)
        return Footprint.of(
            layout, lambda dtype, crosses: format_of(config, MOMENTS, dtype, crosses), wide_gradients=wide_gradients
        )

    found = footprint(units)
    apart = [footprint([specs]) for specs in units]
    assert found.units == tuple(replace(one.units[0], index=index) for index, one in enumerate(apart))
    assert found.square_sums == sum(one.square_sums for one in apart)
    assert all(
        replace(found.units[kind], index=unit.index) == unit for unit, kind in zip(found.units, found.kinds, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(questions(undoable=True), st.data())
def test_what_is_counted_once_for_units_that_are_alike_is_what_each_counts_for(
    asked: list[Question], data: st.DataObject
) -> None:
    """Whatever of each lies nearer: sums, buffers, and whose updates can be undone."""
    decision = asked[0]()
    try:
        choice = decision.decide().choice
    except BudgetError:
        return
    problem, chunks = decision.problem, st.integers(0, 12)
    unified = problem.accelerator.unified
    units = range(len(problem.footprint.units))
    near = Near()
    if not unified:
        indices = st.frozensets(st.sampled_from(units))
        gradients = data.draw(indices)
        near = Near(data.draw(indices), gradients, gradients & data.draw(indices))
    kept = Kept(parameter_count=data.draw(chunks), record_count=data.draw(chunks))
    apart = replace(problem, footprint=replace(problem.footprint, kinds=tuple(units)))

    def placed(problem: Problem) -> Placement | str:
        try:
            return place(problem, replace(choice, kept=kept, near=near))
        except (AssertionError, ValueError) as error:  # what no route can be
            return str(error)

    assert placed(problem) == placed(apart)
    if isinstance(placed(problem), Placement):
        routes = routes_of(problem.footprint.units, replace(choice, kept=kept, near=near), unified=unified, sharded=False)
        each_its_own = [replace(route) for route in routes]
        nothing = MemoryPlan(())
        assert Undoable.of(problem, routes, nothing) == Undoable.of(apart, each_its_own, nothing)
