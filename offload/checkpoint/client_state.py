# SPDX-License-Identifier: Apache-2.0
"""What the user's loop wants back after a resume: JSON, and nothing that JSON would change without a word."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from offload.errors import UsageError

_MAX_INTEGER_BITS = 4096


def checked_client_state(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A deep copy as it will come back: tuples are lists then. Raises `UsageError`, naming what is not JSON."""
    try:
        _check({} if value is None else value, "client_state", top=True)
        copied: dict[str, Any] = json.loads(json.dumps({} if value is None else value))
    except RecursionError as error:
        raise UsageError("client_state is nested too deeply, or holds itself: give plain JSON values.") from error
    return copied


def _check(value: Any, where: str, *, top: bool = False) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _refused(f"{where} has the key {key!r} of type {type(key).__name__}")
            _check(item, f"{where}[{key!r}]")
    elif top:
        raise _refused(f"{where} is of type {type(value).__name__}, expected a dict")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _refused(f"{where} is {value}")
    elif isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise _refused(f"{where} has more than {_MAX_INTEGER_BITS} bits")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise _refused(f"{where} is of type {type(value).__name__}")


def _refused(what: str) -> UsageError:
    return UsageError(
        f"{what}: client_state must be JSON (dicts with text keys, lists, texts, finite numbers, bools, None). Convert it "
        "first, tensors with .tolist()."
    )
