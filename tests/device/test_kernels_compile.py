# SPDX-License-Identifier: Apache-2.0
"""Both CUDA compilers make of the kernels what the source says, on every architecture, in registers alone. No GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from offload.device.arithmetic import compiled_kernels
from offload.device.arithmetic.compiled_kernels import SOURCE, entry_points
from tests.device.cubin import Cubin, launched
from tests.device.kernel_files import kernel_files_under

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("sm_80", "sm_90")
OTHERS = ("sm_86", "sm_89", "sm_100", "sm_120")
ARCHITECTURES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
REGISTERS_MOST = 64
"""Of a thread: 65536 of a multiprocessor for 1024 threads, which is four blocks of 256."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """native/compile_kernels.py, which builds without nvcc run."""
    spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / "native" / "compile_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nvrtc(script: ModuleType) -> ctypes.CDLL:
    found: ctypes.CDLL | None = script.find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine: pip install nvidia-cuda-nvrtc")
    return found


def check_resources(log: str, architecture: str) -> None:
    """`log`: of ptxas -v. Every kernel is there, spills nothing, uses no stack and few registers."""
    blocks = log.split("Compiling entry function ")[1:]
    found = {block.split("'")[1]: block for block in blocks}
    assert sorted(found) == sorted(entry_points())
    for name, block in found.items():
        assert f"for '{architecture}'" in block
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in block, block
        used = re.search(r"Used (\d+) registers", block)
        assert used is not None and int(used[1]) <= REGISTERS_MOST, f"{name} uses {used and used[1]} registers"


def check_ptx(ptx: str) -> None:
    """No approximate, flushing or contracted operation that the source does not name."""
    entries = [line for line in ptx.splitlines() if ".entry offload_" in line]
    assert len(entries) == len(entry_points())
    assert ".ftz" not in ptx and ".approx" not in ptx and ".full" not in ptx
    assert "fma.rn.f64" not in ptx and "fma.rn.f32" in ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_them_without_spills(script: ModuleType, nvrtc: ctypes.CDLL, architecture: str) -> None:
    code, log = script.compile_source(nvrtc, SOURCE, architecture, "--ptxas-options=-v")
    check_resources(log, architecture)
    kernels = Cubin.of(code)
    assert f"sm_{kernels.architecture}" == architecture and kernels.parameters == launched()


@pytest.mark.slow
def test_a_spill_is_seen(script: ModuleType, nvrtc: ctypes.CDLL) -> None:
    with pytest.raises(AssertionError, match="bytes spill stores"):
        check_resources(script.compile_source(nvrtc, SOURCE, "sm_80", "--ptxas-options=-v", "--maxrregcount=16")[1], "sm_80")


def test_the_ptx_of_nvrtc(script: ModuleType, nvrtc: ctypes.CDLL) -> None:
    check_ptx(script.compile_source(nvrtc, SOURCE, "compute_80")[0].decode())


def test_what_does_not_compile_says_why(script: ModuleType, nvrtc: ctypes.CDLL, tmp_path: Path) -> None:
    (tmp_path / "kernels.cu").write_text('extern "C" __global__ void broken() { nothing(); }')
    with pytest.raises(RuntimeError, match=r"kernels.cu\(1\): error: identifier .nothing. is undefined"):
        script.compile_source(nvrtc, tmp_path / "kernels.cu", "sm_80")


def test_a_build_without_nvcc_makes_the_files_that_are_looked_for(
    script: ModuleType, nvrtc: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each major architecture."""
    known = script.major_architectures(nvrtc)
    assert {"sm_80", "sm_90", "sm_100", "sm_120"} <= set(known) and "sm_86" not in known
    small = tmp_path / "kernels.cu"
    small.write_text('extern "C" __global__ void nothing() {}')
    folder = kernel_files_under(monkeypatch, tmp_path)
    assert script.main(str(small), str(folder)) == 0
    for capability, name in (((9, 0), "sm_90"), ((8, 9), "sm_80"), ((12, 1), "sm_120")):
        assert compiled_kernels.compiled_path(capability) == folder / f"offload_cuda_kernels.{name}.cubin"


def test_a_build_without_either_compiler_goes_on(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "find_nvrtc", lambda: None)
    assert script.main(str(SOURCE), str(tmp_path)) == 2 and not list(tmp_path.iterdir())


def _nvcc() -> str:
    found = shutil.which("nvcc") or next((path for path in ("/usr/local/cuda/bin/nvcc",) if Path(path).is_file()), None)
    if found is None:
        pytest.skip("no nvcc on this machine")
    return found


@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_nvcc_compiles_them_without_spills(tmp_path: Path, script: ModuleType, architecture: str) -> None:
    nvcc = _nvcc()
    options = [option.replace("--prec", "-prec") for option in script.OPTIONS]
    both = [
        *options,
        "-allow-unsupported-compiler",
        "-Werror",
        "all-warnings",
        "--keep",
        "--keep-dir",
        str(tmp_path),
        "-Xptxas",
        "-v",
    ]
    command = [nvcc, "-cubin", f"-arch={architecture}", *both, str(SOURCE), "-o", str(tmp_path / "kernels.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_resources(done.stderr, architecture)
    check_ptx((tmp_path / "kernels.ptx").read_text())
