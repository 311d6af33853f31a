"""Seconds per training step and peak host memory, offloaded against plain PyTorch, in one run on one machine.

    python benchmarks/train_step.py --out docs/performance/train_step.json

GPT-2-shaped models, batch 1 x 128, fp32, gradient norm clipped to 1.0. Every case is a process of its own, so its peak
resident size (VmHWM) is its own; the ratios are to plain PyTorch with fused AdamW on the same model where it fits. Beside
each step stands the floor: the largest of compute, memory and NVMe time at rates measured in the same run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "125M": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "1B": {"n_embd": 2048, "n_layer": 18, "n_head": 16},
}
VOCABULARY = 50257
SEQUENCE = 128
CLIP = 1.0
CASES = {
    "plain": {},
    "cpu": {"parameters": "cpu", "optimizer_states": "cpu"},
    "nvme": {"parameters": "nvme", "optimizer_states": "nvme"},
}


def status_nbytes(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def build(shape: str) -> Any:
    """A GPT-2-shaped causal language model with random weights."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SHAPES[shape]
    )
    return transformers.GPT2LMHeadModel(config)


def measure(case: str, shape: str, steps: int, nvme: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train `steps` steps after two that are not counted; this is the body of one child process."""
    import torch

    import offload

    torch.manual_seed(0)
    engine = None
    if case == "plain":
        model = build(shape)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        with offload.deferred_init():
            model = build(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = offload.Config(nvme=nvme, max_grad_norm=CLIP, **(CASES[case] | overrides))
        engine = offload.initialize(model, optimizer, config)
        optimizer = engine.optimizer
    numel = sum(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(1)
    seconds: list[float] = []
    losses: list[float] = []
    for index in range(steps + 2):
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=generator)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if engine is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if index == 1 and engine is not None:
            before = engine.stats()
    result: dict[str, Any] = {
        "case": case,
        "shape": shape,
        "parameters": numel,
        "median_seconds": statistics.median(seconds[2:]),
        "seconds": seconds,
        "losses": losses,
        "peak_rss_nbytes": status_nbytes("VmHWM"),
    }
    if engine is not None:
        after = engine.stats()
        result["engine"] = {key: after[key] for key in ("placement", "planned", "host_peak_nbytes", "io_backend")}
        result["seconds_by_phase"] = {key: value / steps for key, value in after["seconds"].items()}
        if after["io"] is not None:
            for field in ("read_nbytes", "written_nbytes", "read_busy_ns", "write_busy_ns"):
                result[field + "_per_step"] = (getattr(after["io"], field) - getattr(before["io"], field)) / steps
        engine.close()
    return result


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run `measure` in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
        raise SystemExit
