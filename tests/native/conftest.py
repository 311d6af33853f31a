# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload import _native


@pytest.fixture(autouse=True)
def _default_path_and_threads() -> Iterator[None]:
    """Tests choose SIMD levels and thread counts; each begins and ends with the defaults."""
    yield
    if _native.available():
        _native.set_simd_level(None)
        _native.set_thread_count(0)
