# SPDX-License-Identifier: Apache-2.0
"""A second place for extents of a store, for as long as somebody needs what they hold now and they are written meanwhile.

    keep     a place beside the extent's own is reserved; the next write of the extent goes there
    drop     nobody needs the old content any more: the place that is not the extent's current one is given back

So a save holds no update up: what an update overwrites is still there. An extent stays where its last write went. Of its two
places one is allocated at any time, both only between `keep` and `drop`.

Where a checkpoint has come to share the blocks of what was kept (`offload.tiers.io.reflink`), writing there would need blocks
that nobody has reserved. So the reserved place stays until the extent is written next, and that write goes there.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from offload.layout import Extent
from offload.tiers.io.failure import storage_error
from offload.tiers.scratch import ScratchFile, ScratchFolder
from offload.tiers.scratch_file import CANNOT_ALLOCATE, allocate, give_back

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

Files = tuple[ScratchFile, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an extent that lies in one file. `start_nbytes`: within the extent."""

    file_index: int
    file_offset_nbytes: int
    start_nbytes: int
    nbytes: int


class Asides:
    """Which of the two places each extent of a store is in. Thread-safe. Owns the files of the second one."""

    def __init__(self, name: str, files: Files, scratch: ScratchFolder, pieces_of: Callable[[Extent], Iterator[Piece]]) -> None:
        self._pieces_of = pieces_of
        self._own = files
        self._aside = scratch.create(f"{name}-aside", [0] * scratch.path_count)  # now: later the folders may be gone
        self._lock = threading.Lock()
        self._turned: set[Extent] = set()
        self._kept: dict[Extent, Files] = {}
        self._shared: set[Extent] = set()
        """Those whose current place shares blocks with a checkpoint; the other one is reserved for their next write."""

    @property
    def all_files(self) -> Files:
        return self._own + self._aside

    def files(self, extent: Extent) -> Files:
        """Those that hold the extent's current content."""
        return self._aside if extent in self._turned else self._own

    def keep(self, extent: Extent) -> Files | None:
        """Keep what the extent holds, in these files, with nothing being written to it; None where there is no room for it.

        What was kept before, by a save that an interrupt cut off, is dropped. Raises `StorageError` where the system refuses
        for another reason than room."""
        with self._lock:
            self._drop(extent)
            files = self.files(extent)
            if not self._allocate(extent, self._other(files)):
                return None
            self._kept[extent] = files
            return files

    def about_to_write(self, extent: Extent) -> Files:
        """Where the next write of the extent belongs; that is its place from now on."""
        with self._lock:
            files = self.files(extent)
            is_kept, is_shared = self._kept.get(extent) is files, extent in self._shared
            if not (is_kept or is_shared):
                return files
            self._turned ^= {extent}
            self._shared.discard(extent)
            if not is_kept:
                self._give_back(extent, files)
            return self._other(files)

    def drop(self, extent: Extent, *, is_shared: bool) -> None:
        """What was kept is not needed any more; no read of it is in flight. `is_shared`: its blocks are a checkpoint's too."""
        with self._lock:
            if is_shared and self._kept[extent] is self.files(extent):
                self._shared.add(extent)
            self._drop(extent)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        for file in self._aside:
            file.close()

    def _drop(self, extent: Extent) -> None:
        if self._kept.pop(extent, None) is not None and extent not in self._shared:
            self._give_back(extent, self._other(self.files(extent)))

    def _other(self, files: Files) -> Files:
        return self._own if files is self._aside else self._aside

    def _allocate(self, extent: Extent, files: Files) -> bool:
        for piece in self._pieces_of(extent):
            file = files[piece.file_index]
            code = allocate(file, piece.file_offset_nbytes, piece.nbytes)
            if code and code not in CANNOT_ALLOCATE:  # then nothing was reserved for the scratch file either
                self._give_back(extent, files)
                if code not in _NO_ROOM:
                    raise storage_error(f"cannot reserve {piece.nbytes} bytes for what is saved", file.path, code)
                return False
        return True

    def _give_back(self, extent: Extent, files: Files) -> None:
        for piece in self._pieces_of(extent):
            give_back(files[piece.file_index], piece.file_offset_nbytes, piece.nbytes)
