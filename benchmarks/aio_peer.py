# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's async_io under a benchmark: a process of the interpreter that has it, asked turn by turn.

python aio_peer.py      # the child: a JSON request per line in, a JSON answer per line out
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TRANSFER_NBYTES = 16 << 20
IN_FLIGHT = 6


class AioPeer:
    """The parent's end."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._read().get("ready") is not True:
            raise RuntimeError(f"{python} has no DeepSpeed with async_io")

    def turn(self, column: str, paths: list[Path], setting: tuple[int, int], seconds: float) -> tuple[int, float, float]:
        """(bytes moved, seconds, processor seconds)."""
        assert self._process.stdin is not None
        request = {"column": column, "paths": [str(path) for path in paths], "setting": setting, "seconds": seconds}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return tuple(self._read()["moved"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> dict[str, Any]:
        """The next answer; the library prints lines of its own between them."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the process of DeepSpeed ended: {self._process.wait()}")


def serve() -> None:
    """The child."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load()
    print(json.dumps({"ready": True}), flush=True)
    handles: dict[tuple[int, int], Any] = {}
    pinned: list[Any] = []
    for line in sys.stdin:
        request = json.loads(line)
        block_nbytes, queue_depth = request["setting"]
        key = (block_nbytes, queue_depth)
        if key not in handles:
            # single_submit off and overlap_events on: whole batches to libaio, and completions taken as they come.
            handles[key] = library.aio_handle(block_nbytes, queue_depth, False, True, 1)
        if not pinned:
            pinned = [
                handles[key].new_cpu_locked_tensor(TRANSFER_NBYTES, torch.empty(0, dtype=torch.uint8)) for _ in range(IN_FLIGHT)
            ]
        print(json.dumps({"moved": _turn(handles[key], pinned, request)}), flush=True)


def _turn(handle: Any, buffers: list[Any], request: dict[str, Any]) -> list[float]:
    column, paths = request["column"], request["paths"]
    sizes = [Path(path).stat().st_size for path in paths]
    before, start, count, in_flight = _cpu_seconds(), time.perf_counter(), 0, 0
    while time.perf_counter() - start < request["seconds"]:
        index = count // 2 % len(paths) if column == "both" else count % len(paths)
        is_write = column == "write" or (column == "both" and count % 2 == 1)
        position = count // len(paths) % (sizes[index] // TRANSFER_NBYTES) * TRANSFER_NBYTES
        move = handle.async_pwrite if is_write else handle.async_pread
        move(buffers[count % IN_FLIGHT], paths[index], position)
        count, in_flight = count + 1, in_flight + 1
        if in_flight == IN_FLIGHT:  # it can only be waited for as a whole
            handle.wait()
            in_flight = 0
    if in_flight:
        handle.wait()
    return [count * TRANSFER_NBYTES, time.perf_counter() - start, _cpu_seconds() - before]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve()
