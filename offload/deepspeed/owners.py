"""Which engine a parameter belongs to, kept beside the parameters; and what scripts ask parameters of stage 3 for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import offload
from offload.errors import ParameterAccessError

_owners = WeakIdKeyDictionary()
_ANSWERS = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor")


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def own(engine: offload.Engine) -> None:
    """The parameters of the engine's model are its own until it is closed."""
    reference = weakref.ref(engine)
    for parameter in engine.module.parameters():
        _owners[parameter] = reference


def answer(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Set what scripts look for on a parameter that is partitioned: hasattr(p, "ds_id") is how they tell. `ds_tensor` has the
    shape of a rank's share, and no values."""
    for index, parameter in enumerate(parameters):
        share = torch.empty(-(-parameter.numel() // ranks), dtype=parameter.dtype, device="meta")
        values = (index, parameter.shape, parameter.numel(), ZeroParamStatus.NOT_AVAILABLE, share)
        vars(parameter).update(zip(_ANSWERS, values, strict=True))


def forget(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        for name in _ANSWERS:
            vars(parameter).pop(name, None)


def note_status(parameters: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    for parameter in parameters:
        if "ds_status" in vars(parameter):
            vars(parameter)["ds_status"] = status


def owner_of(parameters: Iterable[nn.Parameter]) -> offload.Engine | None:
    """The open engine that has all of them; None where none has any. Raises `ParameterAccessError` for a mixture."""
    engines = engines_of(parameters)
    if len(engines) > 1:
        raise ParameterAccessError("the parameters belong to several models, or some to none: give those of one model.")
    return next(iter(engines), None)


def engines_of(parameters: Iterable[nn.Parameter]) -> dict[offload.Engine | None, list[nn.Parameter]]:
    """The parameters by the open engine that has them."""
    found: dict[offload.Engine | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(_owner(parameter), []).append(parameter)
    return found


def _owner(parameter: nn.Parameter) -> offload.Engine | None:
    reference = _owners.get(parameter)
    engine: offload.Engine | None = reference() if reference is not None else None
    return None if engine is None or engine.closed else engine
