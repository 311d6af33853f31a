# SPDX-License-Identifier: Apache-2.0
"""The model that the flags name: a local Hugging Face checkpoint, a config.json, or a shape."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import offload
from offload.cli.arguments import SHAPE_FLAGS
from offload.errors import ConfigError, OffloadError

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_SPARE_POSITIONS = 2
"""Rows of a table of positions beyond those that its model counts, as OPT's has them."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.safetensors")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """`config`: a `transformers.PretrainedConfig`. `weights`: where its values are; None: initialised from the seed."""

    config: Any
    weights: Path | None
    title: str


def require_transformers() -> ModuleType:
    """The transformers package. Raises `ConfigError` where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"models come from the transformers package, which cannot be imported ({error}): pip install 'offload[hf]'."
        ) from error
    transformers.logging.set_verbosity_error()
    _quiet_what_is_for_developers()
    module: ModuleType = transformers
    return module


def _quiet_what_is_for_developers() -> None:
    """What these libraries say to those who write against them. A run says nothing of it that its user could change.

    Who asks for warnings (python -W) gets them. Of bitsandbytes that is what kernels it could have for weights in four bits."""
    for library in ("transformers", "peft", "accelerate"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}\.", append=True)
    logger = logging.getLogger("bitsandbytes")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)


def choose_model(args: argparse.Namespace, vocabulary_size: int, sequence: int) -> ModelChoice:
    """What --model or the shape flags ask for, read but not built. Raises `ConfigError`.

    A new model gets `vocabulary_size` tokens; one that exists must have at least so many.
    """
    if args.model is None:
        return _shaped(args, vocabulary_size, sequence)
    given = [f"--{name.replace('_', '-')}" for name in SHAPE_FLAGS if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"--model and {given[0]} contradict each other: a model that exists has its shape.")
    choice = _existing(args.model)
    has = int(getattr(choice.config.get_text_config(), "vocab_size", vocabulary_size))
    if has < vocabulary_size:
        raise ConfigError(
            f"the data has {vocabulary_size} different tokens and {choice.title} a vocabulary of {has}: name the "
            "model's own tokenizer with --tokenizer (without it, text is cut into 256 bytes and one mark between "
            "documents)."
        )
    return choice


def build_model(choice: ModelChoice, seed: int, lora_rank: int | None = None) -> nn.Module:
    """The model on the meta device, its initialisers remembered: `initialize` brings its values into the tiers.

    `lora_rank`: its own parameters are frozen, and adapters of this rank on all linear layers but the head are trained."""
    torch.manual_seed(seed)
    with offload.deferred_init():
        return _construct(choice, lora_rank)


def build_outline(choice: ModelChoice, lora_rank: int | None = None) -> nn.Module:
    """The model on the meta device, without values: shapes are all there is. `lora_rank`: as of `build_model`."""
    with torch.device("meta"):
        return _construct(choice, lora_rank)


def _construct(choice: ModelChoice, lora_rank: int | None) -> nn.Module:
    transformers = require_transformers()
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(choice.config)
    except OffloadError:
        raise
    except Exception as error:  # whatever a hand-made config makes of the model's own code
        raise ConfigError(
            f"{choice.title} cannot be built as a causal language model: {first_line(error).rstrip('.')}."
        ) from error
    return model if lora_rank is None else _with_adapters(model, lora_rank)


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(f"--lora needs the peft package ({error}): pip install 'offload[hf]'.") from error
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, adapters)
    return adapted


def check_sequence(model: nn.Module, choice: ModelChoice, sequence: int) -> None:
    """Raise `ConfigError` where the model learns positions, and fewer than `sequence`: on the meta device none is missed."""
    limit = getattr(choice.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or sequence <= limit:
        return
    for name, module in model.named_modules():
        own_name = name.rpartition(".")[2]
        is_of_positions = own_name == "wpe" or "position" in own_name
        if isinstance(module, nn.Embedding) and is_of_positions and limit <= module.num_embeddings <= limit + _SPARE_POSITIONS:
            raise ConfigError(f"--sequence {sequence}: {choice.title} has learned {limit} positions. Give at most so many.")


def enable_checkpointing(model: nn.Module, **keywords: Any) -> None:
    """Of the model's activations, by its own method. Raises `ConfigError` where it has none. `keywords`: of that method."""
    enable: Callable[..., Any] = model.gradient_checkpointing_enable  # type: ignore[assignment]
    try:
        enable(**keywords)
    except ValueError as error:
        raise ConfigError(f"activations of this model cannot be checkpointed: {first_line(error)}") from error


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, without weight decay for those of one dimension. Raises `ConfigError`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    try:
        return torch.optim.AdamW(filled, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps, foreach=False)
    except ValueError as error:
        raise ConfigError(f"the optimizer refuses its flags: {error}.") from error


def _existing(path: Path) -> ModelChoice:
    transformers = require_transformers()
    if not path.exists():
        raise ConfigError(
            f"--model {str(path)!r} does not exist: name a folder with a config.json, or that file (nothing is downloaded)."
        )
    source = path / "config.json" if path.is_dir() else path
    if not source.is_file():
        raise ConfigError(f"--model {str(path)!r} holds no config.json: name a folder that save_pretrained wrote.")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # each version of transformers refuses what it finds by exceptions of other kinds
        raise ConfigError(f"{str(source)!r} cannot be read as a model's configuration: {first_line(error)}") from error
    config.use_cache = False
    name = path.name or str(path)
    title = name if config.model_type in name else f"{config.model_type} of {name}"
    return ModelChoice(config, _weights_in(path), title)


def _weights_in(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    if any((path / name).exists() for name in WEIGHT_FILES):
        return path
    for pattern in _OTHER_WEIGHTS:
        other = next(path.glob(pattern), None)
        if other is not None and not other.name.startswith("training_args"):
            raise ConfigError(
                f"{str(path)!r} holds weights as {other.name}, and what can be streamed is {' or '.join(WEIGHT_FILES)}: "
                "convert them (save_pretrained of a model loaded from there), or name the config.json for a new model."
            )
    return None


def _shaped(args: argparse.Namespace, vocabulary_size: int, sequence: int) -> ModelChoice:
    transformers = require_transformers()
    hidden, layers = args.hidden or 512, args.layers or 8
    heads = args.heads or max(1, hidden // 64)
    kv_heads = args.kv_heads or heads
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(f"--hidden {hidden} does not divide into --heads {heads} of even width.")
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}.")
    if args.vocabulary is not None and args.vocabulary < vocabulary_size:
        raise ConfigError(f"--vocabulary {args.vocabulary} is too small: the data has {vocabulary_size} different tokens.")
    config = transformers.LlamaConfig(
        vocab_size=args.vocabulary or vocabulary_size,
        hidden_size=hidden,
        intermediate_size=args.intermediate or -(-8 * hidden // (3 * 256)) * 256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(2048, sequence),
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return ModelChoice(config, None, f"new Llama, {layers} blocks of width {hidden}")


def first_line(error: BaseException) -> str:
    """Of its message, with the second where that only leads to it."""
    lines = [*map(str.strip, str(error).strip().splitlines()), ""]
    if not lines[0]:
        return type(error).__name__
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") else lines[0]
