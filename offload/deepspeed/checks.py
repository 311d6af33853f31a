# SPDX-License-Identifier: Apache-2.0
"""What `enable_sanity_checks` looks for: a write inside `GatheredParameters` that no rank is named for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from offload.deepspeed import comm
from offload.deepspeed.settings import read_config
from offload.deferred_init.deferred_init import is_deferred
from offload.errors import UsageError

KEY = "zero_optimization.enable_sanity_checks"
_watched = WeakIdKeyDictionary()


def asks_for_checks(config: Any) -> bool:
    """Whether a whole config sets `KEY`."""
    section = read_config(config).get("zero_optimization")
    return isinstance(section, Mapping) and section.get("enable_sanity_checks") is True


def watch(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        _watched[parameter] = True


@contextmanager
def unwritten(params: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Whoever writes one that is watched, on any rank, ends the block with an error on every rank."""
    looked_at = [one for one in params if one in _watched] if modifier_rank is None else []
    before = [_version(one) for one in looked_at]
    yield
    if looked_at and any(comm.gathered_objects([_version(one) for one in looked_at] != before)):
        raise UsageError(
            "in-place modification of parameters inside GatheredParameters with modifier_rank=None, which "
            "enable_sanity_checks looks for: name the modifier_rank whose values count."
        )


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes where it is written, or given other memory."""
    return parameter._version, 0 if is_deferred(parameter) else parameter.data_ptr()
