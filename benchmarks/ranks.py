# SPDX-License-Identifier: Apache-2.0
"""Seconds per step and peak host memory of several ranks at ZeRO stage 3 with everything in CPU memory, beside the peers.

    python benchmarks/ranks.py --out docs/performance/ranks.json
    python benchmarks/ranks.py --shapes tiny --steps 3              # a quick look, printed
    python benchmarks/ranks.py --deepspeed /path/to/its/python      # DeepSpeed from an interpreter that has it

GPT-2-shaped, batch 1 x 128 on each rank, fp32, clip 1.0, gloo, one core for each rank. Every contender runs in processes of
its own, in turns, several rounds; the figures are medians over all counted steps of the slowest rank, the ratios are
those of the same run. The floor is compute (forward and backward of plain PyTorch on one rank, at the same time on all)
plus what gloo needs to move the step's bytes point to point, at the rate measured in the same run, if nothing overlapped;
and the larger of the two, if all did.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine, status_nbytes
from train_step import CLIP, SHAPES, VOCABULARY, build, model_config

CONTENDERS = ("offload stage 3", "offload stage 2", "fsdp2", "deepspeed stage 3", "compute", "wire")
LEARNING_RATE = 1e-4
SEQUENCE = SHAPES["125M"]["n_positions"]


def tokens_of(step: int, rank: int, world: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1 + step * world + rank)
    return torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=generator)


class Ours:
    """This project, at a stage."""

    def __init__(self, shape: str, stage: int) -> None:
        import torch

        import offload

        with offload.deferred_init():
            self.model = build(shape)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        place = "cpu" if stage == 3 else "device"
        config = offload.Config(stage=stage, parameters=place, optimizer_states="cpu", max_grad_norm=CLIP)
        self.engine = offload.initialize(self.model, optimizer, config)

    def step(self, tokens: Any) -> Any:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        return loss

    def finish(self) -> dict[str, Any]:
        stats = self.engine.stats()
        self.engine.close()
        return {"traffic": stats["ranks"]}


class Fsdp2:
    """torch's own: fully_shard with CPUOffloadPolicy, one group for each block and one for the rest."""

    def __init__(self, shape: str) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        self.model = build(shape)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = CPUOffloadPolicy(pin_memory=False)
        for block in self.model.transformer.h:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, tokens: Any) -> Any:
        import torch

        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def finish(self) -> dict[str, Any]:
        return {}


class DeepSpeed:
    """ZeRO-3 with parameters and optimizer on the CPU."""

    def __init__(self, shape: str) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        import transformers
        from deepspeed_step import configuration

        importlib.import_module("torch._dynamo.polyfills.loader")  # before zero.Init patches what that looks at
        config = transformers.GPT2Config(**model_config(shape))
        arguments = {"offload": "cpu", "clip": CLIP}
        tuned = configuration(arguments, config.vocab_size * config.n_embd)
        tuned["optimizer"]["params"]["lr"] = LEARNING_RATE
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=tuned):
            self.model = transformers.GPT2LMHeadModel(config)
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=self.model.parameters(), config=tuned)

    def step(self, tokens: Any) -> Any:
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def finish(self) -> dict[str, Any]:
        return {}


class Compute:
    """Forward and backward alone, every rank for itself."""

    def __init__(self, shape: str) -> None:
        self.model = build(shape)

    def step(self, tokens: Any) -> Any:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.model.zero_grad()
        return loss

    def finish(self) -> dict[str, Any]:
        return {"parameters": sum(parameter.numel() for parameter in self.model.parameters())}


def measure_wire(steps: int) -> dict[str, Any]:
    """Bytes per second that each rank sends while it receives as many: 32 MiB point to point to every other rank."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    nbytes = 32 << 20
    out, into = torch.zeros(nbytes, dtype=torch.uint8), [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(world)]
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        works = [dist.irecv(into[peer], src=peer) for peer in range(world) if peer != rank]
        works += [dist.isend(out, dst=peer) for peer in range(world) if peer != rank]
        for work in works:
            work.wait()
        seconds.append(time.perf_counter() - start)
    return {"bytes_per_second": (world - 1) * nbytes / statistics.median(seconds[2:])}


def member(arguments: dict[str, Any]) -> dict[str, Any]:
    """What one rank of one contender does; this is the body of one process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(arguments["threads"])
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    name, shape = arguments["contender"], arguments["shape"]
    if name == "wire":
        return measure_wire(arguments["steps"])
    made: Any = {
        "offload stage 3": lambda: Ours(shape, 3),
        "offload stage 2": lambda: Ours(shape, 2),
        "fsdp2": lambda: Fsdp2(shape),
        "deepspeed stage 3": lambda: DeepSpeed(shape),
        "compute": lambda: Compute(shape),
    }[name]()
    seconds, losses = [], []
    for step in range(arguments["steps"] + 2):
        tokens = tokens_of(step, rank, world)
        dist.barrier()
        start = time.perf_counter()
        loss = made.step(tokens)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return {"seconds": seconds[2:], "losses": losses, "peak_rss_nbytes": status_nbytes("VmHWM")} | made.finish()


def run(contender: str, arguments: dict[str, Any], python: str, ranks: int, timeout: float) -> list[dict[str, Any]]:
    """One turn of one contender, on all ranks. Raises `RuntimeError` with what it wrote if it fails."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes, outputs = [], []
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(arguments["threads"]),
                "OFFLOAD_THREADS": str(arguments["threads"]), "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            outputs.append(Path(folder) / f"rank-{rank}")
            command = [python, __file__, "--member", json.dumps(arguments | {"contender": contender})]
            processes.append(
                subprocess.Popen(command, stdout=outputs[-1].open("w"), stderr=subprocess.STDOUT, env=environment, text=True)
            )
        deadline = time.monotonic() + timeout
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [output.read_text() for output in outputs]
    if any(codes):
        raise RuntimeError(f"{contender} failed:\n{texts[0][-1500:]}\n{texts[-1][-1500:]}")
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]


def summary(name: str, turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A contender's figures: a step is over when its slowest rank is done."""
    steps = [max(pair) for turn in turns for pair in zip(*(one["seconds"] for one in turn), strict=True)]
    return {
        "case": name,
        "median_seconds": statistics.median(steps),
        "seconds": steps,
        "losses": turns[0][0]["losses"],
        "peak_rss_nbytes": max(one["peak_rss_nbytes"] for turn in turns for one in turn),
        "traffic": turns[0][0].get("traffic"),
    }


def measure_shape(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders in turns."""
    arguments = {"shape": shape, "steps": options.steps, "threads": options.threads}
    turns: dict[str, list[list[dict[str, Any]]]] = {}
    missing: dict[str, str] = {}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            python = options.deepspeed if name == "deepspeed stage 3" else sys.executable
            if python is None or name in missing:
                missing.setdefault(name, "not installed")
                continue
            try:
                turns.setdefault(name, []).append(run(name, arguments, python, options.ranks, options.timeout))
            except RuntimeError as error:
                missing[name] = str(error)
                print(error, file=sys.stderr)
    wire = statistics.median(turn[0]["bytes_per_second"] for turn in turns.pop("wire"))
    parameters = turns["compute"][0][0]["parameters"]
    compute = summary("compute", turns.pop("compute"))["median_seconds"]
    # Each rank sends its shard to the others twice, and the others' shards of its gradients once.
    moved = 3 * 4 * parameters * (options.ranks - 1) / options.ranks / wire
    results = [summary(name, found) for name, found in turns.items() if name not in missing]
    ours = next(one["median_seconds"] for one in results if one["case"] == "offload stage 3")
    for one in results:
        one |= {"shape": shape, "parameters": parameters, "ranks": options.ranks, "ours_to_it": ours / one["median_seconds"]}
        one |= {"compute_seconds": compute, "wire_seconds": moved, "floor_seconds": max(compute, moved)}
    results += [{"case": name, "shape": shape, "missing": why} for name, why in missing.items()]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="125M", help=f"of {', '.join(SHAPES)}; separated by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one turn of one contender")
    parser.add_argument("--deepspeed", help="a Python interpreter that has DeepSpeed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        print(json.dumps(member(json.loads(options.member))), flush=True)
        os._exit(0)  # peers' groups may wait at exit for ranks that have gone
    report = {
        "machine": describe_machine(),
        "results": [one for shape in options.shapes.split(",") for one in measure_shape(shape, options)],
    }
    text = json.dumps(report, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
