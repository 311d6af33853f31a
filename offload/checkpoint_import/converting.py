# SPDX-License-Identifier: Apache-2.0
"""From another project's checkpoint into ours, one shard after another. The format: docs/checkpoint-format.md, version 2."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.format.consistency import row_major
from offload.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MOMENTS,
    BufferEntry,
    LossScaleEntry,
    Manifest,
    ModelEntry,
    ParameterEntry,
    PieceEntry,
    TensorEntry,
    encode,
)
from offload.checkpoint.format.packing import packed, unpacked
from offload.checkpoint.format.staged_folder import StagedFolder
from offload.checkpoint.format.tensor_file import TensorFile, TensorSpec, known_dtype, write_file
from offload.checkpoint_import import deepspeed_universal, deepspeed_zero, torch_distributed
from offload.checkpoint_import.source import Source, SourceParameter, SourceTensor, check_source, reading, refused
from offload.errors import CheckpointError
from offload.model.file_dtypes import DTYPE_CODES
from offload.progress import Progress

_log = logging.getLogger(__name__)

_MODULES = {module.KIND: module for module in (deepspeed_universal, deepspeed_zero, torch_distributed)}
KINDS = tuple(_MODULES)
_FILE_NBYTES = 2**30


def import_checkpoint(source: Path, target: Path, kind: str | None = None, names: Sequence[str] | None = None) -> Source:
    """Convert the folder `source` into a checkpoint at `target`; returns what was found in it.

    kind   one of `KINDS`; None: the one that the folder looks like
    names  of the parameters in the order of the optimizer's groups, for a source that tells them by position alone

    Host memory: one shard of the source, 1 Mi elements beside it. Raises `CheckpointError`, `StorageError`.
    """
    found = open_source(source, kind, names)
    write_checkpoint(found, target)
    return found


def write_checkpoint(source: Source, target: Path) -> None:
    """What `import_checkpoint` makes of what was opened."""
    with StagedFolder(target, replace=True) as folder:
        manifest = _Converter(folder.path, source).convert()
        write_file(folder.path / MANIFEST_NAME, encode(manifest))
        folder.commit()


def open_source(path: Path, kind: str | None, names: Sequence[str] | None = None) -> Source:
    """What is in the folder, before its tensors are read. Raises `CheckpointError`."""
    with reading(path):
        chosen = kind or next((name for name, module in _MODULES.items() if module.recognises(path)), None)
        if chosen is not None:
            found: Source = _MODULES[chosen].open_source(path, names)
            check_source(found, path)
            return found
    raise CheckpointError(
        f"{str(path)!r} is no checkpoint that can be imported: expected a folder with '*model_states.pt' (DeepSpeed's), with "
        f"'zero' (DeepSpeed's universal checkpoint) or with {torch_distributed.METADATA!r} (torch.distributed.checkpoint)."
    )


class _Converter:
    """Writes the data files of one source into a folder."""

    def __init__(self, folder: Path, source: Source) -> None:
        self._folder, self._source = folder, source
        self._manifest = Manifest(
            world_size=1,
            step_count=source.step_count,
            loss_scale=LossScaleEntry(1.0, False, 0, 0),
            optimizer=None,
            model=ModelEntry("", {}, [parameter.fqns[0] for parameter in source.parameters if len(parameter.fqns) > 1]),
            parameters=[],
            buffers=[],
            random=[],
            files=[],
            client_state=_storable(source.progress),
            imported=source.kind,
        )

        tensors = [tensor for one in source.parameters for _, tensor in _tensors_of(one)]
        tensors += [tensor for _, tensor in source.buffers]
        total_nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in tensors)
        self._progress = Progress(_log, "import: %.1f of %.1f GiB are written", total_nbytes)

    def convert(self) -> Manifest:
        for index, parameters in enumerate(_batches(self._source.parameters)):
            self._write_parameters(f"part-{index:05d}.safetensors", parameters)
        if self._source.buffers:
            entries = self._write("buffers.safetensors", self._source.buffers)
            shapes = {fqn: list(tensor.shape) for fqn, tensor in self._source.buffers}
            self._manifest.buffers = [BufferEntry(fqn, shapes[fqn], entry) for fqn, entry in entries.items()]
        return self._manifest

    def _write_parameters(self, file_name: str, parameters: list[SourceParameter]) -> None:
        tensors = [named for parameter in parameters for named in _tensors_of(parameter)]
        entries = self._write(file_name, tensors)
        for parameter in parameters:
            fqn, value = parameter.fqns[0], parameter.value
            moments = [entries[f"{name}/{fqn}"] if parameter.trained else None for name in MOMENTS]
            self._manifest.parameters.append(
                ParameterEntry(
                    fqns=parameter.fqns,
                    shape=list(value.shape),
                    stride=list(row_major(value.shape)),
                    dtype=DTYPE_CODES[value.dtype],
                    group=0 if parameter.trained else None,
                    step=parameter.step,
                    pieces=[PieceEntry(0, value.numel, entries[fqn], *moments)],
                )
            )

    def _write(self, file_name: str, tensors: list[tuple[str, SourceTensor]]) -> dict[str, TensorEntry]:
        specs = [TensorSpec(name, known_dtype(name, tensor.dtype), tensor.shape) for name, tensor in tensors]
        if len({spec.name for spec in specs}) != len(specs):
            raise refused(Path(file_name), "two of its tensors have one name")
        with closing(TensorFile(self._folder, file_name, specs)) as file:
            for (name, tensor), spec in zip(tensors, specs, strict=True):
                for part in _parts(name, tensor):
                    file.append(name, part)
                self._progress.add(spec.nbytes)
            file.finish()
        self._manifest.files.append(file.entry)
        return {name: file.tensor_entry(name) for name, _ in tensors}


def _storable(progress: Mapping[str, object]) -> dict[str, Any]:
    """Each entry of it, and of the user's client_state, that a manifest can keep (`packed`), as it will come back."""
    kept: dict[str, Any] = {}
    for key, value in progress.items():
        if key == "client_state" and isinstance(value, Mapping):
            left_out = [name for name, entry in value.items() if not _is_json(packed(entry))]
            if left_out:
                _log.warning("of client_state %r is left out: there is more in it than plain values and tensors.", left_out)
            kept[key] = {name: entry for name, entry in value.items() if name not in left_out}
        else:
            kept[key] = value if _is_json(packed(value)) else None
    return {key: unpacked(json.loads(json.dumps(packed(value)))) for key, value in kept.items()}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _parts(name: str, tensor: SourceTensor) -> Iterator[torch.Tensor]:
    """All elements of a tensor of the source, of the dtype and as many as it said."""
    parts, numel = iter(tensor.parts()), 0
    while True:
        with reading(Path(name)):
            part = next(parts, None)
        if part is None:
            break
        numel += part.numel()
        if numel > tensor.numel:
            break
        yield part
    if numel != tensor.numel:
        raise refused(Path(name), f"{numel} of its {tensor.numel} elements are there")


def _tensors_of(parameter: SourceParameter) -> Iterator[tuple[str, SourceTensor]]:
    """By name, as they are written: everything of a trained parameter in fp32."""
    fqn = parameter.fqns[0]
    yield fqn, _in_fp32(parameter.value) if parameter.trained else parameter.value
    for name in MOMENTS:
        moment: SourceTensor | None = getattr(parameter, name)
        if moment is not None:
            yield f"{name}/{fqn}", _in_fp32(moment)


def _in_fp32(tensor: SourceTensor) -> SourceTensor:
    return SourceTensor(tensor.shape, torch.float32, tensor.parts)


def _batches(parameters: list[SourceParameter]) -> Iterator[list[SourceParameter]]:
    """Parameters of at most 1 GiB at a time, a larger one alone."""
    batch: list[SourceParameter] = []
    filled_nbytes = 0
    for parameter in parameters:
        nbytes = parameter.value.numel * (12 if parameter.trained else parameter.value.dtype.itemsize)
        if batch and filled_nbytes + nbytes > _FILE_NBYTES:
            yield batch
            batch, filled_nbytes = [], 0
        batch.append(parameter)
        filled_nbytes += nbytes
    if batch:
        yield batch
