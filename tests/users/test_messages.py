# SPDX-License-Identifier: Apache-2.0
"""What cannot be is said by one error that names the call and the right one; copies and schedulers are as in PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import nn

import offload
from tests.acceptance.models import (
    IN_MEMORY,
    ON_CPU,
    ON_NVME_IN_PLACE,
    Setup,
    Stack,
    adamw,
    byte_batches,
    gpt2,
    stack,
    vector_batches,
)
from tests.acceptance.runs import Run, assert_close, assert_same_bits, one_step

few = pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def open_engine(model: nn.Module, setup: Setup, optimizer: Any = None) -> offload.Engine:
        monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        return offload.initialize(model, optimizer or adamw(model), setup.fields(tmp_path))

    return open_engine


# ---- models that cannot be trained here


class Holds(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.own, self.child = nn.Linear(4, 4), child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(self.own(x))


SCRIPTED: list[Callable[[], nn.Module]] = [
    lambda: torch.jit.script(nn.Linear(4, 4)),
    lambda: torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)),
    lambda: Holds(torch.jit.script(nn.Linear(4, 4))),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("build", SCRIPTED)
def test_script_modules_are_refused(build: Callable[[], nn.Module]) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(offload.ConfigError, match=r"ScriptModule.*the module that it was made from"):
        offload.initialize(model, None, {"parameters": "cpu"})
    assert_same_bits(model.state_dict(), before)


def test_modules_without_shapes_are_refused_until_they_have_them() -> None:
    model = Holds(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    with pytest.raises(offload.ConfigError, match=r"'weight' of module 'child\.0'.*run one forward"):
        offload.initialize(model, None, {"parameters": "cpu"})
    model(torch.randn(2, 4))
    with offload.initialize(model, adamw(model), {"parameters": "cpu"}) as engine:
        model(torch.randn(2, 4)).sum().backward()
        engine.step()


# ---- copies


@few
def test_copies_of_a_model_are_plain_models(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    x, y = vector_batches(1)[0]
    with engine.gathered(model.parameters()):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    now = engine.state_dict()
    for twin in twins:
        assert_same_bits(dict(twin.state_dict()), now)
        optimizer = adamw(twin)
        one_step(Run(twin, optimizer))
        assert all(type(p) is nn.Parameter and p.untyped_storage().nbytes() == p.nbytes for p in twin.parameters())
        assert_close(twin(x), twins[0](x))
    assert_same_bits(engine.state_dict(), now)  # theirs reached nobody
    F.mse_loss(model(x), y).backward()
    twin_gradients = [p.grad for p in twins[0].parameters()]
    assert twin_gradients == [None] * len(twin_gradients)
    engine.close()
    for thing in (engine, engine.optimizer):
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(offload.UsageError, match=r"cannot be copied or pickled.*save_checkpoint"):
                duplicate(thing)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@few
def test_a_model_is_not_traced_but_its_copy_is(opened: Any, setup: Setup) -> None:
    """A trace reads parameters past everything that watches them: from memory that the system takes back."""
    model = stack()
    engine = opened(model, setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    x, _ = vector_batches(1)[0]
    with pytest.raises(offload.UsageError, match=r"traced.*copy\.deepcopy"):
        torch.jit.trace(model, x)
    with engine.gathered(model.parameters()):
        twin = copy.deepcopy(model)
        with pytest.raises(offload.UsageError, match="traced"):
            torch.jit.trace(model, x)
    expected = model(x)
    traced = torch.jit.trace(twin, x)
    one_step(run)
    assert_close(traced(x), expected)


# ---- values that are not in memory


def test_the_message_names_the_call_that_led_there(opened: Any, tmp_path: Path) -> None:
    model = gpt2()
    optimizer = adamw(model)
    engine = opened(model, Setup("nvme", "nvme"), optimizer)
    tokens = byte_batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: model.save_pretrained(tmp_path / "out", variant="x"),
            r"save_pretrained\(\).*engine\.export.*gathered\(model\.parameters",
        ),
        (lambda: model.state_dict(), r"module\.state_dict\(\).*engine\.state_dict\(\)"),
        (lambda: model.load_state_dict(gpt2().state_dict()), r"module\.load_state_dict\(\).*engine\.load_state_dict"),
        (lambda: model.half(), r"module\.half\(\).*Config\(dtype"),
        (lambda: model.to("meta"), r"module\.to\(\).*before offload\.initialize"),
        (lambda: copy.deepcopy(model), r"copy\.deepcopy\(\).*gathered.*engine\.state_dict\(\)"),
        (lambda: pickle.dumps(model), r"pickle.*gathered"),
        (lambda: torch.save(model, tmp_path / "m"), r"torch\.save\(\).*gathered"),
        (lambda: save_model(model, str(tmp_path / "m")), r"save_model\(\).*engine\.export"),
        (lambda: nn.utils.parameters_to_vector(model.parameters()), r"parameters_to_vector\(\).*gathered"),
        (lambda: adamw(model).step(), r"AdamW\.step\(\).*engine\.optimizer\.step\(\)|taken over.*engine"),
        (lambda: model.lm_head.weight.sum(), r"lm_head\.weight|wte\.weight.*gathered"),
    ]
    for call, words in calls:
        with pytest.raises(offload.ParameterAccessError, match=words):
            call()
    with pytest.raises(offload.UsageError, match=r"AdamW\.step\(\).*engine\.optimizer\.step\(\)"):
        optimizer.step()
    engine.step()
    engine.close()


@few
def test_the_first_optimizer_is_its_users_again_after_close(opened: Any, setup: Setup) -> None:
    model = stack()
    optimizer = adamw(model)
    engine = opened(model, setup, optimizer)
    with pytest.raises(offload.UsageError, match=r"engine\.optimizer\.step"):
        optimizer.step()
    engine.close()
    optimizer.step()  # no gradients: nothing happens
    if setup is IN_MEMORY:
        one_step(Run(model, optimizer))


def test_an_initialize_that_fails_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    model = stack()
    optimizer = adamw(model)
    with pytest.raises(offload.OffloadError):
        offload.initialize(model, optimizer, {"parameters": "cpu", "cpu_memory": 1})
    one_step(Run(model, optimizer))


# ---- schedulers


def _loop(model: Stack, scheduled: torch.optim.Optimizer, step: Callable[[], Any], early: Any) -> list[float]:
    scheduler = early or torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.5**step)
    rates = []
    for x, y in vector_batches(3):
        F.mse_loss(model(x), y).backward()
        step()
        model.zero_grad()
        scheduler.step()
        rates.append(scheduled.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("where", ["the given one, before", "the given one, after", "the engine's"])
def test_schedulers_warn_of_nothing(opened: Any, where: str, by_engine: bool) -> None:
    model, plain = stack(), stack()
    given = adamw(model)
    optimizer = adamw(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = _loop(plain, optimizer, lambda: optimizer.step(), None)
        early = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 0.5**step) if "before" in where else None
        engine = opened(model, IN_MEMORY, given)
        scheduled = engine.optimizer if "engine" in where else given
        step = engine.step if by_engine else (lambda: engine.optimizer.step())
        assert _loop(model, scheduled, step, early) == expected
    assert_close(engine.state_dict(), plain.state_dict())
    engine.close()


def test_a_scheduler_before_the_first_step_is_still_told(opened: Any) -> None:
    engine = opened(stack(), IN_MEMORY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.5**step)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    engine.close()


# ---- parameters that are an engine's


@few
def test_a_group_of_other_parameters_is_refused_at_once(opened: Any, setup: Setup) -> None:
    with opened(stack(), setup) as engine:
        one_step(Run(engine.module, engine.optimizer, engine))
        before = [list(group) for group in engine.optimizer.param_groups]
        for others in ([nn.Parameter(torch.zeros(3))], nn.Parameter(torch.zeros(3)), iter(nn.Linear(2, 2).parameters())):
            with pytest.raises(offload.UsageError, match=r"parameter 0 of the group .* not one of the engine's model"):
                engine.optimizer.add_param_group({"params": others})
        assert [list(group) for group in engine.optimizer.param_groups] == before
        one_step(Run(engine.module, engine.optimizer, engine))


@few
@pytest.mark.parametrize("gathered", [False, True])
def test_a_second_parameter_in_the_memory_of_one(opened: Any, setup: Setup, gathered: bool) -> None:
    with opened(stack(), setup) as engine:
        one_step(Run(engine.module, engine.optimizer, engine))
        module = engine.module.outlet
        if gathered:
            with engine.gathered(module.weight):
                assert torch.equal(nn.Parameter(module.weight.detach().clone()), module.weight)
            return
        for make in (
            lambda: nn.Parameter(module.weight),
            lambda: nn.Parameter(module.weight.data),
            lambda: torch.nn.utils.parametrizations.weight_norm(module),
        ):
            with pytest.raises(offload.ParameterAccessError, match=r"'outlet\.weight'.*(before offload\.initialize|gathered)"):
                make()


@few
def test_torch_jit_script_of_a_part(opened: Any, setup: Setup) -> None:
    with opened(stack(), setup) as engine:
        one_step(Run(engine.module, engine.optimizer, engine))
        with pytest.raises(offload.UsageError, match=r"torch\.jit\.script.*state_dict"):
            torch.jit.script(engine.module.outlet)
        one_step(Run(engine.module, engine.optimizer, engine))


def test_the_budget_that_is_too_small_is_named() -> None:
    """Where the device computes on host memory both budgets bound it: the lower one is to be raised."""
    model = nn.Linear(64, 64)
    budgets = {"cpu_memory": "1GiB", "device_memory": 4096}
    with pytest.raises(offload.BudgetError, match=r"^device_memory=4096 .* The smallest device_memory that can is"):
        offload.initialize(model, torch.optim.AdamW(model.parameters()), offload.Config(**budgets))
    with pytest.raises(offload.BudgetError, match=r"^cpu_memory=4096 .* The smallest cpu_memory that can is"):
        swapped = offload.Config(cpu_memory=4096, device_memory="1GiB")
        offload.initialize(model, torch.optim.AdamW(model.parameters()), swapped)
