# SPDX-License-Identifier: Apache-2.0
"""Pretrained models that never were in memory: `from_pretrained` inside `deferred_init`, and `weights=` under adapters."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import offload
from offload.deferred_init.deferred_init import is_deferred, materialize
from tests.reads import before_each_weight, file_bytes

from ..acceptance.conftest import nvme, opened, settled
from ..acceptance.models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE, byte_batches
from ..acceptance.runs import assert_close, assert_same_bits, refused

__all__ = ["nvme", "opened", "settled"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WIDTHS = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**WIDTHS, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": lambda: transformers.MixtralConfig(**WIDTHS, num_key_value_heads=2, num_local_experts=4),
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model, and one of an adapter of the first."""
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        found[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_config(config())
        model.save_pretrained(found[name], max_shard_size="40KB" if name == "llama" else "5GB")
    found["adapter"] = tmp_path_factory.mktemp("adapter")
    found["pickled"] = tmp_path_factory.mktemp("pickled")
    model = AutoModelForCausalLM.from_pretrained(found["gpt2"])
    model.config.save_pretrained(found["pickled"])
    torch.save(model.state_dict(), found["pickled"] / "pytorch_model.bin")
    adapted(AutoModelForCausalLM.from_pretrained(found["llama"]), init_lora_weights=False).save_pretrained(found["adapter"])
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(before)


def adapted(model: Any, **options: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **{"target_modules": TARGETS, **options}))


def resized(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(260)
    return model


def with_two_adapters(model: Any) -> Any:
    model = adapted(model)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"]))
    model.set_adapter("other")
    return model


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "lora": adapted,
    "dora": lambda model: adapted(model, use_dora=True),
    "modules to save": lambda model: adapted(model, modules_to_save=["lm_head"]),
    "tokens": lambda model: adapted(model, trainable_token_indices={"embed_tokens": [3, 5]}),
    "two adapters": with_two_adapters,
}
LOADING: dict[str, Callable[[dict[str, Path]], Any]] = {
    "sharded": lambda at: AutoModelForCausalLM.from_pretrained(at["llama"]),
    "cast": lambda at: AutoModelForCausalLM.from_pretrained(at["llama"], dtype=torch.bfloat16),
    "tied": lambda at: AutoModelForCausalLM.from_pretrained(at["gpt2"]),
    "pickled": lambda at: AutoModelForCausalLM.from_pretrained(at["pickled"]),
    "experts in files of their own": lambda at: AutoModelForCausalLM.from_pretrained(at["mixtral"]),
    "without a head": lambda at: AutoModel.from_pretrained(at["llama"]),
    "with a new head": lambda at: AutoModelForSequenceClassification.from_pretrained(at["llama"], num_labels=3),
    "resized": lambda at: resized(at["gpt2"]),
    "adapter too": lambda at: PeftModel.from_pretrained(LOADING["sharded"](at), at["adapter"], is_trainable=True),
    "from the adapter": lambda at: AutoPeftModelForCausalLM.from_pretrained(at["adapter"]),
    "pissa": lambda at: adapted(LOADING["sharded"](at), init_lora_weights="pissa"),
}
for adapter in ADAPTERS:
    LOADING[adapter] = lambda at, adapter=adapter: ADAPTERS[adapter](LOADING["sharded"](at))


@pytest.mark.parametrize("case", LOADING)
def test_what_is_loaded_inside_is_what_is_loaded_outside(folders: dict[str, Path], case: str) -> None:
    torch.manual_seed(3)
    eager = LOADING[case](folders)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with offload.deferred_init():
        lazy = LOADING[case](folders)
    assert torch.equal(torch.get_rng_state(), state) and lazy.training == eager.training
    found = dict(lazy.named_parameters(remove_duplicate=False))
    expected = dict(eager.named_parameters(remove_duplicate=False))
    assert all(parameter.is_meta and is_deferred(parameter) for parameter in found.values())
    assert {n: p.requires_grad for n, p in found.items()} == {n: p.requires_grad for n, p in expected.items()}
    assert_same_bits(dict(zip(found, materialize(list(found.values())), strict=True)), expected)
    assert_same_bits(dict(lazy.named_buffers()), dict(eager.named_buffers()))


def train(engine: Any, model: Any, steps: int = 3, first: int = 0) -> list[float]:
    losses = []
    for tokens in byte_batches(steps)[first:]:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        engine.step()
        engine.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)


@pytest.mark.parametrize("how", ["from_pretrained", "weights="])
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_train_as_on_a_model_in_memory(opened: Any, folders: dict[str, Path], nvme: Path, case: str, how: str) -> None:
    def built(deferred: bool) -> Any:
        torch.manual_seed(5)
        if how == "from_pretrained":
            return ADAPTERS[case](AutoModelForCausalLM.from_pretrained(folders["llama"])).train()
        base = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
        if not deferred:
            base.load_state_dict(AutoModelForCausalLM.from_pretrained(folders["llama"]).state_dict())
        return ADAPTERS[case](base)

    plain = built(False)
    other = opened(reference := built(False), optimizer_of(reference), IN_MEMORY)
    with offload.deferred_init():
        model = built(True)
    weights = folders["llama"] if how == "weights=" else None
    engine = offload.initialize(model, optimizer_of(model), ON_NVME_IN_PLACE.fields(nvme), weights=weights)
    with engine:
        assert_same_bits(engine.state_dict(), dict(plain.state_dict()))
        losses = train(engine, model)
        assert losses == train(other, reference)
        assert_same_bits(engine.state_dict(), other.state_dict())
    optimizer = optimizer_of(plain)

    class Plain:
        step, zero_grad = staticmethod(optimizer.step), staticmethod(optimizer.zero_grad)

    assert_close(losses, train(Plain, plain))


def test_what_is_frozen_is_read_once_and_has_no_states(
    opened: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = file_bytes(monkeypatch)
    with offload.deferred_init():
        model = adapted(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    engine = opened(model, optimizer_of(model), ON_NVME)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert sum(read) == sum(parameter.nbytes for parameter in frozen) and max(read) == max(one.nbytes for one in frozen)
    written = engine.stats()["io"].written_nbytes
    train(engine, model, 2)
    engine.state_dict()  # the last update is over; its records may be on their way yet
    flat_numel, flat_count = 4096, 2  # of the adapters of each layer, padded
    expected, patience = 2 * flat_count * flat_numel * 12, 500
    while engine.stats()["io"].written_nbytes - written < expected and (patience := patience - 1):
        time.sleep(0.02)
    assert all(parameter.grad is None for parameter in frozen)
    assert engine.stats()["io"].written_nbytes - written == expected


def test_weights_under_adapters_that_changed_them_are_refused(opened: Any, folders: dict[str, Path], nvme: Path) -> None:
    with offload.deferred_init():
        model = adapted(AutoModelForCausalLM.from_config(CONFIGS["llama"]()), init_lora_weights="pissa")
    with refused(offload.InitializerError, "lora_", "from_pretrained", "deferred_init"):
        offload.initialize(model, optimizer_of(model), ON_CPU.fields(nvme), weights=folders["llama"])


def test_differences_are_told_by_the_base_models_names(folders: dict[str, Path], nvme: Path) -> None:
    with offload.deferred_init():
        config = CONFIGS["llama"]()
        config.num_hidden_layers = 3
        model = adapted(AutoModelForCausalLM.from_config(config))
    with refused(offload.InitializerError, "9 missing", "layers.2.self_attn.q_proj.base_layer.weight"):
        offload.initialize(model, optimizer_of(model), ON_CPU.fields(nvme), weights=folders["llama"])


def test_a_file_that_was_replaced_meanwhile_is_named(opened: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folders["gpt2"]).save_pretrained(tmp_path)
    with offload.deferred_init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(folders["llama"]).save_pretrained(tmp_path)
    with refused(offload.InitializerError, "transformer.", str(tmp_path / "model.safetensors"), "replaced"):
        opened(model, optimizer_of(model), ON_CPU)
    (tmp_path / "model.safetensors").unlink()
    with refused(offload.InitializerError, "transformer.", str(tmp_path / "model.safetensors"), "No such file"):
        opened(model, optimizer_of(model), ON_CPU)


def test_other_threads_load_as_ever(folders: dict[str, Path]) -> None:
    before = dict(os.environ)
    loaded: list[Any] = []
    with offload.deferred_init():
        thread = threading.Thread(target=lambda: loaded.append(AutoModelForCausalLM.from_pretrained(folders["gpt2"])))
        thread.start()
        thread.join()
        with safe_open(folders["gpt2"] / "model.safetensors", "pt") as file:
            tensor = file.get_tensor("transformer.wte.weight")
    assert not any(parameter.is_meta for parameter in loaded[0].parameters())
    assert is_deferred(tensor) and dict(os.environ) == before
    assert_same_bits(materialize([tensor])[0], loaded[0].transformer.wte.weight.detach())


def test_weights_is_asked_for_each_tensor_once(
    opened: Any, folders: dict[str, Path], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    before_each_weight(monkeypatch, lambda name, file: asked.append(name))
    with offload.deferred_init():
        model = adapted(AutoModelForCausalLM.from_config(CONFIGS["llama"]()))
    with offload.initialize(model, optimizer_of(model), ON_NVME.fields(nvme), weights=folders["llama"]):
        assert len(asked) == len(set(asked)) == len(AutoModelForCausalLM.from_config(CONFIGS["llama"]()).state_dict())


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    ],
    ids=["LoRA", "DoRA", "tokens"],
)
def test_a_model_with_an_adapted_embedding_generates(folders: dict[str, Path], opened: Any, fields: dict[str, Any]) -> None:
    """`generate` calls the model inside of PEFT's. What is adapted there lies in dicts of parameters, which nobody calls."""
    generated = []
    for place in (None, ON_CPU, ON_NVME):
        model = AutoModelForCausalLM.from_pretrained(folders["llama"])
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **fields)).eval()
        if place is not None:
            opened(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]), place)
        generated.append(model.generate(input_ids=byte_batches(1)[0][:, :5], max_new_tokens=4, do_sample=False))
    assert all(torch.equal(one, generated[0]) for one in generated)
