# SPDX-License-Identifier: Apache-2.0
"""Seconds of processor time by what they are spent on, in one process: where the engine's own work goes.

The functions of `KINDS` are wrapped; what a thread spends in one counts for its kind, without what it spends in others inside.
Threads of the native library and of file I/O run no Python, and have names: their time is the system's count for the thread.
What is left is the model's, autograd's and the loop's, torch's own threads among it.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PYTHON = "engine's other Python"
KINDS: dict[str, tuple[str, ...]] = {
    "gradients": (
        "offload.step.gradients.chunk_gradients.ChunkGradients.add",
        "offload.step.gradients.chunk_gradients.ChunkGradients.take",
        "offload.step.gradients.chunk_gradients.ChunkGradients.settle",
    ),
    "norm": ("offload.step.training.Training._measure_norm",),
    "spilling": (
        "offload.step.gradients.buffers.GradientBuffers._spill",
        "offload.step.gradients.buffers.GradientBuffers._read_back",
    ),
    "Adam": ("offload._native.update_rows",),
    "checksums": ("offload._native.checksum", "offload._native.checksum_of_blocks"),
    "I/O hand-over": (
        "offload.tiers.nvme.NvmeStore.read",
        "offload.tiers.nvme.NvmeStore.write",
        "offload.tiers.extent_guard.Operation.wait",
        "offload.tiers.extent_guard.Operation.arrive",
    ),
    "device memory": ("offload._native.pages_move",),
    PYTHON: (
        "offload.step.hooks.module_hooks.Hooks._before_forward",
        "offload.step.hooks.module_hooks.Hooks._leave_module",
        "offload.step.hooks.backward_passes.BackwardUse.start",
        "offload.step.hooks.backward_passes.BackwardUse.end",
        "offload.step.hooks.backward_passes.BackwardPasses.before_accumulation",
        "offload.step.hooks.backward_passes.BackwardPasses.after_accumulation",
        "offload.step.hooks.backward_passes.BackwardPasses.reach_covered",
        "offload.step.hooks.backward_passes.BackwardPasses.graph_task_done",
        "offload.taken_model.TakenModel.step",
        "offload.taken_model.TakenModel.zero_grad",
        "offload.step.updates.update.Updates._run",
        "offload.step.updates.update.Updates._run_together",
        "offload.step.updates.update.Updates._read_ahead",
    ),
}
"""By kind: functions, of which the innermost counts."""
NATIVE, IO, MODEL = "native threads (Adam, gradients)", "I/O threads", "model, autograd, loop"
THREADS = {NATIVE: ("offload-kernels",), IO: ("offload-io", "iou-")}
"""By kind: what the names of its threads begin with; the kernel's own for io_uring are "iou-wrk" and a number."""


class CpuSeconds:
    """Counts from `begin` on. Make it before the engine."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        for kind, names in KINDS.items():
            for name in names:
                self._wrap(name, kind)
        self._before: dict[str, float] = {}
        self._process = 0.0

    def begin(self) -> None:
        """Count from now on."""
        with self._lock:
            self._sums.clear()
        self._before = _seconds_of_threads()
        self._process = time.process_time()

    def end(self, steps: int) -> dict[str, float]:
        """Seconds for each of so many steps, by kind; their sum is the process's."""
        total = time.process_time() - self._process
        found = {kind: seconds - self._before[kind] for kind, seconds in _seconds_of_threads().items()}
        with self._lock:
            found |= dict(self._sums)
        found[MODEL] = total - sum(found.values())
        return {kind: seconds / steps for kind, seconds in found.items()}

    def _wrap(self, name: str, kind: str) -> None:
        holder, last = _holder_of(name)
        function: Callable[..., Any] = getattr(holder, last)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            stack = self._own.__dict__.setdefault("stack", [])
            self._switch(stack)
            stack.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(stack)
                stack.pop()

        setattr(holder, last, counted)

    def _switch(self, stack: list[str]) -> None:
        """The time since the last switch of this thread is the kind's that it was at."""
        now, before = time.thread_time(), self._own.__dict__.get("since", 0.0)
        if stack:
            with self._lock:
                self._sums[stack[-1]] += now - before
        self._own.since = now


def _holder_of(name: str) -> tuple[Any, str]:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            holder = getattr(holder, part)
        return holder, parts[-1]
    raise LookupError(name)


def _seconds_of_threads() -> dict[str, float]:
    """By kind of `THREADS`, since they began."""
    found = dict.fromkeys(THREADS, 0.0)
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, seconds = (thread / "comm").read_text(), int((thread / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        for kind, beginnings in THREADS.items():
            if name.startswith(beginnings):
                found[kind] += seconds
    return found
