# SPDX-License-Identifier: Apache-2.0
"""Time that is only counted: threads that take turns, each when its moment has come.

An *actor* is a thread of the engine (the one that drives the model, a lane) that runs in a simulation. One actor runs at any
moment, the one with the earliest virtual time; a wait, or time that is spent, hands over to whoever is next. So the run is that
of threads on as many cores as there are actors, it is the same each time, and a second of it takes as long as its Python.

    with simulation.running():          this thread becomes an actor
        simulation.spend(2e-6)          its work took so long
        event = simulation.after(0.5)   settles half a second from now
        event.wait()

Virtual seconds are floats from 0 on. Two things at the same moment happen in the order in which they were asked for.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload.device.pending import Pending

Act = Callable[[], None]


class _Actor:
    """A thread's place in the simulation. `turn` is released when the thread is to go on."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()


class Event(Pending):
    """Settles at a moment of virtual time, which may not be known yet."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._followers: list[Act] | None = []
        self.settled_at = float("inf")
        """Virtual seconds; infinite before it settled."""
        self.began_at = float("inf")
        """When what it is the end of began."""

    def wait(self) -> None:
        if self._followers is not None:
            self._simulation.wait_until(self)

    def done(self) -> bool:
        return self._followers is None

    def times_ns(self) -> tuple[int, int] | None:
        return (round(self.began_at * 1e9), round(self.settled_at * 1e9)) if self._followers is None else None

    def settle(self) -> None:
        """It happens now. Runs what follows it, in order."""
        followers, self._followers = self._followers, None
        if followers is None:
            raise AssertionError("an event settles once")
        self.settled_at = self._simulation.now
        for follower in followers:
            follower()

    def follow(self, act: Act) -> None:
        """Run `act`, which takes no time, when it settles; now if it did."""
        if self._followers is None:
            act()
        else:
            self._followers.append(act)


class Simulation:
    """See the module. Every method but `running` is called by the actor whose turn it is, or from an act."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds."""
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Act | _Actor]] = []
        self._actors: dict[int, _Actor] = {}

    # ---- actors --------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """This thread, which no other actor waits for outside, is an actor inside. What goes on after it ends stands still."""
        thread = threading.get_ident()
        if thread in self._actors:
            yield
            return
        self._actors[thread] = _Actor()
        try:
            yield
        finally:
            del self._actors[thread]

    def start_thread(self, thread: threading.Thread) -> None:
        """Start a thread whose first act is `join_in`; it has its turn when its moment comes."""
        ready = threading.Lock()
        ready.acquire()
        self._ready = ready
        thread.start()
        ready.acquire()  # it is on the agenda

    def join_in(self) -> None:
        """At the beginning of a thread that `start_thread` started: return when it is its turn."""
        actor = self._actors[threading.get_ident()] = _Actor()
        self._put(self.now, actor)
        self._ready.release()
        actor.turn.acquire()

    def leave(self) -> None:
        """At the end of such a thread: the others go on."""
        del self._actors[threading.get_ident()]
        self._dispatch(None)

    # ---- time ----------------------------------------------------------------------------------------------------

    def spend(self, seconds: float) -> None:
        """The calling actor's own work takes so long."""
        until = self.now + seconds
        if not self._agenda or self._agenda[0][0] > until:
            self.now = until
            return
        actor = self._actors[threading.get_ident()]
        self._put(until, actor)
        self._dispatch(actor)

    def at(self, moment: float, act: Act) -> None:
        """Run `act` at that moment, not before now. Acts take no time and wait for nothing."""
        self._put(max(moment, self.now), act)

    def after(self, seconds: float) -> Event:
        """An event that settles in so many seconds."""
        event = Event(self)
        self.at(self.now + seconds, event.settle)
        return event

    def wait_until(self, event: Event) -> None:
        """Block the calling actor until the event has settled."""
        actor = self._actors.get(threading.get_ident())
        if actor is None:
            raise AssertionError("virtual time was waited for outside of `with simulation.running()`")
        event.follow(lambda: self._put(self.now, actor))
        self._dispatch(actor)

    def _put(self, moment: float, what: Act | _Actor) -> None:
        heapq.heappush(self._agenda, (moment, next(self._order), what))

    def _dispatch(self, own: _Actor | None) -> None:
        """Go on with what is next, until that is the calling actor."""
        while True:
            if not self._agenda:
                raise AssertionError("everybody waits: nothing is left that could happen")
            moment, _, what = heapq.heappop(self._agenda)
            self.now = max(self.now, moment)
            if what is own:
                return
            if isinstance(what, _Actor):
                what.turn.release()
                if own is not None:
                    own.turn.acquire()
                return
            what()


class Mutex:
    """A reentrant lock whose waiters stand still in virtual time. A context manager."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._holder, self._depth = 0, 0
        self._waiters: list[Event] = []

    def __enter__(self) -> None:
        own = threading.get_ident()
        while self._depth and self._holder != own:
            event = Event(self._simulation)
            self._waiters.append(event)
            event.wait()
        self._holder, self._depth = own, self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._waiters:
            self._waiters.pop(0).settle()
