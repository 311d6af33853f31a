# SPDX-License-Identifier: Apache-2.0
"""Saves that are killed: `python -m tests.checkpoint.killing '{...}'` forks runs that end in the middle of one.

Forks, not new processes: importing torch takes longer than everything else here. Each run loads what the killed one
before it left, compares it with the uninterrupted run, trains one step and saves; its last line of output says how far
it came.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "mkdir", "rename", "fsync", "pwrite", "write", "unlink", "rmdir")


def kill_at(index: int) -> None:
    """Kill this process at the `index`-th call of an operation that can change a file system; a write is half done then."""
    calls = iter(range(1 << 30))

    def watched(name: str, original: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return original(*args, **keywords)
            if next(calls) == index:
                if name == "pwrite":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **keywords)

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(name, getattr(os, name)))


class Runs:
    """Runs of one tiny training, each in a forked process."""

    def __init__(self, folder: Path, numbered: bool, placement: str = "cpu", wait: bool = True) -> None:
        self.folder, self.numbered, self.placement, self.wait = folder, numbered, placement, wait
        self.expected: list[str] = []

    def engine(self, placement: str | None = None) -> Any:
        import offload

        from ..acceptance.models import adamw, stack

        model = stack(width=8, blocks=1)
        placement = placement or self.placement
        config: dict[str, Any] = {"parameters": placement, "optimizer_states": placement}
        if placement == "nvme":
            config["nvme"] = str(self.folder) + "-scratch"
        return offload.initialize(model, adamw(model), config)

    def step(self, engine: Any, n: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(n)
        engine.module(torch.randn(3, 8, generator=draw)).square().mean().backward()
        engine.step()
        engine.zero_grad()

    def digest(self, engine: Any) -> str:
        from ..acceptance.runs import digest

        return digest(engine.state_dict())

    def compute_expected(self, steps: int) -> None:
        """Digests of the uninterrupted run's weights after 0, 1, ... steps, in memory, from a process of its own."""
        with tempfile.TemporaryFile() as file:  # a pipe would be full before anybody reads it

            def run() -> None:
                with self.engine("device") as engine:
                    for n in range(steps):
                        os.write(file.fileno(), self.digest(engine).encode() + b"\n")
                        self.step(engine, n)

            assert self.forked(run) == 0
            file.seek(0)
            self.expected = file.read().decode().split()

    def forked(self, run: Callable[[], None]) -> int:
        """The exit status of `run` in a child: 0, 1 after an exception, or minus the signal."""
        return self.ended(self.child(run))

    def killed(self, seconds: float, *, when_resumed: bool, saves: int) -> int:
        """The same of a run that saves after every step, killed `seconds` after it began or was resumed."""
        inlet, outlet = os.pipe()
        child = self.child(self.go_on(lambda: os.write(outlet, b"."), saves))
        os.close(outlet)
        if when_resumed:
            os.read(inlet, 1)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.close(inlet)
        return self.ended(child)

    def child(self, run: Callable[[], None]) -> int:
        """The process in which `run` runs."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        return child

    def ended(self, child: int) -> int:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    def go_on(self, kill: Callable[[], object], saves: int = 1) -> Callable[[], None]:
        """Resume, compare with the uninterrupted run, then train and save so often, `kill` armed."""

        def run() -> None:
            with self.engine() as engine:
                n = self.resume(engine)
                assert self.digest(engine) == self.expected[n], f"resumed at {n}, with other weights"
                print(n, flush=True)
                kill()
                for more in range(n, n + saves):
                    self.step(engine, more)
                    self.save(engine, more + 1)

        return run

    def resume(self, engine: Any) -> int:
        if self.numbered:
            state = engine.resume_or_start(self.folder)
            return 0 if state is None else state["n"]
        if not self.folder.exists():
            return 0
        return engine.load_checkpoint(self.folder / "saved")["n"]

    def save(self, engine: Any, n: int) -> None:
        if self.numbered:
            engine.save_checkpoint(self.folder / f"step-{n}", client_state={"n": n}, keep_last=1, wait=self.wait)
        else:
            engine.save_checkpoint(self.folder / "saved", client_state={"n": n}, wait=self.wait)


def at_every_operation(folder: str, numbered: bool, stride: int, placement: str, wait: bool) -> None:
    """A save killed at its first operation, `stride` later, ... until one is over before it is killed."""
    runs = Runs(Path(folder), numbered, placement, wait)
    runs.compute_expected(200 // stride)
    assert runs.forked(runs.go_on(lambda: None)) == 0
    kills = 0
    for index in range(0, 199, stride):
        status = runs.forked(runs.go_on(lambda index=index: kill_at(index)))
        if status == 0:
            break
        assert status == -signal.SIGKILL, f"the run that was killed at {index} ended with {status}"
        kills += 1
    assert runs.forked(runs.go_on(lambda: None)) == 0  # removes what the last ones left
    print(json.dumps({"kills": kills, "left": sorted(os.listdir(folder))}), flush=True)


SAVES = 60
"""Of one run: more than a quick machine makes until the kill comes."""


def at_random_moments(folder: str, numbered: bool, count: int, seed: int, placement: str, wait: bool) -> None:
    """Runs that save after every step, killed at some moment: in a step, in a save, or in both at once."""
    runs = Runs(Path(folder), numbered, placement, wait)
    runs.compute_expected(SAVES * (count + 5))
    draw = random.Random(seed)
    assert runs.forked(runs.go_on(lambda: None)) == 0
    kills, survivors = 0, 0
    while kills < count:
        status = runs.killed(0.3 * draw.random(), when_resumed=draw.random() < 0.8, saves=SAVES)
        assert status in (0, -signal.SIGKILL), f"a run ended with {status}"
        kills, survivors = kills + (status != 0), survivors + (status == 0)  # a quick one may be done before it is killed
        assert survivors < 3
    assert runs.forked(runs.go_on(lambda: None)) == 0
    print(json.dumps({"kills": count, "left": sorted(os.listdir(folder))}), flush=True)


if __name__ == "__main__":
    import torch
    import torch._dynamo

    import offload  # everything that takes long is loaded before the first fork

    assert offload and torch._dynamo
    os.fsync = lambda fileno: None  # a kill leaves the system alive, so only its own waiting would be tested
    torch.set_num_threads(1)
    os.environ["OFFLOAD_ACCELERATOR"] = "cpu"
    asked = json.loads(sys.argv[1])
    {"every": at_every_operation, "random": at_random_moments}[asked.pop("kind")](**asked)
