# SPDX-License-Identifier: Apache-2.0
"""What a step would take on a machine that need not exist: the engine itself, run there in virtual time.

    simulate(VirtualMachine(read_machine("rtx4090")), Loop(begin, micro_batch, end), micro_batches=8, tokens=8192)

The loop is the caller's: what is trained, with which settings and on what. Nothing here knows how an engine is made.

Of a step's many micro-batches those between the first ones and the last take as long as each other and move as much: once two
are seen to, the last is run, and those before it are counted as the two were; the engine is told how many those are, since the
last is where updates begin. Of a step that is not told of two and the last are run. Steps repeat, too: where the second
micro-batch of one takes what it took in the step before, that step goes on and is the last.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from offload.device.virtual.description import Machine
from offload.device.virtual.machine import COLLECTIVES, CORES, VirtualMachine
from offload.device.virtual.operations import CountedOperations, fused_attention
from offload.errors import BudgetError

LINKS = ("h2d", "d2h", "nvme_read", "nvme_write")
_IN_USE = "parameters in use"
_PARTS = ("forward", "between", "backward")
"""Of a step, as the planner weighs them."""
FIRST_STEPS = 2
"""At most before the one that is looked at: the first has no updates under its forward."""
_ALIKE, _THE_SAME = 1e-3, 1e-6
"""How much of a micro-batch's time may be between what two of them need of a resource for them to count as alike: in one step,
or as the same of two steps."""


class Simulated(Protocol):
    """What is asked of an engine."""

    def stats(self) -> dict[str, Any]:
        """As `offload.Engine.stats`."""
        ...

    def profile(self, path: Path, steps: int) -> object:
        """As `offload.Engine.profile`."""
        ...

    def close(self) -> None:
        """As `offload.Engine.close`."""
        ...


E = TypeVar("E", bound=Simulated)


@dataclass(frozen=True, slots=True)
class Loop(Generic[E]):
    """What the caller trains with."""

    begin: Callable[[], E]
    """Makes the engine, for a model on the meta device."""
    micro_batch: Callable[[E], None]
    """A forward and its backward."""
    end: Callable[[E], None]
    """Of a step, after the last micro-batch."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one step, after the first ones. `floors`: seconds that each resource needs for it, were it the only one.

    Of several ranks bytes are those of one, and tokens those of all. Where nothing could be run, seconds are NaN and the rest
    is empty."""

    fits: bool
    reason: str
    step_seconds: float
    floors: dict[str, float]
    tokens_per_second: float
    peak_nbytes: dict[str, int]
    moved_nbytes: dict[str, int]
    hidden: dict[str, float | None]
    exposed_seconds: dict[str, float]
    """By link, and for passes over host memory ("host_memory"): in which it was busy and the model was not."""
    placement: dict[str, str]
    planned: list[dict[str, Any]]
    """What lies where, as `Engine.stats` has it."""
    model_tier: str
    """The memory that the model computes on."""
    own_nbytes: int
    """What the model takes there itself, about: activations, gradients, inputs."""
    values_read: int
    """How often the model asked in it for a value on the device, which there is none of."""
    parts: dict[str, dict[str, float]]
    """Of "forward", "between" and "backward": seconds that each link takes at least, as the placement was weighed by them."""
    ranks: int = 1

    @property
    def floor_seconds(self) -> float:
        return max(self.floors.values(), default=math.nan)

    @property
    def bottleneck(self) -> str:
        return max(self.floors, key=self.floors.__getitem__, default="")

    @property
    def peak_nbytes_of_all(self) -> dict[str, int]:
        """By tier, of all ranks together."""
        return {tier: self.ranks * nbytes for tier, nbytes in self.peak_nbytes.items()}

    def as_json(self) -> dict[str, Any]:
        """The object that `plan --json` prints; null for NaN, which JSON does not have."""
        names = ("fits", "reason", "step_seconds", "floor_seconds", "bottleneck", "tokens_per_second", "floors")
        more = ("peak_nbytes", "moved_nbytes", "hidden", "exposed_seconds", "placement", "planned")
        last = ("own_nbytes", "values_read", "parts", "ranks", "peak_nbytes_of_all")
        values = {name: getattr(self, name) for name in names + more + last}
        return {name: None if value != value else value for name, value in values.items()}


def simulate(
    virtual: VirtualMachine,
    loop: Loop[E],
    *,
    tokens: int,
    micro_batches: int = 1,
    trace: Path | None = None,
    most_nbytes: float = math.inf,
) -> Forecast:
    """Train as `loop` does a few steps on `virtual`, which is new; the last of them is the one that is told of.

    `tokens`: of one step, of all ranks, for the rate. `micro_batches`: of one step; where not all are run, the bytes it moves
    are within a thousandth. `trace`: the file for a trace of that step, of which all are run then. `most_nbytes`: of the
    memory that the model computes on; after a micro-batch that took more nothing is run, and what is told of is the peak until
    then.

    Raises what `loop` raises: `BudgetError` where no placement fits."""
    with virtual.running(), CountedOperations(virtual), fused_attention():
        engine = loop.begin()
        is_first = not gc.get_freeze_count()
        try:
            if is_first:  # what was made by now is not looked through for garbage again and again
                gc.freeze()
            second: _Counters | None = None
            for index in range(FIRST_STEPS + 1):
                is_last, before = index == FIRST_STEPS, _Mark(virtual)
                if is_last and trace is not None:
                    engine.profile(trace, steps=1)
                step = _Step(virtual, micro_batches, is_last, trace is not None, second)
                if not step.run(engine, loop, math.inf if is_last else most_nbytes) or step.is_last:
                    break
                second = step.second()
            spent = _grown(_Mark(virtual).reading(), before.reading())
            return _forecast(engine, virtual, {what: spent[what] + step.left_out.get(what, 0.0) for what in spent}, tokens)
        finally:
            if is_first:
                gc.unfreeze()
            engine.close()


_NOW, _COMPUTED, _VALUES = ("", "seconds"), ("", "computed"), ("", "values")
_Counters = dict[tuple[str, str], float]
"""Of a machine at one moment, or by how much they grew: by a resource's or a link's name, and what is counted: "needed"
seconds, "busy" and "hidden" ones, bytes "moved"."""


class _Mark:
    """The moment at which the device has done what it was given so far. The host, which may be far ahead, does not wait."""

    def __init__(self, virtual: VirtualMachine) -> None:
        self._virtual, self._end = virtual, virtual.compute.last
        self._given: _Counters = {_COMPUTED: virtual.compute_seconds, _VALUES: virtual.values_read}  # counted as it is given
        self.reached: _Counters | None = None
        """What had been counted then."""
        self._end.follow(self._reach)

    def _reach(self) -> None:
        virtual = self._virtual
        found: _Counters = self._given | {_NOW: virtual.simulation.now}
        for name, one in virtual.resources.items():
            found[name, "needed"] = one.moved / one.rate
            found[name, "busy"], found[name, "hidden"] = one.busy_seconds, one.hidden_seconds
        self.reached = found | {(link, "moved"): nbytes for link, nbytes in virtual.moved().items()}

    def reading(self) -> _Counters:
        """`reached`, waited for."""
        self._end.wait()
        assert self.reached is not None
        return self.reached


@dataclass(slots=True)
class _Step:
    """A step as it is run. `is_last`: it is to be told of; of another two micro-batches and the last are enough. `is_whole`: if
    it is told of, by all of them. `before`: what the second micro-batch of the step before took."""

    virtual: VirtualMachine
    micro_batches: int
    is_last: bool
    is_whole: bool
    before: _Counters | None
    marks: list[_Mark] = field(default_factory=list)
    """The ends of micro-batches."""
    left_out: _Counters = field(default_factory=dict)
    """What those take that are not run."""

    def run(self, engine: E, loop: Loop[E], most_nbytes: float) -> bool:
        """Whether its micro-batches took no more of the memory that the model computes on than `most_nbytes`; else it is not
        brought to its end."""
        left = self.micro_batches
        while left:
            loop.micro_batch(engine)
            self.marks.append(_Mark(self.virtual))
            left -= 1
            if self.virtual.memory.peak_nbytes > most_nbytes:
                return False
            if len(self.marks) + left == self.micro_batches:  # none was left out
                self.is_last = self.is_last or self._repeats()
            if left > 1 and (period := self._each_left_out()) is not None:
                self.left_out = {what: (left - 1) * one for what, one in period.items()}
                self.virtual.leave_out(left - 1)
                left = 1
        loop.end(engine)
        return True

    def second(self) -> _Counters | None:
        """What the second micro-batch took, if the device has done it."""
        reached = [mark.reached for mark in self.marks[:2] if mark.reached is not None]
        return _grown(reached[1], reached[0]) if len(reached) == 2 else None

    def _repeats(self) -> bool:
        second = self.second()
        return not self.is_whole and second is not None and self.before is not None and _alike(self.before, second, _THE_SAME)

    def _each_left_out(self) -> _Counters | None:
        """What each micro-batch takes but the last of those that are left, where they need not be run. Nobody asks in a step
        that is not told of."""
        if not self.is_last:
            return {} if len(self.marks) == 2 else None
        return _period(self.marks) if not self.is_whole else None


def _period(marks: list[_Mark]) -> _Counters | None:
    """What a micro-batch takes, if of those that the device has done the last two, neither of them the first, are alike.
    `marks`: the end of each."""
    reached = [mark.reached for mark in marks if mark.reached is not None][-3:]
    if len(reached) < 3:
        return None
    earlier, later = _grown(reached[1], reached[0]), _grown(reached[2], reached[1])
    return later if _alike(earlier, later, _ALIKE) else None


def _alike(earlier: _Counters, later: _Counters, share: float) -> bool:
    """Whether no two counts differ by more than that share of the time."""
    return all(abs(later[what] - earlier[what]) <= share * later[_NOW] for what in later if what[1] != "moved")


def _grown(after: _Counters, before: _Counters) -> _Counters:
    return {what: after[what] - before[what] for what in after}


def _forecast(engine: Simulated, virtual: VirtualMachine, spent: _Counters, tokens: int) -> Forecast:
    machine, stats = virtual.machine, engine.stats()
    floors = {"compute": spent[_COMPUTED]}
    for name, what in (("h2d", "host to device"), ("d2h", "device to host"), ("memory_bandwidth", "host memory")):
        floors[what] = spent[name, "needed"]
    if machine.kind == "cpu":  # they compute the model, and all passes over memory
        floors["compute"] = spent[CORES, "needed"]
    floors["NVMe"] = max(spent[name, "needed"] for name in ("nvme_read", "nvme_write", "nvme_both"))
    links = LINKS if virtual.rank_count == 1 else (*LINKS, COLLECTIVES)
    if COLLECTIVES in links:
        floors[COLLECTIVES] = spent[COLLECTIVES, "needed"]
    hidden = {link: spent[link, "hidden"] / busy if (busy := spent[link, "busy"]) > 0 else None for link in links}
    exposed = {link: spent[link, "busy"] - spent[link, "hidden"] for link in (*links, "memory_bandwidth")}
    exposed["host_memory"] = exposed.pop("memory_bandwidth")
    on_nvme = sum(line["nbytes"] for line in stats["planned"] if line["tier"] == "nvme")
    in_use = virtual.memory.peak_nbytes  # with host memory, where the model computes on it
    peak = {"device": 0, "cpu": stats["host_peak_nbytes"], "nvme": on_nvme} | {machine.model_tier: in_use}
    count = virtual.rank_count
    room = room_of(machine, count)
    short = [f"{tier}: {peak[tier] / 2**30:.2f} GiB of {room[tier] / 2**30:.2f}" for tier in room if peak[tier] > room[tier]]
    seconds = spent[_NOW]
    return Forecast(
        fits=not short,
        reason="; ".join(short),
        step_seconds=seconds,
        floors=floors,
        tokens_per_second=tokens / seconds,
        peak_nbytes=peak,
        moved_nbytes={link: round(spent[link, "moved"]) for link in links},
        hidden=hidden,
        exposed_seconds=exposed,
        placement=stats["placement"],
        planned=stats["planned"],
        model_tier=machine.model_tier,
        own_nbytes=max(peak[machine.model_tier] + virtual.unwritten_nbytes - _of_the_engine(stats, machine.model_tier), 0),
        values_read=round(spent[_VALUES]),
        parts={part: stats["decision"][part] for part in _PARTS} if stats["decision"] is not None else {},
        ranks=count,
    )


def room_of(machine: Machine, rank_count: int) -> dict[str, float]:
    """Bytes of each tier that one of so many ranks may use: of a device of its own, and an equal part of what they share."""
    return {
        "device": machine.device_nbytes,
        "cpu": machine.cpu_nbytes / rank_count,
        "nvme": machine.nvme_nbytes / rank_count,
    }


def _of_the_engine(stats: dict[str, Any], tier: str) -> int:
    """What it holds there at most: as planned, and the units that stay, and the records that visit, in what is left."""
    planned = sum(line["nbytes"] for line in stats["planned"] if line["tier"] == tier)
    in_use = sum(line["nbytes"] for line in stats["planned"] if (line["tier"], line["purpose"]) == (tier, _IN_USE))
    return int(planned + max(stats["resident_peak_nbytes"] - in_use, 0) + stats["visiting_peak_nbytes"])


def refused(error: BudgetError) -> Forecast:
    """Where no placement fits."""
    return Forecast(False, str(error), math.nan, {}, 0.0, {}, {}, {}, {}, {}, [], "", 0, 0, {})
