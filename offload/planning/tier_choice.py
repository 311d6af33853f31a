# SPDX-License-Identifier: Apache-2.0
"""What the planner chooses for one engine, in few numbers: `offload.planning.route` makes a route for each unit of it."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.budget import LEAST_LANDING_BUFFERS, Tier


@dataclass(frozen=True, slots=True)
class Kept:
    """What lies in host memory of states whose tier is NVMe: of the parameters the first chunks in the order of the units, of
    the records about the same share of each unit, or where the model computes on host memory the first ones, too.

    Bytes that one byte of memory saves in a step of n micro-batches:

        parameters  2n + 1  read for forward and backward, written once; whole units where the CPU computes
        records     2       read and written once
        gradients   2n      written under backward and read back; half as much where gradients are 16-bit and n > 1, since a
                            buffer has room for their sum in fp32

    So parameters come first. Records or gradients: gradients in memory need no buffers, so it is tried which moves less.

    Why a fixed set, and why no order of use is reversed: an optimizer step uses every record once, in the same order each
    time. Of memory for a fraction f of the bytes, a fixed set saves exactly f of the transfers in both directions. What evicts
    the least recently used saves nothing on such a cycle. Passing over the records in alternating direction with a set that
    changes saves the same f (what one pass ends with, the next begins with) and no more, since no policy can hold more than f
    from one pass to the next; it would take the order away from the next forward, which wants the first units first, and would
    move what a fixed set updates where it lies.

    Why of all units alike: few records are read ahead (`READ_AHEAD`). While many in a row are updated in memory the drive
    stands still, and in those that follow it is all that is waited for; one here and there leaves it at work. A unit of which
    a part lies in memory has no update before `step` (`Route.undoable`): beside a device that costs less than what it saves, in
    virtual time; on the CPU it costs more, measured (0.2 B with half of its records in memory: mostly 2 to 7 % of the step). Of
    the parameters the first are kept: the forward waits for them first.
    """

    unit_count: int = 0
    """Units that need no fetch, since the device computes where their parameters lie."""
    parameter_count: int = 0
    record_count: int = 0
    record_nbytes: int = 0


NOTHING_KEPT = Kept()


@dataclass(frozen=True, slots=True)
class Near:
    """The units of which a state lies in device memory that would be further away. Those of `records` are updated there, and
    are among those of `gradients`."""

    parameters: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    records: frozenset[int] = frozenset()


NOTHING_NEAR = Near()


@dataclass(frozen=True, slots=True)
class Choice:
    """`parameters`, `states`, `gradients`: the furthest tier of each. `retained`: buffers for fp32 gradients on their way to
    NVMe. `landing`: buffers for gradients that are added up on the host. `spare_nbytes`: of device memory beyond what is needed
    for units in use, so that some stay between their uses. `undoes_in_memory`: second places in host memory, as far as there is
    room, so that updates begin in backward."""

    parameters: Tier
    states: Tier
    gradients: Tier
    prefetch: int = 0
    retained: int = 0
    landing: int = LEAST_LANDING_BUFFERS
    kept: Kept = NOTHING_KEPT
    near: Near = NOTHING_NEAR
    spare_nbytes: int = 0
    undoes_in_memory: bool = True
