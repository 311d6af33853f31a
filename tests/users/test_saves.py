# SPDX-License-Identifier: Apache-2.0
"""Other libraries' saves of a model in training hold what they hold of a plain model: every tensor, tied ones as they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import find_tied_parameters
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import offload
from tests.acceptance.models import IN_MEMORY, ON_CPU, ON_NVME_IN_PLACE, PLACEMENTS, Setup, adamw, byte_batches, gpt2
from tests.acceptance.runs import Run, assert_same_bits, simple_loop, token_loop

Saved = dict[str, torch.Tensor]


class Odd(nn.Module):
    """Tied, empty and transposed parameters, of two dtypes, and a frozen one; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(16, 16), nn.Linear(16, 16)
        self.outlet.weight = self.inlet.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)) for _ in range(2))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(16, 16).t())
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
        self.one = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(torch.tanh(self.inlet(x))) @ self.turned + self.one + self.narrow.to(x.dtype)


def _by_accelerate(model: nn.Module, folder: Path) -> Saved:
    Accelerator(cpu=True).save_model(model, str(folder))
    return load_file(folder / "model.safetensors")


def _by_safetensors(model: nn.Module, folder: Path) -> Saved:
    save_model(model, str(folder / "model"))
    return load_file(folder / "model")


def _by_save_file(model: nn.Module, folder: Path) -> Saved:
    once = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(once, folder / "model")
    return load_file(folder / "model")


def _by_torch(model: nn.Module, folder: Path) -> Saved:
    torch.save(model.state_dict(), folder / "model")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (folder / "model").stat().st_size < 2 * nbytes + 65536, "storages of others were written too"
    return torch.load(folder / "model")


def _by_transformers(model: nn.Module, folder: Path) -> Saved:
    model.save_pretrained(folder)  # type: ignore[operator]
    return load_file(folder / "model.safetensors")


WAYS: list[Callable[[nn.Module, Path], Saved]] = [_by_accelerate, _by_safetensors, _by_save_file, _by_torch]


def _require_equal_saves(model: nn.Module, plain: nn.Module, folder: Path) -> None:
    ways = [*WAYS, _by_transformers] if hasattr(model, "save_pretrained") else WAYS
    for way in ways:
        saved = []
        for one in (model, plain):
            place = folder / f"{way.__name__}-{len(list(folder.iterdir()))}"
            place.mkdir()
            saved.append(way(one, place))
        assert_same_bits(saved[0], saved[1], way.__name__)
    assert sorted(map(sorted, find_tied_parameters(model))) == sorted(map(sorted, find_tied_parameters(plain)))
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({storage.data_ptr() for storage in storages if storage.nbytes()}) == sum(1 for one in storages if one.nbytes())
    assert [one.nbytes() for one in storages] == [p.numel() * p.element_size() for p in model.parameters()]


CASES = [(Odd, Setup(*placement, accelerator)) for placement in PLACEMENTS for accelerator in ("cpu", "deferred")]
CASES += [(gpt2, setup) for setup in (IN_MEMORY, ON_CPU, ON_NVME_IN_PLACE)]


@pytest.mark.parametrize(("build", "setup"), CASES, ids=lambda one: one.name if isinstance(one, Setup) else one.__name__)
def test_saves_by_other_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Callable[[], Any], setup: Setup
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    torch.manual_seed(1)
    model = build()
    torch.manual_seed(1)
    plain = build()
    for name in ("nvme", "gathered", "resident", "closed"):
        (tmp_path / name).mkdir()
    engine = offload.initialize(model, adamw(model), setup.fields(tmp_path / "nvme"))
    loop = token_loop(2) if build is gpt2 else simple_loop(2)
    loop(Run(model, engine.optimizer, engine))
    state = engine.state_dict()
    assert len({value.untyped_storage().data_ptr() for value in state.values() if value.numel()}) == len(
        {id(value) for value in state.values() if value.numel()}
    )
    plain.load_state_dict(state)
    with engine.gathered(model.parameters()):
        _require_equal_saves(model, plain, tmp_path / "gathered")
        kept = {name: value.detach() for name, value in model.state_dict().items()}
    assert_same_bits(kept, dict(plain.state_dict()))  # what was taken out inside is the user's own
    is_resident = setup.parameters == "device" or (setup.parameters == "cpu" and setup.accelerator == "cpu")
    if is_resident:
        _require_equal_saves(model, plain, tmp_path / "resident")
    loop(Run(model, engine.optimizer, engine))
    after = engine.state_dict()
    engine.close()
    if is_resident:
        plain.load_state_dict(after)
        _require_equal_saves(model, plain, tmp_path / "closed")


def test_one_gathered_parameter_opens_no_other(tmp_path: Path) -> None:
    model = gpt2()
    with offload.initialize(
        model, adamw(model), {"parameters": "nvme", "optimizer_states": "nvme", "nvme": str(tmp_path)}
    ) as engine:
        block = model.transformer.h[1]
        given, other = block.mlp.c_fc.weight, block.mlp.c_fc.bias
        with engine.gathered(given):
            for operation in (lambda: other.sum(), lambda: other.data.add_(1), lambda: save_model(model, str(tmp_path / "m"))):
                with pytest.raises(offload.ParameterAccessError, match="gathered"):
                    operation()
            before = given.detach().clone()
            model(input_ids=byte_batches(1)[0])  # opens and closes the unit around what is lent
            assert_same_bits(given.detach(), before)
            with pytest.raises(offload.ParameterAccessError, match="gathered"):
                other.sum()


def test_only_values_are_written_inside_gathered(tmp_path: Path) -> None:
    model = gpt2()
    fields = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": str(tmp_path)}
    with offload.initialize(model, adamw(model), fields) as engine:
        weight = model.lm_head.weight
        with engine.gathered(weight):
            weight.data = weight.data * 2 + 1  # another tensor of the same kind is a value
            expected = weight.detach().clone()
        assert_same_bits(engine.state_dict()["lm_head.weight"], expected)
        for change in (lambda: weight.data.double(), lambda: weight.data[:3]):
            with pytest.raises(offload.UsageError, match=r"lm_head.weight|wte.weight"), engine.gathered(weight):
                weight.data = change()
        assert_same_bits(engine.state_dict()["lm_head.weight"], expected)
        with pytest.raises(offload.UsageError, match="inside"), engine.gathered(weight):
            engine.step()
        with pytest.raises(offload.UsageError, match="inside"), engine.gathered(weight):
            engine.load_state_dict(engine.state_dict())
        token_loop(1)(Run(model, engine.optimizer, engine))
