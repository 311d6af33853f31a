# SPDX-License-Identifier: Apache-2.0
"""The thread that communicates for a rendezvous: it talks to the other ranks, and does what all of them agreed on.

It announces what is asked for to the other ranks, decides with them (`offload.ranks.next_transfers`), and has the `Service`
move the bytes, while the training thread computes. Nothing of it exists on one rank.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from offload.device.pending import Pending
from offload.errors import RankError
from offload.ranks.next_transfers import Announcement, Blocked, Decision, MeetingPoint, decide
from offload.ranks.rendezvous import Rendezvous
from offload.ranks.threads import Asked
from offload.ranks.transport import Ranks

_WORD_BITS = 62
_IDLE_SECONDS = (0.0001, 0.002)
"""How long a round that had nothing to do waits before the next: at first, and at most."""
_WATCH_SECONDS = 0.1
"""The same where this rank asks for nothing and only watches the others."""


class Service(Protocol):
    """Moves the bytes of what was agreed. Called by the communication thread."""

    def gather(self, unit_index: int, wanters: frozenset[int]) -> Pending | None:
        """Bring a unit to those members; returns what compute must wait for, if this is one of them and that is not over."""

    def reduce(self, unit_index: int, contributors: frozenset[int]) -> None:
        """Average a unit's gradients over all members, and hand this rank its part."""


class CommunicationThread:
    """See the module. `close()` ends its thread; so does dropping it."""

    def __init__(self, ranks: Ranks, rendezvous: Rendezvous, service: Service) -> None:
        self._ranks, self._rendezvous, self._service = ranks, rendezvous, service
        self._names = rendezvous.unit_names
        self._words = -(-len(self._names) // _WORD_BITS)
        self._closing = self._exchanging = False
        # The thread knows the queue alone while there is nothing to do: it ends with this object.
        weakref.finalize(self, rendezvous.asked.put, None).atexit = False
        reference, asked = weakref.ref(self), rendezvous.asked
        self._thread = ranks.threads.start(lambda: _serve(reference, asked), "offload-ranks")

    def close(self) -> None:
        """End the thread. All ranks have met before, or this one is abandoned: nothing is under way. Idempotent."""
        rendezvous = self._rendezvous
        self._closing = True
        rendezvous.wake()
        if rendezvous.failure is None and (self._exchanging or not rendezvous.is_idle):
            return  # stuck in an exchange with ranks that are gone: it ends with the process
        self._thread.join()
        self._ranks.close()

    # ---- its thread ----------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Do all that is asked for, and what the other ranks want meanwhile; whether there may be more."""
        rendezvous = self._rendezvous
        try:
            idle_seconds = _IDLE_SECONDS[0]
            while (announcement := self._announcement()) is not None:
                said = self._exchange(announcement)
                decision = decide(said)
                if decision.is_nothing:
                    rendezvous.pause(_WATCH_SECONDS if rendezvous.is_idle else idle_seconds)
                    idle_seconds = min(2 * idle_seconds, _IDLE_SECONDS[1])
                    continue
                idle_seconds = _IDLE_SECONDS[0]
                self._do(decision)
        except BaseException as error:
            self._ranks.say_failed(f"{type(error).__name__}: {error}")
            rendezvous.fail(error)
            self._ranks.leave()
        return rendezvous.failure is None and not self._closing

    def _announcement(self) -> Announcement | None:
        return None if self._closing and self._rendezvous.is_idle else self._rendezvous.announcement()

    def _exchange(self, own: Announcement) -> list[Announcement]:
        encoded = torch.tensor(
            [
                *(self._ranks.order_digest, own.blocked, own.point, own.argument),
                *(*_bits(own.gathers, self._words), *_bits(own.reductions, self._words)),
            ],
            dtype=torch.int64,
            device="cpu",
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
                self._rendezvous.settle_gather(unit_index, result)
        for unit_index, contributors in decision.reductions:
            self._ranks.phase = f"reduction of the gradients of unit {self._names[unit_index]}"
            self._service.reduce(unit_index, contributors)
            if self._ranks.index in contributors:
                self._rendezvous.settle_reduction(unit_index)
        if decision.point:
            self._ranks.phase = decision.point.call
            self._rendezvous.pass_point()


def _serve(reference: weakref.ref[CommunicationThread], asked: Asked) -> None:
    while True:
        asked.get()
        owner = reference()
        if owner is None or not owner.run():
            return
        del owner


def _bits(units: frozenset[int], word_count: int) -> list[int]:
    words = [0] * word_count
    for unit in units:
        words[unit // _WORD_BITS] |= 1 << unit % _WORD_BITS
    return words


def _units(words: list[int]) -> frozenset[int]:
    return frozenset(
        index * _WORD_BITS + bit for index, word in enumerate(words) for bit in range(_WORD_BITS) if word >> bit & 1
    )
