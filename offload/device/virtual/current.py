# SPDX-License-Identifier: Apache-2.0
"""The machine that exists only in numbers, while this process runs on one.

Arithmetic on memory asks here first: on such a machine it takes its time and leaves the bytes alone.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from offload.device.pending import Pending


class Imagined(Protocol):
    """What takes virtual time instead of computing."""

    cpu_nbytes: int
    nvme_nbytes: int

    def host_memory(self, nbytes: int) -> Tensor | None:
        """What stands for so many bytes of host memory: uint8 [nbytes]. None where addresses do that nobody writes to."""
        ...

    def takes_as_written(self, memory: Tensor) -> None:
        """What `host_memory` gave takes memory only as it is written."""
        ...

    def wrote(self, place: Tensor) -> None:
        """`place` was written."""
        ...

    def pass_over(self, place: Tensor, nbytes: int) -> None:
        """One pass over `nbytes`, by whoever computes on the memory in which `place` lies."""
        ...

    def transfer(self, nbytes: int, *, is_write: bool, priority: int) -> Pending:
        """Read or write so many bytes of NVMe."""
        ...

    def take_left_out(self) -> int:
        """How many micro-batches of the step, before the one that begins, are counted and not run; each is told of once."""
        ...

    def transferred(self) -> tuple[float, float, float, float]:
        """Bytes read and written, and the seconds in which reads and writes were in flight."""
        ...


_present: list[Imagined] = []


def imagined() -> Imagined | None:
    """The machine that is imagined now; None on a real one."""
    return _present[-1] if _present else None


def enter(machine: Imagined) -> None:
    """From now on, in every thread."""
    if _present:
        raise AssertionError("one virtual machine at a time")
    _present.append(machine)


def leave() -> None:
    """No longer."""
    _present.clear()
