# SPDX-License-Identifier: Apache-2.0
"""One line about the run, and bars for long pieces of work: in place on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from torch.nn.modules.module import register_module_module_registration_hook

if TYPE_CHECKING:
    from rich.progress import TaskID

_PLAIN_EVERY_SECONDS = 5.0
_TERMINAL_EVERY_SECONDS = 0.1
_BEGINS = " ..."

LOGGERS = (
    *("offload.build.materialize", "offload.device.host_memory.host_pages"),
    *("offload.checkpoint.saving.writing", "offload.checkpoint.restoring", "offload.checkpoint.export.weights"),
    *("offload.checkpoint.export.universal", "offload.checkpoint_import.converting"),
)
"""What says how far `initialize`, a save, a load, an export and an import are."""


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
    def showing(self) -> Iterator[None]:
        """Inside, what `LOGGERS` say of their progress (INFO) is shown: as bars on a terminal."""
        with self._bars() as bars:
            handler = _Shown(self, bars)
            levels = {one: one.level for one in map(logging.getLogger, LOGGERS)}
            for logger in levels:
                logger.addHandler(handler)
                logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
            try:
                yield
            finally:
                for logger, level in levels.items():
                    logger.removeHandler(handler)
                    logger.setLevel(level)

    @contextmanager
    def counting_modules(self, doing: str) -> Iterator[None]:
        """Inside, how many modules are part of another by now is shown."""
        with self._bars() as bars:
            counted = itertools.count(1)

            def tell(said: str) -> None:
                if bars is None:
                    self.show(f"{doing}{said}", force=said == _BEGINS)
                else:
                    bars.show(doing, said)

            def registered(*_: object) -> None:
                tell(f": {next(counted)} modules")

            tell(_BEGINS)
            watching = register_module_module_registration_hook(registered)
            try:
                yield
            finally:
                watching.remove()

    @contextmanager
    def _bars(self) -> Iterator[_Bars | None]:
        """Begins on a line of its own, and leaves the next one free."""
        self.close()
        if not self.in_place:
            yield None
            return
        bars = _Bars(self._stream)
        try:
            yield bars
        finally:
            bars.close()


class _Bars:
    """rich's, one for each piece of work. Any thread may tell of its own."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(file=stream, force_terminal=True))
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def show(self, doing: str, said: str, done: float = 0.0, total: float | None = None) -> None:
        """`total`: None where nobody knows it; the bar then says that something goes on."""
        if doing not in self._tasks:
            self._tasks[doing] = self._progress.add_task(doing, total=total, said=said)
        self._progress.update(self._tasks[doing], completed=done, total=total, said=said)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """The bars stay; those whose end nobody knew have come to it."""
        for task in self._progress.tasks:
            if task.total is None:
                self._progress.update(task.id, completed=1.0, total=1.0)
        self._progress.stop()


class _Shown(logging.Handler):
    def __init__(self, line: ProgressLine, bars: _Bars | None) -> None:
        super().__init__(logging.INFO)
        self._line, self._bars = line, bars

    def emit(self, record: logging.LogRecord) -> None:
        if self._bars is None:
            self._line.show(record.getMessage())
            return
        match record.args:
            case (float(done), float(total)):  # of an offload.progress.Progress
                doing, _, said = record.getMessage().partition(": ")
                self._bars.show(doing, said, done, total)
            case _:
                self._bars.say(record.getMessage())
