# SPDX-License-Identifier: Apache-2.0
"""What a run says while it goes: the line about the newest step, and a JSON object a line in the file of --json."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from offload.cli.arguments import check_file
from offload.cli.process import rss_nbytes
from offload.cli.progress import ProgressLine
from offload.cli.text import format_nbytes, format_rate, format_remaining, json_text
from offload.cli.training.measuring import EngineMeter
from offload.errors import ConfigError


class JsonLines:
    """Objects with a `kind`: "step" and "evaluation" as they come, "report" at the end. Without a path nothing is written.

    A loss or norm that is not finite, as fp16 has them, is null."""

    def __init__(self, path: Path | None) -> None:
        check_file(path, "--json")
        self._path = path
        self.goes_on = False
        """Whether this run resumes another, whose lines stay; else the file begins anew."""

    def write(self, kind: str, content: dict[str, Any]) -> None:
        """Raises `ConfigError` where the path cannot be written."""
        if self._path is None:
            return
        try:
            with self._path.open("a" if self.goes_on else "w", encoding="utf-8") as file:
                file.write(json_text({"kind": kind, **content}) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {str(self._path)!r} cannot be written: {error.strerror}.") from error
        self.goes_on = True


class StepLine:
    """The line about a step, shown when it is due, and a step's line of JSON."""

    def __init__(self, meter: EngineMeter, progress: ProgressLine, lines: JsonLines, last_count: int | None) -> None:
        self._meter, self._measurements, self._progress, self._lines = meter, meter.measurements, progress, lines
        self._last_count = last_count
        self._started = self._shown_at = self._ended_at = time.perf_counter()
        self._shown_tokens, self._shown_io = 0, meter.io
        self._text = ""

    def step_ended(self, optimizer_lr: float, grad_norm: float | None) -> None:
        """After every step; both numbers are those that it was made with."""
        measurements, now = self._measurements, time.perf_counter()
        seconds, self._ended_at = now - self._ended_at, now
        number, loss = measurements.total_step_count, measurements.losses[-1]
        step = {"step": number, "loss": loss, "lr": optimizer_lr, "grad_norm": grad_norm, "seconds": seconds}
        self._lines.write("step", step | {"token_count": measurements.token_count})
        norm = "" if grad_norm is None else f" | grad norm {grad_norm:.3g}"
        of = f"/{self._last_count}" if self._last_count is not None else ""
        self._text = f"step {number}{of} | loss {loss:.4f} | lr {optimizer_lr:.2e}{norm}"
        if measurements.step_count == 1 or self._progress.due:
            self.show()

    def show(self) -> None:
        """Show the newest step, unless it has been."""
        measurements, now = self._measurements, time.perf_counter()
        tokens = measurements.token_count - self._shown_tokens
        if not tokens:
            return
        self._meter.read()
        seconds, moved = now - self._shown_at, self._meter.io - self._shown_io
        self._shown_at, self._shown_tokens, self._shown_io = now, measurements.token_count, self._meter.io
        parts = [self._text, f"{tokens / seconds:.0f} tokens/s", *self._left(now)]
        parts.append(f"host {format_nbytes(self._meter.host_nbytes)} (process {format_nbytes(rss_nbytes())})")
        if self._meter.device_peak_nbytes is not None:
            parts.append(f"device peak {format_nbytes(self._meter.device_peak_nbytes)}")
        if self._meter.latest["io"] is not None:
            read, written = format_rate(moved.read_nbytes, seconds), format_rate(moved.written_nbytes, seconds)
            parts.append(f"NVMe read {read} write {written}")
        self._progress.show(" | ".join(parts), force=True)

    def _left(self, now: float) -> list[str]:
        """How long the steps that are left will take at the mean of those that were made."""
        if self._last_count is None or (left := self._last_count - self._measurements.total_step_count) <= 0:
            return []
        return [f"{format_remaining(left * (now - self._started) / self._measurements.step_count)} left"]
