# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's universal checkpoint: `<folder>/zero/<fqn>/{fp32,exp_avg,exp_avg_sq,step}.pt`, made by its ds_to_universal.

With stages 0 to 2 a file holds a mapping whose "param" is the tensor in its shape, and there is a step for each
parameter. With stage 3 a file holds the elements alone, end to end: shapes are in `*model_states.pt` beside `zero`, the
number of steps in the optimizer's own state. `*model_states.pt` also names buffers and tied parameters; where it holds
more than tensors and plain values it is not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from offload.checkpoint.format.manifest import MOMENTS
from offload.checkpoint_import.deepspeed_model import DeepSpeedModel, frozen_parameter, read_model
from offload.checkpoint_import.deepspeed_zero import CLASSES, progress
from offload.checkpoint_import.restricted_load import load_naming, load_plain
from offload.checkpoint_import.source import Source, SourceParameter, SourceTensor, as_step, check_moments, in_parts, refused
from offload.errors import CheckpointError

KIND = "deepspeed-universal"


def recognises(path: Path) -> bool:
    """Whether the folder is one."""
    return (path / "zero").is_dir()


def open_source(path: Path, _: Sequence[str] | None = None) -> Source:
    """It names what it holds by itself. Raises `CheckpointError`."""
    model = read_model(path)
    folders = {entry.name: entry for entry in sorted((path / "zero").iterdir()) if (entry / "fp32.pt").is_file()}
    if not folders:
        raise refused(path, "no folder in its 'zero' holds an fp32.pt")
    names = [name for name in folders if name not in model.buffers and name not in model.aliases]
    parameters = [_parameter(folders[name], model) for name in names]
    parameters += [frozen_parameter(name, parts, model, path) for name, parts in model.frozen.items() if name not in folders]
    steps = [parameter.step for parameter in parameters]
    buffers = [(fqn, SourceTensor.of(tensor)) for fqn, tensor in model.buffers.items()]
    step_count = model.step_count if model.step_count is not None else max(steps, default=0)
    return Source(KIND, parameters, buffers, step_count, _missing(model), _progress(path, model))


def _progress(path: Path, model: DeepSpeedModel) -> dict[str, object]:
    try:
        common = load_naming(path / "zero" / "optimizer_state.pt", CLASSES)
    except CheckpointError:
        return dict(model.progress)
    said = common if isinstance(common, Mapping) else {}
    return progress(model, said.get("loss_scaler"), said.get("param_groups"))


def _missing(model: DeepSpeedModel) -> list[str]:
    missing = ["the states of random generators", "the position in the data", "the loss scale", "the numbers in param_groups"]
    if model.unread is not None:
        missing.append(f"buffers and which parameters are tied ({model.unread})")
    return missing


def _parameter(folder: Path, model: DeepSpeedModel) -> SourceParameter:
    fqn = folder.name
    names = [fqn, *(alias for alias, stored in model.aliases.items() if stored == fqn)]
    parameter = SourceParameter(names, _tensor(folder / "fp32.pt", fqn, model))
    files = {kind: file for kind in MOMENTS if (file := folder / f"{kind}.pt").is_file()}
    if files:
        for kind, file in files.items():
            setattr(parameter, kind, _tensor(file, fqn, model))
        check_moments(parameter, folder)
        parameter.step = _step(folder, model)
    return parameter


def _step(folder: Path, model: DeepSpeedModel) -> int:
    path = folder / "step.pt"
    if path.is_file():
        return as_step(load_plain(path), "its content", path)
    if model.step_count is None:
        raise refused(folder, "nothing says how many steps its moments have had: there is no step.pt, and no optimizer state")
    return model.step_count


def _tensor(path: Path, fqn: str, model: DeepSpeedModel) -> SourceTensor:
    tensor, is_flat = _load(path)
    shape = tuple(tensor.shape)
    known = model.shapes.get(fqn)
    if known is not None and known != shape:
        if math.prod(known) != tensor.numel():
            raise refused(path, f"it has {tensor.numel()} elements, and the model's shape is {list(known)}")
        shape = known
    elif known is None and is_flat:
        raise refused(
            path, "it holds elements without a shape, as ZeRO stage 3 writes them, and no *model_states.pt that can be read "
            "has the shape"
        )  # fmt: skip

    return SourceTensor(shape, tensor.dtype, lambda: in_parts(_load(path)[0]))


def _load(path: Path) -> tuple[torch.Tensor, bool]:
    """The file's tensor, and whether it has no shape."""
    content = load_plain(path)
    is_flat = not isinstance(content, Mapping)
    tensor = content if is_flat else content.get("param")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise refused(path, "it holds no tensor of numbers")
    return tensor, is_flat
