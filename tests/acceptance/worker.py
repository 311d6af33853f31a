# SPDX-License-Identifier: Apache-2.0
"""A training run in a process of its own: `python -m tests.acceptance.worker '{"...": ...}'` prints one JSON line.

Used where a run must not share this process: other environment variables, kill -9, two at once, peak memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.small_sizes import small_for_good
from tests.warm import READ_WHEN_LOADED, ROOT, WarmProcess


def environment(**variables: str) -> dict[str, str]:
    paths = [str(ROOT)]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OFFLOAD_")}
    return plain | {"PYTHONPATH": os.pathsep.join(paths), "OFFLOAD_ACCELERATOR": "cpu"} | variables


def start(arguments: dict[str, Any], **variables: str) -> WarmProcess | subprocess.Popen[str]:
    command = ["-m", "tests.acceptance.worker", json.dumps(arguments)]
    if not READ_WHEN_LOADED & set(variables):
        return WarmProcess(command, **variables)
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**variables)
    )


def finish(process: WarmProcess | subprocess.Popen[str]) -> dict[str, Any]:
    """The run's result, with its `stderr`; a run that failed fails the test with all that it wrote."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, f"the worker ended with {process.returncode}:\n{out}\n{err}"
    return json.loads(out.strip().splitlines()[-1]) | {"stderr": err}


def run(arguments: dict[str, Any], **variables: str) -> dict[str, Any]:
    return finish(start(arguments, **variables))


def train_bytes(fields: dict[str, Any], steps: int, width: int, announce: bool, seed: int) -> dict[str, Any]:
    import torch

    import offload

    from .models import ByteModel, two_groups
    from .runs import Run, bitwise_loop, digest, run_engine

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = ByteModel(width)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = offload.initialize(model, two_groups(model), offload.Config(**fields))
        if announce:
            bitwise_loop(Run(engine.module, engine.optimizer, engine), steps=1)
            print("started", flush=True)
        losses, weights = run_engine(engine, lambda run: bitwise_loop(run, steps))
        engine.close()
    return {
        "losses": [loss.hex() for loss in losses],
        "weights": digest(weights),
        "warnings": [str(one.message) for one in caught],
    }


def resident_nbytes(field: str) -> int:
    """A field of /proc/self/status in bytes. VmHWM, not ru_maxrss: the latter starts at the parent's own peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def measure_memory(
    fields: dict[str, Any], blocks: int, width: int, deferred: bool, steps: int, quiet_steps: int | None = None
) -> dict[str, Any]:
    """Train a Stack; report resident bytes before it (after a tiny run in memory), at its end and at the peak.

    `quiet_steps`: how many without a strike come before the first that begins updates in backward, if not as many as always."""
    import torch
    import torch.nn.functional as F

    import offload

    from .models import Stack

    if quiet_steps is not None:
        small_for_good(quiet_steps=quiet_steps)

    def train(count: int, size: int, config: offload.Config) -> dict[str, int]:
        with offload.deferred_init() if deferred else contextlib.nullcontext():
            model = Stack(size, count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        with offload.initialize(model, optimizer, config) as engine:
            x = torch.randn(4, size)
            for _ in range(steps):
                loss = F.mse_loss(model(x), x)
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            assert torch.isfinite(loss).item()
            lines = engine.stats()["planned"]
            planned = sum(line["nbytes"] for line in lines if line["tier"] == "cpu")
            speculated = engine.stats()["speculated_steps"]
            return {"end": resident_nbytes("VmRSS"), "planned": planned, "speculated": speculated}

    train(2, 32, offload.Config(parameters="device", optimizer_states="device"))
    before = resident_nbytes("VmHWM")
    large = train(blocks, width, offload.Config(**fields))
    return {"before": before, "peak": resident_nbytes("VmHWM"), **large}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests in the background may have it ignored
    small_for_good(joined_numel=0)  # as in tests/conftest.py
    asked = json.loads(sys.argv[1])
    measure = measure_memory if asked.pop("kind", "") == "memory" else train_bytes
    print(json.dumps(measure(**asked)), flush=True)
