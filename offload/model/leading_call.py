# SPDX-License-Identifier: Apache-2.0
"""Which call of the user's, or of a library's, led to an access that cannot be: named in the error, with the right one.

Thread-safety: reads the calling thread's own stack.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

import torch

_GATHERED = "call it inside `with engine.gathered(model.parameters()):`"
_CONVERT = (
    "where parameters lie, and in which dtype, is the engine's: move or convert the model before offload.initialize; the dtype "
    "of forward and backward is Config(dtype=...), the places are Config(parameters=...)"
)
_EXPORT = f"call engine.export(dir), which writes what from_pretrained reads, or {_GATHERED}"
_COPY = (
    f"{_GATHERED}; engine.state_dict() gives copies of all values, and engine.save_checkpoint(dir) what training goes on from"
)
_MERGE = "engine.export(dir, merged=True) writes the merged model, unit by unit; load that with from_pretrained"
_STATE = f"call engine.state_dict(), or {_GATHERED}"
_LOAD = "call engine.load_state_dict(state), or engine.load_checkpoint(dir)"
_ATTACH = (
    "make the engine before accelerator.prepare(engine.module, engine.optimizer), or have the accelerator know it: "
    "offload.integrations.accelerate.attach(accelerator, engine)"
)
_STEP = "call engine.optimizer.step(): the optimizer that was given to offload.initialize trains no more"

_CONVERSIONS = ("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "type", "to_empty", "share_memory", "xpu")
_MODULE = "torch.nn.modules.module"
_CALLS: dict[tuple[str, str], tuple[str, str]] = {
    **{(_MODULE, name): (f"module.{name}()", _CONVERT) for name in _CONVERSIONS},
    (_MODULE, "state_dict"): ("module.state_dict()", _STATE),
    (_MODULE, "load_state_dict"): ("module.load_state_dict()", _LOAD),
    ("accelerate.accelerator", "save_state"): ("Accelerator.save_state()", _ATTACH),
    ("copy", "deepcopy"): ("copy.deepcopy()", _COPY),
    ("offload.model.guard", "__reduce_ex__"): ("pickle", _COPY),
    ("torch.serialization", "save"): ("torch.save()", _STATE),
    ("safetensors.torch", "save_model"): ("safetensors.torch.save_model()", _EXPORT),
    ("safetensors.torch", "save_file"): ("safetensors.torch.save_file()", _STATE),
    ("torch.nn.utils.convert_parameters", "parameters_to_vector"): ("torch.nn.utils.parameters_to_vector()", _GATHERED),
    ("torch.nn.utils.convert_parameters", "vector_to_parameters"): ("torch.nn.utils.vector_to_parameters()", _GATHERED),
}
_BY_NAME = {
    "save_pretrained": ("save_pretrained()", _EXPORT),
    "push_to_hub": ("push_to_hub()", _EXPORT),
    "save_model": ("save_model()", _EXPORT),
    "merge_and_unload": ("merge_and_unload()", _MERGE),
    "merge_adapter": ("merge_adapter()", _MERGE),
}
"""Methods that many libraries have."""


@dataclass(frozen=True, slots=True)
class LeadingCall:
    """`name`: as a user writes it; `advice`: what to do instead, as the end of a sentence."""

    name: str
    advice: str

    @property
    def converts(self) -> bool:
        """Whether it moves or converts a module."""
        return self.advice is _CONVERT


def leading_call() -> LeadingCall | None:
    """The outermost call on the stack that is known here."""
    found: LeadingCall | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        known = _CALLS.get((module, name)) or (_BY_NAME.get(name) if "self" in frame.f_locals else None)
        if name == "step" and isinstance(optimizer := frame.f_locals.get("self"), torch.optim.Optimizer):
            known = (f"{type(optimizer).__name__}.step()", _STEP)
        if known is not None:
            found = LeadingCall(*known)
        frame = frame.f_back
    return found


def led_by(otherwise: str) -> str:
    """The end of an error's message: what led there, and what to do; `otherwise` where that is not known."""
    call = leading_call()
    return otherwise if call is None else f"It was {call.name} that led here: {call.advice}."
