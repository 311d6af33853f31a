# SPDX-License-Identifier: Apache-2.0
"""An interrupt at each moment of a wait for other ranks at which Python looks for signals: it stays what it is, no lock is kept
by who is gone, and the others are no longer told that this rank waits."""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace

import pytest

from offload.ranks.next_transfers import Blocked, MeetingPoint
from offload.ranks.rendezvous import Rendezvous
from offload.ranks.threads import Threads

POINT = next(point for point in MeetingPoint if point is not MeetingPoint.NONE)


def test_a_wait_for_a_while_ends_where_the_thread_is_put_off_as_it_begins() -> None:
    """A communication thread waits so for a tenth of a millisecond: without an end its rank would meet the others no more."""
    asked = Threads().queue()

    def wait_often() -> None:
        for _ in range(100_000):
            asked.put(None)
            asked.get()
            with contextlib.suppress(queue.Empty):
                asked.get(timeout=1e-9)

    waiting = threading.Thread(target=wait_often, daemon=True)
    waiting.start()
    waiting.join(100)
    assert not waiting.is_alive()


class Interruption:
    """Raises KeyboardInterrupt at the moment of that number. Python handles signals where a function begins and after a call,
    within what a `with` around it protects: not between a lock's `__enter__` and that."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call" or argument is sys.setprofile:
            return
        if self._left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt
        self._left -= 1


class Attending(threading.Thread):
    """As a communication thread does: once this rank waits, it is answered. In the end, what is said of this rank."""

    def __init__(self, rendezvous: Rendezvous, answer: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._rendezvous, self._answer = rendezvous, answer
        self.ends = False
        self.said: Blocked | None = None

    def run(self) -> None:
        while not self.ends:
            if self._blocked() is not Blocked.ON_NOTHING:
                self._answer()
            self._rendezvous.pause(0.005)
        self.said = self._blocked()

    def _blocked(self) -> Blocked:
        announcement = self._rendezvous.announcement()
        return Blocked.ON_NOTHING if announcement is None else announcement.blocked


def interrupted(moment: int, wait: Callable[[], object]) -> bool:
    """Whether there was such a moment."""
    sys.setprofile(Interruption(moment))
    try:
        wait()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("wait", ["block", "meet"])
def test_an_interrupt_at_each_moment_of_a_wait_stays_one_and_keeps_no_lock(wait: str) -> None:
    for moment in itertools.count():
        rendezvous = Rendezvous(SimpleNamespace(phase="", threads=Threads()), ["unit"])  # type: ignore[arg-type]
        asked = rendezvous.ask_gather(0)
        settle, meet = partial(rendezvous.settle_gather, 0, None), partial(rendezvous.meet, POINT, lambda: "all are here")
        attending = Attending(rendezvous, settle if wait == "block" else rendezvous.pass_point)
        attending.start()
        came = interrupted(moment, asked.wait if wait == "block" else meet)
        attending.ends = True
        attending.join(10)
        assert not attending.is_alive(), f"moment {moment}: who is gone keeps the lock"
        assert attending.said is Blocked.ON_NOTHING, f"moment {moment}: who is gone is said to wait"
        if not came:
            break
    assert moment > 10
