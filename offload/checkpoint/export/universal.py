# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's folder to DeepSpeed's universal checkpoint, without the model: any of its ZeRO stages loads it.

    OUT/zero/<fqn>/{fp32,exp_avg,exp_avg_sq,step}.pt   of each parameter, whole
    OUT/zero/optimizer_state.pt                        numbers of param_groups
    OUT/*model_states.pt                               counts, buffers, the scheduler's state: one name for stage 3, one below

Steps are numbers, as DeepSpeed's own Adam has them (with its "torch_adam" it wants tensors there). Host memory: the largest
parameter in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.format.folders import sync
from offload.checkpoint.format.manifest import MANIFEST_NAME, MOMENTS, VALUE, Manifest, ParameterEntry
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.checkpoint.format.packing import unpacked
from offload.checkpoint.format.staged_folder import StagedFolder, write_failure
from offload.checkpoint.format.values import check_without_model, whole_buffer, whole_parameter
from offload.errors import CheckpointError, StorageError
from offload.progress import Progress

_log = logging.getLogger(__name__)

_VERSION = "0.19.8"
"""Of DeepSpeed, whose layout this is."""
_FILES = ((VALUE, "fp32"), *((name, name) for name in MOMENTS))
"""Of a parameter: what is in them, and their names."""
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def check_universal(source: Path) -> None:
    """What can be told before the files are read. Raises `CheckpointError` where the folder holds no checkpoint of Adam's."""
    with OpenedCheckpoint(source) as opened:
        _require_adam(opened.manifest, source)


def export_universal(source: Path, target: Path) -> int:
    """Write the checkpoint at `source` as a universal one at `target`; returns the number of parameters.

    DeepSpeed loads it where its config says {"checkpoint": {"load_universal": true}}. Raises `CheckpointError` where the
    checkpoint is damaged or its optimizer is not Adam's, `StorageError` where writing fails.
    """
    with OpenedCheckpoint(source) as opened, StagedFolder(target, replace=False) as folder:
        manifest = opened.manifest
        _require_adam(manifest, source)
        check_without_model(opened)
        progress = Progress(_log, "export: %.1f of %.1f GiB of parameters", sum(4 * one.numel for one in manifest.parameters))
        for parameter in manifest.parameters:
            if manifest.leaves_out(parameter):
                continue
            progress.add(4 * parameter.numel)
            _write_parameter(opened, parameter, folder.path / "zero")
        _save(_optimizer(manifest), folder.path / "zero" / "optimizer_state.pt")
        _make_durable(folder.path / "zero")
        states = _model_states(opened)
        for name in _MODEL_FILES:
            _save(states, folder.path / name)
        folder.commit()
        return sum(not manifest.leaves_out(parameter) for parameter in manifest.parameters)


def _require_adam(manifest: Manifest, source: Path) -> None:
    if manifest.optimizer is None:
        raise CheckpointError(f"{str(source)!r} holds no optimizer's numbers: save it from an engine that trains.")
    for parameter in manifest.parameters:
        if parameter.group is None or manifest.leaves_out(parameter):
            continue
        for name in MOMENTS:
            if any(getattr(piece, name) is None for piece in parameter.pieces):
                raise CheckpointError(
                    f"{parameter.fqns[0]!r} has no {name}: a universal checkpoint is of Adam's moments. Export the weights "
                    "alone."
                )


def _write_parameter(opened: OpenedCheckpoint, parameter: ParameterEntry, folder: Path) -> None:
    if Path(parameter.fqns[0]).name != parameter.fqns[0]:
        raise opened.damaged(MANIFEST_NAME, f"{parameter.fqns[0]!r} is no name of a parameter")
    own = folder / parameter.fqns[0]
    own.mkdir(parents=True)
    for kind, name in _FILES if parameter.group is not None else _FILES[:1]:
        whole = whole_parameter(opened, parameter, kind, torch.float32)
        _save({"cat_dim": 0, "param": whole.contiguous()}, own / f"{name}.pt")
    if parameter.group is not None:
        _save(parameter.step, own / "step.pt")
    _make_durable(own)


def _save(content: Any, path: Path) -> None:
    try:
        torch.save(content, path)
    except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError of a full disk
        raise StorageError(getattr(error, "errno", None), f"{str(path)!r} cannot be written ({error}).") from error
    _make_durable(path)


def _make_durable(path: Path) -> None:
    try:
        sync(path)
    except OSError as error:
        raise write_failure("syncing", path, error) from error


def _optimizer(manifest: Manifest) -> dict[str, Any]:
    assert manifest.optimizer is not None
    groups = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in group.items() if name != "params"}
        for group in manifest.optimizer.param_groups
    ]
    steps = [max((one.step for one in manifest.parameters if one.group == index), default=0) for index in range(len(groups))]
    states = {index: {"step": step} for index, step in enumerate(steps)}
    numbered = [group | {"params": [index]} for index, group in enumerate(groups)]
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": manifest.world_size,
        "ds_version": _VERSION,
        "param_groups": numbered,
        "optimizer_state_dict": {"state": states, "param_groups": numbered},
    }


def _model_states(opened: OpenedCheckpoint) -> dict[str, Any]:
    manifest = opened.manifest
    own: Mapping[str, Any] = manifest.client_state
    is_drop_ins = "global_steps" in own
    assert manifest.optimizer is not None
    groups = range(len(manifest.optimizer.param_groups))
    trained = [[one for one in manifest.parameters if one.group == index] for index in groups]
    frozen = [one for one in manifest.parameters if one.group is None and not manifest.leaves_out(one)]
    buffers = {one.fqn: whole_buffer(opened, one) for one in manifest.buffers}
    states = {
        "module": buffers,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [{one.fqns[0]: torch.Size(one.shape) for one in group} for group in trained],
        "frozen_param_shapes": {one.fqns[0]: torch.Size(one.shape) for one in frozen},
        "frozen_param_fragments": {
            one.fqns[0]: whole_parameter(opened, one, VALUE, torch.float32).reshape(-1) for one in frozen
        },
        "shared_params": {alias: one.fqns[0] for one in manifest.parameters for alias in one.fqns[1:]},
        "lr_scheduler": unpacked(own.get("lr_scheduler")) if is_drop_ins else None,
        "skipped_steps": own.get("skipped_steps", 0) if is_drop_ins else 0,
        "global_steps": own["global_steps"] if is_drop_ins else manifest.step_count,
        "global_samples": own.get("global_samples", 0) if is_drop_ins else 0,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "ds_version": _VERSION,
        "ds_config": {},
        "universal_checkpoint_info": {},
    }
    return states | dict(unpacked(own["client_state"]) if is_drop_ins else own)
