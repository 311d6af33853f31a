# SPDX-License-Identifier: Apache-2.0
"""Where the ranks meet: what this one asks of the others, and what it waits for.

The training thread asks for gathers ahead of use and for reductions as gradients get ready, and goes on computing; it
blocks only where it needs a result (`wait`) or where all ranks pass a point of the program together (`meet`). A thread of
its own does that (`offload.ranks.communication_thread`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from offload.device.lane import start_thread
from offload.device.pending import Pending
from offload.errors import RankError
from offload.ranks.next_transfers import Announcement, Blocked, MeetingPoint
from offload.ranks.threads import Asked, Threads, Waited
from offload.ranks.transport import Ranks

T = TypeVar("T")
NOT_BLOCKED = Announcement()


class Bell:
    """Rung when something has changed, for all who listen. Under the lock of what changes, all but the waiting itself.

    A `threading.Condition` may be left by what a signal raises with its lock held, or without the lock that its `with` gives
    back; who waits here waits for a `Latch`, outside of the lock.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._listening: list[Waited] = []

    def listen(self) -> Waited:
        """Set when the bell rings for the next time."""
        heard = self._threads.latch()
        self._listening.append(heard)
        return heard

    def ring(self) -> None:
        """Wake all who listen."""
        listening, self._listening = self._listening, []
        for heard in listening:
            heard.set()


class Request(Pending):
    """Something asked for at the rendezvous. `wait` is the training thread's alone: it tells the others that it blocks.

    result   what compute waits for beyond that, if this rank gets something; `settled`: it is done. Written by the
             communication thread
    """

    def __init__(self, rendezvous: Rendezvous, blocked: Blocked, unit_index: int) -> None:
        self._rendezvous, self.blocked, self.unit_index = rendezvous, blocked, unit_index
        self.result: Pending | None = None
        self.settled = False

    def wait(self) -> None:
        self._rendezvous.block(self)

    def done(self) -> bool:
        return self.settled


class Rendezvous:
    """See the module. What is not said to be another's belongs to the training thread. All state is under one lock.

    gathers, reductions  the queues of what is asked for and not settled, by unit index: what is announced
    blocked              what the training thread waits for; AT_POINT: with the action that is to run there
    failure              why the ranks can meet no more. Written by the communication thread, once
    abandoned_because    why this rank stops, if it does. Written by who finds that out
    """

    waits_for_others = True

    def __init__(self, ranks: Ranks, unit_names: list[str]) -> None:
        self._ranks, self.unit_names = ranks, unit_names
        self._lock, self._bell = threading.RLock(), Bell(ranks.threads)
        self._gathers: dict[int, Request] = {}
        self._reductions: dict[int, Request] = {}
        self._blocked = NOT_BLOCKED
        self._action: Callable[[], Any] | None = None
        self._answer: list[Any] = []
        self.failure: BaseException | None = None
        self._abandoned_because = ""
        self._watching = MeetingPoint.NONE
        self.asked: Asked = ranks.threads.queue()
        """Has something in it when there may be something to attend to."""

    # ---- the training thread -------------------------------------------------------------------------------------

    def ask_gather(self, unit_index: int) -> Request:
        """Have the unit gathered, when its turn comes. Its own shard must be on its way to where the service looks."""
        return self._ask(self._gathers, Blocked.ON_GATHER, unit_index)

    def ask_reduction(self, unit_index: int) -> Request:
        """Have the unit's gradients reduced."""
        return self._ask(self._reductions, Blocked.ON_REDUCTION, unit_index)

    def meet(self, point: MeetingPoint, action: Callable[[], Any] | None = None, *, argument: int = 0) -> Any:
        """Wait until every rank is here; then `action` runs on all of them, in the rendezvous' thread. Returns its result.

        `argument`: an integer in [0, 2**62) that must be equal on all ranks.
        """
        answer: list[Any] = []
        with self._lock:
            self._require_going_on()
            self._action, self._answer = action, answer
        self._wait(Announcement(blocked=Blocked.AT_POINT, point=point, argument=argument), lambda: bool(answer))
        return answer[0]

    def block(self, asked: Request) -> None:
        """Wait until `asked` is settled; raise the failure of the rendezvous."""
        if not asked.settled:
            self._wait(Announcement(blocked=asked.blocked, argument=asked.unit_index), lambda: asked.settled)

    def _wait(self, blocked: Announcement, is_over: Callable[[], bool]) -> None:
        """As long as it takes, while the others are told that this rank is blocked."""
        try:
            with self._lock:
                if is_over():
                    return
                self._blocked = blocked
            self.wake()
            while (rung := self._unless(is_over)) is not None:
                rung.wait()
        finally:
            self._blocked = NOT_BLOCKED

    def _unless(self, is_over: Callable[[], bool]) -> Waited | None:
        """What to wait for, unless there is nothing to wait for any more."""
        with self._lock:
            if is_over():
                return None
            self._require_going_on()
            return self._bell.listen()

    def alongside(self, point: MeetingPoint, act: Callable[[], T]) -> T:
        """`act`, which waits for the other ranks in a way of its own, in a thread of its own, while it is seen when one of them
        is gone: then that is raised, and `act` is left behind. All ranks call it in the same place, at `point`."""
        results: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                results.append(act())
            except BaseException as error:
                failures.append(error)
            with self._lock:
                self._bell.ring()

        self._watch(point)
        try:
            start_thread(threading.Thread(target=run, name="offload-joining", daemon=True))
            while (rung := self._unless(lambda: bool(results or failures))) is not None:
                rung.wait()
        finally:
            self._watch(MeetingPoint.NONE)
        if failures:
            raise failures[0]
        return results[0]

    def watch(self, on: bool) -> None:
        """From now on, beside a save, rounds go on though nothing is asked for, so that a rank that is gone is known; or no
        longer. All ranks call it in the same place. From any thread."""
        self._watch(MeetingPoint.SAVING if on else MeetingPoint.NONE)

    def _watch(self, point: MeetingPoint) -> None:
        self._watching = point
        if point:
            self.wake()

    def abandon(self, reason: str) -> None:
        """This rank stops here: the others are told why, instead of waiting for it. Never raises."""
        self._ranks.say_failed(reason)
        self._abandoned_because = reason
        self.wake()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked for, and nobody waits."""
        return not (self._gathers or self._reductions or self._blocked.blocked)

    def _ask(self, asked_for: dict[int, Request], blocked: Blocked, unit_index: int) -> Request:
        with self._lock:
            self._require_going_on()
            if unit_index in asked_for:
                raise AssertionError(f"unit {self.unit_names[unit_index]} was asked for twice")
            asked = asked_for[unit_index] = Request(self, blocked, unit_index)
        self.wake()
        return asked

    def wake(self) -> None:
        """Have the communication thread look what there is to attend to."""
        self.asked.put(None)

    def _require_going_on(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ---- the communication thread --------------------------------------------------------------------------------

    def announcement(self) -> Announcement | None:
        """What the others are to be told now; None: nothing is asked for, and nobody is to be watched."""
        while not self.asked.empty():  # the communication thread alone takes from it
            self.asked.get()
        if self._abandoned_because:
            raise RankError(f"this rank stopped, and has left the others: {self._abandoned_because}")
        with self._lock:
            if self.is_idle and not self._watching:
                return None
            blocked = self._blocked
            self._ranks.phase = self._phase(blocked)
            return Announcement(
                frozenset(self._gathers), frozenset(self._reductions), blocked.blocked, blocked.point, blocked.argument
            )

    def _phase(self, blocked: Announcement) -> str:
        if blocked.blocked is Blocked.AT_POINT:
            return blocked.point.call
        kind = "gather" if self._gathers else "reduction of the gradients"
        units = self._gathers or self._reductions
        otherwise = self._watching.call if self._watching else "training"
        return f"{kind} of unit {self.unit_names[next(iter(units))]}" if units else otherwise

    def pause(self, seconds: float) -> None:
        """Wait for that long, or until something is asked for."""
        with suppress(queue.Empty):
            self.asked.get(timeout=seconds)

    def settle_gather(self, unit_index: int, result: Pending | None) -> None:
        """The unit was gathered to this rank; compute waits for `result`, if there is one."""
        self._settle(self._gathers, unit_index, result)

    def settle_reduction(self, unit_index: int) -> None:
        """What this rank had of the unit's gradients is averaged."""
        self._settle(self._reductions, unit_index, None)

    def _settle(self, asked_for: dict[int, Request], unit_index: int, result: Pending | None) -> None:
        with self._lock:
            asked = asked_for.pop(unit_index)
            asked.result, asked.settled = result, True
            if self._blocked.blocked is asked.blocked and self._blocked.argument == unit_index:
                self._blocked = NOT_BLOCKED  # it is about to go on: the next round must not take it for blocked
            self._bell.ring()

    def pass_point(self) -> None:
        """All ranks are at the point that `meet` waits at: its action runs, and it returns."""
        with self._lock:
            action, answer = self._action, self._answer
        result = action() if action is not None else None
        with self._lock:
            self._blocked, self._action = NOT_BLOCKED, None
            answer.append(result)
            self._bell.ring()

    def fail(self, error: BaseException) -> None:
        """Nobody will attend any more: who waits, and who comes, gets this error."""
        with self._lock:
            self.failure = error
            self._bell.ring()
