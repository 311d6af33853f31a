# SPDX-License-Identifier: Apache-2.0
"""Host buffers that data passes through on its way between tiers: all of them reserved by name, allocated once.

pool.reserve("parameter fetch", count=3, nbytes=...)    # one line per consumer; the capacity is their sum
pool.freeze()                                           # allocates exactly that
lease = pool.lease("parameter fetch")                   # one holder at a time
pending = store.read(extent, lease.tensor)
...
lease.release(after=pending)                            # handed out again only when that has completed

Where what passes through is now and then larger, a lease may be of several buffers that lie side by side (`width`).
A buffer that was given back keeps what lies in it until it is handed out again. Who wants that after all may ask for the same
buffer once more (`take_again`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from offload.device.pending import AllOf, Pending
from offload.layout import round_up
from offload.tiers.memory import PAGE_NBYTES, HostMemory, MemoryLedger, RegisterMemory


@dataclass(slots=True, eq=False)
class _Buffer:
    tensor: Tensor
    index: int
    """Among those of its consumer."""
    is_free: bool = True
    last_use: Pending | None = None
    lease_count: int = 0
    """How often it was handed out."""

    @property
    def is_settled(self) -> bool:
        return self.last_use is None or self.last_use.done()


_Group = Sequence[_Buffer]
"""Buffers that lie side by side."""


@dataclass(slots=True)
class _Consumer:
    count: int
    nbytes: int
    memory: Tensor | None = None
    """Of all its buffers, in order."""
    buffers: list[_Buffer] = field(default_factory=list)
    free: deque[_Buffer] = field(default_factory=deque)
    """Those not on lease, the one given back first in front."""
    peak_count: int = 0

    def free_groups(self, width: int) -> Iterator[_Group]:
        """Buffers that may be leased together. Cut at multiples of `width`, so that each is in one group."""
        for buffer in self.free:
            if buffer.index % width == 0:
                group = self.buffers[buffer.index : buffer.index + width]
                if len(group) == width and all(one.is_free for one in group):
                    yield group

    def settled_group(self, width: int) -> _Group | None:
        return next((group for group in self.free_groups(width) if all(one.is_settled for one in group)), None)


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Of one consumer: its buffers, the bytes of each, and the most that were on lease at once."""

    count: int
    nbytes: int
    peak_count: int


@dataclass(frozen=True, slots=True)
class StagingStats:
    """`nbytes` is all that the pool has allocated; `consumers` are by purpose."""

    nbytes: int
    consumers: dict[str, ConsumerStats]


@dataclass(frozen=True, slots=True)
class Released:
    """A lease that is over: which buffers it was of, and the how manieth of each it was."""

    purpose: str
    first: int
    lease_counts: tuple[int, ...]


class Lease:
    """A staging buffer on loan, until `release()`. One holder; not thread-safe in itself."""

    def __init__(self, pool: StagingPool, purpose: str, buffers: _Group, tensor: Tensor) -> None:
        self.purpose, self.width = purpose, len(buffers)
        self._pool = pool
        self._buffers: _Group | None = buffers
        self._tensor: Tensor | None = tensor

    @property
    def tensor(self) -> Tensor:
        """The buffer: uint8 [width x nbytes as reserved], 4 KiB aligned, content undefined at first."""
        if self._tensor is None:
            raise AssertionError(f"a staging buffer for {self.purpose!r} was used after its release")
        return self._tensor

    def release(self, after: Pending | None = None) -> Released:
        """Give the buffer back. `after`: the last operation on it; until that completed nobody else gets the buffer. Returns
        what `StagingPool.take_again` goes by."""
        buffers, self._buffers = self._buffers, None
        self._tensor = None  # else whoever still has the lease keeps all of the pool's memory
        if buffers is None:
            raise AssertionError(f"a staging buffer for {self.purpose!r} was released twice")
        lease_counts = _lease_counts(buffers)  # before somebody else may have it
        for buffer in buffers:
            buffer.last_use = after
        self._pool._take_back(self.purpose, buffers)
        return Released(self.purpose, buffers[0].index, lease_counts)


class StagingPool:
    """Every staging buffer of an engine. Thread-safe."""

    def __init__(
        self,
        *,
        ledger: MemoryLedger | None = None,
        register: RegisterMemory | None = None,
        purpose: str = "staging",
        within: StagingPool | None = None,
    ) -> None:
        """`purpose` is the name on the ledger. `within`: a pool of which nobody leases anything meanwhile: these buffers
        lie in its memory, if it has as much and nobody had any of it before."""
        self._ledger = ledger
        self._register = register
        self._purpose = purpose
        self._within = within
        self._lock = threading.Lock()
        self._consumers: dict[str, _Consumer] = {}
        self._own: HostMemory | None = None
        self._memory: Tensor | None = None
        """Of all buffers: its own, or a part of the other pool's."""
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Host memory of all buffers: the sum of count x nbytes rounded up to 4 KiB. Known before `freeze()`."""
        return sum(consumer.count * round_up(consumer.nbytes, PAGE_NBYTES) for consumer in self._consumers.values())

    def reserve(self, purpose: str, count: int, nbytes: int) -> None:
        """Ask for `count` buffers of `nbytes` for one consumer. Only before `freeze()`, and once for each purpose."""
        if self._memory is not None:
            raise AssertionError(f"staging buffers for {purpose!r} were reserved after freeze()")
        if purpose in self._consumers:
            raise AssertionError(f"staging buffers for {purpose!r} were reserved twice")
        if count < 0 or nbytes <= 0:
            raise AssertionError(f"staging buffers for {purpose!r}: {count} of {nbytes} bytes")
        self._consumers[purpose] = _Consumer(count, nbytes)

    def freeze(self) -> None:
        """Allocate. Raises `BudgetError` where the system has not that much memory."""
        if self._memory is not None:
            raise AssertionError("the staging pool was frozen twice")
        self._memory = self._within.unused(self.nbytes) if self._within is not None else None
        if self._memory is None:
            self._own = HostMemory(
                self.nbytes, self._purpose, ledger=self._ledger, register=self._register, prefault=True, direct_io=True
            )
            self._memory = self._own.tensor
        start = 0
        for consumer in self._consumers.values():
            first, step = start, round_up(consumer.nbytes, PAGE_NBYTES)
            for index in range(consumer.count):
                buffer = _Buffer(self._memory[start : start + consumer.nbytes], index)
                consumer.buffers.append(buffer)
                consumer.free.append(buffer)
                start += step
            consumer.memory = self._memory[first:start]

    def unused(self, nbytes: int) -> Tensor | None:
        """So much of the memory, uint8 [nbytes], if nobody has leased any of it yet; None where there is not as much."""
        with self._lock:
            was_leased = any(consumer.peak_count for consumer in self._consumers.values())
            if self._memory is None or self._memory.nbytes < nbytes or was_leased:
                return None
            return self._memory[:nbytes]

    def free_count(self, purpose: str, width: int = 1) -> int:
        """How many leases of so many buffers there could be now (the last use of some may still be going on)."""
        with self._lock:
            consumer = self._consumer(purpose)
            return len(consumer.free) if width == 1 else sum(1 for _ in consumer.free_groups(width))

    def coming(self, purpose: str, width: int = 1) -> Pending | None:
        """What `lease` would wait for now; None: for nothing, or too many are on lease."""
        with self._lock:
            consumer = self._consumer(purpose)
            first = next(consumer.free_groups(width), None)
            if first is None or consumer.settled_group(width) is not None:
                return None
            return _last_use(first)

    def try_lease(self, purpose: str, width: int = 1) -> Lease | None:
        """A buffer that is free and whose last use completed; None where there is none. Never blocks."""
        with self._lock:
            consumer = self._consumer(purpose)
            group = consumer.settled_group(width)
            if group is not None:
                self._take(consumer, group)
        return self._hand_out(purpose, group) if group is not None else None

    def lease(self, purpose: str, width: int = 1) -> Lease:
        """A buffer, after waiting for its last use where that is still going on (and raising the failure of it).

        The schedule never asks for more than was reserved, so finding all of them on lease is a bug:
        `AssertionError`."""
        with self._lock:
            consumer = self._consumer(purpose)
            settled = group = consumer.settled_group(width)
            if group is None:
                # The one given back first is likely to be ready first.
                group = next(consumer.free_groups(width), None)
            if group is None:
                raise AssertionError(f"all {consumer.count} staging buffers for {purpose!r} are on lease")
            self._take(consumer, group)
        if settled is None:
            try:
                _last_use(group).wait()
            except BaseException:
                # Settled, if badly: the buffer is free again, and the failure is the caller's to see.
                self._take_back(purpose, group)
                raise
        return self._hand_out(purpose, group)

    def take_again(self, released: Released) -> Lease | None:
        """The buffer of a lease that is over, with what lay in it; None where it was handed out since. What it was released
        `after` may be going on, and is the caller's to wait for before anybody writes to the buffer. Never blocks."""
        with self._lock:
            consumer = self._consumer(released.purpose)
            group = consumer.buffers[released.first : released.first + len(released.lease_counts)]
            if not all(buffer.is_free for buffer in group) or _lease_counts(group) != released.lease_counts:
                return None
            self._take(consumer, group)
        return self._hand_out(released.purpose, group)

    @property
    def stats(self) -> StagingStats:
        with self._lock:
            consumers = {
                purpose: ConsumerStats(consumer.count, consumer.nbytes, consumer.peak_count)
                for purpose, consumer in self._consumers.items()
            }
            return StagingStats(self.nbytes, consumers)

    def close(self) -> None:
        """Let go of the memory; leases out keep theirs. May be called again."""
        with self._lock:
            self._closed = True
            for consumer in self._consumers.values():
                consumer.free.clear()
                consumer.buffers.clear()
                consumer.memory = None
            self._memory = None
            if self._own is not None:
                self._own.close()

    def _consumer(self, purpose: str) -> _Consumer:
        if self._memory is None or self._closed:
            when = "after close()" if self._closed else "before freeze()"
            raise AssertionError(f"a staging buffer for {purpose!r} was asked for {when}")
        consumer = self._consumers.get(purpose)
        if consumer is None:
            raise AssertionError(f"no staging buffers were reserved for {purpose!r}; there are {sorted(self._consumers)}")
        return consumer

    @staticmethod
    def _take(consumer: _Consumer, group: _Group) -> None:
        for buffer in group:
            consumer.free.remove(buffer)
            buffer.is_free = False
            buffer.lease_count += 1
        consumer.peak_count = max(consumer.peak_count, consumer.count - len(consumer.free))

    def _hand_out(self, purpose: str, group: _Group) -> Lease:
        for buffer in group:
            buffer.last_use = None
        first = group[0]
        if len(group) == 1:
            return Lease(self, purpose, group, first.tensor)
        memory, nbytes = self._consumers[purpose].memory, first.tensor.nbytes
        assert memory is not None and nbytes % PAGE_NBYTES == 0, "between these buffers lies something else"
        return Lease(self, purpose, group, memory[first.index * nbytes : (first.index + len(group)) * nbytes])

    def _take_back(self, purpose: str, group: _Group) -> None:
        with self._lock:
            if not self._closed:
                for buffer in group:
                    buffer.is_free = True
                    self._consumers[purpose].free.append(buffer)


def _lease_counts(group: _Group) -> tuple[int, ...]:
    return tuple(buffer.lease_count for buffer in group)


def _last_use(group: _Group) -> Pending:
    """Of all of them."""
    return AllOf([buffer.last_use for buffer in group if buffer.last_use is not None])
