"""Parameters as ordinary tensors between steps: `engine.gathered` and `engine.state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offload.runtime.assembly import Parts
from offload.runtime.fetching import chunks_of
from offload.runtime.flats import ChunkOf, ParameterInfo, Unit
from offload.runtime.training import Training
from offload.tiers.memory import HostMemory


class Gathering:
    """See the module. Owned by the thread that drives the model."""

    def __init__(self, parts: Parts, training: Training) -> None:
        self._parts, self._training = parts, training

    @contextmanager
    def gathered(self, infos: Sequence[ParameterInfo]) -> Iterator[None]:
        """Bring the parameters' units in, open them up, and on the way out carry what was written to its home."""
        residency = self._parts.residency
        unit_indices = sorted({info.unit_index for info in infos})
        with self._training.failures():
            residency.finish_updates()
            for unit_index in unit_indices:
                residency.hold(unit_index)
        before = {info.index: info.parameter.detach().clone() for info in infos}
        try:
            yield
        finally:
            with self._training.failures():
                for info in infos:
                    # Bits, not values: a NaN that was there before is no change.
                    written = _bits(info.parameter.detach()) != _bits(before[info.index])
                    if bool(written.any()):
                        self._write_home(info, info.in_memory_order(written))
                for unit_index in unit_indices:
                    residency.let_go(unit_index)

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """See `Engine.state_dict`."""
        residency = self._parts.residency
        values: dict[int, torch.Tensor] = {}
        with self._training.failures():
            residency.finish_updates()
            for unit in self._parts.units:
                residency.hold(unit.index)
                for info in unit.parameters:
                    values[info.index] = info.parameter.detach().to("cpu", copy=True)
                residency.let_go(unit.index)
                self._overlay_masters(unit, values)
        named = {fqn: values[info.index] for info in self._parts.parameters for fqn in info.fqns}
        for fqn, buffer in _persistent_buffers(model):
            named[fqn] = buffer.detach().to("cpu", copy=True)
        return named

    def _overlay_masters(self, unit: Unit, values: dict[int, torch.Tensor]) -> None:
        records = self._parts.records
        if records is None:
            return
        for chunk_of in chunks_of(unit):
            if chunk_of.flat.layout.trainable and records.has_master(chunk_of):
                record = records.over(chunk_of, self._read_record(chunk_of))
                assert record.master is not None
                for info, piece in chunk_of.pieces():
                    value = values[info.index]
                    if value.dtype != torch.float32:
                        value = values[info.index] = torch.empty_strided(info.shape, info.stride, dtype=torch.float32)
                    low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
                    part = info.in_memory_order(value)[piece.start - piece.slot.start : piece.stop - piece.slot.start]
                    part.copy_(record.master[low:high])

    def _read_record(self, chunk_of: ChunkOf) -> torch.Tensor:
        """The chunk's record in memory: where it lies, or read into a buffer of its own."""
        records = self._parts.records
        assert records is not None
        stored = records.view(chunk_of)
        if stored is not None:
            return stored
        buffer = HostMemory(records.nbytes(chunk_of), "gathered records", ledger=self._parts.ledger).tensor
        records.read(chunk_of, buffer).wait()
        return buffer

    def _write_home(self, info: ParameterInfo, written: torch.Tensor) -> None:
        """Carry the written elements (`written`: bool [numel] in slot order) to the parameter's home and its master."""
        unit = self._parts.units[info.unit_index]
        places, records = self._parts.places, self._parts.records
        ordered = info.in_memory_order(info.parameter.detach())
        for chunk_of in chunks_of(unit):
            for other, piece in chunk_of.pieces():
                if other is not info:
                    continue
                part = slice(piece.start - piece.slot.start, piece.stop - piece.slot.start)
                if records is not None and info.trainable and records.has_master(chunk_of):
                    buffer = self._read_record(chunk_of)
                    record = records.over(chunk_of, buffer)
                    assert record.master is not None
                    low, high = piece.start - chunk_of.chunk.start, piece.stop - chunk_of.chunk.start
                    mask, master = written[part].to(record.master.device), record.master[low:high]
                    master[mask] = ordered[part].to(record.master.device, torch.float32)[mask]
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
