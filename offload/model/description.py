# SPDX-License-Identifier: Apache-2.0
"""What the engine needs to know of a model's parameters: names, shapes, groups, units; checked against the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.config import Config
from offload.deferred_init.deferred_init import is_deferred
from offload.errors import ConfigError, InitializerError
from offload.layout import ParameterSpec
from offload.model.flat import ParameterInfo, dense_strides
from offload.model.guard import is_left
from offload.model.partition import ModuleUnit, renormalizing
from offload.model.quantized import PackedWeights
from offload.model.weight_names import persistent_buffers

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe_parameters(
    model: nn.Module,
    module_units: list[ModuleUnit],
    packed: PackedWeights,
    optimizer: torch.optim.Optimizer | None,
    dtype: torch.dtype | None,
) -> list[ParameterInfo]:
    """Every parameter of the units, in their order. Raises `ConfigError` where the optimizer does not match the model."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    groups = _group_indices(optimizer, names)
    beside_statistics = _beside_statistics(model)
    infos: list[ParameterInfo] = []
    for unit_index, unit in enumerate(module_units):
        for (own_fqn, parameter), part_index in zip(unit.parameters, unit.part_indices, strict=True):
            group_index = groups.get(id(parameter))
            # A parameter that requires a gradient but is in no group is autograd's and the user's: its `grad` is
            # ordinary.
            trainable = parameter.requires_grad and group_index is not None
            casts = dtype is not None and parameter.is_floating_point() and id(parameter) not in beside_statistics
            run_dtype = packed.dtypes.get(id(parameter), dtype if dtype is not None and casts else parameter.dtype)
            infos.append(
                ParameterInfo(
                    index=len(infos),
                    fqns=tuple(names.get(id(parameter), (own_fqn,))),
                    parameter=parameter,
                    shape=parameter.shape,
                    stride=dense_strides(parameter),
                    dtype=run_dtype,
                    trainable=trainable,
                    group_index=group_index if trainable else None,
                    unit_index=unit_index,
                    part_index=part_index,
                )
            )
    check_trainable(infos)
    check_memory(infos, model)
    return infos


def check_trainable(infos: Iterable[ParameterInfo]) -> None:
    """Raise `ConfigError` for a trained parameter of a dtype that none can be of."""
    for info in infos:
        if info.trainable and info.dtype not in _TRAINABLE_DTYPES:
            raise ConfigError(
                f"parameter {info.fqn!r} is of dtype {info.dtype}: a trained parameter must be fp32, bf16 or fp16."
            )


def _beside_statistics(model: nn.Module) -> set[int]:
    """The parameters (by id) of normalisations with running statistics: torch's kernels want both in one dtype, and statistics,
    which are averages of many batches, keep theirs."""
    norms = [one for one in model.modules() if isinstance(one, _NormBase) and one.running_mean is not None]
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}


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


def check_renormalized(model: nn.Module, infos: Iterable[ParameterInfo], rank_count: int) -> None:
    """Raise `ConfigError` where a lookup's `max_norm` writes in forward what cannot reach the weight's master."""
    by_id = {id(info.parameter): info for info in infos}
    for name, module in renormalizing(model).items():
        info = by_id[id(module.weight)]
        if rank_count > 1 or (info.trainable and info.dtype != torch.float32):
            why = "each rank writes to other rows" if rank_count > 1 else f"the fp32 master of {info.dtype} does not see it"
            raise ConfigError(
                f"{type(module).__name__} {name!r} has max_norm={module.max_norm}, with which forward writes to its weight, "
                f"and {why}: set max_norm=None, and scale the rows between steps inside `with engine.gathered([weight]):`."
            )


def check_memory(infos: Iterable[ParameterInfo], model: nn.Module) -> None:
    """Raise `ConfigError` where trained parameters share memory with others or with buffers, or elements with themselves:
    apart they would drift. One Parameter under several names is one."""
    held: list[tuple[ParameterInfo | str, _Extent]] = []
    held += ((info, _Extent.of(info.parameter)) for info in infos if info.numel and not is_left(info.parameter))
    for name, buffer in model.named_buffers():
        if buffer.layout is torch.strided and not nn.parameter.is_lazy(buffer) and buffer.numel():
            held.append((name, _Extent.of(buffer)))
    begun: list[tuple[ParameterInfo | str, _Extent]] = []
    for holder, extent in sorted(held, key=lambda pair: pair[1].place):
        if _is_trained(holder) and extent.element_count() < extent.tensor.numel():
            assert isinstance(holder, ParameterInfo)
            raise ConfigError(
                f"parameter {holder.fqn!r} has elements that share memory (shape {tuple(holder.shape)}, strides "
                f"{holder.parameter.stride()}): a trained parameter needs memory for each; make it of a copy (.clone())."
            )
        begun = [(other, one) for other, one in begun if (one.storage, one.stop) > extent.place]
        for other, one in begun:
            if (_is_trained(holder) or _is_trained(other)) and one.overlaps(extent):
                raise _overlap(other, holder)
        begun.append((holder, extent))


def _is_trained(holder: ParameterInfo | str) -> bool:
    """`holder` of memory: a parameter, or a buffer by its name."""
    return isinstance(holder, ParameterInfo) and holder.trainable


def _overlap(one: ParameterInfo | str, other: ParameterInfo | str) -> ConfigError:
    if isinstance(one, ParameterInfo) and isinstance(other, ParameterInfo):
        return ConfigError(
            f"parameters {one.fqn!r} and {other.fqn!r} overlap in memory but are two Parameters: the engine would "
            "train them apart. Assign one Parameter to both names (tied weights), or give each memory of its own "
            "(.clone())."
        )
    buffer, info = (one, other) if isinstance(one, str) else (other, one)
    assert isinstance(info, ParameterInfo)
    return ConfigError(
        f"buffer {buffer!r} and the trained parameter {info.fqn!r} overlap in memory: the engine moves it, and the "
        "buffer would keep its first values. Give it memory of its own (.clone()), or compute it in forward."
    )


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes that a tensor's elements take. `storage`: 0 of what has addresses, else what `start` counts from."""

    tensor: torch.Tensor
    storage: int
    start: int
    stop: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Extent:
        itemsize = tensor.element_size()
        offset = tensor.storage_offset() * itemsize
        base = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = tensor.untyped_storage()._cdata if tensor.is_meta else 0
        return _Extent(tensor, storage, int(base + offset), int(base + offset + (last + 1) * itemsize))

    @property
    def place(self) -> tuple[int, int]:
        return self.storage, self.start

    @property
    def is_dense(self) -> bool:
        """Whether every byte is an element's, and of one element."""
        return dense_strides(self.tensor) == self.tensor.stride()

    def element_count(self) -> int:
        """Of elements with memory of their own."""
        if self.is_dense:
            return self.tensor.numel()
        return int(self._marked(self.start, self.stop).sum()) // self.tensor.element_size()

    def overlaps(self, other: _Extent) -> bool:
        """Whether they share a byte; they do begin before the other ends, and vice versa."""
        if self.is_dense and other.is_dense:
            return True
        start, stop = min(self.start, other.start), max(self.stop, other.stop)
        return bool((self._marked(start, stop) & other._marked(start, stop)).any())

    def _marked(self, start: int, stop: int) -> torch.Tensor:
        """bool [stop - start]: which of the bytes are the parameter's."""
        found = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
        itemsize = self.tensor.element_size()
        strides = (*(stride * itemsize for stride in self.tensor.stride()), 1)
        places = torch.arange(stop - start, device="cpu").as_strided(
            (*self.tensor.shape, itemsize), strides, self.start - start
        )
        found[places.flatten()] = True
        return found


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
            part_index=info.part_index,
        )
        for info in infos
    ]


def check_values(infos: Iterable[ParameterInfo], covered: Mapping[str, str]) -> None:
    for info in infos:
        if any(fqn in covered for fqn in info.fqns):
            continue
        if is_left(info.parameter):
            raise ConfigError(
                f"parameter {info.fqn!r} has no value any more: it lay in a tier of an engine that was closed. Pass weights= "
                "with what engine.export(dir) wrote before close(), or build the model anew and load a checkpoint."
            )
        if info.parameter.is_meta and not is_deferred(info.parameter):
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
                f"{info.fqn!r} is trained in {info.dtype}: set dtype='bf16' (parameters of a normalisation with running "
                "statistics keep their own dtype beside it), or state_format='fp32'."
            )
