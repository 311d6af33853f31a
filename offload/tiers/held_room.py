"""Room for what will be written to scratch files whose blocks a checkpoint shares.

A scratch file's blocks are reserved when it is made, so that no step finds the drive full. A write to blocks that are shared
takes others, and the old ones stay with the checkpoint. For shared bytes as many are therefore held in a file beside the
scratch file, at the same offsets, and given back at the moment at which the bytes are written. So a save without enough
room fails at once, and takes nothing with it, as one that copies would.
"""

from __future__ import annotations

import logging

from offload.tiers.io.failure import errno_text, storage_error
from offload.tiers.scratch import ScratchFile, ScratchFolder
from offload.tiers.scratch_file import CANNOT_ALLOCATE, allocate, give_back

_log = logging.getLogger(__name__)


class HeldRoom:
    """Of one store. One thread holds at a time."""

    def __init__(self, name: str, scratch: ScratchFolder) -> None:
        self.files: tuple[ScratchFile, ...] = scratch.create(f"{name}-room", [0] * scratch.path_count)
        """One in each path. Nobody writes to them."""

    def hold(self, file_index: int, offset_nbytes: int, nbytes: int) -> None:
        """Hold room for bytes of the store's file in the path `file_index`; what is held already stays so.

        Raises `StorageError` where there is too little."""
        file = self.files[file_index]
        code = allocate(file, offset_nbytes, nbytes)
        if code in CANNOT_ALLOCATE:
            # Then nothing could be reserved for the scratch file either, and a warning has said so.
            _log.info("%s: its file system cannot hold room (%s)", file.path, errno_text(code))
        elif code:
            raise storage_error(f"cannot hold {nbytes} bytes for what is written after a save", file.path, code)

    def give_back(self, file_index: int, offset_nbytes: int, nbytes: int) -> None:
        """These bytes are about to be written."""
        give_back(self.files[file_index], offset_nbytes, nbytes)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        for file in self.files:
            file.close()
