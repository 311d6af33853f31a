# SPDX-License-Identifier: Apache-2.0
"""Buffers of every kind that PyTorch has: saved and loaded, or refused by name with nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload

from ..acceptance.models import ON_CPU, ON_NVME, Setup, adamw, stack
from ..acceptance.runs import Run, assert_same_bits, one_step

setups = pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)


def model_with(buffer: torch.Tensor) -> nn.Module:
    model = stack(blocks=2)
    model.register_buffer("held", buffer)
    return model


@setups
def test_an_expanded_buffer(opened: Any, tmp_path: Path, setup: Setup) -> None:
    """Its elements share memory, where PyTorch refuses to write: saved, loaded, set, and carried over what is unfrozen."""
    mean = torch.tensor([[1.0], [2.0]])
    model = model_with(mean.expand(2, 3))
    model.blocks[0].requires_grad_(False)
    engine = opened(model, adamw(model), setup)
    one_step(Run(model, engine.optimizer, engine))
    engine.save_checkpoint(tmp_path / "saved")
    saved = engine.state_dict()
    mean.zero_()
    one_step(Run(model, engine.optimizer, engine))
    engine.load_checkpoint(tmp_path / "saved")
    assert_same_bits(engine.state_dict(), saved)
    assert mean.tolist() == [[1.0], [2.0]], "it is the memory that it was"
    mean.zero_()
    engine.load_state_dict(saved)
    assert_same_bits(engine.state_dict(), saved)
    model.requires_grad_(True)
    one_step(Run(model, engine.optimizer, engine))
    assert_same_bits(model.held, saved["held"])


def test_an_expanded_buffer_that_is_to_have_several_values(opened: Any, tmp_path: Path) -> None:
    model = model_with(torch.arange(6.0).view(2, 3))
    engine = opened(model, adamw(model), ON_CPU)
    engine.save_checkpoint(tmp_path / "saved")
    other = model_with(torch.ones(1, 1).expand(2, 3))
    again = opened(other, adamw(other), ON_CPU)
    again.load_checkpoint(tmp_path / "saved")
    assert_same_bits(other.held, model.held)


@pytest.mark.parametrize(
    "make",
    [lambda one: one.conj(), torch._neg_view, lambda one: one.conj().imag],
    ids=["conjugate", "negative", "the imaginary part of a conjugate"],
)
def test_a_buffer_that_is_marked_as_conjugate_or_negative(opened: Any, tmp_path: Path, make: Any) -> None:
    model = model_with(make(torch.tensor([1 + 2j, 3 - 1j])))
    engine = opened(model, adamw(model), ON_NVME)
    value = model.held.clone()
    engine.save_checkpoint(tmp_path / "saved")
    engine.export(tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors")["held"], value.resolve_conj().resolve_neg())
    model.held.zero_()
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(model.held, value)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_a_sparse_buffer_is_refused_by_its_name(opened: Any, tmp_path: Path, make: Any) -> None:
    model = model_with(make(torch.eye(3)))
    engine = opened(model, adamw(model), ON_NVME)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    for write in (engine.save_checkpoint, engine.export):
        with pytest.raises(offload.UsageError, match="'held' is a buffer of the layout"):
            write(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    one_step(run)
