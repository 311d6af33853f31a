"""What a user's loop does to parameters and gradients behind the engine's back: right, or told how; never silence.

Every case runs in plain PyTorch too. Where the engine raises, the message must hold one of the words that lead on, the
operation must have had no effect, and training must go on as if it had not been called. Where it does not raise, the
run must equal plain PyTorch's with the operation.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from .models import (
    IN_MEMORY,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    PLACEMENTS,
    Run,
    Setup,
    adamw,
    assert_close,
    assert_same_bits,
    byte_batches,
    llama,
    run_engine,
    simple_loop,
    stack,
    two_groups,
    vector_batches,
)

SETUPS = (IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME)
everywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)

READ = ("gathered", "state_dict")
WRITE = ("gathered",)
CLIPPING = ("max_grad_norm", "clip_grad_norm_")
SCALING = ("loss_scale", "engine.backward")
GRADIENT = ("gathered", "grad_norm", "clip_grad_norm_", "max_grad_norm", "engine.", "hook")


@dataclass
class Probe:
    """Calls an operation as a user would, and remembers whether it was told off."""

    run: Run
    words: tuple[str, ...]
    told: list[str] = field(default_factory=list)

    def __call__(self, operation: Callable[[Run], Any]) -> Any:
        """The operation's value, or None if it raised an error that leads on."""
        try:
            return operation(self.run)
        except (offload.OffloadError, RuntimeError) as error:
            if self.run.engine is None:
                raise
            assert any(word in str(error) for word in self.words), f"does not say what to do: {error!r}"
            self.told.append(str(error))
            return None


def check(
    opened: Any,
    setup: Setup,
    operation: Callable[[Run], Any],
    words: tuple[str, ...],
    when: str,
    steps: int = 6,
    optimizer: Callable[[nn.Module], Any] = adamw,
    build: Callable[[], nn.Module] = stack,
) -> bool:
    """Whether the operation was allowed. `when`: before the step's forward, after backward, or after step."""
    batches = vector_batches(steps)

    def loop(probe: Probe, applies: bool) -> tuple[list[Any], list[float]]:
        run, values, losses = probe.run, [], []
        for step, (x, y) in enumerate(batches):

            def poke(now: str, step: int = step) -> None:
                if applies and now == when and step in (2, 4):
                    values.append(probe(operation))

            poke("before forward")
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            poke("after backward")
            probe(lambda run: run.optimizer.step())
            poke("after step")
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return values, losses

    model = build()
    engine = opened(model, optimizer(model), setup)
    probe = Probe(Run(model, engine.optimizer, engine), words)
    try:
        values, losses = loop(probe, True)
        weights = probe.run.weights()
    except offload.OffloadError as error:
        # A refusal that came late, at the step that could not be right: then everything after it must refuse as well.
        assert any(word in str(error) for word in words), f"does not say what to do: {error!r}"
        return False
    allowed = not probe.told
    assert allowed or len(probe.told) >= 1
    plain = build()
    reference = Run(plain, optimizer(plain))
    expected, expected_losses = loop(Probe(reference, ()), allowed)
    if allowed:
        assert_close(values, expected, what="values")
    else:
        assert all(value is None for value in values), "raised at one step and passed at another"
    assert_close(losses, expected_losses, what=f"losses, the operation being {'allowed' if allowed else 'refused'}")
    assert_close(
        weights, reference.weights(), what=f"weights, the operation being {'allowed' if allowed else 'refused'}"
    )
    return allowed


def block_weight(run: Run) -> nn.Parameter:
    return run.model.blocks[1].up.weight


# --- reading values -------------------------------------------------------------------------------------------------


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


@everywhere
@pytest.mark.parametrize("when", ["before forward", "after backward", "after step"])
@pytest.mark.parametrize("name", READS)
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


# --- writing values -------------------------------------------------------------------------------------------------


def _no_grad(write: Callable[[Run], Any]) -> Callable[[Run], None]:
    def operation(run: Run) -> None:
        with torch.no_grad():
            write(run)

    return operation


def _other_state(run: Run) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    return {name: torch.randn(v.shape, generator=draw) * 0.2 for name, v in stack().state_dict().items()}


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
    "load_state_dict": lambda run: run.model.load_state_dict(_other_state(run)),
    "load part": lambda run: (
        run.model.inlet.load_state_dict({"weight": torch.eye(16) * 0.3, "bias": torch.zeros(16)})
    ),
    "vector": _no_grad(
        lambda run: nn.utils.vector_to_parameters(
            torch.linspace(-0.2, 0.2, sum(p.numel() for p in run.model.parameters())), run.model.parameters()
        )
    ),
}


def _value_free(operation: Callable[[Run], Any]) -> Callable[[Run], None]:
    """Only the effect of a write is compared, never what it returns."""

    def write(run: Run) -> None:
        operation(run)

    return write


@everywhere
@pytest.mark.parametrize("when", ["before forward", "after step"])
@pytest.mark.parametrize("name", WRITES)
def test_writing(opened: Any, setup: Setup, name: str, when: str) -> None:
    operation = _value_free(WRITES[name])
    words = (*WRITE, "load_state_dict", "load_checkpoint", "weights=") if "load" in name else WRITE
    plain = stack()
    before = copy.deepcopy(plain.state_dict())
    operation(Run(plain, None))
    assert any(not torch.equal(before[key], plain.state_dict()[key]) for key in before), "this write writes nothing"
    check(opened, setup, operation, words, when)


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


# --- gradients ------------------------------------------------------------------------------------------------------


def _clip(run: Run) -> float:
    return torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05).item()


def _clip_values(run: Run) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)


def _grad_of(run: Run) -> torch.Tensor:
    grad = block_weight(run).grad
    assert grad is not None, "p.grad is None after backward: a loop that asks `if p.grad is not None` would be misled"
    return grad


def _halve(run: Run) -> None:
    _grad_of(run).mul_(0.25)


def _assign(run: Run) -> None:
    block_weight(run).grad = torch.full((48, 16), 0.5)


def _drop(run: Run) -> None:
    block_weight(run).grad = None


def _norm_of_all(run: Run) -> float:
    return sum(p.grad.norm().item() ** 2 for p in run.model.parameters() if p.grad is not None) ** 0.5


GRADIENT_CASES: dict[str, tuple[Callable[[Run], Any], tuple[str, ...]]] = {
    "clip_grad_norm_": (_clip, CLIPPING),
    "clip_grad_value_": (_clip_values, (*CLIPPING, *GRADIENT)),
    "read": (lambda run: _grad_of(run).clone(), GRADIENT),
    "norm": (lambda run: _grad_of(run).norm().item(), GRADIENT),
    "norm of all that are not None": (_norm_of_all, GRADIENT),
    "write": (_halve, GRADIENT),
    "assign": (_assign, GRADIENT),
    "assign None": (_drop, (*GRADIENT, "zero_grad")),
    "zero_grad of the model": (lambda run: run.model.zero_grad(), ("optimizer.zero_grad", "engine.")),
    "zero_grad of the optimizer": (lambda run: run.optimizer.zero_grad(), ()),
    "zero_grad of a block": (lambda run: run.model.blocks[1].zero_grad(), ("optimizer.zero_grad", "engine.")),
    "zeros by zero_grad": (lambda run: run.optimizer.zero_grad(set_to_none=False), ("set_to_none",)),
    "zeros by the model": (lambda run: run.model.zero_grad(set_to_none=False), ("set_to_none", "optimizer.zero_grad")),
}


@everywhere
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_between_backward_and_step(opened: Any, setup: Setup, name: str) -> None:
    operation, words = GRADIENT_CASES[name]
    check(opened, setup, operation, words, "after backward")


@everywhere
def test_a_gradient_assigned_without_backward(opened: Any, setup: Setup) -> None:
    """In torch the next step applies it (with the gradients of backward added to it)."""
    check(opened, setup, _assign, GRADIENT, "before forward")


@everywhere
def test_a_loop_that_zeroes_only_by_the_model(opened: Any, setup: Setup) -> None:
    """model.zero_grad() instead of optimizer.zero_grad(), with a backward that is thrown away by it."""
    batches = vector_batches(5)

    def loop(run: Run) -> None:
        for x, y in batches:
            F.mse_loss(run.model(y), x).backward()
            run.model.zero_grad()
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.model.zero_grad()

    plain, model = stack(), stack()
    loop(Run(plain, adamw(plain)))
    engine = opened(model, adamw(model), setup)
    try:
        _, weights = run_engine(engine, loop)
    except (offload.OffloadError, RuntimeError) as error:
        assert "zero_grad" in str(error), error
        return
    assert_close(weights, plain.state_dict())


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for block in list(self.blocks)[:count]:
            x = torch.tanh(block(x))
        return x


@everywhere
def test_zeroed_gradients_are_gradients(opened: Any, setup: Setup) -> None:
    """With set_to_none=False an unused parameter has a gradient of zeros: torch decays and moves it. Or it is told."""
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for step, (x, y) in enumerate(batches):
            F.mse_loss(run.model(x, 1 + step % 3), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)

    torch.manual_seed(1)
    plain = _Sparse()
    model = copy.deepcopy(plain)
    loop(Run(plain, adamw(plain)))
    engine = opened(model, adamw(model), setup)
    try:
        _, weights = run_engine(engine, loop)
    except (offload.OffloadError, RuntimeError) as error:
        assert "set_to_none" in str(error), error
        return
    assert_close(weights, plain.state_dict())


@everywhere
def test_a_users_gradient_hook(opened: Any, setup: Setup) -> None:
    """Hooks on a parameter, registered before or after initialize, scale what the optimizer sees."""
    batches = vector_batches(4)

    def loop(run: Run) -> list[float]:
        seen: list[float] = []
        run.model.outlet.weight.register_hook(lambda grad: grad * 0.25)
        run.model.inlet.weight.register_hook(lambda grad: seen.append(grad.norm().item()))
        for x, y in batches:
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return seen

    plain, model = stack(), stack()
    for one in (plain, model):
        one.blocks[1].up.weight.register_hook(lambda grad: grad * 3.0)
    expected = loop(Run(plain, adamw(plain)))
    assert len(expected) == 4
    seen, weights = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(seen, expected)
    assert_close(weights, plain.state_dict())


@everywhere
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(opened: Any, setup: Setup, unscale: bool) -> None:
    batches = vector_batches(5)

    def loop(run: Run) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for x, y in batches:
            scaler.scale(F.mse_loss(run.model(x), y)).backward()
            if unscale:
                scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    plain, model = stack(), stack()
    expected = loop(Run(plain, adamw(plain)))
    engine = opened(model, adamw(model), setup)
    try:
        scales, weights = run_engine(engine, loop)
    except (offload.OffloadError, RuntimeError) as error:
        assert any(word in str(error) for word in (*SCALING, *CLIPPING)), error
        return
    assert_close(scales, expected)
    assert_close(weights, plain.state_dict())


@everywhere
@pytest.mark.parametrize("enabled", [False])
def test_a_disabled_grad_scaler_is_nothing(opened: Any, setup: Setup, enabled: bool) -> None:
    batches = vector_batches(4)

    def loop(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for x, y in batches:
            scaler.scale(F.mse_loss(run.model(x), y)).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    plain, model = stack(), stack()
    loop(Run(plain, adamw(plain)))
    _, weights = run_engine(opened(model, adamw(model), setup), loop)
    assert_close(weights, plain.state_dict())


@everywhere
def test_fp16_with_the_losss_own_backward(opened: Any, setup: Setup) -> None:
    """The engine un-scales fp16 gradients; a loss that was not scaled by it must not be un-scaled in silence."""
    model, twin = stack(), stack()
    engine = opened(model, adamw(model), setup, dtype="fp16", loss_scale=64.0)
    other = opened(twin, adamw(twin), IN_MEMORY, dtype="fp16", loss_scale=64.0)
    for x, y in vector_batches(4):
        for one, backward in ((engine, None), (other, other.backward)):
            loss = F.mse_loss(one.module(x.half()).float(), y)
            if backward is not None:
                backward(loss)
            else:
                try:
                    loss.backward()
                    one.step()
                except (offload.OffloadError, RuntimeError) as error:
                    assert "engine.backward" in str(error), error
                    return
                one.optimizer.zero_grad()
                continue
            one.step()
            one.optimizer.zero_grad()
    assert_close(engine.state_dict(), other.state_dict(), 1e-3)


# --- optimizers -----------------------------------------------------------------------------------------------------


@everywhere
def test_the_optimizers_state_dict(opened: Any, setup: Setup) -> None:
    """Moments and step counts as torch's, or told; an empty state would be silence."""

    def operation(run: Run) -> Any:
        state = run.optimizer.state_dict()
        assert len(state["state"]) == len(list(run.model.parameters())), "the optimizer's state is not whole"
        return [
            [float(one["step"]), one["exp_avg"].clone(), one["exp_avg_sq"].clone()]
            for _, one in sorted(state["state"].items())
        ] + [group["lr"] for group in state["param_groups"]]

    check(opened, setup, operation, ("save_checkpoint", "state_dict"), "after step")


@everywhere
def test_the_optimizers_load_state_dict(opened: Any, setup: Setup) -> None:
    def operation(run: Run) -> None:
        donor = stack()
        optimizer = adamw(donor, lr=5e-3)
        simple_loop(3)(Run(donor, optimizer))
        run.optimizer.load_state_dict(optimizer.state_dict())

    check(opened, setup, operation, ("load_checkpoint", "initialize"), "after step")


@everywhere
def test_the_optimizers_state_by_parameter(opened: Any, setup: Setup) -> None:
    def operation(run: Run) -> Any:
        assert block_weight(run) in run.optimizer.state or run.engine is not None
        return run.optimizer.state[block_weight(run)]["exp_avg"].clone()

    check(opened, setup, operation, ("save_checkpoint", "state_dict"), "after step")


@everywhere
def test_the_users_first_optimizer(opened: Any, setup: Setup) -> None:
    """Stepping the optimizer that was given to initialize, not engine.optimizer: right or told, never nothing."""
    batches = vector_batches(4)
    plain, model = stack(), stack()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    engine = opened(model, optimizer, setup)
    for x, y in batches:
        F.mse_loss(plain(x), y).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        try:
            optimizer.step()
            optimizer.zero_grad()
        except (offload.OffloadError, RuntimeError) as error:
            assert "engine.optimizer" in str(error) or "engine.step" in str(error), error
            return
    assert_close(engine.state_dict(), plain.state_dict())


@everywhere
def test_the_optimizer_is_one(opened: Any, setup: Setup) -> None:
    model = stack()
    mine = two_groups(model)
    groups = [dict(group) for group in mine.param_groups]
    engine = opened(model, mine, setup)
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    for ours, before in zip(engine.optimizer.param_groups, groups, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in before["params"]]
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in before.items() if k != "params"}


# --- gathered -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize(("parameters", "states"), PLACEMENTS)
def test_reading_within_gathered(opened: Any, parameters: str, states: str, accelerator: str) -> None:
    setup = Setup(parameters, states, accelerator)

    def operation(run: Run) -> Any:
        with run.gathered(run.model.blocks[1].parameters()):  # an iterator, as model.parameters() is
            part = {name: p.detach().clone() for name, p in run.model.blocks[1].named_parameters()}
            with run.gathered([block_weight(run)]):  # within another
                inner = block_weight(run).norm().item()
            after = block_weight(run).norm().item()  # the outer one still holds
        with run.gathered(list(run.model.parameters())):
            return [part, inner, after, [p.detach().clone() for p in run.model.parameters()]]

    for when in ("before forward", "after backward", "after step"):
        assert check(opened, setup, operation, (), when)


@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
@pytest.mark.parametrize(("parameters", "states"), PLACEMENTS)
def test_writing_within_gathered(opened: Any, parameters: str, states: str, accelerator: str) -> None:
    """It reaches the master: everything after it is as in torch with the same write, moments being kept."""
    setup = Setup(parameters, states, accelerator)

    def operation(run: Run) -> None:
        with run.gathered([block_weight(run), run.model.outlet.bias]), torch.no_grad():
            block_weight(run).mul_(0.5)
            block_weight(run)[3] = 0.25
            run.model.outlet.bias.copy_(torch.arange(16.0))

    for when in ("before forward", "after step"):
        assert check(opened, setup, operation, (), when)


@everywhere
def test_loading_within_gathered(opened: Any, setup: Setup) -> None:
    def operation(run: Run) -> None:
        with run.gathered(list(run.model.parameters())):
            run.model.load_state_dict(_other_state(run))

    assert check(opened, setup, operation, (), "after step")


@everywhere
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_writing_within_gathered_reaches_the_master_of_16_bit_weights(opened: Any, setup: Setup, dtype: str) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup, dtype=dtype)
    weight = model.blocks[1].up.weight
    untouched = engine.state_dict()["inlet.weight"]
    wanted = (torch.arange(48 * 16) % 17).reshape(48, 16).float() / 16  # exact in both dtypes
    with engine.gathered([weight, model.inlet.weight]), torch.no_grad():
        assert weight.dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
        weight.copy_(wanted)
    state = engine.state_dict()
    assert_same_bits(state["blocks.1.up.weight"], wanted)
    # What was gathered and not written keeps every bit of its fp32 master.
    assert_same_bits(state["inlet.weight"], untouched)
    with engine.gathered([weight]):
        assert_same_bits(weight.detach().float(), wanted)


@everywhere
def test_an_exception_within_gathered(opened: Any, setup: Setup) -> None:
    """The exception comes out as it is, and the engine goes on."""
    model, plain = stack(), stack()
    engine = opened(model, adamw(model), setup)
    with pytest.raises(ZeroDivisionError), engine.gathered(list(model.parameters())):
        raise ZeroDivisionError
    losses, weights = run_engine(engine, simple_loop(4))
    assert_close(losses, simple_loop(4)(Run(plain, adamw(plain))))
    assert_close(weights, plain.state_dict())


@everywhere
def test_gathered_refuses_what_is_not_a_parameter_of_the_model(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    with pytest.raises(offload.OffloadError), engine.gathered([nn.Parameter(torch.zeros(3))]):
        pass


@everywhere
def test_a_forward_within_gathered(opened: Any, setup: Setup) -> None:
    """Gathered parameters stay gathered over a forward that uses and would evict them."""
    model, plain = stack(), stack()
    engine = opened(model, adamw(model), setup)
    x = vector_batches(1)[0][0]
    with engine.gathered(list(model.parameters())), torch.no_grad():
        out = model(x)
        for name, p in model.named_parameters():
            assert_same_bits(p.detach().clone(), plain.get_parameter(name).detach(), name)
    assert_close(out, plain(x).detach())


# --- clipping by the engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@everywhere
def test_clip_grad_norm_of_the_engine(opened: Any, setup: Setup, dtype: str) -> None:
    """The call between backward and step is max_grad_norm, to the bit; it returns the norm before clipping."""
    results = []
    for by_call in (False, True):
        model = llama()
        fields = {} if by_call else {"max_grad_norm": 0.5}
        engine = opened(model, two_groups(model), setup, dtype=dtype, **fields)
        norms, losses = [], []
        for tokens in byte_batches(6):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if by_call:
                norms.append(float(engine.clip_grad_norm_(0.5)))
                assert float(engine.grad_norm) == norms[-1]
                engine.step()
            else:
                engine.step()
                norms.append(float(engine.grad_norm))
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        assert min(norms) > 0.5, "the clipping must strike"
        results.append([norms, losses, Run(model, engine.optimizer, engine).weights()])
        engine.close()
    assert_same_bits(results[1], results[0])


@everywhere
def test_the_norm_is_torchs(opened: Any, setup: Setup) -> None:
    model, plain = stack(), stack()
    engine = opened(model, adamw(model), setup)
    optimizer = adamw(plain)
    for x, y in vector_batches(4):
        F.mse_loss(plain(x), y).backward()
        F.mse_loss(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item()
        assert abs(float(engine.clip_grad_norm_(0.05)) - norm) < 1e-5 * norm
        for one in (optimizer, engine.optimizer):
            one.step()
            one.zero_grad()
    assert_close(engine.state_dict(), plain.state_dict())


@everywhere
def test_the_norm_over_accumulation_is_of_the_sum(opened: Any, setup: Setup) -> None:
    model, plain = stack(), stack()
    engine = opened(model, adamw(model), setup)
    for index, (x, y) in enumerate(vector_batches(3)):
        F.mse_loss(plain(x), y).backward()
        with engine.no_sync() if index == 0 else contextlib.nullcontext():
            F.mse_loss(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    assert abs(float(engine.clip_grad_norm_(1e9)) - norm) < 1e-5 * norm


def test_clip_grad_norm_with_an_update_that_has_begun(opened: Any) -> None:
    """With update="backward" the call comes too late for an update in place: it clips all the same, or it is told."""
    model, plain = stack(), stack()
    engine = opened(model, adamw(model), Setup("nvme", "nvme", "deferred", "backward"))
    optimizer = adamw(plain)
    for x, y in vector_batches(3):
        F.mse_loss(plain(x), y).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        try:
            engine.clip_grad_norm_(0.05)
        except offload.OffloadError as error:
            assert "max_grad_norm" in str(error)
            return
        engine.step()
        engine.optimizer.zero_grad()
    assert_close(engine.state_dict(), plain.state_dict())


@everywhere
def test_clipping_without_gradients(opened: Any, setup: Setup) -> None:
    """Before any backward torch's norm is 0; a stale norm of the last step would be wrong."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    simple_loop(2)(Run(model, engine.optimizer, engine))
    try:
        assert float(engine.clip_grad_norm_(1.0)) == 0.0
    except offload.OffloadError as error:
        assert "backward" in str(error)
