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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import offload
from offload.cli.forecast import Work, forecast_granted
from offload.device.virtual.description import Machine, changed, read_machine
from offload.errors import BudgetError
from offload.profiling.explanation import explain
from offload.profiling.trace_events import read_trace
from offload.rehearsal.forecast import Forecast, refused

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

    def run(self, trace: Path | None = None) -> Forecast:
        """With all of the machine's memory granted; bf16, split masters, checkpointing, clip 1.0. `trace`: a file for it."""
        return self._run(read_machine(self.machine), trace)

    def run_on_device(self) -> Forecast:
        """The same with everything in device memory, on a machine that differs in having enough of it."""
        large = changed(read_machine(self.machine), device_nbytes=1e12)
        return self._run(large, parameters="device", optimizer_states="device")

    def _run(self, machine: Machine, trace: Path | None = None, **fields: Any) -> Forecast:
        width, layers, heads, kv_heads, intermediate = SIZES[self.size]
        shape = transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=intermediate, vocab_size=32000, max_position_embeddings=_SEQUENCE, use_cache=False,
        )  # fmt: skip

        def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            with torch.device("meta"):
                model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
            return model, torch.optim.AdamW(model.parameters(), foreach=False)

        config = offload.Config(
            dtype="bf16", nvme=".", cpu_memory=int(machine.cpu_nbytes), max_grad_norm=1.0, state_format="split", **fields
        )
        work = Work(self.tokens // _SEQUENCE, _SEQUENCE, self.micro_batches, checkpointing=True)
        try:
            return forecast_granted(make, config, machine, work, trace)[0]
        except BudgetError as error:
            return refused(error)


CELLS = [Cell(*one) for one in itertools.product(SIZES, ("rtx4090", "h100"), (2048, 8192, 16384), (1, 4))]


def in_order(found: Forecast, micro_batches: int) -> float:
    """What the planner's cost makes of a step's halves, with what they compute: an update that could not be undone waits for
    the norm of all gradients, which clips, and runs under the next forward, the first of the micro-batches'; all else that they
    fetch and sum is in the second half. Of a micro-batch's computing the forward is a quarter: backward has it again, and twice
    as much of its own."""
    computing = found.floors["compute"]
    forward = computing / micro_batches / 4
    halves = {"forward": forward, "backward": computing - forward}
    return max(found.floor_seconds, sum(max(least, *found.halves[half].values()) for half, least in halves.items()))


def waits(trace: Path) -> dict[str, float]:
    """Seconds of a step in which compute stood still, by what was waited for and what that was a matter of."""
    found: dict[str, float] = {}
    for wait in explain(read_trace(trace)).waits:
        name = f"{wait.what}: {wait.on}"
        found[name] = found.get(name, 0.0) + wait.seconds
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def told(cell: Cell) -> dict[str, Any]:
    """What the result file has of it. `bound`: what was in use longest while the model was not; `waits`: as above."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found = cell.run(trace)
        waited = waits(trace) if trace.exists() else {}
    values: dict[str, Any] = {**dataclasses.asdict(cell), "fits": found.fits, "placement": found.placement}
    if found.peak_nbytes:
        values |= {
            "step_seconds": found.step_seconds, "floor_seconds": found.floor_seconds, "bottleneck": found.bottleneck,
            "ratio": found.step_seconds / found.floor_seconds, "in_order_seconds": in_order(found, cell.micro_batches),
            "tokens_per_second": found.tokens_per_second,
            "bound": max(found.exposed_seconds, key=found.exposed_seconds.__getitem__), "exposed": found.exposed_seconds,
            "waits": waited,
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
