"""The source of the CUDA kernels gives the CPU kernels' bits, run on the host; and both CUDA compilers accept it."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from offload.device import device_kernels, kernels
from offload.device.device_kernels import COMPILE_OPTIONS, SOURCE
from offload.device.updating import update
from tests.device.host_kernels import host_kernels
from tests.native import exact
from tests.native.test_adam import HYPER, Case, adam, segment

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    numel=st.one_of(st.integers(1, 300), st.sampled_from([4096, 8197])),
    seed=st.integers(0, 2**31),
    grad=st.sampled_from(DTYPES),
    emit=st.sampled_from([None, *DTYPES]),
    decoupled=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    beta1=st.sampled_from([0.9, 0.5, 0.4, 0.0]),
    step=st.sampled_from([1, 2, 1000]),
    factor=st.sampled_from([1.0, 1 / 1024, 0.3]),
    at_odd_places=st.booleans(),
)
@settings(max_examples=60)
def test_adam(
    numel: int, seed: int, grad: torch.dtype, emit: torch.dtype | None, decoupled: bool, weight_decay: float,
    beta1: float, step: int, factor: float, at_odd_places: bool,
) -> None:  # fmt: skip
    hyper = adam(1e-3, beta1, 0.999, 1e-8, weight_decay, decoupled)
    expected = Case(numel, seed, grad=grad, emit=emit, specials=True)
    ours = copy.deepcopy(expected)
    if not at_odd_places:  # what torch's allocator gives lies on 64 bytes: the path of four elements at once
        for name in ("grad", "master", "exp_avg", "exp_avg_sq", "emit"):
            tensor = getattr(ours, name)
            setattr(ours, name, None if tensor is None else tensor.clone())
    update([expected.segment(hyper, step, factor)])
    host_kernels().adam(ours.segment(hyper, step, factor))
    for one, other in zip(ours.results(), expected.results(), strict=True):
        assert exact.same_bits(one, other)


@given(
    numel=st.one_of(st.integers(1, 300), st.sampled_from([4096, 8191, 40_001])),
    start=st.sampled_from([0, 64, 4032, 4096 * 3 + 64]),
    source=st.sampled_from(DTYPES),
    target=st.sampled_from([None, *DTYPES]),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_ingest(numel: int, start: int, source: torch.dtype, target: torch.dtype | None, accumulate: bool, seed: int) -> None:
    accumulate = accumulate and target is not None
    generator = torch.Generator().manual_seed(seed)
    src = exact.rough_values(numel, generator, specials=True).to(source)
    dst = None if target is None else exact.rough_values(numel, generator, specials=True).to(target)
    ours = None if dst is None else dst.clone()
    expected_sums = kernels.ingest_async(dst, src, start, accumulate)
    sums = torch.full_like(expected_sums, -1.0)
    host_kernels().ingest(ours, src, start % kernels.BLOCK_NUMEL, accumulate, sums)
    assert exact.same_bits(sums, expected_sums)
    if dst is not None and ours is not None:
        assert exact.same_bits(ours, dst)


def test_the_torch_form_has_no_order_of_its_own() -> None:
    values = exact.rough_values(2 * 4096, torch.Generator().manual_seed(2), specials=True).double().view(2, 128, 32)
    one, other = (kernels._added_in_order(values, by_rows=by_rows) for by_rows in (True, False))
    assert exact.same_bits(one, other)


def test_ingest_in_place() -> None:
    values = exact.rough_values(9000, torch.Generator().manual_seed(1), specials=True)
    before = values.clone()
    sums = torch.empty(3, dtype=torch.float64)
    host_kernels().ingest(values, values, 0, False, sums)
    assert exact.same_bits(values, before) and exact.same_bits(sums, kernels.ingest_async(None, before, 0, False))


def test_every_sixteen_bit_pattern_and_every_tie() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        halves = patterns.view(dtype)
        wide = torch.empty(halves.numel())
        host_kernels().convert(wide, halves)
        assert exact.same_bits(wide, halves.float())
        steps = halves[halves.isfinite()].double().sort().values
        ties = ((steps[1:] + steps[:-1]) / 2).float()
        up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
        for values in (wide, ties, ties.nextafter(up), ties.nextafter(down)):
            narrow, expected = torch.empty(values.numel(), dtype=dtype), torch.empty(values.numel(), dtype=dtype)
            host_kernels().convert(narrow, values)
            kernels.convert(expected, values)
            assert exact.same_bits(narrow, expected)


def test_a_launch_of_nothing_is_no_launch() -> None:
    def launch(*_: object) -> None:
        raise AssertionError("launched")

    empty = torch.empty(0)
    device_kernels.DeviceKernels(launch).convert(empty.bfloat16(), empty)
    device_kernels.DeviceKernels(launch).adam(segment(empty, empty, empty, empty, None, HYPER, 1))


# ---- compilers


def _nvcc() -> str | None:
    found = shutil.which("nvcc")
    return found or next((path for path in ("/usr/local/cuda/bin/nvcc",) if Path(path).is_file()), None)


def test_nvcc_accepts_the_source(tmp_path: Path) -> None:
    """And what it makes of it has no approximate, flushing or contracted operation that the source does not name."""
    nvcc = _nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    out = tmp_path / "kernels.ptx"
    options = [option.replace("--prec", "-prec") for option in COMPILE_OPTIONS]
    subprocess.run(
        [nvcc, "-ptx", "-arch=compute_80", *options, "-Werror", "all-warnings", str(SOURCE), "-o", str(out)], check=True
    )
    _check_ptx(out.read_text())


def _check_ptx(ptx: str) -> None:
    entries = [line for line in ptx.splitlines() if ".entry offload_" in line]
    assert len(entries) == 3 * 4 + 3 * 4 + 6
    assert ".ftz" not in ptx and ".approx" not in ptx and ".full" not in ptx
    assert "fma.rn.f64" not in ptx and "fma.rn.f32" in ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC from the system, or from the package `nvidia-cuda-nvrtc`, which every CUDA build of torch brings."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        names.extend(str(path) for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def test_nvrtc_accepts_the_source() -> None:
    """What CuPy does where the package was built without nvcc. NVRTC needs no GPU."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("no NVRTC on this machine: pip install nvidia-cuda-nvrtc")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"kernels.cu", 0, None, None) == 0
    options = [option.encode() for option in ("--gpu-architecture=compute_80", *COMPILE_OPTIONS)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    assert status == 0, log.value.decode()
    assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetPTX(program, ptx) == 0
    assert nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    _check_ptx(ptx.value.decode())


# ---- loading and launching, with CuPy and the driver played


class _Played:
    """A context manager that says when it was entered, as CuPy's devices and streams are."""

    def __init__(self, what: object, log: list[object]) -> None:
        self.what, self.log = what, log

    def __enter__(self) -> None:
        self.log.append(self.what)

    def __exit__(self, *_: object) -> None:
        self.log.append(None)


@pytest.mark.parametrize("has_from_external", [True, False], ids=["cupy 14", "cupy 13"])
def test_a_launch_goes_to_torchs_stream_of_the_device(monkeypatch: pytest.MonkeyPatch, has_from_external: bool) -> None:
    log: list[object] = []

    def from_external(stream: object) -> _Played:
        version, address = stream.__cuda_stream__()  # type: ignore[attr-defined]
        return _Played(("stream", version, address), log)

    cuda = SimpleNamespace(
        Device=lambda index: _Played(("device", index), log),
        Stream=SimpleNamespace(from_external=from_external) if has_from_external else SimpleNamespace(),
        ExternalStream=lambda address: _Played(("stream", 0, address), log),
    )
    module = SimpleNamespace(get_function=lambda name: lambda grid, block, args: log.append((name, grid, block, args)))
    streams = {1: SimpleNamespace(cuda_stream=77)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: streams[index])
    launch = device_kernels.Launcher(SimpleNamespace(cuda=cuda), module, 1)
    launch("offload_convert_0_1", 1 << 21, (1, 2))
    assert log == [("device", 1), ("stream", 0, 77), ("offload_convert_0_1", (1 << 20,), (256,), (1, 2)), None, None]


def test_without_cupy_there_are_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "_prepared", {})
    monkeypatch.setitem(sys.modules, "cupy", None)
    device = torch.device("cuda", 3)
    device_kernels.prepare(device)
    assert device_kernels.of(device) is None and device_kernels.of(torch.device("cpu")) is None


@pytest.mark.parametrize("compiled", [True, False])
def test_kernels_that_do_not_load_are_said_and_done_without(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """The compiled file is taken where there is one, else the source; and what fails then is not hidden."""
    given: list[dict[str, object]] = []

    def raw_module(**how: object) -> None:
        given.append(how)
        raise RuntimeError("no driver")

    monkeypatch.setattr(device_kernels, "_prepared", {})
    monkeypatch.setattr(device_kernels, "compiled_path", lambda: Path("/somewhere/k.fatbin") if compiled else None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=raw_module))
    with pytest.warns(RuntimeWarning, match="no driver"):
        device_kernels.prepare(torch.device("cuda", 0))
    assert device_kernels.of(torch.device("cuda", 0)) is None
    if compiled:
        assert given == [{"path": "/somewhere/k.fatbin"}]
    else:
        assert given[0]["code"] == SOURCE.read_text() and given[0]["options"] == COMPILE_OPTIONS
