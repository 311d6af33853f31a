"""One chunk on its way from its stores into its unit's file, in steps, so that others can be on theirs meanwhile."""

from __future__ import annotations

from offload.checkpoint.state_reading import ChunkRead
from offload.checkpoint.unit_file import ChunkWrite, UnitFile
from offload.model.chunk import Chunk
from offload.tiers.io.backend import Priority


class ChunkCopy:
    """`begin_reading`, `begin_writing`, `bring`, `finish`, in this order, by one thread."""

    def __init__(self, chunk: Chunk, file: UnitFile) -> None:
        self.chunk, self.file = chunk, file
        self._read: ChunkRead | None = None
        self._write: ChunkWrite | None = None
        self._shared = self._brought = False

    def begin_reading(self, read: ChunkRead, *, shared: bool) -> None:
        """`shared`: some of it is in the file already (`UnitFile.write`)."""
        self._read, self._shared = read, shared

    def begin_writing(self, priority: Priority) -> None:
        """Wait until it is read, and have it written. Nothing if that has begun."""
        if self._write is None:
            assert self._read is not None
            self._write = self.file.begin(self._read.wait(), priority, shared=self._shared)

    def bring(self) -> None:
        """See `ChunkWrite.bring`. Nothing if it was."""
        assert self._write is not None
        if not self._brought:
            self._write.bring()
            self._brought = True

    def finish(self) -> None:
        """Wait until it is in the file."""
        assert self._write is not None
        self._write.finish()

    def settle(self) -> None:
        """Wait until nothing of it is in flight, however that ends."""
        for step in (self._read, self._write):
            if step is not None:
                step.settle()
