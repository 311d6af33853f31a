# SPDX-License-Identifier: Apache-2.0
"""Copies that read a chunk where it lies in its store, and those who are about to write there."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from offload.device.pending import Latch, Pending
from tests.inside import parts_of

from .models import ON_CPU, adamw, stack


class Standing(Pending):
    """A copy that is over when it is let go. `cut_short`: the first who waits is interrupted."""

    def __init__(self, cut_short: bool = False) -> None:
        self.over, self.waiting, self._cut_short = Latch(), threading.Semaphore(0), cut_short

    def wait(self) -> None:
        self.waiting.release()
        if self._cut_short:
            self._cut_short = False
            raise KeyboardInterrupt
        self.over.wait()

    def done(self) -> bool:
        return self.over.is_set()


def copied(opened: Any, copy: Pending) -> tuple[Any, Any]:
    """A store, and a chunk in it that `copy` reads."""
    engine = opened((model := stack(blocks=1)), adamw(model), ON_CPU)
    store = parts_of(engine).parameter_store
    chunk = parts_of(engine).units[0].chunks[0]
    store.copying(chunk, copy)
    return store, chunk


def test_whoever_comes_while_another_waits_for_it_waits_too(opened: Any) -> None:
    copy, after = Standing(), list[bool]()
    store, chunk = copied(opened, copy)
    asks = (lambda: store.settle_copies(chunk), lambda: store.settle_copies(chunk), store.settle_all_copies)
    threads = [threading.Thread(target=lambda ask=ask: (ask(), after.append(copy.done()))) for ask in asks]
    for thread in threads:
        thread.start()
        assert copy.waiting.acquire(timeout=60)  # it waits, before the next comes
    copy.over.set()
    for thread in threads:
        thread.join(60)
    assert after == [True] * 3 and store.is_copied(chunk)


def test_after_a_wait_that_was_interrupted(opened: Any) -> None:
    copy = Standing(cut_short=True)
    store, chunk = copied(opened, copy)
    with pytest.raises(KeyboardInterrupt):
        store.settle_copies(chunk)
    assert not store.is_copied(chunk)
    copy.over.set()
    store.settle_copies(chunk)
    assert chunk.parameters.copy is None
