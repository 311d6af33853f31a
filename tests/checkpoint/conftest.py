# SPDX-License-Identifier: Apache-2.0
"""The fixtures of the acceptance tests: a seed, a folder for NVMe, and `opened`, which opens an engine in a setup."""

from __future__ import annotations

import pytest

from tests.file_systems import no_syncs

from ..acceptance.conftest import nvme, opened, settled

__all__ = ["nvme", "opened", "settled"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power failure could tell, and a busy disk takes seconds for each. That they are made: test_durability.py."""
    no_syncs(monkeypatch)
