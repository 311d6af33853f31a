# SPDX-License-Identifier: Apache-2.0
"""Seconds per training step and peak host memory, offloaded against plain PyTorch, in one run on one machine.

    python benchmarks/train_step.py --out docs/performance/train_step.json
    python benchmarks/train_step.py --shapes 1B --cases "nvme, bf16, fp32;nvme, bf16, split" --steps 4 --out ...
    python benchmarks/train_step.py --shapes 125M --memory-sweep 6 --out docs/performance/memory_sweep.json

GPT-2-shaped models, one sequence of 128 tokens (64 from 1B on, and at 125M again so that steps of the same tokens can be
compared for each parameter; 128 at 1B too, for its memory), fp32, gradient norm clipped to 1.0. Every case is a process of its
own, so its peak resident size (VmHWM) is its own; the ratios are to plain PyTorch with fused AdamW on the same model where it
fits. Beside each step stands the floor: the largest of compute, memory and NVMe time at rates measured beside it; where
updates wait for the norm, also what these take in the order that this asks for (step_floor.py); for each link the share of its
work that was hidden, from the engine's own timeline; and the seconds of processor time by kind (cpu_kinds.py). Rows in bf16
have the formats of states beside each other, with the bytes that a parameter takes on the way to the drive and back by formula.
--memory-sweep measures the step against `cpu_memory`, from the least with which it works to what keeps everything in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu_kinds import CpuSeconds
from machine import describe_machine, status_nbytes
from step_floor import Compute, Rates, drive_nbytes, in_parts, memory_nbytes, on_drive, record_nbytes

SHAPES = {
    "tiny": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "125M": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 128},
    "125M, 64 tokens": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 64},
    "1B": {"n_embd": 2048, "n_layer": 18, "n_head": 16, "n_positions": 64},
    "1B, 128 tokens": {"n_embd": 2048, "n_layer": 18, "n_head": 16, "n_positions": 128},
    "2B": {"n_embd": 2560, "n_layer": 24, "n_head": 20, "n_positions": 64},
    "3B": {"n_embd": 3072, "n_layer": 25, "n_head": 24, "n_positions": 64},
}
"""`n_positions`: the tokens of a batch, too."""
VOCABULARY = 50257
CLIP = 1.0
NO_STRIKE = 1e6
"""A norm to clip to that no step reaches: what `update="backward"` gains shows in steps whose norm changes nothing."""
LOOKS_ON = {"nvme, auto": 9, "nvme, backward": 9}
"""Steps that do not count; otherwise 2. Updates begin before the norm is known after some steps that it did not change."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compute": {},
    "limits": {},
    "cpu": {"parameters": "cpu", "optimizer_states": "cpu"},
    "nvme": {"parameters": "nvme", "optimizer_states": "nvme", "update": "step"},
    "nvme, auto": {"parameters": "nvme", "optimizer_states": "nvme", "update": "auto", "max_grad_norm": NO_STRIKE},
    "nvme, backward": {"parameters": "nvme", "optimizer_states": "nvme", "update": "backward", "max_grad_norm": NO_STRIKE},
}
FORMATS = ("fp32", "split", "8bit")
"""Of states beside bf16 parameters: each has its row, on NVMe, with updates at the step and in backward."""
for _format in FORMATS:
    _fields = {"dtype": "bf16", "state_format": _format}
    CASES[f"nvme, bf16, {_format}"] = CASES["nvme"] | _fields
    CASES[f"nvme, bf16, {_format}, backward"] = CASES["nvme, backward"] | _fields
CASES["compute, bf16"] = {}
LOOKS_ON |= {case: LOOKS_ON["nvme, backward"] for case in CASES if case.endswith(", backward")}
BF16 = tuple(case for case in CASES if case.startswith("nvme, bf16"))


def state_format_of(case: str) -> str | None:
    """Of the states beside bf16 parameters; None where parameters are fp32."""
    return CASES[case].get("state_format")


def model_config(shape: str) -> dict[str, Any]:
    """The fields of transformers.GPT2Config."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"vocab_size": VOCABULARY, **dropout, **SHAPES[shape]}


def build(shape: str, sequence: int | None = None) -> Any:
    """A GPT-2-shaped causal language model with random weights, for the shape's number of tokens or another one."""
    import transformers

    changed = {} if sequence is None else {"n_positions": sequence}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**model_config(shape) | changed))


def memory_limits(shape: str, nvme: str) -> dict[str, int]:
    """The smallest cpu_memory with everything on NVMe, and what keeping everything in memory takes."""
    import torch

    import offload
    from offload.cli.plans.outline import Outline

    with offload.deferred_init():
        model = build(shape)
    fields = CASES["nvme"] | {"nvme": nvme, "cpu_memory": 1 << 50}
    with Outline(model, torch.optim.AdamW(model.parameters()), offload.Config(**fields)) as outline:
        placement = outline.placement()
        smallest = outline.smallest_nbytes(placement, "cpu_memory")
    assert smallest is not None
    return {"smallest": smallest, "everything": placement.plan.total_nbytes("cpu")}


def made(case: str, shape: str, nvme: str, overrides: dict[str, Any]) -> tuple[Any, Any, Any, CpuSeconds | None]:
    """The model and the optimizer of a case; the engine and its seconds of processor time, where the case has one."""
    import torch

    import offload

    if case.split(",")[0] in ("plain", "compute"):
        model = build(shape)
        if case.endswith("bf16"):
            model = model.to(torch.bfloat16)
        if case.startswith("compute"):  # memory of gradients is used again, as the engine does: making it anew is no computing
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(drop_gradient)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), None, None
    with offload.deferred_init():
        model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = offload.Config(**({"nvme": nvme, "max_grad_norm": CLIP} | CASES[case] | overrides))
    cpu = CpuSeconds()
    engine = offload.initialize(model, optimizer, config)
    return model, engine.optimizer, engine, cpu


def measure(case: str, shape: str, steps: int, nvme: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train `steps` steps after those that are not counted; this is the body of one child process."""
    import torch

    if case == "limits":
        return memory_limits(shape, nvme)
    torch.manual_seed(0)
    model, optimizer, engine, cpu = made(case, shape, nvme, overrides)
    numel = sum(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(1)
    seconds: list[float] = []
    forward_seconds: list[float] = []
    losses: list[float] = []
    uncounted = LOOKS_ON.get(case, 2)
    for index in range(steps + uncounted):
        tokens = torch.randint(0, VOCABULARY, (1, SHAPES[shape]["n_positions"]), generator=generator)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        forward_seconds.append(time.perf_counter() - start)
        loss.backward()
        if case == "plain":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if not case.startswith("compute"):
            optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if index == uncounted - 1 and engine is not None and cpu is not None:
            before = engine.stats()
            cpu.begin()
    result: dict[str, Any] = {
        "case": case,
        "shape": shape,
        "parameters": numel,
        "tokens": SHAPES[shape]["n_positions"],
        "median_seconds": statistics.median(seconds[uncounted:]),
        "forward_seconds": statistics.median(forward_seconds[uncounted:]),
        "seconds": seconds,
        "losses": losses,
        "peak_rss_nbytes": status_nbytes("VmHWM"),
    }
    if engine is not None and cpu is not None:
        result["cpu_seconds"] = cpu.end(steps)
        result["nbytes_by_formula"] = drive_nbytes(state_format_of(case)) if case.startswith("nvme") else None
        after = engine.stats()
        kept = ("placement", "planned", "host_peak_nbytes", "io_backend", "speculated_steps", "undone_steps")
        result["engine"] = {key: after[key] for key in kept}
        result["seconds_by_phase"] = {key: value / steps for key, value in after["seconds"].items()}
        result["links"] = after["links"]
        if after["io"] is not None:
            for field in ("read_nbytes", "written_nbytes", "read_busy_ns", "write_busy_ns"):
                result[field + "_per_step"] = (getattr(after["io"], field) - getattr(before["io"], field)) / steps
        engine.close()
    return result


def drop_gradient(parameter: Any) -> None:
    """As it comes."""
    parameter.grad = None


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run `measure` in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def floor(result: dict[str, Any], compute: float, memory: float, nvme: dict[str, float]) -> dict[str, float]:
    """What compute, memory and NVMe need at least, in seconds: no step can be shorter than its slowest link.

    Bytes that go one way and the other at once take the rate of both; what one way has more of, its own."""
    terms = {"compute": compute, "memory": memory_nbytes(state_format_of(result["case"])) * result["parameters"] / memory}
    if "read_nbytes_per_step" in result:
        terms["nvme"] = on_drive(result["read_nbytes_per_step"], result["written_nbytes_per_step"], nvme)
    return terms


Half = tuple[float, float]
"""Seconds of computing, and of the drive."""


def halves(result: dict[str, Any], compute: float, forward_share: float, nvme: dict[str, float]) -> tuple[Half, Half]:
    """Of a step whose updates wait for the norm: the next forward with all updates, and backward, which has to read the
    parameters and may write gradients. `forward_share`: of `compute`, what the forward takes in plain PyTorch."""
    values, record = record_nbytes(state_format_of(result["case"]))
    read, written = result["read_nbytes_per_step"], result["written_nbytes_per_step"]
    of_update = (values + record) * result["parameters"]
    again = min(values * result["parameters"], max(read - of_update, 0.0))
    updated = min(written, of_update)
    return (
        (forward_share * compute, on_drive(read - again, updated, nvme)),
        ((1 - forward_share) * compute, on_drive(again, written - updated, nvme)),
    )


def peer(python: str, arguments: dict[str, Any], case: str) -> dict[str, Any]:
    """The step by DeepSpeed, in the interpreter that has it; what it failed with, where it did."""
    request = {
        "shape": model_config(arguments["shape"]), "steps": arguments["steps"], "bf16": case.endswith(", bf16"),
        "offload": case.removeprefix("deepspeed ").removesuffix(", bf16"),
        "memory_nbytes": describe_machine()["memory_nbytes"],
        "nvme": arguments["nvme"], "clip": CLIP,
    }  # fmt: skip
    script = str(Path(__file__).with_name("deepspeed_step.py"))
    try:
        done = subprocess.run([python, script, json.dumps(request)], capture_output=True, text=True, timeout=PEER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"case": case, "shape": arguments["shape"], "failed": f"no result after {PEER_SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
        return {"case": case, "shape": arguments["shape"], "failed": how}
    return {"case": case, "shape": arguments["shape"], **json.loads(lines[-1])}


PEER_SECONDS = 900
RUNS: dict[str, tuple[str, ...]] = {
    "tiny": ("plain", "cpu", "nvme", "nvme, backward", *BF16, "deepspeed nvme, bf16"),
    "125M": ("plain", "cpu", "nvme", "nvme, auto", "nvme, backward", "deepspeed cpu", "deepspeed nvme"),
    "125M, 64 tokens": ("nvme", "nvme, auto", "nvme, backward"),
    "1B": ("plain", "nvme", "nvme, auto", "nvme, backward", "deepspeed nvme", *BF16, "deepspeed nvme, bf16"),
    "1B, 128 tokens": ("nvme",),
    "2B": ("nvme", "nvme, auto", "nvme, backward", "deepspeed nvme"),
    "3B": ("nvme", "nvme, auto", "nvme, backward", *BF16, "deepspeed nvme, bf16"),
}


def compare(options: argparse.Namespace, folder: str, rates: Rates) -> list[dict[str, Any]]:
    """A result for every shape and case."""
    compute, results = Compute(child), []
    for shape in options.shapes.split(";"):
        common = {"shape": shape, "steps": options.steps, "nvme": folder, "overrides": {}}
        plain: float | None = None
        for case in RUNS[shape] if options.cases is None else options.cases.split(";"):
            if case.startswith("deepspeed"):
                if options.deepspeed_python is None:
                    continue
                result = peer(options.deepspeed_python, common, case)
            else:
                result = finished(child({**common, "case": case}), compute, common, rates.now())
            if "median_seconds" in result:
                plain = result["median_seconds"] if case == "plain" else plain
                result["ratio_to_plain"] = result["median_seconds"] / plain if plain else None
            results.append(result)
            print(row(result), flush=True)
    return results


def others(before: dict[str, Any], report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results that this run did not measure, if they are from the same machine; each floor is of its own run."""
    measured = {(result["shape"], result["case"]) for result in report["results"]}
    same = _is_same_machine(before["machine"], report["machine"])
    return [result for result in before["results"] if same and (result["shape"], result["case"]) not in measured]


def _is_same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The memory that a kernel leaves differs by some pages from start to start."""
    near = abs(one["memory_nbytes"] - other["memory_nbytes"]) < 1 << 24
    return near and one == other | {"memory_nbytes": one["memory_nbytes"]}


def in_order(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By shape and case."""
    shapes, cases = list(SHAPES), [case for some in RUNS.values() for case in some]
    return sorted(results, key=lambda one: (shapes.index(one["shape"]), cases.index(one["case"])))


def sweep(options: argparse.Namespace, folder: str, rates: Rates) -> list[dict[str, Any]]:
    """The step of the first shape on NVMe, for `cpu_memory` from the smallest to what keeps everything."""
    compute, results = Compute(child), []
    common = {"shape": options.shapes.split(";")[0], "steps": options.steps, "nvme": folder, "case": "nvme"}
    limits = child({**common, "case": "limits", "overrides": {}})
    for index in range(options.memory_sweep):
        share = index / max(options.memory_sweep - 1, 1)
        budget = limits["smallest"] + int(share * (limits["everything"] - limits["smallest"]))
        result = child({**common, "overrides": {"cpu_memory": budget}})
        result["cpu_memory"] = budget
        results.append(finished(result, compute, {**common, "overrides": {}}, rates.now()))
        print(f"{budget / 2**30:6.2f} GiB {row(results[-1])}", flush=True)
    assert len({json.dumps(result["losses"]) for result in results}) == 1, "a budget changed the losses"
    return results


def finished(result: dict[str, Any], compute: Compute, common: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """The result with its floor, and with the rates it was measured beside."""
    seconds = compute.seconds(common, result["case"], result["parameters"])
    terms = floor(result, seconds, rates["memory"], rates["nvme"])
    result = result | {"floor": terms, "floor_seconds": max(terms.values()), "ratio_to_plain": None, "rates": rates}
    if CASES[result["case"]].get("update") == "step" and "nvme" in terms:
        share = compute.forward_share(common, result["case"])
        result["norm_first_seconds"] = in_parts(result["floor_seconds"], *halves(result, seconds, share, rates["nvme"]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the figures as JSON; other rows in it stay")
    parser.add_argument("--nvme", help="folder on the drive to use; default: a temporary one in the current folder")
    parser.add_argument("--shapes", default="125M;1B", help="which models, of " + "; ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=8, help="steps that count, after some that do not")
    parser.add_argument("--cases", help="which of a model's rows, separated by semicolons; default: all")
    parser.add_argument("--memory-sweep", type=int, default=0, metavar="N", help="instead: N budgets of the first shape")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.nvme or ".", prefix="bench-") as folder:
        measured = Rates(folder)
        results = sweep(options, folder, measured) if options.memory_sweep else compare(options, folder, measured)
        rates = measured.now()
    report = {"machine": describe_machine(), "rates": rates, "batch": 1, "clip": CLIP, "results": results}
    if options.out is not None:
        if options.out.exists() and not options.memory_sweep:
            before = json.loads(options.out.read_text())
            report["results"] = in_order(others(before, report) + results)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{result['shape']:>5} {result['case']:>14}"
    if "failed" in result:
        return f"{name}  failed: {result['failed']}"
    ratio = f"{result['ratio_to_plain']:.2f}" if result.get("ratio_to_plain") else "-"
    floor_text = f"floor {result['floor_seconds']:6.3f} s" if "floor_seconds" in result else ""
    hidden = ", ".join(
        f"{link} {100 * values['hidden']:.0f} %"
        for link, values in result.get("links", {}).items()
        if values["hidden"] is not None
    )
    return (
        f"{name}  {result['median_seconds']:7.3f} s/step  {ratio:>5} x plain  {floor_text:14}  "
        f"peak {result['peak_rss_nbytes'] / 2**30:5.2f} GiB  {'hidden: ' + hidden if hidden else ''}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        main()
