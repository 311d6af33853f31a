# SPDX-License-Identifier: Apache-2.0
"""Models which never were in memory: built on the meta device, with their initialisers remembered.

    with deferred_init():
        model = Transformer(config)         # parameters on the meta device, buffers real
    [weight] = materialize([model.head.weight])

Inside the block the constructor runs as it always does, and believes its tensors to be on the CPU (`tensor.device`
and `tensor.is_meta` say so), so nothing in it is skipped because of the meta device. What it computes is recorded by
`offload.deferred_init.tape`, and computed by `offload.deferred_init.replay` when a value is asked for.

The values are, bit for bit, those of ordinary construction on the CPU from the same seed and with the same number of
torch threads, and so is the state of torch's CPU generator after the block. Random operators therefore run once in the
block, on memory which is freed at once: recording costs about the time of ordinary construction and the memory of its
largest tensor.

When the block ends, buffers and other tensors that modules hold (as attributes, or in lists, tuples and dicts which are
attributes) become real tensors; parameters stay on the meta device.

What is loaded from safetensors inside the block is remembered, not read: `from_pretrained` of a local folder gives a model on
the meta device whose values are those of its files, each read when it is asked for. So is what `torch.load` gives; it is in
memory already, unless it was loaded with `mmap=True`.

Limits. `.numpy()`, `data_ptr()` and DLPack give memory to others, which a recording cannot follow: `InitializerError`.
Values changed through `parameter.data` after the block cannot be noticed; changes made on the parameter itself are, and
are an error. A cast after the block (`model.to(torch.bfloat16)`) is applied to the replayed values. Parameters made
of memory from elsewhere (`torch.from_numpy`) are real from the start.

Thread-safety: a block concerns the thread that entered it. The other functions may be called from any thread, but two
threads should not change one model at once; see `offload.deferred_init.replay` for what a replay touches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from offload.deferred_init.construction_modes import AnswerAsOnCpu, RecordOperators, describer
from offload.deferred_init.held_tensors import held_tensors, kept_by_libraries, replacing_held_tensors
from offload.deferred_init.parameter_names import ModuleWatch, Note, ParameterNotes
from offload.deferred_init.recording import Memory, Operation, Output, Registry, Value
from offload.deferred_init.replay import NOTHING, Replaced, plain_torch, replay
from offload.deferred_init.tape import Tape
from offload.device.host_memory.freed_memory import freed_memory
from offload.errors import InitializerError, UsageError


class _Current(threading.local):
    block: _Block | None = None
    """The recording that this thread is in."""


_registry = Registry()
_notes = ParameterNotes()
_current = _Current()
_SEQUENTIAL_LOADING = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def deferred_init() -> Iterator[None]:
    """Models built in this block have their parameters on the meta device, and remember how each is initialised.

    Blocks nest (an inner one changes nothing) and may follow each other: a later block can change the initial values of
    an earlier one's model. `offload.initialize` inside a block ends it: what follows is as outside of it. An exception passes
    through and leaves torch as it was.

    Errors: `InitializerError` for an initialiser that cannot be replayed; `UsageError` where the default device is not
    the CPU.
    """
    if _current.block is not None:
        yield
        return
    if torch.get_default_device().type != "cpu":
        raise UsageError(
            f"deferred_init() records construction on the CPU, but the default device is {torch.get_default_device()}; "
            "leave torch.set_default_device() and torch.device() out around it"
        )
    for parameter, note in _notes.deferred():
        _adopt(parameter, note)
    block = _Block()
    _current.block = block
    try:
        yield
    finally:
        block.stop()
    block.close()


def end_recording() -> None:
    """End the block that this thread is in, here: what is built or computed in the rest of it is as outside of it.

    Errors: `UsageError` inside a mode of torch (`with torch.device(...)`) that was entered in the block.
    """
    block = _current.block
    if block is None:
        return
    if not block.is_innermost:
        raise UsageError(
            "offload.initialize was called inside a mode of torch (as `with torch.device(...)`) inside deferred_init(): "
            "call it after that mode's block."
        )
    block.stop()
    block.close()


class _Block:
    """One recording: modes that are entered when it is made, and left by `stop`, once."""

    def __init__(self) -> None:
        self._watch = ModuleWatch()
        self._tape = Tape(_registry, describer(_registry, self._watch))
        self._answering = AnswerAsOnCpu(self._tape)
        self._closed = False
        with ExitStack() as stack:
            stack.enter_context(self._watch.watching())
            stack.enter_context(_loading_in_this_thread())
            stack.enter_context(RecordOperators(self._tape))
            stack.enter_context(self._answering)
            self._modes = stack.pop_all()

    @property
    def is_innermost(self) -> bool:
        return bool(_get_current_function_mode() is self._answering)

    def stop(self) -> None:
        self._modes.close()
        _current.block = None

    def close(self) -> None:
        """Give parameters their names and what was recorded of them, and buffers their values. Once."""
        if self._closed:
            return
        self._closed = True
        for root in self._watch.roots():
            _notes.name(root)
        for parameter, note in _notes.deferred():
            value = _registry.value(parameter)
            if value is not None and (note.value is None or value.memory in self._tape.written):
                note.value, note.view = value, _registry.view(parameter)
                note.version = parameter._version
        _materialize_held(self._watch.modules())
        _registry.sweep()
        _notes.sweep()
        freed_memory.give_back()


def is_deferred(tensor: Tensor) -> bool:
    """Whether `tensor` is on the meta device with a recorded initial value, so that `materialize` can compute it."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta and (_registry.value(tensor) is not None or _castable(tensor, _notes.find(tensor)))


def materialize(tensors: Sequence[Tensor], replaced: Replaced = NOTHING) -> list[Tensor]:
    """The initial values of deferred parameters and buffers: real CPU tensors of their shapes, dtypes and strides.

    Only the operations that these values need are run; memory is bounded by the results and what one of these
    operations reads and writes. The given tensors, the recording and the global generator stay as they are, so a second
    call gives the same values. A tensor that is not on the meta device is returned detached. Results share memory only
    where the given tensors do. The caller owns the results.

    replaced  recorded values (of `value_of`) that others take the place of: what was computed from them is from those

    Errors: `InitializerError`, naming the parameter.
    """
    with plain_torch():
        values = [_checked_value(tensor) if tensor.is_meta else None for tensor in tensors]
        try:
            storages = replay([value for value in values if value is not None], replaced)
        except InitializerError as error:
            raise InitializerError(f"{_culprit(tensors, values, replaced)} cannot be initialised: {error}") from error
        results = [
            tensor.detach() if value is None else _registry.view(tensor).of(storages[value.memory])
            for tensor, value in zip(tensors, values, strict=True)
        ]
        memories = [value.memory for value in values if value is not None]
        for index, (result, value) in enumerate(zip(results, values, strict=True)):
            is_part = result.numel() * result.element_size() < result.untyped_storage().nbytes()
            if value is not None and is_part and memories.count(value.memory) == 1:
                results[index] = result.clone()
    return results


def value_of(tensor: Tensor) -> Value | None:
    """What is recorded of a deferred tensor; None of others."""
    with torch._C.DisableTorchFunction():
        return _checked_value(tensor) if is_deferred(tensor) else None


def held_values(modules: list[nn.Module]) -> dict[int, Tensor]:
    """The real tensors that belong in the place of deferred ones which `modules` hold besides parameters, by their ids.

    Those which share memory still do. Errors: `InitializerError`, also for a buffer which shares memory with a parameter.
    """
    held = [tensor for tensor in held_tensors(modules) if is_deferred(tensor)]
    owned = _names_by_memory(modules) if held else {}
    for tensor in held:
        value = _registry.value(tensor)
        if value is not None and value.memory in owned:
            raise InitializerError(
                f"a buffer or attribute of shape {tuple(tensor.shape)} shares memory with {owned[value.memory]}; "
                "give it a clone()"
            )
    return {
        id(tensor): result.requires_grad_(tensor.requires_grad) for tensor, result in zip(held, materialize(held), strict=True)
    }


def name_parameters(model: nn.Module) -> None:
    """Let errors name the parameters of `model` by their fqns in it, not by those they had at the end of the block."""
    _notes.name(model)


@contextmanager
def _loading_in_this_thread() -> Iterator[None]:
    """Hugging Face's `from_pretrained` loads in threads of its own, which no mode of this one reaches, unless it is told not
    to; other threads that load meanwhile do without theirs."""
    before = os.environ.get(_SEQUENTIAL_LOADING)
    os.environ[_SEQUENTIAL_LOADING] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SEQUENTIAL_LOADING, None)
        else:
            os.environ[_SEQUENTIAL_LOADING] = before


def _materialize_held(modules: list[nn.Module]) -> None:
    for slots, name, content in replacing_held_tensors(modules, held_values(modules)):
        slots[name] = content
    for slots, name, tensor in kept_by_libraries():
        if is_deferred(tensor):
            [slots[name]] = materialize([tensor])


def _names_by_memory(modules: list[nn.Module]) -> dict[Memory, str]:
    names = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            value = None if parameter is None else _registry.value(parameter)
            if value is not None:
                names[value.memory] = f"parameter {name!r} of {type(module).__name__}"
    return names


def _castable(tensor: Tensor, note: Note | None) -> bool:
    return (
        note is not None
        and note.view is not None
        and note.view.size == tuple(tensor.size())
        and note.view.dtype != tensor.dtype
        and note.view.dtype.is_floating_point
        and tensor.dtype.is_floating_point
    )


def _adopt(parameter: Tensor, note: Note | None) -> None:
    """Record the cast which gave `parameter` another dtype outside of any block."""
    if _registry.value(parameter) is not None or note is None or not _castable(parameter, note):
        return
    assert note.value is not None and note.view is not None
    output = Output.under(parameter)
    to = {"dtype": parameter.dtype}
    cast = Operation(torch.ops.aten._to_copy.default, (note.view,), to, (output,), reads=(note.value,))
    [value] = cast.results()
    _registry.assign(parameter, value)
    note.value, note.view = value, output.view


def _checked_value(tensor: Tensor) -> Value:
    note = _notes.find(tensor)
    _adopt(tensor, note)
    value = _registry.value(tensor)
    if value is None:
        raise InitializerError(
            f"{_called(tensor)} is on the meta device but has no recorded initialiser; build the whole model inside "
            "deferred_init(), and neither copy it nor replace its parameters on the meta device afterwards"
        )
    if note is not None and note.value is not None and tensor._version != note.version and _current.block is None:
        raise InitializerError(
            f"{_called(tensor)} was changed in place outside of deferred_init(), where it is not recorded; move that change "
            "into a `with deferred_init():` block (a second one is fine)"
        )
    return value


def _called(tensor: Tensor) -> str:
    note = _notes.find(tensor)
    return f"a tensor of shape {tuple(tensor.shape)}" if note is None else f"parameter {note.fqn!r}"


def _culprit(tensors: Sequence[Tensor], values: Sequence[Value | None], replaced: Replaced) -> str:
    """Names the first of `tensors` which fails by itself."""
    for tensor, value in zip(tensors, values, strict=True):
        try:
            replay([] if value is None else [value], replaced)
        except InitializerError:
            return _called(tensor)
    return "one of the tensors"
