# SPDX-License-Identifier: Apache-2.0
"""On a GPU: random loops (tests/loops) give the bits of the engine with everything on the device, and PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    for needed in ("hypothesis", "transformers"):  # of the processes that loops run in
        pytest.importorskip(needed)
    from tests.loops.judging import Stage

    stage = Stage(tmp_path_factory.mktemp("loops"), "cuda")
    yield stage
    stage.close()


def search(stage: Any, ranks: int, count: int, *, widely: bool) -> None:
    from tests.loops.test_loops import search

    search(stage, ranks, count, 0, widely=widely)


def test_any_loop(on_gpu: Any) -> None:
    search(on_gpu, 1, 40, widely=True)


def test_any_loop_on_two_ranks(on_gpu: Any) -> None:
    search(on_gpu, 2, 10, widely=False)
