# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from offload.device.pending import Pending, Settled
from offload.errors import StorageError
from offload.tiers import Lease, MemoryLedger, StagingPool
from offload.tiers.staging import Released


class Controlled(Pending):
    """Settles when the test says so, or when it is waited for."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.settled = False
        self.waited_count = 0
        self._failure = failure

    def wait(self) -> None:
        self.waited_count += 1
        self.settled = True
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        return self.settled


def pool_of(**counts: int) -> StagingPool:
    pool = StagingPool()
    for purpose, count in counts.items():
        pool.reserve(purpose, count, 6000)
    pool.freeze()
    return pool


def test_capacity_is_the_sum_of_its_consumers() -> None:
    ledger = MemoryLedger()
    pool = StagingPool(ledger=ledger, purpose="pinned")
    pool.reserve("fetch", 3, 10_000)
    pool.reserve("record", 2, 4096)
    pool.reserve("unused", 0, 4096)
    assert pool.nbytes == 3 * 12_288 + 2 * 4096
    assert ledger.total_nbytes == 0
    pool.freeze()
    assert ledger.by_purpose == {"pinned": pool.nbytes}
    leases = [pool.lease("fetch") for _ in range(3)] + [pool.lease("record") for _ in range(2)]
    addresses = sorted((lease.tensor.data_ptr(), lease.tensor.numel()) for lease in leases)
    assert addresses[0][0] % 2**21 == 0
    assert all(address % 4096 == 0 for address, _ in addresses)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(addresses))
    assert sorted(n for _, n in addresses) == [4096, 4096, 10_000, 10_000, 10_000]
    assert ledger.peak_nbytes == pool.nbytes  # leasing allocates nothing
    for lease in leases:
        lease.release()
    pool.close()
    pool.close()


def test_one_pool_lies_within_another_until_that_is_used() -> None:
    ledger = MemoryLedger()

    def within(nbytes: int) -> StagingPool:
        made = StagingPool(ledger=ledger, purpose="for a while", within=outer)
        made.reserve("a", 1, nbytes)
        made.freeze()
        return made

    outer = StagingPool(ledger=ledger, purpose="outer")
    outer.reserve("fetch", 2, 8192)
    outer.freeze()
    inner, larger = within(12_288), within(20_480)
    assert ledger.by_purpose == {"outer": 16_384, "for a while": 20_480}, "what has no room there has memory of its own"
    lease = inner.lease("a")
    lease.tensor.fill_(7)
    lease.release()
    inner.close()
    larger.close()
    first = outer.lease("fetch")
    assert first.tensor.unique().tolist() == [7] and ledger.by_purpose["outer"] == 16_384
    assert within(4096).nbytes == ledger.by_purpose["for a while"] == 4096


def test_misuse_names_the_purpose() -> None:
    pool = StagingPool()
    pool.reserve("fetch", 1, 4096)
    with pytest.raises(AssertionError, match="'fetch' was asked for before freeze"):
        pool.lease("fetch")
    with pytest.raises(AssertionError, match="'fetch' were reserved twice"):
        pool.reserve("fetch", 1, 4096)
    pool.freeze()
    with pytest.raises(AssertionError, match="'late' were reserved after freeze"):
        pool.reserve("late", 1, 4096)
    with pytest.raises(AssertionError, match="frozen twice"):
        pool.freeze()
    with pytest.raises(AssertionError, match=r"no staging buffers were reserved for 'other'; there are \['fetch'\]"):
        pool.lease("other")
    lease = pool.lease("fetch")
    with pytest.raises(AssertionError, match="all 1 staging buffers for 'fetch' are on lease"):
        pool.lease("fetch")
    lease.release()
    with pytest.raises(AssertionError, match="'fetch' was released twice"):
        lease.release()
    with pytest.raises(AssertionError, match="'fetch' was used after its release"):
        _ = lease.tensor
    pool.close()
    with pytest.raises(AssertionError, match="after close"):
        pool.lease("fetch")


def test_a_buffer_whose_last_use_is_done_is_preferred() -> None:
    pool = pool_of(fetch=3)
    leases = [pool.lease("fetch") for _ in range(3)]
    addresses = [lease.tensor.data_ptr() for lease in leases]
    uses = [Controlled() for _ in range(3)]
    for lease, use in zip(leases, uses, strict=True):
        lease.release(after=use)
    assert pool.try_lease("fetch") is None
    uses[2].settled = True
    assert pool.lease("fetch").tensor.data_ptr() == addresses[2]
    assert [use.waited_count for use in uses] == [0, 0, 0]
    assert pool.lease("fetch").tensor.data_ptr() == addresses[0]  # the oldest, after waiting for it
    assert [use.waited_count for use in uses] == [1, 0, 0]


def test_a_failed_last_use_is_raised_and_the_buffer_is_not_lost() -> None:
    pool = pool_of(fetch=1)
    pool.lease("fetch").release(after=Controlled(StorageError("the drive is gone")))
    with pytest.raises(StorageError, match="the drive is gone"):
        pool.lease("fetch")
    pool.lease("fetch").release()
    assert pool.stats.consumers["fetch"].peak_count == 1


def test_a_lease_of_several_buffers_lies_side_by_side() -> None:
    pool = StagingPool()
    pool.reserve("before", 1, 4096)
    pool.reserve("gradients", 5, 4096)
    pool.freeze()
    single = [pool.lease("gradients") for _ in range(5)]
    start = single[0].tensor.data_ptr()
    assert [one.tensor.data_ptr() - start for one in single] == [4096 * index for index in range(5)]
    assert pool.free_count("gradients", 2) == 0 and pool.try_lease("gradients", 2) is None
    for lease in (single[1], single[2], single[4]):
        lease.release()
    # Two that lie side by side, but in two pairs; and the last, which has no neighbour.
    assert pool.free_count("gradients") == 3 and pool.free_count("gradients", 2) == 0
    with pytest.raises(AssertionError, match="on lease"):
        pool.lease("gradients", 2)
    single[3].release()
    assert pool.free_count("gradients", 2) == 1
    pair = pool.lease("gradients", 2)
    assert (pair.width, pair.tensor.data_ptr() - start, pair.tensor.numel()) == (2, 2 * 4096, 2 * 4096)
    assert pool.free_count("gradients") == 2
    assert pool.stats.consumers["gradients"].peak_count == 5
    pair.release()
    assert pool.free_count("gradients") == 4 and pool.free_count("gradients", 2) == 1


def test_what_the_next_lease_waits_for_is_told_before() -> None:
    pool = StagingPool()
    pool.reserve("gradients", 4, 4096)
    pool.freeze()
    leases = [pool.lease("gradients") for _ in range(4)]
    assert pool.coming("gradients") is None  # nothing to wait for would help
    uses = [Controlled() for _ in range(4)]
    for lease, use in zip(leases, uses, strict=True):
        lease.release(after=use)
    coming = pool.coming("gradients", 2)
    assert coming is not None and not coming.done()
    coming.wait()
    assert [use.waited_count for use in uses] == [1, 1, 0, 0]
    assert pool.coming("gradients") is None and pool.coming("gradients", 2) is None
    assert pool.lease("gradients", 2).tensor.data_ptr() == pool.lease("gradients", 2).tensor.data_ptr() - 2 * 4096
    assert [use.waited_count for use in uses] == [1, 1, 1, 1]


def test_a_buffer_that_nobody_had_since_is_had_again_as_it_was() -> None:
    pool = StagingPool()
    pool.reserve("gradients", 4, 4096)
    pool.freeze()
    pair = pool.lease("gradients", 2)
    pair.tensor.fill_(7)
    address, writing = pair.tensor.data_ptr(), Controlled()
    released = pair.release(after=writing)
    again = pool.take_again(released)
    assert again is not None and not writing.settled, "the caller waits for it"
    assert (again.width, again.tensor.data_ptr()) == (2, address) and again.tensor.eq(7).all()
    assert pool.take_again(released) is None, "it is on lease"
    second = again.release()
    assert pool.take_again(released) is None, "that was another lease"
    rest = pool.lease("gradients", 2)
    one = pool.lease("gradients")
    assert pool.take_again(second) is None, "a part of it is on lease"
    one.release()
    assert pool.take_again(second) is None, "a part of it was on lease"
    rest.release()
    assert pool.free_count("gradients", 2) == 2


def test_threads_never_hold_the_same_buffer() -> None:
    pool = pool_of(fetch=3)
    failures: list[str] = []
    # Three holders at once at most, as a schedule would see to.
    slots = threading.Semaphore(3)

    def work(mark: int) -> None:
        for _ in range(300):
            with slots:
                lease = pool.lease("fetch")
                lease.tensor.fill_(mark)
                if not lease.tensor.eq(mark).all():
                    failures.append(f"thread {mark} lost its buffer")
                lease.release(after=Settled())

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.stats.consumers["fetch"].peak_count <= 3


COUNTS = {"fetch": 3, "record": 2}


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: who holds which buffer, and which uses are still going on."""

    leases = Bundle("leases")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(**COUNTS)
        self.held: dict[int, tuple[str, int]] = {}  # address -> purpose, mark
        self.last_use: dict[int, Controlled] = {}
        self.mark = 0
        self.mark_left: dict[int, int] = {}  # address -> what its last holder left, and nobody wrote over
        self.peak = dict.fromkeys(COUNTS, 0)

    def held_count(self, purpose: str) -> int:
        return sum(held == purpose for held, _ in self.held.values())

    def accept(self, purpose: str, lease: Lease) -> Lease:
        address = lease.tensor.data_ptr()
        assert address not in self.held, "two holders of one buffer"
        use = self.last_use.pop(address, None)
        assert use is None or use.settled, "handed out while still in use"
        self.mark = self.mark + 1
        lease.tensor[:8].view(torch.int64).fill_(self.mark)
        self.mark_left.pop(address, None)
        self.held[address] = (purpose, self.mark)
        self.peak[purpose] = max(self.peak[purpose], self.held_count(purpose))
        return lease

    @rule(target=leases, purpose=st.sampled_from(sorted(COUNTS)))
    def try_lease(self, purpose: str) -> object:
        lease = self.pool.try_lease(purpose)
        if lease is not None:
            return self.accept(purpose, lease)
        busy = sum(not use.settled for use in self.last_use.values())
        assert busy or self.held_count(purpose) == COUNTS[purpose], "refused although one was ready"
        return None

    @rule(target=leases, purpose=st.sampled_from(sorted(COUNTS)))
    def lease(self, purpose: str) -> object:
        if self.held_count(purpose) == COUNTS[purpose]:
            with pytest.raises(AssertionError, match="on lease"):
                self.pool.lease(purpose)
            return None
        return self.accept(purpose, self.pool.lease(purpose))

    @rule(target=ended, lease=consumes(leases), busy=st.booleans())
    def release(self, lease: Lease | None, busy: bool) -> object:
        if lease is None:
            return None
        address = lease.tensor.data_ptr()
        _, mark = self.held.pop(address)
        self.mark_left[address] = mark
        if busy:
            self.last_use[address] = Controlled()
        return address, mark, lease.release(after=self.last_use[address] if busy else None)

    @rule(target=leases, end=ended)
    def take_again(self, end: tuple[int, int, Released] | None) -> object:
        if end is None:
            return None
        address, mark, released = end
        lease = self.pool.take_again(released)
        assert (lease is not None) == (self.mark_left.get(address) == mark)
        if lease is None:
            return None
        assert lease.tensor.data_ptr() == address and lease.tensor[:8].view(torch.int64).item() == mark
        self.last_use.pop(address, None)  # the caller's to wait for
        return self.accept(released.purpose, lease)

    @precondition(lambda self: self.last_use)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.last_use[data.draw(st.sampled_from(sorted(self.last_use)))].settled = True

    @rule(lease=leases)
    def still_mine(self, lease: Lease | None) -> None:
        if lease is not None:
            assert lease.tensor[:8].view(torch.int64).item() == self.held[lease.tensor.data_ptr()][1]

    @invariant()
    def peaks_are_those_of_the_model(self) -> None:
        assert {name: consumer.peak_count for name, consumer in self.pool.stats.consumers.items()} == self.peak


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
