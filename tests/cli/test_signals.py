# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM at moments of a run: what ends how, and that nothing stays on the drive."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.warm import WarmProcess

from .conftest import TIMEOUT_SECONDS, command, is_empty


@contextmanager
def endless_run(text: Path, nvme: Path, report: Path) -> Iterator[WarmProcess]:
    arguments = (
        "train",
        "--data",
        text,
        "--hidden",
        64,
        "--layers",
        4,
        "--sequence",
        32,
        "--steps",
        1_000_000,
        "--json",
        report,
    )
    places = ("--parameters", "nvme", "--optimizer-states", "nvme", "--nvme", nvme)
    process = WarmProcess(command(*arguments, *places), torn_down=True, PYTHONUNBUFFERED="1")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_line(process: WarmProcess, beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"ended without a line that begins with {beginning!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_after_a_step_with_the_table(
    number: signal.Signals, text: Path, nvme: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    with endless_run(text, nvme, path) as process:
        wait_for_line(process, "step 1/")
        time.sleep(random.uniform(0.0, 0.5))  # any moment of a step will do
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    assert "ending after this step" in err and "Traceback" not in err
    assert "What there is and where it lived" in out and "ended by a signal" in out
    report = json.loads(path.read_text().splitlines()[-1])
    assert report["interrupted"] is True
    assert len(report["losses"]) == report["step_count"] >= 1
    assert is_empty(nvme)


def test_a_signal_before_the_first_step_ends_at_once(text: Path, nvme: Path, tmp_path: Path) -> None:
    with endless_run(text, nvme, tmp_path / "report.json") as process:
        wait_for_line(process, "filling the tiers")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    # The tiers of so small a model may be full by the time that the signal arrives.
    assert process.returncode in (0, 130)
    assert "Traceback" not in err
    assert is_empty(nvme)


def test_the_second_signal_aborts(text: Path, nvme: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with endless_run(text, nvme, path) as process:
        wait_for_line(process, "step 1/")
        process.send_signal(signal.SIGSTOP)  # so that both are there before it can end
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "offload train: interrupted"
    assert {json.loads(line)["kind"] for line in path.read_text().splitlines()} == {"step"}  # and no report
    assert is_empty(nvme)
