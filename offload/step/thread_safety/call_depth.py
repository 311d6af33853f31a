# SPDX-License-Identifier: Apache-2.0
"""Whether Python's stack leaves room for the engine's own work.

A model's forward may recurse, and be called where little is left of `sys.getrecursionlimit()`; one that recurses for ever is
first met in a hook of the engine's. What ran out of stack in the middle of the engine's work would leave that half done. So who
begins such work from within the user's calls asks first, and what is raised has changed nothing.
"""

from __future__ import annotations

import sys
from typing import Any

_NEEDED_COUNT = 120
"""Of calls within each other: the deepest of the engine's own work, measured at 50, and what it imports or logs on the way."""


def _nested(count: int) -> Any:
    kinds: Any = int
    for _ in range(count):
        kinds = (kinds,)
    return kinds


_COUNTS_ALL_CALLS = sys.version_info < (3, 12)
"""Whether one limit holds for calls of Python and of C together. Then asking after a kind in nested tuples goes as deep as they
are, in no time."""
_NESTED = _nested(_NEEDED_COUNT)


def require_stack() -> None:
    """Raise `RecursionError` where Python's limit leaves the engine too few calls."""
    if _COUNTS_ALL_CALLS:
        try:
            isinstance(None, _NESTED)
        except RecursionError:
            pass
        else:
            return
    else:
        try:
            sys._getframe(max(sys.getrecursionlimit() - _NEEDED_COUNT, 0))
        except ValueError:  # the stack is not that deep
            return
    error = RecursionError(
        f"Python's stack is too deep for the engine's own work: less than {_NEEDED_COUNT} calls are left of the limit of "
        f"{sys.getrecursionlimit()}. Nothing was done. If a model is meant to recurse as deep, raise the limit: "
        f"sys.setrecursionlimit({2 * sys.getrecursionlimit()})."
    )
    error.changed_nothing = True  # type: ignore[attr-defined]  # for `FailureState`, as that of the project's own errors
    raise error
