# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's `*model_states.pt` says of a model: shapes, ties, buffers, what is not trained, how many steps there were.

Universal and ordinary checkpoints have it. Where it holds more than tensors and plain values it is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint_import.restricted_load import load_plain, load_unchecked, require_whole_tensors
from offload.checkpoint_import.source import SourceParameter, SourceTensor, as_shape, as_step, refused
from offload.errors import CheckpointError

_KNOWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "lr_scheduler"),
        *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "universal_checkpoint_info", "num_experts", "expert_parallel_size"),
    )
)
"""What DeepSpeed writes: all else is the user's client_state."""


@dataclass(slots=True)
class DeepSpeedModel:
    """What is known from `*model_states.pt`."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Name of a tied parameter -> the name that its values are stored under."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Untrained parameters as stage 3 keeps them: each rank's part of the elements, padded at the end."""
    step_count: int | None = None
    unread: str | None = None
    trained: list[list[str]] = field(default_factory=list)
    """Names by group of the optimizer, by sub-group at stage 3; empty without ZeRO."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the model ran with, where it is whole."""
    optimizer: object = None
    progress: dict[str, Any] = field(default_factory=dict)
    """Counts, the scheduler's state and the user's own, as `offload.deepspeed` saves them."""


def frozen_parameter(fqn: str, fragments: list[torch.Tensor], model: DeepSpeedModel, path: Path) -> SourceParameter:
    shape = model.shapes.get(fqn, ())
    numel = math.prod(shape)
    if fqn not in model.shapes or sum(fragment.numel() for fragment in fragments) < numel:
        raise refused(path, f"the parts of the untrained parameter {fqn!r} do not make up its shape")

    def parts() -> Iterator[torch.Tensor]:
        yield torch.cat([fragment.reshape(-1) for fragment in fragments])[:numel]

    return SourceParameter([fqn], SourceTensor(shape, fragments[0].dtype, parts))


def read_model(path: Path) -> DeepSpeedModel:
    model = DeepSpeedModel()
    found = sorted(path.glob("*model_states.pt"), key=rank_of)
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


def rank_of(path: Path) -> tuple[int, str]:
    """`zero_pp_rank_<rank>_mp_rank_<..>_model_states.pt`, in the order of ranks."""
    match = re.search(r"zero_pp_rank_(\d{1,9})_", path.name)
    return (int(match[1]) if match is not None else 0), path.name


def _take_fragments(fragments: object, model: DeepSpeedModel) -> None:
    if isinstance(fragments, Mapping):
        for name, fragment in fragments.items():
            if isinstance(fragment, torch.Tensor):
                model.frozen.setdefault(str(name), []).append(fragment)


def _take_model(content: Mapping[str, Any], model: DeepSpeedModel, path: Path) -> None:
    for group in _items(content.get("param_shapes")):
        if isinstance(group, Mapping):
            model.shapes.update({str(name): as_shape(shape, repr(name), path) for name, shape in group.items()})
            model.trained.append([str(name) for name in group])
    frozen = content.get("frozen_param_shapes")
    if isinstance(frozen, Mapping):
        model.shapes.update({str(name): as_shape(shape, repr(name), path) for name, shape in frozen.items()})
    model.optimizer, model.progress = content.get("optimizer"), _progress(content)
    aliases = content.get("shared_params")
    if isinstance(aliases, Mapping):
        model.aliases = {str(alias): str(stored) for alias, stored in aliases.items()}
    module, names = content.get("module"), content.get("buffer_names")
    if isinstance(module, Mapping) and isinstance(names, list):
        if not all(isinstance(name, str) for name in names):
            raise refused(path, f"its buffer_names are {names!r}, which are no names")
        model.values = {
            str(name): value
            for name, value in module.items()
            if isinstance(value, torch.Tensor) and (value.numel() or name not in model.shapes)
        }
        model.aliases = model.aliases or _ties(model.values)
        model.buffers = {name: module[name] for name in names if isinstance(module.get(name), torch.Tensor)}
    if content.get("global_steps") is not None:
        skipped = content.get("skipped_steps") or 0
        model.step_count = as_step(content["global_steps"], "global_steps", path) - as_step(skipped, "skipped_steps", path)
        if model.step_count < 0:
            raise refused(path, f"it skipped {skipped} of {content['global_steps']} steps")


def _ties(values: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of one tensor: what is tied lies in one place of the file."""
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, value in values.items():
        place = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def _progress(content: Mapping[str, Any]) -> dict[str, Any]:
    """Empty where the file says nothing of steps."""
    if not isinstance(content.get("global_steps"), int):
        return {}
    counts = {name: content.get(name) or 0 for name in ("global_steps", "global_samples", "skipped_steps")}
    own = {str(name): value for name, value in content.items() if name not in _KNOWN}
    return counts | {"lr_scheduler": content.get("lr_scheduler"), "client_state": own}


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
