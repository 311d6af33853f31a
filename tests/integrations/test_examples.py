# SPDX-License-Identifier: Apache-2.0
"""Every file under examples/ runs as its first lines say, on a tiny model and real text, and leaves what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ..acceptance.models import source_text
from .preferences import save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    save_model(folder / "checkpoint")
    (folder / "text").write_bytes(source_text(1 << 13))
    return folder


def _command(given: Path, tmp_path: Path, name: str) -> list[str]:
    runner = TORCHRUN if name == "two_ranks.py" else [sys.executable]
    return [
        *runner,
        str(EXAMPLES / name),
        str(given / "checkpoint"),
        str(given / "text"),
        str(tmp_path / "nvme"),
        str(tmp_path / "out"),
    ]


def _environment() -> dict[str, str]:
    cpu = {"OFFLOAD_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return os.environ | cpu | {"PYTHONPATH": str(EXAMPLES.parent)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(given: Path, tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        _command(given, tmp_path, name), env=_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"loss'?:? '?\d", done.stdout)
    out = tmp_path / "out"
    saved = next(path for path in (out / "model", out) if path.is_dir())
    if (saved / "adapter_config.json").exists():
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(given / "checkpoint"), saved)
    else:
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.slow
def test_the_one_that_is_ended_goes_on_to_the_bit(given: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    name = "resume_after_sigterm.py"

    def run(command: list[str]) -> str:
        return subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True).stdout

    expected = run(_command(given, whole, name))
    command = _command(given, tmp_path, name)
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    lines += process.stdout.readlines()
    assert process.wait() == 0 and 3 <= len(lines) < 40
    assert "".join(lines) + run(command) == expected


@pytest.mark.parametrize("name", NAMES)
def test_they_are_short_and_say_how_to_run_them(name: str) -> None:
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80 and f"examples/{name} CHECKPOINT TEXT NVME_FOLDER OUT" in lines[3]  # the first is the licence
