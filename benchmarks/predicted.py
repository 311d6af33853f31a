# SPDX-License-Identifier: Apache-2.0
"""What `plan --machine this` says of a step against the step itself: seconds, peak bytes of each tier, bytes over each link.

    python benchmarks/predicted.py --nvme /mnt/nvme0 --out docs/performance/predicted.json
    python benchmarks/predicted.py --nvme /mnt/nvme0 --cases 0 4 --steps 2

Each case runs in processes of its own, one after another: this machine's rates are measured, then the engine runs for its
seconds, then the rates once more, since they drift: the mean of both is what counts. Then the engine runs for its bytes, and
then in virtual time on a machine of these rates. Nothing is fitted to a case. What counts seconds wants a machine that does
nothing else; what counts bytes does not, and can be made at another time:

    python benchmarks/predicted.py --nvme /mnt/nvme0 --out predicted.json --parts rates timed
    python benchmarks/predicted.py --nvme /mnt/nvme0 --out predicted.json --parts counted predicted

`make predicted NVME=/mnt/nvme0` is both, and the table.

Bytes in use are what is forecast. Where they are counted glibc is told to give back freed memory at once; what it keeps in
holes by its defaults is `resident_nbytes` less that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import describe_machine

import offload
from offload.cli.plans.forecast import Work, forecast
from offload.cli.plans.this_machine import measure_machine
from offload.device.virtual.description import read_machine, write_machine
from offload.step.clip_history import QUIET_STEPS

_WARM_STEPS = 3
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """fp32 on the CPU. `fields`: of `Config`."""

    width: int
    layers: int
    batch: int
    sequence: int
    micro_batches: int
    fields: dict[str, Any]

    @property
    def work(self) -> Work:
        return Work(self.batch, self.sequence, self.micro_batches, checkpointing=False)


_CPU = {"parameters": "cpu", "optimizer_states": "cpu"}
_RECORDS = {"parameters": "cpu", "optimizer_states": "nvme"}
_NVME = {"parameters": "nvme", "optimizer_states": "nvme"}
_CLIP = {"max_grad_norm": 1e6}
"""Which never strikes: what a forecast takes for granted, and training that goes well does. After a strike updates begin at the
step for a while (`offload.step.clip_history`)."""
CASES = (
    Case(512, 8, 2, 256, 1, _CPU),
    Case(512, 8, 2, 256, 1, _RECORDS),
    Case(512, 8, 2, 256, 1, _NVME),
    Case(512, 8, 2, 256, 4, _CPU | _CLIP),
    Case(512, 8, 2, 256, 4, _NVME | _CLIP),
    Case(512, 8, 8, 256, 1, _NVME | {"update": "step"}),
    Case(768, 12, 1, 512, 1, _CPU),
    Case(768, 12, 1, 512, 1, _RECORDS),
    Case(768, 12, 1, 512, 1, _NVME),
    Case(768, 12, 4, 512, 1, _NVME | _CLIP),
    Case(768, 12, 1, 512, 2, _NVME | {"cpu_memory": "300MiB"}),
    Case(768, 12, 1, 512, 1, _NVME | {"cpu_memory": "1GiB"}),
    Case(1024, 16, 1, 256, 1, _NVME),
    Case(1024, 16, 2, 512, 1, _RECORDS | _CLIP),
)


def made_model(case: Case) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=case.width, intermediate_size=case.width * 8 // 3 // 128 * 128, num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64, num_key_value_heads=case.width // 64, vocab_size=_VOCABULARY,
        max_position_embeddings=case.sequence, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def config_of(case: Case, nvme: str) -> offload.Config:
    return offload.Config(dtype="fp32", nvme=nvme, **case.fields).expecting(case.micro_batches)


# ---- in a process of its own -----------------------------------------------------------------------------------------


def run(case: Case, nvme: str, steps: int, *, counts: bool) -> dict[str, Any]:
    """The engine: median seconds of `steps`, and the peak of resident memory above what was there before `initialize`; if
    it `counts`, peaks and the bytes that one step moves."""
    torch.manual_seed(0)
    small = torch.zeros(1, 8, dtype=torch.long)
    made_model(dataclasses.replace(case, width=64, layers=1))(input_ids=small, labels=small).loss.backward()  # libraries load
    with offload.deferred_init():
        model = made_model(case)
    tokens = torch.randint(0, _VOCABULARY, (case.batch, case.sequence))
    before = _resident_nbytes("VmRSS")
    with offload.initialize(model, adamw(model), config_of(case, nvme)) as engine:
        on_drive = _scratch_nbytes(nvme)

        def step() -> float:
            start = time.perf_counter()
            for _ in range(case.micro_batches):
                engine.backward(model(input_ids=tokens, labels=tokens).loss)
            engine.step()
            engine.zero_grad()
            return time.perf_counter() - start

        for _ in range(_WARM_STEPS + (QUIET_STEPS if "max_grad_norm" in case.fields else 0)):
            step()
        _settle(engine)
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        seconds = [step() for _ in range(steps + 1)][1:]
        peak = _resident_nbytes("VmHWM") - before
        if not counts:
            return {"step_seconds": statistics.median(seconds), "seconds": seconds, "resident_nbytes": peak}
        totals = []
        for count in (0, 1, 2):  # to settle moves bytes of its own: by how much more than one step move two
            for _ in range(count):
                step()
            _settle(engine)
            totals.append(_moved(engine))
        none, one, two = totals
        moved = {link: (two[link] - one[link]) - (one[link] - none[link]) for link in none}
    return {"moved_nbytes": moved, "peak_nbytes": {"cpu": peak, "nvme": on_drive}}


def _settle(engine: offload.Engine) -> None:
    parts = engine._parts
    parts.residency.finish_updates()
    for places in (parts.records, parts.parameter_store):
        if places is not None:
            places.settle_writes()


def _moved(engine: offload.Engine) -> dict[str, int]:
    io = engine.stats()["io"]
    return {"nvme_read": io.read_nbytes if io else 0, "nvme_write": io.written_nbytes if io else 0}


def _scratch_nbytes(folder: str) -> int:
    """What the files of this process that have no name in the folder take there."""
    open_files = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    nameless = [one for one in open_files if one.is_symlink() and os.readlink(one).startswith(os.path.realpath(folder))]
    return sum(512 * os.stat(one).st_blocks for one in nameless)


def _resident_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def predicted(case: Case, nvme: str, machine: str) -> dict[str, Any]:
    """The same of the engine in virtual time."""
    with torch.device("meta"):
        model = made_model(case)
    found = forecast(model, adamw(model), config_of(case, nvme), read_machine(machine), case.work)
    names = ("step_seconds", "floor_seconds", "bottleneck", "peak_nbytes", "moved_nbytes")
    return {name: getattr(found, name) for name in names}


def rates(case: Case, nvme: str, machine: str) -> dict[str, Any]:
    """Measure this machine with the operations of one block of the case's width."""
    block = made_model(dataclasses.replace(case, layers=1))
    tokens = torch.zeros(case.batch, case.sequence, dtype=torch.long)
    found = measure_machine([nvme], 0.5, lambda: block(input_ids=tokens, labels=tokens).loss.backward())
    write_machine(found.machine, found.sources, machine)
    return found.machine.as_json({field: source.replace(nvme, "the folder given") for field, source in found.sources.items()})


# ---- all -------------------------------------------------------------------------------------------------------------


PARTS = ("rates", "timed", "counted", "predicted")
"""What the engine is run for is `measured` in the result."""


def child(part: str, index: int, args: argparse.Namespace, machine: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--nvme", args.nvme, "--steps", str(args.steps), "--part", part, "--cases", str(index)]
    environment = os.environ | _GIVES_BACK if part == "counted" else None
    done = subprocess.run([*command, "--machine", str(machine)], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def mean_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Of two measurements of the machine's rates."""
    return before | {
        field: number | {"value": (number["value"] + after[field]["value"]) / 2}
        for field, number in before.items()
        if isinstance(number, dict)
    }


def said(index: int, result: dict[str, Any]) -> str:
    """Of one case, as a line."""
    told = {name: result[name] for name in ("measured", "predicted") if name in result}
    kept = ("step_seconds", "peak_nbytes", "moved_nbytes")
    return f"{index}: " + json.dumps({name: {key: one[key] for key in kept if key in one} for name, one in told.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default=".", help="a folder on the drive (default: the current one)")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="indices (default: all)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="what to make of each")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the result file; what it has and is not made again stays")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        case = CASES[args.cases[0]]
        if args.part in ("timed", "counted"):
            counts = args.part == "counted"
            print(json.dumps(run(case, args.nvme, 1 if counts else args.steps, counts=counts)))
        else:
            print(json.dumps({"rates": rates, "predicted": predicted}[args.part](case, args.nvme, args.machine)))
        return
    content: dict[str, Any] = {"machine": describe_machine(), "results": []}
    if args.out is not None and args.out.exists():
        content = json.loads(args.out.read_text(encoding="utf-8"))
    known = {json.dumps(result["case"]): result for result in content["results"]}
    machine = Path(args.nvme) / "predicted-machine.json"
    for index in args.cases:
        case = dataclasses.asdict(CASES[index])
        result = known.setdefault(json.dumps(case), {"case": case})
        for part in args.parts:
            if part == "predicted":
                if "rates" not in result:
                    raise SystemExit(f"of case {index} the machine's rates were not measured: --parts rates")
                machine.write_text(json.dumps(result["rates"]), encoding="utf-8")
            found = child(part, index, args, machine)
            if part in ("timed", "counted"):
                result["measured"] = result.get("measured", {}) | found
                if part == "timed" and "rates" in args.parts:
                    result["rates"] = mean_of(result["rates"], child("rates", index, args, machine))
            else:
                result[part] = found
        print(said(index, result), file=sys.stderr, flush=True)
        if args.out is not None:
            content["results"] = [known[key] for one in CASES if (key := json.dumps(dataclasses.asdict(one))) in known]
            args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    machine.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
