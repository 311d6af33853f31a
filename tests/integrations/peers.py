# SPDX-License-Identifier: Apache-2.0
"""Runs `deepspeed_peer.py` by the real DeepSpeed, where DEEPSPEED_PYTHON names a Python that has it, and by the drop-in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEER = os.environ.get("DEEPSPEED_PYTHON")
"""A Python that has the real DeepSpeed (and torch), where there is one."""
_SCRIPT = Path(__file__).with_name("deepspeed_peer.py")
_SECONDS = 600


def real(folder: Path, given: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """What rank 0 answers."""
    return _run([str(PEER)], {}, folder, given, ranks)


def drop_in(folder: Path, given: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    own = {"OFFLOAD_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return _run([sys.executable, "-m", "offload.deepspeed"], own, folder, given, ranks)


def _run(start: Sequence[str], own: dict[str, str], folder: Path, given: dict[str, Any], ranks: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | own
    outputs = [folder / f"rank-{rank}.{kind}" for rank in range(ranks) for kind in ("out", "err")]
    started = []
    for rank in range(ranks):
        with outputs[2 * rank].open("w") as out, outputs[2 * rank + 1].open("w") as err:
            command = [*start, str(_SCRIPT), json.dumps(given)]
            variables = plain | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=variables, cwd=folder, stdout=out, stderr=err))
    try:
        codes = [one.wait(_SECONDS) for one in started]
    finally:
        for one in started:
            one.kill()
    assert codes == [0] * ranks, "\n".join(path.read_text()[-3000:] for path in outputs)
    lines = [line for line in outputs[0].read_text().splitlines() if line.startswith('{"losses')]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
