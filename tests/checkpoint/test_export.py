# SPDX-License-Identifier: Apache-2.0
"""Exports as Hugging Face reads them, and as plain safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload

from ..acceptance.models import IN_MEMORY, ON_CPU, ON_NVME, Normalized, adamw, gpt2, llama, stack
from ..acceptance.runs import Run, assert_same_bits, one_step, refused

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trained(opened: Any, build: Any, setup: Any = ON_NVME, **fields: Any) -> Any:
    model = build()
    engine = opened(model, adamw(model), setup, **fields)
    tokens = torch.arange(32).reshape(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    engine.step()
    engine.zero_grad()
    return engine


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda setup: setup.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", None])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_from_pretrained(opened: Any, tmp_path: Path, build: Any, dtype: str | None, setup: Any) -> None:
    from transformers import AutoModelForCausalLM

    engine = trained(opened, build, setup, dtype="bf16")
    engine.export(tmp_path / "out", dtype)
    expected = {name: value.to(DTYPES[dtype or "bf16"]) for name, value in engine.state_dict().items()}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded) is type(engine.module)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert_same_bits(dict(loaded.state_dict()), expected)
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        assert loaded(input_ids=tokens).logits.isfinite().all()
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert ("lm_head.weight" in names) == (build is llama)  # tied in GPT-2: written once, as save_pretrained does


@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_same_files_as_save_pretrained(opened: Any, tmp_path: Path, build: Any) -> None:
    model = build()
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    opened(model, adamw(model), ON_CPU).export(tmp_path / "ours", "fp32")
    assert_same_bits(load_file(tmp_path / "ours" / "model.safetensors"), theirs)
    assert set(os.listdir(tmp_path / "ours")) == set(os.listdir(tmp_path / "theirs"))
    for name in ("config.json", "generation_config.json"):
        ours, expected = (json.loads((tmp_path / whose / name).read_text()) for whose in ("ours", "theirs"))
        assert {key: ours.get(key) for key in expected} == expected, name


def test_shards(opened: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = trained(opened, llama)
    engine.export(tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(name for name in os.listdir(tmp_path / "out") if name.endswith(".safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    held = {name: file for file in files for name in load_file(tmp_path / "out" / file)}
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in engine.state_dict().values())
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= 20_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_bits(dict(loaded.state_dict()), engine.state_dict())


def test_it_can_be_trained_on(opened: Any, tmp_path: Path) -> None:
    """Into an engine again, by weights=."""
    engine = trained(opened, gpt2)
    engine.export(tmp_path / "out")
    expected = engine.state_dict()
    config = offload.Config(parameters="cpu", optimizer_states="cpu")
    model = gpt2()
    with offload.initialize(model, adamw(model), config, weights=tmp_path / "out") as again:
        assert_same_bits(again.state_dict(), expected)


def test_plain_modules_with_buffers_and_other_orders(opened: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Normalized()
    model.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.counts = nn.Parameter(torch.arange(5), requires_grad=False)
    engine = opened(model, adamw(model), ON_NVME)
    one_step(Run(model, engine.optimizer, engine))
    engine.export(tmp_path / "out", "fp32")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    expected = {name: value.contiguous() for name, value in engine.state_dict().items()}
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), expected)
    one_step(Run(model, engine.optimizer, engine))


def test_ties_of_plain_modules(opened: Any, tmp_path: Path) -> None:
    model = stack(blocks=1)
    model.outlet.weight = model.inlet.weight
    engine = opened(model, adamw(model), ON_CPU)
    engine.export(tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == {name for name, _ in model.named_parameters()}


def test_what_is_refused(opened: Any, tmp_path: Path) -> None:
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    with refused(offload.UsageError, "int4", "bf16"):
        engine.export(tmp_path / "out", "int4")
    with refused(offload.ConfigError, "max_shard_size", "'big'"):
        engine.export(tmp_path / "out", max_shard_size="big")
    engine.export(tmp_path / "out")
    with refused(offload.CheckpointError, "exists", "out"):
        engine.export(tmp_path / "out")
    engine.save_checkpoint(tmp_path / "saved")
    with refused(offload.CheckpointError, "saved"):
        engine.export(tmp_path / "saved")
    with refused(offload.CheckpointError, "out"):
        engine.save_checkpoint(tmp_path / "out")


def test_gradients_at_hand_do_not_matter(opened: Any, tmp_path: Path) -> None:
    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    model(torch.ones(2, 16)).sum().backward()
    engine.export(tmp_path / "out")
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), expected)
    engine.step()
