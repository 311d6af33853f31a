# SPDX-License-Identifier: Apache-2.0
"""Whether narrow optimizer states learn as well as fp32 ones: loss curves of a small Llama on real text, as JSON.

    python benchmarks/loss_curves.py --out docs/performance/loss_curves.json

Every run is the same model (bf16, AdamW, clipping, warm-up and cosine decay) on bytes of the sources of Python's library, its
loss taken on the same held-out windows every `--every` steps. fp32 states are run with several seeds, of the initial values
and of the order of the data: what they differ by is the noise. The other state formats are run with the first seed, and
what they differ from its fp32 run by is the figure. Losses do not depend on the machine's speed or its load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

FORMATS = ("split", "bf16", "8bit")
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SEQUENCE, BATCH, HELD_OUT = 128, 8, 16
LR, WARMUP, DECAY, CLIP = 3e-3, 50, 0.1, 1.0


def train(state_format: str, seed: int, steps: int, every: int) -> dict[str, Any]:
    """One run; its held-out losses after 0, `every`, ... steps."""
    import torch
    import transformers

    import offload
    from offload.cli.corpus import BYTE_VOCABULARY_SIZE, ByteStream, Windows, find_documents

    started = time.perf_counter()
    windows = Windows(ByteStream(find_documents("stdlib")), SEQUENCE, BATCH, 0)
    held_out = list(windows.held_out_batches(HELD_OUT))
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=BYTE_VOCABULARY_SIZE, max_position_embeddings=SEQUENCE, use_cache=False, **MODEL)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, betas=(0.9, 0.98))
    config = offload.Config(
        parameters="cpu", optimizer_states="cpu", dtype="bf16", max_grad_norm=CLIP, state_format=state_format
    )
    curve: list[tuple[int, float]] = []
    with offload.initialize(model, optimizer, config) as engine:
        optimizer_of_engine: Any = engine.optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer_of_engine, lambda step: rate(step, steps))

        def evaluate(step: int) -> None:
            with torch.no_grad():
                losses = [float(model(input_ids=batch, labels=batch).loss) for batch in held_out]
            curve.append((step, statistics.fmean(losses)))

        batches = itertools.islice(windows.training_batches(), seed * steps, None)
        for step, batch in zip(range(steps), batches, strict=False):
            if step % every == 0:
                evaluate(step)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer_of_engine.step()
            schedule.step()
            optimizer_of_engine.zero_grad()
        evaluate(steps)
    numel = sum(parameter.numel() for parameter in model.parameters())
    result = {"state_format": state_format, "seed": seed, "parameters": numel, "curve": curve}
    print(
        f"{state_format:>5} seed {seed}: held-out loss {curve[-1][1]:.4f} after {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return result


def rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))


def distances(curve: list[tuple[int, float]], reference: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """|difference| at each step."""
    return [(step, abs(loss - other)) for (step, loss), (_, other) in zip(curve, reference, strict=True)]


def summary(runs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The noise between seeds and each format's distance from fp32: at the end, and the mean over the second half."""
    wide = [run for run in runs if run["state_format"] == "fp32"]

    def both(curve: list[tuple[int, float]], reference: list[tuple[int, float]]) -> tuple[float, float]:
        found = distances(curve, reference)
        return found[-1][1], statistics.fmean(value for step, value in found if step >= steps // 2)

    noise = [both(one["curve"], other["curve"]) for one, other in itertools.combinations(wide, 2)]
    result: dict[str, Any] = {
        "noise": {"last": max(last for last, _ in noise), "mean": max(mean for _, mean in noise)},
        "final_loss": {f"fp32 seed {run['seed']}": run["curve"][-1][1] for run in wide},
    }
    for run in runs:
        if run["state_format"] != "fp32":
            last, mean = both(run["curve"], wide[0]["curve"])
            within = last <= result["noise"]["last"] and mean <= result["noise"]["mean"]
            result[run["state_format"]] = {"last": last, "mean": mean, "within_noise": within}
            result["final_loss"][run["state_format"]] = run["curve"][-1][1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the losses there as JSON")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, default=3, help="fp32 runs that the noise is taken from; at least 2")
    options = parser.parse_args()
    runs = [train("fp32", seed, options.steps, options.every) for seed in range(options.seeds)]
    runs += [train(state_format, 0, options.steps, options.every) for state_format in FORMATS]
    report = {
        "machine": describe_machine(),
        "model": MODEL | {"sequence": SEQUENCE, "batch": BATCH, "lr": LR, "weight_decay": DECAY, "clip": CLIP},
        "steps": options.steps,
        "runs": runs,
        "summary": summary(runs, options.steps),
    }
    print(json.dumps(report["summary"], indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
