# SPDX-License-Identifier: Apache-2.0
"""Steps of models of the Llama architecture on described machines, in virtual time, against their floors: the largest of what
computing takes, each link, and host memory with all who use it. The same on every machine, so that tests keep it.

    python benchmarks/floors.py --out docs/performance/floors.json --sizes "7 B" --machines h100 --tokens 8192 --micro-batches 1
    python benchmarks/floors.py --out docs/performance/floors.json --beyond 1.15
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from step_floor import in_parts

import offload
from offload.cli.plans.forecast import Work, forecast, forecast_granted
from offload.device.recording import D2H, H2D, NVME_READ, NVME_WRITE
from offload.device.virtual.description import Machine, changed, read_machine
from offload.device.virtual.machine import CALLS
from offload.errors import BudgetError
from offload.forecast import Forecast, refused
from offload.profiling.attribution import ADAM, DRIVE, HOST
from offload.profiling.explanation import explain
from offload.profiling.trace_events import read_trace

SIZES: dict[str, tuple[int, int, int, int, int]] = {  # width, layers, heads, heads of keys and values, width of the MLP
    "1 B": (2048, 16, 32, 8, 8192),
    "7 B": (4096, 32, 32, 32, 11008),
    "13 B": (5120, 40, 40, 40, 13824),
    "32 B": (5120, 64, 40, 8, 27648),
}
_SEQUENCE = 2048


@dataclass(frozen=True, slots=True)
class Cell:
    """`tokens`: of a micro-batch."""

    size: str
    machine: str
    tokens: int
    micro_batches: int

    @property
    def is_compared(self) -> bool:
        """Whether it stands beside the same with everything in device memory."""
        return (self.size, self.machine) == ("7 B", "h100")

    @property
    def work(self) -> Work:
        """Of a step."""
        return Work(self.tokens // _SEQUENCE, _SEQUENCE, self.micro_batches, checkpointing=True)

    def run(self, trace: Path | None = None) -> Forecast:
        """With all of the machine's memory granted; bf16, split masters, checkpointing, clip 1.0. `trace`: a file for it."""
        return self.run_granted(trace)[0]

    def run_granted(self, trace: Path | None = None) -> tuple[Forecast, offload.Config]:
        """The same, and the configuration that it ran with."""
        return self._run(read_machine(self.machine), trace)

    def run_on_device(self) -> Forecast:
        """The same with everything in device memory, on a machine that differs in having enough of it."""
        large = changed(read_machine(self.machine), device_nbytes=1e12)
        return self._run(large, parameters="device", optimizer_states="device")[0]

    def run_without(self, config: offload.Config, taken_away: Collection[str]) -> Forecast:
        """The step that `run_granted` gave `config` of, were there not these of `TAKEN_AWAY` to be waited for."""
        unbound = [name for what in taken_away for name in TAKEN_AWAY[what]]
        if CLIPPING in taken_away:
            config = dataclasses.replace(config, max_grad_norm=None)
        return forecast(*self._make(), config, read_machine(self.machine), self.work, unbound=unbound)

    def run_twice_as_fast(self, config: offload.Config, what: str) -> Forecast:
        """The step that `run_granted` gave `config` of on a machine whose description differs in that these of `TAKEN_AWAY` are
        twice as fast: places are decided for it."""
        machine = read_machine(self.machine)
        faster = changed(machine, **{name: 2 * getattr(machine, name) for name in TAKEN_AWAY[what]})
        return forecast(*self._make(), config, faster, self.work)

    def _make(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        width, layers, heads, kv_heads, intermediate = SIZES[self.size]
        shape = transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=intermediate, vocab_size=32000, max_position_embeddings=_SEQUENCE, use_cache=False,
        )  # fmt: skip

        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def _run(self, machine: Machine, trace: Path | None = None, **fields: Any) -> tuple[Forecast, offload.Config]:
        config = offload.Config(
            dtype="bf16", nvme=".", cpu_memory=int(machine.cpu_nbytes), max_grad_norm=1.0, state_format="split", **fields
        )
        try:
            return forecast_granted(self._make, config, machine, self.work, trace)
        except BudgetError as error:
            return refused(error), config


CLIPPING = "exact clipping"
TAKEN_AWAY: dict[str, tuple[str, ...]] = {
    CLIPPING: (),
    "host memory's rate": ("memory_bandwidth",),
    "NVMe's rate": ("nvme_read", "nvme_write", "nvme_both"),
    "the rate from host to device": ("h2d",),
    "the rate from device to host": ("d2h",),
    "Python's calls": (CALLS,),
}
"""What a step may wait for, and of the machine what it is. Places stay those that are decided with it there."""
_SEEN_AS = {
    "host memory's rate": (ADAM,),
    "NVMe's rate": (NVME_READ, NVME_WRITE, DRIVE),
    "the rate from host to device": (H2D,),
    "the rate from device to host": (D2H,),
    "Python's calls": (HOST,),
}
"""As what waits for it are seen in a trace."""
_MATTERS = 0.05
"""Of a step: what is waited for less is not taken away."""
GOAL = 1.15
CELLS = [Cell(*one) for one in itertools.product(SIZES, ("rtx4090", "h100"), (2048, 8192, 16384), (1, 4))]


def in_order(found: Forecast, micro_batches: int) -> float:
    """`in_parts`, by what the planner's cost has move in each, and what they compute: the first of the micro-batches' forwards,
    under which updates run that could not be undone; the last backward, under which those run that could; and what is between.
    Of a micro-batch's computing the forward is a quarter: backward has it again, and twice as much of its own."""
    computing = found.floors["compute"] / micro_batches
    parts = {"forward": computing / 4, "between": computing * (micro_batches - 1), "backward": computing * 3 / 4}
    return in_parts(found.floor_seconds, *((least, *found.parts[part].values()) for part, least in parts.items()))


def waits(trace: Path) -> dict[str, float]:
    """Seconds of a step in which compute stood still, by what was waited for and what that was a matter of."""
    found: dict[str, float] = {}
    for wait in explain(read_trace(trace)).waits:
        name = f"{wait.what}: {wait.on}"
        found[name] = found.get(name, 0.0) + wait.seconds
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def without(cell: Cell, found: Forecast, config: offload.Config, waited: dict[str, float]) -> list[dict[str, Any]]:
    """What a step further from its floor than the goal would take, were what it waits for not there: each alone, then, the one
    that gains most first, together, until it is within the goal. Ratios are to the floor that the step has."""
    by_cause = [(name.rsplit(": ", 1)[1], seconds) for name, seconds in waited.items()]
    of = {what: sum(seconds for on, seconds in by_cause if on in causes) for what, causes in _SEEN_AS.items()}
    asked = [CLIPPING, *(what for what, seconds in of.items() if seconds > _MATTERS * found.step_seconds)]

    def line(taken_away: list[str]) -> dict[str, Any]:
        seconds = cell.run_without(config, taken_away).step_seconds
        return {"without": taken_away, "step_seconds": seconds, "ratio": seconds / found.floor_seconds}

    lines = sorted((line([what]) for what in asked), key=lambda one: one["step_seconds"])
    together = list(lines[0]["without"])
    for one in lines[1:]:
        if lines[-1]["ratio"] <= GOAL or lines[0]["ratio"] <= GOAL:
            break
        together = [*together, *one["without"]]
        lines.append(line(together))
    return lines


def twice_as_fast(cell: Cell, found: Forecast, config: offload.Config, lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the rates that `without` took away that which gains most alone, on a machine where it is doubled. Ratios are to the
    floor of the step that was found, and to the floor there."""
    rates = [
        line["without"][0] for line in lines if len(line["without"]) == 1 and set(TAKEN_AWAY[line["without"][0]]) - {CALLS}
    ]
    if not rates:
        return None
    there = cell.run_twice_as_fast(config, rates[0])
    seconds = there.step_seconds
    return {
        "what": rates[0], "step_seconds": seconds, "ratio": seconds / found.floor_seconds,
        "ratio_there": seconds / there.floor_seconds,
    }  # fmt: skip


def told(cell: Cell) -> dict[str, Any]:
    """What the result file has of it. `bound`: what was in use longest while the model was not; `waits`: as above."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found, config = cell.run_granted(trace)
        waited = waits(trace) if trace.exists() else {}
    lines = (
        without(cell, found, config, waited) if found.peak_nbytes and found.step_seconds > GOAL * found.floor_seconds else []
    )
    values: dict[str, Any] = {**dataclasses.asdict(cell), "fits": found.fits, "placement": found.placement}
    if found.peak_nbytes:
        values |= {
            "step_seconds": found.step_seconds, "floor_seconds": found.floor_seconds, "bottleneck": found.bottleneck,
            "ratio": found.step_seconds / found.floor_seconds, "in_order_seconds": in_order(found, cell.micro_batches),
            "tokens_per_second": found.tokens_per_second,
            "bound": max(found.exposed_seconds, key=found.exposed_seconds.__getitem__), "exposed": found.exposed_seconds,
            "waits": waited,
            "without": lines, "twice_as_fast": twice_as_fast(cell, found, config, lines),
            "on_device_seconds": cell.run_on_device().step_seconds if cell.is_compared else None,
        }  # fmt: skip
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the result file; cells that it has and are not asked for stay")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--machines", nargs="*", default=["rtx4090", "h100"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[2048, 8192, 16384])
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--beyond", type=float, default=0.0, help="of those that the file has further from their floors")
    args = parser.parse_args()
    asked = [
        one for one in CELLS
        if one.size in args.sizes and one.machine in args.machines and one.tokens in args.tokens
        and one.micro_batches in args.micro_batches
    ]  # fmt: skip
    found = {}
    if args.out is not None and args.out.exists():
        fields = [field.name for field in dataclasses.fields(Cell)]
        found = {Cell(*(line[name] for name in fields)): line for line in json.loads(args.out.read_text())["results"]}
    if args.beyond:
        asked = [one for one in asked if one in found and found[one].get("ratio", 0.0) > args.beyond]
    for cell in asked:
        found[cell] = told(cell)
        print(json.dumps(found[cell]), file=sys.stderr, flush=True)
        if args.out is not None:
            lines = [found[one] for one in CELLS if one in found]
            args.out.write_text(json.dumps({"results": lines}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
