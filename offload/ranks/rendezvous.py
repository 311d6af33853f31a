"""Where the ranks meet: one thread per rank that talks to the others, and does what all of them agreed on.

The training thread asks for gathers ahead of use and for reductions as gradients get ready, and goes on computing; it
blocks only where it needs a result (`wait`) or where all ranks pass a point of the program together (`meet`). This
thread announces what is asked for to the other ranks, decides with them (`offload.ranks.agreement`), and has the
`Service` move the bytes. Nothing of it exists on one rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from offload.device.pending import Pending
from offload.errors import RankError
from offload.ranks.agreement import Announcement, Blocked, Decision, MeetingPoint, decide
from offload.ranks.transport import Ranks

_WORD_BITS = 62
_IDLE_SECONDS = (0.0001, 0.002)
"""How long a round that had nothing to do waits before the next: at first, and at most."""
_WATCH_SECONDS = 0.1
"""The same where this rank asks for nothing and only watches the others."""


class Service(Protocol):
    """Moves the bytes of what was agreed. Called by the rendezvous' thread."""

    def gather(self, unit_index: int, wanters: frozenset[int]) -> Pending | None:
        """Bring a unit to those members; returns what compute must wait for, if this is one of them and that is not over."""

    def reduce(self, unit_index: int, contributors: frozenset[int]) -> None:
        """Average a unit's gradients over all members, and hand this rank its part."""


class Request(Pending):
    """Something asked for at the rendezvous. `wait` is the training thread's alone: it tells the others that it blocks."""

    def __init__(self, rendezvous: Rendezvous, blocked: Blocked, unit_index: int) -> None:
        self._rendezvous, self.blocked, self.unit_index = rendezvous, blocked, unit_index
        self.result: Pending | None = None
        self.settled = False

    def wait(self) -> None:
        self._rendezvous.block(self)

    def done(self) -> bool:
        return self.settled


class Rendezvous:
    """See the module. `close()` ends its thread; so does dropping it."""

    def __init__(self, ranks: Ranks, unit_names: list[str], service: Service) -> None:
        self._ranks, self._names, self._service = ranks, unit_names, service
        self._changed = threading.Condition()
        self._gathers: dict[int, Request] = {}
        self._reductions: dict[int, Request] = {}
        self._blocked = Announcement()
        self._action: Callable[[], Any] | None = None
        self._answer: list[Any] = []
        self._failure: BaseException | None = None
        self._closing = self._watching = self._exchanging = False
        self._words = -(-len(unit_names) // _WORD_BITS)
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        """Set when there is something to do, so that an idle thread knows nothing of this object, and ends with it."""
        weakref.finalize(self, self._asked.set).atexit = False

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
        with self._changed:
            self._require_going_on()
            self._action, self._answer = action, []
            self._blocked = Announcement(blocked=Blocked.AT_POINT, point=point, argument=argument)
            self._wake()
            try:
                while not self._answer:
                    self._changed.wait()
                    self._require_going_on()
            finally:
                self._blocked = Announcement()
            return self._answer[0]

    def block(self, asked: Request) -> None:
        """Wait until `asked` is settled; raise the failure of the rendezvous."""
        with self._changed:
            if not asked.settled:
                self._require_going_on()
                self._blocked = Announcement(blocked=asked.blocked, argument=asked.unit_index)
                self._changed.notify_all()
                try:
                    while not asked.settled:
                        self._changed.wait()
                        self._require_going_on()
                finally:
                    self._blocked = Announcement()

    def watch(self, on: bool) -> None:
        """From now on rounds go on though nothing is asked for, so that a rank that is gone is known; or no longer. All ranks
        call it in the same place. From any thread."""
        with self._changed:
            self._watching = on
            if on:
                self._wake()

    def close(self) -> None:
        """End the thread. All ranks have met before, or this one is abandoned: nothing is under way. Idempotent."""
        with self._changed:
            self._closing = True
            self._asked.set()
        if self._thread is not None and self._failure is None and (self._exchanging or not self._is_idle):
            return  # stuck in an exchange with ranks that are gone: it ends with the process
        if self._thread is not None:
            self._thread.join()

    def abandon(self, reason: str) -> None:
        """This rank stops here: the others are told why, instead of waiting for it. Never raises."""
        self._ranks.say_failed(reason)

    @property
    def failure(self) -> BaseException | None:
        """Why the ranks can meet no more, if they cannot."""
        return self._failure

    @property
    def _is_idle(self) -> bool:
        return not (self._gathers or self._reductions or self._blocked.blocked)

    def _ask(self, asked_for: dict[int, Request], blocked: Blocked, unit_index: int) -> Request:
        with self._changed:
            self._require_going_on()
            if unit_index in asked_for:
                raise AssertionError(f"unit {self._names[unit_index]} was asked for twice")
            asked = asked_for[unit_index] = Request(self, blocked, unit_index)
            self._wake()
            return asked

    def _wake(self) -> None:
        if self._thread is None:
            serving = (weakref.ref(self), self._asked)
            self._thread = threading.Thread(target=_serve, args=serving, name="offload-ranks", daemon=True)
            self._thread.start()
        self._asked.set()
        self._changed.notify_all()

    def _require_going_on(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the rendezvous' thread ----------------------------------------------------------------------------------

    def run(self) -> bool:
        """Do all that is asked for, and what the other ranks want meanwhile; whether there may be more."""
        try:
            idle_seconds = _IDLE_SECONDS[0]
            while (announcement := self._next_announcement()) is not None:
                said = self._exchange(announcement)
                decision = decide(said)
                if decision.is_nothing:
                    with self._changed:
                        self._changed.wait(_WATCH_SECONDS if self._is_idle else idle_seconds)
                    idle_seconds = min(2 * idle_seconds, _IDLE_SECONDS[1])
                    continue
                idle_seconds = _IDLE_SECONDS[0]
                self._do(decision)
        except BaseException as error:
            self._ranks.say_failed(f"{type(error).__name__}: {error}")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        return self._failure is None and not self._closing

    def _next_announcement(self) -> Announcement | None:
        with self._changed:
            if self._is_idle and not (self._watching and not self._closing):
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
        otherwise = MeetingPoint.SAVING.call if self._watching else "training"
        return f"{kind} of unit {self._names[next(iter(units))]}" if units else otherwise

    def _exchange(self, own: Announcement) -> list[Announcement]:
        encoded = torch.tensor(
            [
                *(self._ranks.order_digest, own.blocked, own.point, own.argument),
                *(*_bits(own.gathers, self._words), *_bits(own.reductions, self._words)),
            ],
            dtype=torch.int64,
        )
        self._exchanging = True
        try:
            said = [message.tolist() for message in self._ranks.exchange(encoded)]
        finally:
            self._exchanging = False
        self._ranks.compare_orders([order for order, *_ in said])
        return [self._decode(message) for _, *message in said]

    def _decode(self, message: list[int]) -> Announcement:
        blocked, point, argument, *words = message
        return Announcement(
            _units(words[: self._words]), _units(words[self._words :]), Blocked(blocked), MeetingPoint(point), argument
        )

    def _do(self, decision: Decision) -> None:
        if decision.mismatch:
            raise RankError(decision.mismatch)
        for unit_index, wanters in decision.gathers:
            self._ranks.phase = f"gather of unit {self._names[unit_index]}"
            result = self._service.gather(unit_index, wanters)
            if self._ranks.index in wanters:
                self._settle(self._gathers, unit_index, result)
        for unit_index, contributors in decision.reductions:
            self._ranks.phase = f"reduction of the gradients of unit {self._names[unit_index]}"
            self._service.reduce(unit_index, contributors)
            if self._ranks.index in contributors:
                self._settle(self._reductions, unit_index, None)
        if decision.point:
            self._ranks.phase = decision.point.call
            answer = self._action() if self._action is not None else None
            with self._changed:
                self._blocked, self._action, self._answer = Announcement(), None, [answer]
                self._changed.notify_all()

    def _settle(self, asked_for: dict[int, Request], unit_index: int, result: Pending | None) -> None:
        with self._changed:
            asked = asked_for.pop(unit_index)
            asked.result, asked.settled = result, True
            if self._blocked.blocked is asked.blocked and self._blocked.argument == unit_index:
                self._blocked = Announcement()  # it is about to go on: the next round must not take it for blocked
            self._changed.notify_all()


def _serve(reference: weakref.ref[Rendezvous], asked: threading.Event) -> None:
    while True:
        asked.wait()
        asked.clear()
        rendezvous = reference()
        if rendezvous is None or not rendezvous.run():
            return
        del rendezvous


def _bits(units: frozenset[int], word_count: int) -> list[int]:
    words = [0] * word_count
    for unit in units:
        words[unit // _WORD_BITS] |= 1 << unit % _WORD_BITS
    return words


def _units(words: list[int]) -> frozenset[int]:
    return frozenset(
        index * _WORD_BITS + bit for index, word in enumerate(words) for bit in range(_WORD_BITS) if word >> bit & 1
    )
