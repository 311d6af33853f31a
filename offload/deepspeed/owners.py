"""Which engine a parameter belongs to, kept beside the parameters: nothing is set on them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import offload
from offload.errors import ParameterAccessError

_owners = WeakIdKeyDictionary()


def own(engine: offload.Engine) -> None:
    """The parameters of the engine's model are its own until it is closed."""
    reference = weakref.ref(engine)
    for parameter in engine.module.parameters():
        _owners[parameter] = reference


def owner_of(parameters: Iterable[nn.Parameter]) -> offload.Engine | None:
    """The open engine that has all of them; None where none has any. Raises `ParameterAccessError` for a mixture."""
    found = [_owner(parameter) for parameter in parameters]
    engines = {id(engine): engine for engine in found}
    if len(engines) > 1:
        raise ParameterAccessError(
            "GatheredParameters was given parameters of several models, or some that no engine has: gather those of one model."
        )
    return next(iter(engines.values()), None)


def _owner(parameter: nn.Parameter) -> offload.Engine | None:
    reference = _owners.get(parameter)
    engine: offload.Engine | None = reference() if reference is not None else None
    return None if engine is None or engine.closed else engine
