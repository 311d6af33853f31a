# SPDX-License-Identifier: Apache-2.0
"""Lanes of host work: jobs that run one after another, in the order in which they were submitted.

`ThreadLane` runs them on a thread of its own. `InlineLane` runs them in whoever first waits for one of them: on a
device that is the CPU itself a second thread would only compete with the model for cores. Both give the same order,
so both give the same numbers.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from offload.device.host_memory.memory_limits import host_memory_limits
from offload.device.pending import Latch, Pending
from offload.device.recording import WORK, OpRecorder, lane_row
from offload.device.thread_end import AwaitedThread, start_uninterrupted
from offload.errors import ConfigError, EngineFailedError

Job = Callable[[], None]
_STACK_NBYTES = 64 * 2**20
"""A thread's stack and what the C library gives it of memory to allocate from."""


class LaneRow:
    """Where the jobs of a lane are told of while somebody records."""

    __slots__ = ("kind", "name", "recorder", "row")

    def __init__(self, name: str, recorder: OpRecorder, *, row: str | None = None, kind: str = WORK) -> None:
        """`row`: where it is not that of a lane of this name."""
        self.name, self.recorder, self.kind = name, recorder, kind
        self.row = lane_row(name) if row is None else row


class HostLane(ABC):
    """A first-in first-out lane of jobs. `submit` may be called from any thread; a job never waits for a later one."""

    runs_beside = False
    """Whether it is a thread of its own."""
    _told: LaneRow | None = None

    @abstractmethod
    def submit(self, job: Job, about: object = None, nbytes: int = 0) -> Pending:
        """Queue `job`; the result settles when it ran, with its exception if it raised one. It is about a unit, or bytes."""

    def run_now(self, job: Job, about: object = None) -> Pending:
        """Run `job` in the calling thread, whatever is queued; it has settled when this returns, as one that was queued."""
        ran = LaneJob(job, self._told, about)
        ran.run()
        return ran

    @abstractmethod
    def close(self) -> None:
        """Run what is queued, then stop. Idempotent. Failures stay with their `Pending`s."""


class LaneJob(Pending):
    """A job in a lane: runs once, keeps the exception that it raised. Waited for here by whoever has run it."""

    def __init__(self, job: Job, told: LaneRow | None = None, about: object = None, nbytes: int = 0) -> None:
        self._job: Job | None = job
        self._failure: Exception | None = None
        self._told, self._about, self._nbytes = told, about, nbytes

    def run(self) -> None:
        job, self._job = self._job, None
        if job is None:
            raise AssertionError("a job runs once")
        told = self._told
        recording = told.recorder.to if told is not None else None
        try:
            if told is None or recording is None:
                job()
            else:
                with recording.span(told.row, told.kind, told.name, self._about, nbytes=self._nbytes):
                    job()
        except Exception as error:
            self._failure = error
        except BaseException as error:
            self._failure = EngineFailedError(f"the engine's own work was interrupted by {type(error).__name__}")
            raise

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        return self._job is None


class _InlineJob(LaneJob):
    def __init__(self, lane: InlineLane, job: Job, told: LaneRow | None, about: object, nbytes: int) -> None:
        super().__init__(job, told, about, nbytes)
        self._lane = lane

    def wait(self) -> None:
        self._lane.run_until(self)
        super().wait()


class InlineLane(HostLane):
    """Jobs run in the thread that waits for them, earlier ones first."""

    def __init__(self, lock: AbstractContextManager[object] | None = None, told: LaneRow | None = None) -> None:
        """`lock`: a reentrant one, held while jobs run and wait (`Accelerator.lock`)."""
        self._told = told
        self._queue: deque[_InlineJob] = deque()
        self._lock = lock if lock is not None else threading.RLock()

    def submit(self, job: Job, about: object = None, nbytes: int = 0) -> Pending:
        pending = _InlineJob(self, job, self._told, about, nbytes)
        with self._lock:
            self._queue.append(pending)
        return pending

    def run_until(self, last: LaneJob) -> None:
        """Run jobs up to and with `last`, which is one of this lane's."""
        with self._lock:
            while not last.done():
                (self._queue.popleft() if self._queue else last).run()  # an interrupt may have come between the two

    def run_one(self) -> None:
        """Run the first job that waits, if one does."""
        with self._lock:
            if self._queue:
                self._queue.popleft().run()

    def close(self) -> None:
        with self._lock:
            while self._queue:
                self._queue.popleft().run()


def start_thread(thread: threading.Thread) -> None:
    """Raises `ConfigError` where the system has no more threads."""
    try:
        start_uninterrupted(thread)
    except RuntimeError as error:
        addresses = next((limit for limit in host_memory_limits() if limit.bounds_addresses), None)
        if addresses is not None and addresses.free_nbytes < _STACK_NBYTES:
            raise ConfigError(
                f"the system refuses addresses for the stack of a thread for {thread.name} ({error}): {addresses.free_nbytes} "
                f"bytes are left, by {addresses.name}. Raise that limit (ulimit -v), or have less in memory."
            ) from error
        raise ConfigError(
            f"the system refuses a thread for {thread.name} ({error}): the limit of processes and threads is reached. Raise it "
            "(ulimit -u; in a container its limit of pids), or end other programs and DataLoader workers."
        ) from error


class _ThreadJob(LaneJob):
    def __init__(self, job: Job, told: LaneRow | None = None, about: object = None, nbytes: int = 0) -> None:
        super().__init__(job, told, about, nbytes)
        self._settled = Latch()

    def run(self, after: LaneJob | None = None) -> None:
        """`after`: a job that ran before; its failure is this one's too."""
        try:
            if after is not None:
                self._failure = after._failure
            if self._failure is None:
                super().run()
        except BaseException:
            return  # kept for whoever waits: the lane goes on
        finally:
            self._settled.set()

    def wait(self) -> None:
        self._settled.wait()
        super().wait()

    def done(self) -> bool:
        return self._settled.is_set()


_Jobs = queue.SimpleQueue["_ThreadJob | None"]


class ThreadLane(HostLane):
    """Jobs run on one daemon thread named `offload-<name>`, started with the first job.

    The thread knows the queue alone: it ends too when the lane is dropped without `close()`.
    """

    runs_beside = True

    def __init__(self, name: str, begin: Job | None = None, told: LaneRow | None = None) -> None:
        """`begin` runs on the thread before its first job."""
        self._name, self._told = f"offload-{name}", told
        self._begin = begin
        self._queue: _Jobs = queue.SimpleQueue()
        self._lock, self._serving = threading.Lock(), threading.Lock()
        self._thread: AwaitedThread | None = None

    def submit(self, job: Job, about: object = None, nbytes: int = 0) -> Pending:
        pending = _ThreadJob(job, self._told, about, nbytes)
        with self._lock:
            if self._thread is None or self._thread.ident is None:
                work = (self._queue, self._serving, _ThreadJob(self._begin or (lambda: None)))
                # Known before it starts: `close` ends it also where an interrupt comes while it does. Where that came before
                # it was known to run, a second one is started, and whichever comes first serves.
                self._thread = AwaitedThread(_work, work, self._name)
                weakref.finalize(self, self._queue.put, None).atexit = False
                start_thread(self._thread)
            self._queue.put(pending)
        return pending

    def close(self) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._queue.put(None)  # again where an interrupt ended an earlier call
            if thread.ident is not None:  # else: it was refused
                thread.join()
            with self._serving:  # the other one
                pass
            self._thread = None


def _work(jobs: _Jobs, serving: threading.Lock, begin: _ThreadJob) -> None:
    if not serving.acquire(blocking=False):
        return
    begin.run()
    while (pending := jobs.get()) is not None:
        pending.run(after=begin)
        del pending  # while it waits for the next, the thread keeps nothing alive that a job or its failure refers to
    serving.release()
