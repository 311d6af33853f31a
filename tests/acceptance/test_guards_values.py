# SPDX-License-Identifier: Apache-2.0
"""Reading and writing parameters behind the engine's back: right, or told how (see guards.py)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from tests.crosses import Row, crossed, in_pairs

from .guards import READ, SETUPS, WRITE, block_weight, check, everywhere, other_state
from .models import IN_MEMORY, ON_CPU_IN_PLACE, ON_NVME, Setup, adamw, stack, vector_batches
from .runs import Run, assert_close, assert_same_bits, run_engine, simple_loop


def _saved(run: Run) -> Any:
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def _copied(run: Run) -> Any:
    twin = copy.deepcopy(run.model)
    assert twin is not run.model
    out = twin(torch.ones(2, 16))
    out.sum().backward()  # a copy is a plain model: its gradients are its own
    return [dict(twin.state_dict()), out.detach(), [p.grad for p in twin.parameters()]]


READS: dict[str, Callable[[Run], Any]] = {
    "norm": lambda run: block_weight(run).norm().item(),
    "data": lambda run: block_weight(run).data.sum().item(),
    "detach.clone": lambda run: block_weight(run).detach().clone(),
    "numpy": lambda run: torch.from_numpy(block_weight(run).detach().numpy().copy()),
    "tolist": lambda run: block_weight(run).tolist(),
    "index": lambda run: block_weight(run)[3, 5].item(),
    "root": lambda run: run.model.inlet.weight.sum().item(),
    "bias": lambda run: run.model.blocks[2].down.bias.sum().item(),
    "repr": lambda run: repr(block_weight(run)).startswith("Parameter") and block_weight(run).detach()[0].tolist(),
    "view": lambda run: block_weight(run).view(-1)[:7].sum().item(),
    "double": lambda run: block_weight(run).double().sum().item(),
    "cpu.float": lambda run: block_weight(run).cpu().float().std().item(),
    "functional": lambda run: F.linear(torch.ones(1, 16), block_weight(run)).detach(),
    "copy into": lambda run: torch.empty(48, 16).copy_(block_weight(run).detach()),
    "sum of all": lambda run: [p.sum().item() for p in run.model.parameters()],
    "vector": lambda run: nn.utils.parameters_to_vector(run.model.parameters()).detach(),
    "pickle": lambda run: pickle.loads(pickle.dumps(block_weight(run))).detach(),
    "state_dict": lambda run: {name: value.clone() for name, value in run.model.state_dict().items()},
    "part of state_dict": lambda run: {n: v.clone() for n, v in run.model.blocks[0].state_dict().items()},
    "torch.save": _saved,
    "deepcopy": _copied,
}


MOMENTS = ("before forward", "after backward", "after step")


def _reads() -> list[Any]:
    """Quick: each read of a value that can be read where it lies, which is so after backward and in two places, and of one that
    cannot, at each moment. The rest of the cross is slow."""
    in_memory, on_cpu, in_place, on_nvme = range(len(SETUPS))
    before_forward, after_backward, after_step = range(len(MOMENTS))
    quick: set[Row] = set()
    for number in range(len(READS)):
        quick.add((number, (in_memory, in_place)[number % 2], after_backward))
        quick.add((number, (on_cpu, on_nvme)[number % 2], after_backward))
        quick.add((number, number % len(SETUPS), before_forward))
        quick.add((number, (number + 2) % len(SETUPS), after_step))
    return crossed((list(READS), SETUPS, MOMENTS), quick)


@pytest.mark.parametrize(("name", "setup", "when"), _reads())
def test_reading(opened: Any, setup: Setup, name: str, when: str) -> None:
    check(opened, setup, READS[name], READ, when)


@everywhere
def test_what_is_known_without_the_values_is_always_there(opened: Any, setup: Setup) -> None:
    def facts(run: Run) -> list[Any]:
        return [
            [name, tuple(p.shape), str(p.dtype), p.numel(), p.dim(), p.requires_grad, p.is_leaf, str(p.device), len(p)]
            for name, p in run.model.named_parameters()
        ]

    assert check(opened, setup, facts, (), "after step")


@everywhere
def test_values_kept_from_state_dict_do_not_turn_into_garbage(opened: Any, setup: Setup) -> None:
    """state_dict() hands out references: later reads give the weights of then or of now, or raise; never garbage."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    then = run.weights()
    try:
        kept = dict(model.state_dict())
    except (offload.OffloadError, RuntimeError) as error:
        assert any(word in str(error) for word in READ)
        return
    simple_loop(3)(run)
    now = run.weights()
    for name, value in kept.items():
        try:
            copied = value.clone()
        except (offload.OffloadError, RuntimeError) as error:
            assert any(word in str(error) for word in READ)
            continue
        assert torch.equal(copied, then[name]) or torch.equal(copied, now[name]), f"{name} is garbage"


@everywhere
def test_an_exponential_moving_average_by_hand(opened: Any, setup: Setup) -> None:
    """The commonest reader of all parameters after each step, done as it should be."""

    def averages(run: Run) -> dict[str, torch.Tensor]:
        with run.gathered(list(run.model.parameters())), torch.no_grad():
            return {name: p.detach() * 0.5 for name, p in run.model.named_parameters()}

    assert check(opened, setup, averages, (), "after step")


def _no_grad(write: Callable[[Run], Any]) -> Callable[[Run], None]:
    def operation(run: Run) -> None:
        with torch.no_grad():
            write(run)

    return operation


def _set_data(run: Run) -> None:
    block_weight(run).data = torch.full((48, 16), 0.03)


def _set_slice(run: Run) -> None:
    block_weight(run)[3] = 0.25


def _other_parameter(run: Run) -> torch.Tensor:
    return torch.linspace(-1, 1, 48 * 16).reshape(48, 16)


WRITES: dict[str, Callable[[Run], Any]] = {
    "data.add_": lambda run: block_weight(run).data.add_(0.1),
    "data.copy_": lambda run: block_weight(run).data.copy_(_other_parameter(run)),
    "data =": _set_data,
    "mul_": _no_grad(lambda run: block_weight(run).mul_(0.5)),
    "zero_": _no_grad(lambda run: block_weight(run).zero_()),
    "setitem": _no_grad(_set_slice),
    "copy_": _no_grad(lambda run: block_weight(run).copy_(_other_parameter(run))),
    "detach.add_": lambda run: block_weight(run).detach().add_(0.1),
    "init": lambda run: nn.init.constant_(block_weight(run), 0.02),
    "all": _no_grad(lambda run: [p.mul_(0.9) for p in run.model.parameters()]),
    "foreach": _no_grad(lambda run: torch._foreach_mul_(list(run.model.parameters()), 0.9)),
    "clamp_": _no_grad(lambda run: [p.clamp_(-0.05, 0.05) for p in run.model.blocks.parameters()]),
    "load_state_dict": lambda run: run.model.load_state_dict(other_state(run)),
    "load part": lambda run: run.model.inlet.load_state_dict({"weight": torch.eye(16) * 0.3, "bias": torch.zeros(16)}),
    "vector": _no_grad(
        lambda run: nn.utils.vector_to_parameters(
            torch.linspace(-0.2, 0.2, sum(p.numel() for p in run.model.parameters())), run.model.parameters()
        )
    ),
}


@lru_cache
def _value_free(operation: Callable[[Run], Any]) -> Callable[[Run], None]:
    """Only the effect of a write is compared, never what it returns."""

    def write(run: Run) -> None:
        operation(run)

    return write


# Each write meets the guard of each place, and each moment.
@pytest.mark.parametrize(("name", "setup", "when"), in_pairs(WRITES, SETUPS, ("before forward", "after step")))
def test_writing(opened: Any, setup: Setup, name: str, when: str) -> None:
    operation = _value_free(WRITES[name])
    words = (*WRITE, "load_state_dict", "load_checkpoint", "weights=") if "load" in name else WRITE
    plain = stack()
    before = copy.deepcopy(plain.state_dict())
    operation(Run(plain, None))
    assert any(not torch.equal(before[key], plain.state_dict()[key]) for key in before), "this write writes nothing"
    check(opened, setup, operation, words, when)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data[row]": lambda weight: weight.data[3].zero_(),
    "[row]": lambda weight: weight[3].zero_(),
    "detach": lambda weight: weight.detach().clamp_(-0.01, 0.01),
    "view": lambda weight: weight.view(-1)[5:9].fill_(1.0),
    "transposed": lambda weight: weight.T.mul_(0.5),
    "rows": lambda weight: [row.mul_(0.5) for row in weight.data],
    "chunk": lambda weight: weight.chunk(2)[1].mul_(0.5),
    "foreach": lambda weight: torch._foreach_mul_([weight.view(-1)], 0.5),
    "out": lambda weight: torch.mul(weight, 0.5, out=weight.view(48, 16)),
    "followed by autograd": lambda weight: nn.init.zeros_(_followed(weight)),
}


@torch.enable_grad()  # type: ignore[untyped-decorator]
def _followed(weight: torch.Tensor) -> torch.Tensor:
    rows = weight[2:4]
    assert rows.requires_grad
    return rows


@pytest.mark.parametrize("setup, fields", [(IN_MEMORY, {"dtype": "bf16"}), (Setup("device", "cpu", "deferred"), {})])
@pytest.mark.parametrize("name", VIEWS)
def test_writing_through_a_view(opened: Any, setup: Setup, fields: dict[str, Any], name: str) -> None:
    """The value is there to be read, but its master lies elsewhere."""
    model = stack()
    engine = opened(model, adamw(model), setup, **fields)
    weight = model.blocks[1].up.weight
    assert torch.equal(weight.detach().T[2].float(), weight.float()[:, 2])
    before, value = engine.state_dict(), weight.detach().clone()
    with torch.no_grad(), pytest.raises(offload.ParameterAccessError, match=r"'blocks\.1\.up\.weight' was written outside"):
        VIEWS[name](weight)
    assert_same_bits({"value": weight.detach()} | engine.state_dict(), {"value": value} | before)
    value.zero_()  # a copy is the user's own
    assert type(value) is type(model.state_dict()["blocks.1.up.weight"]) is torch.Tensor
    assert weight.detach().requires_grad_().requires_grad


@everywhere
@pytest.mark.parametrize("name", ["to(float64)", "half", "to(cpu)", "share_memory", "to_empty"])
def test_moving_the_model(opened: Any, setup: Setup, name: str) -> None:
    """to("cpu") changes nothing and may pass; the rest would take the parameters from under the engine."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    move: Callable[[], Any] = {
        "to(float64)": lambda: model.to(torch.float64),
        "half": lambda: model.half(),
        "to(cpu)": lambda: model.to("cpu"),
        "share_memory": lambda: model.share_memory(),
        "to_empty": lambda: model.to_empty(device="cpu"),
    }[name]
    simple_loop(2)(run)
    plain = stack()
    reference = Run(plain, adamw(plain))
    simple_loop(2)(reference)
    try:
        move()
        losses = simple_loop(3)(run)
    except (offload.OffloadError, RuntimeError) as error:
        assert any(word in str(error) for word in ("dtype", "initialize", "gathered", "device")), error
        assert isinstance(error, offload.OffloadError) or "offload" in str(error) or name != "to(cpu)"
        return
    assert name in ("to(cpu)", "share_memory"), f"{name} passed and training went on"
    assert_close(losses, simple_loop(3)(reference))
    assert_close(run.weights(), reference.weights())


LOST = r"has no value any more: .* closed"


def test_after_close_what_lay_in_a_tier(opened: Any, tmp_path: Path) -> None:
    """It says that its value is gone, and the model goes on from an export, to the bit."""
    model, in_memory = stack(), stack()
    engine = opened(model, adamw(model), ON_NVME)
    run_engine(engine, simple_loop(2))
    engine.export(tmp_path / "export")
    engine.close()
    weight = model.blocks[1].up.weight
    for read in (lambda: weight.sum(), lambda: model.state_dict()["inlet.weight"].clone(), lambda: model(torch.ones(1, 16))):
        with pytest.raises(offload.ParameterAccessError, match=LOST):
            read()
    with pytest.raises(offload.ParameterAccessError, match=LOST), torch.no_grad():
        weight.zero_()
    assert "its engine was closed" in repr(weight)
    again = adamw(model)
    with pytest.raises(offload.ConfigError, match=LOST):
        opened(model, again, ON_NVME)
    with pytest.raises(offload.BudgetError):
        opened(model, again, ON_NVME, weights=tmp_path / "export", cpu_memory=1)
    with pytest.raises(offload.ParameterAccessError, match=LOST):  # as it was before
        weight.sum()
    kept = opened(in_memory, adamw(in_memory), IN_MEMORY, weights=tmp_path / "export")
    found = run_engine(opened(model, again, ON_NVME, weights=tmp_path / "export"), simple_loop(3))
    assert model.blocks[1].up.weight is weight
    assert_same_bits(found, run_engine(kept, simple_loop(3)))


def test_after_close_a_model_takes_values_of_its_own(opened: Any) -> None:
    model = stack()
    engine = opened(model, adamw(model), ON_NVME)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    model.load_state_dict(state, assign=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model(torch.ones(1, 16)).sum().backward()


def test_after_close_nothing_keeps_what_is_dropped(nvme: Path) -> None:
    model = stack()
    offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(nvme))).close()
    gone = weakref.ref(model.blocks[1].up.weight)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU_IN_PLACE, ON_NVME], ids=lambda setup: setup.name)
def test_what_another_process_is_given_does_not_leave_the_engine(opened: Any, setup: Setup) -> None:
    """torch.multiprocessing exchanges a tensor's storage for shared memory: no update reached it there any more."""
    found = []
    for shares in (False, True):
        model = stack()
        engine = opened(model, adamw(model), setup)
        losses = []
        for index, (x, y) in enumerate(vector_batches(4)):
            if shares and index == 1 and setup is not ON_NVME:
                ForkingPickler.dumps(model.state_dict())
            if shares and index == 2:
                ForkingPickler.dumps(engine.state_dict())
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if shares and index == 1 and setup is not ON_NVME:
                with pytest.raises(offload.UsageError, match=r"'inlet.weight' was moved to shared memory.*engine.state_dict"):
                    engine.step()
                assert not model.inlet.weight.is_shared()
            engine.step()
            engine.zero_grad()
            losses.append(loss.item())
        found.append([losses, engine.state_dict()])
    assert_same_bits(*found)
