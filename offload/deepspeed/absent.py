# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed has and this drop-in has not: an AttributeError names it and the nearest thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from offload.config import nearest
from offload.errors import UsageError

WHOLE_LAYERS = "every rank computes whole layers; what does not fit goes to cpu or nvme"


class AskedWrongly(UsageError, AssertionError):
    """Raised where DeepSpeed asserts, so that a script which expects its AssertionError gets one."""


class NotDone(UsageError, NotImplementedError):
    """The same of its NotImplementedError."""


def absent(where: str, name: str, there: Iterable[str], instead: Mapping[str, str] | None = None) -> AttributeError:
    """The error for `where.name`, where `there` lists the names that exist."""
    if instead is not None and name in instead:
        return AttributeError(f"{where}.{name} is not in offload: {instead[name]}.")
    names = [one for one in there if not one.startswith("_")]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"the nearest is {where}.{close[0]}" if close else f"there are {', '.join(sorted(names))}"
    return AttributeError(f"{where}.{name} is not in offload; {hint}.")


def check_keywords(
    where: str, given: Mapping[str, Any], known: Iterable[str], refused: Mapping[str, str] | None = None
) -> None:
    """Raise `UsageError` for a keyword that DeepSpeed does not know, and for one in `refused` that asks for something;
    its text says what to do."""
    refused = refused or {}
    known = (*known, *refused)
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"{where} has no argument {key!r}{nearest(key, known)}.")
        if key in refused and value is not None and value is not False:
            raise UsageError(f"{where}({key}={value!r}) is not done here: {refused[key]}.")
