# SPDX-License-Identifier: Apache-2.0
"""Runs of the command as a user makes them: another process, its exit code, what it printed, what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.warm import ENVIRONMENT, READ_WHEN_LOADED, WarmProcess

TIMEOUT_SECONDS = 300

TEXT = "".join(f"line {number}: the quick brown fox jumps over {number * number} lazy dogs\n" for number in range(400))

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


def command(*arguments: object) -> list[str]:
    """For `WarmProcess`, or after an interpreter's name."""
    return ["-m", "offload", *map(str, arguments)]


def run(*arguments: object, **environment: str) -> Finished:
    """In a new process where libraries read the environment when they are loaded, else in a forked one."""
    if not READ_WHEN_LOADED & set(environment):
        done = WarmProcess.run(command(*arguments), TIMEOUT_SECONDS, **environment)
        return Finished(done.returncode, done.stdout, done.stderr)
    done = subprocess.run(
        [sys.executable, *command(*arguments)],
        env=os.environ | ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return path


Trainer = Callable[..., tuple[Finished, dict[str, Any]]]


@pytest.fixture
def train(tmp_path: Path) -> Trainer:
    """`train(*arguments)` is a run of `train` that succeeded, and its report."""

    def call(*arguments: object, **environment: str) -> tuple[Finished, dict[str, Any]]:
        path = tmp_path / "report.json"
        done = run("train", *arguments, "--json", path, **environment)
        assert done.code == 0, done.err
        return done, json.loads(path.read_text(encoding="utf-8").splitlines()[-1])

    return call


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())
