# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the shared library of `native/`, and declares the C ABI (`native/include/offload.h`) to ctypes."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

ABI_VERSION = 6
LIBRARY_NAME = "liboffload_native.so"


class UpdateArguments(NamedTuple):
    """One `offload_update_segment`: addresses (0: none), sizes, hyperparameters, codes; `step` is from 1."""

    grad: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    exp_avg_scale: int
    exp_avg_sq_scale: int
    values: int
    numel: int
    first_index: int
    source_distance: int
    step: int
    rounding_seed: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_factor: float
    grad_dtype: int
    values_dtype: int
    state_format: int
    rule: int
    decoupled: int
    nesterov: int


class IoResult(NamedTuple):
    """How a transfer ended: 0 or -errno (-ENODATA: the file ended first), the bytes that moved, and the lowest file
    offset at which it failed (-1: it did not)."""

    status: int
    transferred_nbytes: int
    failed_offset: int


class IoTimes(NamedTuple):
    """When a transfer began and ended, by the monotonic clock."""

    began_ns: int
    ended_ns: int


class IoStatistics(NamedTuple):
    """Totals since the engine was made; busy: at least one transfer of that direction was in flight. `registered_nbytes`:
    memory that is registered now; `fixed_nbytes`: of the bytes moved, those from and to such memory."""

    read_nbytes: int
    written_nbytes: int
    read_busy_ns: int
    write_busy_ns: int
    in_flight_count: int
    registered_nbytes: int
    fixed_nbytes: int


_UPDATE_TYPES = 7 * (c_void_p,) + 4 * (c_int64,) + (c_uint64,) + 5 * (c_double,) + (c_float,) + 6 * (c_int32,)


class UpdateSegmentStructure(ctypes.Structure):
    _fields_ = tuple(zip(UpdateArguments._fields, _UPDATE_TYPES, strict=True))


class SummedMemory(NamedTuple):
    """Memory that an update passes over, and where the checksums of its blocks go, uint64: as the update finds it, and as it
    leaves it (0: nowhere)."""

    address: int
    nbytes: int
    before: int
    after: int


class SummedMemoryStructure(ctypes.Structure):
    _fields_ = tuple(zip(SummedMemory._fields, (c_void_p, c_int64, c_void_p, c_void_p), strict=True))


class IngestPartStructure(ctypes.Structure):
    _fields_ = (("numel", c_int64), ("start_index", c_int64), ("block_sums", c_void_p))


class IoResultStructure(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in IoResult._fields)


class IoTimesStructure(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in IoTimes._fields)


class IoStatisticsStructure(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in IoStatistics._fields)


LATER = frozenset({"offload_io_wait_timed", "offload_threads_stay_awake"})
"""Functions that a library of this ABI version may lack: it was built before they were added."""

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "offload_set_simd_level": (c_int32,),
    "offload_threads_create": (c_int32, POINTER(c_void_p)),
    "offload_threads_destroy": (c_void_p,),
    "offload_threads_stay_awake": (c_void_p,),
    "offload_update": (c_void_p, c_void_p, c_int64),
    "offload_update_summed": (c_void_p, c_void_p, c_int64, c_void_p, c_int64),
    "offload_gradient_ingest": (c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p),
    "offload_gradients_ingest": (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64),
    "offload_convert": (c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_int64),
    "offload_exact_sum": (c_void_p, c_void_p, c_int64, c_void_p),
    "offload_checksum": (c_void_p, c_int64, c_void_p, POINTER(c_uint64)),
    "offload_checksum_of_blocks": (c_void_p, c_int64, POINTER(c_uint64)),
    "offload_stream": (c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int64),
    "offload_arena_create": (c_int64, c_int32, POINTER(c_void_p), POINTER(c_int64)),
    "offload_arena_destroy": (c_void_p, c_int64),
    "offload_pages_reserve": (c_int64, POINTER(c_void_p)),
    "offload_pages_release": (c_void_p, c_int64),
    "offload_pages_move": (c_void_p, c_void_p, c_int64),
    "offload_io_create": (c_int32, c_int32, c_int64, POINTER(c_void_p)),
    "offload_io_destroy": (c_void_p,),
    "offload_io_register": (c_void_p, c_void_p, c_int64),
    "offload_io_unregister": (c_void_p, c_void_p),
    "offload_io_submit": (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64, c_int32, POINTER(c_uint64)),
    "offload_io_wait": (c_void_p, c_uint64, c_int64, POINTER(IoResultStructure)),
    "offload_io_wait_timed": (c_void_p, c_uint64, c_int64, POINTER(IoResultStructure), POINTER(IoTimesStructure)),
    "offload_io_poll": (c_void_p, c_uint64, POINTER(IoResultStructure)),
    "offload_io_stats": (c_void_p, POINTER(IoStatisticsStructure)),
}


def installed_paths(name: str) -> list[Path]:
    """Where a built file may lie: beside this file, (editable install) in the package's folder in site-packages, or in the
    package of compiled kernels, offload-cuda."""
    package_paths = list(getattr(sys.modules.get(__package__ or ""), "__path__", []))
    installed = [Path(entry) / package for package in ("offload", "offload_cuda") for entry in sys.path]
    folders = [Path(__file__).parent, *map(Path, package_paths), *installed]
    return [folder / name for folder in dict.fromkeys(folders)]


def load() -> tuple[ctypes.CDLL | None, str]:
    """The library with its signatures declared, or None and the reason."""
    setting = os.environ.get("OFFLOAD_NATIVE", "")
    if setting == "0":
        return None, "switched off by OFFLOAD_NATIVE=0"
    candidates = [Path(setting)] if setting not in ("", "1") else installed_paths(LIBRARY_NAME)
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        where = setting if setting not in ("", "1") else f"{LIBRARY_NAME} beside the package"
        return None, f"{where} was not found; install with a C++ compiler present to build it"
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.offload_abi_version())
        if version != ABI_VERSION:
            return (
                None,
                f"{path} has ABI version {version}, this package needs {ABI_VERSION}; install again to rebuild it",
            )
        for name, argument_types in _SIGNATURES.items():
            function = getattr(library, name, None) if name in LATER else getattr(library, name)
            if function is None:
                continue
            function.argtypes, function.restype = argument_types, c_int
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be used: {error}"
    library.offload_build_info.restype = c_char_p
    library.offload_threads_count.argtypes, library.offload_threads_count.restype = (c_void_p,), c_int32
    return library, ""
