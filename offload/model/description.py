"""What the engine needs to know of a model's parameters: names, shapes, groups, units; checked against the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from offload.config import Config
from offload.deferred_init.deferred_init import is_deferred
from offload.errors import ConfigError, InitializerError
from offload.layout import ParameterSpec
from offload.model.flats import ParameterInfo, dense_strides
from offload.model.units import ModuleUnit
from offload.model.weight_names import persistent_buffers

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe_parameters(
    model: nn.Module, module_units: list[ModuleUnit], optimizer: torch.optim.Optimizer | None, dtype: torch.dtype | None
) -> list[ParameterInfo]:
    """Every parameter of the model, in the units' order. Raises `ConfigError` where the optimizer does not match it."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    groups = _group_indices(optimizer, names)
    infos: list[ParameterInfo] = []
    for unit_index, unit in enumerate(module_units):
        for fqn, parameter in unit.parameters:
            group_index = groups.get(id(parameter))
            # A parameter that requires a gradient but is in no group is autograd's and the user's: its `grad` is
            # ordinary.
            trainable = parameter.requires_grad and group_index is not None
            run_dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            if trainable and run_dtype not in _TRAINABLE_DTYPES:
                raise ConfigError(f"parameter {fqn!r} is of dtype {run_dtype}: a trained parameter must be fp32, bf16 or fp16.")
            infos.append(
                ParameterInfo(
                    index=len(infos),
                    fqns=tuple(names[id(parameter)]),
                    parameter=parameter,
                    shape=parameter.shape,
                    stride=dense_strides(parameter),
                    dtype=run_dtype,
                    trainable=trainable,
                    group_index=group_index if trainable else None,
                    unit_index=unit_index,
                )
            )
    return infos


def _group_indices(optimizer: torch.optim.Optimizer | None, names: Mapping[int, list[str]]) -> dict[int, int]:
    groups: dict[int, int] = {}
    for group_index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ConfigError(
                    f"parameter {position} of the optimizer's group {group_index} (shape {tuple(parameter.shape)}) "
                    "is not in the model: "
                    "build the optimizer from the parameters of the model that is passed to initialize."
                )
            groups[id(parameter)] = group_index
    return groups


def parameter_specs(infos: Iterable[ParameterInfo]) -> list[ParameterSpec]:
    """What the layout needs to know of the parameters."""
    return [
        ParameterSpec(
            index=info.index,
            numel=info.numel,
            dtype=str(info.dtype).removeprefix("torch."),
            itemsize=info.dtype.itemsize,
            trainable=info.trainable,
            group_index=info.group_index or 0,
        )
        for info in infos
    ]


def check_values(infos: Iterable[ParameterInfo], covered: Mapping[str, str]) -> None:
    for info in infos:
        has_value = not info.parameter.is_meta or is_deferred(info.parameter) or any(fqn in covered for fqn in info.fqns)
        if not has_value:
            raise InitializerError(
                f"parameter {info.fqn!r} is on the meta device and nothing says what its value is: build the model "
                "inside "
                "`with offload.deferred_init():`, or pass weights= to initialize."
            )


def check_buffers(model: nn.Module, covered: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a buffer without a value."""
    given = {id(buffer) for fqn, buffer in persistent_buffers(model) if fqn in covered}
    for fqn, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in given and not is_deferred(buffer):
            raise ConfigError(
                f"buffer {fqn!r} is on the meta device and nothing says what its value is (files of weights hold no "
                "non-persistent buffers): build the model inside `with offload.deferred_init():`, which computes buffers, or "
                "give the buffer its value before initialize."
            )


def check_state_format(config: Config, infos: Iterable[ParameterInfo]) -> None:
    """Raise `ConfigError` where a trained parameter's dtype cannot be a part of its master."""
    if config.state_format == "fp32":
        return
    for info in infos:
        if info.trainable and info.dtype != torch.bfloat16:
            raise ConfigError(
                f"state_format={config.state_format!r} keeps the upper half of the master in the bf16 parameter, and "
                f"{info.fqn!r} is trained in {info.dtype}: set dtype='bf16', or state_format='fp32'."
            )
