# SPDX-License-Identifier: Apache-2.0
"""Two ranks that share one device, over gloo: the same bits in every stage and placement."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from .conftest import Where

ROOT = Path(__file__).resolve().parents[2]


def run(where: Where, configs: list[dict[str, Any]]) -> list[tuple[list[list[float]], str]]:
    """With each of these: losses by rank, and the digest of the weights, which is that of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    common = plain | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"OFFLOAD_ACCELERATOR": where.accelerator, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    given = [{"dtype": "bf16", "max_grad_norm": 0.5} | config for config in configs]
    command = [sys.executable, "-m", "tests.gpu.rank_worker", json.dumps(given)]
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": "0"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said: list[list[dict[str, Any]]] = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
            said.append([json.loads(line) for line in out.splitlines()[-len(configs) :]])
    finally:
        for process in processes:
            process.kill()
    both = list(zip(*said, strict=True))
    assert all(one["digest"] == other["digest"] for one, other in both)
    return [([one["losses"], other["losses"]], one["digest"]) for one, other in both]


def test_stages_and_placements(where: Where, tmp_path: Path) -> None:
    expected, *found = run(
        where,
        [
            {"stage": 3, "parameters": "device", "optimizer_states": "device"},
            {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu"},
            {"stage": 3, "parameters": "nvme", "optimizer_states": "nvme", "nvme": str(tmp_path), "update": "backward"},
            {"stage": 2, "parameters": "device", "optimizer_states": "cpu"},
            {"stage": 1, "parameters": "device", "optimizer_states": "cpu"},
            {"stage": 0, "parameters": "device", "optimizer_states": "device"},
        ],
    )
    assert len(found) == 5 and all(one == expected for one in found)
