# SPDX-License-Identifier: Apache-2.0
"""A device of memory of its own whose every verb costs nothing: a step is the model's work and the engine's Python.

Copies move nothing and are over at once, so the values are not those of a training: only times mean something. Kernels that a
GPU would be given (gradients packed, squares summed) are calls of the native library, which take about as long as a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.build import assembly
from offload.device.accelerator import Accelerator, UnitMemory
from offload.device.lane import HostLane, LaneRow, ThreadLane
from offload.device.pending import Pending, Settled

_OVER = Settled()


class _StubMemory(UnitMemory):
    def __init__(self, nbytes: int) -> None:
        self.flat = torch.zeros(nbytes, dtype=torch.uint8)
        self.nbytes, self.filled = nbytes, True

    def _gain(self) -> None:
        pass

    def _lose(self) -> None:
        pass


class StubAccelerator(Accelerator):
    """See the module. Host work has threads of its own, as beside a GPU."""

    name = "stub"
    unified = False
    copies_beside = True

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _StubMemory(nbytes)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return _OVER

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return _OVER

    def join(self, pending: Pending) -> None:
        pending.wait()

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        return ThreadLane(name, told=LaneRow(name, self.recorder))


@contextmanager
def stub_device() -> Iterator[None]:
    """Engines that are made inside have it."""
    before = assembly.choose_accelerator
    assembly.choose_accelerator = StubAccelerator
    try:
        yield
    finally:
        assembly.choose_accelerator = before
