# SPDX-License-Identifier: Apache-2.0
"""Carrying values that the user wrote to a parameter in device memory to its home and its master, and from there back home."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.device.arithmetic.segment import MASTER
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.planning.purposes import EMITTED, RECORDS_ON_DEMAND
from offload.planning.route import Memory, ValuePath
from offload.step.components import Components
from offload.tiers.memory import HostMemory


class Homes:
    """Owned by the thread that drives the model. The unit of what is written is resident, and no update of it is pending."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts

    def read_record(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's record in memory: where it lies, or read into a buffer of its own."""
        records = self._parts.records
        assert records is not None
        stored = records.view(chunk)
        if stored is not None:
            return stored
        buffer = HostMemory(records.nbytes(chunk), "gathered records", ledger=self._parts.ledger).tensor
        records.read(chunk, buffer).wait()
        return buffer

    def put_back(self, chunk: Chunk, record: torch.Tensor) -> None:
        """What `read_record` gave was changed: bring it home."""
        records = self._parts.records
        assert records is not None
        if records.view(chunk) is None:
            records.write(chunk, record).wait()

    def tell(self, chunk: Chunk, pieces: Iterable[Piece]) -> None:
        """Make the values of these pieces, in memory, what the record's masters on NVMe say, as an update leaves them. In
        staging buffers of the updates, none of which may run."""
        records, parameter_store, pool = self._parts.records, self._parts.parameter_store, self._parts.pool
        home = parameter_store.view(chunk)
        assert records is not None and home is not None
        home = home[: chunk.nbytes].view(chunk.flat.dtype)
        parameter_store.settle_copies(chunk)
        lease = pool.lease(RECORDS_ON_DEMAND)
        records.read(chunk, lease.tensor[: records.nbytes(chunk)]).wait()
        masters = records.over(chunk, lease.tensor).arrays[MASTER]
        goes_over = chunk.route.value_path is ValuePath.COPY_IN
        emitted = pool.lease(EMITTED) if goes_over else None
        values = home if emitted is None else emitted.tensor[: chunk.nbytes].view(chunk.flat.dtype)
        for piece in pieces:
            part = slice(piece.start - chunk.start, piece.stop - chunk.start)
            records.format(chunk).round_values(values[part], masters[part])
            if goes_over:
                self._parts.accelerator.copy_in(home[part], values[part]).wait()
        for one in (lease, emitted):
            if one is not None:
                one.release()

    def write(self, info: ParameterInfo, written: torch.Tensor) -> None:
        """Carry the written elements (`written`: bool [numel] in slot order) to the parameter's home and its master."""
        unit, records = self._parts.units[info.unit_index], self._parts.records
        ordered = info.in_memory_order(info.view)
        for chunk in unit.chunks:
            for other, piece in chunk.pieces:
                part = piece.in_parameter
                if other is not info or not bool(written[part].any()):
                    continue
                if records is not None and info.trainable and records.format(chunk).own_master:
                    buffer = self.read_record(chunk)
                    record = records.over(chunk, buffer)
                    low, high = piece.start - chunk.start, piece.stop - chunk.start
                    record.replace_master(low, high, written[part].to(buffer.device), ordered[part].to(buffer.device))
                    self.put_back(chunk, buffer)
                if chunk.route.has_store:
                    self._write_chunk(chunk)

    def _write_chunk(self, chunk: Chunk) -> None:
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
