# SPDX-License-Identifier: Apache-2.0
"""Models with many chunks have larger ones, where a device waits for the host: the same bits. What is made for all chunks of a
parameter is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import layout
from offload.model.flat import ParameterInfo
from tests.inside import layout_of
from tests.small_sizes import small

from .models import ON_CPU, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw, vector_batches
from .runs import assert_same_bits

WIDTH, STEPS = 1024, 2


def trained(setup: Setup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """The largest chunk, and losses and weights."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH))
    losses = []
    with offload.initialize(model, adamw(model), offload.Config(**setup.fields(folder), max_grad_norm=1.0)) as engine:
        for x, _ in vector_batches(STEPS, WIDTH):
            for _ in range(2):
                loss = model(x).square().mean()
                engine.backward(loss)
            engine.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        return layout_of(engine).chunk_numel, [losses, engine.state_dict()]


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_larger_chunks_change_no_bit(setup: Setup, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, expected = trained(setup, nvme, monkeypatch)
    small(monkeypatch, many_chunks=1)
    larger, found = trained(setup, nvme, monkeypatch)
    assert (usual, larger) == (layout.CHUNK_NUMEL, 8 * layout.CHUNK_NUMEL)
    assert_same_bits(found, expected)


def test_where_the_host_computes_chunks_are_as_usual(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, many_chunks=1)
    assert trained(ON_NVME_IN_PLACE, nvme, monkeypatch)[0] == layout.CHUNK_NUMEL


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)
def test_a_value_in_another_order_is_brought_into_its_own_once(
    setup: Setup, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all chunks: values of a file, and the zeros of parts that are made anew."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    small(monkeypatch, chunk_numel=4096)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[0].weight = nn.Parameter(model[0].weight.detach().t().clone(memory_format=torch.preserve_format))
    model[1].requires_grad_(False)
    values = {fqn: torch.randn(value.shape) for fqn, value in model.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    optimizer, config = adamw(model), offload.Config(**setup.fields(nvme))
    numel, ordered = model[0].weight.numel(), list[int]()

    def counted(self: ParameterInfo, tensor: torch.Tensor) -> torch.Tensor:
        made = in_memory_order(self, tensor)
        ordered.append(self.index if made.data_ptr() != tensor.data_ptr() else -1)
        return made

    in_memory_order = ParameterInfo.in_memory_order
    monkeypatch.setattr(ParameterInfo, "in_memory_order", counted)
    with offload.initialize(model, optimizer, config, weights=tmp_path / "model.safetensors") as engine:
        assert layout_of(engine).chunk_numel < numel and ordered.count(0) == 1, "the weight that lies otherwise"
        assert_same_bits(engine.state_dict(), values)
        ordered.clear()
        model[1].requires_grad_(True)
        model(torch.randn(2, 256)).sum().backward()
        engine.step()
        assert set(ordered) == {-1}
