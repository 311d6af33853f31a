# SPDX-License-Identifier: Apache-2.0
"""Which engine a parameter belongs to, kept beside the parameters; and what scripts ask parameters of stage 3 for."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import offload
from offload.errors import ParameterAccessError

_owners = WeakIdKeyDictionary()
_ids = itertools.count()
_DEVICE_OF = torch.Tensor.device.__get__
_ANSWERS = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist")
"""What `answer` sets."""


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def own(engine: offload.Engine) -> None:
    """The parameters of the engine's model are its own until it is closed."""
    reference = weakref.ref(engine)
    for parameter in engine.module.parameters():
        _owners[parameter] = reference


class _Status:
    """Compares as the `ZeroParamStatus` of now: available where the value may be read, in a use or gathered."""

    def __init__(self, parameter: nn.Parameter, plain: type | None) -> None:
        """`plain`: its class while it may be read; None before it is an engine's, when nothing may refer to it either."""
        self._parameter = weakref.ref(parameter) if plain is not None else None
        self._plain, self.is_gathered = plain, False

    @property
    def now(self) -> ZeroParamStatus:
        readable = self._parameter is not None and type(self._parameter()) is self._plain
        return ZeroParamStatus.AVAILABLE if self.is_gathered or readable else ZeroParamStatus.NOT_AVAILABLE

    name = property(lambda self: self.now.name)
    value = property(lambda self: self.now.value)

    def __eq__(self, other: object) -> bool:
        return self.now == (other.now if isinstance(other, _Status) else other)

    def __hash__(self) -> int:
        return hash(self.now)

    def __repr__(self) -> str:
        return repr(self.now)


class _Partitioned(nn.Parameter):
    """A parameter of `zero.Init` before `initialize`. It has no memory, and says that it is on the CPU, where its value is
    computed: libraries make what is to go with it (a larger embedding, an adapter) where it says it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Who asks for the device is told so. Operators see that it is nowhere: else they would compute with garbage."""
        if func == _DEVICE_OF:
            return torch.device("cpu")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def answer(parameters: Iterable[nn.Parameter], ranks: int, plain: Mapping[int, type] | None = None) -> None:
    """Set what scripts look for on a parameter that is, or will be, partitioned: hasattr(p, "ds_id") is how they tell.
    `ds_tensor` has the shape of a rank's share, and no values; `ds_persist` is False: scripts gather what it is False of, and
    that works for all.
    `plain`: by id, the classes that engine's parameters had."""
    for parameter in parameters:
        if plain is None and type(parameter) is nn.Parameter:
            parameter.__class__ = _Partitioned
        vars(parameter).update(
            ds_id=next(_ids),
            ds_shape=parameter.shape,
            ds_numel=parameter.numel(),
            ds_status=_Status(parameter, plain[id(parameter)] if plain is not None else None),
            ds_tensor=torch.empty(-(-parameter.numel() // ranks), dtype=parameter.dtype, device="meta"),
            ds_persist=False,
        )


def forget(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        for name in _ANSWERS:
            vars(parameter).pop(name, None)
        if type(parameter) is _Partitioned:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _statuses(parameters: Iterable[nn.Parameter]) -> list[_Status]:
    return [vars(one)["ds_status"] for one in parameters if "ds_status" in vars(one)]


@contextmanager
def said_gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """They say that they are gathered until the block ends; then again what they said before it."""
    before = [(status, status.is_gathered) for status in _statuses(parameters)]
    for status, _ in before:
        status.is_gathered = True
    try:
        yield
    finally:
        for status, was_gathered in before:
            status.is_gathered = was_gathered


def are_gathered(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether all of them lie in a `GatheredParameters` block of now."""
    found = [status.is_gathered for status in _statuses(parameters)]
    return bool(found) and all(found)


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
