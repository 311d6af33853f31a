# SPDX-License-Identifier: Apache-2.0
"""Which gradient buffer leaves first: the order that `offload.step.gradients.buffers` says, found without going through all."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from offload.model.chunk import ChunkGradient
from offload.step.gradients.spill_order import SpillOrder


def state_of(pieces: int, kind: type[ChunkGradient] = ChunkGradient) -> ChunkGradient:
    chunk: Any = SimpleNamespace(pieces=[None] * pieces)
    narrow: Any = None
    return kind(chunk, narrow, is_narrow=False)


def by_definition(states: list[ChunkGradient], besides: ChunkGradient, at_leisure: bool) -> ChunkGradient | None:
    """`states`: those with a buffer, by when something last became of them."""
    others = [state for state in states if state is not besides and not state.opened]
    applied = [state for state in others if state.applied]
    held = [state for state in others if state.held and not state.applied]
    complete = [state for state in others if state.is_complete and not state.held and not state.applied]
    filling = [state for state in others if not state.is_complete and not state.held and not state.applied]
    if applied:
        return applied[0]
    if at_leisure:
        return complete[0] if complete else None
    return complete[0] if complete else held[-1] if held else filling[0] if filling else None


def change(draw: random.Random, state: ChunkGradient) -> None:
    what = draw.choice(["gradient", "gradient", "hold", "apply", "undo", "open", "close"])
    if what == "gradient":
        state.live.add(len(state.live))
    elif what == "hold" and state.is_complete:
        state.held = True
    elif what == "apply" and state.held:
        state.applied = True
    elif what == "undo":
        state.held = state.applied = False
    elif what in ("open", "close"):
        state.opened = what == "open"


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_as_said(seed: int) -> None:
    draw, order = random.Random(seed), SpillOrder()
    states = [state_of(2) for _ in range(8)]
    buffers: list[ChunkGradient] = []
    found: set[tuple[bool, bool]] = set()
    for _ in range(400):
        state = draw.choice(states)
        if draw.random() < 0.15:
            order.remove(state)
            buffers = [one for one in buffers if one is not state]
            state.live.clear()
            state.held = state.applied = state.opened = False
        else:
            change(draw, state)
            order.put(state)
            buffers = [one for one in buffers if one is not state] + [state]
        besides, at_leisure = draw.choice(states), draw.random() < 0.5
        expected = by_definition(buffers, besides, at_leisure)
        assert order.needed_last(besides, at_leisure=at_leisure) is expected
        found.add((expected is not None, at_leisure))
    assert {(True, True), (True, False)} <= found


def test_a_question_goes_through_few_of_many() -> None:
    asked = 0

    class Counted(ChunkGradient):
        def __getattribute__(self, name: str) -> Any:
            nonlocal asked
            asked += name == "opened"
            return super().__getattribute__(name)

    order, states = SpillOrder(), [state_of(1, Counted) for _ in range(1000)]
    for index, state in enumerate(states):
        state.live.add(0)
        state.held = index % 3 == 0
        state.applied = index % 6 == 0
        order.put(state)
    left = list(states)
    while left:
        leaving = order.needed_last(states[-1], at_leisure=False) or states[-1]
        order.remove(leaving)
        left.remove(leaving)
    assert 0 < asked < 5 * len(states)
