# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every architecture that the zoo lists, what they are trained on, and three steps of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import offload
from offload.integrations.transformers import OffloadTrainer

STEPS = 3
_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_ENCODER = {**_TEXT, "max_position_embeddings": 64}


def _tokens(step: int, **more: torch.Tensor) -> dict[str, Any]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids, **more}


def _noise(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _images(step: int) -> dict[str, Any]:
    return {"pixel_values": _noise(step, 2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def _pairs(step: int) -> dict[str, Any]:
    return {"input_ids": _tokens(step)["input_ids"], "pixel_values": _noise(step, 2, 3, 16, 16), "return_loss": True}


def _sound(step: int) -> dict[str, Any]:
    return {"input_features": _noise(step, 2, 16, 24), "labels": _tokens(step)["labels"]}


def _picture_and_text(step: int) -> dict[str, Any]:
    ids = _tokens(step)["input_ids"]
    ids[:, 1:5] = 2  # the places of four patches
    return {"input_ids": ids, "labels": ids, "pixel_values": _noise(step, 2, 3, 16, 16)}


def _latents(step: int) -> dict[str, Any]:
    return {"hidden_states": _noise(step, 2, 4, 8, 8), "timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([0, 3])}


def _causal(config: Any) -> Any:
    return hf.AutoModelForCausalLM.from_config(config)


def _llava() -> Any:
    vision = hf.CLIPVisionConfig(**_VISION)
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**_GROUPED),
        vision_config=vision,
        image_token_id=2,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config)


def _clip() -> Any:
    text = {**_ENCODER, "eos_token_id": 1, "projection_dim": 16}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config={**_VISION, "projection_dim": 16}, projection_dim=16))


def _whisper() -> Any:
    sizes = {f"{part}_{what}": count for part in ("encoder", "decoder") for what, count in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1, "pad_token_id": 0}
    config = hf.WhisperConfig(
        vocab_size=64, d_model=32, num_mel_bins=16, max_source_positions=12, max_target_positions=32, **sizes, **heads
    )
    return hf.WhisperForConditionalGeneration(config)


def _bart() -> Any:
    sizes = {f"{part}_{what}": count for part in ("encoder", "decoder") for what, count in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=64, **sizes, **heads)
    )


def _deepseek() -> Any:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
    return _causal(hf.DeepseekV3Config(**{**_GROUPED, "num_key_value_heads": 4}, **latent, **experts, first_k_dense_replace=1))


def _gpt_oss() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return _causal(
        hf.GptOssConfig(**_GROUPED, **experts, layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    )


def _mamba2() -> Any:
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}
    return _causal(hf.Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=2, **sizes))


def _dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "Llama": (lambda: _causal(hf.LlamaConfig(**_GROUPED)), _tokens),
    "Qwen2": (lambda: _causal(hf.Qwen2Config(**_GROUPED)), _tokens),
    "Qwen3": (lambda: _causal(hf.Qwen3Config(**_GROUPED, head_dim=8)), _tokens),
    "Qwen3-MoE": (lambda: _causal(hf.Qwen3MoeConfig(**_GROUPED, **_EXPERTS, head_dim=8)), _tokens),
    "Mistral": (lambda: _causal(hf.MistralConfig(**_GROUPED)), _tokens),
    "Mixtral": (lambda: _causal(hf.MixtralConfig(**_GROUPED, num_local_experts=4)), _tokens),
    "DeepSeek-V3": (_deepseek, _tokens),
    "GPT-OSS": (_gpt_oss, _tokens),
    "Gemma 2": (lambda: _causal(hf.Gemma2Config(**_GROUPED, head_dim=8)), _tokens),
    "Gemma 3": (lambda: _causal(hf.Gemma3TextConfig(**_GROUPED, head_dim=8)), _tokens),
    "GPT-2": (lambda: _causal(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)), _tokens),
    "GPT-NeoX": (lambda: _causal(hf.GPTNeoXConfig(**_ENCODER)), _tokens),
    "Phi": (lambda: _causal(hf.PhiConfig(**_GROUPED)), _tokens),
    "OPT": (
        lambda: _causal(
            hf.OPTConfig(
                vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
            )
        ),
        _tokens,
    ),
    "BLOOM": (lambda: _causal(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)), _tokens),
    "Falcon": (
        lambda: _causal(hf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)),
        _tokens,
    ),
    "Mamba": (lambda: _causal(hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)), _tokens),
    "Mamba 2": (_mamba2, _tokens),
    "T5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        _tokens,
    ),
    "BART": (_bart, _tokens),
    "BERT": (lambda: hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)), _tokens),
    "RoBERTa": (lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**_ENCODER, pad_token_id=0)), _tokens),
    "ViT": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**_VISION)), _images),
    "CLIP": (_clip, _pairs),
    "Whisper": (_whisper, _sound),
    "LLaVA": (_llava, _picture_and_text),
    "DiT": (_dit, _latents),
}


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if getattr(output, "loss", None) is not None else output.sample.square().mean()


def _model(name: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def in_a_loop(name: str, place: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after three clipped steps with everything in one place."""
    model, optimizer = _model(name)
    config = {"parameters": place, "optimizer_states": place, "max_grad_norm": 1.0, "nvme": str(folder)}
    torch.manual_seed(1)  # of dropout
    losses = []
    with offload.initialize(model, optimizer, config) as engine:
        for step in range(STEPS):
            loss = loss_of(model(**MODELS[name][1](step)))
            loss.backward()
            engine.step()
            engine.zero_grad()
            losses.append(loss.item())
        return losses, engine.state_dict()


class _Trainer(OffloadTrainer):
    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        return loss_of(model(**inputs))


def by_trainer(name: str, place: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by Hugging Face's Trainer."""
    model, optimizer = _model(name)
    args = hf.TrainingArguments(
        str(folder / place), max_steps=STEPS, per_device_train_batch_size=1, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False, seed=1,
    )  # fmt: skip
    trainer = _Trainer(
        model=model,
        args=args,
        train_dataset=[{"step": step} for step in range(STEPS)],
        data_collator=lambda items: MODELS[name][1](items[0]["step"]),
        optimizers=(optimizer, None),
        offload={"parameters": place, "optimizer_states": place, "nvme": str(folder)},
    )
    trainer.train()
    with trainer.engine:
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return losses, trainer.engine.state_dict()


FRAMEWORKS = {"loop": in_a_loop, "Trainer": by_trainer}
