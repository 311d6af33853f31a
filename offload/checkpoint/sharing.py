"""Which of a chunk's bytes lie in scratch files just as they will in the checkpoint's, and sharing their blocks.

That is what is kept as raw numbers: the arrays of fp32 records, fp32 parameters that are their own master, parameters that
are not trained. What is shared now neither a save nor an update has to write any more; it is only read, for the checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from offload.checkpoint.manifest import VALUE
from offload.checkpoint.staged_folder import write_failure
from offload.checkpoint.state_reading import parameter_nbytes
from offload.checkpoint.tensor_file import TensorFile
from offload.checkpoint.unit_tensors import UnitTensors
from offload.device.segment import MASTER, StateFormat
from offload.model.chunk import Chunk
from offload.step.chunk_stores import ChunkStore
from offload.step.components import Components
from offload.tiers.io import reflink
from offload.tiers.io.backend import OpenFile


class UnitFile(Protocol):
    """A unit's file in the making."""

    tensors: UnitTensors

    def opened(self) -> TensorFile: ...


class BlockSharing:
    """Of one save. What two files refuse once is not tried again for the same scratch file."""

    def __init__(self, parts: Components, failures: Callable[[], AbstractContextManager[None]]) -> None:
        """`failures()`: around every wait for a write to a tier."""
        self._parts, self._failures = parts, failures
        self._refused: set[Path] = set()

    def may_work_in(self, folder: Path) -> bool:
        """Whether files in `folder` may share blocks with any scratch file."""
        stores = (self._parts.records, self._parts.parameter_store)
        files = [file for places in stores if places is not None for file, _ in places.room_for_snapshots()]
        return any(reflink.works_between(file.fileno(), folder) for file in files)

    def chunk(self, chunk: Chunk, file: UnitFile) -> bool:
        """Share of the chunk what can be; whether anything was. Nothing may overwrite it meanwhile. Raises `StorageError`.

        From any thread, a chunk from one."""
        kinds, shared = file.tensors.arrays_of(chunk), False
        for places, arrays in arrays_in_stores(self._parts, chunk):
            with self._failures():
                places.settle_write(chunk)
            wanted = {kind: stored for kind, stored in arrays.items() if kind in kinds}
            piecewise = _Piecewise(self._refused, chunk, file, wanted)
            places.share(chunk, piecewise)
            shared = shared or piecewise.shared
        return shared


class _Piecewise:
    """Called with each part of a chunk's extent that lies in a scratch file (`offload.tiers.store.ShareBlocks`)."""

    def __init__(self, refused: set[Path], chunk: Chunk, file: UnitFile, arrays: Mapping[str, range]) -> None:
        self._refused, self._chunk, self._unit_file, self._arrays = refused, chunk, file, arrays
        self.shared = False

    def __call__(self, source: OpenFile, offset_nbytes: int, part: range) -> bool:
        shared = False
        for kind, stored in self._arrays.items():
            start, stop = max(stored.start, part.start), min(stored.stop, part.stop)
            if start < stop and source.path not in self._refused:
                file = self._unit_file.opened()
                name, place = self._unit_file.tensors.place(self._chunk, kind)
                begin = file.offsets[name] + place + start - stored.start
                if self._share(source, offset_nbytes + start - part.start, file, range(begin, begin + stop - start)):
                    shared = True
                else:
                    self._refused.add(source.path)
        self.shared = self.shared or shared
        return shared

    def _share(self, source: OpenFile, offset_nbytes: int, file: TensorFile, there: range) -> bool:
        try:
            shared = reflink.clone_range(source.fileno(), offset_nbytes, len(there), file.fileno(), there.start)
        except OSError as error:
            raise write_failure("sharing blocks with", file.path, error) from error
        if shared:
            file.shares(there)
        return shared


def arrays_in_stores(parts: Components, chunk: Chunk) -> Iterator[tuple[ChunkStore, Mapping[str, range]]]:
    """The stores that hold arrays of the chunk as raw numbers, and where in its extent each of them lies."""
    records, places = parts.records, parts.parameter_store
    if chunk.flat.layout.trainable:
        if records is None or records.format(chunk).state_format is not StateFormat.FP32:
            return
        found, start = {}, 0
        for name, dtype, numel in records.format(chunk).arrays(chunk.numel):
            found[VALUE if name == MASTER else name] = range(start, start + numel * dtype.itemsize)
            start += numel * dtype.itemsize
        yield records, found
        if VALUE in found:
            return
    yield places, {VALUE: range(parameter_nbytes(chunk))}
