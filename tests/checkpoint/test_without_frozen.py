# SPDX-License-Identifier: Apache-2.0
"""`save_checkpoint(without_frozen=True)`: what is not trained is not written, and a load leaves it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.checkpoint.format.manifest_decoding import decode
from offload.errors import CheckpointError

PLACES = [{}, {"parameters": "cpu", "optimizer_states": "cpu"}, {"parameters": "nvme", "optimizer_states": "nvme"}]
Engine = offload.Engine


class Adapted(nn.Module):
    """Two blocks, each with a frozen matrix and a trained one; a frozen head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2))
        self.head = nn.Linear(32, 4)
        for block in self.blocks:
            block[0].requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def engine_of(model: nn.Module, place: dict[str, str], folder: Path) -> Engine:
    trained = [one for one in model.parameters() if one.requires_grad]
    config = {"stage": 3, **place} | ({"nvme": str(folder)} if "nvme" in place.values() else {})
    return offload.initialize(model, torch.optim.AdamW(trained, lr=0.01), config)


def step(engine: Engine) -> None:
    engine.backward(engine.module(torch.ones(3, 32)).square().mean())
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def values_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


@pytest.fixture(params=PLACES, ids=lambda place: place.get("parameters", "device"))
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(request.param)


def test_the_frozen_is_left_out_and_left_as_it_is(place: dict[str, str], tmp_path: Path) -> None:
    with engine_of(Adapted(0), place, tmp_path) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path / "all")
        engine.save_checkpoint(tmp_path / "trained", without_frozen=True)
        step(engine)
        expected, frozen = values_of(engine), {name for name, one in engine.module.named_parameters() if not one.requires_grad}
    sizes = {name: sum(one.stat().st_size for one in (tmp_path / name).iterdir()) for name in ("all", "trained")}
    numel = sum(expected[name].numel() for name in frozen)
    assert sizes["all"] - sizes["trained"] >= 4 * numel - 8192  # a header, and what is padded
    held = offload.read_values(tmp_path / "trained")
    assert held.keys() == expected.keys() - frozen
    with engine_of(Adapted(1), place, tmp_path) as other:  # other frozen values, which stay
        before = values_of(other)
        other.load_checkpoint(tmp_path / "trained")
        loaded = values_of(other)
        for name, value in loaded.items():
            assert torch.equal(value, before[name] if name in frozen else held[name]), name
    with engine_of(Adapted(0), place, tmp_path) as again:
        again.load_checkpoint(tmp_path / "trained")
        step(again)
        for name, value in values_of(again).items():
            assert torch.equal(value, expected[name]), name


def test_only_weights_are_taken_too(place: dict[str, str], tmp_path: Path) -> None:
    """By `load_values`, and by an engine that trains nothing, where what is there and what is not lie side by side."""
    with engine_of(Adapted(0), place, tmp_path) as engine:
        step(engine)
        expected = values_of(engine)
        engine.save_checkpoint(tmp_path / "trained", without_frozen=True)
    with engine_of(Adapted(0), place, tmp_path) as other:
        other.load_values(tmp_path / "trained")
        assert all(torch.equal(value, expected[name]) for name, value in values_of(other).items())
    still = {"parameters": place["parameters"]} if place else {}
    config = {"stage": 3, **still} | ({"nvme": str(tmp_path)} if "nvme" in still.values() else {})
    with offload.initialize(Adapted(0), None, config) as reading:
        reading.load_checkpoint(tmp_path / "trained")
        assert all(torch.equal(value, expected[name]) for name, value in values_of(reading).items())


def test_what_cannot_be_done_with_it_says_so(tmp_path: Path) -> None:
    with engine_of(Adapted(0), {}, tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "trained", without_frozen=True)
    everything = Adapted(0).requires_grad_(True)
    with offload.initialize(everything, torch.optim.AdamW(everything.parameters())) as other:
        before = values_of(other)
        with pytest.raises(CheckpointError, match=r"was frozen, its value was left out, and it is trained now"):
            other.load_checkpoint(tmp_path / "trained")
        assert all(torch.equal(value, before[name]) for name, value in values_of(other).items())
    from offload.cli.main import main as command

    assert command(["export", str(tmp_path / "trained"), str(tmp_path / "out")]) != 0
    assert not (tmp_path / "out").exists()


def test_the_manifest_says_so_in_a_version_of_its_own(tmp_path: Path) -> None:
    with engine_of(Adapted(0), {}, tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "trained", without_frozen=True)
    content = (tmp_path / "trained" / "MANIFEST.json").read_bytes()
    assert content.startswith(b'{"format":"offload-checkpoint","version":4,')
    manifest = decode(content, "it")
    assert {one.fqns[0] for one in manifest.parameters if manifest.leaves_out(one)} == {
        *(f"blocks.{index}.0.{kind}" for index in (0, 1) for kind in ("weight", "bias")),
        *("head.weight", "head.bias"),
    }
