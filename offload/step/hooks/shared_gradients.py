# SPDX-License-Identifier: Apache-2.0
"""The gradient of a parameter that several modules share (tied weights) is added up in place, where PyTorch would not.

PyTorch holds the part that came first until it has the next, and adds the two into a third tensor: at the end of backward
a tied embedding's gradient is there three times. Here each part is taken out of the graph as it is computed and added to
what came before, in the same order with the same rounding; right after PyTorch has accumulated (nothing), the sum is put
into `p.grad` as if it had.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.model.flat import ParameterInfo
from offload.model.unit import Unit

_MOST_NODES = 256
"""Of the graph of one module without children: more is none that this looks for."""
_OWN_REFERENCES = 2
"""To the storage of a tensor that nobody else has, while it is asked for the number: the tensor's and the question's."""


class SharedGradients:
    """See the module. Runs in the threads of forward and backward."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._shared = {
            unit.index: {id(info.parameter): info for info in unit.parameters if _is_shared(unit, info)} for unit in units
        }
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        """By backward (graph task) and parameter."""

    def watch(self, unit: Unit, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """A forward of one of the unit's modules led from `inputs` to `outputs`: take what its backward computes for the
        parameters that it shares."""
        shared = self._shared[unit.index]
        if not shared:
            return
        coming = deque(tensor.grad_fn for tensor in outputs)
        seen: set[Any] = {tensor.grad_fn for tensor in inputs}
        while coming and len(seen) < _MOST_NODES:
            node = coming.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            for position, (following, _) in enumerate(node.next_functions):
                info = shared.get(id(getattr(following, "variable", None)))
                if info is None:
                    coming.append(following)
                else:
                    self._take_from(node, position, following, info)

    def deliver(self, info: ParameterInfo) -> None:
        """PyTorch has accumulated: what was taken in this backward goes into `p.grad`, to what came another way."""
        total = self._sums.pop((torch._C._current_graph_task_id(), info.index), None)
        if total is not None:
            other = info.parameter.grad
            info.parameter.grad = total if other is None else other.add_(total)

    def forget(self, graph_task: int | None = None) -> None:
        """Drop what a backward that was cut short left; without a graph task, of all of them."""
        for key in [key for key in self._sums if graph_task is None or key[0] == graph_task]:
            del self._sums[key]

    def _take_from(self, node: Any, position: int, accumulation: Any, info: ParameterInfo) -> None:
        reference = weakref.ref(self)  # the graph keeps no engine alive

        def take(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...] | None:
            parts, gradient = reference(), gradients[position]
            if parts is None or gradient is None or not _may_be_taken(info, gradient, accumulation):
                return None
            parts._add(info, gradient)
            return (*gradients[:position], None, *gradients[position + 1 :])

        node.register_hook(take)

    def _add(self, info: ParameterInfo, gradient: torch.Tensor) -> None:
        key = torch._C._current_graph_task_id(), info.index
        before = self._sums.pop(key, None)
        if before is None:
            self._sums[key] = gradient.data  # no view of a tensor that it would keep alive
        elif _nobody_else_has(before):
            self._sums[key] = before.add_(gradient)
        else:
            self._sums[key] = before + gradient


def _is_shared(unit: Unit, info: ParameterInfo) -> bool:
    """Not whether the unit has several modules: one of them may have a bias of its own."""
    if not info.trainable or not unit.shares_parameters:
        return False
    return sum(any(one is info.parameter for one in module.parameters()) for module in unit.modules) > 1


def _may_be_taken(info: ParameterInfo, gradient: torch.Tensor, accumulation: Any) -> bool:
    """Whether it is a gradient like the parameter, and nobody but the engine waits for the sum: no hook of the user's, no
    `torch.autograd.grad`, no graph of the gradient."""
    parameter: Any = info.parameter
    own_hooks_only = len(parameter._backward_hooks or ()) == 1 and len(parameter._post_accumulate_grad_hooks or ()) == 1
    is_plain = gradient.layout is torch.strided and gradient.dtype == info.dtype and not gradient.requires_grad
    if not own_hooks_only or not is_plain or not parameter.requires_grad or gradient.shape != info.shape:
        return False
    return is_accumulated(accumulation)


def is_accumulated(accumulation: Any) -> bool:
    """Whether the backward that runs accumulates into the leaf, rather than return what it computes (`torch.autograd.grad`)."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulation))
    except RuntimeError:  # what PyTorch answers of a leaf whose gradient is asked for instead of accumulated
        return False


def _nobody_else_has(tensor: torch.Tensor) -> bool:
    """Whether adding in place changes nothing but this tensor: a function may pass one gradient on to several inputs."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) <= _OWN_REFERENCES
