# SPDX-License-Identifier: Apache-2.0
"""The wheel offload-cuda, without a GPU: its files are found, each is machine code for its device, and the launches fit it.

The driver itself is all that is left to a machine with a GPU (tests/gpu/test_kernels.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from offload import _native_library
from offload.device.arithmetic import compiled_kernels
from offload.device.arithmetic.compiled_kernels import entry_points
from tests.device.cubin import Cubin, fatbin_architectures, launched
from tests.device.kernel_files import kernel_files_under

ROOT = Path(__file__).resolve().parents[2]


def test_every_kernel_is_launched_here() -> None:
    assert sorted(launched()) == sorted(entry_points())


def test_the_package_of_compiled_kernels_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever on the path it is installed, beside an installed offload or a checkout."""
    (tmp_path / "offload_cuda").mkdir()
    mine = tmp_path / "offload_cuda" / "offload_cuda_kernels.sm_990.cubin"
    assert mine not in _native_library.installed_paths(mine.name)
    monkeypatch.syspath_prepend(tmp_path)
    assert mine in _native_library.installed_paths(mine.name)
    mine.write_bytes(b"")
    kernel_files_under(monkeypatch, tmp_path)
    assert compiled_kernels.compiled_path((98, 0)) is None
    assert compiled_kernels.compiled_path((99, 3)) == mine


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["nvcc", "NVRTC"])
def test_what_the_wheel_installs_is_found_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    """As make wheel-cuda builds it: for each device there is its code, with each kernel as it is launched."""
    nvcc = shutil.which("nvcc")
    if nvcc is None if compiler == "nvcc" else find_spec("nvidia") is None:
        pytest.skip(f"there is no {compiler} here")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    without = [] if compiler == "nvcc" else ["-C", "cmake.define.OFFLOAD_NVCC="]
    subprocess.run([*command, "-C", f"build-dir={tmp_path}/build", *without, ROOT / "native" / "cuda_wheel"], check=True)
    (wheel,) = tmp_path.glob("offload_cuda-*-py3-none-any.whl")
    installed = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(installed)
    kernel_files_under(monkeypatch, installed)
    arguments = launched()
    for major, minor in ((8, 0), (8, 9), (9, 0), (10, 3), (12, 1)):
        path = compiled_kernels.compiled_path((major, minor))
        assert path is not None and path.parent == installed / "offload_cuda"
        if compiler == "nvcc":  # whose code is compressed in there
            assert 10 * major in fatbin_architectures(path.read_bytes())
        else:
            kernels = Cubin.of(path.read_bytes())
            assert kernels.architecture == 10 * major and kernels.parameters == arguments
