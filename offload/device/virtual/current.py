# SPDX-License-Identifier: Apache-2.0
"""The machine that exists only in numbers, while this process runs on one.

Arithmetic on memory asks here first: on such a machine it takes its time and leaves the bytes alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.device.virtual.machine import VirtualMachine

_present: list[VirtualMachine] = []


def virtual_machine() -> VirtualMachine | None:
    """The virtual machine that this process runs on now; None on a real one."""
    return _present[-1] if _present else None


def enter(machine: VirtualMachine) -> None:
    """From now on, in every thread."""
    if _present:
        raise AssertionError("one virtual machine at a time")
    _present.append(machine)


def leave() -> None:
    """No longer."""
    _present.clear()
