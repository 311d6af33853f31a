# SPDX-License-Identifier: Apache-2.0
"""`make test-gpu` and `make gpu-report` start on a machine with a GPU, torch and none of our tools, without a network.

Rehearsed in an environment that has what such a machine has, has no access to an index, and fails whoever asks for one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from offload import _native_library

ROOT = Path(__file__).resolve().parents[2]
# What torch, numpy, safetensors, psutil, aiofiles and pytest import, and nothing else of this environment.
BORROWED = (
    *("torch", "torchgen", "functorch", "numpy", "numpy.libs", "safetensors", "psutil", "aiofiles"),
    *("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "typing_extensions"),
)


def made(folder: Path, tools: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """A checkout and the environment variables of a shell in it; `tools`: command -> a script in its place."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git says which files are its own")
    checkout, home, packages = folder / "checkout", folder / "python", folder / "packages"
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    packages.mkdir()
    for name in BORROWED:
        spec = importlib.util.find_spec(name) if "." not in name else None
        origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
        if origin is not None:
            source = origin.parent if origin.name == "__init__.py" else origin
            (packages / source.name).symlink_to(source)
        elif (beside := site_packages() / name).exists():
            (packages / name).symlink_to(beside)
    venv.create(home, with_pip=False, symlinks=True)
    (next(home.glob("lib/python*/site-packages")) / "borrowed.pth").write_text(f"{packages}\n")
    (folder / "tools").mkdir()
    for name, script in tools.items():
        (folder / "tools" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "tools" / name).chmod(0o755)
    ours = ("PYTHON", "PYTEST", "OFFLOAD", "MAKE", "MFLAGS")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = f"{folder / 'tools'}:{home / 'bin'}:{os.environ['PATH']}"
    return checkout, plain | {"PATH": path, "PIP_NO_INDEX": "1", "CUDA_VISIBLE_DEVICES": ""}


def site_packages() -> Path:
    spec = importlib.util.find_spec("numpy")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def make(checkout: Path, environment: dict[str, str], *arguments: str, seconds: float = 120.0) -> str:
    command = ["make", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not (checkout / ".venv").exists(), "an environment was made"
    return done.stdout


REFUSED = {name: f"echo {name} was called >&2; exit 1" for name in ("pip", "pip3", "apt-get", "curl")}


def library() -> Path:
    found = next((path for path in _native_library.installed_paths(_native_library.LIBRARY_NAME) if path.is_file()), None)
    if found is None:
        pytest.skip("the native library is not built")
    return found


def test_the_tests_run_as_they_are(tmp_path: Path) -> None:
    """Without an environment, the Python in PATH is taken; the library that was built before is not built again."""
    checkout, environment = made(tmp_path, REFUSED | {"cmake": "exit 1", "c++": "exit 1"})
    shutil.copy(library(), checkout / "offload")
    said = make(checkout, environment, "test-gpu")
    assert " skipped" in said and "passed" not in said and "needs a CUDA device" in said


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["cmake", "the compiler alone"])
def test_it_is_built_there_and_the_report_runs(tmp_path: Path, builder: str) -> None:
    """With the Python that PYTHON= names; then the report on a device that is played."""
    checkout, environment = made(tmp_path, REFUSED)
    if builder != "cmake":
        environment["PATH"] = path_without_cmake(tmp_path, environment["PATH"])
    python = f"PYTHON={tmp_path / 'python' / 'bin' / 'python3'}"
    make(checkout, environment, "in-place", python, seconds=600.0)
    assert (checkout / "offload" / "liboffload_native.so").is_file()
    flags = "GPU_REPORT_FLAGS=--dry-run --only offload --out report.json --seconds 200"
    make(checkout, environment, "gpu-report", python, flags, seconds=400.0)
    report = json.loads((checkout / "report.json").read_text())
    assert report["finished"] and report["cells"][0]["status"] == "ok"
    check = "from offload import _native; assert _native.available(), _native.unavailable_reason()"
    command = [str(tmp_path / "python" / "bin" / "python3"), "-c", check]
    subprocess.run(command, cwd=checkout, env=environment, check=True)


def path_without_cmake(folder: Path, path: str) -> str:
    """One folder with links to all commands but cmake."""
    links = folder / "links"
    links.mkdir()
    for entry in path.split(":"):
        for command in Path(entry).glob("*") if entry else ():
            if command.name not in ("cmake", "nvcc") and not (links / command.name).exists():
                (links / command.name).symlink_to(command)
    return str(links)
