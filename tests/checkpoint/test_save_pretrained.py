# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` of a Hugging Face model that an engine has: what it writes in memory, unit by unit."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, MixtralConfig

import offload
from tests.reads import before_each_unit

from ..acceptance.models import ON_CPU, ON_NVME, adamw, byte_batches, gpt2, llama
from ..acceptance.runs import assert_same_bits, refused


def trained(opened: Any, model: Any, setup: Any) -> Any:
    engine = opened(model, adamw(model), setup)
    tokens = byte_batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    engine.step()
    return engine


@pytest.mark.parametrize("build", [llama, gpt2])
def test_it_writes_what_it_writes_in_memory(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]
) -> None:
    model = build()
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_NVME)
    plain.load_state_dict(engine.state_dict())
    read: list[int] = []
    before_each_unit(monkeypatch, lambda unit: read.append(1))
    model.save_pretrained(str(tmp_path / "ours"), is_main_process=True, save_function=torch.save)
    assert len(read) > 2
    plain.save_pretrained(tmp_path / "theirs")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert_same_bits(*(load_file(tmp_path / whose / "model.safetensors") for whose in ("ours", "theirs")))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_of_an_earlier_save_there_no_weights_stay(opened: Any, tmp_path: Path) -> None:
    """A file with all weights would be loaded before shards."""
    llama().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / ".offload-export").mkdir()  # of a process that was killed
    model = llama()
    engine = trained(opened, model, ON_CPU)
    for size in ("20KB", "5GB", "40KB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert (tmp_path / "model.safetensors").exists() == (size == "5GB")
        assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()), engine.state_dict())
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / ".offload-export").exists()


def test_what_an_export_cannot_do_is_the_models_own(opened: Any, tmp_path: Path) -> None:
    model = llama()
    engine = trained(opened, model, ON_CPU)
    with refused(offload.ParameterAccessError, "save_pretrained()", "engine.export(dir)", "gathered"):
        model.save_pretrained(tmp_path, variant="x")
    state = engine.state_dict()
    model.save_pretrained(tmp_path / "given", state_dict=dict(state))
    with engine.gathered(model.parameters()):
        model.save_pretrained(tmp_path / "gathered")
    for name in ("given", "gathered"):
        assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()), state)


def test_an_export_beside_the_files_of_others(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it ends before it is whole, what was there is as it was."""
    model, folder = llama(), tmp_path / "out"
    before = dict(model.state_dict())
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    engine = trained(opened, model, ON_CPU)
    with refused(offload.CheckpointError, "exists and holds"):
        engine.export(folder)

    def fails(unit: Any) -> None:
        raise OSError("the drive is gone")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="the drive is gone"):
        before_each_unit(patched, fails)
        engine.export(folder, exist_ok=True)
    assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), before)
    engine.export(folder, exist_ok=True)
    assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()), engine.state_dict())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} == set(os.listdir(folder))


def test_weights_of_others_stay_beside_an_export(opened: Any, tmp_path: Path) -> None:
    """An average, or a variant: nobody loads them in the place of what was exported."""
    model, folder = llama(), tmp_path / "out"
    model.save_pretrained(folder, max_shard_size="20KB")
    others = ["model_ema.safetensors", "model.fp16.safetensors", "model-best.safetensors", "model.safetensors.bak"]
    for name in others:
        (folder / name).write_text(name)
    engine = trained(opened, model, ON_CPU)
    engine.export(folder, exist_ok=True)
    model.save_pretrained(folder)
    assert {*others, "config.json", "generation_config.json", "model.safetensors"} == set(os.listdir(folder))
    assert all((folder / name).read_text() == name for name in others)


CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "of_the_users_own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.post_init()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

OwnConfig.register_for_auto_class()
OwnModel.register_for_auto_class("AutoModel")
"""


@pytest.mark.parametrize("merged", [False, True])
def test_a_model_of_the_users_own_class_is_saved_with_its_code(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    """Without it, nothing loads the weights."""
    (tmp_path / "code_of_the_user.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "code_of_the_user", raising=False)
    code = importlib.import_module("code_of_the_user")
    own = model = code.OwnModel(code.OwnConfig())
    if merged:
        model = get_peft_model(own, LoraConfig(target_modules=["layers.1"]))
    engine = opened(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]), ON_NVME)
    if merged:
        engine.export(tmp_path / "ours", merged=True)
    else:
        model.save_pretrained(tmp_path / "ours")
    again = code.OwnModel(code.OwnConfig())
    again.save_pretrained(tmp_path / "theirs")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    loaded = AutoModel.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    with torch.no_grad():
        assert_same_bits(loaded(torch.ones(1, 8)), model(torch.ones(1, 8)))


def test_names_are_those_of_the_hub_and_those_in_memory_where_they_are_asked_for(opened: Any, tmp_path: Path) -> None:
    """transformers loads both. Before 5 it knows no others."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    plain = copy.deepcopy(model)
    engine = opened(model, adamw(model), ON_NVME)
    model.save_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "asked", save_original_format=False)
    assert sorted(load_file(tmp_path / "asked" / "model.safetensors")) == sorted(engine.state_dict())
    with engine.gathered(model.parameters()):
        model.save_pretrained(tmp_path / "lent")
    plain.save_pretrained(tmp_path / "theirs")
    for whose in ("ours", "lent"):
        assert_same_bits(*(load_file(tmp_path / one / "model.safetensors") for one in (whose, "theirs")))
    for whose in ("ours", "asked", "lent"):
        assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path / whose).state_dict()), engine.state_dict())
