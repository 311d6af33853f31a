"""A second place for extents of a store, for as long as somebody needs what they hold now and they are written meanwhile.

    snapshot       a place beside the extent's own is reserved; the next write of the extent goes there
    drop_snapshot  nobody needs the old content any more: the place that is not the extent's current one is given back

So a save that runs beside training holds no update up: what an update overwrites is still there. An extent stays where its
last write went; of its two places one is allocated at any time, both only between `snapshot` and `drop_snapshot`.
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
Ranges = Callable[[Extent], Iterator[tuple[int, int, int]]]
"""Where an extent lies: (index of the file, offset there, bytes)."""


@dataclass(slots=True)
class _Kept:
    aside: bool
    checksums: list[int] | None
    turned: bool = False  # whether the extent was written since


class Asides:
    """Which of the two places each extent of a store is in. Thread-safe. Owns the files of the second one."""

    def __init__(self, name: str, files: Files, scratch: ScratchFolder, ranges: Ranges) -> None:
        self._ranges = ranges
        self._own = files
        self._aside = scratch.create(f"{name}-aside", [0] * scratch.path_count)  # now: later the folders may be gone
        self._lock = threading.Lock()
        self._turned: set[Extent] = set()
        self._kept: dict[Extent, _Kept] = {}

    @property
    def all_files(self) -> Files:
        return self._own + self._aside

    def files(self, extent: Extent) -> Files:
        """Those that hold the extent's current content."""
        return self._files(extent in self._turned)

    def snapshot_of(self, extent: Extent) -> tuple[Files, list[int] | None]:
        """Those that hold what the extent held when it was kept, and what `snapshot` was given as its checksums."""
        kept = self._kept[extent]
        return self._files(kept.aside), kept.checksums

    def snapshot(self, extent: Extent, checksums: list[int] | None) -> bool:
        """Keep what the extent holds, with nothing being written to it; False where there is no room for it.

        Raises `StorageError` where the system refuses for another reason."""
        with self._lock:
            assert extent not in self._kept, "an extent is kept once at a time"
            aside = extent in self._turned
            if not self._allocate(extent, self._files(not aside)):
                return False
            self._kept[extent] = _Kept(aside, checksums)
            return True

    def about_to_write(self, extent: Extent) -> Files:
        """Where the next write of the extent belongs; that is its place from now on."""
        with self._lock:
            kept = self._kept.get(extent)
            if kept is not None and not kept.turned:
                kept.turned = True
                self._turned ^= {extent}
        return self.files(extent)

    def drop_snapshot(self, extent: Extent) -> None:
        """Give back the place that is not the current one. Nothing may be in flight there."""
        with self._lock:
            del self._kept[extent]
            self._give_back(extent, self._files(extent not in self._turned))

    def close(self) -> None:
        """Give everything back. Idempotent."""
        for file in self._aside:
            file.close()

    def _files(self, aside: bool) -> Files:
        return self._aside if aside else self._own

    def _allocate(self, extent: Extent, files: Files) -> bool:
        for file_index, offset_nbytes, nbytes in self._ranges(extent):
            code = allocate(files[file_index], offset_nbytes, nbytes)
            if code and code not in CANNOT_ALLOCATE:  # then nothing was reserved for the scratch file either
                self._give_back(extent, files)
                if code not in _NO_ROOM:
                    raise storage_error(f"cannot reserve {nbytes} bytes for what is saved", files[file_index].path, code)
                return False
        return True

    def _give_back(self, extent: Extent, files: Files) -> None:
        for file_index, offset_nbytes, nbytes in self._ranges(extent):
            give_back(files[file_index], offset_nbytes, nbytes)
