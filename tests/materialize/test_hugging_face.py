# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models: their `_init_weights` runs as it does in ordinary construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.deferred_init.deferred_init import deferred_init, is_deferred, materialize
from tests.materialize.ordinary import assert_like_ordinary

transformers = pytest.importorskip("transformers")

_WIDTHS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _WIDTHS),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**_WIDTHS, "tie_word_embeddings": True, "pad_token_id": 0}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 1},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_WIDTHS, "num_local_experts": 4}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_WIDTHS, "head_dim": 8}),
}  # fmt: skip


@pytest.mark.parametrize("how", ["class", "auto", "auto_bf16"])
@pytest.mark.parametrize("name", _MODELS)
def test_causal_lm(name: str, how: str) -> None:
    config_class, model_class, options = _MODELS[name]

    def build() -> Any:
        config = getattr(transformers, config_class)(**options)
        if how == "class":
            return getattr(transformers, model_class)(config)
        dtype = torch.bfloat16 if how == "auto_bf16" else torch.float32
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    model = assert_like_ordinary(build, seed=11)
    tied = name in ("gpt2", "llama_tied")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_encoder_with_position_buffers() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
    )
    assert_like_ordinary(lambda: transformers.BertForMaskedLM(config))


def test_pretrained_weights_load_inside_the_block(tmp_path: Any) -> None:
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_WIDTHS))
    saved.save_pretrained(tmp_path)
    with deferred_init():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for (fqn, parameter), expected in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert is_deferred(parameter) and torch.equal(materialize([parameter])[0], expected), fqn
