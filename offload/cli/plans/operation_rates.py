# SPDX-License-Identifier: Apache-2.0
"""How fast the operations of a model are here: those with floating-point operations to count, and by bytes the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.device.seen_operations import SeenOperations, tensors_in
from offload.device.virtual.operations import flops_of, touched_nbytes

_HEAD_START_CYCLES = 500_000
"""Of a device's clock: about a quarter of a millisecond."""


@dataclass(slots=True)
class _Sums:
    seconds: float = 0.0
    amount: float = 0.0

    def add(self, seconds: float, amount: float) -> None:
        self.seconds += seconds
        self.amount += amount

    @property
    def rate(self) -> float | None:
        return self.amount / self.seconds if self.seconds > 0 and self.amount > 0 else None


@dataclass(frozen=True, slots=True)
class OperationRates:
    """A second; None where there was no such operation. `count`: of the operations that were looked at."""

    flops: float | None
    """Of those that have floating-point operations, in 16 bits."""
    flops_32: float | None
    bandwidth: float | None
    """Bytes that the others touch."""
    count: int


def operation_rates(works: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> OperationRates:
    """Of what each of `works` gives to the device: after one run to warm up, as many as fit into `seconds`, at least one."""
    timing = _Timing(device)
    for work in works:
        work()
        end = time.perf_counter() + seconds
        with timing:
            work()
            while time.perf_counter() < end:
                work()
    half, single = timing.products[False], timing.products[True]
    return OperationRates(half.rate, single.rate, timing.others.rate, timing.count)


class _Timing(SeenOperations):
    """Takes the time of every operation. On the thread that enters it, and the one that backward runs on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.products, self.others, self.count = {False: _Sums(), True: _Sums()}, _Sums(), 0

    def seen(self, function: Any, args: Any, given: Mapping[str, Any]) -> Any:
        """The operation's result, timed."""
        result, seconds = self._timed(lambda: function(*args, **given))
        inputs, outputs = tensors_in((*args, *given.values())), tensors_in((result,))
        flops = flops_of(function, args, given, result)
        if flops:
            self.products[inputs[0].dtype is torch.float32].add(seconds, flops)
        else:
            self.others.add(seconds, touched_nbytes(function, inputs, outputs))
        self.count += 1
        return result

    def _timed(self, operation: Callable[[], Any]) -> tuple[Any, float]:
        if self._device.type != "cuda":
            start = time.perf_counter()
            result = operation()
            return result, time.perf_counter() - start
        # The device is kept busy until the host has launched all of it: else the launch would be timed.
        torch.cuda._sleep(_HEAD_START_CYCLES)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        result = operation()
        ended.record()
        ended.synchronize()
        return result, began.elapsed_time(ended) / 1e3
