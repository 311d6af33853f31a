# SPDX-License-Identifier: Apache-2.0
"""Processor time of the optimizer kernels by instruction set: the scalar ones, for processors without AVX2, beside the others.

    python benchmarks/simd.py --out docs/performance/simd.json

In turns, AdamW on 1 Mi elements in each state format. Figures are the least of the rounds, in ns of processor time an
element: arithmetic, not memory, is what differs between the sets.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from adam import FORMATS, Memory, our_call

NUMEL, ROUNDS = 2**20, 7


def measure() -> dict[str, Any]:
    import torch
    from machine import describe_machine

    from offload import _native

    results: dict[str, dict[str, float]] = {}
    for name in FORMATS:
        memory = Memory([NUMEL])
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        call = our_call(memory, name, memory.make(dtype, lambda whole: whole.normal_(std=1e-3)))
        spent: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for level in levels():
                _native.set_simd_level(level)
                started = time.process_time()
                call()
                spent.setdefault(level, []).append((time.process_time() - started) / NUMEL * 1e9)
        results[name] = {level: min(times) for level, times in spent.items()}
    _native.set_simd_level(None)
    return {"machine": describe_machine(), "numel": NUMEL, "results": results}


def levels() -> list[str]:
    """The sets that this processor runs, the scalar one first."""
    from offload import _native

    found = []
    for name in _native.SIMD_LEVELS:
        try:
            _native.set_simd_level(name)
        except OSError:
            continue
        found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    args = parser.parse_args()
    report = measure()
    print(json.dumps(report["results"], indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
