# SPDX-License-Identifier: Apache-2.0
"""engine.gathered and the engine's clipping."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from tests.crosses import in_turn

from .guards import block_weight, check, everywhere, other_state
from .models import PLACEMENTS, Setup, adamw, byte_batches, llama, stack, two_groups, vector_batches
from .runs import Run, assert_close, assert_same_bits, run_engine, simple_loop


# Each placement; beside a device and in place, where the two differ, are the tests below and test_update_loops.py.
@pytest.mark.parametrize(("parameters", "states", "accelerator"), in_turn(PLACEMENTS, ("deferred", "cpu")))
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


# As reading is.
@pytest.mark.parametrize(("parameters", "states", "accelerator"), in_turn(PLACEMENTS, ("deferred", "cpu")))
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
            run.model.load_state_dict(other_state(run))

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
