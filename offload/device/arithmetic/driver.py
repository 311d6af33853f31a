# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, called through ctypes: loads kernels that the build compiled, and launches them.

A launch costs a few microseconds of the host and no package beside torch. Every return code is looked at. The context is the
device's primary one, which is also torch's; it is pushed around each call, because a thread that has called nothing of
CUDA yet (one of autograd's, a lane) has none. Each kernel has one parameter, a structure: a launch puts its bytes together in
one call of C, in memory that the thread keeps for it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Any

LIBRARY_NAME = "libcuda.so.1"
PARAMETER_NBYTES = 4096
"""What a kernel's parameters may take on every device."""
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


class _Parameter(threading.local):
    """Of one thread: the bytes of the parameter that it launches with next, and what the driver is told of them."""

    def __init__(self) -> None:
        self.memory = bytearray(PARAMETER_NBYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.places = (c_void_p * 1)(start)
        self.popped = c_void_p()


class Kernels:
    """The functions of one file of compiled kernels (a fatbin or a cubin) on one device."""

    def __init__(self, path: Path, names: Iterable[str], device_index: int) -> None:
        """Loads every one of `names`: a function that is loaded at its first launch may make the device wait. Raises `OSError`
        where there is no driver, `DriverError` where it cannot run what the file holds."""
        self._library = ctypes.CDLL(LIBRARY_NAME)
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, c_int
        # These two touch the calling thread alone: the GIL is kept, which another thread might not give back soon.
        in_thread = ctypes.PYFUNCTYPE(c_int, c_void_p)
        self._push = in_thread(("cuCtxPushCurrent_v2", self._library))
        self._pop = in_thread(("cuCtxPopCurrent_v2", self._library))
        self._launch, self._parameter = self._library.cuLaunchKernel, _Parameter()
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

    def launch(self, name: str, block_count: int, thread_count: int, stream: int, parameter: bytes) -> None:
        """Queue a kernel on a stream (its address, 0: the default one). `parameter`: the bytes of the kernel's only one, as far
        as it looks at them."""
        function, own = self._functions[name], self._parameter
        own.memory[: len(parameter)] = parameter  # which the driver copies before it returns
        if (code := self._push(self._context)) != 0:
            raise self._error("cuCtxPushCurrent_v2", code)
        try:
            code = self._launch(function, block_count, 1, 1, thread_count, 1, 1, 0, stream, own.places, None)
        finally:
            popped = self._pop(ctypes.addressof(own.popped))
        if code != 0:
            raise self._error("cuLaunchKernel", code, name)
        if popped != 0:
            raise self._error("cuCtxPopCurrent_v2", popped)

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
            raise self._error(name, code, about)

    def _error(self, name: str, code: int, about: str = "") -> DriverError:
        words = filter(None, (self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)))
        said = ": ".join(words) or "which the driver does not know"
        of = f" ({about})" if about else ""
        return DriverError(f"{name}{of} failed on {self._where} with CUDA error {code}, {said}")

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        known = getattr(self._library, name)(code, byref(text)) == 0
        return text.value.decode() if known and text.value is not None else ""
