# SPDX-License-Identifier: Apache-2.0
"""The optimizer step on CPU memory: every state format, on any number of threads, against what memory alone allows and
against other implementations, in one run on one machine.

    python benchmarks/adam.py --out docs/performance/adam.json

For each number of threads (1, 2, 4, ... cores) and each shape (one flat tensor; a list shaped like GPT-2's parameters) a
process of its own measures in turns, one call of each candidate a round, so that what drifts drifts for all:

    ours       each state format
    stream     a C loop that reads and writes the same bytes and computes nothing, for each format
    peers      torch.optim.AdamW, foreach and fused; DeepSpeedCPUAdam where deepspeed is installed (extra `peers`)

and the whole of what a mixed-precision offloaded step does to a bf16 gradient and its parameter:

    ours       sum of squares; then one pass that un-scales, clips, updates and emits the bf16 parameter
    DeepSpeed  upcast into the fp32 gradient buffer, its norm, Adam in fp32, cast copy into the bf16 parameter
               (torch's fused Adam in its place where deepspeed is missing)

Figures are medians. Bytes count every array that is read and every array that is written once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FLAT_NUMEL = 32 * 2**20
HIDDEN, LAYERS, VOCABULARY, POSITIONS = 768, 12, 50257, 1024
PAUSE_SECONDS = 0.02
"""Before each call: OpenMP's threads spin on for some milliseconds after theirs, on the cores that the next one needs."""
FORMATS = ("fp32", "mixed", "split", "bf16", "8bit")
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-3, 0.01
# Bytes of one element of each array: (read, written).
STREAMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fp32": ((4, 4, 4, 4), (4, 4, 4)),  # gradient, weight, two moments; all but the gradient written
    "mixed": ((2, 4, 4, 4), (4, 4, 4, 2)),  # and the bf16 parameter written
    "split": ((2, 2, 2, 4, 4), (2, 2, 4, 4)),  # gradient, bf16 weight, remainder, moments
    "bf16": ((2, 2, 2, 2, 2), (2, 2, 2, 2)),
    "8bit": ((2, 2, 2, 1, 1), (2, 2, 1, 1)),  # and 1/64 of a byte for each scale
}


def gpt2_numels(scale: int) -> list[int]:
    """Elements of GPT-2's (125 M) parameters; `scale` divides the number of layers and the vocabulary."""
    h = HIDDEN
    block = [h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h]
    return [VOCABULARY // scale * h, POSITIONS * h, *(block * max(LAYERS // scale, 1)), h, h]


class Memory:
    """Arrays [numel] on huge pages, filled with what training fills them with; views of each tensor of a list."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self.starts = [0]
        for numel in numels:
            self.starts.append(self.starts[-1] + -(-numel // 64) * 64)
        self.numel = -(-self.starts[-1] // 4096) * 4096
        self._kept: list[Any] = []

    def make(self, dtype: Any, fill: Callable[[Any], Any]) -> list[Any]:
        """One array, as a list of a tensor for each of `numels`."""
        whole = self.array(dtype)
        fill(whole)
        return self.views(whole)

    def array(self, dtype: Any) -> Any:
        import torch

        from offload.tiers.memory import HostMemory

        memory = HostMemory(self.numel * dtype.itemsize, "bench", prefault=True)
        self._kept.append(memory)
        return memory.tensor.view(torch.uint8).view(dtype)

    def views(self, whole: Any) -> list[Any]:
        return [whole[start : start + numel] for start, numel in zip(self.starts, self._numels, strict=False)]


def our_call(memory: Memory, name: str, grads: list[Any]) -> Callable[[], None]:
    """One update of the whole memory in a state format."""
    import torch

    from offload.device.arithmetic.optimizer_step import update
    from offload.device.arithmetic.records import Record, RecordFormat
    from offload.device.arithmetic.rules import Hyper, Rule
    from offload.device.arithmetic.segment import Segment, StateFormat

    state_format = StateFormat("fp32" if name == "mixed" else name)
    record_format = RecordFormat(state_format)
    arrays = {array: memory.array(dtype)[:count] for array, dtype, count in record_format.arrays(memory.numel)}
    record = Record(record_format, arrays)
    values = memory.array(torch.bfloat16) if name != "fp32" else None
    for start in range(0, memory.numel, 2**22):
        low, high = start, min(start + 2**22, memory.numel)
        weights = torch.randn(high - low) * 0.02
        record.put_master(low, high, weights)
        if values is not None:
            record_format.round_values(values[low:high], weights)
        record.put_moment("exp_avg", low, high, weights * 1e-2)
        record.put_moment("exp_avg_sq", low, high, weights.square() * 1e-4)
    hyper = Hyper(Rule.ADAM, LR, *BETAS, EPS, DECAY, decoupled=True)
    segments = []
    for index, grad in enumerate(grads):
        low, high = memory.starts[index], memory.starts[index] + grad.numel()
        emitted = values[low:high] if values is not None else None
        segments.append(Segment(grad, record.part(low, high), emitted, hyper, 10, 0.5, state_format, index))
    return lambda: update(segments)


def stream_call(memory: Memory, name: str) -> Callable[[], None]:
    """The same bytes without arithmetic."""
    import torch

    from offload import _native

    reads, writes = STREAMS[name]
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.float32}
    arrays = [(memory.array(dtypes[nbytes]).data_ptr(), nbytes) for nbytes in reads]
    written = arrays[1 : 1 + len(writes)]
    written += [(memory.array(dtypes[nbytes]).data_ptr(), nbytes) for nbytes in writes[len(written) :]]
    return lambda: _native.stream(arrays, written, memory.numel)


def peer_calls(memory: Memory, masters: list[Any], grads: list[Any]) -> dict[str, Callable[[], Any]]:
    """Steps of other implementations on fp32 parameters `masters`, all on the same memory."""
    import torch

    parameters = [torch.nn.Parameter(one) for one in masters]
    averages = memory.make(torch.float32, lambda whole: whole.normal_(0, 1e-4))
    squares = memory.make(torch.float32, lambda whole: whole.normal_(0, 1e-4).square_())
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad

    def with_state(optimizer: Any, step: Any) -> Callable[[], Any]:
        for parameter, average, square in zip(parameters, averages, squares, strict=True):
            optimizer.state[parameter] = {"step": step(), "exp_avg": average, "exp_avg_sq": square}
        return lambda: optimizer.step()

    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}

    def counter() -> torch.Tensor:
        return torch.tensor(10.0)

    calls = {
        "torch_foreach": with_state(torch.optim.AdamW(parameters, foreach=True, **options), counter),
        "torch_fused": with_state(torch.optim.AdamW(parameters, fused=True, **options), counter),
    }
    if (adam := deepspeed_adam()) is not None:
        calls["deepspeed"] = with_state(adam(parameters, adamw_mode=True, **options), lambda: 10)
    return calls


def deepspeed_adam() -> Any:
    """DeepSpeedCPUAdam, or None where deepspeed is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam


def whole_calls(
    ours: dict[str, Callable[[], None]], adam: Callable[[], Any], grads16: list[Any], fp32: tuple[list[Any], list[Any]]
) -> dict[str, Callable[[], None]]:
    """A whole mixed-precision step: ours in each format with bf16 parameters, and the usual sequence around `adam`, which works
    on `fp32`: (masters, gradients)."""
    import torch

    from offload.device.arithmetic import kernels

    masters, grads32 = fp32
    parameters16 = [torch.empty_like(grad) for grad in grads16]

    def whole(update: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            torch.cat([kernels.ingest_async(None, grad, 0, False) for grad in grads16]).sum()
            update()

        return run

    def usual() -> None:
        torch._foreach_copy_(grads32, grads16)
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads32)))
        adam()
        torch._foreach_copy_(parameters16, masters)

    return {**{f"whole {name}": whole(call) for name, call in ours.items() if name != "fp32"}, "whole peer": usual}


def measure(threads: int, shape: str, seconds: float, scale: int) -> dict[str, Any]:
    """The body of one child process."""
    import torch

    from offload import _native

    torch.set_num_threads(threads)
    _native.set_thread_count(threads)
    torch.manual_seed(0)
    memory = Memory([FLAT_NUMEL // scale] if shape == "flat" else gpt2_numels(scale))
    grads32 = memory.make(torch.float32, lambda whole: whole.normal_(0, 1e-3))
    grads16 = memory.make(torch.bfloat16, lambda whole: whole.normal_(0, 1e-3))
    masters = memory.make(torch.float32, lambda whole: whole.normal_(0, 0.02))
    ours = {name: our_call(memory, name, grads32 if name == "fp32" else grads16) for name in FORMATS}
    calls: dict[str, Callable[[], Any]] = dict(ours)
    calls |= {f"stream {name}": stream_call(memory, name) for name in FORMATS}
    peers = peer_calls(memory, masters, grads32)
    calls |= peers
    usual = peers.get("deepspeed", peers["torch_fused"])
    calls |= whole_calls(ours, usual, grads16, (masters, grads32))
    times = rounds(calls, seconds)
    return {
        "threads": threads,
        "shape": shape,
        "numel": memory.numel,
        "tensors": len(grads32),
        "rounds": len(next(iter(times.values()))),
        "whole_peer": "deepspeed" if "deepspeed" in peers else "torch_fused",
        "median_seconds": {name: statistics.median(samples) for name, samples in times.items()},
    }


def rounds(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every call, in turns, for about `seconds` and at least five rounds after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for call in calls.values():
        call()
    while len(next(iter(times.values()))) < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run `measure` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments["threads"]), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def with_ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Bytes moved, share of the stream and ratios, beside the medians that they follow from."""
    seconds = result["median_seconds"]
    peers = [name for name in ("torch_foreach", "torch_fused", "deepspeed") if name in seconds]
    result["formats"] = {}
    for name in FORMATS:
        nbytes = sum(sum(part) for part in STREAMS[name]) + (4 / 64 if name == "8bit" else 0)
        result["formats"][name] = {
            "nbytes_per_parameter": nbytes,
            "nbytes_per_second": nbytes * result["numel"] / seconds[name],
            "share_of_stream": seconds[f"stream {name}"] / seconds[name],
            "ratio_to_fp32": seconds[name] / seconds["fp32"],
            "ratio_to_peers": {peer: seconds[name] / seconds[peer] for peer in peers},
            "whole_ratio": seconds[f"whole {name}"] / seconds["whole peer"] if name != "fp32" else None,
        }
    return result


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def row(result: dict[str, Any], name: str) -> str:
    """One line of the table."""
    one = result["formats"][name]
    peers = "  ".join(f"{ratio:.2f} x {peer}" for peer, ratio in one["ratio_to_peers"].items())
    whole = f"  whole step {one['whole_ratio']:.2f} x {result['whole_peer']}'s" if one["whole_ratio"] else ""
    return (
        f"{result['threads']:>2} threads {result['shape']:>5} {name:>5}  {result['median_seconds'][name] * 1e3:8.2f} ms  "
        f"{one['nbytes_per_parameter']:5.1f} B  {one['nbytes_per_second'] / 1e9:6.1f} GB/s  "
        f"{one['share_of_stream']:6.1%} of stream  "
        f"{one['ratio_to_fp32']:.2f} x fp32  {peers}{whole}"
    )


def main() -> None:
    from machine import describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--threads", type=int, nargs="*", help="numbers of threads (default 1, 2, 4, ... cores)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each number of threads and shape (default 30)")
    parser.add_argument("--scale", type=int, default=1, help="divide the sizes, to try it out; must be a power of two")
    options = parser.parse_args()
    results = []
    for threads in options.threads or thread_counts(len(os.sched_getaffinity(0))):
        for shape in ("flat", "gpt2"):
            arguments = {"threads": threads, "shape": shape, "seconds": options.seconds, "scale": options.scale}
            result = with_ratios(child(arguments))
            results.append(result)
            for name in FORMATS:
                print(row(result, name), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"machine": describe_machine(), "scale": options.scale, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        main()
