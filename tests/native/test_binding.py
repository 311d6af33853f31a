# SPDX-License-Identifier: Apache-2.0
"""Loading the library, threads, and life without it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from offload import _native, _native_library
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import Segment

needs_library = pytest.mark.skipif(not _native.available(), reason="the native library is not built")
HEADER = Path(__file__).parents[2] / "native" / "include" / "offload.h"


_ALONE = f"""
import sys, types
package = sys.modules["offload"] = types.ModuleType("offload")
package.__path__ = [{str(Path(_native.__file__).parent)!r}]
"""
"""So a process begins with nothing but the binding, which knows no torch: importing that takes longest."""


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_declared_abi_is_the_headers() -> None:
    header = HEADER.read_text()
    version = re.search(r"#define OFFLOAD_ABI_VERSION (\d+)", header)
    assert version is not None
    assert int(version[1]) == _native_library.ABI_VERSION
    names = set(re.findall(r"OFFLOAD_API [\w* ]*?(offload_\w+)\(", header))
    assert set(_native_library._SIGNATURES) <= names
    body = re.search(r"typedef struct offload_update_segment \{(.*?)\}", header, re.DOTALL)
    assert body is not None
    assert tuple(re.findall(r"(\w+);", body[1])) == _native.UpdateArguments._fields


@needs_library
def test_the_build_says_what_it_is() -> None:
    assert re.match(r"abi \d+; compiler .*; io_uring (yes|no) .*; simd scalar", _native.build_info())
    assert _native.simd_level() in _native.SIMD_LEVELS
    assert _native.unavailable_reason() == ""


def test_without_the_library_there_is_one_warning_and_the_math_goes_on() -> None:
    code = """
import warnings, torch
from offload import _native
from offload.device.arithmetic import kernels
assert not _native.available()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _native.warn_if_missing(); _native.warn_if_missing()
assert len(caught) == 1 and "OFFLOAD_NATIVE=0" in str(caught[0].message), caught
try:
    _native.Threads()
except OSError as error:
    print(error.errno)
print(kernels.ingest_async(None, torch.ones(4097), 0, False).tolist())
"""
    assert _run(code, OFFLOAD_NATIVE="0").split("\n") == [str(errno.ENOSYS), "[4096.0, 1.0]"]


def test_a_library_that_cannot_be_used_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    code = _ALONE + "from offload import _native; print(_native.available(), _native.unavailable_reason())"
    assert "was not found" in _run(code, OFFLOAD_NATIVE=str(tmp_path / "absent.so"))
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert "cannot be used" in _run(code, OFFLOAD_NATIVE=str(tmp_path / "broken.so"))


@needs_library
def test_another_abi_version_is_refused() -> None:
    code = f"""{_ALONE}
from offload import _native_library
_native_library.ABI_VERSION = 999
print(_native_library.load())
"""
    assert "this package needs 999" in _run(code)


@needs_library
def test_threads_do_not_follow_omp_num_threads() -> None:
    code = _ALONE + "from offload import _native; print(_native.default_threads().count)"
    assert _run(code, OMP_NUM_THREADS="1") == _run(code, OMP_NUM_THREADS="64")
    one_cpu = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + code
    assert _run(one_cpu) == "1"


@needs_library
def test_bad_thread_counts_are_refused() -> None:
    for count in (-1, 1025):
        with pytest.raises(OSError) as caught:
            _native.Threads(count)
        assert caught.value.errno == errno.EINVAL


@needs_library
def test_threads_that_there_is_no_memory_for_are_an_error() -> None:
    """Also that the library throws and catches, with whichever C++ library it was linked."""
    code = f"""{_ALONE}
import errno, resource
from offload import _native
assert _native.available()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
try:
    _native.Threads(1024)
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert _run(code) == "EAGAIN"


def _segment(numel: int = 100_000) -> Segment:
    hyper = Hyper(Rule.ADAM, 1e-3, 0.9, 0.999, 1e-8, decoupled=True)
    arrays = {"master": torch.ones(numel), "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
    return Segment(torch.ones(numel), arrays, None, hyper, 1)


@needs_library
def test_several_callers_share_one_pool() -> None:
    _native.set_thread_count(3)
    segments = [_segment() for _ in range(4)]

    def work(segment: Segment) -> None:
        for _ in range(20):
            update([segment])

    threads = [threading.Thread(target=work, args=(segment,)) for segment in segments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(segment.master, segments[0].master) for segment in segments)
    assert bool((segments[0].master < 1).all())


@needs_library
def test_a_pool_that_stays_awake_computes_the_same() -> None:
    found = [_segment() for _ in range(2)]
    for segment, stays_awake in zip(found, (True, False), strict=True):
        _native.set_thread_count(8)
        if stays_awake:
            _native.default_threads().stay_awake()
        for _ in range(20):
            update([segment])
    assert torch.equal(*(segment.master for segment in found))


@needs_library
def test_default_pools_stay_awake_once_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    awake: list[_native.Threads] = []
    monkeypatch.setattr(_native, "_default_threads", None)
    monkeypatch.setattr(_native, "_device_computes", False)
    monkeypatch.setattr(_native.Threads, "stay_awake", lambda pool: awake.append(pool))
    _native.set_thread_count(2)
    first = _native.default_threads()
    assert not awake
    _native.device_computes()
    assert awake == [first]
    _native.set_thread_count(8)
    assert awake == [first, _native.default_threads()]


@needs_library
def test_a_forked_child_computes_and_the_parent_goes_on() -> None:
    """Small tensors: torch's own OpenMP threads would hang in the child."""
    _native.set_thread_count(2)
    old_pool = _native.default_threads()
    expected, in_child, in_parent = ([_segment(20_000) for _ in range(3)] for _ in range(3))
    update(expected)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            update(in_child)  # by a new pool
            old_pool.close()
            same = all(a.master.tolist() == b.master.tolist() for a, b in zip(in_child, expected, strict=True))
            status = 0 if same and _native.default_threads() is not old_pool else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    update(in_parent)
    assert all(torch.equal(a.master, b.master) for a, b in zip(in_parent, expected, strict=True))


@needs_library
def test_stream_writes_all_of_what_it_is_to_write_and_nothing_else() -> None:
    _native.set_thread_count(2)
    numel = 64 * 1567
    reads = [torch.randint(1, 100, (numel * nbytes,), dtype=torch.uint8) for nbytes in (4, 2, 1)]
    writes = [torch.zeros(numel * nbytes + 64, dtype=torch.uint8) for nbytes in (2, 1)]
    before = [tensor.clone() for tensor in reads]
    _native.stream(
        [(tensor.data_ptr(), tensor.numel() // numel) for tensor in reads],
        [(tensor.data_ptr(), tensor.numel() // numel) for tensor in writes],
        numel,
    )
    assert all(torch.equal(*pair) for pair in zip(reads, before, strict=True))
    for tensor in writes:
        assert not tensor[-64:].any()
        assert (tensor[:-64].view(-1, 64).amax(1) > 0).all()  # an exclusive or of random bytes is not 64 zeros
    for bad in (([], [], 64), ([(1, 4)], [], 65), ([(1, 5)], [], 64), ([(0, 4)], [], 64), ([(1, 4)] * 9, [], 64)):
        with pytest.raises(OSError):
            _native.stream(*bad)


@needs_library
def test_null_and_nonsense_are_refused() -> None:
    good = _native.UpdateArguments(1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0.1, 0.9, 0.9, 1e-8, 0.0, 1.0, 0, 0, 0, 0, 1, 0)
    eight_bit = {"state_format": 3, "values": 1, "values_dtype": 1, "exp_avg_scale": 1, "exp_avg_sq_scale": 1}
    for bad in (
        {"master": 0},
        {"numel": -1},
        {"step": 0},
        {"grad_dtype": 7},
        {"values": 1, "values_dtype": 9},
        {"decoupled": 2},
        {"nesterov": -1},
        {"rule": 4},
        {"state_format": 4},
        {"first_index": -1},
        {"exp_avg": 0},
        {"rule": 2, "exp_avg_sq": 0},
        {"rule": 3, "exp_avg": 0},
        {"state_format": 1},
        {"state_format": 2, "values": 1, "values_dtype": 2},
        eight_bit | {"exp_avg_scale": 0},
        eight_bit | {"exp_avg_sq_scale": 0},
        eight_bit | {"first_index": 32},
    ):
        with pytest.raises(OSError) as caught:
            _native.update([good._replace(**bad)])
        assert caught.value.errno == errno.EINVAL
    for *places, numel, start_index in ((0, 0, 0, 0, 5, 0), (1, 0, 1, 0, 5, 32), (1, 5, 1, 0, 5, 0)):
        with pytest.raises(OSError) as caught:
            dst, src = _native.Values(*places[:2]), _native.Values(*places[2:])
            _native.gradient_ingest(dst, src, numel, start_index, False, 0)
        assert caught.value.errno == errno.EINVAL
    dst, src = torch.zeros(192), torch.ones(5)
    for place, first_index, start_index, numel, source in (
        ((0, 0), 64, 128, 5, src.data_ptr()),
        ((dst.data_ptr(), 9), 64, 128, 5, src.data_ptr()),
        ((dst.data_ptr(), 0), -64, 128, 5, src.data_ptr()),
        ((dst.data_ptr(), 0), 64, 0, 5, src.data_ptr()),
        ((dst.data_ptr(), 0), 64, 96, 5, src.data_ptr()),
        ((dst.data_ptr(), 0), 64, 128, -1, src.data_ptr()),
        ((dst.data_ptr(), 0), 64, 128, 5, 0),
    ):
        parts = _native.IngestParts(first_index, [(5, max(first_index, 64), 0), (numel, start_index, 0)])
        with pytest.raises(OSError) as caught:
            parts.ingest(_native.Values(*place), [src.data_ptr(), source])
        assert caught.value.errno == errno.EINVAL
    assert not dst.any(), "the good one before it is not stored either"
