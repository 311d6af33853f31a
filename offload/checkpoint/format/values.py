# SPDX-License-Identifier: Apache-2.0
"""The weights and buffers of a checkpoint's folder as tensors, without the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from offload.checkpoint.format.consistency import Inconsistent, check_parameter, check_range, moments_of
from offload.checkpoint.format.manifest import MANIFEST_NAME, VALUE, BufferEntry, Manifest, ParameterEntry, TensorEntry
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.model.file_dtypes import DTYPES


def read_values(
    path: Path, keeps: Callable[[int], bool] = lambda _: True, *, trained_only: bool = False
) -> tuple[dict[str, torch.Tensor], Manifest]:
    """By fqn, tied parameters under each of their names, fp32 where they were trained, but for what was left out; and what else
    the checkpoint says.

    `keeps(position)`: whether the parameter, or buffer, of that number is wanted. Checksums are compared. Raises
    `CheckpointError`, `StorageError`. Host memory: what is returned.
    """
    found: dict[str, torch.Tensor] = {}
    with OpenedCheckpoint(path) as opened:
        check_without_model(opened)
        manifest = opened.manifest
        for position, parameter in enumerate(manifest.parameters):
            left_out = manifest.leaves_out(parameter) or (trained_only and parameter.group is None)
            if keeps(position) and not left_out:
                stored = torch.float32 if parameter.group is not None else DTYPES[parameter.dtype]
                found.update(dict.fromkeys(parameter.fqns, whole_parameter(opened, parameter, VALUE, stored)))
        for position, buffer in enumerate(manifest.buffers):
            if keeps(position) and not trained_only:
                found[buffer.fqn] = whole_buffer(opened, buffer)
        return found, manifest


def check_without_model(opened: OpenedCheckpoint) -> None:
    """What no engine is here to be compared with: that parameters and buffers are as large as their ranges, and files as these
    and their headers say. Raises `CheckpointError`."""
    manifest = opened.manifest
    moments = moments_of(manifest)
    try:
        for parameter in manifest.parameters:
            if not manifest.leaves_out(parameter):
                check_parameter(parameter, moments)
        for buffer in manifest.buffers:
            check_range(f"buffer {buffer.fqn!r}", buffer.data, math.prod(buffer.shape), buffer.data.dtype)
    except Inconsistent as clause:
        raise opened.damaged(MANIFEST_NAME, str(clause)) from clause
    opened.check_files()
    opened.check_headers()


def whole_parameter(opened: OpenedCheckpoint, parameter: ParameterEntry, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Its value or a moment, in its shape and strides. The checkpoint was checked (`check_without_model`)."""
    whole = torch.empty(parameter.numel, dtype=dtype, device="cpu")
    for piece in parameter.pieces:
        _fill(opened, f"{kind} of {parameter.fqns[0]!r}", getattr(piece, kind), whole[piece.start : piece.stop])
    return whole.as_strided(parameter.shape, parameter.stride)


def whole_buffer(opened: OpenedCheckpoint, buffer: BufferEntry) -> torch.Tensor:
    """As `whole_parameter`."""
    whole = torch.empty(buffer.shape, dtype=DTYPES[buffer.data.dtype], device="cpu")
    _fill(opened, f"value of {buffer.fqn!r}", buffer.data, whole.reshape(-1))
    return whole


def _fill(opened: OpenedCheckpoint, what: str, tensor: TensorEntry, into: torch.Tensor) -> None:
    start = 0
    for slab in opened.checked_slabs(what, tensor):
        into[start : start + slab.numel()] = slab
        start += slab.numel()
