# SPDX-License-Identifier: Apache-2.0
"""Generation, many forwards in a row: what was fetched for one stays for the next, as much as the memory granted holds."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

import offload

from .models import IN_MEMORY, ON_NVME, ON_NVME_IN_PLACE, byte_batches, llama
from .runs import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 6
BUDGET = 440_000


def begun(opened: Any, setup: Any, **fields: Any) -> tuple[Any, Any]:
    """A model after a step, and its engine."""
    torch.manual_seed(0)
    model = llama()
    engine = opened(model, torch.optim.AdamW(model.parameters(), lr=0.01), setup, **fields)
    step(engine, model)
    engine.stats()
    return model, engine


def step(engine: Any, model: Any) -> float:
    [tokens] = byte_batches(1)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    engine.step()
    engine.zero_grad()
    return float(loss)


def generated(model: Any, generate: Any = None) -> torch.Tensor:
    prompt = byte_batches(1)[0][:, :8]
    tokens: torch.Tensor = (generate or model.generate)(prompt, max_new_tokens=TOKENS, do_sample=False, min_new_tokens=TOKENS)
    return tokens


def read_nbytes(engine: Any) -> int:
    return int(engine.stats()["links"]["nvme read"]["nbytes"])


@pytest.mark.parametrize("setup", [ON_NVME, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)
def test_weights_are_read_once(opened: Any, setup: Any) -> None:
    plain, other = begun(opened, IN_MEMORY)
    model, engine = begun(opened, setup, update="step")
    engine.state_dict()  # the last update is over
    read_nbytes(engine)
    parameters = sum(unit["nbytes"] for unit in engine.stats()["units"])
    expected = generated(plain)
    assert torch.equal(generated(model), expected)
    assert 0 < read_nbytes(engine) <= parameters
    assert torch.equal(generated(model, lambda *args, **fields: type(model).generate(model, *args, **fields)), expected)
    assert read_nbytes(engine) > (TOKENS - 3) * parameters  # without: nearly all of them for each token
    with engine.resident(), torch.no_grad():
        for tokens in byte_batches(4):
            model(input_ids=tokens)
    assert read_nbytes(engine) <= parameters
    assert step(engine, model) == step(other, plain)
    assert_same_bits(engine.state_dict(), other.state_dict())


def test_generation_inside_leaves_what_stays(opened: Any) -> None:
    """`generate` makes units stay by itself: what stayed before goes on to."""
    model, engine = begun(opened, ON_NVME, update="step")
    engine.state_dict()
    parameters = sum(unit["nbytes"] for unit in engine.stats()["units"])
    with engine.resident():
        for _ in range(3):
            generated(model)
            with torch.no_grad():
                model(input_ids=byte_batches(1)[0])
        assert 0 < read_nbytes(engine) <= parameters
    read_nbytes(engine)
    generated(model, lambda *args, **fields: type(model).generate(model, *args, **fields))
    assert read_nbytes(engine) > (TOKENS - 3) * parameters, "they stay after the block"


def test_methods_that_were_set_on_the_model(opened: Any, tmp_path: Path) -> None:
    """As some libraries do. `forward` is called as ever, weights are read once for `generate` too, and each is the model's
    again when the engine is closed; a `save_pretrained` of one's own is told how it gets at the values."""
    plain, other = begun(opened, IN_MEMORY)
    torch.manual_seed(0)
    model, calls = llama(), list[str]()

    def noted(name: str) -> Any:
        own = getattr(model, name)

        def method(self: Any, *args: Any, **fields: Any) -> Any:
            calls.append(name)
            return own(*args, **fields)

        return MethodType(method, model)

    mine = {name: noted(name) for name in ("forward", "generate", "save_pretrained")}
    for name, method in mine.items():
        setattr(model, name, method)
    engine = opened(model, torch.optim.AdamW(model.parameters(), lr=0.01), ON_NVME, update="step")
    step(engine, model)
    engine.state_dict()
    read_nbytes(engine)
    parameters = sum(unit["nbytes"] for unit in engine.stats()["units"])
    assert torch.equal(generated(model), generated(plain))
    assert 0 < read_nbytes(engine) <= parameters
    assert calls == ["forward", "generate", *["forward"] * TOKENS]
    assert step(engine, model) == step(other, plain)
    assert_same_bits(engine.state_dict(), other.state_dict())
    with pytest.raises(offload.ParameterAccessError, match=r"engine\.export"):
        model.save_pretrained(tmp_path / "saved")
    engine.close()
    assert {name: vars(model)[name] for name in mine} == mine


def test_a_budget_is_kept(opened: Any) -> None:
    plain, other = begun(opened, IN_MEMORY)
    model, engine = begun(opened, ON_NVME, device_memory=BUDGET, update="step")
    for _ in range(2):
        assert torch.equal(generated(model), generated(plain))
        assert step(engine, model) == step(other, plain)
    stats = engine.stats()
    planned = sum(line["nbytes"] for line in stats["planned"] if line["tier"] == "device")
    assert stats["resident_peak_nbytes"] <= planned <= BUDGET
    assert_same_bits(engine.state_dict(), other.state_dict())


def test_training_inside_is_as_outside(opened: Any) -> None:
    """New values take the place of what stayed."""
    plain, other = begun(opened, IN_MEMORY)
    model, engine = begun(opened, ON_NVME)
    with engine.resident():
        for _ in range(3):
            assert torch.equal(generated(model), generated(plain))
            assert step(engine, model) == step(other, plain)
        engine.state_dict()
    assert_same_bits(engine.state_dict(), other.state_dict())
