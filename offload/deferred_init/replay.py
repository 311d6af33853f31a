# SPDX-License-Identifier: Apache-2.0
"""Values from recorded operations: only what is needed, in the order of the recording, with the same random numbers.

Each memory has one real storage during a replay. Operations run in their recorded order, so a storage holds at each
of them exactly what it held in ordinary construction; a storage is freed after the last operation that touches it.
Hence the peak is the requested values plus what one operation reads and writes.

Thread-safety: replays may run in any thread. Random operators draw from private generators. Three pieces of state are
changed for the length of an operation, and only where they differ from the recording: torch's default dtype, autocast,
and the global generator for random operators which take no generator (dropout); no other thread may depend on these
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from offload.deferred_init.recording import (
    Constant,
    GeneratorState,
    Memory,
    Operation,
    Output,
    Value,
    View,
    leaves,
    map_leaves,
    tensor_leaves,
    touched_memories,
)
from offload.device.host_memory.freed_memory import freed_memory
from offload.errors import InitializerError

Replaced = Mapping[Value, Callable[[], Tensor]]
"""Values that others take the place of: tensors that fill their memory."""
NOTHING: Replaced = MappingProxyType({})
_GLOBAL_GENERATOR = "__global_generator__"

_aten = torch.ops.aten
_UNDEFINED_CONTENT = frozenset(
    (
        *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted),
        *(_aten.new_empty, _aten.new_empty_strided),
    )
)


def needed_operations(values: Iterable[Value], known: Collection[Value] = ()) -> list[Operation]:
    """The operations on which `values` depend, in recorded order, but for those on which only `known` ones do."""
    found: dict[int, Operation] = {}
    pending = [value.operation for value in values if value not in known]
    while pending:
        operation = pending.pop()
        if operation.index not in found:
            found[operation.index] = operation
            pending.extend(value.operation for value in operation.reads if value not in known)
    return [found[index] for index in sorted(found)]


def replay(values: Iterable[Value], replaced: Replaced = NOTHING) -> dict[Memory, torch.UntypedStorage]:
    """Real CPU storages with `values`, by memory. The caller owns them.

    replaced  values that are asked for, as tensors that fill their memory, instead of being computed

    Errors: `InitializerError` if an operation fails, or if a tensor it reads has changed since.
    """
    wanted = list(values)
    operations = needed_operations(wanted, replaced)
    storages = {
        value.memory: _filled(value, replaced[value])
        for value in {read: None for operation in operations for read in operation.reads}
        if value in replaced
    }
    _refuse_former_values(operations, replaced)
    execute(operations, storages, {value.memory for value in wanted})
    return storages


def _filled(value: Value, make: Callable[[], Tensor]) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(value.nbytes)
    tensor = make()
    tensor.new_empty(0).set_(storage, 0, tensor.size(), tensor.stride()).copy_(tensor)
    return storage


def _refuse_former_values(operations: Iterable[Operation], replaced: Replaced) -> None:
    made_by = {operation.index for operation in needed_operations(replaced)}
    if any(operation.index in made_by for operation in operations):
        raise InitializerError(
            "it is computed from what another parameter was before that was changed, and weights= brings that one's last value "
            "only: have from_pretrained load the weights inside deferred_init()"
        )


def execute(operations: list[Operation], storages: dict[Memory, torch.UntypedStorage], kept: Collection[Memory]) -> None:
    """Run `operations` on `storages`, which holds what they read from outside; afterwards it holds the `kept` ones."""
    last_use: dict[Memory, int] = {}
    for operation in operations:
        for memory in touched_memories(operation):
            last_use[memory] = operation.index
    freed_memory.about_to_allocate(sum(operation.nbytes for operation in operations))
    with plain_torch():
        for operation in operations:
            _run_recorded(operation, storages)
            for memory in touched_memories(operation):
                if last_use[memory] == operation.index and memory not in kept:
                    storages.pop(memory, None)


@contextmanager
def plain_torch() -> Iterator[None]:
    """No torch modes, no gradients, no autocast: operators run as they were recorded."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def _run_recorded(operation: Operation, storages: dict[Memory, torch.UntypedStorage]) -> None:
    for memory, nbytes in operation.writes:
        if memory not in storages:
            storages[memory] = torch.UntypedStorage(nbytes)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, View):
            return leaf.within(storages)
        if isinstance(leaf, Constant):
            return leaf.checked()
        if isinstance(leaf, GeneratorState):
            generator = torch.Generator()
            generator.set_state(leaf.state)
            return generator
        return leaf

    args, kwargs = map_leaves(operation.args, real), map_leaves(operation.kwargs, real)
    try:
        with _globals(operation.default_dtype, kwargs.pop(_GLOBAL_GENERATOR, None)):
            results = operation.function(*args, **kwargs)
    except Exception as error:
        raise InitializerError(f"its recorded operation {operation.function} failed on real memory: {error}") from error
    _store_outputs(operation, tensor_leaves([results]), tensor_leaves([args, kwargs]), storages)


def _store_outputs(
    operation: Operation, returned: list[Tensor], inputs: list[Tensor], storages: dict[Memory, torch.UntypedStorage]
) -> None:
    undefined = operation.function.overloadpacket in _UNDEFINED_CONTENT
    input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    for output in operation.outputs:
        tensor = returned[output.position]
        if tensor.untyped_storage()._cdata in input_storages:
            tensor = tensor.clone()  # a view of a constant, which later operations must not write to
        if undefined:
            tensor.zero_()  # the same at every replay
        storages[output.view.memory] = _as_recorded(tensor, output)


def _as_recorded(tensor: Tensor, output: Output) -> torch.UntypedStorage:
    # An operator may lay out its result on CPU differently than its shape function said: later views are recorded
    # over the latter, so the values are moved into it.
    view = output.view
    geometry = (tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)
    if geometry == (view.size, view.stride, view.offset, view.dtype):
        return tensor.untyped_storage()
    if (tuple(tensor.size()), tensor.dtype) != (view.size, view.dtype):
        raise InitializerError(
            f"a recorded operation gave shape {tuple(tensor.size())} and {tensor.dtype} where {view.size} and "
            f"{view.dtype} were recorded"
        )
    storage = torch.UntypedStorage(output.nbytes)
    view.of(storage).copy_(tensor)
    return storage


@contextmanager
def _globals(default_dtype: torch.dtype, generator: torch.Generator | None) -> Iterator[None]:
    """torch's default dtype, and the state of its global generator where one is given, are these as long as the block lasts."""
    with ExitStack() as afterwards:
        if default_dtype != torch.get_default_dtype():
            afterwards.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(default_dtype)
        if generator is not None:
            afterwards.callback(torch.default_generator.set_state, torch.default_generator.get_state())
            torch.default_generator.set_state(generator.get_state())
        yield


_GENERATOR_OVERLOADS = {
    "default": "generator",
    "low": "low_generator",
}


def with_generator(function: Any, kwargs: dict[str, Any], state: Tensor) -> tuple[Any, dict[str, Any]]:
    """The call of a random operator, changed so that its replay starts from the generator state `state`.

    A generator among `kwargs` is replaced. Where the operator takes none, but a sibling overload does (`randn`), the
    sibling is called; where no sibling does either, the global generator is set for the length of the replayed call.
    """
    if "generator" in {argument.name for argument in function._schema.arguments}:
        return function, {**kwargs, "generator": GeneratorState(state)}
    sibling = _GENERATOR_OVERLOADS.get(function._overloadname)
    if sibling in function.overloadpacket.overloads():
        return getattr(function.overloadpacket, str(sibling)), {**kwargs, "generator": GeneratorState(state)}
    return function, {**kwargs, _GLOBAL_GENERATOR: GeneratorState(state)}


def generator_of(args: Any, kwargs: Any) -> torch.Generator:
    """The generator from which a call draws."""
    given = (leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Generator))
    return next(given, torch.default_generator)
