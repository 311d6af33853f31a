# SPDX-License-Identifier: Apache-2.0
"""Configurations, models and optimizers that cannot be: one clear error that names the thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload

from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack
from .runs import Run, allocated_nbytes, assert_close, assert_same_bits, one_step, refused, run_engine, simple_loop

few = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME), ids=lambda s: s.name)
also_in_backward = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)


def test_one_folder_by_two_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(offload.ConfigError, match="names one folder twice"):
        offload.Config(parameters="nvme", nvme=[tmp_path, tmp_path / "link"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"paramaters": "cpu"}, ["paramaters", "parameters"]),
        ({"optimizer_state": "cpu"}, ["optimizer_state", "optimizer_states"]),
        ({"max_grad_nrom": 1.0}, ["max_grad_nrom", "max_grad_norm"]),
        ({"prefetch_depth": 1}, ["prefetch_depth", "prefetch"]),
        ({"parameters": "gpu"}, ["parameters", "gpu", "device"]),
        ({"parameters": "nvmee", "nvme": "/tmp"}, ["parameters", "nvmee", "nvme"]),
        ({"optimizer_states": "disk"}, ["optimizer_states", "disk", "nvme"]),
        ({"optimizer_states": None}, ["optimizer_states=None", "expected one of", "'nvme'."]),  # no word that is meant
        ({"parameters": "nvme"}, ["parameters", "nvme"]),
        ({"optimizer_states": "nvme"}, ["optimizer_states", "nvme"]),
        ({"parameters": "nvme", "nvme": []}, ["nvme"]),
        ({"parameters": "nvme", "nvme": ""}, ["nvme=''", "folder"]),
        ({"parameters": "nvme", "nvme": ["a", ""]}, ["nvme", "''", "folder"]),
        ({"parameters": "nvme", "nvme": "a\0b"}, ["nvme", "folder"]),
        ({"parameters": "nvme", "nvme": ["a", "b/../a"]}, ["nvme", "twice"]),
        ({"stage": 4}, ["stage", "4"]),
        ({"stage": "3x"}, ["stage", "3x"]),
        ({"dtype": "bfloat15"}, ["dtype", "bfloat15", "bf16"]),
        ({"update": "later"}, ["update", "later", "backward"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm", "-1"]),
        ({"max_grad_norm": 0.0}, ["max_grad_norm"]),
        ({"max_grad_norm": float("nan")}, ["max_grad_norm"]),
        ({"max_grad_norm": "tight"}, ["max_grad_norm", "tight"]),
        ({"prefetch": -1}, ["prefetch", "-1"]),
        ({"prefetch": 1.5}, ["prefetch", "1.5"]),
        ({"loss_scale": "dynamical"}, ["loss_scale", "dynamical", "dynamic"]),
        ({"loss_scale": 0.0}, ["loss_scale"]),
        ({"loss_scale": -8.0}, ["loss_scale", "-8"]),
        ({"cpu_memory": "16GiBs"}, ["cpu_memory", "16GiBs"]),
        ({"cpu_memory": "lots"}, ["cpu_memory", "lots", "GiB"]),
        ({"cpu_memory": -5}, ["cpu_memory", "-5"]),
        ({"cpu_memory": 0}, ["cpu_memory"]),
        ({"cpu_memory": 0.5}, ["cpu_memory", "more than zero"]),
        ({"cpu_memory": True}, ["cpu_memory", "not a size"]),
        ({"cpu_memory": float("inf")}, ["cpu_memory=inf", "not a size"]),
        ({"device_memory": float("nan")}, ["device_memory=nan", "not a size"]),
        ({"device_memory": f"{'9' * 400}GiB"}, ["device_memory", "not a size"]),
        ({"device_memory": "1.2.3GiB"}, ["device_memory", "1.2.3GiB"]),
        ({"state_format": "fp23"}, ["state_format", "fp23", "fp32"]),
        ({"state_format": "8bits"}, ["state_format", "8bits", "8bit"]),
        ({"state_format": "split", "dtype": "fp16"}, ["state_format", "split", "fp16", "bf16"]),
        ({"state_format": "8bit", "dtype": "fp32"}, ["state_format", "8bit", "fp32", "bf16"]),
        ({"state_format": "split"}, ["state_format", "inlet.weight", "float32", "bf16"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_config(fields: dict[str, Any], words: list[str]) -> None:
    """As a mapping and, where Python lets the key through, as a Config: before anything is allocated."""
    model = stack()
    optimizer = adamw(model)
    with refused(offload.ConfigError, *words):
        offload.initialize(model, optimizer, fields)
    if not any(key in ("paramaters", "optimizer_state", "max_grad_nrom", "prefetch_depth") for key in fields):
        with refused(offload.ConfigError, *words):
            offload.initialize(model, optimizer, offload.Config(**fields))
    one_step(Run(model, optimizer))  # the refusal left the model and its optimizer as they were


def test_config_file(tmp_path: Path) -> None:
    model = stack()
    with refused(offload.OffloadError, "absent.json"):
        offload.initialize(model, adamw(model), tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"parameters": "cpu",}')
    with refused(offload.ConfigError, "broken.json"):
        offload.initialize(model, adamw(model), str(broken))
    broken.write_text('{"paramaters": "cpu"}')
    with refused(offload.ConfigError, "paramaters", "parameters"):
        offload.initialize(model, adamw(model), str(broken))
    good = tmp_path / "good.json"
    good.write_text('{"parameters": "cpu", "optimizer_states": "cpu", "max_grad_norm": 1.0}')
    with offload.initialize(model, adamw(model), str(good)) as engine:
        one_step(Run(model, engine.optimizer, engine))


def test_config_is_frozen_and_of_at_most_a_dozen_fields() -> None:
    config = offload.Config(parameters="cpu")
    with pytest.raises(AttributeError):
        config.parameters = "nvme"
    assert {"stage", "parameters", "optimizer_states", "nvme", "device_memory", "cpu_memory", "dtype"} <= set(
        config.__dataclass_fields__
    )
    assert len(config.__dataclass_fields__) <= 12


class OfTheNorm(torch.optim.AdamW):
    """A subclass may compute anything; taking it for its base class would be silent."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
            ["RMSprop", "more than 2 arrays", "AdamW", "SGD"],
        ),
        (lambda p: torch.optim.LBFGS(p), ["LBFGS", "AdamW"]),
        (lambda p: OfTheNorm(p), ["OfTheNorm", "depends on more", "AdamW"]),
        (lambda p: torch.optim.NAdam(p), ["NAdam", "AdamW"]),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ["amsgrad"]),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ["amsgrad"]),
        (lambda p: torch.optim.SGD(p, differentiable=True), ["differentiable"]),
        (lambda p: torch.optim.AdamW(p, differentiable=True), ["differentiable"]),
        (lambda p: torch.optim.AdamW([{"params": list(p), "amsgrad": True}]), ["amsgrad"]),
        (lambda p: "adamw", ["str", "optimizer"]),
        (lambda p: torch.optim.AdamW, ["optimizer"]),
    ],
)
def test_optimizer(nvme: Path, make: Callable[[Any], Any], words: list[str]) -> None:
    model = stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refused(offload.ConfigError, *words):
        offload.initialize(model, make(model.parameters()), offload.Config(**ON_NVME.fields(nvme)))
    assert allocated_nbytes(nvme) == 0, "something was written before the check"
    assert_same_bits(dict(model.state_dict()), before)


@few
def test_an_optimizer_of_another_model(opened: Any, setup: Setup) -> None:
    model, other = stack(), stack()
    with refused(offload.ConfigError, "optimizer"):
        opened(model, torch.optim.AdamW([*model.parameters(), other.inlet.weight]), setup)
    with refused(offload.ConfigError, "optimizer"):
        opened(model, adamw(other), setup)


def test_a_model_that_is_none(nvme: Path) -> None:
    for model in (None, "gpt2", [stack()]):
        with refused(offload.ConfigError, "model"):
            offload.initialize(model, None, offload.Config())
    with refused(offload.OffloadError, "meta"):
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        offload.initialize(empty, adamw(empty), offload.Config())


@few
def test_initialize_twice(opened: Any, setup: Setup) -> None:
    model, plain = stack(), stack()
    optimizer = adamw(model)
    engine = opened(model, optimizer, setup)
    with refused(offload.OffloadError, "initialize"):
        opened(model, optimizer, setup)
    with refused(offload.OffloadError, "initialize"):
        opened(model, adamw(model), setup)
    with refused(offload.OffloadError, "initialize"):
        opened(nn.Sequential(model, nn.Linear(16, 16)), adamw(model), setup)  # a part of it is in an engine
    losses, weights = run_engine(engine, simple_loop(3))  # the first one was not harmed
    assert_close(losses, simple_loop(3)(Run(plain, adamw(plain))))
    assert_close(weights, plain.state_dict())


def test_half_a_launch(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE without the rest of torchrun's environment: each rank would train a model of its own, and nobody be told."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    model = stack()
    with refused(offload.ConfigError, "torchrun"):
        opened(model, adamw(model), IN_MEMORY)
