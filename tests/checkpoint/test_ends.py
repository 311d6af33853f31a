# SPDX-License-Identifier: Apache-2.0
"""A save beside training is finished by whatever ends the script, or the script says loudly that it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .ending import CASES, STEPS
from .interrupting import content

ROOT = Path(__file__).resolve().parents[2]
LOST = {"fills the drive": "ENOSPC", "is interrupted at the end": "the process ended"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], str]]:
    """The folder of the scripts, and by script what it wrote to stderr."""
    base = tmp_path_factory.mktemp("ended")
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.ending", str(base)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    scripts = {(placement, end): said for placement, end, said in map(json.loads, done.stdout.splitlines())}
    assert set(scripts) == set(CASES), done.stdout[-2000:] + done.stderr[-4000:]
    return base, scripts


@pytest.mark.parametrize(("placement", "end"), CASES)
def test_the_save_is_whole_or_missed(ended: Any, placement: str, end: str) -> None:
    base, scripts = ended
    said, folder = scripts[placement, end], base / placement / end
    if end in LOST:
        assert str(folder / "saved") in said and LOST[end] in said and "RuntimeWarning" in said
        assert not (folder / "saved").exists()
        return
    assert "Warning" not in said
    found, state = content(folder / "saved")
    expected, _ = content(base / placement / "waits" / "saved")
    assert state == {"steps": STEPS} and found == expected


def test_at_the_end_of_the_interpreter_the_main_thread_still_has_its_turn(ended: Any) -> None:
    """As an `atexit` function saves: the main thread has ended as far as its end was waited for, and is at work. An update that
    the save made in its place would be in two hands, and its queue in none."""
    base, scripts = ended
    folders = [base / "nvme" / end / "more" for end in ("updates at exit", "waits")]
    assert not scripts["nvme", "updates at exit"]
    assert content(folders[0]) == content(folders[1])
