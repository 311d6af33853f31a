# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint and an export call things: the model's buffers, and which name of a tied parameter is kept. And what goes
with the weights of a Hugging Face model: its configurations, and the code of a class that is not the library's."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import UsageError
from offload.model.weight_names import persistent_buffers

CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}
"""Attributes of a Hugging Face model that its `save_pretrained` writes, and the files."""


def buffers_once(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every persistent buffer once, under its first name."""
    seen: set[int] = set()
    for fqn, buffer in persistent_buffers(model):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield fqn, buffer


def plain_elements(fqn: str, buffer: torch.Tensor) -> torch.Tensor:
    """What a file has of a buffer: its elements row by row in host memory, none of them only marked as conjugate or negative.
    Raises `UsageError` where they do not lie so in memory at all."""
    if buffer.layout != torch.strided:
        raise UsageError(
            f"{fqn!r} is a buffer of the layout {buffer.layout}, which checkpoints cannot hold: register its values and "
            "indices, or register it with persistent=False."
        )
    return buffer.detach().cpu().resolve_conj().resolve_neg().contiguous()


def kept_fqn(model: nn.Module, fqns: Sequence[str]) -> str:
    """The one name that a file of weights holds a tied parameter under.

    Hugging Face models say in `_tied_weights_keys` which names are made from others when the model is loaded.
    """
    patterns: list[str] = []
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        if isinstance(keys, (list, tuple, dict)):
            start = re.escape(f"{prefix}." if prefix else "")
            patterns += [f"{start}{key}" for key in keys]
    made = [fqn for fqn in fqns if any(re.search(f"^{pattern}$", fqn) for pattern in patterns)]
    return next((fqn for fqn in fqns if fqn not in made), fqns[0])


def model_configs(model: nn.Module, *, as_packed: bool = True) -> dict[str, str]:
    """The model's configurations as JSON text, by attribute, as Hugging Face's `save_pretrained` has them; else empty.

    as_packed  False: of the weights as numbers, where the model has them packed
    """
    found = {
        attribute: getattr(model, attribute).to_json_string()
        for attribute in CONFIGS
        if hasattr(getattr(model, attribute, None), "to_json_string")
    }
    if not as_packed and "config" in found:
        content = json.loads(found["config"])
        content.pop("quantization_config", None)
        found["config"] = json.dumps(content)
    return found


def model_code(model: Any) -> dict[str, bytes]:
    """The files of code by which `trust_remote_code=True` makes the model, by name; empty for one of a library's class. As its
    `save_pretrained` does, this notes them in the model's config."""
    config = getattr(model, "config", None)
    own = [one for one in (config, model) if getattr(one, "_auto_class", None) is not None]
    if not own:
        return {}
    from transformers.dynamic_module_utils import custom_object_save

    with tempfile.TemporaryDirectory() as folder:
        for one in own:
            custom_object_save(one, folder, config=config)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
