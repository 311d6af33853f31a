# SPDX-License-Identifier: Apache-2.0
"""What the package shows to its users: names, types, the README's own loop; and no threads where an engine is dropped."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch.nn.functional as F

import offload
from offload import errors
from tests.acceptance.models import ON_NVME, Setup, adamw, stack, vector_batches
from tests.file_systems import at_call, raising

ROOT = Path(__file__).parents[2]
LICENCE = "Apache-2.0"


def test_every_error_is_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined <= set(offload.__all__)
    assert all(getattr(offload, name) is getattr(errors, name) for name in defined)
    assert sorted(offload.__all__) == list(offload.__all__) and all(hasattr(offload, name) for name in offload.__all__)


def test_the_package_says_that_it_is_typed() -> None:
    assert (importlib.resources.files("offload") / "py.typed").is_file()


def test_the_cuda_wheel_belongs_to_this_version() -> None:
    text = (ROOT / "native" / "cuda_wheel" / "pyproject.toml").read_text()
    assert f'version = "{offload.__version__}"' in text and f'"offload=={offload.__version__}"' in text


def test_every_source_file_names_its_licence() -> None:
    folders = ("offload", "native", "tests", "benchmarks", "docs", "examples")
    kinds = {".py", ".cpp", ".h", ".inc", ".cu", ".sh", ".cmake", ".mjs", ".js"}
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    assert len(found) > 500
    assert [path for path in found if f"SPDX-License-Identifier: {LICENCE}\n" not in path.read_text()[:200]] == []


def test_workflows_and_hooks_call_what_there_is() -> None:
    """Targets of the Makefile, which say what they do, and files of the repository."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    workflows = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), ROOT / ".ci" / "run"]
    assert len(workflows) >= 3
    for path in workflows:
        called = re.findall(r"^(?:\s*- run: )?make ([^#\n]+)$", path.read_text(), re.MULTILINE)
        assert called, path
        named = {word for line in called for word in re.sub(r"\w+=\S+( \S+ }})?", "", line).split()}
        assert named and named <= targets, (path, named - targets)
    said = set(re.findall(r"make ([a-z][\w-]*)", "".join(re.findall(r"@echo .*", makefile))))
    assert targets - said <= {"help", "in-place", "clean"} and said <= targets | {"help"}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"entry: ([^,\n]+)", hooks)
    assert len(entries) == hooks.count("id:")
    for entry in entries:
        words = entry.split()
        script = next((word for word in words[1:] if word.endswith(".py")), None)
        tool = words[2] if words[1:2] == ["-m"] else Path(words[0]).name
        assert (ROOT / script).is_file() if script else f" {tool} " in f" {_check(makefile)} ", entry


def _check(makefile: str) -> str:
    """The commands of `make check`, as words."""
    return " ".join(re.findall(r"[\w-]+", makefile.split("\ncheck:")[1].split("\n\n")[0]))


@pytest.mark.parametrize("asked", [False, True])
def test_cuda_kernels_are_built_only_where_they_are_asked_for(tmp_path: Path, asked: bool) -> None:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None or (asked and shutil.which("nvcc") is None):
        pytest.skip("no cmake, or no nvcc, here")
    define = ("-DOFFLOAD_CUDA_KERNELS=ON",) if asked else ()
    subprocess.run([cmake, "-S", ROOT / "native", "-B", tmp_path, *define], check=True, capture_output=True)
    targets = subprocess.check_output([cmake, "--build", tmp_path, "--target", "help"], text=True)
    assert ("offload_cuda_kernels" in targets) is asked


_IMPORTS = """
import sys, torch
before = set(sys.modules)
import offload.cli.main
print(*{"torch._dynamo", "sympy", "transformers", "accelerate", "peft", "lightning"} & (set(sys.modules) - before))
"""


def test_importing_it_takes_little_longer_than_importing_torch() -> None:
    """Torch's compiler, which takes as long again, comes with the first optimizer; other libraries when they are asked for."""
    assert not subprocess.check_output([sys.executable, "-c", _IMPORTS], text=True).strip()


def test_the_loop_that_mypy_checks_is_the_readmes() -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme.split("## The loop")[1].split("```python\n")[1].split("```")[0]
    imports, loop = block.split("\n\n", 1)
    checked = Path(__file__).with_name("readme_loop.py").read_text()
    assert imports == "import torch, offload" and checked.endswith(loop)


def test_a_second_model_is_built_where_the_first_ones_engine_was_closed() -> None:
    """As in a notebook: the first model is still there, and its values are not."""
    models = []
    for _ in range(3):
        with offload.deferred_init():
            models.append(stack())
        with offload.initialize(models[-1], adamw(models[-1]), {"parameters": "cpu", "dtype": "bf16"}) as engine:
            assert engine.trains


def test_an_engine_without_an_optimizer_says_so() -> None:
    with offload.initialize(stack(), None, {"parameters": "cpu"}) as engine:
        assert not engine.trains
        with pytest.raises(offload.UsageError, match="no optimizer"):
            _ = engine.optimizer
        with pytest.raises(offload.UsageError, match="no optimizer"):
            engine.step()


def _one_engine(setup: Setup, nvme: Path) -> None:
    model = stack()
    engine = offload.initialize(model, adamw(model), setup.fields(nvme))
    for x, y in vector_batches(2):
        F.mse_loss(model(x), y).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()  # and gradients that wait


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_engine_dropped_without_close_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    """Of its own or of the native library's, whatever was under way."""
    setups = [
        Setup(*placement, update)
        for placement in (("cpu", "nvme", "cpu"), ("nvme", "nvme", "cpu"), ("nvme", "nvme", "deferred"))
    ]
    before = 0
    for number, setup in enumerate([setups[0], *setups, *setups]):
        monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        _one_engine(setup, tmp_path)
        deadline = time.monotonic() + 60
        while any(thread.name.startswith("offload") for thread in threading.enumerate()) or (
            number and _thread_count() > before
        ):
            gc.collect()
            time.sleep(0.01)
            assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        if not number:  # the first one had torch start its own
            before = _thread_count()


@pytest.mark.parametrize("wait", [True, False])
def test_neither_does_one_whose_save_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """And the failure that nobody saw is told when the engine goes, not at the end of the process."""

    def fails() -> None:
        model = stack(blocks=1)
        engine = offload.initialize(model, adamw(model), ON_NVME.fields(tmp_path / "nvme"))
        with contextlib.suppress(offload.StorageError):
            save = engine.save_checkpoint(tmp_path / "saves" / "step-1", wait=wait)
            while not save.done():
                time.sleep(0.01)

    (tmp_path / "saves").mkdir()
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    at_call(monkeypatch, "fsync", before=raising(errno.ENOSPC))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fails()
        deadline = time.monotonic() + 20
        while any(thread.name.startswith("offload") for thread in threading.enumerate()):
            gc.collect()
            time.sleep(0.01)
            assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
    assert ["ENOSPC" in str(one.message) for one in said] == ([] if wait else [True])
