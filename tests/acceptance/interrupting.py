# SPDX-License-Identifier: Apache-2.0
"""Training, interrupted at seeded moments: `python -m tests.acceptance.interrupting '{"...": ...}'` prints one JSON line.

Each trial goes through a story (steps, gathered values, a norm, an evaluation) until a timer interrupts it, then loads the
checkpoint that all of them start from and trains on: its weights must be those of a run that nobody interrupted. Other trials
are interrupted while the engine is closed.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import offload

from .runs import digest

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(fields: dict[str, Any]) -> offload.Engine:
    torch.manual_seed(0)
    model = Net()
    return offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), offload.Config(**fields))


def train(engine: offload.Engine, steps: int) -> None:
    for index in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index), requires_grad=True)
        engine.backward(engine.module(x).square().mean())
        engine.step()
        engine.zero_grad()


def story(engine: offload.Engine) -> None:
    train(engine, 2)
    with engine.gathered(engine.module.head.weight):
        engine.module.head.weight.data.mul_(0.5)
    with torch.no_grad():
        engine.module(torch.ones(2, WIDTH))
    engine.backward(engine.module(torch.ones(2, WIDTH)).sum())
    engine.clip_grad_norm_(1.0)
    engine.step()
    engine.zero_grad()


def again(engine: offload.Engine) -> None:
    while True:
        story(engine)


def is_interrupted(call: Callable[[], Any], seconds: float) -> bool:
    try:
        # Again and again: Python swallows what is raised in a destructor, of whatever object.
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), 2.0)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interrupt_training(fields: dict[str, Any], folder: Path, count: int, draw: random.Random) -> Counter[str]:
    found: Counter[str] = Counter()
    engine = made(fields)
    base = folder / "base"
    train(engine, 1)
    engine.save_checkpoint(base)
    train(engine, 2)
    expected = digest(engine.state_dict())
    usual_seconds = min(seconds_of(lambda: story(engine)) for _ in range(3))
    for index in range(count):
        engine.load_checkpoint(base)
        seconds = draw.random() * 1.2 * usual_seconds
        found["interrupted"] += is_interrupted(lambda: again(engine), seconds)
        # Where it came as the story's own `torch.no_grad` began or ended PyTorch leaves the mode as it was then. The engine
        # does not change it (test_every_moment.py).
        torch.set_grad_enabled(True)
        try:
            engine.zero_grad()
            if index % 4 == 0:
                engine.save_checkpoint(folder / "after")
        except offload.EngineFailedError as error:
            assert "KeyboardInterrupt" in str(error), error
            found["unusable"] += 1
        engine.load_checkpoint(base)
        train(engine, 2)
        found["wrong"] += digest(engine.state_dict()) != expected
    engine.close()
    return found


def interrupt_ends(fields: dict[str, Any], count: int, draw: random.Random) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        engine = made(fields)

        def used(engine: offload.Engine = engine) -> None:
            with engine:
                train(engine, 1)

        found["ends interrupted"] += is_interrupted(used, draw.random() * 0.02)
        engine.close()
        # What Python lists may also be one whose start was cut short, and which never ran.
        alive = [thread for thread in threading.enumerate() if thread.is_alive()]
        left = [thread.name for thread in alive if thread.name.startswith("offload-")]
        assert not left, left
    return found


def main(
    placements: list[dict[str, Any]], folder: str, count: int, ends: int, seed: int, raised: str
) -> dict[str, Counter[str]]:
    """`raised`: "SIGINT", or by the "handler" of another signal, which the engine cannot hold."""

    def interrupt(*_: Any) -> None:
        if raised == "SIGINT":
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, interrupt)
    draw = random.Random(seed)
    found: dict[str, Counter[str]] = {}
    for fields in placements:
        tier = fields["parameters"]
        found[tier] = interrupt_training(fields, Path(folder) / tier, count, draw) + interrupt_ends(fields, ends, draw)
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests in the background may have it ignored
    faulthandler.dump_traceback_later(230, exit=True)
    print(json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
