# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch

from offload.errors import BudgetError
from offload.layout import Extent
from offload.tiers import CpuStore, HostMemory, MemoryLedger, StagingPool


def resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as file:
        ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in file]
    return any(start <= address < stop for start, stop in ranges)


def test_exact_zeroed_and_on_a_huge_page_boundary() -> None:
    for nbytes in (1, 4096, 4097, 3 * 2**20 + 5):
        memory = HostMemory(nbytes, "states")
        assert memory.tensor.shape == (nbytes,) and memory.tensor.dtype == torch.uint8
        assert memory.tensor.data_ptr() % 2**21 == 0
        assert not memory.tensor.any()
        memory.close()


def test_prefault_makes_these_pages_and_no_more() -> None:
    before = resident_nbytes()
    memory = HostMemory(33 * 2**20, "states", prefault=True)
    grown = resident_nbytes() - before
    assert 33 * 2**20 <= grown < 34.5 * 2**20
    memory.close()
    assert resident_nbytes() - before < 2**20


def test_nothing_is_resident_before_it_is_touched() -> None:
    before = resident_nbytes()
    memory = HostMemory(2**33, "states")
    assert resident_nbytes() - before < 2**20
    memory.close()


def test_tensors_keep_the_mapping_and_the_ledger_tells_the_truth() -> None:
    ledger = MemoryLedger()
    memory = HostMemory(8192, "gradients", ledger=ledger)
    part = memory.tensor[4096:].view(torch.float32)
    part.fill_(2.5)
    memory.close()
    memory.close()
    gc.collect()
    assert part.eq(2.5).all()
    assert ledger.by_purpose == {"gradients": 8192}
    with pytest.raises(AssertionError, match=r"'gradients' was used after close"):
        _ = memory.tensor
    del part
    assert ledger.by_purpose == {} and ledger.peak_nbytes == 8192


def test_ledger_sums_and_peaks() -> None:
    ledger = MemoryLedger()
    first, second = HostMemory(100, "a", ledger=ledger), HostMemory(8192, "b", ledger=ledger)
    third = HostMemory(4096, "a", ledger=ledger)
    assert ledger.by_purpose == {"a": 8192, "b": 8192}  # whole pages
    second.close()
    assert (ledger.total_nbytes, ledger.peak_nbytes) == (8192, 16384)
    first.close()
    third.close()
    assert ledger.total_nbytes == 0
    with pytest.raises(AssertionError, match="more was freed"):
        ledger.freed("a", 1)
        _ = ledger.total_nbytes


def test_registered_before_use_and_unregistered_while_still_mapped() -> None:
    events: list[tuple[str, int, int]] = []

    def register(address: int, nbytes: int):
        events.append(("register", address, nbytes))

        def unregister() -> None:
            assert is_mapped(address), "already unmapped"
            events.append(("unregister", address, nbytes))

        return unregister

    memory = HostMemory(5000, "states", register=register)
    address = memory.tensor.data_ptr()
    assert events == [("register", address, 8192)]
    memory.close()
    assert events == [("register", address, 8192), ("unregister", address, 8192)]


def test_a_registration_that_fails_leaves_nothing() -> None:
    ledger = MemoryLedger()

    def register(address: int, nbytes: int):
        raise RuntimeError("no more pinned memory")

    before = resident_nbytes()
    with pytest.raises(RuntimeError):
        HostMemory(2**25, "states", ledger=ledger, register=register, prefault=True)
    gc.collect()
    assert ledger.total_nbytes == 0 and resident_nbytes() - before < 2**22


def was_interrupted(moment: int, call: Callable[[], None]) -> bool:
    """Call it, with a KeyboardInterrupt at that moment, of those where Python runs a signal's handler; whether there are so
    many."""
    left, is_over = moment, False

    def count(_: object, event: str, __: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and not is_over
        if left == 0 and not is_over:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(count)
        call()
        is_over = True
    sys.setprofile(None)
    return left <= 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_memory_is_freed_leaves_none_registered_that_is_not_mapped() -> None:
    """At every moment. Its addresses may be others' then, whom the kernel would take for this."""
    for moment in itertools.count(1):
        known, ledger = set[int](), MemoryLedger()

        def register(address: int, nbytes: int, known: set[int] = known):
            known.add(address)
            return lambda: known.remove(address)

        memory = HostMemory(8192, "states", ledger=ledger, register=register)
        was_struck = was_interrupted(moment, memory.close)
        assert all(is_mapped(address) for address in known), f"moment {moment}"
        del memory
        other = HostMemory(8192, "states")
        assert not known and (ledger.total_nbytes == 0 or was_struck), f"moment {moment}"
        other.close()
        if not was_struck:
            break
    assert moment > 8


def test_memory_that_the_garbage_collector_frees_as_other_memory_is_made() -> None:
    """At every allocation of objects in there: it takes the memory out of what is gone through."""
    thresholds, ledger = gc.get_threshold(), MemoryLedger()
    others = [HostMemory(8192, "states") for _ in range(24)]  # of so many Python allocates what they are gone through in
    gc.disable()
    try:
        for after in range(1, 40):
            gc.set_threshold(1_000_000)
            gc.collect()
            for _ in range(3):
                circle: list[object] = [HostMemory(8192, "states", ledger=ledger)]
                circle.append(circle)
            del circle
            gc.set_threshold(gc.get_count()[0] + after)
            gc.enable()
            HostMemory(8192, "gradients", ledger=ledger).close()
            gc.disable()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    gc.collect()
    assert ledger.total_nbytes == 0 and len(others) == 24


def test_no_memory_is_a_budget_error_that_says_what_for() -> None:
    with pytest.raises(BudgetError, match=r"host memory for exp_avg .*lower cpu_memory"):
        HostMemory(2**60, "exp_avg")


def test_empty() -> None:
    memory = HostMemory(0, "nothing")
    assert memory.tensor.numel() == 0
    store = CpuStore("nothing", [])
    assert store.nbytes == 0
    store.close()


def test_a_forked_child_sees_stores_but_not_the_memory_of_transfers() -> None:
    store = CpuStore("states", [Extent(0, 4096)])
    pool = StagingPool()
    pool.reserve("fetch", 1, 4096)
    pool.freeze()
    view, lease = store.view(Extent(0, 4096)), pool.lease("fetch")
    assert view is not None
    signals = []
    for tensor in (view, lease.tensor):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # the test runner would print a trace
            ctypes.string_at(tensor.data_ptr(), 1)
            os._exit(0)
        signals.append(os.WTERMSIG(os.waitpid(child, 0)[1]))
    assert signals == [0, signal.SIGSEGV]


def test_close_of_store_and_pool_leaves_views_alive() -> None:
    ledger = MemoryLedger()
    extent = Extent(0, 8192)
    store = CpuStore("states", [extent], ledger=ledger)
    view = store.view(extent)
    assert view is not None
    pool = StagingPool(ledger=ledger)
    pool.reserve("fetch", 2, 4096)
    pool.freeze()
    lease = pool.lease("fetch")
    store.close()
    pool.close()
    view.fill_(1)
    lease.tensor.fill_(2)
    assert ledger.by_purpose == {"states": 8192, "staging": 8192}
    lease.release()
    del view, lease
    assert ledger.by_purpose == {}
