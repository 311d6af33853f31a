# SPDX-License-Identifier: Apache-2.0
"""What the members of a crew do that have a GPU each, played (`played_cuda`), and talk over the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import offload
from offload.ranks.threads import Started, Threads
from tests.acceptance.models import stack, vector_batches
from tests.device.played_cuda import Watch, play
from tests.small_sizes import small_for_good


def settle() -> None:
    """Called in each process before its first job."""
    small_for_good(least_unit_numel=0)


def train(config: dict[str, Any], played: bool, uneven: bool = False) -> tuple[list[float], list[float]]:
    """Three steps of two micro-batches on this rank's rows, and an evaluation between. Losses, and a sum of each weight.
    `uneven`: in each step another rank has no gradients of a block that it uses."""
    with pytest.MonkeyPatch.context() as patch:
        if played:
            detector = play(patch)
            patch.setattr(Threads, "start", _watched(Threads.start))
        else:
            patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        found = _train(config, uneven)
        assert not played or len(detector.operations) > 500, "the detector saw nothing"
        return found


def _train(config: dict[str, Any], uneven: bool) -> tuple[list[float], list[float]]:
    rank, width = dist.get_rank(), 16
    model = stack(width=width, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results: list[torch.Tensor] = []
    with Watch(), offload.initialize(model, optimizer, {"dtype": "bf16"} | config) as engine:
        batches = iter(vector_batches(12, width))
        for step in range(3):
            for last in (False, True):
                x, y = [next(batches), next(batches)][rank]
                with contextlib.nullcontext() if last else engine.no_sync():
                    if uneven and step % 2 == rank:
                        with torch.no_grad():
                            model(x)
                        inner = model.blocks[0](model.inlet(x.to(torch.bfloat16)))
                        loss = F.mse_loss(model.outlet(inner).float(), y)
                    else:
                        loss = F.mse_loss(model(x).float(), y)
                    engine.backward(loss)
                results.append(loss.detach())
            engine.step()
            engine.zero_grad()
            with torch.no_grad():
                results.append(model(x).float().sum())
        weights = [value.double().sum().item() for _, value in sorted(engine.state_dict().items())]
        return [result.item() for result in results], weights


def _watched(start: Callable[..., Started]) -> Callable[..., Started]:
    """A thread of the ranks' is watched, too."""

    def started(self: Threads, target: Callable[[], None], name: str) -> Started:
        def run() -> None:
            with Watch():
                target()

        return start(self, run, name)

    return started
