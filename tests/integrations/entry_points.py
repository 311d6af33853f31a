# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's and axolotl's own entry points on the drop-in, with the configs that they ship, beside the same without one.

    LLAMAFACTORY=/path/to/LLaMA-Factory LLAMAFACTORY_PYTHON=/path/to/python python tests/integrations/entry_points.py
    AXOLOTL=/path/to/axolotl            AXOLOTL_PYTHON=/path/to/python      python tests/integrations/entry_points.py

The folders are the tools' repositories, of which the configs for DeepSpeed alone are read; the Pythons have the tools (each
needs a transformers of its own) and torch. Fetches nothing. What came of a tool replaces what entry_points.json said of it;
`--check` names what differs by more than rounding. A Llama of two layers learns for three steps of two micro-batches, in fp32,
on one rank of a CPU: "full" trains every parameter, "lora" adapters.

A module that a tool imports and this training does not use, torchaudio say, is an empty one where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_suffix(".json")
TOOLS: dict[str, dict[str, Any]] = {
    "llamafactory": {
        "entry point": "llamafactory.train.tuner.run_exp",
        "configs": "examples/deepspeed",
        "imported": ["llamafactory.train.tuner"],
        "runs": [
            *(("full", f"ds_{name}_config.json") for name in ("z0", "z2", "z2_offload", "z3", "z3_offload")),
            ("lora", "ds_z3_config.json"),
        ],
    },
    "axolotl": {
        "entry point": "axolotl.cli.train.do_cli",
        "configs": "deepspeed_configs",
        "imported": [
            "axolotl.cli.train",
            "axolotl.cli.config",
            "axolotl.train",
            "axolotl.common.datasets",
            "axolotl.core.builders",
        ],
        "runs": [
            *(("full", f"{name}.json") for name in ("zero1", "zero2", "zero3")),
            ("lora", "zero3.json"),
        ],
    },
}
NEVER_USED = ("torchaudio", "wandb", "modal", "gradio", "s3fs", "gcsfs", "adlfs", "ocifs")
VERSIONS = ("transformers", "accelerate", "peft", "trl", "torch")
SECONDS = 900
ROUNDING = {"losses": 2e-5, "weights": 2e-6}
"""Of a logged loss, relative (LLaMA-Factory's log has four digits); of a weight of about 0.02 after steps of 1e-3, absolute."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run nothing; whether what was found is within rounding")
    given = parser.parse_args()
    report = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    if not given.check:
        named = [tool for tool in TOOLS if tool.upper() in os.environ]
        if not named:
            parser.error("LLAMAFACTORY and AXOLOTL name no repository")
        for tool in named:
            report[tool] = tried(tool, Path(os.environ[tool.upper()]), os.environ[f"{tool.upper()}_PYTHON"])
            RESULT.write_text(json.dumps(dict(sorted(report.items())), indent=1) + "\n")
    wrong = [f"{tool}: {one}" for tool, said in report.items() for one in said["runs"] if not within_rounding(one)]
    print("\n".join(wrong) or "all within rounding")
    sys.exit(bool(wrong))


def within_rounding(run: dict[str, Any]) -> bool:
    return all(run[what] <= limit for what, limit in ROUNDING.items())


def tried(tool: str, repository: Path, python: str) -> dict[str, Any]:
    """Every run of a tool; the largest differences from the same training without DeepSpeed."""
    asked = [(tuning, repository / TOOLS[tool]["configs"] / config) for tuning, config in TOOLS[tool]["runs"]]
    with tempfile.TemporaryDirectory() as scratch:
        tunings = sorted({tuning for tuning, _ in asked})
        without = _runs(python, tool, Path(scratch) / "without", [(tuning, None) for tuning in tunings])
        plain, runs = dict(zip(tunings, without, strict=True)), []
        for (tuning, config), said in zip(asked, _runs(python, tool, Path(scratch) / "drop-in", asked), strict=True):
            assert said["engine"] and not plain[tuning]["engine"], said
            runs.append({"config": config.name, "tuning": tuning, "steps": len(said["losses"])} | _apart(plain[tuning], said))
            print(tool, runs[-1], flush=True)
    return {"entry point": TOOLS[tool]["entry point"], "versions": said["versions"], "runs": runs}


def _apart(plain: dict[str, Any], said: dict[str, Any]) -> dict[str, float]:
    import torch

    theirs, ours = (torch.load(one["weights"]) for one in (plain, said))
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    return {
        "losses": max(abs(one - other) / abs(one) for one, other in zip(plain["losses"], said["losses"], strict=True)),
        "weights": max((theirs[name].float() - ours[name].float()).abs().max().item() for name in theirs),
    }


def _runs(python: str, tool: str, folder: Path, runs: Sequence[tuple[str, Path | None]]) -> list[dict[str, Any]]:
    """By one process of the tool's Python, which imports the tool and is forked for each run: (tuning, config)."""
    folder.mkdir()
    asked = {
        "tool": tool,
        "folder": str(folder),
        "runs": [[tuning, str(config) if config else None] for tuning, config in runs],
    }
    start = [python, *(("-m", "offload.deepspeed") if runs[0][1] else ()), __file__]
    variables = os.environ | {
        "PYTHONPATH": str(ROOT), "OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"), "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled",
        "CHILD_OF_ENTRY_POINTS": json.dumps(asked),
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        code = subprocess.run(start, env=variables, cwd=folder, stdout=log, stderr=log, timeout=SECONDS, check=False).returncode
    if code:
        raise SystemExit(f"{tool} ended with {code}:\n{(folder / 'log').read_text()[-4000:]}")
    return [json.loads((folder / str(index) / "answer.json").read_text()) for index in range(len(runs))]


# ---- in the tool's own Python ---------------------------------------------------------------------------------------


def _train_all(asked: dict[str, Any]) -> None:
    for name in NEVER_USED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    for module in TOOLS[asked["tool"]]["imported"]:
        importlib.import_module(module)
    for index, (tuning, config) in enumerate(asked["runs"]):
        pid = os.fork()
        if not pid:
            _train(asked["tool"], Path(asked["folder"]) / str(index), tuning, config)
            sys.exit()
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"it was {tuning} with {config}")


def _train(tool: str, folder: Path, tuning: str, config: str | None) -> None:
    folder.mkdir()
    _make_model(folder / "model")
    _make_data(folder / "data")
    {"llamafactory": _llamafactory, "axolotl": _axolotl}[tool](folder, tuning, config)
    (folder / "answer.json").write_text(json.dumps(_answer(tool, folder)))


def _make_model(path: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {one: index for index, one in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=len(words), num_key_value_heads=2, max_position_embeddings=256, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(path)


def _make_data(path: Path) -> None:
    path.mkdir()
    draw = random.Random(1)
    rows = [
        {"instruction": f"add {a} and {b}", "input": "", "output": str(a + b)}
        for a, b in ((draw.randrange(100), draw.randrange(100)) for _ in range(12))
    ]
    (path / "sums.json").write_text(json.dumps(rows))
    (path / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))


_SHARED = {
    "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 3, "logging_steps": 1, "seed": 7, "bf16": False,
    "fp16": False, "max_grad_norm": 1.0, "warmup_steps": 1, "weight_decay": 0.1,
}  # fmt: skip


def _llamafactory(folder: Path, tuning: str, config: str | None) -> None:
    from llamafactory.train.tuner import run_exp

    given = _SHARED | {
        "stage": "sft", "do_train": True, "use_cpu": True,
        "model_name_or_path": str(folder / "model"), "finetuning_type": tuning,
        "dataset": "sums", "dataset_dir": str(folder / "data"), "template": "alpaca", "cutoff_len": 128,
        "output_dir": str(folder / "output"), "per_device_train_batch_size": 2, "lr_scheduler_type": "cosine",
        "report_to": "none", "save_strategy": "no", "preprocessing_num_workers": 1, "gradient_checkpointing": False,
    }  # fmt: skip
    given |= {"lora_target": "all", "lora_dropout": 0.0} if tuning == "lora" else {}
    run_exp(given | ({"deepspeed": config} if config else {}))


def _axolotl(folder: Path, tuning: str, config: str | None) -> None:
    import yaml
    from axolotl.cli.train import do_cli

    data = {"path": str(folder / "data" / "sums.json"), "ds_type": "json", "type": "alpaca"}
    given = _SHARED | {
        "base_model": str(folder / "model"), "datasets": [data],
        "sequence_len": 256, "micro_batch_size": 2, "optimizer": "adamw_torch", "lr_scheduler": "cosine", "val_set_size": 0,
        "output_dir": str(folder / "output"), "dataset_prepared_path": str(folder / "prepared"), "tf32": False, "use_cpu": True,
        "sample_packing": False, "gradient_checkpointing": False, "flash_attention": False, "dataset_processes": 1,
    }  # fmt: skip
    if tuning == "lora":  # its kernels are for GPUs
        given |= {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
        given |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(given | ({"deepspeed": config} if config else {})))
    do_cli(config=str(path))


def _answer(tool: str, folder: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    output = folder / "output"
    (weights,) = (one for name in ("model", "adapter_model") for one in output.glob(f"{name}.safetensors"))
    torch.save(load_file(weights), folder / "weights.pt")
    states = [output / "trainer_state.json", *output.glob("checkpoint-*/trainer_state.json")]
    log = next(json.loads(one.read_text())["log_history"] for one in states if one.is_file())
    engine = sys.modules.get("offload.deepspeed.engine")
    versions = {name: importlib.metadata.version(name) for name in (tool, *VERSIONS)}
    return {
        "losses": [one["loss"] for one in log if "loss" in one], "weights": str(folder / "weights.pt"),
        "engine": engine is not None, "versions": versions,
    }  # fmt: skip


if __name__ == "__main__":
    if "CHILD_OF_ENTRY_POINTS" in os.environ:
        _train_all(json.loads(os.environ["CHILD_OF_ENTRY_POINTS"]))
    else:
        main()
