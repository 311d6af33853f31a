"""DeepSpeed's universal checkpoint: `<folder>/zero/<fqn>/{fp32,exp_avg,exp_avg_sq,step}.pt`, made by its ds_to_universal.

With stages 0 to 2 a file holds a mapping whose "param" is the tensor in its shape, and there is a step for each
parameter. With stage 3 a file holds the elements alone, end to end: shapes are in `*model_states.pt` beside `zero`, the
number of steps in the optimizer's own state. `*model_states.pt` also names buffers and tied parameters; where it holds
more than tensors and plain values it is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.importing.restricted_load import load_plain, load_unchecked, require_whole_tensors
from offload.importing.source import (
    Source,
    SourceParameter,
    SourceTensor,
    as_shape,
    as_step,
    check_moments,
    in_parts,
    refused,
)

KIND = "deepspeed-universal"


@dataclass(slots=True)
class _Model:
    """What is known from `*model_states.pt`."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Name of a tied parameter -> the name that its values are stored under."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Untrained parameters as stage 3 keeps them: each rank's part of the elements, padded at the end."""
    step_count: int | None = None
    unread: str | None = None


def recognises(path: Path) -> bool:
    """Whether the folder is one."""
    return (path / "zero").is_dir()


def open_source(path: Path) -> Source:
    """Raises `CheckpointError`."""
    model = _read_model(path)
    folders = {entry.name: entry for entry in sorted((path / "zero").iterdir()) if (entry / "fp32.pt").is_file()}
    if not folders:
        raise refused(path, "no folder in its 'zero' holds an fp32.pt")
    names = [name for name in folders if name not in model.buffers and name not in model.aliases]
    parameters = [_parameter(folders[name], model) for name in names]
    parameters += [_frozen(name, parts, model, path) for name, parts in model.frozen.items() if name not in folders]
    steps = [parameter.step for parameter in parameters]
    buffers = [(fqn, _whole(tensor)) for fqn, tensor in model.buffers.items()]
    step_count = model.step_count if model.step_count is not None else max(steps, default=0)
    return Source(KIND, parameters, buffers, step_count, _missing(model))


def _missing(model: _Model) -> list[str]:
    missing = ["the states of random generators", "the position in the data", "the loss scale", "the numbers in param_groups"]
    if model.unread is not None:
        missing.append(f"buffers and which parameters are tied ({model.unread})")
    return missing


def _parameter(folder: Path, model: _Model) -> SourceParameter:
    fqn = folder.name
    names = [fqn, *(alias for alias, stored in model.aliases.items() if stored == fqn)]
    parameter = SourceParameter(names, _tensor(folder / "fp32.pt", fqn, model))
    if (folder / "exp_avg.pt").is_file() or (folder / "exp_avg_sq.pt").is_file():
        for kind in ("exp_avg", "exp_avg_sq"):
            if (folder / f"{kind}.pt").is_file():
                setattr(parameter, kind, _tensor(folder / f"{kind}.pt", fqn, model))
        check_moments(parameter, folder)
        parameter.step = _step(folder, model)
    return parameter


def _frozen(fqn: str, fragments: list[torch.Tensor], model: _Model, path: Path) -> SourceParameter:
    shape = model.shapes.get(fqn, ())
    numel = math.prod(shape)
    if fqn not in model.shapes or sum(fragment.numel() for fragment in fragments) < numel:
        raise refused(path, f"the parts of the untrained parameter {fqn!r} do not make up its shape")

    def parts() -> Iterator[torch.Tensor]:
        yield torch.cat([fragment.reshape(-1) for fragment in fragments])[:numel]

    return SourceParameter([fqn], SourceTensor(shape, fragments[0].dtype, parts))


def _step(folder: Path, model: _Model) -> int:
    path = folder / "step.pt"
    if path.is_file():
        return as_step(load_plain(path), "its content", path)
    if model.step_count is None:
        raise refused(folder, "nothing says how many steps its moments have had: there is no step.pt, and no optimizer state")
    return model.step_count


def _tensor(path: Path, fqn: str, model: _Model) -> SourceTensor:
    tensor = _load(path)
    shape = tuple(tensor.shape)
    known = model.shapes.get(fqn)
    if known is not None and known != shape:
        if math.prod(known) != tensor.numel():
            raise refused(path, f"it has {tensor.numel()} elements, and the model's shape is {list(known)}")
        shape = known
    elif known is None and _is_flat(path):
        raise refused(
            path, "it holds elements without a shape, as ZeRO stage 3 writes them, and no *model_states.pt that can be read "
            "has the shape"
        )  # fmt: skip

    def parts() -> Iterator[torch.Tensor]:
        yield from in_parts(_load(path))

    return SourceTensor(shape, tensor.dtype, parts)


def _is_flat(path: Path) -> bool:
    return isinstance(load_plain(path), torch.Tensor)


def _load(path: Path) -> torch.Tensor:
    content = load_plain(path)
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise refused(path, "it holds no tensor of numbers")
    return tensor


def _whole(tensor: torch.Tensor) -> SourceTensor:
    return SourceTensor(tuple(tensor.shape), tensor.dtype, lambda: in_parts(tensor))


def _read_model(path: Path) -> _Model:
    model = _Model()
    found = sorted(path.glob("*model_states.pt"), key=_rank_of)
    if not found:
        model.unread = "there is no *model_states.pt"
        return model
    for file in found:
        try:
            content = load_unchecked(file)
        except CheckpointError as error:
            model.unread = str(error)
            break
        require_whole_tensors(content, file)
        if isinstance(content, Mapping):
            if file == found[0]:
                _take_model(content, model, file)
            _take_fragments(content.get("frozen_param_fragments"), model)
    if model.step_count is None:
        model.step_count = _optimizer_steps(path / "zero" / "optimizer_state.pt")
    return model


def _rank_of(path: Path) -> tuple[int, str]:
    """`zero_pp_rank_<rank>_mp_rank_<..>_model_states.pt`, in the order of ranks."""
    match = re.search(r"zero_pp_rank_(\d{1,9})_", path.name)
    return (int(match[1]) if match is not None else 0), path.name


def _take_fragments(fragments: object, model: _Model) -> None:
    if isinstance(fragments, Mapping):
        for name, fragment in fragments.items():
            if isinstance(fragment, torch.Tensor):
                model.frozen.setdefault(str(name), []).append(fragment)


def _take_model(content: Mapping[str, Any], model: _Model, path: Path) -> None:
    for group in [*_items(content.get("param_shapes")), content.get("frozen_param_shapes")]:
        if isinstance(group, Mapping):
            model.shapes.update({str(name): as_shape(shape, repr(name), path) for name, shape in group.items()})
    aliases = content.get("shared_params")
    if isinstance(aliases, Mapping):
        model.aliases = {str(alias): str(stored) for alias, stored in aliases.items()}
    module, names = content.get("module"), content.get("buffer_names")
    if isinstance(module, Mapping) and isinstance(names, list):
        if not all(isinstance(name, str) for name in names):
            raise refused(path, f"its buffer_names are {names!r}, which are no names")
        model.buffers = {name: module[name] for name in names if isinstance(module.get(name), torch.Tensor)}
    if content.get("global_steps") is not None:
        skipped = content.get("skipped_steps") or 0
        model.step_count = as_step(content["global_steps"], "global_steps", path) - as_step(skipped, "skipped_steps", path)
        if model.step_count < 0:
            raise refused(path, f"it skipped {skipped} of {content['global_steps']} steps")


def _items(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _optimizer_steps(path: Path) -> int | None:
    """The step count that stage 3 keeps for all parameters at once, where it can be read."""
    try:
        content = load_plain(path)
    except CheckpointError:
        return None
    for key in ("optimizer_state_dict", "state"):
        content = content.get(key) if isinstance(content, Mapping) else None
    states = content.values() if isinstance(content, Mapping) else ()
    steps = {as_step(one["step"], "step", path) for one in states if isinstance(one, Mapping) and "step" in one}
    return steps.pop() if len(steps) == 1 else None
