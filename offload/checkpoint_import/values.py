# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints, ours and other projects': the weights as tensors, one kind made into another."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from offload.checkpoint.export.universal import export_universal
from offload.checkpoint.format import values as own
from offload.checkpoint.format.manifest import MANIFEST_NAME
from offload.checkpoint.format.numbering import checked_folder
from offload.checkpoint_import.converting import import_checkpoint as convert, open_source
from offload.checkpoint_import.source import SourceTensor


def read_values(dir: str | os.PathLike[str], *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Parameters (fp32 where they were trained) and buffers of a checkpoint by name, on the CPU, without the model: one that
    `Engine.save_checkpoint` wrote, or one that `python -m offload import` reads.

    trained_only  leave out what was not trained

    Raises `CheckpointError`, `StorageError`. Host memory: what is returned.
    """
    path = checked_folder(dir, "read_values")
    if (path / MANIFEST_NAME).is_file():
        return own.read_values(path, trained_only=trained_only)[0]
    source = open_source(path, None)
    found: dict[str, torch.Tensor] = {}
    for parameter in source.parameters:
        if parameter.trained or not trained_only:
            found.update(dict.fromkeys(parameter.fqns, _whole(parameter.value)))
    found.update({name: _whole(tensor) for name, tensor in source.buffers if not trained_only})
    return found


def import_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, names: Sequence[str] | None = None
) -> None:
    """Convert another project's checkpoint in the folder `source` into one at `target`, as `python -m offload import` does.

    names  of the trained parameters in the order of the optimizer's groups, for sources that tell moments by position alone
           (DeepSpeed's stage 0)

    Host memory: one shard of the source. Raises `CheckpointError`, `StorageError`.
    """
    convert(checked_folder(source, "import_checkpoint"), checked_folder(target, "import_checkpoint"), None, names)


def export_universal_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Convert the checkpoint of a run with Adam at `source`, as `Engine.save_checkpoint` wrote it, into DeepSpeed's universal
    checkpoint at `target`; `python -m offload export --format deepspeed-universal` does the same. Host memory: the largest
    parameter in fp32.

    Raises `CheckpointError`, `StorageError`.
    """
    name = "export_universal_checkpoint"
    export_universal(checked_folder(source, name), checked_folder(target, name))


def _whole(tensor: SourceTensor) -> torch.Tensor:
    parts = [part.clone() for part in tensor.parts()]
    return torch.cat(parts).reshape(tensor.shape) if parts else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
