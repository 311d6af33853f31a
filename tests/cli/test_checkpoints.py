# SPDX-License-Identifier: Apache-2.0
"""`train --checkpoints`: a run that was ended, or killed, goes on as if it had never been."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from offload.cli.main import main
from tests.warm import WarmProcess

from .conftest import TIMEOUT_SECONDS, Trainer, command, is_empty

STEPS = 75
DROPPING = {  # dropout: the states of the random generators count too
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}


def flags(text: Path, folder: Path, nvme: Path) -> tuple[object, ...]:
    config = folder.parent / "gpt2.json"
    config.write_text(json.dumps(DROPPING), encoding="utf-8")
    shape = ("--model", config, "--data", text, "--sequence", 16, "--accumulate", 2, "--clip", 0.5, "--warmup", 5)
    places = ("--parameters", "nvme", "--optimizer-states", "nvme", "--nvme", nvme)
    return (*shape, *places, "--steps", STEPS, "--checkpoints", folder, "--save-every", 7, "--eval-batches", 2)


def started(*arguments: object) -> WarmProcess:
    return WarmProcess(command("train", *arguments), torn_down=True)


def numbers(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.exists() else []
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


def wait_for_step_after(process: WarmProcess, folder: Path, step: int) -> None:
    """Until a checkpoint after that step is there, while the process still trains."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not numbers(folder) or numbers(folder)[-1] <= step:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix == ".safetensors"}


def ended(process: WarmProcess, code: int) -> str:
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == code, err
    return out


def test_terminated_and_killed_runs_end_where_one_that_was_not_does(
    train: Trainer, text: Path, nvme: Path, tmp_path: Path
) -> None:
    _, whole = train(*flags(text, tmp_path / "whole", nvme))
    folder, report = tmp_path / "often", tmp_path / "first.json"
    arguments = (*flags(text, folder, nvme), "--keep-last", 3)

    process = started(*arguments, "--json", report)
    wait_for_step_after(process, folder, 0)
    process.send_signal(signal.SIGTERM)
    assert "ended by a signal" in ended(process, 0)
    first: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
    done = first["step_count"]
    assert numbers(folder)[-1] == done < STEPS and len(numbers(folder)) <= 3
    assert first["interrupted"] and first["losses"] == whole["losses"][:done]

    process = started(*arguments)
    wait_for_step_after(process, folder, done)
    process.kill()
    ended(process, -signal.SIGKILL)
    killed = numbers(folder)[-1]
    assert done < killed < STEPS

    finished, last = train(*arguments)
    assert last["resumed_step_count"] == killed and last["step_count"] == STEPS - killed
    assert last["losses"] == whole["losses"][killed:]
    assert last["held_out"] == whole["held_out"]
    assert f"going on after step {killed}" in finished.out and f"after the {killed} of earlier runs" in finished.out
    assert contents(folder / f"step-{STEPS}") == contents(tmp_path / "whole" / f"step-{STEPS}")
    assert is_empty(nvme)  # the scratch files of the killed one too


def test_a_finished_run_has_nothing_to_do(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    arguments = ["train", "--data", text, "--hidden", 16, "--layers", 1, "--heads", 1, "--sequence", 16, "--steps", 2]
    arguments += ["--checkpoints", tmp_path / "saves"]
    for steps, said in ((2, "2 steps in"), (2, "all 2 steps were done before"), (3, "1 steps after the 2 of earlier runs")):
        arguments[arguments.index("--steps") + 1] = steps
        assert main([str(argument) for argument in arguments]) == 0
        assert said in capsys.readouterr().out
    assert numbers(tmp_path / "saves") == [2, 3]


def test_what_cannot_go_on_says_which_flag(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    arguments = ["train", "--data", text, "--hidden", 16, "--layers", 1, "--heads", 1, "--sequence", 16, "--steps", 1]

    def said(*more: object) -> str:
        code = main([str(argument) for argument in (*arguments, *more)])
        err = capsys.readouterr().err
        assert code in (1, 2), err
        return err

    assert "--save-every needs a folder" in said("--save-every", 2)
    assert "--keep-last needs a folder" in said("--keep-last", 2)
    assert "is not a folder" in said("--checkpoints", text)
    folder = tmp_path / "saves"
    assert main([str(argument) for argument in (*arguments, "--checkpoints", folder)]) == 0
    assert "--lr is 1.0, and was 0.0003" in said("--checkpoints", folder, "--lr", 1)
    assert "--clip is 1.0, and was None" in said("--checkpoints", folder, "--clip", 1)
    text.write_text(text.read_text() + "one more line")
    assert "tokens, and held" in said("--checkpoints", folder)
