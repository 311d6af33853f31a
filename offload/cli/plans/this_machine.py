# SPDX-License-Identifier: Apache-2.0
"""The machine at hand in numbers, measured as training uses it: what `plan --machine this` runs on and `probe` writes down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median_high

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offload
from offload.build.assembly import accelerator_name
from offload.cli.plans.operation_rates import operation_rates
from offload.cli.plans.rates import DIRECTIONS, Drive, link_rates, seconds_per_call, stream_bytes_per_second
from offload.device.host_memory.memory_limits import host_memory_limit
from offload.device.virtual.description import Machine, changed
from offload.device.virtual.machine import VirtualMachine
from offload.forecast import Loop, simulate
from offload.tiers.io import open_backend
from offload.tiers.scratch import free_nbytes
from offload.tiers.verification import checksum, verification_is_on

_WIDTH, _TOKENS = 1024, 256
_WIDTH_ON_GPU, _TOKENS_ON_GPU = 4096, 8192
"""So much that each operation takes a fast device several times as long as the host takes to launch it."""
_DRIVE_NBYTES = 512 * 2**20
_ENDURANCE_NBYTES = 1200e12
_UNMEASURED_DRIVE = 3e9
_SMALL_UNITS, _SMALL_STEPS = 24, 8


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """`sources`: by field, where its number comes from."""

    machine: Machine
    sources: dict[str, str]


def measure_machine(paths: Sequence[str], seconds: float, sample: Callable[[], object] | None = None) -> MeasuredMachine:
    """`paths`: of the drives, none where there are none to measure. `seconds`: for each rate. `sample`: a forward and a
    backward on the device, whose operations are looked at instead of those of a block of width 1024 with 256 tokens, or on a
    GPU of width 4096 with 8192.

    Takes some 10 x `seconds`. Writes a scratch file of 512 MiB."""
    on_gpu = torch.cuda.is_available() and accelerator_name() == "cuda"
    device = torch.device("cuda") if on_gpu else torch.device("cpu")
    sources: dict[str, str] = {}
    memory = stream_bytes_per_second(seconds)
    sources["memory_bandwidth"] = "measured: a stream of four arrays read and three written"
    works = [_work(device, dtype) for dtype in (torch.bfloat16, torch.float32)]
    rates = operation_rates(works, device, seconds)
    sampled = operation_rates([sample], device, seconds) if sample is not None else rates
    sources["flops"] = sources["flops_32"] = "measured: matrix products of a block, forward and backward"
    sources["device_bandwidth"] = "measured: its other operations"
    launch_seconds = _launch_seconds(device)
    sources["launch_seconds"] = "measured: forward and backward of a block of width 8, an operation"
    numbers = _device_numbers(device, seconds) if on_gpu else {}
    sources |= dict.fromkeys(numbers, "measured")
    drive, drive_source = _drive_numbers(paths, seconds)
    sources |= dict.fromkeys(drive, drive_source) | {"nvme_endurance": "assumed: 1,200 TB a drive, as data sheets of 2 TB say"}
    sources["cpu_nbytes"] = "what is free"
    without_calls = Machine(
        name="this", kind="gpu" if on_gpu else "cpu", cpu_nbytes=float(max(host_memory_limit().free_nbytes, 1)),
        memory_bandwidth=memory, peer=0.0,
        flops=_known(sampled.flops, rates.flops), flops_32=_known(sampled.flops_32, rates.flops_32),
        device_bandwidth=_known(sampled.bandwidth, rates.bandwidth), launch_seconds=launch_seconds,
        call_seconds=1e-9, nvme_drives=float(max(len(paths), 1)), nvme_endurance=_ENDURANCE_NBYTES * max(len(paths), 1),
        **({"device_nbytes": float("inf"), "h2d": float("inf"), "d2h": float("inf")} | numbers | drive),
    )  # fmt: skip
    sources["call_seconds"] = "measured: CPU time of a step of 24 small units beyond what its operations take, a call"
    return MeasuredMachine(changed(without_calls, call_seconds=_call_seconds(without_calls)), sources)


def _known(sampled: float | None, otherwise: float | None) -> float:
    rate = sampled or otherwise
    assert rate is not None
    return rate


# ---- operations ------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """The operations of a block of the Llama architecture."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        keywords = {"bias": False, "device": device, "dtype": dtype}
        self.first, self.second = (nn.RMSNorm(width, device=device, dtype=dtype) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width, **keywords) for _ in range(4))  # type: ignore[arg-type]
        self.gate, self.up = (nn.Linear(width, 3 * width, **keywords) for _ in range(2))  # type: ignore[arg-type]
        self.down = nn.Linear(3 * width, width, **keywords)  # type: ignore[arg-type]

    def forward(self, values: Tensor) -> Tensor:
        """`values`: [tokens, width]."""
        normed = self.first(values)
        heads = (1, *values.shape[:1], -1, min(values.shape[1], 64))
        query, key, value = (one(normed).view(heads).transpose(1, 2) for one in list(self.attention)[:3])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.attention[3](mixed.transpose(1, 2).reshape(values.shape))
        normed = self.second(values)
        result: Tensor = values + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


def _work(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    width, count = (_WIDTH, _TOKENS) if device.type == "cpu" else (_WIDTH_ON_GPU, _TOKENS_ON_GPU)
    block = _Block(width, device, dtype)
    tokens = torch.randn(count, width, device=device, dtype=dtype)
    return lambda: block(tokens).sum().backward()


def _launch_seconds(device: torch.device) -> float:
    """Of the host, for one operation of a model so small that nothing else takes time."""
    block, tokens = _Block(8, device, torch.float32), torch.randn(4, 8, device=device)

    def step() -> None:
        block(tokens).sum().backward()

    operation_count = operation_rates([step], device, 0.0).count
    return _processor_seconds(step, 20) / operation_count


def _processor_seconds(step: Callable[[], object], count: int) -> float:
    """The median of so many calls."""
    times = []
    for _ in range(count):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return median_high(times)


# ---- device and drive ------------------------------------------------------------------------------------------------


def _device_numbers(device: torch.device, seconds: float) -> dict[str, float]:
    links = link_rates(device, seconds)
    return {"device_nbytes": float(torch.cuda.mem_get_info(device)[0]), "h2d": links.to_device, "d2h": links.from_device}


def _drive_numbers(paths: Sequence[str], seconds: float) -> tuple[dict[str, float], str]:
    """Drives are used in equal shares, so that the slowest decides."""
    room = float(max(free_nbytes(paths or ["."]), 1))
    if not paths:
        rates = dict.fromkeys(("nvme_read", "nvme_write", "nvme_both"), _UNMEASURED_DRIVE) | {"nvme_core": math.inf}
        return {**rates, "nvme_nbytes": room}, "not measured, no --nvme: 3 GB/s assumed; what is free in this folder"
    slowest: dict[str, float] = {}
    core_seconds, moved_nbytes = 0.0, 0
    for path in paths:
        with Drive(path, _DRIVE_NBYTES) as drive, closing(open_backend(paths=[path])) as backend:
            start = time.process_time()
            for direction in DIRECTIONS:
                rate = drive.bytes_per_second(backend, direction, seconds)
                slowest[direction] = min(slowest.get(direction, rate), rate)
            core_seconds += time.process_time() - start
            moved_nbytes += backend.stats().read_nbytes + backend.stats().written_nbytes
    rates = {f"nvme_{direction}": len(paths) * rate for direction, rate in slowest.items()}
    rates["nvme_core"] = 1.0 / (core_seconds / moved_nbytes + _checksum_seconds())
    return {**rates, "nvme_nbytes": room}, f"measured at {', '.join(paths)}"


def _checksum_seconds() -> float:
    """A byte, where checksums are kept. Of most it is taken in a core's own cache, by what passes over it anyway; of parameters
    that are fetched, 4 of 28 bytes, in a pass of its own."""
    if not verification_is_on():
        return 0.0
    in_cache, in_memory = map(_checksum_seconds_of, (1 << 16, _DRIVE_NBYTES // 8))  # the second more than caches have
    return (24 * in_cache + 4 * in_memory) / 28


def _checksum_seconds_of(nbytes: int) -> float:
    memory = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
    return seconds_per_call(lambda: checksum(memory), 0.02) / nbytes


# ---- the engine's own calls ------------------------------------------------------------------------------------------


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(_SMALL_UNITS))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def _call_seconds(machine: Machine) -> float:
    """What the engine's Python takes for each call that a virtual run counts: what a real step takes beyond a virtual one in
    which calls take nothing, over their number."""
    config = offload.Config(parameters="cpu", optimizer_states="cpu", update="step")

    def begin(device: str) -> offload.Engine:
        with torch.device(device):
            model = _Small()
        return offload.initialize(model, torch.optim.AdamW(model.parameters(), foreach=False), config)

    def micro_batch(engine: offload.Engine, device: torch.device | str) -> None:
        engine.backward(engine.module(torch.zeros(1, 32, device=device)).sum())

    def end(engine: offload.Engine) -> None:
        engine.step()
        engine.zero_grad()

    with begin("cpu") as engine:
        device = next(engine.module.parameters()).device

        def step() -> None:
            micro_batch(engine, device)
            end(engine)

        real_seconds = _processor_seconds(step, _SMALL_STEPS)
    virtual, counts = VirtualMachine(machine), [0]

    def micro_batch_virtual(engine: offload.Engine) -> None:
        counts.append(virtual.calls)
        micro_batch(engine, "meta")

    found = simulate(virtual, Loop(lambda: begin("meta"), micro_batch_virtual, end), tokens=1)
    calls = counts[-1] - counts[-2]
    return max((real_seconds - found.step_seconds) / max(calls, 1), 1e-7)
