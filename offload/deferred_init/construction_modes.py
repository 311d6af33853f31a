# SPDX-License-Identifier: Apache-2.0
"""The two torch modes under which `deferred_init` runs a constructor, and how it names tensors in errors.

Thread-safety: torch modes belong to the thread that entered them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from offload.deferred_init.file_values import MappedFiles
from offload.deferred_init.parameter_names import ModuleWatch, modules_under_construction
from offload.deferred_init.real_storages import RealStorages
from offload.deferred_init.recording import Registry, touched_memories
from offload.deferred_init.replay import needed_operations
from offload.deferred_init.tape import Tape
from offload.errors import InitializerError

_DEEPCOPY: Any = Tensor.__deepcopy__


def describer(registry: Registry, watch: ModuleWatch) -> Callable[[Tensor], str]:
    """A function which says what a deferred tensor is: the fqn of the parameter from which or for which it was made as
    far as the model is built, else its shape; and which modules are being built."""

    def describe(tensor: Tensor) -> str:
        value = registry.value(tensor)
        operations = needed_operations([value]) if value is not None else ()
        memories = {memory for operation in operations for memory in touched_memories(operation)}
        text = f"a tensor of shape {tuple(tensor.shape)}"
        for root in watch.roots():
            for fqn, parameter in root.named_parameters():
                found = registry.value(parameter)
                if found is not None and found.memory in memories:
                    text = f"parameter {fqn!r} of {type(root).__name__}"
        building = " > ".join(type(module).__name__ for module in modules_under_construction())
        return f"{text} (while building {building})" if building else text

    return describe


class RecordOperators(TorchDispatchMode):
    """Hands every operator call to the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._storages = RealStorages(tape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if func.overloadpacket is torch.ops.aten.set_ and self._tape.is_deferred(args[0]):
                return self._storages.put_under(args[0], func, *args[1:])
            return self._tape.call(func, tuple(args), kwargs or {})


class AnswerAsOnCpu(TorchFunctionMode):
    """Answers what a constructor asks of its tensors as if they were on the CPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._files = MappedFiles()
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda tensor, *_: torch.device("cpu"),
            Tensor.is_meta.__get__: lambda tensor, *_: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda tensor, *_: True,  # type: ignore[attr-defined]
            Tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            Tensor.to: self._to,
            Tensor.cpu: self._moved,
            Tensor.cuda: self._moved,
            Tensor.xpu: self._moved,
            Tensor.new_tensor: self._new_tensor,
            Tensor.__getitem__: lambda tensor, index: tensor[_tensor_indices(index)],
            Tensor.__setitem__: self._set_item,
            Tensor.tolist: lambda tensor: tape.real(tensor).tolist(),
            Tensor.numpy: self._numpy,
        }
        for function in (Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__, Tensor.__dlpack_device__):
            self._answers[function] = self._refuser(function.__name__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = self._answers.get(func)
        if answer is not None and any(self._tape.is_deferred(arg) for arg in args[:2]):
            return answer(*args, **kwargs)
        if func is _DEEPCOPY and not self._tape.is_deferred(args[0]):
            with _disable_current_modes():  # it copies storages, by operators on tensors that would be deferred ones
                return func(*args, **kwargs)
        if func is torch.asarray and isinstance(args[0], torch.UntypedStorage) and kwargs.get("dtype") is torch.uint8:
            content = self._files.find(args[0])
            if content is not None:
                return self._tape.read(content)
        if "device" not in kwargs or torch.device(kwargs["device"] or "cpu").type != "meta":
            return func(*args, **kwargs)
        with self._tape.on_meta():
            return func(*args, **kwargs)

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        if not self._tape.is_deferred(tensor) and not tensor.is_meta:  # one asked for on the meta device may get a value
            data = self._tape.real(data)
        elif not data.is_meta:
            data = self._tape.lift(data)
        Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined]

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        tensor[_tensor_indices(index)] = value

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].dtype, *args[1:])
        if isinstance(kwargs.get("other"), Tensor):
            kwargs["dtype"] = kwargs.pop("other").dtype
        if self._tape.is_deferred(tensor):
            given = (*args, *kwargs.values())
            if any(isinstance(arg, (str, torch.device)) and torch.device(arg).type == "meta" for arg in given):
                return self._without_value(tensor, next((arg for arg in given if isinstance(arg, torch.dtype)), None))
            args = tuple(torch.device("meta") if _is_device(arg) else arg for arg in args)
            kwargs = {name: torch.device("meta") if _is_device(arg) else arg for name, arg in kwargs.items()}
        return Tensor.to(tensor, *args, **kwargs)  # not what a subclass makes of it, which has its own beside

    def _without_value(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """What is asked onto the meta device has no value any more, as outside: what fills it there draws no random numbers."""
        with self._tape.on_meta():
            return torch.empty_like(tensor, dtype=dtype, device="meta")

    def _moved(self, tensor: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        """Where it lies is decided by what takes the model: a move to a device changes nothing."""
        kwargs.pop("device", None)
        return Tensor.to(tensor, torch.device("meta"), **kwargs)

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        result = tensor.new_tensor(data, **{"device": "cpu", **kwargs})
        return result if result.is_meta else self._tape.lift(result)

    def _numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        """What was read from a file, to be looked at: settings of a library lie there, packed into a tensor."""
        if not self._tape.is_read(tensor):
            return self._refuser("numpy")(tensor)
        array = self._tape.real(tensor).numpy(**kwargs)
        array.flags.writeable = False
        return array

    def _refuser(self, function_name: str) -> Callable[..., Any]:
        def refuse(tensor: Tensor, *_: Any, **__: Any) -> None:
            raise InitializerError(
                f"{self._tape.describe(tensor)} cannot be initialised under deferred_init(): {function_name}() gives "
                "its memory to code that cannot be recorded; use torch operations (tolist() and item() are fine), or "
                "build this model outside of deferred_init()"
            )

        return refuse


def _tensor_indices(index: Any) -> Any:
    # torch would put a list of indices on the device of the indexed tensor, unseen by any mode, and lose it there.
    if type(index) is tuple:
        return tuple(_tensor_indices(item) for item in index)
    if isinstance(index, list) or (hasattr(index, "__array__") and not isinstance(index, Tensor)):
        return torch.tensor(index)
    return index


def _is_device(argument: Any) -> bool:
    return isinstance(argument, (str, torch.device)) or type(argument) is int
