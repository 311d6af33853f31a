# SPDX-License-Identifier: Apache-2.0
"""The binding to `native/`, but for file I/O (`_native_io.py`): the only two places that see pointers.

Everything here takes addresses (`tensor.data_ptr()`) and sizes as integers and knows no torch. The meaning of each
function is written in `native/include/offload.h`; here is what Python adds: a failure is an `OSError` with its errno,
objects free what they own when they are closed or collected, and every call releases the GIL.

The library may be missing (installed without a compiler, another ABI, switched off by `OFFLOAD_NATIVE=0`): then
`available()` is False and everything else here raises `OSError` (ENOSYS). `OFFLOAD_NATIVE=/a/path` loads that library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from ctypes import byref, c_int32, c_int64, c_uint64, c_void_p
from typing import NamedTuple

import numpy as np

from offload._native_library import (
    IngestPartStructure,
    SummedMemory as SummedMemory,
    SummedMemoryStructure,
    UpdateArguments as UpdateArguments,
    UpdateSegmentStructure,
    load,
)
from offload.errors import ConfigError

F32, BF16, F16 = 0, 1, 2
STATE_FORMATS = {"fp32": 0, "split": 1, "bf16": 2, "8bit": 3}
RULES = {"adam": 0, "lion": 1, "adagrad": 2, "sgd": 3}
SIMD_LEVELS = {"scalar": 0, "avx2": 1, "avx512": 2, "neon": 3}

HUGE_PAGE_NBYTES = 2 << 20
STREAM_STEP_NUMEL = 64  # `stream` takes whole steps
CHECKSUM_BLOCK_NBYTES = 4096

_EXACT_SUM_DIGITS = 70

_library, _unavailable_reason = load()
_warned = False


def available() -> bool:
    """Whether the native library is loaded."""
    return _library is not None


def unavailable_reason() -> str:
    """Why it is not, in words for the user; empty if it is."""
    return _unavailable_reason


def warn_if_missing() -> None:
    """Warn, once in a process, that slower replacements are used."""
    global _warned
    if _library is None and not _warned:
        _warned = True
        warnings.warn(
            f"offload runs without its native library ({_unavailable_reason}): torch does the math and aiofiles "
            "the I/O; results are the same, speed is not",
            RuntimeWarning,
            stacklevel=3,
        )


def loaded() -> ctypes.CDLL:
    """The library; `OSError` (ENOSYS) where it is missing."""
    if _library is None:
        raise OSError(errno.ENOSYS, f"the native library is missing: {_unavailable_reason}")
    return _library


def check(status: int, operation: str) -> None:
    """Raise what the library returned, if that is no success."""
    if status != 0:
        raise OSError(-status, f"{operation}: {os.strerror(-status)}")


def build_info() -> str:
    """One line: ABI, compiler, io_uring or not, SIMD paths."""
    return bytes(loaded().offload_build_info()).decode()


def simd_level() -> str:
    """The SIMD path in use: a key of `SIMD_LEVELS`."""
    level = int(loaded().offload_simd_level())
    return next(name for name, code in SIMD_LEVELS.items() if code == level)


def set_simd_level(name: str | None) -> None:
    """Choose a path (None: the best); `OSError` ENOTSUP where the build or the processor lacks it. For tests."""
    code = -1 if name is None else SIMD_LEVELS[name]
    check(loaded().offload_set_simd_level(code), f"set_simd_level({name!r})")


class Owner:
    """Owns one object of the library, which `close`, or else the collector, destroys."""

    _destroy = ""
    pointer: c_void_p | None = None

    def close(self) -> None:
        """End its threads, after what they were given to do. No other call on it may be running; a second close is
        nothing. In a forked child it is nothing too: the threads are the parent's."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None and _library is not None:
            check(getattr(_library, self._destroy)(pointer), self._destroy)

    def __del__(self) -> None:
        self.close()


class Threads(Owner):
    """A pool of threads (`count` 0: one per physical core in the affinity mask); its callers take turns."""

    _destroy = "offload_threads_destroy"

    def __init__(self, count: int = 0) -> None:
        pointer = c_void_p()
        check(loaded().offload_threads_create(count, byref(pointer)), f"Threads({count})")
        self.pointer = pointer
        self.count = int(loaded().offload_threads_count(pointer))

    def stay_awake(self) -> None:
        """Wait longer for the next operation before its threads sleep (`offload_threads_stay_awake`)."""
        if hasattr(loaded(), "offload_threads_stay_awake"):  # a library of this ABI version may lack it
            check(loaded().offload_threads_stay_awake(self.pointer), "stay_awake")


_default_threads: Threads | None = None
_default_lock = threading.Lock()
_device_computes = False


THREADS_VARIABLE = "OFFLOAD_THREADS"
_ALONE_NUMEL, _HANDED_OUT_NUMEL = 4 * 2**20, 128 * 2**10
_caller_alone: Threads | None = None


def default_threads() -> Threads:
    """The pool of this process, made when first asked for (in a forked child: anew)."""
    global _default_threads
    threads = _default_threads
    if threads is None:
        with _default_lock:
            threads = _default_threads = _default_threads or _made(_asked_for_count())
    return threads


def _made(count: int) -> Threads:
    threads = Threads(count)
    if _device_computes:
        threads.stay_awake()
    return threads


def device_computes() -> None:
    """From now on a device computes the models of this process: the cores are there for the default pool."""
    global _device_computes
    with _default_lock:
        _device_computes = True
        if _default_threads is not None:
            _default_threads.stay_awake()


def _asked_for_count() -> int:
    """The environment variable OFFLOAD_THREADS; 0 (physical cores) where it is not set."""
    text = os.environ.get(THREADS_VARIABLE, "") or "0"
    if not text.isdigit():
        raise ConfigError(
            f"{THREADS_VARIABLE}={text!r} is not a count of threads: expected 1, 2, ..., or 0 for physical cores."
        )
    return int(text)


def _threads_for(numel: int, *, all_cores: bool) -> Threads:
    """The caller alone for a piece that one core streams in about a millisecond.

    Where torch computes on the same cores its threads spin between operations: a second thread of ours would wait for one
    of them to be descheduled, which takes longer than the whole piece. `all_cores`: it does not, so the caller is alone only
    for what takes no longer than to wake the others.
    """
    global _caller_alone
    if numel > (_HANDED_OUT_NUMEL if all_cores else _ALONE_NUMEL):
        return default_threads()
    if _caller_alone is None:
        _caller_alone = Threads(1)
    return _caller_alone


def set_thread_count(count: int) -> None:
    """Replace the default pool by one of `count` threads (0: physical cores); operations that run keep the old one."""
    global _default_threads
    with _default_lock:
        _default_threads = _made(count)


def _forget_after_fork() -> None:
    # The child has no worker threads, and another thread may have held the lock.
    global _default_threads, _default_lock
    _default_threads, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def update(segments: Sequence[UpdateArguments]) -> None:
    """One optimizer step on every segment (`offload_update`)."""
    array = (UpdateSegmentStructure * len(segments))(*segments)  # type: ignore[misc]  # a tuple fills a structure
    update_rows(array, len(segments))


UPDATE_ROW = np.dtype(UpdateSegmentStructure)
"""An `offload_update_segment` in an array."""


def update_rows(rows: int | ctypes.Array[UpdateSegmentStructure], count: int, summed: Sequence[SummedMemory] = ()) -> None:
    """The same on a table of `UPDATE_ROW`, or where it lies. `summed`: of what the checksums are taken on the way
    (`offload_update_summed`)."""
    pool = default_threads().pointer
    if not summed:
        check(loaded().offload_update(pool, rows, count), f"update of {count} segments")
        return
    memories = (SummedMemoryStructure * len(summed))(*summed)  # type: ignore[misc]  # a tuple fills a structure
    status = loaded().offload_update_summed(pool, rows, count, memories, len(summed))
    check(status, f"update of {count} segments with checksums")


class Values(NamedTuple):
    """Where numbers lie (0: nowhere), and the code of their dtype."""

    address: int
    dtype: int


def gradient_ingest(
    dst: Values,
    src: Values,
    numel: int,
    start_index: int,
    accumulate: bool,
    block_sums: int,
    checksums: int = 0,
    *,
    all_cores: bool = False,
) -> None:
    """Copy or add a gradient, sum its squares by blocks and take the checksums of what is stored (`offload_gradient_ingest`).
    `dst`, `block_sums` and `checksums` may be nowhere. `all_cores`: none of them computes the model."""
    pool = _threads_for(numel, all_cores=all_cores)
    status = loaded().offload_gradient_ingest(
        pool.pointer,
        dst.address or None,
        dst.dtype,
        *src,
        numel,
        start_index,
        int(accumulate),
        block_sums or None,
        checksums or None,
    )
    if status:
        check(status, f"gradient_ingest(numel={numel}, start_index={start_index})")


class IngestParts:
    """Of gradients that lie side by side in a buffer, each (numel, start_index, where its sums go): to be told once. One thread
    at a time."""

    def __init__(self, first_index: int, parts: Sequence[tuple[int, int, int]]) -> None:
        """`first_index`: of the buffer's first element."""
        self._first_index, self._count, self._most = first_index, len(parts), max(numel for numel, _, _ in parts)
        self._parts = (IngestPartStructure * self._count)(*(IngestPartStructure(*part) for part in parts))
        self._sources = (c_void_p * self._count)()

    def ingest(self, dst: Values, sources: Iterable[int]) -> None:
        """`gradient_ingest` of all into `dst`, in whose dtype they are (`offload_gradients_ingest`)."""
        self._sources[:] = list(sources)
        pool = _threads_for(self._most, all_cores=False)
        status = loaded().offload_gradients_ingest(
            pool.pointer, *dst, self._first_index, self._parts, self._sources, self._count
        )
        if status:
            check(status, f"gradient_ingest of {self._count} gradients from {self._first_index} on")


def convert(dst: Values, src: Values, numel: int, *, all_cores: bool = False) -> None:
    """dst = src, cast (`offload_convert`). `all_cores`: none of them computes the model."""
    pool = _threads_for(numel, all_cores=all_cores)
    check(loaded().offload_convert(pool.pointer, *dst, *src, numel), f"convert(numel={numel})")


def exact_sum(arrays: Sequence[tuple[int, int]]) -> int | None:
    """The exact sum of arrays of doubles, each given as (address, count), in units of the smallest double, 2**-1074
    (`offload_exact_sum`). None: an element is infinite or NaN."""
    library, digits = loaded(), (ctypes.c_uint32 * _EXACT_SUM_DIGITS)()
    addresses = (c_void_p * len(arrays))(*[address for address, _ in arrays])
    counts = (c_int64 * len(arrays))(*[count for _, count in arrays])
    status = library.offload_exact_sum(addresses, counts, len(arrays), digits)
    if status == -errno.EDOM:
        return None
    check(status, f"exact_sum of {len(arrays)} arrays")
    return int.from_bytes(bytes(digits), "little", signed=True)


def checksum(address: int, nbytes: int, sums: int = 0) -> int:
    """A 64-bit checksum of memory, the same within one build on one machine (`offload_checksum`). `sums`: where those of its
    blocks are, as far as they are known; 0: nowhere."""
    out = c_uint64()
    check(loaded().offload_checksum(address, nbytes, sums or None, byref(out)), f"checksum of {nbytes} bytes")
    return out.value


def checksum_of_blocks(sums: int, nbytes: int) -> int:
    """`checksum` of memory whose blocks have these sums (`offload_checksum_of_blocks`)."""
    out = c_uint64()
    check(loaded().offload_checksum_of_blocks(sums, nbytes, byref(out)), f"checksum of the blocks of {nbytes} bytes")
    return out.value


def stream(reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]], numel: int) -> None:
    """Read and write arrays, each given as (address, bytes per element), and nothing else: the floor of a benchmark
    (`offload_stream`). `numel`: a multiple of STREAM_STEP_NUMEL."""

    def columns(arrays: Sequence[tuple[int, int]]) -> tuple[object, object, int]:
        count = len(arrays)
        return (c_void_p * count)(*(one[0] for one in arrays)), (c_int32 * count)(*(one[1] for one in arrays)), count

    status = loaded().offload_stream(default_threads().pointer, *columns(reads), *columns(writes), numel)
    check(status, f"stream(numel={numel})")


class _Mapping:
    """Memory that `_unmap` gives back when it is closed, or when nothing refers to it or its buffers any more."""

    _unmap = ""
    address: int = 0
    nbytes: int = 0

    def buffer(self) -> memoryview:
        """The bytes, writable; keeps the mapping alive. `close` does not look whether one is still in use."""
        array = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        array._owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")

    def close(self) -> None:
        """Unmap it. Nothing may use the memory any more."""
        address, self.address = self.address, 0
        if address and _library is not None:
            check(getattr(_library, self._unmap)(address, self.nbytes), f"unmap {self.nbytes} bytes")

    def __del__(self) -> None:
        self.close()


class Arena(_Mapping):
    """Zeroed anonymous memory on a 2 MiB boundary; `nbytes`: what was asked for, rounded up to whole pages, no more."""

    _unmap = "offload_arena_destroy"

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        out, mapped = c_void_p(), c_int64()
        check(loaded().offload_arena_create(nbytes, int(huge_pages), byref(out), byref(mapped)), f"Arena of {nbytes} bytes")
        self.address, self.nbytes = out.value or 0, mapped.value


class PageRange(_Mapping):
    """Reserved addresses on a 2 MiB boundary, without memory until `pages_move` brings some. `nbytes`: n x 2 MiB."""

    _unmap = "offload_pages_release"

    def __init__(self, nbytes: int) -> None:
        out = c_void_p()
        check(loaded().offload_pages_reserve(nbytes, byref(out)), f"PageRange of {nbytes} bytes")
        self.address, self.nbytes = out.value or 0, nbytes


def pages_supported() -> bool:
    """Whether `pages_move` works on this kernel (probed once)."""
    return _library is not None and bool(_library.offload_pages_supported())


def pages_move(source: int, destination: int, nbytes: int) -> None:
    """Move whole pages between addresses without a copy (`offload_pages_move`)."""
    check(loaded().offload_pages_move(source, destination, nbytes), f"pages_move of {nbytes} bytes")
