"""For every test: hypothesis without deadlines, and gpu-marked tests skipped where torch sees no GPU."""

from __future__ import annotations

import pytest
import torch

try:
    import hypothesis
except ImportError:  # a machine with a GPU and none of our tools: the tests of tests/gpu need pytest alone
    pass
else:
    # A busy machine must not fail a test.
    hypothesis.settings.register_profile("offload", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("offload")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
