"""Carrying values that the user wrote to a parameter in device memory to its home and its master weight."""

from __future__ import annotations

import torch

from offload.model.chunk import ChunkOf
from offload.model.flats import ParameterInfo
from offload.step.parts import Parts
from offload.tiers.memory import HostMemory


class Homes:
    """Owned by the thread that drives the model. The unit of what is written is resident, and no update of it is pending."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        flats = [flat for unit in parts.units for flat in unit.flats]
        self.views = {info.index: view for flat in flats for info, view in zip(flat.parameters, flat.views, strict=True)}
        """By parameter index: its values in device memory, whatever the parameter itself is made to point at."""

    def read_record(self, chunk_of: ChunkOf) -> torch.Tensor:
        """The chunk's record in memory: where it lies, or read into a buffer of its own."""
        records = self._parts.records
        assert records is not None
        stored = records.view(chunk_of)
        if stored is not None:
            return stored
        buffer = HostMemory(records.nbytes(chunk_of), "gathered records", ledger=self._parts.ledger).tensor
        records.read(chunk_of, buffer).wait()
        return buffer

    def write(self, info: ParameterInfo, written: torch.Tensor) -> None:
        """Carry the written elements (`written`: bool [numel] in slot order) to the parameter's home and its master."""
        unit = self._parts.units[info.unit_index]
        places, records = self._parts.places, self._parts.records
        ordered = info.in_memory_order(self.views[info.index])
        for chunk_of in unit.chunks:
            for other, piece in chunk_of.pieces:
                part = slice(piece.start - piece.slot.start, piece.stop - piece.slot.start)
                if other is not info or not bool(written[part].any()):
                    continue
                if records is not None and info.trainable and records.format(chunk_of).own_master:
                    buffer = self.read_record(chunk_of)
                    record = records.over(chunk_of, buffer)
                    low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
                    record.replace_master(low, high, written[part].to(buffer.device), ordered[part].to(buffer.device))
                    if records.view(chunk_of) is None:
                        records.write(chunk_of, buffer).wait()
                if places is not None:
                    self._write_chunk(chunk_of)

    def _write_chunk(self, chunk_of: ChunkOf) -> None:
        places = self._parts.places
        assert places is not None
        values = chunk_of.flat.chunk_bytes(chunk_of.chunk)
        stored = places.view(chunk_of)
        if stored is not None:
            self._parts.accelerator.copy_out(stored[: values.numel()], values).wait()
        elif self._parts.accelerator.unified:
            places.write(chunk_of, values).wait()
        else:
            buffer = HostMemory(values.numel(), "gathered parameters", ledger=self._parts.ledger).tensor
            self._parts.accelerator.copy_out(buffer, values).wait()
            places.write(chunk_of, buffer).wait()
