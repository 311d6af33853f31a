"""One line about the run: refreshed in place on a terminal, written now and then elsewhere."""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from torch.nn.modules.module import register_module_module_registration_hook

_PLAIN_EVERY_SECONDS = 5.0
_TERMINAL_EVERY_SECONDS = 0.1
_BAR_WIDTH = 30


class ProgressLine:
    """`show` may be called at any rate; it writes when the time has come."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self.in_place = self._stream.isatty()
        self._every_seconds = _TERMINAL_EVERY_SECONDS if self.in_place else _PLAIN_EVERY_SECONDS
        self._last = -float("inf")
        self._open = False

    @property
    def due(self) -> bool:
        """Whether `show` would write now: what the line says need not be found out otherwise."""
        return time.monotonic() - self._last >= self._every_seconds

    def show(self, text: str, *, force: bool = False) -> None:
        if not (force or self.due):
            return
        self._last = time.monotonic()
        if self.in_place:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[2K{text[:width]}")
            self._open = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.close()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line that is refreshed, so that what follows starts on its own."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    @contextmanager
    def showing(self, *loggers: str) -> Iterator[None]:
        """Inside, what these say of their progress (INFO) is shown."""
        handler = _Shown(self)
        levels = {one: one.level for one in map(logging.getLogger, loggers)}
        for logger in levels:
            logger.addHandler(handler)
            logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
        try:
            yield
        finally:
            for logger, level in levels.items():
                logger.removeHandler(handler)
                logger.setLevel(level)
            self.close()

    @contextmanager
    def counting_modules(self, doing: str) -> Iterator[None]:
        """Inside, how many modules are part of another by now is shown."""
        self.show(f"{doing} ...", force=True)
        counted = itertools.count(1)

        def registered(*_: object) -> None:
            count = next(counted)
            if self.due:
                self.show(f"{doing}: {count} modules")

        watching = register_module_module_registration_hook(registered)
        try:
            yield
        finally:
            watching.remove()
            self.close()


class _Shown(logging.Handler):
    def __init__(self, line: ProgressLine) -> None:
        super().__init__(logging.INFO)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        done = record.args
        bar = _bar(*done) if self._line.in_place and isinstance(done, tuple) and len(done) == 2 else ""
        self._line.show(f"{record.getMessage()}{bar}")


def _bar(done: object, total: object) -> str:
    """Of the two numbers of an `offload.progress.Progress`."""
    if not (isinstance(done, float) and isinstance(total, float) and total > 0):
        return ""
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * done / total))
    return f" [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
