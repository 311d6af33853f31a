# SPDX-License-Identifier: Apache-2.0
"""For every test: Ctrl-C interrupts, hypothesis has no deadlines, torch computes on one thread, what was imported is no longer
looked through for garbage, and gpu-marked tests are skipped where torch sees no GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest

from tests import warm
from tests.small_sizes import small_for_good

# A shell starts what it runs in the background with Ctrl-C ignored, and Python leaves it so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run beside each other, on all cores: threads of torch, here and in what a test starts, would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):  # it starts the workers, and runs no test itself
        warm.share()
        return

    import torch

    torch.set_num_threads(1)
    small_for_good(joined_numel=0)  # the models of the tests are tiny, and are to have units; test_joined_units.py sets it
    try:
        import hypothesis
    except ImportError:  # a machine with a GPU and none of our tools: the tests of tests/gpu need pytest alone
        return
    # A busy machine must not fail a test.
    hypothesis.settings.register_profile("offload", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("offload")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """See tests/frozen.py. Also of the process that starts the others, which collects nothing."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """What a module's tests imported and keep stays too: a collection of a later test does not go through it."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
