# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at one moment of the engine's work, named by a count of lines or by a function."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from typing import Any

import offload

PACKAGE = str(Path(offload.__file__).parent)
_FINALIZING = ("__del__", "_freed")


def _is_in(frame: Any, *names: str) -> bool:
    """Whether a function of one of these names is running."""
    while frame is not None:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


def _is_finalizing(frame: Any) -> bool:
    """Asked of each frame before its lines are seen: one whose lines are says the same of what called it."""
    while frame is not None and frame.f_trace is None:
        if frame.f_code.co_name in _FINALIZING:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _begins_a_with_block(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith("with ")


class Interrupting:
    """Raises KeyboardInterrupt before one line of the package that this thread comes to, as Ctrl-C could.

    `within`: of functions of this name alone. `undoing_at`: and once more, at so many calls while what was taken is given back.
    """

    def __init__(self, at: int = 0, within: str | None = None, undoing_at: int = 0) -> None:
        self._at, self._within, self.line_count = at, within, 0
        self._undoing_left, self.came_again = undoing_at, False

    def __enter__(self) -> Interrupting:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        # Python swallows what a finalizer raises, and when one runs is chance.
        is_meant = self._within in (None, frame.f_code.co_name) and frame.f_code.co_filename.startswith(PACKAGE)
        return self._line if is_meant and not _is_finalizing(frame) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        # At the end of a with-block Python comes to its first line again, where no signal is ever handled.
        if event == "line" and not _begins_a_with_block(frame.f_code.co_filename, frame.f_lineno):
            self.line_count += 1
            if self.line_count == self._at:
                sys.setprofile(self._undoing if self._undoing_left else None)  # what raises here ends the tracing
                raise KeyboardInterrupt
        return self._line

    def _undoing(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and _is_in(frame, "_undo") and not _is_in(frame, *_FINALIZING):
            self._undoing_left -= 1
            if self._undoing_left == 0:
                self.came_again = True
                raise KeyboardInterrupt
