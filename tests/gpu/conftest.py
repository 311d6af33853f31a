# SPDX-License-Identifier: Apache-2.0
"""Where a test runs: on a GPU, and the same body on the deferred accelerator, which shows on any machine that the test runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.device.played_cuda import run_elsewhere


@dataclass(frozen=True)
class Where:
    """An accelerator by name, and the device that batches and plain models lie on."""

    accelerator: str
    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "deferred"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """Both in turn; on the GPU with the algorithms of torch that give the same bits every time."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", request.param)
    # What cuBLAS needs to be deterministic; it is read when the first handle is made.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if request.param != "cuda":
        # A GPU's backward runs in a thread of autograd's; here it is given one, so that it is never the thread of forward.
        backward = torch.Tensor.backward
        monkeypatch.setattr(torch.Tensor, "backward", lambda *args, **named: run_elsewhere(lambda: backward(*args, **named)))
        yield Where(request.param, torch.device("cpu"))
        return
    torch.use_deterministic_algorithms(True)
    fills, torch.utils.deterministic.fill_uninitialized_memory = torch.utils.deterministic.fill_uninitialized_memory, False
    yield Where(request.param, torch.device("cuda", torch.cuda.current_device()))
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


QUICK = (
    "test_placement[cpu-cpu-bf16-step-deferred]",
    "test_activation_checkpointing[cpu-cpu-plain-True-deferred]",
    "test_activation_checkpointing[nvme-nvme-reentrant-False-deferred]",
    "test_frozen_base_with_trained_additions[cpu-cpu-deferred]",
    "test_compiled_blocks[cpu-cpu-deferred]",
    "test_evaluation_and_generation[nvme-nvme-backward-deferred]",
)
"""Of the many that run on the deferred accelerator: one of each kind; the rest is for `make soak`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        deferred = item.name.endswith("deferred]") or "[deferred-" in item.name
        if deferred and item.path.parent == Path(__file__).parent and _ordered(item.name) not in map(_ordered, QUICK):
            item.add_marker(pytest.mark.slow)


def _ordered(name: str) -> tuple[str, ...]:
    """The name with its parameters in one order, whichever pytest gives them."""
    test, _, parameters = name.removesuffix("]").partition("[")
    return (test, *sorted(parameters.split("-")))
