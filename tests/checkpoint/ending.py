# SPDX-License-Identifier: Apache-2.0
"""Scripts that end while a save runs: `python -m tests.checkpoint.ending FOLDER` forks one for each way of `ENDS`.

Forks, not new processes: importing torch takes longer than everything else here. A fork that returns from its script ends
as any interpreter does, until it has told everybody. Each line of output: the placement, the script and its stderr.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 2


def trained(placement: str, folder: Path) -> Any:
    """An engine after some steps; in the last of them updates are still to come. "deferred": in memory of that accelerator,
    whose jobs run where somebody waits for them."""
    import offload

    from ..acceptance.models import adamw, stack

    model = stack(width=48, blocks=3)
    if placement == "deferred":
        os.environ["OFFLOAD_ACCELERATOR"] = placement
    tier = placement if placement != "deferred" else "cpu"
    config = {"parameters": tier, "optimizer_states": tier, "update": "step"}
    if placement == "nvme":
        config["nvme"] = str(folder / "scratch")
    engine = offload.initialize(model, adamw(model), config)
    for step in range(STEPS):
        train(engine, step)
    return engine


def train(engine: Any, step: int) -> None:
    import torch

    draw = torch.Generator().manual_seed(step)
    engine.module(torch.randn(3, 48, generator=draw)).square().mean().backward()
    engine.step()
    engine.zero_grad()


def raises(engine: Any, save: Any, folder: Path) -> None:
    raise ZeroDivisionError("the script's own")


def raises_in_the_block(engine: Any, save: Any, folder: Path) -> None:
    with engine:
        raise ZeroDivisionError("the script's own")


def is_dropped(engine: Any, save: Any, folder: Path) -> None:
    KEPT.clear()
    del engine, save
    gc.collect()


def does_nothing(engine: Any, save: Any, folder: Path) -> None:
    """As a notebook. The save is not finished by the end, which is none of the interpreter's."""
    until = time.monotonic() + 60
    while not save.done() and time.monotonic() < until:
        time.sleep(0.01)
    os._exit(0)


def waits_on_another_thread(engine: Any, save: Any, folder: Path) -> None:
    thread = threading.Thread(target=save.wait)
    thread.start()
    thread.join(60)
    os._exit(0)


def fills_the_drive(engine: Any, save: Any, folder: Path) -> None:
    def full(fileno: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = full


def is_interrupted_at_the_end(engine: Any, save: Any, folder: Path) -> None:
    os.fsync = lambda fileno: time.sleep(1)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def saves_at_exit(engine: Any, save: Any, folder: Path) -> None:
    """Again, when the interpreter no longer waits for threads."""
    save.wait()
    atexit.register(engine.save_checkpoint, folder / "saved", client_state={"steps": STEPS}, wait=False)
    os.rename(folder / "saved", folder / "before")


def updates_at_exit(engine: Any, save: Any, folder: Path) -> None:
    """Those of a last step too are still to come when the interpreter no longer waits for threads, and take their time."""

    def save_more() -> None:
        HELD[0].hold()
        train(engine, STEPS)
        HELD[0].go_on(0.5)
        engine.save_checkpoint(folder / "more", wait=False)
        assert HANDS[0].most == 1

    save.wait()
    atexit.register(save_more)


def waits(engine: Any, save: Any, folder: Path) -> None:
    save.wait()
    train(engine, STEPS)
    engine.save_checkpoint(folder / "more")


ENDS: dict[str, Callable[[Any, Any, Path], object]] = {
    "waits": waits,
    "ends": lambda engine, save, folder: None,
    "exits": lambda engine, save, folder: sys.exit(3),
    "raises": raises,
    "raises in the block": raises_in_the_block,
    "is dropped": is_dropped,
    "exports": lambda engine, save, folder: engine.export(folder / "exported"),
    "closes": lambda engine, save, folder: engine.close(),
    "saves at exit": saves_at_exit,
    "updates at exit": updates_at_exit,
    "does nothing": does_nothing,
    "waits on another thread": waits_on_another_thread,
    "fills the drive": fills_the_drive,
    "is interrupted at the end": is_interrupted_at_the_end,
}
IN_MEMORY_TOO = ("waits", "ends", "is dropped", "exports", "saves at exit", "fills the drive")
CASES = [("nvme", end) for end in ENDS] + [(placement, end) for placement in ("cpu", "deferred") for end in IN_MEMORY_TOO]
HELD: list[Any] = []
"""The updates of all engines."""
HANDS: list[Any] = []
"""Who makes them."""
KEPT: list[Any] = []
"""What a script's globals would hold until its end."""


def script(end: str, placement: str, folder: Path) -> None:
    KEPT.append(trained(placement, folder))
    KEPT.append(KEPT[0].save_checkpoint(folder / "saved", client_state={"steps": STEPS}, wait=False))
    ENDS[end](*KEPT, folder)


def main(base: Path) -> None:
    children: dict[int, tuple[str, str]] = {}
    for placement, end in CASES:
        folder = base / placement / end
        folder.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
            script(end, placement, folder)
            return
        children[child] = placement, end
        if len(children) == AT_ONCE:
            report(base, children)
    while children:
        report(base, children)


def report(base: Path, children: dict[int, tuple[str, str]]) -> None:
    placement, end = children.pop(os.wait()[0])
    said = (base / placement / end / "stderr").read_text()
    print(json.dumps([placement, end, said]), flush=True)


AT_ONCE = 4


def end_here() -> None:
    """What follows is taking torch down, which takes a second and shows nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    atexit.register(end_here)  # first of all, so it runs last

    import pytest
    import torch
    import torch._dynamo

    import offload  # everything that takes long is loaded before the first fork

    from ..small_sizes import small_for_good
    from .standing import Hands, HeldUpdates

    assert offload and torch._dynamo
    os.fsync = lambda fileno: time.sleep(0.02)  # a drive that takes its time
    HELD.append(HeldUpdates(pytest.MonkeyPatch()))
    HANDS.append(Hands())
    HANDS[0].__enter__()
    small_for_good(joined_numel=0)  # as in tests/conftest.py
    torch.set_num_threads(1)
    os.environ["OFFLOAD_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]))
