# SPDX-License-Identifier: Apache-2.0
"""An interrupt at the n-th moment of a call at which Python may handle a signal, so that a test can go through all of them.

Python looks for signals where one of its functions begins and where one of C returns; so does `sys.setprofile`, and what its
function raises goes the way that a signal handler's exception goes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import offload

_INSIDE = (str(Path(offload.__file__).parent), contextlib.__file__, threading.__file__, weakref.__file__)
_EVENTS = ("call", "c_return")


def interrupted_at(moment: int, call: Callable[[], Any]) -> bool:
    """Run `call`, with a `KeyboardInterrupt` at that moment of the library's work; whether there was one. It is let go."""
    left = moment

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in _EVENTS and frame.f_code.co_filename.startswith(_INSIDE):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left < 0
