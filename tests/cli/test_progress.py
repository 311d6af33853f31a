# SPDX-License-Identifier: Apache-2.0
"""How far `initialize` is: in the log, and on the line of `python -m offload train`."""

from __future__ import annotations

import io
import logging
import re

import pytest
import torch

import offload
from offload.build import materialize
from offload.cli.progress import LOGGERS, ProgressLine
from tests.acceptance.models import stack
from tests.small_sizes import small


def initialize() -> None:
    model = stack(width=16, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offload.initialize(model, optimizer, {"parameters": "cpu", "optimizer_states": "cpu"}):
        pass


def test_the_log_says_how_far_initialize_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level("INFO", "offload"):
        initialize()
        assert "in place" not in caplog.text, "a small model says nothing"
        small(monkeypatch, values_said_every_nbytes=1)
        initialize()
    done = [record.args for record in caplog.records if record.name == materialize.__name__]
    assert len(done) >= 3 and done[-1][0] == done[-1][1] and [one[0] for one in done] == sorted(one[0] for one in done)


def test_train_shows_it_and_leaves_the_log_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, values_said_every_nbytes=1)
    stream = io.StringIO()
    progress = ProgressLine(stream)
    before = [(logger.level, list(logger.handlers)) for logger in map(logging.getLogger, LOGGERS)]
    with progress.showing():
        initialize()
    assert "of parameters are in place" in stream.getvalue()
    assert before == [(logger.level, logger.handlers) for logger in map(logging.getLogger, LOGGERS)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, values_said_every_nbytes=1)
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = ProgressLine(stream)
    with progress.counting_modules("building the model"):
        stack(width=16, blocks=3)
    progress.show("a line that is refreshed")
    with progress.showing():
        initialize()
        logging.getLogger(LOGGERS[1]).info("taking memory")
    progress.say("the end")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = [line for part in shown.split("\n") if "━" in (line := part.split("\r")[-1])]
    assert re.match(r"building the model +━+ .*\d+ modules", last[0]), shown
    assert any(re.match(r"initialize +━+ +0.0 of 0.0 GiB of parameters are in place", line) for line in last), shown
    assert (
        "taking memory\n" in shown
        and "\na line that is refreshed\n" in shown.replace("\r", "\n")
        and shown.endswith("\nthe end\n")
    )
    assert all(not logging.getLogger(name).handlers for name in LOGGERS)


def test_what_has_no_end_is_counted_in_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with ProgressLine(stream).counting_modules("building the model"):
        stack(width=16, blocks=3)
    assert stream.getvalue() == "building the model ...\n"
