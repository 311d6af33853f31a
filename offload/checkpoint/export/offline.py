# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's folder to safetensors shards, without the model: byte ranges in, byte ranges out. Where its library has
other tensors on disk, it is asked for what: then a layer's experts are in memory at a time.

Only the weights are read, not the moments; their checksums are compared on the way, and the export gets its name only
after the last of them. Host memory: 4 MiB that are read, 1 Mi elements that are rounded, and one tensor where its
elements do not lie row by row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from offload.checkpoint.export.weights import Exporter
from offload.checkpoint.format.manifest import MANIFEST_NAME, Manifest, ModelEntry, ParameterEntry
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.checkpoint.format.values import check_without_model
from offload.checkpoint.model_names import CONFIGS
from offload.errors import CheckpointError
from offload.model.conversions import outlined_model
from offload.model.file_dtypes import DTYPES


def check_exportable(source: Path) -> None:
    """What can be told before the files are read. Raises `CheckpointError` where the folder holds no checkpoint that can be
    exported without its model."""
    with OpenedCheckpoint(source) as opened:
        _require_whole(opened.manifest, source)


def export_checkpoint(source: Path, target: Path, dtype: torch.dtype | None, max_shard_nbytes: int) -> int:
    """Write what `Engine.export(target, dtype)` of the run that saved `source` would have; returns the number of tensors.

    Raises `CheckpointError` where the checkpoint is damaged or `target` is in the way, `StorageError` where writing fails.
    """
    with OpenedCheckpoint(source) as opened:
        manifest = opened.manifest
        _require_whole(manifest, source)
        check_without_model(opened)
        names = _names(opened)
        model = outlined_model(manifest.model.kind, manifest.model.configs.get("config", ""))
        exporter = Exporter(target, dtype, max_shard_nbytes, manifest.model.kind, manifest.model.configs, model)
        for name, parameter in zip(names, manifest.parameters, strict=True):
            exporter.add(name, parameter.shape, parameter.stride, DTYPES[parameter.dtype])
        for buffer in manifest.buffers:
            exporter.add_buffer(buffer.fqn, buffer.shape, DTYPES[buffer.data.dtype])
        exporter.write(_values(opened, names))
        return len(names) + len(manifest.buffers)


def kept_name(parameter: ParameterEntry, model: ModelEntry) -> str:
    """The one name that a file of weights holds the parameter under."""
    return next((fqn for fqn in parameter.fqns if fqn in model.kept_fqns), parameter.fqns[0])


def _require_whole(manifest: Manifest, source: Path) -> None:
    _require_no_adapters(manifest, source)
    if any(manifest.leaves_out(one) for one in manifest.parameters):
        raise CheckpointError(
            f"the checkpoint {str(source)!r} was saved without frozen parameters: load it into an engine of the model, and "
            "call engine.export(dir)."
        )


def _require_no_adapters(manifest: Manifest, source: Path) -> None:
    """A checkpoint knows neither an adapter's configuration nor the factor it is merged with."""
    names = [fqn for parameter in manifest.parameters for fqn in parameter.fqns]
    injected = any(".base_layer." in name for name in names) and any(".lora_" in name for name in names)
    if manifest.model.kind.startswith("Peft") or injected:
        raise CheckpointError(
            f"the checkpoint {str(source)!r} is of a PEFT model ({manifest.model.kind}), and does not hold the configuration "
            "of its adapters: load it into an engine of that model, and call engine.export(dir) for the adapters, or "
            "engine.export(dir, merged=True)."
        )


def _values(opened: OpenedCheckpoint, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in zip(names, opened.manifest.parameters, strict=True):
        for piece in sorted(parameter.pieces, key=lambda piece: piece.start):
            for slab in opened.checked_slabs(f"value of {parameter.fqns[0]!r}", piece.value):
                yield name, slab
    for buffer in opened.manifest.buffers:
        for slab in opened.checked_slabs(f"buffer {buffer.fqn!r}", buffer.data):
            yield buffer.fqn, slab


def _names(opened: OpenedCheckpoint) -> list[str]:
    """The parameters' names in the export. Raises `CheckpointError` where names or configurations are none for one."""
    manifest = opened.manifest
    names = [kept_name(parameter, manifest.model) for parameter in manifest.parameters]
    written = [*names, *(buffer.fqn for buffer in manifest.buffers)]
    if len(set(written)) != len(written) or "__metadata__" in written:
        raise opened.damaged(MANIFEST_NAME, "two of its tensors have one name, or one that safetensors does not allow")
    for attribute, text in manifest.model.configs.items():
        if attribute not in CONFIGS or not _is_json_object(text):
            raise opened.damaged(MANIFEST_NAME, f"its model configuration {attribute!r} is unknown, or no JSON object")
    return names


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
