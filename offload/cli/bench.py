# SPDX-License-Identifier: Apache-2.0
"""Time the parts of a training step that are this package's own, on this machine.

Training must not run meanwhile. `io` writes a scratch file, which is gone when it ends.

  python -m offload bench adam
  python -m offload bench io --nvme /mnt/nvme0
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import closing

import torch

from offload import _native
from offload.cli.arguments import add_drive_arguments, check_is_folder, positive, positive_number
from offload.cli.plans.rates import DIRECTIONS, Drive, in_turns
from offload.cli.text import format_count, format_nbytes, format_rate, format_seconds, table
from offload.config import parse_nbytes
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import Segment
from offload.device.host_memory.memory_limits import host_memory_limits
from offload.errors import ConfigError
from offload.tiers.io import open_backend
from offload.tiers.memory import HostMemory

_ADAM_NBYTES = 28
"""Of a parameter: four fp32 arrays, gradient and parameter in bf16, and the moments of torch's optimizer."""
_HYPER = Hyper(Rule.ADAM, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="benchmarks", dest="kind", required=True, metavar="KIND")
    text = "the optimizer kernel, beside memory bandwidth and torch's fused AdamW"
    kernel = kinds.add_parser("adam", help=text, description=f"Time {text}.")
    kernel.add_argument(
        "--numel", type=positive, default=16 * 1024 * 1024, metavar="N", help="parameters (default 16 Mi: 256 MiB of arrays)"
    )
    kernel.add_argument("--seconds", type=positive_number, default=3.0, metavar="S", help="seconds for each row (default 3)")
    kernel.set_defaults(run=run_adam)
    text = "what the I/O engine reaches of a drive"
    drive = kinds.add_parser("io", help=text, description=f"Measure {text}.")
    drive.add_argument("--nvme", required=True, metavar="PATH", help="a folder on the drive")
    add_drive_arguments(drive)
    drive.add_argument("--backend", default="auto", metavar="NAME", help="io_uring, threads, aiofiles (default: the best)")
    drive.add_argument("--seconds", type=positive_number, default=6.0, metavar="S", help="seconds in all (default 6)")
    drive.set_defaults(run=run_io)


# ---- adam ------------------------------------------------------------------------------------------------------------


def run_adam(args: argparse.Namespace) -> int:
    """`bench adam`. Returns 0."""
    numel = math.ceil(args.numel / _native.STREAM_STEP_NUMEL) * _native.STREAM_STEP_NUMEL
    free_nbytes = min(limit.free_nbytes for limit in host_memory_limits())
    if _ADAM_NBYTES * numel > free_nbytes:
        needed, free = format_nbytes(_ADAM_NBYTES * numel), format_nbytes(free_nbytes)
        raise ConfigError(f"--numel {args.numel} takes {needed} of host memory, and {free} are free: give a smaller one.")
    calls = _adam_calls(numel)
    times = in_turns([call for _, _, call in calls], args.seconds * len(calls))
    timed = [(name, nbytes, seconds) for (name, nbytes, _), seconds in zip(calls, times, strict=True)]
    rows = adam_rows(timed, numel)
    threads = f"{_native.default_threads().count} native threads" if _native.available() else "no native library"
    print(f"AdamW over {format_count(numel)} parameters, {threads}, {torch.get_num_threads()} torch threads")
    print(table(("", "time", "B/parameter", "rate", "of the fastest"), rows))
    return 0


_STREAM = "stream: 4 arrays read, 3 written (no arithmetic)"


def adam_rows(timed: list[tuple[str, int, float]], numel: int) -> list[tuple[str, ...]]:
    """The table of (name, bytes moved, seconds). The memory's limit is the highest rate that any of them reached."""
    fastest = max(nbytes / seconds for _, nbytes, seconds in timed)
    return [
        (
            name,
            format_seconds(seconds),
            f"{nbytes / numel:.0f}",
            format_rate(nbytes, seconds),
            f"{100 * nbytes / seconds / fastest:.0f} %",
        )
        for name, nbytes, seconds in timed
    ]


def _adam_calls(numel: int) -> list[tuple[str, int, Callable[[], None]]]:
    """(name, bytes that one call moves, the call), on the same memory."""
    memory = [HostMemory(4 * numel, "bench", prefault=True).tensor.view(torch.float32) for _ in range(4)]
    grad, master, exp_avg, exp_avg_sq = memory
    grad.normal_()
    exp_avg_sq.fill_(1.0)
    grad16 = grad.to(torch.bfloat16)
    emit = torch.empty_like(grad16)

    def kernel(gradient: torch.Tensor, emitted: torch.Tensor | None) -> Callable[[], None]:
        arrays = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        segment = Segment(gradient, arrays, emitted, _HYPER, step=10)
        return lambda: update([segment])

    addresses = [(tensor.data_ptr(), 4) for tensor in memory]
    calls: list[tuple[str, int, Callable[[], None]]] = []
    if _native.available():
        calls.append((_STREAM, 28 * numel, lambda: _native.stream(addresses, addresses[1:], numel)))
    calls.append(("offload, fp32 gradient", 28 * numel, kernel(grad, None)))
    calls.append(("offload, bf16 gradient in, bf16 parameter out", 28 * numel, kernel(grad16, emit)))
    calls.append(("torch.optim.AdamW(fused=True), fp32", 28 * numel, _torch_fused(master, grad)))
    return calls


def _torch_fused(master: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    parameter = torch.nn.Parameter(master)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=_HYPER.lr, weight_decay=_HYPER.weight_decay, fused=True)

    def step() -> None:
        optimizer.step()

    return step


# ---- io --------------------------------------------------------------------------------------------------------------


def run_io(args: argparse.Namespace) -> int:
    """`bench io`. Returns 0."""
    check_is_folder(args.nvme, "--nvme")
    with Drive(args.nvme, parse_nbytes(args.size, "--size")) as drive, closing(open_backend(args.backend)) as backend:
        rates = [(kind, drive.bytes_per_second(backend, kind, args.seconds / len(DIRECTIONS))) for kind in DIRECTIONS]
        how = "direct I/O" if drive.direct else "through the page cache"
        print(f"{backend.name} at {args.nvme}, {how}; transfers of 8 MiB, 8 at once")
    rows = [(kind if kind != "both" else "both, summed", format_rate(rate, 1.0)) for kind, rate in rates]
    print(table(("", "rate"), rows))
    return 0
