# SPDX-License-Identifier: Apache-2.0
"""This machine, measured once for all tests of a process: test_forecast.py and test_plan.py hold how `plan` measures it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from offload.cli.plans import on_machine
from offload.cli.plans.this_machine import MeasuredMachine, measure_machine

_KNOWN: dict[int, MeasuredMachine] = {}
"""By the number of drives."""


def _measured_once(paths: Sequence[str], seconds: float) -> MeasuredMachine:
    if len(paths) not in _KNOWN:
        _KNOWN[len(paths)] = measure_machine(paths, seconds)
    return _KNOWN[len(paths)]


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_machine, "measure_machine", _measured_once)
