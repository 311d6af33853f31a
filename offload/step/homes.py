# SPDX-License-Identifier: Apache-2.0
"""Carrying values that the user wrote to a parameter in device memory to its home and its master, and from there back home."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from offload.device.arithmetic.records import Record
from offload.device.arithmetic.rounding import round_into
from offload.device.arithmetic.segment import MASTER
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.model.flat import Flat, ParameterInfo
from offload.planning.purposes import RECORDS_ON_DEMAND, UPDATED_PARAMETERS
from offload.planning.route import Memory, ValuePath
from offload.step.chunk_stores import RecordStore
from offload.step.components import Components
from offload.tiers.memory import HostMemory


class Homes:
    """Owned by the thread that drives the model. The unit of what is written is resident, and no update of it is pending."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts

    def has_master(self, flat: Flat) -> bool:
        """Whether records hold the masters of the flat's parameters, or a part of them."""
        records = self._parts.records
        return records is not None and flat.layout.trainable and records.flat_format(flat).own_master

    def record(self, chunk: Chunk) -> Record:
        """The chunk's record in memory: where it lies, or read into a buffer of its own."""
        records, buffer = self._read(chunk)
        return records.over(chunk, buffer)

    @contextmanager
    def changing(self, chunk: Chunk) -> Iterator[Record]:
        """The same, to be changed inside the block: behind it the record is at home."""
        records, buffer = self._read(chunk)
        yield records.over(chunk, buffer)
        if records.view(chunk) is None:
            records.write(chunk, buffer).wait()

    def _read(self, chunk: Chunk) -> tuple[RecordStore, torch.Tensor]:
        records = self._parts.records
        assert records is not None
        buffer = records.view(chunk)
        if buffer is None:
            buffer = HostMemory(records.nbytes(chunk), "gathered records", ledger=self._parts.ledger).tensor
            records.read(chunk, buffer).wait()
        return records, buffer

    def refresh_from_masters(self, chunk: Chunk, pieces: Iterable[Piece]) -> None:
        """Make the values of these pieces, in memory, what the record's masters say, as an update leaves them. What has to be
        read or to go over does so in staging buffers of the updates, none of which may run."""
        records, parameter_store, pool = self._parts.records, self._parts.parameter_store, self._parts.pool
        stored = parameter_store.view(chunk)
        assert records is not None and stored is not None
        home = chunk.values_in(stored)
        parameter_store.settle_copies(chunk)
        record, lease = records.view(chunk), None
        if record is None:
            lease = pool.lease(RECORDS_ON_DEMAND)
            record = lease.tensor
            records.read(chunk, record[: records.nbytes(chunk)]).wait()
        masters = records.over(chunk, record).arrays[MASTER]
        goes_over = chunk.route.value_path is ValuePath.COPY_IN
        buffer = pool.lease(UPDATED_PARAMETERS) if goes_over else None
        values = home if buffer is None else chunk.values_in(buffer.tensor)
        for piece in pieces:
            part = chunk.part(piece)
            records.format(chunk).round_values(values[part], masters[part])
            if goes_over:
                self._parts.accelerator.copy_in(home[part], values[part]).wait()
        for one in (lease, buffer):
            if one is not None:
                one.release()

    def rounded(self, flat: Flat, value: torch.Tensor) -> torch.Tensor:
        """`value` [numel] in the flat's dtype, rounded as an update would leave it."""
        records = self._parts.records
        rounded = torch.empty(value.numel(), dtype=flat.dtype, device="cpu")
        if records is None or not flat.layout.trainable or value.dtype != torch.float32 or flat.dtype == torch.float32:
            round_into(rounded, value.contiguous())
        else:
            records.flat_format(flat).round_values(rounded, value.contiguous())
        return rounded

    def write(self, info: ParameterInfo, written: torch.Tensor) -> None:
        """Carry the written elements (`written`: bool [numel] in slot order) to the parameter's home and its master."""
        ordered = info.in_memory_order(info.view)
        for chunk, piece in info.pieces:
            mask = written[piece.in_parameter]
            if not bool(mask.any()):
                continue
            if self.has_master(info.flat):
                values = ordered[piece.in_parameter]
                with self.changing(chunk) as record:
                    part, device = chunk.part(piece), record.device
                    record.replace_master(part.start, part.stop, mask.to(device), values.to(device))
            self.write_values(chunk)

    def write_values(self, chunk: Chunk) -> None:
        """Carry what the chunk's parameters are in device memory to their home."""
        if not chunk.route.has_store:
            return
        parameter_store = self._parts.parameter_store
        values = chunk.bytes
        stored = parameter_store.view(chunk)
        if stored is not None:
            self._parts.accelerator.copy_out(stored[: values.numel()], values).wait()
        elif chunk.route.model_in is Memory.HOST:
            parameter_store.write(chunk, values).wait()
        else:
            buffer = HostMemory(values.numel(), "gathered parameters", ledger=self._parts.ledger).tensor
            self._parts.accelerator.copy_out(buffer, values).wait()
            parameter_store.write(chunk, buffer).wait()
