# SPDX-License-Identifier: Apache-2.0
"""What a store promises about its extents, checked at every operation.

Whole extents only; one writer and no concurrent reader per extent; an extent whose last write failed cannot be read
until a later write succeeded; a failure that nobody waited for is kept for `flush()`.

Breaking the first two is this project's own bug: `AssertionError`, naming both operations.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import methodcaller

from torch import Tensor, uint8

from offload.device.pending import Pending
from offload.errors import StorageError
from offload.layout import EXTENT_ALIGN, Extent

_log = logging.getLogger(__name__)


def describe(extent: Extent) -> str:
    return f"[{extent.offset_nbytes}, {extent.offset_nbytes + extent.nbytes})"


class Operation(Pending):
    """A read or write of one extent. Made by `ExtentGuard.begin`; `start` gives it the transfers it stands for."""

    def __init__(self, guard: ExtentGuard, extent: Extent, *, is_write: bool) -> None:
        self.extent = extent
        self.is_write = is_write
        self._guard = guard
        self._transfers: Pending | None = None  # None while the transfers are being submitted

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} of extent {describe(self.extent)}"

    def start(self, transfers: Pending) -> None:
        self._transfers = transfers

    @property
    def submitted(self) -> bool:
        return self._transfers is not None

    def wait(self) -> None:
        self.settle(seen=True)

    def arrive(self) -> bool:
        return bool(self._settle(methodcaller("arrive"), seen=True))

    def compare(self, sums: Tensor) -> None:
        assert self._transfers is not None, "nothing has come of what was not submitted"
        self._transfers.compare(sums)

    def settle(self, *, seen: bool) -> None:
        """Wait for the transfers, tell the guard how they ended and raise their failure. `seen`: by the caller."""
        self._settle(methodcaller("wait"), seen=seen)

    def _settle(self, wait: Callable[[Pending], bool | None], *, seen: bool) -> bool | None:
        if self._transfers is None:
            raise AssertionError(f"{self} was waited for before it was submitted")
        try:
            found = wait(self._transfers)
        except StorageError as error:
            self._guard.ended(self, error, seen=seen)
            raise
        self._guard.ended(self, None, seen=seen)
        return found

    def done(self) -> bool:
        return self._transfers is not None and self._transfers.done()


@dataclass(slots=True)
class _State:
    active: list[Operation] = field(default_factory=list)
    broken: StorageError | None = None  # why the last write left no defined content


class ExtentGuard:
    """Keeps the rules for the extents of one store. Thread-safe."""

    def __init__(self, name: str, extents: Iterable[Extent]) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._states: dict[Extent, _State] = {}
        self._unseen: dict[Operation, StorageError] = {}
        self._closed = False
        self.nbytes = 0
        for extent in sorted(extents, key=lambda extent: extent.offset_nbytes):
            if extent.nbytes <= 0 or extent.nbytes % EXTENT_ALIGN or extent.offset_nbytes % EXTENT_ALIGN:
                raise AssertionError(f"{name}: extent {describe(extent)} is empty or not {EXTENT_ALIGN}-byte aligned")
            if extent.offset_nbytes < self.nbytes:
                raise AssertionError(f"{name}: extent {describe(extent)} overlaps another one, which ends at {self.nbytes}")
            self._states[extent] = _State()
            self.nbytes = extent.offset_nbytes + extent.nbytes

    def begin(self, extent: Extent, tensor: Tensor, *, is_write: bool) -> Operation:
        """Check and register an operation; the caller must `start` or `abandon` it, or say that it `ended`."""
        operation = Operation(self, extent, is_write=is_write)
        _check_tensor(f"{self._name}: {operation}", extent, tensor)
        with self._lock:
            state = self._state(operation)
            self._reap(state)
            for other in state.active:
                if is_write or other.is_write:
                    raise AssertionError(f"{self._name}: {operation} began while a {other} is in flight")
            if state.broken is not None and not is_write:
                raise _unreadable(self._name, str(operation), state.broken)
            state.active.append(operation)
        return operation

    def abandon(self, operation: Operation, cause: BaseException) -> None:
        """Forget the operation, which could not be submitted whole, unless it was before what failed. A write has failed then:
        a part of it may have been."""
        with self._lock:
            state = self._states[operation.extent]
            if operation in state.active and not operation.submitted:
                state.active.remove(operation)
                if operation.is_write:
                    state.broken = _of_storage(cause)

    def ended(self, operation: Operation, error: StorageError | None, *, seen: bool) -> None:
        """Take in how an operation ended. Called at every wait, so it may be told the same again."""
        with self._lock:
            state = self._states[operation.extent]
            first_time = operation in state.active
            if first_time:
                state.active.remove(operation)
                if operation.is_write:
                    state.broken = error
            if error is not None and first_time and not seen:
                self._unseen[operation] = error
            elif seen:
                self._unseen.pop(operation, None)

    def check_extent(self, extent: Extent, purpose: str) -> None:
        """Raise `AssertionError` where `extent` is not one of the store's, or the store is closed."""
        with self._lock:
            if self._closed or extent not in self._states:
                what = "the store is closed" if self._closed else "it is not one of the store's extents"
                raise AssertionError(f"{self._name}: {purpose} of extent {describe(extent)}: {what}")

    def check_readable(self, extent: Extent, purpose: str) -> None:
        """Raise where the extent's content is undefined: `AssertionError` while it is being written (or `check_extent`
        raises), `StorageError` where its last write failed."""
        with self._lock:
            self.check_extent(extent, purpose)
            state = self._states[extent]
            self._reap(state)
            for other in state.active:
                if other.is_write:
                    raise AssertionError(f"{self._name}: {purpose} of extent {describe(extent)} while a {other} is in flight")
            if state.broken is not None:
                raise _unreadable(self._name, f"{purpose} of extent {describe(extent)}", state.broken)

    def drain(self) -> None:
        """Wait for everything that was submitted. Failures that nobody saw are kept for `raise_unseen`."""
        with self._lock:
            waiting = [operation for state in self._states.values() for operation in state.active if operation.submitted]
        for operation in waiting:
            self._settle_unseen(operation)

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody waited for; the others go to the log. They are seen then."""
        with self._lock:
            errors = list(self._unseen.values())
            self._unseen.clear()
        for error in errors[1:]:
            _log.error("%s: a further failure: %s", self._name, error)
        if errors:
            raise errors[0]

    def close(self) -> bool:
        """Refuse further operations and wait for those in flight; whether it was open until now."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        self.drain()
        return was_open

    def _state(self, operation: Operation) -> _State:
        self.check_extent(operation.extent, "a write" if operation.is_write else "a read")
        return self._states[operation.extent]

    def _reap(self, state: _State) -> None:
        for operation in tuple(state.active):
            if operation.done():
                self._settle_unseen(operation)

    def _settle_unseen(self, operation: Operation) -> None:
        try:
            operation.settle(seen=False)
        except StorageError:
            return  # kept in _unseen


_HOST = ("cpu", "meta")
"""Kinds of device that host memory is on: the second on a machine in numbers."""


def _check_tensor(what: str, extent: Extent, tensor: Tensor) -> None:
    if tensor.dtype != uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type not in _HOST:
        raise AssertionError(
            f"{what}: needs a contiguous 1-D uint8 tensor on the CPU, not {tensor.dtype} {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}"
        )
    if tensor.numel() != extent.nbytes:
        raise AssertionError(f"{what}: the tensor has {tensor.numel()} bytes, the extent {extent.nbytes}; whole extents only")
    if tensor.data_ptr() % EXTENT_ALIGN:
        raise AssertionError(f"{what}: the tensor is not {EXTENT_ALIGN}-byte aligned; use a lease or a view of HostMemory")


def _of_storage(cause: BaseException) -> StorageError:
    if isinstance(cause, StorageError):
        return cause
    code = cause.errno if isinstance(cause, OSError) else None
    return StorageError(code or errno.EIO, f"it could not be begun ({type(cause).__name__}: {cause})")


def _unreadable(name: str, operation: str, cause: StorageError) -> StorageError:
    error = StorageError(
        cause.errno,
        f"{name}: {operation} is not possible: the last write of it failed, so its content is undefined; resume "
        f"from the last checkpoint. That write: {cause.strerror}",
    )
    error.__cause__ = cause
    return error
