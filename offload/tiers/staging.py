# SPDX-License-Identifier: Apache-2.0
"""Host buffers that data passes through on its way between tiers: all of them reserved by name, allocated once.

pool.reserve("parameter fetch", count=3, nbytes=...)    # one line per consumer; the capacity is their sum
pool.freeze()                                           # allocates exactly that
lease = pool.lease("parameter fetch")                   # one holder at a time
pending = store.read(extent, lease.tensor)
...
lease.release(after=pending)                            # handed out again only when that has completed
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from offload.device.pending import Pending
from offload.layout import round_up
from offload.tiers.memory import PAGE_NBYTES, HostMemory, MemoryLedger, RegisterMemory


@dataclass(slots=True, eq=False)
class _Buffer:
    tensor: Tensor
    last_use: Pending | None = None


@dataclass(slots=True)
class _Consumer:
    count: int
    nbytes: int
    free: deque[_Buffer] = field(default_factory=deque)
    leased_count: int = 0
    peak_count: int = 0


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


class Lease:
    """A staging buffer on loan, until `release()`. One holder; not thread-safe in itself."""

    def __init__(self, pool: StagingPool, purpose: str, buffer: _Buffer) -> None:
        self.purpose = purpose
        self._pool = pool
        self._buffer: _Buffer | None = buffer

    @property
    def tensor(self) -> Tensor:
        """The buffer: uint8 [nbytes as reserved], 4 KiB aligned, content undefined at first."""
        if self._buffer is None:
            raise AssertionError(f"a staging buffer for {self.purpose!r} was used after its release")
        return self._buffer.tensor

    def release(self, after: Pending | None = None) -> None:
        """Give the buffer back. `after`: the last operation on it; until that completed nobody else gets the buffer."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise AssertionError(f"a staging buffer for {self.purpose!r} was released twice")
        buffer.last_use = after
        self._pool._take_back(self.purpose, buffer)


class StagingPool:
    """Every staging buffer of an engine. Thread-safe."""

    def __init__(
        self,
        *,
        ledger: MemoryLedger | None = None,
        register: RegisterMemory | None = None,
        purpose: str = "staging",
    ) -> None:
        """`purpose` is the name on the ledger."""
        self._ledger = ledger
        self._register = register
        self._purpose = purpose
        self._lock = threading.Lock()
        self._consumers: dict[str, _Consumer] = {}
        self._memory: HostMemory | None = None
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
        self._memory = HostMemory(
            self.nbytes, self._purpose, ledger=self._ledger, register=self._register, prefault=True, direct_io=True
        )
        start = 0
        for consumer in self._consumers.values():
            for _ in range(consumer.count):
                consumer.free.append(_Buffer(self._memory.tensor[start : start + consumer.nbytes]))
                start += round_up(consumer.nbytes, PAGE_NBYTES)

    def free_count(self, purpose: str) -> int:
        """How many buffers of the consumer are not on lease (the last use of some may still be going on)."""
        with self._lock:
            return len(self._consumer(purpose).free)

    def coming(self, purpose: str) -> Pending | None:
        """What `lease` would wait for now; None: for nothing, or all are on lease."""
        with self._lock:
            free = self._consumer(purpose).free
            if not free or any(buffer.last_use is None or buffer.last_use.done() for buffer in free):
                return None
            return free[0].last_use

    def try_lease(self, purpose: str) -> Lease | None:
        """A buffer that is free and whose last use completed; None where there is none. Never blocks."""
        with self._lock:
            buffer = self._take_settled(self._consumer(purpose))
        return self._hand_out(purpose, buffer) if buffer is not None else None

    def lease(self, purpose: str) -> Lease:
        """A buffer, after waiting for its last use where that is still going on (and raising the failure of it).

        The schedule never asks for more than was reserved, so finding all of them on lease is a bug:
        `AssertionError`."""
        with self._lock:
            consumer = self._consumer(purpose)
            buffer = self._take_settled(consumer)
            if buffer is None:
                if not consumer.free:
                    raise AssertionError(f"all {consumer.count} staging buffers for {purpose!r} are on lease")
                # The one given back first is likely to be ready first.
                buffer = self._take(consumer, consumer.free[0])
        if buffer.last_use is not None:
            try:
                buffer.last_use.wait()
            except BaseException:
                # Settled, if badly: the buffer is free again, and the failure is the caller's to see.
                self._take_back(purpose, buffer)
                raise
        return self._hand_out(purpose, buffer)

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
            if self._memory is not None:
                self._memory.close()

    def _consumer(self, purpose: str) -> _Consumer:
        if self._memory is None or self._closed:
            when = "after close()" if self._closed else "before freeze()"
            raise AssertionError(f"a staging buffer for {purpose!r} was asked for {when}")
        consumer = self._consumers.get(purpose)
        if consumer is None:
            raise AssertionError(f"no staging buffers were reserved for {purpose!r}; there are {sorted(self._consumers)}")
        return consumer

    def _take_settled(self, consumer: _Consumer) -> _Buffer | None:
        for buffer in consumer.free:
            if buffer.last_use is None or buffer.last_use.done():
                buffer.last_use = None
                return self._take(consumer, buffer)
        return None

    @staticmethod
    def _take(consumer: _Consumer, buffer: _Buffer) -> _Buffer:
        consumer.free.remove(buffer)
        consumer.leased_count += 1
        consumer.peak_count = max(consumer.peak_count, consumer.leased_count)
        return buffer

    def _hand_out(self, purpose: str, buffer: _Buffer) -> Lease:
        buffer.last_use = None
        return Lease(self, purpose, buffer)

    def _take_back(self, purpose: str, buffer: _Buffer) -> None:
        with self._lock:
            consumer = self._consumers[purpose]
            consumer.leased_count -= 1
            if not self._closed:
                consumer.free.append(buffer)
