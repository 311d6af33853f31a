# SPDX-License-Identifier: Apache-2.0
"""Exports of PEFT models: adapters that PEFT loads, and merged models that Hugging Face loads, to the bit."""

from __future__ import annotations

import copy
import json
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import offload
from offload.cli.main import main
from tests.reads import before_each_unit

from ..acceptance.models import IN_MEMORY, ON_CPU, ON_NVME, gpt2, llama
from ..acceptance.runs import assert_close, assert_same_bits, refused

LLAMA = ["q_proj", "v_proj", "down_proj"]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (llama, {"target_modules": LLAMA}),
    "dora": (llama, {"target_modules": LLAMA, "use_dora": True}),
    "rslora with bias": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only", "use_rslora": True}),
    "modules to save": (llama, {"target_modules": LLAMA, "modules_to_save": ["lm_head"]}),
    "embeddings": (llama, {"target_modules": [*LLAMA, "embed_tokens"]}),
    "tied embeddings": (gpt2, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    "tokens": (llama, {"target_modules": LLAMA, "trainable_token_indices": {"embed_tokens": [3, 5]}}),
}
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore:Model has `tie_word")]


def peft_model(case: str = "lora", adapters: tuple[str, ...] = ("default",)) -> Any:
    build, options = CASES[case]
    base = build()
    base.name_or_path = ""
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options), adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"]))
    return model


def trained(opened: Any, model: Any, setup: Any, **fields: Any) -> Any:
    """An engine after two steps: at first the second matrix of every adapter is zero."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    engine = opened(model, optimizer, setup, **fields)
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        engine.step()
        engine.zero_grad()
    return engine


def in_memory(engine: Any, model: Any, dtype: torch.dtype | None) -> Any:
    """The trained model as plain PyTorch has it."""
    dtypes = {name: dtype or p.dtype for name, p in engine.module.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.data = parameter.data.to(dtypes[name])
    model.load_state_dict({name: value.to(dtypes.get(name, value.dtype)) for name, value in engine.state_dict().items()})
    return model


@pytest.mark.parametrize("case", CASES)
def test_adapter_and_merged_model(opened: Any, tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    model = peft_model(case)
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_NVME if case in ("lora", "tied embeddings") else ON_CPU)
    in_memory(engine, plain, None)

    engine.export(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("ours", "theirs"))
    assert_same_bits(ours, theirs)
    config, expected = (json.loads((tmp_path / whose / "adapter_config.json").read_text()) for whose in ("ours", "theirs"))
    assert {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()} == {
        key: sorted(value) if isinstance(value, list) else value for key, value in expected.items()
    }
    assert sorted(os.listdir(tmp_path / "ours")) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(CASES[case][0](), tmp_path / "ours")
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        assert_same_bits(loaded(input_ids=tokens).logits, plain(input_ids=tokens).logits)

    engine.export(tmp_path / "merged", merged=True)
    whole = plain.merge_and_unload()
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and type(again) is type(whole)
    assert_same_bits(dict(again.state_dict()), dict(whole.state_dict()))
    with torch.no_grad():
        assert_same_bits(again(input_ids=tokens).logits, whole(input_ids=tokens).logits)


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda setup: setup.name)
def test_16_bit(opened: Any, tmp_path: Path, setup: Any, dtype: Any) -> None:
    """What it runs in is merged as PEFT does it in bf16; in fp32 the masters are."""
    model = peft_model()
    plain = copy.deepcopy(model)
    engine = trained(opened, model, setup, dtype="bf16")
    in_memory(engine, plain, torch.float32 if dtype else None)
    engine.export(tmp_path / "adapter", dtype)
    engine.export(tmp_path / "merged", dtype, merged=True, max_shard_size="20KB")
    plain.save_pretrained(tmp_path / "theirs")
    name = "adapter_model.safetensors"
    assert_same_bits(load_file(tmp_path / "adapter" / name), load_file(tmp_path / "theirs" / name))
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert len(files) > 3
    assert_same_bits(found, dict(plain.merge_and_unload().state_dict()))


def test_several_adapters(opened: Any, tmp_path: Path) -> None:
    model = peft_model(adapters=("default", "other"))
    model.base_model.set_adapter(["default", "other"])
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_CPU)
    in_memory(engine, plain, None)
    engine.export(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "theirs")
    assert sorted(os.listdir(tmp_path / "ours")) == ["adapter_config.json", "adapter_model.safetensors", "other"]
    for folder in ("", "other"):
        ours, theirs = (load_file(tmp_path / whose / folder / "adapter_model.safetensors") for whose in ("ours", "theirs"))
        assert_same_bits(ours, theirs)
        PeftModel.from_pretrained(llama(), tmp_path / "ours" / folder)
    engine.export(tmp_path / "merged", merged=True)
    assert_same_bits(load_file(tmp_path / "merged" / "model.safetensors"), dict(plain.merge_and_unload().state_dict()))


def test_embeddings_that_are_no_longer_tied_are_not_tied_again(opened: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = gpt2()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte"]))
    engine = trained(opened, model, ON_CPU)
    with pytest.warns(RuntimeWarning, match="tie_word_embeddings=False"):
        engine.export(tmp_path / "merged", merged=True)
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_adapters_that_hugging_face_put_in(opened: Any, tmp_path: Path) -> None:
    model = llama()
    model.add_adapter(LoraConfig(r=2, target_modules=LLAMA))
    engine = trained(opened, model, ON_CPU)
    engine.export(tmp_path / "ours")
    engine.export(tmp_path / "merged", merged=True)
    tokens = torch.arange(16).reshape(1, 16)
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "ours")
    with torch.no_grad():
        assert_same_bits(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert_same_bits(load_file(tmp_path / "merged" / "model.safetensors"), dict(loaded.merge_and_unload().state_dict()))


def test_merging_takes_one_layer_at_a_time(opened: Any, tmp_path: Path) -> None:
    """What torch allocates under way, and has not freed, is never a quarter of the model."""
    model = get_peft_model(llama(layers=16), LoraConfig(r=4, target_modules=[*LLAMA, "embed_tokens"]))
    engine = trained(opened, model, ON_NVME)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine.export(tmp_path / "merged", merged=True)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [
        event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["name"] == "[memory]"
    ]
    largest = max(accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))
    whole = sum(parameter.nbytes for parameter in engine.module.parameters())
    assert 0 < largest < whole / 4


def test_what_is_refused(opened: Any, tmp_path: Path) -> None:
    engine = trained(opened, peft_model(), ON_CPU)
    engine.save_checkpoint(tmp_path / "saved")
    with refused(offload.CheckpointError, "saved", "PEFT", "merged=True"):
        from offload.checkpoint.export.offline import export_checkpoint

        export_checkpoint(tmp_path / "saved", tmp_path / "out", None, 1 << 30)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 2
    plain = nn.Sequential(nn.Linear(2, 2))
    other = opened(plain, torch.optim.AdamW(plain.parameters()), ON_CPU)
    with refused(offload.UsageError, "merged=True", "PEFT"):
        other.export(tmp_path / "out", merged=True)
    prompted = get_peft_model(llama(), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    engine = opened(prompted, torch.optim.AdamW([p for p in prompted.parameters() if p.requires_grad]), ON_CPU)
    with refused(offload.UsageError, "merged=True", "prompts"):
        engine.export(tmp_path / "out", merged=True)
    assert not (tmp_path / "out").exists()


# ---- what a model's own methods do while an engine has it


@pytest.mark.parametrize("case", CASES)
def test_save_pretrained_writes_what_it_writes_in_memory(opened: Any, tmp_path: Path, case: str) -> None:
    model = peft_model(case)
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_NVME)
    model.save_pretrained(tmp_path / "ours")
    in_memory(engine, plain, None).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("ours", "theirs"))
    assert_same_bits(ours, theirs)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    PeftModel.from_pretrained(CASES[case][0](), tmp_path / "ours")


PROMPTS: dict[str, Any] = {
    "prefixes": lambda: PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "projected prefixes": lambda: PrefixTuningConfig(
        num_virtual_tokens=2, task_type="CAUSAL_LM", prefix_projection=True, encoder_hidden_size=8
    ),
    "prompts": lambda: PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "an encoder of prompts": lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    "an LSTM that encodes prompts": lambda: PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM", encoder_reparameterization_type="LSTM"
    ),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_are_computed_and_saved(opened: Any, tmp_path: Path, case: str) -> None:
    model = get_peft_model(llama(), PROMPTS[case]())
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_NVME)
    model.save_pretrained(tmp_path / "ours")
    engine.export(tmp_path / "exported")
    in_memory(engine, plain, None).save_pretrained(tmp_path / "theirs")
    ours, exported, theirs = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("ours", "exported", "theirs"))
    assert_same_bits(ours, theirs)
    assert_same_bits(exported, theirs)
    PeftModel.from_pretrained(llama(), tmp_path / "exported")


def test_adapters_that_the_model_itself_was_given(opened: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = llama()
    model.add_adapter(LoraConfig(r=3, target_modules=LLAMA))
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_NVME)
    model.save_pretrained(tmp_path / "ours")
    in_memory(engine, plain, None).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("ours", "theirs"))
    assert_same_bits(ours, theirs)
    llama().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded.load_adapter(tmp_path / "ours")
    loaded.eval()
    model.eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert_close(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_save_pretrained_takes_what_it_takes_in_memory(opened: Any, tmp_path: Path) -> None:
    model = peft_model(adapters=("default", "other"))
    plain = copy.deepcopy(model)
    engine = trained(opened, model, ON_CPU)
    in_memory(engine, plain, None)
    keywords: dict[str, Any] = {"selected_adapters": ["other"], "save_embedding_layers": True}
    model.save_pretrained(str(tmp_path / "ours"), **keywords)
    plain.save_pretrained(str(tmp_path / "theirs"), **keywords)
    ours, theirs = (load_file(tmp_path / whose / "other" / "adapter_model.safetensors") for whose in ("ours", "theirs"))
    assert_same_bits(ours, theirs)
    assert any("embed_tokens" in name for name in ours) and not (tmp_path / "ours" / "adapter_model.safetensors").exists()
    with engine.gathered(model.parameters()):  # as without an engine, and a copy is a model as it was
        model.save_pretrained(tmp_path / "gathered", **keywords)
        copied = copy.deepcopy(model)
    copied.save_pretrained(tmp_path / "copied", **keywords)
    for name in ("gathered", "copied"):
        assert_same_bits(load_file(tmp_path / name / "other" / "adapter_model.safetensors"), theirs)


def test_merging_in_memory_names_the_export(opened: Any) -> None:
    model = peft_model()
    engine = trained(opened, model, ON_CPU)
    with refused(offload.ParameterAccessError, "merge_and_unload()", "engine.export(dir, merged=True)"):
        model.merge_and_unload()
    engine.close()
    assert "save_pretrained" not in vars(model) and "generate" not in vars(model)


def test_adapters_are_saved_without_reading_what_is_frozen_elsewhere(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of units without adapters nothing is read: here embedding and head."""
    model = peft_model()
    trained(opened, model, ON_NVME)
    read: list[str] = []
    before_each_unit(monkeypatch, lambda unit: read.append(unit.name))
    model.save_pretrained(tmp_path / "adapter")
    assert read == [f"base_model.model.model.layers.{number}" for number in range(len(read))] and read
