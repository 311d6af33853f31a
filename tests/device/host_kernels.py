# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels' source, compiled as C++ and run on the CPU, behind the interface of `compiled_kernels.Launcher`."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload.device.arithmetic import compiled_kernels, ingest_table, kernels, optimizer_step
from offload.device.arithmetic.compiled_kernels import SOURCE, DeviceKernels
from offload.device.arithmetic.driver import PARAMETER_NBYTES
from offload.step.updates import chunk_arithmetic

THREADS = 64
"""Of a block: two warps, and few enough for one host thread each."""


@functools.lru_cache
def library(source: str = "host_cuda.cpp") -> ctypes.CDLL:
    """A file of this folder around the kernels, compiled once in a run; skips the test where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to run the CUDA source with")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "host_kernels.so"
        # -O1: no loop of this is worth more; -ffp-contract=off: what is written as two operations stays two.
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", f"-I{SOURCE.parent}"]
        subprocess.run([compiler, *flags, str(Path(__file__).parent / source), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))


class HostLauncher:
    """Runs an entry point to its end. `block_limit`: of a launch, to have each thread take several turns."""

    def __init__(self, block_limit: int = 3) -> None:
        self._library, self._block_limit = library(), block_limit

    def __call__(self, name: str, block_count: int, parameter: bytes) -> None:
        what, source, target = name.removeprefix("offload_").replace("_pieces", "").split("_")
        function = getattr(self._library, f"run_{what}")
        function.restype = None
        leading = (int(source), int(target), min(block_count, self._block_limit), THREADS)
        function(*map(ctypes.c_int, leading), ctypes.create_string_buffer(parameter, PARAMETER_NBYTES))


def host_kernels(block_limit: int = 3) -> DeviceKernels:
    return DeviceKernels(HostLauncher(block_limit))


@contextmanager
def launched_by(compiled: DeviceKernels) -> Iterator[None]:
    """What is computed on CPU tensors is launched, as of a device's, rather than done by the native library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_kernels, "of", lambda device: compiled)
        for module in (kernels, optimizer_step, ingest_table, chunk_arithmetic):
            patch.setattr(module, "uses_native", lambda tensor: False)
        yield
