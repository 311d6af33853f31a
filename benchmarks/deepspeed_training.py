# SPDX-License-Identifier: Apache-2.0
"""The same training by the real DeepSpeed and by the drop-in, word for word: losses step for step, time and memory beside them.

    DEEPSPEED_PYTHON=/path/to/python python benchmarks/deepspeed_training.py

fp32, ZeRO stages 1 to 3, AdamW, clipping, two micro-batches a step, WarmupDecayLR; one rank on a CPU, one thread. Each stage is
trained by both in turns, several times: a time is the CPU time of the median step, and only its ratio within this run counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import describe_machine  # noqa: E402

from tests.integrations.peers import PEER, drop_in, real  # noqa: E402

RESULT = ROOT / "docs" / "performance" / "deepspeed_training.json"
SHAPE = {"width": 256, "depth": 6}
STEPS, TURNS = 8, 2


def given(stage: int) -> dict[str, Any]:
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "steps_per_print": 1000,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0003, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.0003, "warmup_num_steps": 3, "total_num_steps": 12},
        },
    }  # fmt: skip
    return {"config": config, "steps": STEPS} | SHAPE


def compare(stage: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"deepspeed": [], "offload": []}
    for _ in range(TURNS):
        for name, run in (("deepspeed", real), ("offload", drop_in)):
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(run(Path(folder), given(stage)))
    pairs = list(zip(runs["deepspeed"][0]["losses"], runs["offload"][0]["losses"], strict=True))
    found: dict[str, Any] = {"stage": stage, "losses": pairs}
    found["largest_relative_difference"] = max(abs(ours - theirs) / abs(theirs) for theirs, ours in pairs)
    for name, made in runs.items():
        found[name] = {
            "cpu_seconds": statistics.median(seconds for one in made for seconds in one["cpu_seconds"][1:]),
            "peak_nbytes": min(one["peak_nbytes"] for one in made),
            "imported_nbytes": min(one["imported_nbytes"] for one in made),
        }
    return found


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    if PEER is None:
        raise SystemExit("DEEPSPEED_PYTHON names no Python with the real DeepSpeed.")
    results = [compare(stage) for stage in (1, 2, 3)]
    report = {"machine": describe_machine(), "shape": SHAPE, "steps": STEPS, "turns": TURNS, "deepspeed": "0.19.8"}
    RESULT.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")
    for one in results:
        print(f"stage {one['stage']}: losses differ by {one['largest_relative_difference']:.1e} at most")


if __name__ == "__main__":
    main()
