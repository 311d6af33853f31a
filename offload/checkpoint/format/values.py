# SPDX-License-Identifier: Apache-2.0
"""The weights and buffers of a checkpoint's folder as tensors, without the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from offload.checkpoint.format.manifest import Manifest, TensorEntry
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.checkpoint.format.staged_folder import MANIFEST_NAME
from offload.errors import CheckpointError
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
        try:
            opened.check_files()
            opened.check_headers()
            for position, parameter in enumerate(opened.manifest.parameters):
                left_out = opened.manifest.leaves_out(parameter) or (trained_only and parameter.group is None)
                if keeps(position) and not left_out:
                    pieces = sorted(parameter.pieces, key=lambda piece: piece.start)
                    parts = [whole_tensor(opened, parameter.fqns[0], piece.value) for piece in pieces]
                    whole = torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[parameter.dtype], device="cpu")
                    value = whole.as_strided(parameter.shape, parameter.stride)
                    found.update(dict.fromkeys(parameter.fqns, value))
            for position, buffer in enumerate(opened.manifest.buffers):
                if keeps(position) and not trained_only:
                    found[buffer.fqn] = whole_tensor(opened, buffer.fqn, buffer.data).reshape(buffer.shape)
        except (KeyError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise opened.damaged(MANIFEST_NAME, f"its parameters cannot be put together ({error})") from error
        return found, opened.manifest


def whole_tensor(opened: OpenedCheckpoint, name: str, tensor: TensorEntry) -> torch.Tensor:
    slabs = [slab.clone().view(DTYPES[tensor.dtype]) for slab in opened.checked_slabs(f"value of {name!r}", tensor)]
    return torch.cat(slabs) if slabs else torch.empty(0, dtype=DTYPES[tensor.dtype], device="cpu")
