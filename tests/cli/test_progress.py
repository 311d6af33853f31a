"""How far `initialize` is: in the log, and on the line of `python -m offload train`."""

from __future__ import annotations

import io
import logging

import pytest
import torch

import offload
from offload.build import materialize
from offload.cli import train
from offload.cli.progress import ProgressLine
from tests.acceptance.models import stack


def initialize() -> None:
    model = stack(width=16, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offload.initialize(model, optimizer, {"parameters": "cpu", "optimizer_states": "cpu"}):
        pass


def test_the_log_says_how_far_initialize_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level("INFO", "offload"):
        initialize()
        assert "in place" not in caplog.text, "a small model says nothing"
        monkeypatch.setattr(materialize, "_SAID_EVERY_NBYTES", 1)
        initialize()
    done = [record.args for record in caplog.records if record.name == materialize.__name__]
    assert len(done) >= 3 and done[-1][0] == done[-1][1] and [one[0] for one in done] == sorted(one[0] for one in done)


def test_train_shows_it_and_leaves_the_log_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "_SAID_EVERY_NBYTES", 1)
    stream = io.StringIO()
    progress = ProgressLine(stream)
    before = [(logger.level, list(logger.handlers)) for logger in map(logging.getLogger, train.PROGRESS_LOGGERS)]
    with progress.showing(*train.PROGRESS_LOGGERS):
        initialize()
    assert "of parameters are in place" in stream.getvalue()
    assert before == [(logger.level, logger.handlers) for logger in map(logging.getLogger, train.PROGRESS_LOGGERS)]
