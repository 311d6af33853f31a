# SPDX-License-Identifier: Apache-2.0
"""What benchmarks count a step's floor by: the rates of memory and drive, measured; the bytes of each parameter; what computing
takes; and what the order of a step's parts adds."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from typing import Any


def memory_rate() -> float:
    """Bytes per second that a loop which only reads 4 and writes 3 arrays moves, the traffic of Adam in fp32."""
    import torch

    from offload import _native

    numel = 32 * 2**20
    arrays = [torch.zeros(numel) for _ in range(4)]
    places = [(array.data_ptr(), 4) for array in arrays]
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        _native.stream(places, places[:3], numel)
        best = max(best, 7 * 4 * numel / (time.perf_counter() - start))
    return best


def nvme_rates(folder: str, seconds: float = 3.0) -> dict[str, float]:
    """Bytes per second of direct reads alone, writes alone, and both at once (their sum), from huge pages; each for at least so
    many seconds, since a drive that others share has some in which it gives half as much again as in the next."""
    from offload.layout import Extent
    from offload.tiers.io import open_backend
    from offload.tiers.memory import HostMemory
    from offload.tiers.nvme import NvmeStore
    from offload.tiers.scratch import ScratchFolder

    nbytes, count = 16 * 2**20, 64
    extents = [Extent(index * nbytes, nbytes) for index in range(2 * count)]
    backend = open_backend()
    store = NvmeStore("rates", extents, ScratchFolder([folder]), backend)
    buffers = HostMemory(8 * nbytes, "rates", prefault=True, direct_io=True).tensor.split(nbytes)

    def run(operations: list[tuple[Any, Extent]], at_least: float = seconds) -> float:
        pending: collections.deque[Any] = collections.deque()
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < at_least:
            for operation, extent in operations:
                if len(pending) == len(buffers):
                    pending.popleft().wait()
                pending.append(operation(extent, buffers[count % len(buffers)]))
                count += 1
        for one in pending:
            one.wait()
        return count * nbytes / (time.perf_counter() - start)

    try:
        run([(store.write, extent) for extent in extents], 0.0)
        write = run([(store.write, extent) for extent in extents])
        read = run([(store.read, extent) for extent in extents])
        mixed = list(zip(extents[:count], extents[count:], strict=True))
        both = run([entry for a, b in mixed for entry in ((store.read, a), (store.write, b))])
    finally:
        store.close()
        backend.close()
    return {"read": read, "write": write, "both": both}


class Rates:
    """Of memory, measured once, and of the drive, before and after what it is beside: the mean of both, since a drive that
    others share changes its rate while a case runs, by more than what there is to be measured."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._memory, self._nvme = memory_rate(), nvme_rates(folder)

    def now(self) -> dict[str, Any]:
        """Of what ran since the last time."""
        before, self._nvme = self._nvme, nvme_rates(self._folder)
        return {"memory": self._memory, "nvme": {key: (rate + self._nvme[key]) / 2 for key, rate in before.items()}}


def on_drive(read: float, written: float, nvme: dict[str, float]) -> float:
    """Seconds at the measured rates: what goes both ways at once, and the rest of one way."""
    both = min(read, written)
    return 2 * both / nvme["both"] + (read - both) / nvme["read"] + (written - both) / nvme["write"]


def in_parts(floor_seconds: float, *parts: Iterable[float]) -> float:
    """What a step takes at least, in seconds, where what moves in one of its parts is not moved in another: an update that
    waits for the norm of all gradients runs under the next forward, which finds each unit updated. Each part lasts as long as
    the longest of what goes on in it side by side; and no step is shorter than its floor."""
    return max(floor_seconds, sum(map(max, parts)))


def record_nbytes(state_format: str | None) -> tuple[float, float]:
    """Of a parameter: of its values, and of its optimizer record. None: fp32 parameters, which are their own masters."""
    from offload.device.arithmetic.records import RecordFormat
    from offload.device.arithmetic.segment import StateFormat

    if state_format is None:
        return 4.0, RecordFormat(StateFormat.FP32, own_master=False).nbytes(64) / 64
    return 2.0, RecordFormat(StateFormat(state_format)).nbytes(64) / 64


def memory_nbytes(state_format: str | None) -> float:
    """That Adam reads and writes of each parameter: the gradient, the record, the values; what is written without having been
    read costs its line twice."""
    values, record = record_nbytes(state_format)
    return values + 2 * record + 2 * values


def drive_nbytes(state_format: str | None) -> dict[str, float]:
    """Bytes of each parameter between drive and memory with everything on NVMe, by formula: values read for forward and
    backward and written by the update, records read and written; gradients where all of them are spilled."""
    values, record = record_nbytes(state_format)
    return {"read": 2 * values + record, "written": values + record, "spilled": values}


class Compute:
    """Forward and backward of plain PyTorch without an optimizer, in a process of its own, gradients dropped as they come; of a
    model that is too large for that, scaled by parameters from the largest that was measured."""

    IN_MEMORY = ("tiny", "125M", "125M, 64 tokens", "1B, 128 tokens", "1B")

    def __init__(self, measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`measure`: what comes of a case, in a process of its own."""
        self._measure = measure
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def seconds(self, arguments: dict[str, Any], of: str, parameters: int | None = None) -> float:
        """Of one step. `of`: the case that it is the floor of. `parameters`: of the model, where it has to be scaled."""
        found = self._of(arguments, of)
        seconds = float(found["median_seconds"])
        is_same = parameters is None or found["shape"] == arguments["shape"]
        return seconds if is_same else seconds * parameters / found["parameters"]

    def forward_share(self, arguments: dict[str, Any], of: str) -> float:
        """Of a step's seconds, those of the forward."""
        found = self._of(arguments, of)
        return float(found["forward_seconds"] / found["median_seconds"])

    def _of(self, arguments: dict[str, Any], of: str) -> dict[str, Any]:
        shape, case = arguments["shape"], "compute, bf16" if "bf16" in of else "compute"
        measured = shape if shape in self.IN_MEMORY else self.IN_MEMORY[-1]
        if (measured, case) not in self._known:
            self._known[measured, case] = self._measure({**arguments, "shape": measured, "case": case})
        return self._known[measured, case]
