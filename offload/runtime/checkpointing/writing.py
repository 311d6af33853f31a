"""Writing a checkpoint's files: unit by unit, each from the tiers through one buffer straight into its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import nn

from offload.errors import UsageError
from offload.runtime.assembly import Parts
from offload.runtime.checkpointing.manifest import (
    MOMENTS,
    BufferEntry,
    FileEntry,
    Manifest,
    ParameterEntry,
    PieceEntry,
    RandomEntry,
    TensorEntry,
)
from offload.runtime.checkpointing.model_names import persistent_buffers
from offload.runtime.checkpointing.random_state import CPU, DEVICE, take_random_state
from offload.runtime.checkpointing.state_reading import PieceState, StateReader
from offload.runtime.checkpointing.tensor_file import DTYPE_CODES, TensorFile, TensorSpec
from offload.runtime.flats import ParameterInfo, Unit

METADATA = {"format": "pt"}
"""Of every data file; Hugging Face's reader asks for it."""


class CheckpointWriter:
    """Writes all data files into a folder and enters them into the manifest. Owned by the thread that drives the model."""

    def __init__(self, folder: Path, parts: Parts, reader: StateReader, manifest: Manifest) -> None:
        self._folder, self._parts, self._reader, self._manifest = folder, parts, reader, manifest
        self._rank = parts.layout.rank

    def write(self, model: nn.Module) -> None:
        """Write units, buffers and random states."""
        for unit in self._parts.units:
            if unit.parameters:
                self._write_unit(unit)
        buffers = dict(persistent_buffers(model))
        entries = self._write_whole("buffers", buffers)
        for fqn, entry in entries.items():
            self._manifest.buffers.append(BufferEntry(fqn, list(buffers[fqn].shape), entry))
        entries = self._write_whole("random", take_random_state(self._parts.accelerator.device))
        self._manifest.random.append(RandomEntry(self._rank, entries[CPU], entries.get(DEVICE)))

    def _write_unit(self, unit: Unit) -> None:
        specs = {spec.name: spec for info in unit.parameters for spec in _specs(info)}
        with self._file(f"unit-{unit.index:05d}", list(specs.values())) as file:
            for state in self._reader.pieces(unit):
                for name, part in _parts_of(state):
                    file.append(name, part)
        for info in unit.parameters:
            moments = [_entry(file, specs[_moment_name(info, name)]) if info.trainable else None for name in MOMENTS]
            piece = PieceEntry(0, info.numel, _entry(file, specs[info.fqn]), *moments)
            self._manifest.parameters.append(_parameter_entry(info, piece))

    def _write_whole(self, stem: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
        """One file of tensors that are brought to the host one at a time; none if there are none."""
        specs = [TensorSpec(name, known_dtype(name, one.dtype), tuple(one.shape)) for name, one in tensors.items()]
        if not specs:
            return {}
        with self._file(stem, specs) as file:
            for name, tensor in tensors.items():
                file.append(name, tensor.detach().cpu().contiguous())
        return {spec.name: _entry(file, spec) for spec in specs}

    @contextmanager
    def _file(self, stem: str, specs: Sequence[TensorSpec]) -> Iterator[TensorFile]:
        with closing(TensorFile(self._folder, f"{stem}-rank-{self._rank:05d}.safetensors", specs, METADATA)) as file:
            yield file
            file.finish()
        self._manifest.files.append(FileEntry(file.name, file.nbytes, file.header_nbytes, file.header_crc32))


def known_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if files can hold it; else `UsageError`."""
    if dtype not in DTYPE_CODES:
        raise UsageError(f"{name!r} is of dtype {dtype}, which checkpoints cannot hold: convert it before saving.")
    return dtype


def _moment_name(info: ParameterInfo, moment: str) -> str:
    return f"{moment}/{info.fqn}"


def _specs(info: ParameterInfo) -> Iterator[TensorSpec]:
    """A parameter's tensors in its unit's file: in its own shape where its elements lie row by row, else 1-D."""
    row_major = tuple(torch.empty(info.shape, device="meta").stride()) == info.stride
    shape = tuple(info.shape) if row_major else (info.numel,)
    yield TensorSpec(info.fqn, torch.float32 if info.trainable else known_dtype(info.fqn, info.dtype), shape)
    if info.trainable:
        yield from (TensorSpec(_moment_name(info, name), torch.float32, shape) for name in MOMENTS)


def _parts_of(state: PieceState) -> Iterator[tuple[str, torch.Tensor]]:
    yield state.info.fqn, state.value
    for name, moment in zip(MOMENTS, (state.exp_avg, state.exp_avg_sq), strict=True):
        if moment is not None:
            yield _moment_name(state.info, name), moment


def _entry(file: TensorFile, spec: TensorSpec) -> TensorEntry:
    return TensorEntry(file.name, DTYPE_CODES[spec.dtype], file.offsets[spec.name], spec.nbytes, file.crc32(spec.name))


def _parameter_entry(info: ParameterInfo, piece: PieceEntry) -> ParameterEntry:
    return ParameterEntry(
        fqns=list(info.fqns),
        shape=list(info.shape),
        stride=list(info.stride),
        dtype=DTYPE_CODES[info.dtype],
        group=info.group_index,
        step=info.step,
        pieces=[piece],
    )
