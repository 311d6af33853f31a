# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's operations cost on a machine in numbers: their floating-point operations and the bytes they touch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from offload.device.seen_operations import SeenOperations, tensors_in, with_new_storage
from offload.device.virtual.machine import VirtualMachine
from offload.device.virtual.positions import Positions

_LARGE_NBYTES = 1 << 16
"""Of host memory: below it an operation is done, not only counted."""


class CountedOperations(SeenOperations):
    """Operations on the meta device take the device's time, passes over much host memory the host's. For the calling thread."""

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self._machine = machine
        self._known: dict[Hashable, _Known] = {}
        self._positions = Positions()

    def seen(self, function: Any, args: Any, given: Mapping[str, Any]) -> Any:
        """The operation's result, counted."""
        inputs = tensors_in((*args, *given.values()))
        if not any(one.is_meta for one in inputs):
            return self._on_host(function, inputs, args, given)
        asked = _asked(function, args, given)
        known = self._known.get(asked) if asked is not None else None
        if known is not None:
            outputs = [made.again() for made in known.outputs]
            for one in outputs:
                self._machine.memory.hold(one)
            self._machine.launch(known.flops, known.nbytes, wide=known.is_wide)
            self._positions.followed(function, args, given, outputs[0])
            return outputs[0] if known.is_single else tuple(outputs)
        if function is torch.ops.aten._local_scalar_dense.default:
            return self._machine.value_read(inputs[0].dtype, self._positions.value_of(inputs[0]))
        if function is torch.ops.aten.nonzero.default:
            return self._found(inputs[0])
        result = function(*args, **given)
        outputs = tensors_in((result,))
        made = [one for one in with_new_storage(outputs, inputs) if one.is_meta]
        if function._schema.is_mutable:
            self._machine.wrote(inputs[0])
            self._positions.wrote(inputs[0])
        else:
            self._positions.followed(function, args, given, result)
        if made or function._schema.is_mutable:
            for one in made:
                self._machine.memory.hold(one)
            flops = flops_of(function, args, given, result)
            is_wide = bool(flops) and inputs[0].dtype is torch.float32
            nbytes = touched_nbytes(function, inputs, outputs)
            self._machine.launch(flops, nbytes, wide=is_wide)
            if asked is not None and made and len(made) == len(outputs) and _is_all_of(result, outputs):
                self._learn(asked, _Known([_Made.of(one) for one in outputs], outputs[0] is result, flops, nbytes, is_wide))
        return result

    def _learn(self, asked: Hashable, known: _Known) -> None:
        if all(made.again().untyped_storage().nbytes() == made.nbytes for made in known.outputs):
            self._known[asked] = known

    def _found(self, mask: Tensor) -> Tensor:
        """Where a mask holds, which nobody knows here: of a part of a larger one as much as it is of that, else everywhere. So
        each of the experts that a layer routes to has an equal share of the tokens."""
        self._machine.values_read += 1
        share = mask.nbytes / mask.untyped_storage().nbytes()
        return torch.empty(max(round(mask.numel() * share), 1), mask.dim(), dtype=torch.int64, device="meta")

    def _on_host(self, function: Any, inputs: list[Tensor], args: Any, given: Mapping[str, Any]) -> Any:
        if inputs and max(one.nbytes for one in inputs) >= _LARGE_NBYTES and function._schema.is_mutable:
            self._machine.pass_over(inputs[0], sum(one.nbytes for one in inputs))
            return args[0]
        result = function(*args, **given)
        for output in tensors_in((result,)):
            if output.is_meta:
                self._machine.memory.hold(output)
        if not inputs:
            self._positions.made(function, args, given, result)
        return result


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor on the meta device that an operation made: `nbytes` of memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    @staticmethod
    def of(tensor: Tensor) -> _Made:
        return _Made(tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes())

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class _Known:
    """What came of an operation. Blocks are alike, and so are steps: PyTorch need not find it out again."""

    outputs: list[_Made]
    is_single: bool
    flops: int
    nbytes: int
    is_wide: bool


_PLAIN = (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)


def _asked(function: Any, args: Any, given: Mapping[str, Any]) -> Hashable | None:
    """By which the operation is known: the same again makes tensors that are alike. None where that is not so."""
    if function._schema.is_mutable:
        return None
    try:
        return (function, *map(_part, args), *((name, _part(value)) for name, value in given.items()))
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """Of an argument that nothing is known by."""


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise _UnknownError  # its value may count
        return value.shape, value.stride(), value.dtype
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, _PLAIN):
        return type(value), value  # 1 is no 1.0
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    raise _UnknownError


def _is_all_of(result: Any, outputs: list[Tensor]) -> bool:
    """Whether the operation returned these tensors and nothing else."""
    if isinstance(result, Tensor):
        return True
    return isinstance(result, tuple) and len(result) == len(outputs)


_LOOKUPS = frozenset(
    {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.gather.default,
     torch.ops.aten.index.Tensor}
)  # fmt: skip


_SAME = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""What is counted as another operation is."""


def flops_of(function: Any, args: Any, keywords: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations; 0 where they are not what takes the time."""
    packet = function._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        return int(
            2 * args[0].numel() * args[1].shape[-1]
        )  # each row of the first with one matrix of the second, or summed over
    count = flop_registry.get(_SAME.get(packet, packet))
    return int(count(*args, **keywords, out_val=result)) if count is not None else 0


def touched_nbytes(function: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that it reads and writes."""
    if function in _LOOKUPS:  # what is looked up is read, not all that could be
        return 2 * sum(one.nbytes for one in outputs)
    return sum({id(one): one.nbytes for one in inputs + outputs}.values())


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention on the meta device is computed as a GPU does it: without a matrix of all pairs, which is what PyTorch
    would take on that device. Attention with a mask of its own still has one."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        yield
    finally:
        library._destroy()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if attn_mask is not None:
        computed = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )
    else:
        computed = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    output: Tensor = computed[0]
    return output
