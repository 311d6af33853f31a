# SPDX-License-Identifier: Apache-2.0
"""What the machine's parts can do: links, matrix products, CPU Adam, host memory. Measured in one process, in seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from offload import _native
from offload.build.assembly import choose_accelerator
from offload.cli.plans.rates import Drive
from offload.device.accelerator import Accelerator
from offload.device.arithmetic import optimizer_step
from offload.device.arithmetic.records import StateFormat
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.pending import Pending
from offload.errors import OffloadError
from offload.tiers.io import open_backend
from offload.tiers.memory import HostMemory

from .contenders import nvme_folder

CHUNK_NBYTES = 4 * 2**20
"""A chunk in 16 bits: the least that the engine copies of a large parameter's gradient."""


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _best_seconds(work: Callable[[], None], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        work()
        _synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def links(accelerator: Accelerator, nbytes: int, repeats: int = 5, copy_nbytes: int | None = None) -> dict[str, Any]:
    """Bytes per second of each direction alone and of both at once: from the engine's registered memory, and beside it from
    memory that the CUDA runtime allocated. In one copy, as a unit comes; or ours in copies of `copy_nbytes`."""
    copy_nbytes = copy_nbytes or nbytes
    registered = [HostMemory(nbytes, "rates", register=accelerator.pin, prefault=True).tensor for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device) for _ in range(2)]
    pieces = [slice(start, min(start + copy_nbytes, nbytes)) for start in range(0, nbytes, copy_nbytes)]

    def ours(*, h2d: bool, d2h: bool) -> None:
        pending: list[Pending] = []
        for piece in pieces:
            if h2d:
                pending.append(accelerator.copy_in(device[0][piece], registered[0][piece]))
            if d2h:
                pending.append(accelerator.copy_out(registered[1][piece], device[1][piece]))
        for one in pending:
            one.wait()

    found: dict[str, Any] = {"copy_nbytes": copy_nbytes, "total_nbytes": nbytes}
    for name, flags in (("h2d", (True, False)), ("d2h", (False, True)), ("both", (True, True))):
        moved = nbytes * sum(flags)
        found[name] = moved / _best_seconds(lambda flags=flags: ours(h2d=flags[0], d2h=flags[1]), repeats)
    if accelerator.device.type == "cuda":
        found["bare"] = _bare_links(device, nbytes, repeats)
        found["share_of_bare"] = {name: found[name] / found["bare"][name] for name in ("h2d", "d2h", "both")}
    return found


def _bare_links(device: list[torch.Tensor], nbytes: int, repeats: int) -> dict[str, float]:
    """`copy_` of whole pinned tensors is one cudaMemcpyAsync each."""
    pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def run(*, h2d: bool, d2h: bool) -> None:
        if h2d:
            with torch.cuda.stream(streams[0]):
                device[0].copy_(pinned[0], non_blocking=True)
        if d2h:
            with torch.cuda.stream(streams[1]):
                pinned[1].copy_(device[1], non_blocking=True)

    return {
        "h2d": nbytes / _best_seconds(lambda: run(h2d=True, d2h=False), repeats),
        "d2h": nbytes / _best_seconds(lambda: run(h2d=False, d2h=True), repeats),
        "both": 2 * nbytes / _best_seconds(lambda: run(h2d=True, d2h=True), repeats),
    }


def matrix_flops(device: torch.device, size: int, repeats: int = 10) -> float:
    """Floating-point operations per second of a bf16 product of random matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / _best_seconds(lambda: [a @ b for _ in range(4)] and None, repeats) * 4


def cpu_adam(numel: int, state_format: StateFormat, repeats: int = 5) -> float:
    """Parameters per second of the CPU kernel, bf16 gradient and weight, fp32 moments; fp32 master, or split."""
    grad, emit = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    arrays = {name: torch.ones(numel) for name in ("exp_avg", "exp_avg_sq")}
    arrays |= {"remainder": torch.zeros(numel, dtype=torch.int16)} if state_format.is_split else {"master": torch.ones(numel)}
    hyper = Hyper(Rule.ADAM, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
    segment = optimizer_step.Segment(grad, arrays, emit, hyper, step=1, state_format=state_format)
    return numel / _best_seconds(lambda: optimizer_step.update([segment]), repeats)


def host_memory(numel: int, repeats: int = 5) -> float | None:
    """Bytes per second of a loop that reads four arrays and writes three, as Adam does; None without the native library."""
    if not _native.available():
        return None
    arrays = [torch.zeros(numel) for _ in range(4)]
    places = [(array.data_ptr(), array.itemsize) for array in arrays]
    return 7 * 4 * numel / _best_seconds(lambda: _native.stream(places, places[:3], numel), repeats)


def drive(folder: str, nbytes: int, seconds: float) -> dict[str, float] | None:
    """Bytes per second of reads and of writes, as the engine makes them; None where nothing can be written there."""
    try:
        with Drive(folder, nbytes) as file, contextlib.closing(open_backend(paths=[folder])) as backend:
            return {name: file.bytes_per_second(backend, name, seconds) for name in ("write", "read")}
    except OffloadError as error:
        print(f"no drive: {error}", file=sys.stderr)
        return None


def measure(*, tiny: bool) -> dict[str, Any]:
    """Everything; `tiny` for a dry run."""
    accelerator = choose_accelerator()
    sizes = (8 * 2**20, 2) if tiny else (512 * 2**20, 5)
    try:
        return {
            "links": links(accelerator, *sizes),
            "links_in_chunks": links(accelerator, *sizes, CHUNK_NBYTES),
            "matrix_flops": matrix_flops(accelerator.device, 128 if tiny else 8192, 2 if tiny else 10),
            "cpu_adam_numel": {
                one.value: cpu_adam(1 << 18 if tiny else 1 << 27, one) for one in (StateFormat.FP32, StateFormat.SPLIT)
            },
            "nvme": drive(nvme_folder(), 1 << 27 if tiny else 1 << 30, 0.2 if tiny else 1.5),
            "host_memory": host_memory(1 << 18 if tiny else 1 << 26),
        }
    finally:
        accelerator.close()
