# SPDX-License-Identifier: Apache-2.0
"""The training step of train_step.py by DeepSpeed ZeRO-3, in an interpreter that has it: one JSON argument, one JSON result.

    python deepspeed_step.py '{"shape": {...}, "steps": 3, "offload": "nvme", "nvme": "/mnt/nvme0", ...}'

The configuration is tuned by hand for a machine without a GPU: large aio blocks and a deep queue with overlapped events,
no pinning (a small memlock limit would refuse it), a sub-group that keeps the optimizer's working set small, buffers
just larger than the largest parameter (they cannot be smaller) and no more of them than it works with, reads and writes of
the optimizer pipelined where their buffers fit.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
MIB = 1 << 20
LIVE = 6
"""Large parameters that are in memory at once: of the module that computes, of those that are prefetched, the embedding."""


def optimizer_buffer_count(shape: dict[str, Any], largest_numel: int, memory_nbytes: int) -> int:
    """Each as large as the largest parameter.

    An update takes 4: parameter, gradient and two moments; as many for the next one that is read meanwhile, and for the last
    one that is written, where memory is large enough for 12 (at its peak it holds some three times the gradients too)."""
    gradient_nbytes = 4 * (12 * shape["n_layer"] * shape["n_embd"] ** 2 + largest_numel)
    needed_nbytes = 4 * (LIVE + 12) * largest_numel + 3 * gradient_nbytes
    return 12 if needed_nbytes < 0.8 * memory_nbytes else 4


def configuration(arguments: dict[str, Any], largest_numel: int) -> dict[str, Any]:
    """ZeRO-3 with everything on `arguments["offload"]`: "cpu" or "nvme"."""
    device = arguments["offload"]
    parameters: dict[str, Any] = {"device": device, "pin_memory": False}
    states: dict[str, Any] = {"device": device, "pin_memory": False}
    if device == "nvme":
        count = optimizer_buffer_count(arguments["shape"], largest_numel, arguments["memory_nbytes"])
        parameters |= {
            "nvme_path": arguments["nvme"],
            "buffer_count": LIVE,
            "max_in_cpu": 0,
            "buffer_size": largest_numel + MIB,
        }
        states |= {"nvme_path": arguments["nvme"], "buffer_count": count}
        states |= {"pipeline_read": count == 12, "pipeline_write": count == 12}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": arguments["clip"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {
            "block_size": MIB, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": parameters,
            "offload_optimizer": states,
            "overlap_comm": False,  # one rank has nothing to overlap, and it takes the bucket twice
            "reduce_bucket_size": largest_numel,
            "contiguous_gradients": True,
            "sub_group_size": 64 * MIB,
            "stage3_prefetch_bucket_size": largest_numel // 4,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": largest_numel,  # more than the buffers hold is an error
            "stage3_max_reuse_distance": 0,
        },
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": bool(arguments.get("bf16"))},
    }  # fmt: skip


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train; the same model, batches and clipping as train_step.py."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ[name] = value
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    import deepspeed
    import torch
    import torch._dynamo.polyfills.loader  # before zero.Init patches what it looks at while it is imported
    import transformers

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    config = transformers.GPT2Config(**arguments["shape"])
    tuned = configuration(arguments, config.vocab_size * config.n_embd)
    with deepspeed.zero.Init(config_dict_or_path=tuned):
        model = transformers.GPT2LMHeadModel(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=tuned)
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(arguments["steps"] + 2):
        tokens = torch.randint(0, config.vocab_size, (1, config.n_positions), generator=generator)
        start = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return {
        "deepspeed": deepspeed.__version__,
        "median_seconds": statistics.median(seconds[2:]),
        "seconds": seconds,
        "losses": losses,
        "peak_rss_nbytes": peak,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
