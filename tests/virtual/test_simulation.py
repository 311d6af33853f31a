# SPDX-License-Identifier: Apache-2.0
"""Virtual time: actors in the order of their moments, resources shared fairly, queues in their order, the same every time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from offload.device.virtual.links import Queue, Resource, Sharing
from offload.device.virtual.simulation import Event, Mutex, Simulation


def in_threads(simulation: Simulation, *works: Callable[[], None]) -> None:
    """Run each as an actor of its own; return when all are done."""

    def run(work: Callable[[], None], end: Event) -> None:
        simulation.join_in()
        work()
        end.settle()
        simulation.leave()

    ends = [Event(simulation) for _ in works]
    for work, end in zip(works, ends, strict=True):
        simulation.start_thread(threading.Thread(target=run, args=(work, end), daemon=True))
    for end in ends:
        end.wait()


def test_actors_go_on_in_the_order_of_their_moments() -> None:
    simulation, log = Simulation(), list[tuple[str, float]]()

    def work(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            for _ in range(3):
                simulation.spend(seconds)
                log.append((name, simulation.now))

        return run

    with simulation.running():
        in_threads(simulation, work("slow", 3.0), work("fast", 2.0))
    assert log == [("fast", 2.0), ("slow", 3.0), ("fast", 4.0), ("slow", 6.0), ("fast", 6.0), ("slow", 9.0)]


def test_a_mutex_is_held_through_virtual_time() -> None:
    simulation, log = Simulation(), list[tuple[str, float]]()
    mutex = Mutex(simulation)

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            with mutex, mutex:
                simulation.spend(1.0)
                log.append((name, simulation.now))

        return run

    with simulation.running():
        in_threads(simulation, work("a"), work("b"), work("c"))
    assert log == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_a_wait_that_nothing_can_end_is_said() -> None:
    simulation = Simulation()
    with simulation.running(), pytest.raises(AssertionError, match="nothing is left that could happen"):
        Event(simulation).wait()


def test_those_who_share_a_resource_have_half_each_and_others_are_not_slowed_down() -> None:
    simulation = Simulation()
    sharing, memory, link = Sharing(simulation), Resource("memory", 10.0), Resource("link", 1.0)
    with simulation.running():
        first = sharing.start({memory: 20.0})
        second = sharing.start({memory: 10.0})
        third = sharing.start({link: 1.5, memory: 0.0})
        for event in (first, second, third):
            event.wait()
    # Both at half speed until the second is done after 2 s; the first has then 1 s of its own left.
    assert (second.settled_at, first.settled_at, third.settled_at) == pytest.approx((2.0, 3.0, 1.5))
    assert (memory.moved, memory.busy_seconds) == pytest.approx((30.0, 3.0))
    assert (link.moved, link.busy_seconds) == pytest.approx((1.5, 1.5))


def test_one_that_another_resource_holds_back_leaves_the_rest_to_the_others() -> None:
    simulation = Simulation()
    sharing, memory, link = Sharing(simulation), Resource("memory", 10.0), Resource("link", 2.0)
    with simulation.running():
        copy = sharing.start({link: 2.0, memory: 2.0})  # takes 2 of the memory's 10
        adam = sharing.start({memory: 8.0})
        copy.wait()
        adam.wait()
    assert (copy.settled_at, adam.settled_at) == pytest.approx((1.0, 1.0))


def test_a_queue_serves_priorities_first_and_waits_for_what_is_awaited() -> None:
    simulation = Simulation()
    link = Resource("link", 1.0)
    queue = Queue(Sharing(simulation))
    with simulation.running():
        gate = simulation.after(5.0)
        running = queue.add({link: 2.0}, priority=1)
        later = queue.add({link: 1.0}, priority=1)
        urgent = queue.add({link: 1.0}, priority=0)
        held = queue.add({link: 1.0}, after=[gate], priority=1)
        behind = queue.add({link: 1.0}, priority=1)
        behind.wait()
    ends = [event.settled_at for event in (running, urgent, later, held, behind)]
    assert ends == pytest.approx([2.0, 3.0, 4.0, 6.0, 7.0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 8), st.floats(0, 8), st.floats(0, 3)), min_size=1, max_size=8))
def test_nothing_is_faster_than_its_resources_nor_idle_without_need(jobs: list[tuple[float, float, float, float]]) -> None:
    simulation = Simulation()
    sharing, a, b = Sharing(simulation), Resource("a", 2.0), Resource("b", 3.0)
    ends: list[tuple[float, Event, float]] = []

    def begin(first: float, second: float, least: float) -> None:
        alone = max(first / a.rate, second / b.rate, least)
        ends.append((simulation.now, sharing.start({a: first, b: second}, least), alone))

    with simulation.running():
        for moment, first, second, least in jobs:
            simulation.at(moment, lambda first=first, second=second, least=least: begin(first, second, least))
        simulation.after(6.0).wait()
        for _, end, _ in ends:
            end.wait()
    total = sum(max(first / a.rate, second / b.rate, least) for _, first, second, least in jobs)
    for began, end, alone in ends:
        assert end.settled_at - began >= alone - 1e-9
    last = max(end.settled_at for _, end, _ in ends)
    assert last <= max(moment for moment, *_ in jobs) + total + 1e-6
    assert a.moved == pytest.approx(sum(first for _, first, _, _ in jobs), abs=1e-9)
    assert b.moved == pytest.approx(sum(second for _, _, second, _ in jobs), abs=1e-9)
