# SPDX-License-Identifier: Apache-2.0
"""When freed memory is given back to the system."""

from __future__ import annotations

import ctypes
import errno
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from offload.device.host_memory.freed_memory import LOOK_NBYTES, FreedMemory

MIB = 2**20


class Process:
    """Of `needed` bytes in use and `holes` bytes that a trim gives back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, trims: bool = True) -> None:
        """`trims`: whether its C library can."""
        self.needed = self.holes = 0
        self.memory_info = Mock(side_effect=lambda: SimpleNamespace(rss=self.needed + self.holes))
        self.trim = Mock(side_effect=lambda _: setattr(self, "holes", 0))
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=self.trim) if trims else object())
            self.freed = FreedMemory()
        monkeypatch.setattr(psutil, "Process", lambda: self)


def test_small_amounts_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.needed = 100 * MIB
    for _ in range(15):
        process.freed.about_to_free(MIB)
    assert not process.trim.called
    process.freed.about_to_allocate(MIB)
    assert process.trim.call_count == 1


def test_holes_stay_as_long_as_they_are_below_what_was_needed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.needed = 300 * MIB
    process.freed.about_to_allocate(100 * MIB)  # from now on 400 MiB is known to be needed
    process.needed, process.holes = 200 * MIB, 150 * MIB
    process.freed.about_to_free(LOOK_NBYTES)
    process.freed.about_to_allocate(50 * MIB)
    assert process.trim.call_count == 1
    process.freed.about_to_allocate(51 * MIB)
    assert process.trim.call_count == 2 and process.holes == 0


@pytest.mark.parametrize(
    ("needed", "before", "allowed"), [(300, 30, 30), (320, 1000, 40)], ids=["of between two looks", "left from before training"]
)
def test_holes_stay_below_what_was_reached(monkeypatch: pytest.MonkeyPatch, needed: int, before: int, allowed: int) -> None:
    """More was in use before the first look than at it: holes of so much take nothing that was not taken before. Far more was
    left by something else."""
    process = Process(monkeypatch)
    process.needed, process.holes = needed * MIB, before * MIB
    process.freed.about_to_free(LOOK_NBYTES)
    assert process.trim.call_count == 1
    process.holes = allowed * MIB
    process.freed.about_to_free(LOOK_NBYTES)
    assert process.trim.call_count == 1
    process.holes = (allowed + 1) * MIB
    process.freed.about_to_free(LOOK_NBYTES)
    assert process.trim.call_count == 2


def test_holes_alone_raise_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.needed = 300 * MIB
    process.freed.about_to_free(LOOK_NBYTES)
    for count in range(2, 12):  # ever more of them
        process.holes = count * MIB
        process.freed.about_to_free(LOOK_NBYTES)
        assert process.trim.call_count == count
    process.holes = MIB
    process.freed.about_to_free(LOOK_NBYTES)
    assert process.trim.call_count == 12


def test_what_is_freed_is_not_counted_as_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.needed = 300 * MIB
    process.freed.about_to_free(100 * MIB)
    process.needed = 301 * MIB
    process.freed.about_to_free(100 * MIB)
    assert process.trim.call_count == 2


def test_where_the_c_library_has_no_trim_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, trims=False)
    process.freed.about_to_allocate(100 * MIB)
    process.freed.give_back()
    assert not process.memory_info.called


def test_a_process_that_may_open_no_file_trims_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.memory_info.side_effect = OSError(errno.EMFILE, "Too many open files", "/proc/self/stat")
    process.freed.about_to_allocate(LOOK_NBYTES)
    process.freed.about_to_allocate(LOOK_NBYTES)
    assert process.trim.call_count == 2
