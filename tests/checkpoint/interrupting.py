# SPDX-License-Identifier: Apache-2.0
"""Loops that are interrupted: `python -m tests.checkpoint.interrupting '{...}'` forks one for each placement.

A timer raises KeyboardInterrupt at a seeded moment of a step, a save or a load, as Ctrl-C does; the loop catches it and goes
on, from the newest checkpoint where the engine says that it must. Afterwards every checkpoint that is there is loaded
and compared, byte by byte, with that of an uninterrupted run after as many steps as it says.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PLACEMENTS = {
    "cpu": ("cpu", "cpu"),
    "device": ("device", "device"),
    "states on nvme": ("device", "nvme"),
    "nvme": ("nvme", "nvme"),
}
HANG_SECONDS = 60
LONGEST_SECONDS = 0.03


def make(placement: str, folder: Path) -> Any:
    import offload

    from ..acceptance.models import adamw, stack

    model = stack(width=48, blocks=3)
    parameters, states = PLACEMENTS[placement]
    config = {"parameters": parameters, "optimizer_states": states}
    if "nvme" in config.values():
        config["nvme"] = str(folder / "scratch")
    return offload.initialize(model, adamw(model), config)


def forward_and_backward(engine: Any) -> None:
    import torch

    draw = torch.Generator().manual_seed(engine.stats()["steps"])
    engine.module(torch.randn(3, 48, generator=draw)).square().mean().backward()


class Interrupted:
    """One loop. `counts`: how often what was interrupted, and how it ended."""

    def __init__(self, folder: Path, placement: str, seed: int) -> None:
        self.folder, self.placement = folder, placement
        self.saves = folder / "saves"
        self.draw = random.Random(f"{placement}/{seed}")
        self.counts: Counter[str] = Counter()
        self.saved = 0
        self.engine = make(placement, folder)
        signal.signal(signal.SIGALRM, signal.default_int_handler)

    def run(self, interrupts: int) -> None:
        import offload

        while self.counts["interrupts"] < interrupts:
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    self.turn()
            except offload.EngineFailedError:
                self.go_back()
            except offload.OffloadError as error:  # of a save, or of a load
                self.counts[f"{type(error).__name__}: {error}"[:150].replace(str(self.folder), "")] += 1
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            self.engine.close()
        except offload.OffloadError as error:
            self.counts[f"at the end: {type(error).__name__}"] += 1
        faulthandler.cancel_dump_traceback_later()

    def turn(self) -> None:
        """One step and one save, beside training or not; now and then a load before, or something else after."""
        if self.draw.random() < 0.05:
            self.call("load", lambda: self.engine.resume_or_start(self.saves))
        self.engine.zero_grad()
        self.call("forward and backward", lambda: forward_and_backward(self.engine), often=0.1)
        self.call("step", self.engine.step)
        self.engine.zero_grad()
        wait = self.draw.random() < 0.2
        self.call("waited save" if wait else "save", lambda: self.save(wait))
        if self.draw.random() < 0.1:
            self.call("wait", self.last_save.wait)
        if self.draw.random() < 0.1:
            self.call("state_dict", self.engine.state_dict)

    def save(self, wait: bool) -> None:
        self.saved += 1
        steps, path = self.engine.stats()["steps"], self.saves / f"step-{self.saved}"
        self.last_save = self.engine.save_checkpoint(path, client_state={"steps": steps}, wait=wait)

    def call(self, what: str, call: Callable[[], Any], often: float = 0.6) -> None:
        """Do it, interrupted or not."""
        self.interrupted = self.draw.random() < often
        try:
            if self.interrupted:
                # Moments of any order of size: the first bytecodes of a call as well as its longest waits.
                signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS * 10 ** self.draw.uniform(-2.5, 0))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
            self.counts[what] += 1
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def go_back(self) -> None:
        """The engine says that it cannot go on: it can after a load, interrupted or not."""
        import offload

        self.counts["engine failed"] += 1
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self.call("load", lambda: self.engine.resume_or_start(self.saves), often=0.25)
        except offload.EngineFailedError:
            self.counts["load refused"] += 1
            if not self.interrupted:
                raise


def content(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """What a checkpoint holds, but for its number; and its client_state."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(files.pop("MANIFEST.json"))["manifest"]
    state = manifest.pop("client_state")
    files["manifest"] = json.dumps(manifest).encode()
    return files, state


def uninterrupted(folder: Path, placement: str, steps: int) -> list[dict[str, bytes]]:
    """The checkpoint after 0, 1, ... steps."""
    found = []
    with make(placement, folder) as engine:
        for n in range(steps + 1):
            engine.save_checkpoint(folder / "expected", client_state={"steps": n})
            found.append(content(folder / "expected")[0])
            forward_and_backward(engine)
            engine.step()
            engine.zero_grad()
    return found


def compare(folder: Path, placement: str) -> dict[str, Any]:
    """Load every checkpoint, and compare it with the uninterrupted run's."""
    import offload

    there = sorted((folder / "saves").iterdir(), key=lambda path: path.name)
    wrong = [path.name for path in there if path.name.startswith(".offload-aside")]
    saves = [path for path in there if not path.name.startswith(".")]
    contents = {path.name: content(path) for path in saves}
    expected = uninterrupted(folder, placement, max(state["steps"] for _, state in contents.values()))
    with make("device", folder) as engine:
        for path in saves:
            files, state = contents[path.name]
            try:
                loaded = engine.load_checkpoint(path)["steps"]
            except offload.CheckpointError as error:
                wrong.append(f"{path.name}: {error}")
                continue
            assert loaded == engine.stats()["steps"] == state["steps"]
            if files != expected[loaded]:
                wrong.append(f"{path.name} is not what {loaded} steps give")
    return {"checkpoints": len(saves), "wrong": wrong}


def loop(folder: str, placement: str, interrupts: int, seed: int) -> dict[str, Any]:
    """One placement's loop, and what came of it."""
    base = Path(folder) / placement.replace(" ", "-")
    base.mkdir()
    warnings.simplefilter("ignore")
    interrupted = Interrupted(base, placement, seed)
    interrupted.engine.save_checkpoint(interrupted.saves / "step-0", client_state={"steps": 0})
    began = time.monotonic()
    interrupted.run(interrupts)
    found = dict(interrupted.counts) | {"seconds": round(time.monotonic() - began, 1)} | compare(base, placement)
    shutil.rmtree(base)
    return found


def loops(folder: str, interrupts: int, seed: int, placements: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each in a process of its own."""
    for placement in placements:
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answer = loop(folder, placement, interrupts, seed)
                os.write(outlet, json.dumps(answer).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(outlet)
        with open(inlet, "rb") as said:
            answer = said.read()
        _, status = os.waitpid(child, 0)
        yield placement, json.loads(answer) if answer else {"ended": status}


if __name__ == "__main__":
    import torch
    import torch._dynamo

    import offload  # everything that takes long is loaded before the first fork

    assert offload and torch._dynamo
    os.fsync = lambda fileno: time.sleep(0.01)  # a drive that takes its time
    torch.set_num_threads(1)
    os.environ["OFFLOAD_ACCELERATOR"] = "cpu"
    for placement, found in loops(**json.loads(sys.argv[1])):
        print(json.dumps({placement: found}), flush=True)
