# SPDX-License-Identifier: Apache-2.0
"""A script's own defaults for new tensors (`torch.set_default_device`, `torch.set_default_dtype`) are not the engine's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._device import _device_constructors

import offload
from tests.crosses import in_pairs

from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, ON_NVME_IN_PLACE, Setup, adamw, stack, vector_batches
from .runs import assert_same_bits

SETUPS = (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, ON_NVME_IN_PLACE)
PACKAGE = Path(offload.__file__).parent
RECORDED = PACKAGE / "deferred_init"
"""It refuses another default device."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {"device": lambda: torch.device("meta"), "dtype": lambda: default_dtype(torch.float64)}
"""On the meta device a tensor has no memory: what takes one for its own crashes, or raises."""


def run(engine: Any, folder: Path, around: Any) -> Any:
    seen = []
    for x, y in vector_batches(4):
        with around():
            loss = F.mse_loss(engine.module(x), y)
            loss.backward()
            engine.step()
            engine.zero_grad()
        seen.append(loss.item())
    with around():
        engine.save_checkpoint(folder / "step-1")
        engine.load_checkpoint(folder / "step-1")
        with engine.gathered(engine.module.parameters()), torch.no_grad():
            seen.append([parameter.detach().clone() for parameter in engine.module.parameters()])
            engine.module.outlet.bias.mul_(0.5)
        state = engine.state_dict()
        engine.load_state_dict(state)
        engine.export(folder / "export")
    return seen, engine.state_dict()


FIELDS = (
    pytest.param({"max_grad_norm": 0.5}, id="fp32"),
    pytest.param({"dtype": "bf16", "state_format": "split"}, id="split"),
)


# Each place and each format makes tensors of its own, which a default must not reach.
@pytest.mark.parametrize(("setup", "default", "fields"), in_pairs(SETUPS, DEFAULTS, FIELDS))
def test_defaults_of_the_script_change_nothing(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, default: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    found = []
    for name, around in (("plain", torch.enable_grad), (default, DEFAULTS[default])):
        model = stack()
        optimizer = adamw(model)
        (tmp_path / name).mkdir()
        with around():
            engine = offload.initialize(model, optimizer, offload.Config(**setup.fields(nvme, **fields)))
        with engine:
            found.append(run(engine, tmp_path / name, around))
    assert_same_bits(*found)


def test_every_tensor_that_the_package_makes_names_its_device() -> None:
    makers = {one.__name__ for one in _device_constructors()}
    nameless = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())) if RECORDED not in path.parents else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers):
                continue
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                nameless.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{node.func.attr}")
    assert nameless == [], "with torch.set_default_device these would lie elsewhere: name the device"


def test_fake_tensors_are_refused(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies move nothing there, and what was to be fetched would be taken for being there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    model = stack()
    with offload.initialize(model, adamw(model), offload.Config(**ON_CPU.fields(nvme))) as engine:
        before = engine.state_dict()
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(offload.UsageError, match="called on fake tensors"):
            model(torch.ones(2, 16))
        assert torch.isfinite(model(torch.ones(2, 16))).all()
        assert_same_bits(engine.state_dict(), before)
