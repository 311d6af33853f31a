"""Seconds per training step and peak host memory, offloaded against plain PyTorch, in one run on one machine.

    python benchmarks/train_step.py --out docs/performance/train_step.json

GPT-2-shaped models, batch 1 x 128, fp32, gradient norm clipped to 1.0. Every case is a process of its own, so its peak
resident size (VmHWM) is its own; the ratios are to plain PyTorch with fused AdamW on the same model where it fits. Beside
each step stands the floor: the largest of compute, memory and NVMe time at rates measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
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
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compute": {},
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
    if case in ("plain", "compute"):
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
        if case == "plain":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if case != "compute":
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


def memory_rate() -> float:
    """Bytes per second that a loop which only reads 4 and writes 3 arrays moves, the traffic of Adam in fp32."""
    import torch

    from offload import _native

    numel = 32 * 2**20
    arrays = [torch.zeros(numel) for _ in range(4)]
    addresses = [array.data_ptr() for array in arrays]
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        _native.stream(addresses, addresses[:3], numel)
        best = max(best, 7 * 4 * numel / (time.perf_counter() - start))
    return best


def nvme_rates(folder: str) -> dict[str, float]:
    """Bytes per second of direct reads alone, writes alone, and both at once (their sum), from huge pages."""
    from offload.layout import Extent
    from offload.tiers.io import open_backend
    from offload.tiers.memory import HostMemory
    from offload.tiers.nvme import NvmeStore
    from offload.tiers.scratch import ScratchFolder

    nbytes, count = 16 * 2**20, 64
    extents = [Extent(index * nbytes, nbytes) for index in range(2 * count)]
    scratch, backend = ScratchFolder([folder]), open_backend()
    store = NvmeStore("rates", extents, scratch, backend)
    buffers = HostMemory(8 * nbytes, "rates", prefault=True, direct_io=True).tensor.split(nbytes)

    def run(operations: list[tuple[Any, Extent]]) -> float:
        pending: list[Any] = []
        start = time.perf_counter()
        for index, (operation, extent) in enumerate(operations):
            if len(pending) >= len(buffers):
                pending[index - len(buffers)].wait()
            pending.append(operation(extent, buffers[index % len(buffers)]))
        for one in pending:
            one.wait()
        return len(operations) * nbytes / (time.perf_counter() - start)

    try:
        run([(store.write, extent) for extent in extents])
        write = run([(store.write, extent) for extent in extents])
        read = run([(store.read, extent) for extent in extents])
        mixed = list(zip(extents[:count], extents[count:], strict=True))
        both = run([entry for a, b in mixed for entry in ((store.read, a), (store.write, b))])
    finally:
        store.close()
        backend.close()
        scratch.close()
    return {"read": read, "write": write, "both": both}


def floor_seconds(result: dict[str, Any], plain_compute: float | None, memory: float, nvme: dict[str, float]) -> float:
    """The largest of what compute, memory and NVMe need at least: no step can be shorter than its slowest link."""
    terms = [28 * result["parameters"] / memory]
    if plain_compute is not None:
        terms.append(plain_compute)
    if "read_nbytes_per_step" in result:
        terms.append((result["read_nbytes_per_step"] + result["written_nbytes_per_step"]) / nvme["both"])
    return max(terms)


def compute_seconds(arguments: dict[str, Any]) -> float:
    """Forward and backward of plain PyTorch without an optimizer, median; a process of its own."""
    return float(child({**arguments, "case": "compute"})["median_seconds"])


def describe_machine() -> dict[str, Any]:
    import torch

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_nbytes": memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release().split("-")[0],
    }


RUNS = (
    ("125M", "plain", {}),
    ("125M", "cpu", {}),
    ("125M", "nvme", {}),
    ("1B", "plain", {}),
    ("1B", "nvme", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--nvme", help="folder on the drive to use; default: a temporary one in the current folder")
    parser.add_argument("--shapes", default="125M,1B", help="which models, of " + ", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=8, help="steps that count, after two that do not")
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    with tempfile.TemporaryDirectory(dir=options.nvme or ".", prefix="bench-") as folder:
        rates = {"memory": memory_rate(), "nvme": nvme_rates(folder)}
        results = []
        for shape in shapes:
            common = {"shape": shape, "steps": options.steps, "nvme": folder, "overrides": {}}
            compute = compute_seconds(common)
            plain: float | None = None
            for run_shape, case, overrides in RUNS:
                if run_shape != shape and not (shape == "tiny" and run_shape == "125M"):
                    continue
                result = child({**common, "case": case, "overrides": overrides})
                plain = result["median_seconds"] if case == "plain" else plain
                result["floor_seconds"] = floor_seconds(result, compute, rates["memory"], rates["nvme"])
                result["ratio_to_plain"] = result["median_seconds"] / plain if plain else None
                results.append(result)
                print(row(result), flush=True)
    report = {"machine": describe_machine(), "rates": rates, "batch": 1, "sequence": SEQUENCE, "clip": CLIP, "results": results}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    ratio = f"{result['ratio_to_plain']:.2f}" if result["ratio_to_plain"] else "-"
    return (
        f"{result['shape']:>5} {result['case']:>6}  {result['median_seconds']:7.3f} s/step  {ratio:>5} x plain  "
        f"floor {result['floor_seconds']:6.3f} s  peak {result['peak_rss_nbytes'] / 2**30:5.2f} GiB"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        main()
