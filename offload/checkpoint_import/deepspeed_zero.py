# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ordinary checkpoints, of ZeRO stages 0 to 3: a folder with `*model_states.pt` and `*optim_states.pt`.

Stages 1 and 2 (and bf16 without ZeRO): a group of the optimizer is one flat fp32 tensor, of which each rank has a part;
`param_slice_mappings` says which elements of a parameter a rank has, and the ranks' follow each other.

Stage 3: each rank has the same share, ceil(numel / ranks), of every parameter, end to end in the order of `param_shapes`;
the last one is padded. The flats of sub-groups follow each other.

Stage 0 keeps what the optimizer itself says, by position and without names: `names` tells which parameter is at which. The
classes of DeepSpeed that these pickles name are never looked up; what the pickle says of such an object is kept as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.format.manifest import MOMENTS
from offload.checkpoint_import.deepspeed_model import DeepSpeedModel, frozen_parameter, read_model
from offload.checkpoint_import.restricted_load import Unknown, load_naming
from offload.checkpoint_import.source import Source, SourceParameter, SourceTensor, as_step, in_parts, refused

KIND = "deepspeed-zero"
CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_ELSEWHERE = "make a universal checkpoint of it with DeepSpeed's ds_to_universal, and import that"


@dataclass(slots=True)
class _Trained:
    """Of one parameter its parts, in the order of its elements."""

    value: list[torch.Tensor] = field(default_factory=list)
    exp_avg: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sq: list[torch.Tensor] = field(default_factory=list)
    step: int = 0


def recognises(path: Path) -> bool:
    """Whether the folder is one."""
    return not (path / "zero").is_dir() and any(path.glob("*model_states.pt"))


def open_source(path: Path, names: Sequence[str] | None = None) -> Source:
    """`names`: of what the optimizer trained, in the order of its groups. Raises `CheckpointError`."""
    model = read_model(path)
    if model.unread is not None:
        raise refused(path, model.unread)
    files = _optimizer_files(path)
    found: dict[str, _Trained] = {}
    scaler: object = None
    groups: object = _deep(model.optimizer, "param_groups")
    for number, file in enumerate(files):
        state = _mapping(_mapping(load_naming(file, CLASSES), file).get("optimizer_state_dict"), file)
        if not number:
            scaler = state.get("loss_scaler")
            groups = _deep(state.get("base_optimizer_state", state.get("optimizer_state_dict")), "param_groups")
        if "fp32_flat_groups" in state:
            _take_shares(state, model, len(files), found, file)
        elif "param_slice_mappings" in state:
            _take_slices(state, found, file)
        else:
            raise refused(file, f"it says nothing of which parameter lies where (rank {number}); {_ELSEWHERE}")
    unnamed = not files and not _take_whole(model, names, found, path)
    parameters = [_parameter(name, one, model, path) for name, one in found.items()]
    parameters += [frozen_parameter(name, parts, model, path) for name, parts in model.frozen.items() if name not in found]
    known = {name for parameter in parameters for name in parameter.fqns}
    parameters += [
        SourceParameter([name], SourceTensor.of(value))
        for name, value in model.values.items()
        if name not in known | model.buffers.keys()
    ]
    missing = ["the states of random generators", "the position in the data", "the numbers in param_groups"]
    if unnamed:
        missing.append(
            "which moments are whose (stage 0 says it by position: load_checkpoint of offload.deepspeed knows the order)"
        )
    buffers = [(fqn, SourceTensor.of(tensor)) for fqn, tensor in model.buffers.items()]
    return Source(KIND, parameters, buffers, model.step_count or 0, missing, progress(model, scaler, groups))


def _optimizer_files(path: Path) -> list[Path]:
    """By rank. Raises `CheckpointError` where ranks are missing, and for model parallelism."""
    found: dict[int, Path] = {}
    for file in path.glob("*_optim_states.pt"):
        match = re.search(r"zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt$", file.name)
        if match is None or int(match[2]):
            raise refused(file, f"its name is not one of ranks that only share data; {_ELSEWHERE}")
        found[int(match[1])] = file
    if sorted(found) != list(range(len(found))):
        raise refused(path, f"it has the optimizer states of the ranks {sorted(found)}: some are missing")
    return [found[rank] for rank in sorted(found)]


def _mapping(value: object, path: Path) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise refused(path, f"it holds {type(value).__name__} where a mapping is expected")
    return value


def _base_states(base: object, path: Path) -> list[Mapping[str, Any]]:
    """Of each flat what the optimizer keeps, in order; without a `step` where the optimizer has none."""
    if isinstance(base, list):  # elastic_checkpoint
        return [_mapping(one, path) for one in base]
    states = _mapping(_mapping(base, path).get("state"), path)
    return [_mapping(states[key], path) for key in sorted(states)]


def _take_slices(state: Mapping[str, Any], found: dict[str, _Trained], path: Path) -> None:
    """Stages 1 and 2: this rank's part of each group."""
    flats, base = state["single_partition_of_fp32_groups"], _base_states(state["base_optimizer_state"], path)
    steps = state.get("base_optimizer_state_step")
    for index, mapping in enumerate(state["param_slice_mappings"]):
        own = base[index] if index < len(base) else {}
        step = own.get("step", steps[index] if isinstance(steps, list) and index < len(steps) else 0)
        for name, address in _mapping(mapping, path).items():
            said = address.state if isinstance(address, Unknown) else {}
            start, count = said.get("start"), said.get("numel")
            if not isinstance(start, int) or not isinstance(count, int):
                raise refused(path, f"where {name!r} lies is {said!r}, which is no place")
            trained = found.setdefault(str(name), _Trained())
            trained.value.append(_cut(flats[index], start, count, path))
            _take_moments(trained, own, start, count, path)
            trained.step = as_step(step, "step", path)


def _take_shares(state: Mapping[str, Any], model: DeepSpeedModel, ranks: int, found: dict[str, _Trained], path: Path) -> None:
    """Stage 3: this rank's share of every parameter."""
    flats, base = list(state["fp32_flat_groups"]), _base_states(state["optimizer_state_dict"], path)
    if len(flats) != len(model.trained):
        raise refused(path, f"it has {len(flats)} flats, and the model {len(model.trained)} sub-groups")
    for index, names in enumerate(model.trained):
        flat, own = _in_memory(flats[index], base[index] if index < len(base) else {}, path)
        start = 0
        for name in names:
            trained, numel = found.setdefault(name, _Trained()), math.prod(model.shapes[name])
            share = -(-numel // ranks)
            count = min(share, numel - sum(part.numel() for part in trained.value))
            trained.value.append(_cut(flat, start, count, path))
            _take_moments(trained, own, start, count, path)
            trained.step = as_step(own.get("step", 0), "step", path)
            start += share


def _in_memory(flat: torch.Tensor, own: Mapping[str, Any], path: Path) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """A sub-group's flat and its moments; of one that was on NVMe they are raw files, which are mapped."""
    name = getattr(flat, "ds_id", None)
    if flat.numel() or name is None:
        return flat, own
    rank = int(path.name.split("zero_pp_rank_")[1].split("_")[0])
    folder = path.parent / "offloaded_tensors" / f"rank{rank:02d}"
    read = {key: _mapped(folder, f"{key}-{name}") for key in MOMENTS if key in own}
    return _mapped(folder, str(name)), {**own, **read}


def _mapped(folder: Path, name: str) -> torch.Tensor:
    file = folder / f"{name}.tensor.swp"
    if re.fullmatch(r"[\w-]+", name) is None or not file.is_file():
        raise refused(folder, f"it has no file of {name!r}")
    return torch.from_file(str(file), shared=False, size=file.stat().st_size // 4, dtype=torch.float32)


def _take_moments(trained: _Trained, own: Mapping[str, Any], start: int, count: int, path: Path) -> None:
    """Adam's; what other optimizers keep is passed over."""
    if all(isinstance(own.get(name), torch.Tensor) for name in MOMENTS):
        for name in MOMENTS:
            getattr(trained, name).append(_cut(own[name], start, count, path))


def _cut(flat: object, start: int, count: int, path: Path) -> torch.Tensor:
    if not isinstance(flat, torch.Tensor) or not 0 <= start <= start + count <= flat.numel():
        raise refused(path, f"elements {start} to {start + count} are not in a flat of it")
    return flat.reshape(-1)[start : start + count]


def _take_whole(model: DeepSpeedModel, names: Sequence[str] | None, found: dict[str, _Trained], path: Path) -> bool:
    """Stage 0: whole tensors, by position. False: nothing says which is whose."""
    optimizer = model.optimizer
    if not isinstance(optimizer, Mapping):
        return True
    masters: list[torch.Tensor] | None = None
    if "fp32_groups_flat" in optimizer:  # fp16
        masters, optimizer = list(optimizer["fp32_groups_flat"]), _mapping(optimizer["optimizer_state_dict"], path)
    states, groups = _mapping(optimizer.get("state"), path), list(optimizer.get("param_groups", []))
    if names is None:
        names = [name for name in model.values if name not in model.buffers and name not in model.aliases]
        if len(groups) != 1:
            return False
    if masters is None:
        return _take_positions(states, groups, names, model, found, path)
    left = list(names)
    for index, flat in enumerate(masters):
        start, own = 0, _mapping(states.get(index, {}), path)
        while left and start < flat.numel():
            name = left.pop(0)
            count = model.values[name].numel() if name in model.values else 0
            trained = found.setdefault(name, _Trained())
            trained.value.append(_cut(flat, start, count, path))
            _take_moments(trained, own, start, count, path)
            trained.step, start = as_step(own.get("step", 0), "step", path), start + count
    if left:
        raise refused(path, f"its flats end before {left[0]!r}")
    return True


def _take_positions(
    states: Mapping[Any, Any],
    groups: Sequence[Any],
    names: Sequence[str],
    model: DeepSpeedModel,
    found: dict[str, _Trained],
    path: Path,
) -> bool:
    positions = [position for group in groups for position in _mapping(group, path)["params"]]
    shapes = [_shape(states.get(position), model.values.get(name)) for position, name in zip(positions, names, strict=False)]
    if len(positions) != len(names) or not all(shapes):
        return False
    steps = {id(group): _last_step(states, group["params"], path) for group in groups}
    step_of = {position: steps[id(group)] for group in groups for position in group["params"]}
    for position, name in zip(positions, names, strict=True):
        trained = found.setdefault(name, _Trained([model.values[name].reshape(-1)]))
        _take_moments(trained, states.get(position, {}), 0, model.values[name].numel(), path)
        trained.step = step_of[position]
    return True


def _last_step(states: Mapping[Any, Any], positions: Sequence[Any], path: Path) -> int:
    """Of a group. DeepSpeed's fused Adam on a CPU counts in the last parameter of a group alone."""
    own = [_mapping(states.get(position, {}), path).get("step", 0) for position in positions]
    return max((as_step(one, "step", path) for one in own), default=0)


def _shape(state: object, value: torch.Tensor | None) -> bool:
    moment = state.get("exp_avg") if isinstance(state, Mapping) else None
    return value is not None and (moment is None or tuple(moment.shape) == tuple(value.shape))


def _parameter(name: str, trained: _Trained, model: DeepSpeedModel, path: Path) -> SourceParameter:
    value = model.values.get(name)
    shape = model.shapes.get(name, tuple(value.shape) if value is not None else ())
    names = [name, *(alias for alias, stored in model.aliases.items() if stored == name)]
    made = SourceParameter(names, _joined(name, trained.value, shape, path))
    if trained.exp_avg:
        made.exp_avg = _joined(name, trained.exp_avg, shape, path)
        made.exp_avg_sq = _joined(name, trained.exp_avg_sq, shape, path)
        made.step = trained.step
    return made


def _joined(name: str, parts: list[torch.Tensor], shape: tuple[int, ...], path: Path) -> SourceTensor:
    numel = sum(part.numel() for part in parts)
    if numel != math.prod(shape):
        raise refused(path, f"the ranks' parts of {name!r} have {numel} elements, and its shape is {list(shape)}")

    return SourceTensor(shape, parts[0].dtype, lambda: (flat for part in parts for flat in in_parts(part)))


def _deep(value: object, key: str) -> object:
    """Under `key` of a mapping, or of the mapping in it that stands for the optimizer."""
    if isinstance(value, Mapping):
        return value.get(key, _deep(value.get("optimizer_state_dict"), key))
    return None


def progress(model: DeepSpeedModel, scaler: object, groups: object) -> dict[str, Any]:
    """What `load_checkpoint` of offload.deepspeed goes on from; plain values alone."""
    said = dict(model.progress)
    if said and isinstance(scaler, Unknown):
        said["loss_scaler"] = {key: one for key, one in scaler.state.items() if isinstance(one, (bool, int, float))}
    if said and isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups):
        said["param_groups"] = [
            {str(key): one for key, one in group.items() if key != "params" and _is_number(one)} for group in groups
        ]
    return said


def _is_number(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, (int, float)) and math.isfinite(one) for one in value)
    return isinstance(value, bool) or (isinstance(value, (int, float)) and math.isfinite(value))
