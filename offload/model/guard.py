# SPDX-License-Identifier: Apache-2.0
"""What stands in for a parameter while its value must not be touched.

Between uses a parameter keeps its shape, dtype, strides and device, but its value may lie elsewhere. Reading it then
would read unmapped memory, and writing it would be lost. So, between uses, the parameter's class is a subclass of its
own class that looks at every torch function applied to it: what only asks about the tensor passes, what reads a value
asks the engine (which brings it in where that is right, inside a forward), and what writes raises. In use the class is
the user's own again, so that nothing stands between the model and the kernels, and `torch.compile` sees a plain
Parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from offload.errors import ParameterAccessError
from offload.model.leading_call import leading_call, led_by
from offload.model.quantized import class_in_use
from offload.model.set_each import set_each
from offload.model.torch_functions import (
    ASKING_GRADIENTS,
    CONVERSIONS,
    DATA_GET,
    DATA_SET,
    METADATA,
    REPRESENT,
    changes_nothing,
    written_by,
)


@dataclass(frozen=True, slots=True)
class Watch:
    """How the engine is asked about one guarded parameter.

    `bring_in()` makes the value present for the enclosing forward and unguards the parameter, or raises. `left_as`: of what a
    closed engine left without its value the class that the parameter is to have again.
    """

    fqn: str
    bring_in: Callable[[], None]
    left_as: type | None = None


_watches: dict[int, Watch] = {}
"""By id, of every parameter that has a guard, also while it is plain; only `_watch_of` asks. One whose parameter is gone may be
left: a finalizer that comes where Python's stack ends is lost."""
_guard_classes: dict[tuple[type, bool], type] = {}
"""By a parameter's own class, and whether its value lies where the tensor points, so that reading needs no bringing in."""
_plain_classes: dict[type, type] = {}
"""By guard class: the parameter's own."""
_readable_classes: set[type] = set()
"""Those of the guard classes whose parameters may be read."""


def _watch_of(tensor: Any) -> Watch | None:
    """None too for whatever came to lie where a guarded parameter did: it has no guard's class."""
    return _watches.get(id(tensor)) if type(tensor) in _plain_classes else None


def _node_of(value: Any) -> Any:
    """Of a guarded parameter the place of its gradient in autograd's graph."""
    if _watch_of(value) is not None and value.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            return get_gradient_edge(value)
    return value


def _refuse_writing(watch: Watch, func: Any) -> ParameterAccessError:
    if watch.left_as is not None:
        return _gone(watch.fqn)
    return ParameterAccessError(
        f"parameter {watch.fqn!r} was written outside engine.gathered ({getattr(func, '__name__', func)}): the write would not "
        "reach its master weight or its optimizer state. "
        + led_by("Write it inside `with engine.gathered([parameter]):`; an optimizer step is engine.optimizer's.")
    )


def _check_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where `func` writes into a guarded parameter, or into what shares its memory."""
    target = written_by(func, args, kwargs)
    for written in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(written, _ReadOnlyData):
            raise _refuse_writing(written._offload_watch, func)
        if (watch := _watch_of(written)) is not None:
            raise _refuse_writing(watch, func)


def _gone(fqn: str) -> ParameterAccessError:
    return ParameterAccessError(
        f"parameter {fqn!r} has no value any more: it lay in a tier of an engine that was closed. Before close(), "
        "engine.export(dir) or engine.save_checkpoint(dir) keep the values; now offload.initialize(model, ..., weights=dir) "
        "brings those of an export, and model.load_state_dict(state, assign=True) those of a state_dict()."
    )


def refuse_loading(module: nn.Module) -> None:
    """Raise where `module.load_state_dict` would write to a guarded parameter: PyTorch would make one long error of many."""
    for parameter in module.parameters(recurse=False):
        if (watch := _watch_of(parameter)) is not None:
            raise _refuse_writing(watch, nn.Module.load_state_dict)


def _refuse_conversion(fqn: str) -> None:
    call = leading_call()
    if call is not None and call.converts:
        raise ParameterAccessError(f"{call.name} would change parameter {fqn!r}, which an engine has: {call.advice}.")


def _refuse_second_parameter(fqn: str) -> None:
    """Raise where `detach` is called by `nn.Parameter(...)`, as by `weight_norm`: PyTorch has words for subclasses only."""
    if sys._getframe(2).f_code is nn.Parameter.__new__.__code__:
        raise ParameterAccessError(
            f"nn.Parameter() was given parameter {fqn!r}, which an engine has: it would be a second parameter in the same "
            "memory. Parametrise a model (weight_norm, ...) before offload.initialize; for a parameter with a copy of the "
            "value, nn.Parameter(p.detach().clone()) inside `with engine.gathered([p]):`."
        )


def _guarded_torch_function(
    cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if func in METADATA or (func is torch.Tensor.type and len(args) == 1 and not kwargs):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in ASKING_GRADIENTS:
        # They name parameters and read none. Their node in the graph says the same, and the call stays an ordinary one.
        args, kwargs = pytree.tree_map(_node_of, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)
    first = _watch_of(args[0]) if args else None
    if func is torch.Tensor.detach and first is not None:
        _refuse_second_parameter(first.fqn)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    guarded = [leaf for leaf in leaves if _watch_of(leaf) is not None]
    if func == REPRESENT and guarded:
        watch = _watch_of(guarded[0])
        if watch is not None and type(guarded[0]) not in _readable_classes:
            where = "not in memory (engine.gathered)" if watch.left_as is None else "without a value (its engine was closed)"
            return f"Parameter {watch.fqn!r} of shape {tuple(args[0].shape)}, {args[0].dtype}, {where}"
    if func in CONVERSIONS and first is not None:
        if changes_nothing(func, args[0], args[1:], kwargs):
            return args[0]
        _refuse_conversion(first.fqn)
    if func == DATA_SET and args[1] is args[0]:
        return None  # what module.to() does at the end, where nothing changed
    _check_writes(func, args, kwargs)
    if func == DATA_GET and guarded:
        with torch._C.DisableTorchFunctionSubclass():
            return _read_only(func(*args), args[0])
    for parameter in guarded:
        _bring_in(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        # The values of `state_dict()` are for saving: plain.
        if not (func is torch.Tensor.detach and sys._getframe(1).f_code is nn.Module._save_to_state_dict.__code__):
            for parameter in guarded:
                result = _read_only(result, parameter)
    if type(result) in _plain_classes and not any(result is one for one in guarded):
        result.__class__ = _plain_classes[type(result)]  # a copy of a guarded parameter is the user's, and plain
    return result


def _bring_in(parameter: torch.Tensor) -> None:
    watch = _watch_of(parameter)
    if watch is not None and type(parameter) not in _readable_classes:
        watch.bring_in()


def _read_only(result: Any, parameter: torch.Tensor) -> Any:
    """`result`, with what shares the guarded parameter's memory made a `_ReadOnlyData`: a write to it would be lost as one to
    the parameter."""
    if type(result) in (tuple, list):
        return type(result)(_read_only(one, parameter) for one in result)
    if isinstance(result, Iterator):
        return iter([_read_only(one, parameter) for one in result])
    watch = _watch_of(parameter)
    if watch is None or type(result) is not torch.Tensor:
        return result
    if result.layout is not torch.strided or result.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
        return result
    read_only = result.as_subclass(_ReadOnlyData)
    read_only._offload_watch, read_only._offload_parameter = watch, parameter
    return read_only


class _ReadOnlyData(torch.Tensor):
    """What `p.data` and views give between uses: reads are as those of the parameter, in-place writes raise."""

    _offload_watch: Watch
    _offload_parameter: torch.Tensor

    def _plain(self) -> torch.Tensor:
        _bring_in(self._offload_parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.detach and isinstance(args[0], _ReadOnlyData):
            _refuse_second_parameter(args[0]._offload_watch.fqn)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _ReadOnlyData)]
        for leaf in leaves:
            _bring_in(leaf._offload_parameter)
        _check_writes(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            for leaf in leaves:
                result = _read_only(result, leaf._offload_parameter)
        return result


def _guard_class(original: type, *, readable: bool) -> type:
    found = _guard_classes.get((original, readable))
    if found is None:
        namespace = {"__torch_function__": classmethod(_guarded_torch_function), "__module__": original.__module__}
        found = type(original.__name__, (original,), namespace)
        _plain_classes[found] = original
        if readable:
            _readable_classes.add(found)
        _guard_classes[original, readable] = found
    return found


unguarded = torch._C.DisableTorchFunctionSubclass
"""A context manager: what the engine asks of its own parameters inside passes no guard. That takes longer than most answers."""


class ParameterGuard:
    """Switches one parameter between guarded and plain. Not thread-safe: the thread that drives the model owns it."""

    def __init__(self, fqn: str, parameter: nn.Parameter, bring_in: Callable[[], None]) -> None:
        self._parameter, self._key = parameter, id(parameter)
        self._plain_class, self._class_in_use = type(parameter), class_in_use(parameter)
        self._absent_class = _guard_class(type(parameter), readable=False)
        self._readable_class = _guard_class(type(parameter), readable=True)
        # A model that is dropped without close() must not leave a watch on an address that another tensor gets.
        self._finalizer = weakref.finalize(parameter, _watches.pop, id(parameter), None)
        self._watch = _watches[self._key] = Watch(fqn, bring_in)

    def close_off(self, *, readable: bool) -> None:
        """Guard the parameter. `readable`: its memory is there and may be read (but not written)."""
        _watches[self._key] = self._watch  # of another engine that was to have it meanwhile there may be one
        self._parameter.__class__ = self._readable_class if readable else self._absent_class

    def open_up(self) -> None:
        """Make the parameter plain. Its memory must be there."""
        self._parameter.__class__ = self._class_in_use

    def leave(self) -> None:
        """The engine is closed and the value went with it: who asks for it is told so, until `Remains` takes the parameter."""
        fqn = self._watch.fqn

        def refuse() -> None:  # knows the name alone: the table of watches keeps no parameter alive
            raise _gone(fqn)

        _watches[self._key] = Watch(fqn, refuse, self._plain_class)
        self._parameter.__class__ = self._absent_class

    def release(self) -> None:
        """The parameter is nobody's: plain for good."""
        self._parameter.__class__ = self._plain_class
        if _watches.get(self._key) is self._watch:
            del _watches[self._key]
        self._finalizer.detach()


class GuardsTogether:
    """The guards of several parameters, switched at once: a few calls of C, however many they are."""

    def __init__(self, guards: Sequence[ParameterGuard]) -> None:
        self._parameters = [one._parameter for one in guards]
        self._classes_in_use = [one._class_in_use for one in guards]
        self._absent_classes = [one._absent_class for one in guards]
        self._readable_classes = [one._readable_class for one in guards]

    def close_off(self, *, readable: bool) -> None:
        """See `ParameterGuard`."""
        set_each(self._parameters, "__class__", self._readable_classes if readable else self._absent_classes)

    def open_up(self) -> None:
        """See `ParameterGuard`."""
        set_each(self._parameters, "__class__", self._classes_in_use)


class Remains:
    """Of these parameters those that a closed engine left without their values."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        watched = [(one, _watch_of(one)) for one in parameters]
        self._left = [(one, watch) for one, watch in watched if watch is not None and watch.left_as is not None]

    def take(self) -> None:
        """Make them plain, to be given memory."""
        for parameter, watch in self._left:
            assert watch.left_as is not None
            parameter.__class__ = watch.left_as
            _watches.pop(id(parameter), None)

    def put_back(self) -> None:
        """As they were left."""
        for parameter, watch in self._left:
            parameter.__class__ = _guard_class(type(parameter), readable=False)
            _watches[id(parameter)] = watch


def is_left(parameter: nn.Parameter) -> bool:
    """Whether a closed engine left it without its value."""
    watch = _watch_of(parameter)
    return watch is not None and watch.left_as is not None
