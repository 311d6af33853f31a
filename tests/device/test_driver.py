# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels are launched by the CUDA driver, which is played here by a library that runs them on the host.

So what is launched has the arguments, the stream and the context that the kernels need, or a code of the driver's says not.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.device.arithmetic import compiled_kernels, driver, kernels
from offload.device.arithmetic.compiled_kernels import DeviceKernels, Launcher
from offload.device.arithmetic.driver import DriverError
from offload.device.arithmetic.optimizer_step import update
from tests.device.host_kernels import launched_by, library
from tests.device.kernel_files import kernel_files_under, no_kernels_loaded
from tests.native import exact
from tests.native.adam_cases import HYPER, Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda", 1)
STREAM = (1 << 47) + 16  # an address that 32 bits do not hold


def driver_is(patch: pytest.MonkeyPatch, path: str) -> None:
    """In the place of the library by which the system knows the driver."""
    load = ctypes.CDLL
    patch.setattr(ctypes, "CDLL", lambda name, *given, **named: load(path if name == "libcuda.so.1" else name, *given, **named))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """The library in the driver's place, with one file of kernels beside the package."""
    found = library("fake_driver.cpp")
    found.fake_reset()
    found.fake_log.restype = ctypes.c_char_p
    (kernel_files_under(monkeypatch, tmp_path) / "offload_cuda_kernels.fatbin").write_bytes(b"\x50\xed\x55\xba")
    driver_is(monkeypatch, found._name)
    no_kernels_loaded(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {1: STREAM}.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    full, empty = torch.full, torch.empty
    monkeypatch.setattr(torch, "full", lambda *given, device=None, **named: full(*given, **named))
    monkeypatch.setattr(torch, "empty", lambda *given, device=None, **named: empty(*given, **named))
    yield found
    found.fake_reset()


def made(path: str = "/somewhere/kernels.fatbin") -> DeviceKernels:
    return DeviceKernels(Launcher(Path(path), 1))


@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("emit", [None, *DTYPES])
def test_adam_through_the_driver(played: ctypes.CDLL, grad: torch.dtype, emit: torch.dtype | None) -> None:
    """Every argument reaches its parameter: the results are the CPU's, to the bit."""
    expected, ours = (Case(137, 3, grad=grad, emit=emit, specials=True) for _ in range(2))
    update([expected.segment(HYPER, 7, 0.3)])
    with launched_by(made()):
        update([ours.segment(HYPER, 7, 0.3)])
    for one, other in zip(ours.results(), expected.results(), strict=True):
        assert exact.same_bits(one, other)


@pytest.mark.parametrize("accumulate", [False, True])
def test_ingest_and_casts_through_the_driver(played: ctypes.CDLL, accumulate: bool) -> None:
    src = exact.rough_values(9001, torch.Generator().manual_seed(1), specials=True)
    ours, expected = (torch.ones(9001, dtype=torch.bfloat16) for _ in range(2))
    expected_sums = kernels.ingest_async(expected, src, 4032, accumulate)
    sums = torch.full_like(expected_sums, -1.0)
    with launched_by(made()):
        kernels.ingest_async(ours, src, 4032, accumulate, sums)
    assert exact.same_bits(ours, expected) and exact.same_bits(sums, expected_sums)
    made().convert(ours, src)
    kernels.convert(expected, src)
    assert exact.same_bits(ours, expected)


def test_pieces_through_the_driver(played: ctypes.CDLL) -> None:
    """The longest parameter, and then a short one in the memory of the same thread."""
    count = compiled_kernels.ADAM_PIECES_MOST + 1
    expected, ours = ([Case(5, seed, grad=torch.float32, emit=None, specials=True) for seed in range(count)] for _ in range(2))
    update([one.segment(HYPER, 7, 0.3) for one in expected])
    parts = [(None, one.grad, 0) for one in ours for _ in range(3)]
    with launched_by(made()):
        update([one.segment(HYPER, 7, 0.3) for one in ours])
        sums = kernels.ingest_all(parts)
    for one, other in zip(ours, expected, strict=True):
        assert all(exact.same_bits(*both) for both in zip(one.results(), other.results(), strict=True))
    assert all(exact.same_bits(*both) for both in zip(sums, kernels.ingest_all(parts), strict=True))
    names = [line.split()[1] for line in played.fake_log().decode().splitlines()]
    assert names[1:] == 2 * ["offload_adam_pieces_0_3"] + 2 * ["offload_ingest_pieces_0_3"]


def test_a_launch_goes_to_torchs_stream_in_the_devices_context(played: ctypes.CDLL) -> None:
    """From a thread that has no context, and from one that has another; each is left as it was."""
    launch = made()
    src, dst = torch.ones(10), torch.zeros(10, dtype=torch.bfloat16)
    depths: list[int] = []

    def other_thread() -> None:
        launch.convert(dst, src)
        played.fake_enter_other_context()
        launch.convert(dst, src)
        depths.append(played.fake_context_depth())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert depths == [1] and played.fake_context_depth() == 0 and torch.equal(dst, src.bfloat16())
    lines = played.fake_log().decode().splitlines()
    assert lines == ["load /somewhere/kernels.fatbin", *2 * [f"launch offload_convert_0_1 1 256 stream {STREAM}"]]


def test_a_grid_is_no_larger_than_it_may_be(played: ctypes.CDLL) -> None:
    src, dst = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    launcher = Launcher(Path("k"), 1)
    parameters: list[bytes] = []
    DeviceKernels(lambda name, blocks, parameter: parameters.append(parameter)).convert(dst, src)
    launcher("offload_convert_0_1", 1 << 40, parameters[0])
    assert f" {1 << 20} 256 " in played.fake_log().decode()


@pytest.mark.parametrize("name", ["cuCtxPushCurrent_v2", "cuLaunchKernel", "cuCtxPopCurrent_v2"])
def test_a_launch_that_fails_leaves_the_context(played: ctypes.CDLL, name: str) -> None:
    launch = made()
    played.fake_fail(name.encode(), 700)
    with pytest.raises(DriverError, match=rf"{name}.* failed on cuda:1 with CUDA error 700, CUDA_ERROR_ILLEGAL_ADDRESS: an il"):
        launch.convert(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    assert played.fake_context_depth() == 0


@pytest.mark.parametrize("name", sorted(set(driver._SIGNATURES) - {"cuGetErrorName", "cuGetErrorString"}))
def test_every_code_is_looked_at(played: ctypes.CDLL, name: str) -> None:
    """A call that fails is named with the code's own name and words; at `prepare` it is a warning, once, and torch does it."""
    played.fake_fail(name.encode(), 700)
    with pytest.raises(DriverError, match=rf"{name}.* failed on cuda:1 with CUDA error 700, CUDA_ERROR_ILLEGAL_ADDRESS: an il"):
        made().convert(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    with pytest.warns(RuntimeWarning, match=rf"cannot be used \({name}.*ten times the traffic") as said:
        compiled_kernels.prepare(DEVICE)
    assert len(said) == 1 and compiled_kernels.of(DEVICE) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_kernels.prepare(DEVICE)


def test_a_code_that_the_driver_has_no_words_for(played: ctypes.CDLL) -> None:
    played.fake_fail(b"cuModuleLoad", 999)
    with pytest.raises(DriverError, match=r"cuModuleLoad \(k\) failed on cuda:1 with CUDA error 999, which the"):
        made("k")


def test_prepare_loads_the_file_and_tries_a_kernel(played: ctypes.CDLL, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_kernels.prepare(DEVICE)
    assert compiled_kernels.of(DEVICE) is not None and compiled_kernels.of(torch.device("cpu")) is None
    lines = played.fake_log().decode().splitlines()
    assert lines[0] == f"load {tmp_path / 'offload_cuda' / 'offload_cuda_kernels.fatbin'}"
    assert [line.split()[1] for line in lines[1:]] == ["offload_ingest_pieces_0_3"]


def test_without_a_driver_or_kernels_it_is_said(played: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        driver_is(patch, "libcuda-of-no-machine.so.1")
        with pytest.warns(RuntimeWarning, match="cannot open shared object file"):
            compiled_kernels.prepare(DEVICE)
    (tmp_path / "offload_cuda" / "offload_cuda_kernels.fatbin").unlink()
    compiled_kernels._prepared.clear()
    with pytest.warns(RuntimeWarning, match=r"built without them for compute capability 8\.9"):
        compiled_kernels.prepare(DEVICE)
    assert compiled_kernels.of(DEVICE) is None


def test_the_file_for_a_device(played: ctypes.CDLL, tmp_path: Path) -> None:
    """nvcc's file first; of NVRTC's the nearest of the same major that is not later."""
    folder = tmp_path / "offload_cuda"
    for name in ("sm_80", "sm_86", "sm_90", "sm_120"):
        (folder / f"offload_cuda_kernels.{name}.cubin").write_bytes(b"")
    assert compiled_kernels.compiled_path((9, 0)) == folder / "offload_cuda_kernels.fatbin"
    (folder / "offload_cuda_kernels.fatbin").unlink()
    found = {
        capability: compiled_kernels.compiled_path(capability) for capability in ((8, 9), (8, 0), (12, 1), (7, 5), (10, 0))
    }
    names = {capability: path.suffixes[-2] if path is not None else None for capability, path in found.items()}
    assert names == {(8, 9): ".sm_86", (8, 0): ".sm_80", (12, 1): ".sm_120", (7, 5): None, (10, 0): None}
