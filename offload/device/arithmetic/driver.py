# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, called through ctypes: loads kernels that the build compiled, and launches them.

A launch costs a few microseconds of the host and no package beside torch. Every return code is looked at. The context is the
device's primary one, which is also torch's; it is pushed around each call, because a thread that has called nothing of
CUDA yet (one of autograd's, a lane) has none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY_NAME = "libcuda.so.1"
_ARGUMENT_TYPES: dict[type, Any] = {
    np.uint64: ctypes.c_uint64,
    np.int64: ctypes.c_int64,
    np.int32: ctypes.c_int32,
    np.float32: ctypes.c_float,
}
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuModuleLoad": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *(7 * (c_uint,)), c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Kernels:
    """The functions of one file of compiled kernels (a fatbin or a cubin) on one device."""

    def __init__(self, path: Path, names: Iterable[str], device_index: int) -> None:
        """Loads every one of `names`: a function that is loaded at its first launch may make the device wait. Raises `OSError`
        where there is no driver, `DriverError` where it cannot run what the file holds."""
        self._library = ctypes.CDLL(LIBRARY_NAME)
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, c_int
        self._where = f"cuda:{device_index}"
        device, module = c_int(), c_void_p()
        self._context = c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), device_index)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)  # for as long as the process lives, as torch does
        self._functions: dict[str, c_void_p] = {}
        with self._in_context():
            self._call("cuModuleLoad", byref(module), str(path).encode(), about=str(path))
            for name in names:
                function = self._functions[name] = c_void_p()
                self._call("cuModuleGetFunction", byref(function), module, name.encode(), about=f"{name} in {path}")

    def launch(self, name: str, block_count: int, thread_count: int, stream: int, arguments: tuple[Any, ...]) -> None:
        """Queue a kernel on a stream (its address, 0: the default one). `arguments`: numpy scalars of the kernel's types."""
        values = [_ARGUMENT_TYPES[type(one)](one.item()) for one in arguments]
        places = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        function = self._functions[name]
        with self._in_context():
            self._call("cuLaunchKernel", function, block_count, 1, 1, thread_count, 1, 1, 0, stream, places, None, about=name)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            popped = c_void_p()
            self._call("cuCtxPopCurrent_v2", byref(popped))

    def _call(self, name: str, *arguments: Any, about: str = "") -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            words = filter(None, (self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)))
            said = ": ".join(words) or "which the driver does not know"
            of = f" ({about})" if about else ""
            raise DriverError(f"{name}{of} failed on {self._where} with CUDA error {code}, {said}")

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        known = getattr(self._library, name)(code, byref(text)) == 0
        return text.value.decode() if known and text.value is not None else ""
