# SPDX-License-Identifier: Apache-2.0
"""QLoRA: weights that bitsandbytes has packed into four bits lie in the tiers as they are, with what unpacks them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import offload
from offload.deferred_init.deferred_init import is_deferred
from tests.reads import file_bytes

from ..acceptance.conftest import nvme, opened, settled
from ..acceptance.models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE
from ..acceptance.runs import assert_close, assert_same_bits
from .test_pretrained import optimizer_of, quiet, train

bitsandbytes = pytest.importorskip("bitsandbytes")
__all__ = ["nvme", "opened", "quiet", "settled"]
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTHS = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4, packed scales": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "computing in bf16": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "stored as bf16": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in fp32 of a model with biases, and for each of the settings one that is packed already."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(7)
    found = {"": tmp_path_factory.mktemp("fp32")}
    model = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**WIDTHS, num_key_value_heads=2))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(found[""])
    for name in SETTINGS:
        found[name] = tmp_path_factory.mktemp("packed")
        loaded(found, name).save_pretrained(found[name])
    return found


def loaded(folders: dict[str, Path], settings: str, *, packed: bool = False) -> Any:
    if packed:
        return AutoModelForCausalLM.from_pretrained(folders[settings])
    config = BitsAndBytesConfig(load_in_4bit=True, **SETTINGS[settings])
    return AutoModelForCausalLM.from_pretrained(folders[""], quantization_config=config)


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config).train()


def trained_plainly(model: Any) -> list[float]:
    optimizer = optimizer_of(model)

    class Plain:
        step, zero_grad = staticmethod(optimizer.step), staticmethod(optimizer.zero_grad)

    return train(Plain, model)


def bits(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Packed weights may look like NaN where they are stored as another dtype."""
    return {name: value.view(torch.uint8) if name.endswith("weight") else value for name, value in state.items()}


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_place_has_the_same_bits_and_plain_qloras_losses(opened: Any, folders: dict[str, Path], settings: str) -> None:
    plain = trained_plainly(adapted(loaded(folders, settings)))
    runs = []
    for setup in (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE):
        model = adapted(loaded(folders, settings))
        engine = opened(model, optimizer_of(model), setup)
        runs.append([train(engine, model), bits(engine.state_dict())])
        assert_same_bits(runs[-1], runs[0])
    assert_close(runs[0][0], plain)
    assert runs[0][1]["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight.absmax"].numel() == 64 * 64 // 64


@pytest.mark.parametrize("packed", [False, True], ids=["packed while it is read", "packed in its files"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_checkpoint_that_never_was_in_memory(
    opened: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, settings: str, packed: bool
) -> None:
    other = adapted(loaded(folders, settings, packed=packed))
    reference = opened(other, optimizer_of(other), IN_MEMORY)
    read = file_bytes(monkeypatch)
    bitsandbytes.functional.name2qmap.clear()  # as in a new process
    with offload.deferred_init():
        model = adapted(loaded(folders, settings, packed=packed).to("cuda"))
    assert not any(is_deferred(table) for table in bitsandbytes.functional.name2qmap.values())
    assert all(parameter.is_meta for parameter in model.parameters())
    read_before = sum(read)
    assert read_before == 0 or (packed and read_before < 32768)  # what says how they are packed
    engine = opened(model, optimizer_of(model), ON_NVME)
    assert sum(read) - read_before == sum(
        value.nbytes for name, value in tensors_of(folders[settings if packed else ""]).items() if "bitsandbytes__" not in name
    )
    assert_same_bits(bits(engine.state_dict()), bits(reference.state_dict()))
    assert train(engine, model) == train(reference, other)
    assert_same_bits(bits(engine.state_dict()), bits(reference.state_dict()))


@pytest.mark.parametrize("settings", ["nf4, packed scales", "computing in bf16"])
def test_dora_unpacks_them_and_puts_nothing_into_the_layers(opened: Any, folders: dict[str, Path], settings: str) -> None:
    """PEFT exchanges the weight in each forward on a CPU for what its `to` returns."""
    plain = trained_plainly(adapted(loaded(folders, settings), use_dora=True))
    runs = []
    for setup in (IN_MEMORY, ON_NVME, ON_NVME_IN_PLACE):
        with offload.deferred_init() if setup is not IN_MEMORY else contextlib.nullcontext():
            model = adapted(loaded(folders, settings), use_dora=True)
        engine = opened(model, optimizer_of(model), setup)
        before = dict(model.named_parameters())
        runs.append([train(engine, model), bits(engine.state_dict())])
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert_same_bits(runs[-1], runs[0])
    assert_close(runs[0][0], plain)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_going_on_from_a_checkpoint_with_evaluations_between(opened: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """In evaluation bitsandbytes would exchange weights for copies, on CPUs that have instructions for it."""

    def built() -> Any:
        return adapted(loaded(folders, "computing in bf16"))

    whole, first, again = built(), built(), built()
    expected = train(engine := opened(whole, optimizer_of(whole), ON_NVME_IN_PLACE), whole, 4)
    begun = opened(first, optimizer_of(first), ON_NVME_IN_PLACE)
    losses = train(begun, first, 2)
    tokens = torch.arange(24)[None]
    first.eval()
    with torch.no_grad():
        evaluated = first(input_ids=tokens, labels=tokens).loss
    begun.save_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        for parameter in (one for _, one in first.named_parameters() if one.requires_grad):
            with begun.gathered(parameter):
                parameter.add_(1)
    begun.load_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(first(input_ids=tokens, labels=tokens).loss, evaluated)
    resumed = opened(again, optimizer_of(again), ON_NVME)
    resumed.load_checkpoint(tmp_path / "saved")
    assert losses + train(resumed, again, 4, first=2) == expected
    assert_same_bits(resumed.state_dict(), engine.state_dict())
    begun.load_state_dict(resumed.state_dict())
    assert_same_bits(begun.state_dict(), engine.state_dict())


@pytest.mark.parametrize("settings", SETTINGS)
def test_exports_are_numbers(opened: Any, folders: dict[str, Path], tmp_path: Path, settings: str) -> None:
    """The merged model is the unpacked one with PEFT's own merge."""

    def built(model: Any) -> Any:
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(5)
        return get_peft_model(model, config).train()

    model = built(loaded(folders, settings))
    engine = opened(model, optimizer_of(model), ON_NVME)
    train(engine, model)
    engine.export(tmp_path / "merged", merged=True)
    model.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(loaded(folders, settings).dequantize(), tmp_path / "adapter").merge_and_unload()
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = dict(plain.state_dict())
    if settings == "computing in bf16":  # bitsandbytes casts biases where they lie
        expected.update({name: value.bfloat16().to(value.dtype) for name, value in expected.items() if name.endswith("bias")})
    assert_same_bits(dict(merged.state_dict()), expected)
    assert not hasattr(merged.config, "quantization_config")
