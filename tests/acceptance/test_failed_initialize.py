# SPDX-License-Identifier: Apache-2.0
"""An `initialize` that fails, wherever it does, leaves model and optimizer as they were, and a second try works."""

from __future__ import annotations

import errno
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import offload
from offload.deepspeed_config import translate
from offload.deepspeed_config.translated import as_there
from offload.deferred_init.deferred_init import is_deferred
from offload.device.accelerator import Accelerator
from offload.device.cpu import CpuAccelerator
from offload.ranks.group import Alone
from tests.devices import computed_on
from tests.drives import drive_is
from tests.reads import before_each_weight
from tests.tiers.faulty_io import Fault, FaultyBackend

from .ctrl_c import Interrupting
from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw, stack, vector_batches
from .runs import assert_same_bits, refused

SETUPS = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_PLACE), ids=lambda setup: setup.name)


def keeping(device: str, folder: Path) -> offload.Config:
    """Small parameters stay in memory between steps, as with DeepSpeed."""
    tier = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    sections = {"stage": 3, "offload_param": tier, "stage3_param_persistence_threshold": 1000}
    return as_there(translate({"zero_optimization": sections}, 1))


class Named(nn.Module):
    """Beside blocks: a buffer that is held twice, a tied weight, a frozen parameter, one that is not contiguous, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack(blocks=2)
        self.body.outlet.weight = self.body.inlet.weight
        self.body.blocks[0].up.weight.requires_grad = False
        self.turned = nn.Parameter(torch.randn(16, 8).t())
        self.lstm = nn.LSTM(16, 16)
        self.register_buffer("mean", torch.arange(16.0))
        self.register_buffer("scale", torch.ones(16), persistent=False)
        self.body.again = self.mean
        self.turned.mark = "mine"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x * self.scale + self.mean)
        return self.body(x) + (self.turned @ x.t()).sum()  # type: ignore[no-any-return]

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)  # type: ignore[no-any-return]


def in_memory() -> Any:
    """A model with gradients, a hook of the user's and an optimizer that has stepped."""
    torch.manual_seed(3)
    model = Named()
    model.body.register_forward_hook(lambda *_: None)
    model.turned.register_hook(lambda gradient: gradient)
    optimizer = adamw(model)
    x, y = vector_batches(1)[0]
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return model, optimizer


def deferred() -> Any:
    torch.manual_seed(3)
    with offload.deferred_init():
        model = Named()
    model.body.register_forward_hook(lambda *_: None)
    return model, adamw(model)


def photo(model: nn.Module, optimizer: Any) -> Any:
    """Everything of both that a user could look at."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state()}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        seen[fqn] = [
            (id(parameter), type(parameter), parameter.requires_grad, parameter.dtype, str(parameter.device)),
            (parameter.stride(), sorted(parameter.__dict__.items()), len(parameter._backward_hooks or ())),
            (len(parameter._post_accumulate_grad_hooks or ()), parameter._version, len(weakref.getweakrefs(parameter))),
            is_deferred(parameter) if parameter.is_meta else (parameter.detach().clone(), parameter.data_ptr()),
            None if parameter.grad is None else (id(parameter.grad), parameter.grad.clone()),
        ]
    for name, module in model.named_modules():
        hooks = [len(content) for key, content in vars(module).items() if key.endswith("_hooks")]
        held = {key: (id(buffer), buffer.clone()) for key, buffer in module._buffers.items() if buffer is not None}
        seen[f"module {name}"] = [hooks, held, sorted(map(str, vars(module)))]
    state = {
        index: dict(optimizer.state.get(p, {})) for group in optimizer.param_groups for index, p in enumerate(group["params"])
    }
    hooks = len(optimizer._optimizer_step_pre_hooks)
    seen["optimizer"] = [state, [id(p) for group in optimizer.param_groups for p in group["params"]], hooks]
    seen["groups"] = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return seen


def trained(model: nn.Module, optimizer: Any, config: Any, **given: Any) -> Any:
    with offload.initialize(model, optimizer, config, **given) as engine:
        losses = []
        for x, y in vector_batches(3):
            engine.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            engine.step()
            losses.append(loss.item())
        return losses, engine.state_dict()


@pytest.mark.parametrize(
    ("setup", "build"),
    [(IN_MEMORY, in_memory), (ON_CPU, deferred), (ON_NVME, in_memory), (ON_NVME_IN_PLACE, deferred)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_an_interrupt_anywhere(nvme: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, build: Callable[[], Any]) -> None:
    """The same model after each, so that what one would leave behind the next would find. Half of the times a second
    interrupt comes while what was taken is given back."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    config = offload.Config(**setup.fields(nvme))
    expected = trained(*build(), config)
    model, optimizer = build()
    with Interrupting() as counting:
        engine = offload.initialize(model, optimizer, config)
    engine.close()
    last = counting.line_count - 300  # a first time makes classes and tables that later ones find

    model, optimizer = build()
    before = photo(model, optimizer)
    draw = random.Random(7)
    moments = [*range(last - 460, last, 46), *draw.sample(range(1, last), 8)]
    again = 0
    for position, at in enumerate(moments):
        with pytest.raises(KeyboardInterrupt), Interrupting(at, undoing_at=draw.randrange(1, 150) * (position % 2)) as coming:
            offload.initialize(model, optimizer, config)
        again += coming.came_again
        assert_same_bits(photo(model, optimizer), before, f"line {at}")
    assert again > 1
    assert_same_bits(trained(model, optimizer, config), expected)


@pytest.mark.parametrize("within", ["_without_weak_references", "refer_to_own_weights"])
def test_an_interrupt_where_weak_references_are_away(nvme: Path, within: str) -> None:
    """A recurrent module keeps weak references to its own weights, which are gone while those are swapped."""
    config = offload.Config(**ON_CPU.fields(nvme))
    model, optimizer = deferred()
    before = photo(model, optimizer)
    for at in range(1, 7):
        with pytest.raises(KeyboardInterrupt), Interrupting(at, within):
            offload.initialize(model, optimizer, config)
        assert_same_bits(photo(model, optimizer), before, f"line {at}")


@pytest.mark.parametrize("within", ["_take", "library_models", "begin", "bring_persistent", "bring", "initialize"])
@pytest.mark.parametrize("build", [in_memory, deferred])
def test_an_interrupt_behind_the_last_hook(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any], within: str
) -> None:
    """Also when what is in memory from the start on has come, and while somebody holds the error. Only as `initialize` returns
    it is too late."""
    import accelerate  # noqa: F401 - a model is marked for it where a script has it

    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    config = keeping("cpu", nvme)
    with Interrupting(within=within) as counting:
        engine = offload.initialize(*build(), config)
    engine.close()
    model, optimizer = build()
    before = photo(model, optimizer)
    assert counting.line_count > 1
    for at in range(1, counting.line_count + (within != "initialize")):
        with pytest.raises(KeyboardInterrupt) as error, Interrupting(at, within):
            offload.initialize(model, optimizer, config)
        assert_same_bits(photo(model, optimizer), before, f"line {at}")
        assert error.value.__traceback__ is not None
    assert_same_bits(trained(model, optimizer, config), trained(*build(), config))


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_what_is_in_memory_from_the_start_on_cannot_be_read(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    config, well = keeping("nvme", nvme), FaultyBackend()
    expected = trained(*in_memory(), config)
    drive_is(monkeypatch, well)
    offload.initialize(*in_memory(), config).close()
    first = min(moved.index for moved in well.log if moved.kind == "read")
    model, optimizer = in_memory()
    before = photo(model, optimizer)
    drive_is(monkeypatch, FaultyBackend(faults={first: Fault("errno", errno.EIO)}))
    with refused(offload.StorageError, "Input/output error"):
        offload.initialize(model, optimizer, config)
    assert_same_bits(photo(model, optimizer), before)
    drive_is(monkeypatch, FaultyBackend())
    assert_same_bits(trained(model, optimizer, config), expected)


@pytest.mark.parametrize("build", [in_memory, deferred])
def test_a_full_disk(nvme: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]) -> None:
    config = offload.Config(**ON_NVME.fields(nvme))
    expected = trained(*build(), config)
    backend = FaultyBackend()
    drive_is(monkeypatch, backend)
    model, optimizer = build()
    offload.initialize(model, optimizer, config).close()
    model, optimizer = build()
    before, threads = photo(model, optimizer), threading.active_count()
    for index in range(0, backend.submitted_count, 3):
        drive_is(monkeypatch, FaultyBackend(faults={index: Fault("errno", errno.ENOSPC)}))
        with refused(offload.StorageError, str(nvme)):
            offload.initialize(model, optimizer, config)
        assert_same_bits(photo(model, optimizer), before)
        assert not list(nvme.iterdir()) and threading.active_count() == threads
    monkeypatch.undo()
    assert_same_bits(trained(model, optimizer, config), expected)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, _ = in_memory()
    state = {name: value.contiguous() + 1 for name, value in model.state_dict().items() if "outlet.weight" not in name}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@SETUPS
def test_weights_that_cannot_be_read(nvme: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
    config = offload.Config(**setup.fields(nvme))
    expected = trained(*deferred(), config, weights=saved)
    for build in (in_memory, deferred):
        model, optimizer = build()
        before = photo(model, optimizer)
        for readable_count in (0, 1, 7, 20):
            left = iter(range(readable_count))

            def until_gone(name: str, file: Path, left: Any = left) -> None:
                if next(left, None) is None:
                    file.rename(saved.with_suffix(".gone"))

            with monkeypatch.context() as patch, refused(offload.InitializerError, "model.safetensors"):
                before_each_weight(patch, until_gone)
                offload.initialize(model, optimizer, config, weights=saved)
            saved.with_suffix(".gone").rename(saved)
            assert_same_bits(photo(model, optimizer), before)
    assert_same_bits(trained(model, optimizer, config, weights=saved), expected)


def test_budgets_and_second_failures(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first failure is dealt with, another comes: the first is raised, the second is a warning."""
    model, optimizer = in_memory()
    before = photo(model, optimizer)
    with refused(offload.BudgetError, "cpu_memory"):
        offload.initialize(model, optimizer, offload.Config(parameters="cpu", optimizer_states="cpu", cpu_memory=1000))
    assert_same_bits(photo(model, optimizer), before)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for hooks")

    class ClosesBadly(FaultyBackend):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, "closing")

    config = offload.Config(**ON_NVME.fields(nvme))
    with monkeypatch.context() as patch:
        patch.setattr(nn.LSTM, "register_forward_pre_hook", fail)
        drive_is(patch, ClosesBadly())
        with pytest.raises(MemoryError, match="no room"), pytest.warns(RuntimeWarning, match="closing"):
            offload.initialize(model, optimizer, config)
    assert_same_bits(photo(model, optimizer), before)
    assert_same_bits(trained(model, optimizer, config), trained(*in_memory(), config))


def test_what_can_be_known_is_refused_before_anything_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta model with a buffer that files of weights do not hold; an optimizer's state that is not whole."""
    read: list[str] = []
    before_each_weight(monkeypatch, lambda name, file: read.append(name))
    with torch.device("meta"):
        model = Named()
    with refused(offload.ConfigError, "'scale'", "deferred_init"):
        offload.initialize(model, adamw(model), weights=saved)
    model.scale = torch.ones(16)
    assert not read and all(parameter.is_meta for parameter in model.parameters())
    config = offload.Config(parameters="cpu", optimizer_states="cpu")
    expected = trained(*deferred(), config, weights=saved)
    assert_same_bits(trained(model, adamw(model), config, weights=saved), expected)

    read.clear()
    for change, word in (
        (lambda state: state.pop("exp_avg"), "exp_avg"),
        (lambda state: state.update(exp_avg=torch.ones(3)), "[3]"),
    ):
        model, optimizer = in_memory()
        change(optimizer.state[model.turned])
        before = photo(model, optimizer)
        with refused(offload.ConfigError, "turned", word):
            offload.initialize(model, optimizer, weights=saved)
        assert_same_bits(photo(model, optimizer), before)
    assert not read


def test_a_parameter_of_a_class_and_attributes_of_its_own_keeps_them() -> None:
    class Own(nn.Parameter):
        pass

    with offload.deferred_init():
        model = stack(blocks=1)
        model.inlet.weight = Own(torch.ones(16, 16))
        model.inlet.weight.mark = "mine"  # type: ignore[attr-defined]
    with offload.initialize(model, adamw(model)):
        pass
    assert type(model.inlet.weight) is Own and model.inlet.weight.mark == "mine"


def test_what_keeps_a_meta_parameter_from_getting_memory_is_said() -> None:
    with offload.deferred_init():
        model = stack(blocks=1)
    reference = weakref.ref(model.outlet.bias)
    before = photo(model, optimizer := adamw(model))
    with refused(offload.InitializerError, "outlet.bias", "weakref"):
        offload.initialize(model, optimizer)
    assert_same_bits(photo(model, optimizer), before)
    del reference
    offload.initialize(model, optimizer).close()


def test_a_device_that_ranks_cannot_talk_between_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = in_memory()
    before, given_back = photo(model, optimizer), list[Accelerator]()

    def counted(kind: type[Accelerator]) -> type[Accelerator]:
        def close(self: Accelerator) -> None:
            given_back.append(self)
            kind.close(self)

        return type(kind.__name__, (kind,), {"close": close})

    def fail(*_: object) -> None:
        raise RuntimeError("no link between devices")

    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    computed_on(monkeypatch, CpuAccelerator, counted)
    with monkeypatch.context() as patch:
        patch.setattr(Alone, "use_devices", fail)
        with refused(RuntimeError, "no link"):
            offload.initialize(model, optimizer)
    assert len(given_back) == 1
    assert_same_bits(photo(model, optimizer), before)
