# SPDX-License-Identifier: Apache-2.0
"""An export of a PEFT model: its adapters as PEFT writes them, or the base model with the active ones merged into it.

What belongs where, under which name, and how a weight is merged is asked of PEFT itself, on a skeleton: a copy of the model's
modules whose parameters are on the meta device. Only those of the layers being merged get values, and lose them again.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.export.arriving import Arriving
from offload.errors import UsageError
from offload.model.flat import ParameterInfo
from offload.model.quantized import is_packed
from offload.model.weight_names import persistent_buffers

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_PREFIX = "base_model.model."


class Skeleton:
    """A copy of a model's modules without values, and without its hooks. Buffers are the model's own."""

    def __init__(self, model: nn.Module, infos: Sequence[ParameterInfo], dtype: torch.dtype | None) -> None:
        """`dtype`: of floating-point parameters; None: what each runs in."""
        self.infos = {info.index: info for info in infos}
        self.twins: dict[int, nn.Parameter] = {}
        memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
        for info in infos:
            wanted = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
            empty = torch.empty_strided(info.shape, info.stride, dtype=wanted, device="meta")
            self.twins[info.index] = memo[id(info.parameter)] = nn.Parameter(empty, requires_grad=False)
        memo.update((id(vars(info.parameter)["quant_state"]), SimpleNamespace()) for info in infos if is_packed(info.parameter))
        for module in model.modules():
            memo.update({id(hooks): OrderedDict() for name in _HOOKS if (hooks := getattr(module, name, None)) is not None})
        self.model: Any = copy.deepcopy(model, memo)
        for module in self.model.modules():
            _unpack(module)
            if isinstance(module, nn.RNNBase):  # PyTorch swaps no tensor that is referred to weakly
                module._flat_weight_refs = [None] * len(module._flat_weight_refs)
        self._index_of = {id(twin): index for index, twin in self.twins.items()}

    def index_of(self, tensor: Tensor) -> int | None:
        """The index of the parameter that a tensor of the skeleton stands for."""
        return self._index_of.get(id(tensor))

    @property
    def base(self) -> Any:
        """What was given to PEFT."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def fill(self, index: int, values: Tensor) -> None:
        """Give a parameter its values, [numel] in slot order."""
        torch.utils.swap_tensors(self.twins[index], nn.Parameter(self.infos[index].shaped(values), requires_grad=False))

    def empty(self, index: int) -> None:
        """Take them away."""
        twin = self.twins[index]
        torch.utils.swap_tensors(twin, nn.Parameter(torch.empty_like(twin, device="meta"), requires_grad=False))


def _unpack(module: nn.Module) -> None:
    """Make a layer of packed weights, and PEFT's around one, what it is of numbers: its weight here is meant unpacked."""
    kind = type(module)
    if kind.__module__.startswith("bitsandbytes.") and isinstance(module, nn.Linear):
        module.__class__ = nn.Linear
    elif kind.__name__ == "Linear4bit" and kind.__module__.startswith("peft.tuners.lora."):
        from peft.tuners.lora import Linear

        module.__class__ = Linear


# ---- adapters


@dataclass(slots=True)
class AdapterFile:
    """One adapter: its folder below the export ("" for the one called "default"), what is saved by PEFT's keys (the index of
    a parameter, or a buffer), and its adapter_config.json."""

    folder: str
    content: dict[str, int | Tensor]
    config: bytes


def computed_parameters(skeleton: Skeleton) -> set[int]:
    """Those of prompts, from which PEFT computes what it saves: `adapter_files` needs their values."""
    encoders = getattr(skeleton.model, "prompt_encoder", None)
    if not isinstance(encoders, nn.Module):
        return set()
    found = {skeleton.index_of(twin) for twin in encoders.parameters()}
    return {index for index in found if index is not None}


def adapter_files(skeleton: Skeleton, save_embedding_layers: Any = "auto") -> list[AdapterFile]:
    """Every adapter of the model; `save_embedding_layers` as PEFT has it.

    Raises `UsageError` for kinds that are computed from more than their parameters.
    """
    from peft import get_peft_model_state_dict

    model = skeleton.model
    whole = {**dict(model.named_parameters(remove_duplicate=False)), **dict(persistent_buffers(model))}
    buffers = {id(buffer) for _, buffer in persistent_buffers(model)}
    prefix = _PREFIX if getattr(model, "_hf_peft_config_loaded", False) else ""
    files = []
    for name, config in model.peft_config.items():
        if not name or name in (".", "..") or "/" in name:
            raise UsageError(f"the adapter {name!r} cannot be exported: its name is no name of a folder.")
        content: dict[str, int | Tensor] = {}
        try:
            saved = get_peft_model_state_dict(
                model, state_dict=dict(whole), adapter_name=name, save_embedding_layers=save_embedding_layers
            )
        except (NotImplementedError, RuntimeError):  # it computes with values
            saved = {"": torch.empty(0, device="cpu")}
        for key, tensor in saved.items():
            index = skeleton.index_of(tensor)
            if index is None and id(tensor) not in buffers and not config.is_prompt_learning:
                raise UsageError(
                    f"the adapter {name!r} ({config.peft_type}) cannot be exported piece by piece, because PEFT computes what "
                    "it saves of it: `with engine.gathered(p for p in model.parameters() if p.requires_grad): "
                    "model.save_pretrained(dir)` writes it."
                )
            content[f"{prefix}{key}"] = tensor if index is None else index
        files.append(AdapterFile("" if name == "default" else name, content, _config_text(model, config)))
    return files


def _config_text(model: Any, config: Any) -> bytes:
    """adapter_config.json, as `PeftModel.save_pretrained` has it."""
    config = copy.copy(config)
    inner = model.base_model if config.is_prompt_learning else getattr(getattr(model, "base_model", model), "model", model)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = inner.__dict__.get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None and hasattr(model, "_get_base_model_class"):
        base_class = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
        mapping = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / "adapter_config.json").read_bytes()


# ---- the merged model


@dataclass(slots=True)
class _Group:
    """Adapted layers that share parameters, and are merged together as soon as these are there."""

    layers: list[tuple[str, Any]]
    members: set[int]
    arriving: Arriving[int]


class Merging:
    """The merged model's parameters: `names` of each by the index of the parameter that it is merged into, in the base model's
    terms; `merged` gives their values. In memory are those of the layers of which some but not all values came."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        tuner: Any = getattr(skeleton.model, "base_model", None)
        if any(config.is_prompt_learning for config in skeleton.model.peft_config.values()):
            raise UsageError("export(merged=True): prompts cannot be merged into a base model. Leave merged out.")
        if hasattr(tuner, "_check_merge_allowed"):
            try:
                tuner._check_merge_allowed()
            except (ValueError, NotImplementedError) as error:
                raise UsageError(f"export(merged=True): PEFT cannot merge this model: {error}") from error
        self.names: dict[int, list[str]] = {}
        self._groups: dict[int, _Group] = {}
        layers: list[tuple[str, Any]] = []
        for path, module in skeleton.base.named_modules(remove_duplicate=False):
            if any(path.startswith(f"{above}.") for above, _ in layers):
                continue
            if hasattr(module, "unload_and_optionally_merge_module") or isinstance(
                getattr(module, "base_layer", None), nn.Module
            ):
                layers.append((path, module))
                self._join(path, module)
                found = _result(module, merge=False).named_parameters(remove_duplicate=False)
            else:
                found = module.named_parameters(recurse=False, remove_duplicate=False)
            for key, twin in found:
                self._name(f"{path}.{key}" if path else key, twin)

    def _name(self, name: str, twin: Tensor) -> None:
        index = self._skeleton.index_of(twin)
        if index is None:
            raise UsageError(f"export(merged=True): {name!r} is made by PEFT when it merges, and no parameter of the engine's.")
        self.names.setdefault(index, []).append(name)

    def _join(self, path: str, module: nn.Module) -> None:
        skeleton, layers = self._skeleton, [(path, module)]
        members = {index for twin in module.parameters() if (index := skeleton.index_of(twin)) is not None}
        for other in {id(one): one for index in members if (one := self._groups.get(index))}.values():
            layers = other.layers + layers
            members |= other.members
        sizes = {index: (skeleton.infos[index].numel, skeleton.twins[index].dtype) for index in members}
        self._groups.update(dict.fromkeys(members, _Group(layers, members, Arriving(sizes))))

    def merged(self, pieces: Iterator[tuple[ParameterInfo, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """(parameter index, its next elements). `pieces`: the next elements of each, in slot order; what belongs to an adapted
        layer comes out whole, row by row."""
        for info, values in pieces:
            group = self._groups.get(info.index)
            if group is None:
                if info.index in self.names:
                    yield info.index, values
            elif group.arriving.take(info.index, values):
                yield from self._merge(group)

    def is_merged(self, index: int) -> bool:
        """Whether it comes out whole, row by row."""
        return index in self._groups

    @torch.no_grad()
    def _merge(self, group: _Group) -> Iterator[tuple[int, Tensor]]:
        for index, values in group.arriving.values.items():
            self._skeleton.fill(index, values)
        group.arriving.values.clear()
        try:
            for path, module in group.layers:
                for key, twin in _result(module, merge=True).named_parameters(remove_duplicate=False):
                    found = self._skeleton.index_of(twin)
                    if found is None or f"{path}.{key}" not in self.names.get(found, ()):
                        raise UsageError(f"export(merged=True): merging replaces {path}.{key}, which is not supported.")
            for member in sorted(group.members & self.names.keys()):
                yield member, self._skeleton.twins[member].detach().contiguous().reshape(-1)
        finally:
            for index in group.members:
                self._skeleton.empty(index)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The merged model's persistent buffers, each once."""
        seen: set[int] = set()
        renamed = [(path, _result(module, merge=False)) for path, module in self._layers()]
        inside = tuple(f"{path}." for path, _ in renamed)
        found = [(fqn, buffer) for fqn, buffer in persistent_buffers(self._skeleton.base) if not fqn.startswith(inside)]
        found += [(f"{path}.{fqn}", buffer) for path, module in renamed for fqn, buffer in persistent_buffers(module)]
        for fqn, buffer in found:
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield fqn, buffer

    def _layers(self) -> list[tuple[str, Any]]:
        groups = {id(group): group for group in self._groups.values()}
        return [layer for group in groups.values() for layer in group.layers]

    def configs(self, configs: Mapping[str, str]) -> dict[str, str]:
        """The base model's configurations; one that ties embeddings which adapters have made different does not."""
        changed = dict(configs)
        base = self._skeleton.base
        content = json.loads(changed["config"]) if "config" in changed else {}
        if content.get("tie_word_embeddings") and hasattr(base, "get_output_embeddings"):
            ends = [base.get_input_embeddings(), base.get_output_embeddings()]
            weights = [getattr(_result(end, merge=False), "weight", None) for end in ends if end is not None]
            if len(weights) == 2 and weights[0] is not weights[1]:
                warnings.warn(
                    "the exported config has tie_word_embeddings=False: adapters made input and output embeddings different",
                    RuntimeWarning,
                    stacklevel=2,
                )
                changed["config"] = json.dumps(content | {"tie_word_embeddings": False})
        return changed


def _result(layer: Any, *, merge: bool) -> nn.Module:
    """The module that PEFT's `merge_and_unload` puts in the place of one."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        unloaded: nn.Module = layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
        return unloaded
    if not isinstance(getattr(layer, "base_layer", None), nn.Module):
        plain: nn.Module = layer
        return plain
    if merge:
        layer.merge(safe_merge=False, adapter_names=None)
    base: nn.Module = layer.get_base_layer()
    return base
