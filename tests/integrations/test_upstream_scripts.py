# SPDX-License-Identifier: Apache-2.0
"""The frameworks' own example scripts with one import changed, on local data: what they give without it, within rounding.

TRL's are in its package. Those of transformers are not: TRANSFORMERS_EXAMPLES names the folder `examples/pytorch` of a checkout
of theirs (`make test-scripts`). Nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from ..acceptance.models import source_text
from ..acceptance.runs import assert_close
from . import preferences
from .conftest import Distances

ACCURACY = """
import datasets
import evaluate
class Accuracy(evaluate.Metric):
    def _info(self):
        integers = {name: datasets.Value("int32") for name in ("predictions", "references")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(integers))
    def _compute(self, predictions, references):
        return {"accuracy": sum(one == other for one, other in zip(predictions, references)) / len(references)}
"""
"""The metric that run_clm names, where `evaluate` looks before it asks the hub."""
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = os.environ.get("TRANSFORMERS_EXAMPLES", "")
SCRIPTS = {
    "sft": ("from trl import SFTTrainer, ", "from offloaded import SFTTrainer\n    from trl import "),
    "dpo": ("from trl import DPOTrainer, ", "from offloaded import DPOTrainer\n    from trl import "),
    "run_clm": ("    Trainer,\n", ""),
}
"""What is changed in each; run_clm's import of a list loses the name, and gets it before."""
SOURCES = {"sft": "TRL's sft script", "dpo": "TRL's dpo script", "run_clm": "transformers' run_clm script"}
OFFLOADED = """
import trl
from offload.integrations.transformers import OffloadMixin, OffloadTrainer
CONFIG = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": "nvme"}
def on_nvme(base):
    def init(self, *args, **keywords):
        base.__init__(self, *args, offload=CONFIG, **keywords)
    return type(base.__name__, (base,), {"__init__": init})
Trainer = on_nvme(OffloadTrainer)
SFTTrainer = on_nvme(type("SFTTrainer", (OffloadMixin, trl.SFTTrainer), {}))
DPOTrainer = on_nvme(type("DPOTrainer", (OffloadMixin, trl.DPOTrainer), {}))
"""
FIELDS = (
    *("--output_dir", "out", "--max_steps", "3", "--save_steps", "3", "--logging_steps", "1", "--seed", "3", "--use_cpu"),
    *("--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--report_to", "none"),
)


def _script(name: str) -> str:
    if name == "run_clm":
        return (Path(EXAMPLES) / "language-modeling" / "run_clm.py").read_text(encoding="utf-8")
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "scripts" / f"{name}.py").read_text(encoding="utf-8")


def _changed(name: str, text: str) -> str:
    before, after = SCRIPTS[name]
    assert text.count(before) == 1, f"{name} imports its trainer in another way now"
    text = text.replace(before, after)
    if name == "run_clm":
        text = text.replace("import transformers\n", "import transformers\nfrom offloaded import Trainer\n", 1)
    return text


def _arguments(name: str, folder: Path) -> list[str]:
    if name == "run_clm":
        (folder / "text.txt").write_bytes(source_text(1 << 13))
        return ["--train_file", str(folder / "text.txt"), "--block_size", "32", "--do_train", "--do_eval"]
    data = folder / "data"
    data.mkdir()
    columns = preferences.PAIRS if name == "dpo" else {"text": preferences.LINES}
    Dataset.from_dict(columns).to_json(data / "train.jsonl")
    return ["--dataset_name", str(data), "--max_length", "32", "--bf16", "False"]


def _run(folder: Path, text: str, arguments: list[str]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses and norms as they were logged, with what an evaluation found, and the weights that were saved."""
    folder.mkdir()
    (folder / "script.py").write_text(text, encoding="utf-8")
    (folder / "offloaded.py").write_text(OFFLOADED)
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(ACCURACY)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": paths, "OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    command = [sys.executable, "script.py", *arguments, *FIELDS]
    done = subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    state = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    [file] = (folder / "out").glob("*model.safetensors")
    figures = [[line["loss"], line["grad_norm"]] for line in state["log_history"] if "loss" in line]
    if "--do_eval" in arguments:
        found = json.loads((folder / "out" / "eval_results.json").read_text())
        figures.append([found["eval_loss"], found["eval_accuracy"]])
    return figures, load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_without(tmp_path: Path, distances: Distances, name: str, lora: bool) -> None:
    if name == "run_clm" and (lora or not EXAMPLES):
        pytest.skip("TRANSFORMERS_EXAMPLES names no folder" if not lora else "it has no adapters")
    preferences.save_model(tmp_path / "checkpoint")
    arguments = ["--model_name_or_path", str(tmp_path / "checkpoint"), *_arguments(name, tmp_path)]
    if lora:
        arguments += ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    text = _script(name)
    plain = _run(tmp_path / "plain", text, arguments)
    ours = _run(tmp_path / "ours", _changed(name, text), arguments)
    assert len(ours[0]) == 3 + (name == "run_clm") and (tmp_path / "ours" / "out" / "checkpoint-3" / "offload").is_dir()
    assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), 1e-4)
    assert_close(ours[1], plain[1], 1e-4)
    distances.note(f"{SOURCES[name]}{', LoRA' if lora else ''}", ours, plain)
