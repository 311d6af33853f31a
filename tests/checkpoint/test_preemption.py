# SPDX-License-Identifier: Apache-2.0
"""SIGTERM in a training process that asked for it: the step is finished, everything is saved, the exit code is 0."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.warm import WarmProcess

from ..acceptance.models import ON_CPU, ON_NVME, adamw, stack
from ..acceptance.runs import assert_same_bits, refused

LOOP = """
import json, os, sys, time, torch, offload
from tests.acceptance.models import adamw, stack
from tests.acceptance.runs import digest
folder, last, pause, placement = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
model = stack(width=8, blocks=2)
config = offload.Config(parameters=placement, optimizer_states=placement, nvme=folder if placement == "nvme" else None)
with offload.initialize(model, adamw(model), config) as engine:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.99)
    resumed = engine.resume_or_start(folder + "/saves", catch_sigterm=True)
    first = 0
    if resumed is not None:
        first = resumed["step"]
        scheduler.load_state_dict(resumed["scheduler"])
    print(first, flush=True)
    for step in range(first, last):
        for micro in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2 * step + micro))
            time.sleep(pause)
            model(x + 0.01 * torch.randn(8)).square().mean().backward()
        engine.optimizer.step()
        time.sleep(pause)
        scheduler.step()
        engine.optimizer.zero_grad()
        print("stepped", flush=True)
        engine.exit_if_terminated({"step": step + 1, "scheduler": scheduler.state_dict()}, keep_last=2)
    print(json.dumps([digest(engine.state_dict()), scheduler.get_last_lr()]), flush=True)
print("ended by itself", flush=True)
"""


def start(folder: Path, last: int, pause: float, placement: str) -> WarmProcess:
    return WarmProcess(["-c", LOOP, str(folder), str(last), str(pause), placement])


def finished(process: WarmProcess) -> list[str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.split("\n")[:-1]


@pytest.mark.parametrize("placement", [pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def test_terminated_runs_end_where_one_that_was_not_does(tmp_path: Path, placement: str) -> None:
    """Random moments of a step; dropout-like draws from torch's generator, a schedule and gradient accumulation."""
    folders = [tmp_path / name for name in ("once", "often")]
    for folder in folders:
        folder.mkdir()
    whole = start(folders[0], 6, 0.0, placement)
    *_, expected, _ = finished(whole)
    first, draw = 0, random.Random(4)
    for _ in range(2):
        process = start(folders[1], 6, 0.04, placement)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == first
        assert process.stdout.readline() == "stepped\n"
        time.sleep(0.12 * draw.random())
        process.send_signal(signal.SIGTERM)
        more = finished(process)
        assert "ended by itself" not in more and set(more) <= {"stepped"}
        first += 1 + len(more)
        assert (folders[1] / "saves" / f"step-{first}").is_dir()
        assert 1 <= first < 6
    lines = finished(start(folders[1], 6, 0.0, placement))
    assert int(lines[0]) == first and lines[-2] == expected
    assert not [name for name in os.listdir(folders[1]) if name.startswith("offload-")]  # the scratch files are gone


def one_step(engine: Any, n: int = 0) -> None:
    engine.module(torch.randn(3, 16, generator=torch.Generator().manual_seed(n))).square().mean().backward()
    engine.step()
    engine.zero_grad()


def test_asked_for_in_the_middle_of_a_step(opened: Any, tmp_path: Path) -> None:
    """It waits for the loop's word, saves what a resume needs, and the handler from before comes back."""
    before = signal.getsignal(signal.SIGTERM)
    engine = opened((model := stack()), adamw(model), ON_NVME)
    assert engine.resume_or_start(tmp_path / "saves", catch_sigterm=True) is None
    one_step(engine)
    engine.exit_if_terminated({"n": 1})
    engine.module(torch.ones(2, 16)).sum().backward()
    os.kill(os.getpid(), signal.SIGTERM)
    engine.step()
    expected = engine.state_dict()
    with pytest.raises(SystemExit) as ended:
        engine.exit_if_terminated(lambda: {"n": 2})
    assert ended.value.code == 0
    engine.close()
    assert signal.getsignal(signal.SIGTERM) == before and os.listdir(tmp_path / "saves") == ["step-2"]
    again = opened((model := stack()), adamw(model), ON_CPU)
    assert again.resume_or_start(tmp_path / "saves") == {"n": 2}
    assert_same_bits(again.state_dict(), expected)


def test_nobody_reads_what_the_handler_says(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the signal ended what standard error goes to: the save is made all the same."""

    def write(*_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "nobody reads")

    engine = opened((model := stack()), adamw(model), ON_CPU)
    engine.resume_or_start(tmp_path / "saves", catch_sigterm=True)
    one_step(engine)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        engine.exit_if_terminated()
    assert os.listdir(tmp_path / "saves") == ["step-1"]


def test_it_is_the_newest_whatever_the_loop_numbers_by(opened: Any, tmp_path: Path) -> None:
    engine = opened((model := stack()), adamw(model), ON_CPU)
    engine.resume_or_start(tmp_path / "saves", catch_sigterm=True)
    one_step(engine)
    for number in (400, 500, 600):
        engine.save_checkpoint(tmp_path / "saves" / f"step-{number}")
    one_step(engine)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        engine.exit_if_terminated(keep_last=2)
    assert sorted(os.listdir(tmp_path / "saves")) == ["step-600", "step-601"]


def test_the_working_directory_may_change(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = opened((model := stack()), adamw(model), ON_CPU)
    engine.resume_or_start("saves", catch_sigterm=True)
    one_step(engine)
    monkeypatch.chdir(tmp_path / "elsewhere")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        engine.exit_if_terminated()
    assert os.listdir(tmp_path / "saves") == ["step-1"] and not os.listdir()


def test_what_is_refused(opened: Any, tmp_path: Path) -> None:
    engine = opened((model := stack()), adamw(model), ON_CPU)
    with refused(offload.UsageError, "catch_sigterm=True"):
        engine.exit_if_terminated()
    engine.resume_or_start(tmp_path / "saves", catch_sigterm=True)
    os.kill(os.getpid(), signal.SIGTERM)
    with refused(offload.UsageError, "client_state"):
        engine.exit_if_terminated({"n": object()})
    engine.module(torch.ones(2, 16)).sum().backward()
    with refused(offload.UsageError, "gradients wait"):
        engine.exit_if_terminated()


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, 6, 0.3, "cpu")
    assert process.stdout is not None and int(process.stdout.readline()) == 0
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None and "saving after this step" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGTERM


WITH_OTHERS = """
import os, signal, sys, offload
from tests.acceptance.models import adamw, stack

def told(name, *then):
    def handler(number, frame):
        print(name, flush=True)
        for one in then:
            one(number, frame)
    return handler

def engine():
    model = stack(width=8, blocks=1)
    made = offload.initialize(model, adamw(model), offload.Config())
    made.resume_or_start(sys.argv[1], catch_sigterm=True)
    return made

case = sys.argv[2]
if case == "an earlier one":
    signal.signal(signal.SIGTERM, told("earlier", lambda *_: os._exit(7)))
engines = [engine() for _ in range(2 if case == "two engines" else 1)]
if case in ("a later one", "a closed engine"):
    signal.signal(signal.SIGTERM, told("later", signal.getsignal(signal.SIGTERM)))
if case == "a closed engine":
    engines[0].close()
else:
    os.kill(os.getpid(), signal.SIGTERM)
    print("asked", flush=True)
    for one in engines:
        assert one._preemption.requested
os.kill(os.getpid(), signal.SIGTERM)
print("not ended")
"""

ENDS = {
    "nothing else": (["asked"], -signal.SIGTERM),
    "a later one": (["later", "asked", "later"], -signal.SIGTERM),
    "an earlier one": (["asked", "earlier"], 7),
    "two engines": (["asked"], -signal.SIGTERM),
    "a closed engine": (["later"], -signal.SIGTERM),
}


@pytest.mark.parametrize("case", ENDS)
def test_beside_other_handlers(tmp_path: Path, case: str) -> None:
    """Set before, or later by one that calls the engine's: the first signal asks, the second does what it would have done."""
    process = WarmProcess(["-c", WITH_OTHERS, str(tmp_path), case])
    out, err = process.communicate(timeout=240)
    assert (out.split("\n")[:-1], process.returncode) == ENDS[case], err
    assert err.count("saving after this step") == (case != "a closed engine")


def test_a_forked_worker_ends_as_ever(opened: Any, tmp_path: Path) -> None:
    engine = opened((model := stack()), adamw(model), ON_CPU)
    engine.resume_or_start(tmp_path / "saves", catch_sigterm=True)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    engine.module(torch.ones(2, 16))


def test_only_in_the_main_thread(opened: Any, tmp_path: Path) -> None:
    engine = opened((model := stack()), adamw(model), ON_CPU)
    caught: list[BaseException] = []

    def resume() -> None:
        try:
            engine.resume_or_start(tmp_path / "saves", catch_sigterm=True)
        except offload.UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=resume)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
