# SPDX-License-Identifier: Apache-2.0
"""On a GPU: random loops (tests/loops) give the bits of the engine with everything on the device, and PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.loops.judging import Stage
from tests.loops.test_loops import search

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("loops"), "cuda")
    yield stage
    stage.close()


def test_any_loop(on_gpu: Stage) -> None:
    search(on_gpu, 1, 40, 0, widely=True)


def test_any_loop_on_two_ranks(on_gpu: Stage) -> None:
    search(on_gpu, 2, 10, 0)
