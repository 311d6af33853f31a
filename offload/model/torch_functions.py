# SPDX-License-Identifier: Apache-2.0
"""What torch's functions do with a tensor that they are given: only ask about it, write into it, convert it, or read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

METADATA = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride,
    torch.Tensor.storage_offset, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.element_size, torch.Tensor.get_device, torch.Tensor.ndimension, torch.Tensor.__len__,
    torch.Tensor.__hash__, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad, torch.Tensor.is_same_size, torch.Tensor.requires_grad_,
    torch.Tensor.is_shared, torch.is_floating_point, torch.is_complex, torch.numel,
    torch.empty_like, torch._has_compatible_shallow_copy_type,
}  # fmt: skip
"""They look at no value."""

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "is_meta", "is_cuda", "is_cpu",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "is_vulkan", "is_maia", "is_mtia",
    "is_sparse_csr", "names", "output_nr", "name", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "itemsize",
    "nbytes", "volatile", "_base", "_cdata", "grad", "retains_grad", "grad_dtype", "_grad",
)  # fmt: skip


def _property_accessors(name: str, which: Sequence[str]) -> list[Any]:
    descriptor = getattr(torch.Tensor, name, None)
    return [getattr(descriptor, kind) for kind in which if descriptor is not None and hasattr(descriptor, kind)]


METADATA.update(accessor for name in _PROPERTIES for accessor in _property_accessors(name, ("__get__",)))
METADATA.update(_property_accessors("grad", ("__set__", "__delete__")))
METADATA.update(_property_accessors("requires_grad", ("__set__",)))
DATA_GET = torch.Tensor.data.__get__  # type: ignore[attr-defined]
DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
REPRESENT = torch.Tensor.__repr__

_WRITING_NAMES = {"__setitem__", "__set__", "set_", "resize_", "copy_"}
ASKING_GRADIENTS = {torch.autograd.backward, torch.autograd.grad}
"""They name parameters, and read none."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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


_CASTS = {
    torch.Tensor.float: torch.float32, torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16,
}  # fmt: skip
CONVERSIONS = {*_CASTS, torch.Tensor.to, torch.Tensor.type, torch.Tensor.cpu, torch.Tensor.cuda}
"""They return the tensor itself where it is so already (`changes_nothing`)."""


def changes_nothing(func: Any, parameter: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversion of the parameter is the parameter. `args`: without it."""
    if kwargs.get("copy", False):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.Tensor.type:
            wanted = args[0] if args else kwargs.get("dtype")
            return wanted in (parameter.dtype, parameter.type())
        if func in _CASTS:
            return parameter.dtype == _CASTS[func] and _is_laid_out(parameter, kwargs.get("memory_format"))
        if func is torch.Tensor.to:
            others = {name: value for name, value in kwargs.items() if name != "copy"}
            try:
                device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **others)
            except (TypeError, RuntimeError):
                return False  # whatever it is, let PyTorch say it
            return dtype in (None, parameter.dtype) and _is_on(parameter, device) and _is_laid_out(parameter, memory_format)
        kind = "cpu" if func is torch.Tensor.cpu else "cuda"
        given = args[0] if args and kind == "cuda" else kwargs.get("device")
        return _is_on(parameter, torch.device(kind, given) if isinstance(given, int) else torch.device(given or kind))


def _is_laid_out(parameter: torch.Tensor, memory_format: torch.memory_format | None) -> bool:
    return memory_format in (None, torch.preserve_format) or parameter.is_contiguous(memory_format=memory_format)


def _is_on(parameter: torch.Tensor, device: torch.device | None) -> bool:
    if device is None or device == parameter.device:
        return True
    return (
        device.type == parameter.device.type == "cuda"
        and device.index is None
        and (parameter.device.index == torch.cuda.current_device())
    )
