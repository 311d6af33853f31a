# SPDX-License-Identifier: Apache-2.0
"""Checksums of what lies in scratch files, kept in memory and compared at every read.

Computed when a write is submitted, from the memory that is written, and when a read is waited for, from the memory that was
read: so whatever happened in between, on the bus, in the drive's cache or on the medium, shows, and so does a write
that went elsewhere or nowhere. Eight bytes a piece; nothing of it is written to disk.

Where an update passes over the memory anyway, it takes the sums of its blocks, so that memory is read once (`arrive` and
`compare` of the read, `sums` of a write).

OFFLOAD_VERIFY=0 turns it off.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offload import _native
from offload.device.pending import Pending
from offload.errors import ConfigError, CorruptDataError

ENVIRONMENT_VARIABLE = "OFFLOAD_VERIFY"


def verification_is_on() -> bool:
    """Whether stores keep checksums: the default."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE, "") or "1"
    if chosen not in ("0", "1"):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}={chosen!r} is unknown: expected 1 (compare what is read) or 0 (do not).")
    return chosen == "1"


def checksum(tensor: Tensor, sums: Tensor | None = None) -> int:
    """Of a contiguous uint8 tensor in host memory. `sums`: of its blocks, int64, 0 where one is not known."""
    if _native.available():
        return _native.checksum(tensor.data_ptr(), tensor.numel(), sums.data_ptr() if sums is not None else 0)
    content: Any = tensor.numpy()
    return zlib.crc32(content)


def checksum_of_blocks(sums: Tensor, nbytes: int) -> int:
    """`checksum` of memory that was so large, when its blocks had the first of these sums."""
    return _native.checksum_of_blocks(sums.data_ptr(), nbytes)


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of an extent in one file: `part` is its memory in a transfer, `expected` the checksum of its last write.
    `start_nbytes`: where in the extent it begins."""

    path: object
    offset_nbytes: int
    part: Tensor
    expected: int
    start_nbytes: int


class VerifiedRead(Pending):
    """A read that fails with `CorruptDataError` where what arrived is not what was written. Looked at once, by whoever
    waits first: afterwards the memory is its holder's."""

    def __init__(self, transfers: Pending, stored: Sequence[Stored]) -> None:
        self._transfers = transfers
        self._stored: Sequence[Stored] = stored
        self._to_compare: Sequence[Stored] = ()
        """What was left to `compare`."""
        self._failure: CorruptDataError | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        self._transfers.wait()
        with self._lock:
            for one in self._stored:
                self._look_at(one, checksum(one.part))
            self._stored = ()  # last: whoever waits after an interrupt looks again
        self._raise_failure()

    def arrive(self) -> bool:
        self._transfers.wait()
        with self._lock:  # whoever waits from now on has nothing to look at: the memory may be written to
            self._to_compare, self._stored = self._stored, ()
        self._raise_failure()
        return bool(self._to_compare)

    def compare(self, sums: Tensor) -> None:
        with self._lock:
            for one in self._to_compare:
                first = one.start_nbytes // _native.CHECKSUM_BLOCK_NBYTES
                self._look_at(one, checksum_of_blocks(sums[first:], one.part.numel()))
            self._to_compare = ()
        self._raise_failure()

    def _look_at(self, one: Stored, found: int) -> None:
        if found != one.expected and self._failure is None:
            self._failure = _corrupt(one, found)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def done(self) -> bool:
        return self._transfers.done()


def _corrupt(stored: Stored, found: int) -> CorruptDataError:
    return CorruptDataError(
        errno.EBADMSG,
        f"bytes [{stored.offset_nbytes}, {stored.offset_nbytes + stored.part.numel()}) of {str(stored.path)!r} are not those "
        f"that were written there (checksum {found:016x}, expected {stored.expected:016x}): do not trust the drive, its cable "
        "or this machine's memory, look at dmesg and the drive's SMART data, and resume from the last checkpoint on another "
        "path",
    )
