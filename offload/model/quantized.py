# SPDX-License-Identifier: Apache-2.0
"""Weights that bitsandbytes has packed, four bits for each element: what its kernels need beside them lies where they lie.

A packed weight is a Parameter with a `quant_state`: scales of blocks (`absmax`, packed themselves where statistics are
compressed) and tables, plain tensors that no module knows of. They become parameters of the weight's unit, which come and go
with it and are saved with it. bitsandbytes finds them where it left them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.deferred_init.held_tensors import Slot
from offload.model.partition import ModuleUnit

_NAMES = {"absmax": "absmax", "code": "quant_map", "offset": "nested_offset"}
_NESTED_NAMES = {"absmax": "nested_absmax", "code": "nested_quant_map"}
"""What bitsandbytes calls the tensors of a state, and of the state of its scales, where it saves them."""
_REPACKS = "support_avx512bf16_for_cpu"
"""Set in layers that, in evaluation on some CPUs, exchange a weight for a copy that is packed in another order."""


def is_packed(parameter: torch.Tensor) -> bool:
    return vars(parameter).get("quant_state") is not None


_classes_in_use: dict[type, type] = {}


def class_in_use(parameter: nn.Parameter) -> type:
    """The class of a parameter whose value is there: its own, and of a packed weight one of that name whose `to` returns the
    weight itself where nothing is to change, as that of tensors does. bitsandbytes' makes a new one, which PEFT's DoRA puts
    into the layer in every forward on a CPU: what the engine brings in would be in a weight that nobody reads."""
    kind = type(parameter)
    if not is_packed(parameter):
        return kind

    def to(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*arguments, **keywords)
        same = (device is None or device == self.device) and dtype in (None, self.dtype)
        return self if same else kind.to(self, *arguments, **keywords)

    if kind not in _classes_in_use:
        _classes_in_use[kind] = type(kind.__name__, (kind,), {"to": to, "__module__": kind.__module__})
    return _classes_in_use[kind]


class PackedWeights:
    """Those of one model, found when this is made; nothing is changed by it."""

    def __init__(self, model: nn.Module) -> None:
        self.dtypes: dict[int, torch.dtype] = {}
        """By id of a parameter: what it runs in, whatever the model does. Packed bits are no numbers, and a bias beside them
        is cast where it lies, to what bitsandbytes computes in."""
        self.slots: list[Slot] = []
        """What is to be set in the layers when an engine takes the model."""
        self._beside: dict[int, dict[str, nn.Parameter]] = {}
        for module in model.modules():
            self._look_at(module)

    def _look_at(self, module: nn.Module) -> None:
        packed = [parameter for parameter in module.parameters(recurse=False) if is_packed(parameter)]
        for parameter in packed:
            if id(parameter) not in self._beside:
                beside = self._beside[id(parameter)] = dict(self._named(vars(parameter)["quant_state"]))
                self.dtypes.update((id(one), one.dtype) for one in (parameter, *beside.values()))
        computed_in, bias = getattr(module, "compute_dtype", None), getattr(module, "bias", None)
        if packed and computed_in is not None and isinstance(bias, nn.Parameter):
            self.dtypes[id(bias)] = computed_in
        if packed and getattr(module, _REPACKS, False):
            self.slots.append((vars(module), _REPACKS, False))

    def _named(self, state: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for holder, names in ((state, _NAMES), (state.state2, _NESTED_NAMES)):
            for attribute, name in names.items():
                tensor = getattr(holder, attribute, None)
                if isinstance(tensor, nn.Parameter):  # of an engine before
                    yield name, tensor
                elif isinstance(tensor, torch.Tensor):
                    parameter = nn.Parameter(tensor.detach(), requires_grad=False)
                    self.slots.append((vars(holder), attribute, parameter))
                    yield name, parameter

    def complete(self, units: Iterable[ModuleUnit]) -> None:
        """Add to each unit what lies beside its packed weights, by the names under which bitsandbytes saves it."""
        for unit in units:
            unit.parameters[:] = [
                entry
                for fqn, parameter in unit.parameters
                for entry in (
                    (fqn, parameter),
                    *((f"{fqn}.{name}", one) for name, one in self._beside.get(id(parameter), {}).items()),
                )
            ]
