"""The parts of the gradient of a parameter that several modules share (tied weights), each taken over as it comes.

PyTorch keeps the first part until it has the last, and adds them into a third tensor: of the head's part of a tied
embedding that is from the start of backward to its end, and then three times the parameter. Here a part goes where
gradients go, and PyTorch is left nothing of it to add. The engine adds the parts in the order in which they come, as
PyTorch does, so in fp32 the sum is the same to the bit; in 16 bits PyTorch rounds after each addition, where the engine
keeps sums in fp32, so those are left to it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from offload.runtime.flats import ParameterInfo, Unit

_MOST_NODES = 256
"""Of the graph of one module without children: more is none that this looks for."""


class GradientParts:
    """See the module. Runs in the threads of forward and backward."""

    def __init__(self, units: Iterable[Unit], arrived: Callable[[Unit, ParameterInfo, torch.Tensor], None]) -> None:
        self._arrived = arrived
        self._shared = {
            unit.index: {id(info.parameter): info for info in unit.parameters if _is_shared(unit, info)} for unit in units
        }

    def watch(self, unit: Unit, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """A forward of one of the unit's modules led from `inputs` to `outputs`: hand over what its backward computes for the
        parameters that it shares."""
        shared = self._shared[unit.index]
        if not shared:
            return
        before = {tensor.grad_fn for tensor in inputs}
        coming = deque(tensor.grad_fn for tensor in outputs)
        seen: set[Any] = set(before)
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
                    self._take_from(node, position, following, unit, info)

    def _take_from(self, node: Any, position: int, accumulation: Any, unit: Unit, info: ParameterInfo) -> None:
        reference = weakref.ref(self)  # the graph keeps no engine alive

        def take(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...] | None:
            parts, gradient = reference(), gradients[position]
            if parts is None or gradient is None or not _may_be_taken(info, gradient, accumulation):
                return None
            parts._arrived(unit, info, gradient)
            return (*gradients[:position], None, *gradients[position + 1 :])

        node.register_hook(take)


def _is_shared(unit: Unit, info: ParameterInfo) -> bool:
    """Not whether the unit has several modules: one of them may have a bias of its own."""
    holders = [module for module in unit.modules if any(one is info.parameter for one in module.parameters())]
    return info.trainable and info.dtype == torch.float32 and len(holders) > 1


def _may_be_taken(info: ParameterInfo, gradient: torch.Tensor, accumulation: Any) -> bool:
    """Whether nobody but the engine waits for the sum: no hook of the user's, no `torch.autograd.grad`."""
    parameter: Any = info.parameter
    own_hooks_only = len(parameter._backward_hooks or ()) == 1 and len(parameter._post_accumulate_grad_hooks or ()) == 1
    if not own_hooks_only or gradient.dtype != torch.float32:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulation))
    except RuntimeError:  # what PyTorch answers of a leaf whose gradient is asked for instead of accumulated
        return False
