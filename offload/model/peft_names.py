# SPDX-License-Identifier: Apache-2.0
"""What the parameters of a model are called where PEFT has not put adapters into it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model is PEFT's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether the model is one of Hugging Face's transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def library_models(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost of its modules, by path, that are PEFT's or transformers': the model itself, or what a LightningModule
    holds."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(not above or path.startswith(f"{above}.") for above in found)
        if not inside and (is_peft_model(module) or is_pretrained_model(module)):
            found[path] = module
    return found


def is_peft(model: nn.Module) -> bool:
    """Whether the model is PEFT's, or a Hugging Face model that PEFT put adapters into."""
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    return isinstance(model, (peft.PeftModel, peft.PeftMixedModel)) or bool(getattr(model, "_hf_peft_config_loaded", False))


def base_model(model: nn.Module) -> nn.Module:
    """The model that PEFT put adapters into, or the model itself."""
    get_base: Any = getattr(model, "get_base_model", None) if is_peft(model) else None
    base: nn.Module = get_base() if get_base is not None else model
    return base


def base_namer(model: nn.Module) -> Callable[[str], str | None]:
    """A function that gives for the fqn of a parameter or buffer the one that it has in the base model; None for what is an
    adapter's. The identity where there are none."""
    if not is_peft(model):
        return lambda fqn: fqn
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = base_model(model)
    outer = next(name for name, module in model.named_modules() if module is base)
    prefix = f"{outer}." if outer else ""
    wrapped = {
        name: ("base_layer",) if isinstance(module, BaseTunerLayer) else ("original_module", "token_adapter")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    }

    def base_name(fqn: str) -> str | None:
        if not fqn.startswith(prefix):
            return None
        kept: list[str] = []
        parts, within = fqn.split("."), None
        for position, part in enumerate(parts):
            if within is None:
                kept.append(part)
            elif part not in within:
                return None
            within = wrapped.get(".".join(parts[: position + 1]))
        return ".".join(kept).removeprefix(prefix)

    return base_name
