"""What stands in for a parameter or a gradient while its value must not be touched.

Between uses a parameter keeps its shape, dtype, strides and device, but its value may lie elsewhere. Reading it then
would read unmapped memory, and writing it would be lost. So, between uses, the parameter's class is a subclass of its
own class that looks at every torch function applied to it: what only asks about the tensor passes, what reads a value
asks the engine (which brings it in where that is right, inside a forward), and what writes raises. In use the class is
the user's own again, so that nothing stands between the model and the kernels, and `torch.compile` sees a plain
Parameter.

A gradient that the engine took over leaves a `TakenGradient` in `p.grad`: same shape, dtype and device, no memory; any
operation on it raises with the way to do it. It is also the token of ownership: a gradient counts at `step()` exactly
if its token is still there, so `model.zero_grad()` and `p.grad = None` mean what they mean in PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from offload.errors import ParameterAccessError


@dataclass(frozen=True, slots=True)
class Watch:
    """How the engine is asked about one guarded parameter.

    `bring_in()` makes the value present for the enclosing forward and unguards the parameter, or raises; `readable`
    says whether the value lies where the tensor points right now, so that reading needs no bringing in.
    """

    fqn: str
    bring_in: Callable[[], None]
    readable: bool


_watches: dict[int, Watch] = {}
_guard_classes: dict[type, type] = {}
_plain_classes: dict[type, type] = {}

_METADATA = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride,
    torch.Tensor.storage_offset, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.element_size, torch.Tensor.get_device, torch.Tensor.ndimension, torch.Tensor.__len__,
    torch.Tensor.__hash__, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad, torch.Tensor.is_same_size, torch.Tensor.requires_grad_,
    torch.Tensor.is_shared, torch.is_floating_point, torch.is_complex, torch.numel,
    torch.empty_like, torch.autograd.grad,
}  # fmt: skip

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "is_meta", "is_cuda", "is_cpu",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "is_vulkan", "is_maia", "is_mtia",
    "is_sparse_csr", "names", "output_nr", "name", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "itemsize",
    "nbytes", "volatile", "_base", "_cdata", "grad", "retains_grad", "grad_dtype", "_grad",
)  # fmt: skip


def _property_accessors(name: str, which: Sequence[str]) -> list[Any]:
    descriptor = getattr(torch.Tensor, name, None)
    return [getattr(descriptor, kind) for kind in which if descriptor is not None and hasattr(descriptor, kind)]


_METADATA.update(accessor for name in _PROPERTIES for accessor in _property_accessors(name, ("__get__",)))
_METADATA.update(_property_accessors("grad", ("__set__", "__delete__")))
_METADATA.update(_property_accessors("requires_grad", ("__set__",)))
_DATA_GET = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REPRESENT = torch.Tensor.__repr__

_WRITING_NAMES = {"__setitem__", "__set__", "set_", "resize_", "copy_"}


def _writes_into(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that `func` writes into, or None."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs and kwargs["out"] is not None:
        return kwargs["out"]
    in_place = name in _WRITING_NAMES or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or (
        name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    )
    if not in_place:
        return None
    return args[0] if args else next(iter(kwargs.values()), None)


def _refuse_writing(fqn: str, func: Any) -> ParameterAccessError:
    return ParameterAccessError(
        f"parameter {fqn!r} was written outside engine.gathered ({getattr(func, '__name__', func)}): the write would "
        "not "
        "reach its master weight or its optimizer state. Write it inside `with engine.gathered([parameter]):`; an "
        "optimizer step "
        "is engine.optimizer's."
    )


def _guarded_torch_function(
    cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    guarded = [leaf for leaf in leaves if type(leaf) in _plain_classes and id(leaf) in _watches]
    if func is _REPRESENT and guarded:
        watch = _watches[id(guarded[0])]
        if not watch.readable:
            return f"Parameter {watch.fqn!r} of shape {tuple(args[0].shape)}, {args[0].dtype}, not in memory (engine.gathered)"
    target = _writes_into(func, args, kwargs)
    targets = target if isinstance(target, (list, tuple)) else (target,)
    for written in targets:
        if type(written) in _plain_classes and id(written) in _watches:
            raise _refuse_writing(_watches[id(written)].fqn, func)
    for parameter in guarded:
        watching = _watches.get(id(parameter))
        if watching is not None and not watching.readable:
            watching.bring_in()
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if func is _DATA_GET and guarded:
        # `.data` shares memory but not the version counter: the only alias whose writes nothing else would see.
        read_only = result.as_subclass(_ReadOnlyData)
        read_only._offload_fqn = _watches[id(args[0])].fqn if id(args[0]) in _watches else ""
        return read_only
    if type(result) in _plain_classes and id(result) not in _watches:
        result.__class__ = _plain_classes[type(result)]  # a copy of a guarded parameter is the user's, and plain
    return result


class _ReadOnlyData(torch.Tensor):
    """What `p.data` gives between uses: reads pass, in-place writes raise."""

    _offload_fqn: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = _writes_into(func, args, kwargs)
        for written in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(written, _ReadOnlyData):
                raise _refuse_writing(written._offload_fqn, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _guard_class(original: type) -> type:
    if original not in _guard_classes:
        namespace = {"__torch_function__": classmethod(_guarded_torch_function), "__module__": original.__module__}
        _guard_classes[original] = type(original.__name__, (original,), namespace)
        _plain_classes[_guard_classes[original]] = original
    return _guard_classes[original]


class ParameterGuard:
    """Switches one parameter between guarded and plain. Not thread-safe: the thread that drives the model owns it."""

    def __init__(self, fqn: str, parameter: nn.Parameter, bring_in: Callable[[], None]) -> None:
        self._fqn, self._parameter, self._bring_in = fqn, parameter, bring_in
        self._plain_class = type(parameter)
        self._guard_class = _guard_class(type(parameter))
        self._readable_watch = Watch(fqn, bring_in, True)
        self._absent_watch = Watch(fqn, bring_in, False)
        # A model that is dropped without close() must not leave a watch on an address that another tensor gets.
        self._finalizer = weakref.finalize(parameter, _watches.pop, id(parameter), None)

    def close_off(self, *, readable: bool) -> None:
        """Guard the parameter. `readable`: its memory is there and may be read (but not written)."""
        _watches[id(self._parameter)] = self._readable_watch if readable else self._absent_watch
        self._parameter.__class__ = self._guard_class

    def open_up(self) -> None:
        """Make the parameter plain. Its memory must be there."""
        self._parameter.__class__ = self._plain_class
        _watches.pop(id(self._parameter), None)

    def release(self) -> None:
        """`open_up`, and keep no weak reference to the parameter."""
        self.open_up()
        self._finalizer.detach()


class TakenGradient(torch.Tensor):
    """The token that the engine leaves in `p.grad`. It has no memory; every operation on it raises."""

    fqn: str
    step_index: int
    """The step that it is for."""

    @staticmethod
    def __new__(cls, fqn: str, parameter: torch.Tensor, step_index: int) -> TakenGradient:
        token = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=False,
        )
        token.fqn, token.step_index = fqn, step_index
        return token

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TakenGradient({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        tokens = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, TakenGradient)]
        raise ParameterAccessError(
            f"the gradient of {tokens[0].fqn!r} was taken over by the engine when backward computed it, so {func} "
            "cannot read "
            "or change it. To clip, set Config(max_grad_norm=...) or call engine.clip_grad_norm_(max_norm); its "
            "norm is "
            "engine.grad_norm after the step; loss scaling for fp16 is engine.backward(loss); to drop gradients call "
            "optimizer.zero_grad()."
        )
