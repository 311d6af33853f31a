# SPDX-License-Identifier: Apache-2.0
"""What the threads of a rank wait for each other by: the system's, or in virtual time (`offload.ranks.virtual_ranks`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from offload.device.lane import start_thread
from offload.device.pending import Bell, Latch
from offload.device.thread_end import AwaitedThread


class Waited(Protocol):
    """Set once, waited for by any number of threads."""

    def set(self) -> None: ...

    def wait(self) -> None: ...


class Asked(Protocol):
    """A queue of nothing: that something was asked for. `get` raises `queue.Empty` after so many seconds without."""

    def put(self, item: None) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> None: ...

    def empty(self) -> bool: ...


class Started(Protocol):
    """A thread."""

    def join(self) -> None: ...


class Threads:
    """Those of the system."""

    def latch(self) -> Waited:
        return Latch()

    def queue(self) -> Asked:
        return Bell()

    def start(self, target: Callable[[], None], name: str) -> Started:
        """A daemon thread. Raises `ConfigError` where the system has no more."""
        thread = AwaitedThread(target, (), name)
        start_thread(thread)
        return thread
