# SPDX-License-Identifier: Apache-2.0
"""LoRA on a model that comes from safetensors and never is in memory: memory of the engine, and bytes moved by a step.

    python benchmarks/lora.py --folder /path/on/the/drive --out docs/performance/lora.json

A Llama of 1.1 billion bf16 parameters with random values is written to the folder (once), and loaded by `from_pretrained`
inside `deferred_init`; parameters and states lie on NVMe. A step reads each frozen weight twice, for forward and backward, but
for the embedding, which backward does not need, the head and the last layer, which stay for it, and the first layer, which
stays for the next forward. Of adapters (fp32) it reads parameters twice, and gradients and moments; these and the new
parameters it writes. Counts, not times: they are the same on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
SIZES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512},
}


def write_model(folder: Path, size: str) -> None:
    """Random weights in the files of a pretrained model, one for each layer, with never more than one in memory."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **SIZES[size], num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048, dtype="bfloat16"
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(part, {})[name] = parameter.shape
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for part, shapes in shards.items():
        values = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        save_file(values, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shapes, f"model-{part}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def anonymous_peak_nbytes() -> int:
    """The most memory of this process that is no file's, as far as it was looked at."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def run(folder: Path, size: str, tokens: int, steps: int) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import offload

    before = anonymous_peak_nbytes()
    with offload.deferred_init():
        model = AutoModelForCausalLM.from_pretrained(folder / size)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    config = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": str(folder / "scratch")}
    with offload.initialize(model, optimizer, config) as engine:
        built = anonymous_peak_nbytes() - before
        generator, moved, losses = torch.Generator().manual_seed(1), [], []
        for _ in range(steps):
            ids = torch.randint(0, SIZES[size]["vocab_size"], (1, tokens), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            engine.step()
            engine.zero_grad()
            losses.append(loss.item())
            links = engine.stats()["links"]
            moved.append({"read_nbytes": links["nvme read"]["nbytes"], "written_nbytes": links["nvme write"]["nbytes"]})
        frozen = {name: p.nbytes for name, p in model.named_parameters() if not p.requires_grad}
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        embedding = sum(nbytes for name, nbytes in frozen.items() if "embed_tokens" in name)
        total = sum(frozen.values())
        head = sum(nbytes for name, nbytes in frozen.items() if "lm_head" in name)
        layer = sum(nbytes for name, nbytes in frozen.items() if ".layers.0." in name)
        adapters = {"read": trained * (4 + 4 + 4 + 8), "written": trained * (4 + 4 + 8)}
        return {
            "parameters": total // 2 + trained,
            "trained": trained,
            "tokens": tokens,
            "frozen_nbytes": total,
            "engine_peak_nbytes": engine.stats()["host_peak_nbytes"] + engine.stats()["resident_peak_nbytes"],
            "of_which_units_nbytes": engine.stats()["resident_peak_nbytes"],
            "engine_nbytes": engine.stats()["host_nbytes"],
            "process_nbytes_after_initialize": built,
            "losses": losses,
            "formula": {
                "read_nbytes": 2 * total - embedding - head - 2 * layer + adapters["read"],
                "written_nbytes": adapters["written"],
            },
            "steps": moved,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir(), "offload-lora"),
        help="for the model's files and for scratch files",
    )
    parser.add_argument("--out", type=Path, help="the result file (default: print)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    size = "tiny" if options.quick else "1B"
    if not (options.folder / size / "model.safetensors.index.json").exists():
        write_model(options.folder / size, size)
    from machine import describe_machine

    text = (
        json.dumps({"machine": describe_machine(), **run(options.folder, size, options.tokens, options.steps)}, indent=2) + "\n"
    )
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
