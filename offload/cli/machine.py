# SPDX-License-Identifier: Apache-2.0
"""What this machine and installation are, for `info` and `probe`: nothing here is measured."""

from __future__ import annotations

import os
import resource
from contextlib import closing
from pathlib import Path

import psutil
import torch

from offload import _native
from offload.cli.text import format_nbytes
from offload.device.arithmetic import compiled_kernels
from offload.device.host_memory.memory_limits import host_memory_limits
from offload.errors import ConfigError
from offload.tiers.io import BACKEND_NAMES, open_backend

ENVIRONMENT = (
    ("OFFLOAD_ACCELERATOR", "cuda, cpu or deferred (tests): the device; default cuda where torch finds one"),
    ("OFFLOAD_IO", "io_uring, threads or aiofiles: file I/O; default the best that works"),
    ("OFFLOAD_THREADS", "a count: threads of the native library; default physical cores"),
    ("OFFLOAD_VERIFY", "0: do not compare what is read from scratch files with what was written; default 1"),
    ("OFFLOAD_AVERAGE", "compute: round gradients' averages over ranks to the compute dtype; default fp32"),
    ("OFFLOAD_DEVICE_NBYTES", "bytes: device memory that the deferred accelerator (tests) is taken to have"),
    ("OFFLOAD_SEED", "a number: in which order the deferred accelerator (tests) does its work; default 0"),
    ("OFFLOAD_NATIVE", "0: run without the native library; a path: load that one"),
)

Row = tuple[str, str]


def native_rows() -> list[Row]:
    """The native library: there or not, and what was built."""
    if not _native.available():
        return [("native library", f"missing: {_native.unavailable_reason()}")]
    return [
        ("native library", "loaded"),
        ("built", _native.build_info()),
        ("SIMD in use", _native.simd_level()),
        ("native threads", str(_native.default_threads().count)),
    ]


def backend_rows() -> list[Row]:
    """Every I/O backend, best first: whether it works here, and why not."""
    rows: list[Row] = []
    for name in BACKEND_NAMES:
        try:
            open_backend(name).close()
        except ConfigError as error:
            rows.append((name, " ".join(str(error.__cause__ or error).split())))
        else:
            rows.append((name, "works"))
    return rows


def chosen_backend() -> str:
    """The name of the backend that a run would use. Raises `ConfigError` where none works."""
    with closing(open_backend()) as backend:
        return backend.name


def accelerator_rows() -> list[Row]:
    """The devices torch sees."""
    rows: list[Row] = [("cpu", "always there")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            rows.append((f"cuda:{index}", f"{device.name}, {format_nbytes(device.total_memory)}"))
    elif torch.version.cuda is None:
        rows.append(("cuda", "torch was built without it"))
    else:
        rows.append(("cuda", f"torch was built with CUDA {torch.version.cuda} and finds no device"))
    rows.append(("CUDA kernels", _cuda_kernels()))
    return rows


def _cuda_kernels() -> str:
    # Without a device: one of those that every build compiles for.
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    if compiled_kernels.compiled_path(capability) is None:
        return "torch operations, the same bits (without offload-cuda, and built without OFFLOAD_CUDA_KERNELS=ON)"
    return "compiled ahead"


def system_rows() -> list[Row]:
    """Cores, memory, and the limits that decide how fast buffers are."""
    cores, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
    limits = host_memory_limits()
    memory, least = limits[0], min(limits, key=lambda limit: limit.free_nbytes)
    bound = f"; {format_nbytes(least.free_nbytes)} by {least.name}" if least is not memory else ""
    return [
        ("physical cores", f"{cores or 'unknown'} ({logical} logical, {len(os.sched_getaffinity(0))} usable here)"),
        ("host memory", f"{format_nbytes(memory.total_nbytes)}, {format_nbytes(memory.free_nbytes)} available{bound}"),
        ("locked memory limit", _limit_text(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])),
        ("transparent huge pages", _huge_page_setting()),
    ]


def _limit_text(nbytes: int) -> str:
    return "none" if nbytes == resource.RLIM_INFINITY else format_nbytes(nbytes)


def _huge_page_setting() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError as error:
        return f"unknown ({error.strerror})"
    chosen = text.partition("[")[2].partition("]")[0]
    effect = {"always": "granted", "madvise": "granted, as buffers ask for them", "never": "not granted: I/O is slower"}
    return f"{chosen} ({effect[chosen]})" if chosen in effect else text.strip()
