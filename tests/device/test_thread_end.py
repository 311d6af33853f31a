# SPDX-License-Identifier: Apache-2.0
"""Threads whose end is waited for again where an interrupt ended the wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from offload.device.lane import ThreadLane
from offload.device.thread_end import AwaitedThread, has_ended, start_uninterrupted
from tests.threads import no_more_threads


def test_a_join_after_one_that_was_interrupted_waits() -> None:
    go, done = threading.Event(), list[int]()

    def work() -> None:
        assert go.wait(60)
        time.sleep(0.2)
        done.append(1)

    thread = AwaitedThread(work, (), "awaited")
    start_uninterrupted(thread)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not has_ended(thread)
    go.set()
    thread.join()
    assert done == [1] and has_ended(thread)


def test_what_starting_a_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_threads(monkeypatch, "no more")
    with pytest.raises(RuntimeError, match="no more"):
        start_uninterrupted(threading.Thread(target=lambda: None))


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    lane = ThreadLane("forked")
    lane.submit(lambda: None).wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        thread = lane._thread
        assert thread is not None
        thread.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lane.close()
    assert not [one for one in threading.enumerate() if one.name == "offload-forked"]
