# SPDX-License-Identifier: Apache-2.0
"""Running a model's constructor on meta tensors while writing down what it computes.

`Tape.call` stands in for every operator call that torch dispatches inside `deferred_init()`:

- a factory for CPU tensors (`empty`, `randn`, `arange`, ...) makes a meta tensor, and its value is recorded;
- an operator with deferred arguments runs its shape function on meta tensors, and is recorded if it makes or changes
  a value (a view does neither);
- a random operator also runs for real, on memory which is freed at once, so that the generator advances exactly as in
  ordinary construction; its state before the call is kept as long as the value is alive;
- an operator whose answer the program needs now (`item`, `equal`, `nonzero`, one without a shape function) gets real
  arguments, computed from the recording. The constructor therefore takes the same branches as in ordinary construction;
- an operator on real tensors alone runs as always.

Thread-safety: one tape is driven by one thread; the registry under it may be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.deferred_init.file_values import FileBytes
from offload.deferred_init.present_values import PresentValues
from offload.deferred_init.recording import (
    Constant,
    Memory,
    Operation,
    Output,
    Registry,
    Value,
    covers_storage,
    map_leaves,
    storage_identity,
    tensor_leaves,
)
from offload.deferred_init.replay import generator_of, needed_operations, plain_torch, replay, with_generator
from offload.device.host_memory.freed_memory import freed_memory
from offload.errors import InitializerError

aten = torch.ops.aten

# In-place operators which never read the tensor that they write.
_OVERWRITING = frozenset(
    (
        *(aten.fill_, aten.zero_, aten.copy_, aten.normal_, aten.uniform_, aten.random_),
        *(aten.exponential_, aten.geometric_, aten.cauchy_, aten.log_normal_, aten.bernoulli_),
    )
)
# Operators which look only at the shape of their first argument.
_SHAPE_ONLY = frozenset(
    (
        *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like),
        *(aten.rand_like, aten.randn_like, aten.randint_like),
        *(aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
    )
)
_TAGGED_NAMESPACES = ("aten", "prims", "bitsandbytes")
"""Of operators whose tags can be relied on: what has none draws no random numbers."""
_NO_SHAPE_FUNCTION = object()


class Tape:
    """Records operator calls into a registry. Driven by the modes of `deferred_init`."""

    def __init__(self, registry: Registry, describe: Callable[[Tensor], str]) -> None:
        self.registry = registry
        self.describe = describe
        self._present = PresentValues(registry)
        self.written: set[Memory] = set()  # memories which this tape changed or made
        self.meta_requested = False  # see `on_meta`

    def is_deferred(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.registry.value(value) is not None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `function(*args, **kwargs)` gives, with deferred tensors for CPU ones. Errors: `InitializerError`."""
        tensors = tensor_leaves([args, kwargs])
        if not tensors:
            return self._create(function, args, kwargs)
        if not any(self.is_deferred(tensor) for tensor in tensors):
            if function.overloadpacket in _SHAPE_ONLY and tensors[0].is_meta and _is_cpu(kwargs.get("device")):
                return self._compute(_Call(self.registry, function, args, kwargs))
            if function is aten.lift_fresh.default and _is_private(tensors[0]):
                return self.lift(tensors[0])
            return function(*args, **kwargs)
        try:
            return self._compute(_Call(self.registry, function, args, kwargs))
        except InitializerError as error:
            culprit = next(tensor for tensor in tensors if self.is_deferred(tensor))
            raise InitializerError(f"{self.describe(culprit)} cannot be initialised: {error}") from error

    def lift(self, tensor: Tensor) -> Tensor:
        """A deferred tensor with the value of a real one, which must not be written to by others."""
        with plain_torch():
            return self._made(_meta_twin(tensor), aten.clone.default, Constant.capture(tensor))

    def read(self, content: FileBytes) -> Tensor:
        """A deferred tensor, uint8 [nbytes], with what lies in a file."""
        with plain_torch():
            return self._made(torch.empty(content.nbytes, dtype=torch.uint8, device="meta"), content)

    def stored(self, storage: torch.UntypedStorage) -> Tensor:
        """A deferred tensor, uint8 [nbytes], with what a real storage holds when the value is asked for."""
        with plain_torch():
            held = torch.empty(0, dtype=torch.uint8).set_(storage)
            return self._made(_meta_twin(held), aten.clone.default, Constant(held, None))

    def _made(self, twin: Tensor, function: Any, *args: Any) -> Tensor:
        """`twin` with what `function(*args)` gives for its value."""
        self._assign([twin], Operation(function, args, {}, (Output.under(twin),)))
        return twin

    @contextmanager
    def on_meta(self) -> Iterator[None]:
        """The caller itself asks for the meta device: tensors made inside are not deferred."""
        self.meta_requested = True
        try:
            yield
        finally:
            self.meta_requested = False

    def is_read(self, tensor: Tensor) -> bool:
        """Whether a deferred tensor's value is what lies in a file, or made of it."""
        value = self.registry.value(tensor)
        operations = needed_operations([value]) if value is not None else ()
        return any(isinstance(operation.function, FileBytes) for operation in operations)

    def real(self, tensor: Tensor) -> Tensor:
        """The present value of a deferred tensor, on CPU."""
        with plain_torch():
            value = self.registry.value(tensor)
            assert value is not None
            return self.registry.view(tensor).of(replay([value])[value.memory])

    def _create(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(self.registry, function, args, kwargs)
        strided = kwargs.get("layout") in (None, torch.strided)
        wanted = call.device == "cpu" or (call.device == "meta" and not self.meta_requested)
        if not (wanted and strided and "device" in call.parameter_names):
            return function(*args, **kwargs)
        return self._compute(call)

    def _compute(self, call: _Call) -> Any:
        if call.device == "meta" and self.meta_requested:
            return call.function(*call.args, **call.kwargs)
        call.refuse_undefined_inputs()
        if call.device not in ("cpu", "meta") or call.writes_real_tensor() or call.answers_now:
            return self._run(call)
        if call.is_random:
            state = generator_of(call.args, call.kwargs).get_state()
            function, kwargs = with_generator(call.function, call.kwargs, state)
        else:
            function, kwargs = call.function, call.kwargs
        results = self._on_meta(call)
        if results is _NO_SHAPE_FUNCTION:
            results = self._twins(call, self._run(call))
        elif call.is_random:
            call.made_nbytes = sum(tensor.nbytes for tensor in tensor_leaves([results]))
            self._run(call)
        self._append(call, function, kwargs, tensor_leaves([results]))
        return results

    def _on_meta(self, call: _Call) -> Any:
        """Runs the shape function; `_NO_SHAPE_FUNCTION` where there is none or only the values tell the shape."""
        if call.needs_values:
            return _NO_SHAPE_FUNCTION

        def on_meta(leaf: Any) -> Any:
            return _meta_twin(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

        args, kwargs = map_leaves(call.args, on_meta), map_leaves(call.kwargs, on_meta)
        if "device" in kwargs or not tensor_leaves([args, kwargs]):
            kwargs["device"] = torch.device("meta")
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        try:
            return call.function(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            # No shape function. If the call itself is wrong, running it for real gives the caller's own error.
            return _NO_SHAPE_FUNCTION

    def _run(self, call: _Call) -> Any:
        """Runs the call for real, on present values; returns its real results."""
        remember = call.answers_now and not call.written
        storages = self._present.compute(call.reads(with_overwritten=False), remember)
        freed_memory.about_to_allocate(sum(tensor.nbytes for tensor in call.tensors) + call.made_nbytes)

        def real(leaf: Any) -> Any:
            return self.registry.view(leaf).within(storages) if self.is_deferred(leaf) else leaf

        kwargs = map_leaves(call.kwargs, real)
        if call.device == "meta":
            kwargs["device"] = torch.device("cpu")
        return call.function(*map_leaves(call.args, real), **kwargs)

    def _twins(self, call: _Call, results: Any) -> Any:
        """Deferred stand-ins for the real `results` of a call which has no shape function."""
        for tensor in call.written:
            torch.autograd.graph.increment_version(tensor)
        if len(call.written) == 1 and isinstance(results, Tensor):
            return call.written[0]
        return map_leaves(results, _meta_twin)

    def _append(self, call: _Call, function: Any, kwargs: dict[str, Any], returned: list[Tensor]) -> None:
        known = {storage_identity(tensor) for tensor in call.tensors}
        outputs: list[Output] = []
        made: list[Tensor] = []
        for position, tensor in enumerate(returned):
            identity = storage_identity(tensor)
            if identity not in known:
                known.add(identity)
                made.append(tensor)
                outputs.append(Output.under(tensor, position))
        if not outputs and not call.written:
            return
        if "device" in kwargs or not call.tensors:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        operation = Operation(
            function,
            args=map_leaves(call.args, self._frozen),
            kwargs=map_leaves(kwargs, self._frozen),
            outputs=tuple(outputs),
            reads=tuple(call.reads(with_overwritten=True)),
            writes=tuple((self.registry.view(one).memory, one.untyped_storage().nbytes()) for one in call.written),
        )
        self._assign([*call.written, *made], operation)

    def _assign(self, tensors: list[Tensor], operation: Operation) -> None:
        """`tensors` have what it leaves in the memories that it changes, then in those that it makes."""
        for tensor, value in zip(tensors, operation.results(), strict=True):
            self.written.add(value.memory)
            self.registry.assign(tensor, value)

    def _frozen(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self.registry.view(leaf) if self.is_deferred(leaf) else Constant.capture(leaf)


class _Call:
    """One operator call, seen through its schema."""

    def __init__(self, registry: Registry, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.registry = registry
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensor_leaves([args, kwargs])
        self.made_nbytes = 0  # known once the shape function ran
        self.schema = function._schema
        self.parameter_names = [argument.name for argument in self.schema.arguments]
        self.device = torch.device(kwargs.get("device") or "cpu").type  # the one that is asked for
        self.written: list[Tensor] = [
            tensor for argument, given, _ in self._arguments() if _is_written(argument) for tensor in tensor_leaves([given])
        ]
        # Numbers and truth values, and checks which only raise.
        plain = any("Tensor" not in str(result.type) for result in self.schema.returns)
        self.answers_now = plain or not (self.schema.returns or self.written)
        foreign = function.namespace not in _TAGGED_NAMESPACES
        self.is_random = foreign or torch.Tag.nondeterministic_seeded in function.tags
        dynamic = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
        self.needs_values = any(tag in function.tags for tag in dynamic)

    def _arguments(self) -> Iterator[tuple[Any, Any, bool]]:
        """(schema argument, value, whether its elements are looked at)."""
        packet = self.function.overloadpacket
        passes_first_over = packet in _OVERWRITING or packet in _SHAPE_ONLY
        named = dict(zip(self.parameter_names, self.args, strict=False)) | self.kwargs
        for index, argument in enumerate(self.schema.arguments):
            if argument.name in named:
                unread = argument.is_out or (index == 0 and passes_first_over)
                yield argument, named[argument.name], not unread

    def reads(self, with_overwritten: bool) -> list[Value]:
        """The values that must be there; `with_overwritten`: also those of which a part outlives the call's writes."""
        found: dict[Memory, Value] = {}
        for argument, given, is_read in self._arguments():
            for tensor in tensor_leaves([given]):
                value = self.registry.value(tensor)
                kept = with_overwritten and _is_written(argument) and not covers_storage(tensor)
                if value is not None and (is_read or kept):
                    found[value.memory] = value
        return list(found.values())

    def writes_real_tensor(self) -> bool:
        real = [self.registry.value(tensor) is None for tensor in self.written]
        if any(real) and not all(real):
            raise InitializerError(f"{self.function} writes to deferred and to real tensors in one call; use two calls")
        return any(real)

    def refuse_undefined_inputs(self) -> None:
        read = [tensor for _, given, is_read in self._arguments() if is_read for tensor in tensor_leaves([given])]
        for tensor in read if self.function.overloadpacket in _SHAPE_ONLY else self.tensors:
            if tensor.is_meta and self.registry.value(tensor) is None:
                raise InitializerError(
                    f"{self.function} reads a meta tensor of shape {tuple(tensor.shape)} that has no value; create it "
                    "inside deferred_init() without device='meta', or on the CPU"
                )
            if tensor.is_conj() or tensor.is_neg():
                raise InitializerError(f"{self.function} reads a lazily conjugated tensor; call resolve_conj() first")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _is_private(tensor: Tensor) -> bool:
    # torch.tensor and torch.Tensor copy what they are given; from_numpy and the like alias it, in storages that
    # cannot be resized, and stay real tensors.
    return type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.untyped_storage().resizable()


def _meta_twin(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout != torch.strided:
        return leaf.to("meta")
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
