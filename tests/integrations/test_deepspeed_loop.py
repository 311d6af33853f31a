# SPDX-License-Identifier: Apache-2.0
"""Loops of DeepSpeed's users: whose backward it is, what a forward gives, where initialize stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from offload.deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn

import offload
import offload.deepspeed as deepspeed

from ..acceptance.runs import assert_same_bits, refused
from ..ranks.crew import Crew
from .conftest import small

HALF = {"fp16": {"enabled": True, "loss_scale": 128}}
Start = Callable[..., deepspeed.DeepSpeedEngine]


def data(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Pair(NamedTuple):
    loss: torch.Tensor
    rest: dict[str, Any]


class Told(nn.Module):
    """Gives its loss, and beside it what the loss was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: torch.Tensor) -> Pair:
        hidden = self.inner(x)
        return Pair(hidden.square().mean(), {"hidden": hidden, "all": [hidden, (hidden,)], "count": 3})


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_backward_of_the_scripts_own_counts_as_one_micro_batch(start: Start, dtype: str) -> None:
    """4 divides exactly: the same bits. Each path through the outputs is divided once."""
    config = {"gradient_accumulation_steps": 4, "train_batch_size": 12} | ({} if dtype == "fp32" else HALF)
    theirs, ours = start(config, model=Told()), start(config, model=Told())
    for index in range(8):
        given = theirs(data(index))
        theirs.backward(given.loss + given.rest["hidden"].mean())
        theirs.step()
        given = ours(data(index))
        assert given.rest["count"] == 3 and isinstance(given.rest["all"][1], tuple)
        loss = given.loss + given.rest["all"][1][0].mean()
        (ours.scale(loss) if dtype == "fp16" else loss).backward()
        ours.step()
        assert ours.get_global_grad_norm() == theirs.get_global_grad_norm()
    assert_same_bits(ours.module_state_dict(), theirs.module_state_dict())


def test_a_mapping_stays_what_it_was(start: Start) -> None:
    from transformers.modeling_outputs import CausalLMOutput

    class Named(Told):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.inner(x)
            return CausalLMOutput(loss=hidden.square().mean(), logits=hidden)

    engine = start({"gradient_accumulation_steps": 3}, model=Named())
    given = engine(data(0))
    assert isinstance(given, CausalLMOutput) and given.loss is given["loss"]
    given.loss.backward()
    engine.step()


def test_fp16_needs_the_scale(start: Start) -> None:
    engine = start({"fp16": {"enabled": True}})
    with refused(offload.UsageError, "loss scale"):
        engine(data(0)).square().mean().backward()
    engine.scale(engine(data(0)).square().mean()).backward()
    with refused(offload.UsageError, "loss scale"):  # the scale was for one backward
        engine(data(0)).square().mean().backward()
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.scale(engine(data(0)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_the_loss_does_not_use(start: Start, stage: int) -> None:
    model = nn.ModuleDict({"used": small(), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    zero = {"stage": stage, "ignore_unused_parameters": False}
    engine = start({"zero_optimization": zero}, model=model)
    engine.backward(engine(data(0)).square().mean())
    if stage == 3:  # as in DeepSpeed
        engine.step()
        return
    with pytest.raises(AssertionError, match=r"unused\.weight, unused\.bias.*ignore_unused_parameters") as caught:
        engine.step()
    assert isinstance(caught.value, offload.UsageError)


def test_initialize_inside_the_block_of_the_model(start: Start) -> None:
    with deepspeed.zero.Init():
        engine = start(model=small())
        assert not nn.Linear(2, 2).weight.is_meta  # initialize ended the block
        engine.backward(engine(data(0)).square().mean())
        engine.step()
    plain = start()
    plain.backward(plain(data(0)).square().mean())
    plain.step()
    assert_same_bits(engine.module_state_dict(), plain.module_state_dict())
    with deepspeed.zero.Init(), torch.device("cpu"), refused(offload.UsageError, "torch.device"):
        start(model=small())


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = WarmupLR(optimizer, 0.0, 0.8, 4, "linear")
    assert rate.item() == 0.0
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.2)
    assert schedule.get_last_lr() == pytest.approx([0.2])


def test_tags_that_differ_between_ranks(two: Crew, tmp_path: Path) -> None:
    for mode in ("Warn", "IGNORE"):
        folder = tmp_path / mode
        folder.mkdir()
        assert two.do("tags", folder=str(folder), validation=mode) == [["latest", "rank-0"]] * 2
    for name, said in two.errors("tags", folder=str(tmp_path), validation="Fail"):
        assert name == "AskedWrongly" and "'rank-0' on rank 0" in said and "'rank-1' on rank 1" in said


def test_initialize_inside_the_block_on_two_ranks(two: Crew) -> None:
    first, second = two.do("init_block")
    assert first == second and first[1] < first[0]


def test_a_block_in_a_block_after_initialize(start: Start) -> None:
    with deepspeed.zero.Init():
        with deepspeed.zero.Init():
            model = small()
        assert all(hasattr(one, "ds_id") for one in model.parameters())
        engine = start({"zero_optimization": {"stage": 3}}, model=model)
        with deepspeed.zero.Init():
            other = small()
    assert all(hasattr(one, "ds_id") and one.is_meta for one in other.parameters())
    with deepspeed.zero.GatheredParameters(other[0].weight):
        assert other[0].weight.norm().item() == small()[0].weight.norm().item()
    assert engine.module is model


def test_a_parameter_without_memory_says_it_is_on_the_cpu_and_nobody_computes_with_it() -> None:
    """Not even with what the allocator last had there."""
    with deepspeed.zero.Init():
        model = small()
    weight = model[0].weight
    assert weight.device == torch.device("cpu") and weight.is_meta
    found = (weight.norm(), weight + 1, weight.exp().sum(), torch.zeros_like(weight), weight.new_ones(3), weight.topk(2).values)
    assert all(one.is_meta for one in found)
    with pytest.raises(RuntimeError, match="meta"):
        model(torch.ones(3, 4)).sum().item()


def test_initial_values_are_rank_zeros(two: Crew) -> None:
    first, second = two.do("first_ranks_values")
    assert first == second
    assert (
        first["0.weight"] == [[1.0] * 3] * 4 and first["2.weight"] == [[5.0] * 4] * 2 and first["1.running_mean"] == [2.0] * 4
    )
    assert first["2.bias"] == [6.0] * 2  # what another rank was the one to write


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dtypes = small(), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        self.dtypes.append(found.dtype)
        return found.float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast_of_the_config(start: Start, dtype: torch.dtype) -> None:
    """As the forward in torch.autocast by hand; with float16 the loss is scaled as torch.amp.GradScaler does."""
    engine = start({"torch_autocast": {"enabled": True, "dtype": str(dtype)}}, model=Asked())
    plain = small()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for seed in range(3):
        loss = engine(data(seed))
        engine.backward(loss)
        engine.step()
        with torch.autocast("cpu", dtype):
            expected = plain(data(seed))
        expected.float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.float().square().mean().item(), rel=1e-3)
    assert engine.module.dtypes == [dtype] * 3 and next(engine.parameters()).dtype is torch.float32
    assert engine.cur_scale == (2.0**16 if dtype is torch.float16 else 1.0) and engine.skipped_steps == 0


def test_an_autocast_around_the_engine_ends_at_it(start: Start) -> None:
    engine = start(model=Asked())
    with torch.autocast("cpu", torch.bfloat16):
        engine(data(0))
    assert engine.module.dtypes == [torch.float32]
    with refused(offload.ConfigError, "torch_autocast.dtype='int8'", "bfloat16"):
        start({"torch_autocast": {"enabled": True, "dtype": "int8"}})


def test_the_base_optimizer_is_what_it_was_made_as(start: Start) -> None:
    base = start().optimizer.optimizer
    assert isinstance(base, torch.optim.AdamW) and isinstance(base, deepspeed.ops.adam.FusedAdam) and base.adam_w_mode
    base.param_groups[0]["lr"] = 0.5
    assert start().optimizer.optimizer.param_groups[0]["lr"] == 0.01
    plain = {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": False}}
    assert not start({"optimizer": plain}).optimizer.optimizer.adam_w_mode


def test_leaf_modules_of_the_config(start: Start) -> None:
    leaves = {"classes": ["torch.nn.modules.activation.Tanh"], "name_suffixes": ["2"], "names": ["nowhere"]}
    engine = start({"zero_optimization": {"stage": 3, "leaf_module": leaves}})
    assert [deepspeed.utils.z3_leaf_module(one) for one in engine.module] == [False, True, True]


def test_leaf_modules_by_one_name_and_those_that_deepspeed_knows(start: Start) -> None:
    known = type("MixtralSparseMoeBlock", (nn.Tanh,), {"__module__": "transformers.models.mixtral.modeling_mixtral"})
    for said, expected in (({"names": "2"}, [False, True, True]), ({"classes": "Linear"}, [True, False, True])):
        model = nn.Sequential(nn.Linear(4, 8), known(), nn.Linear(8, 2))
        start({"zero_optimization": {"stage": 3, "leaf_module": said}}, model=model)
        assert [deepspeed.utils.z3_leaf_module(one) for one in model] == expected


def test_a_model_of_which_initialize_failed_is_nobodys(start: Start) -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("wide", torch.zeros(1))
    wrong = {"scheduler": {"type": "WarmupLR", "params": {"nonsense": 1}}, "data_types": {"buffer_dtype": "bf16"}}
    with refused(offload.ConfigError, "scheduler.params"):
        start({"zero_optimization": {"stage": 3}} | wrong, model=model)
    assert not hasattr(model.weight, "ds_id") and model.wide.dtype == torch.float32


def test_a_key_that_is_given_twice(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 3, "train_batch_size": 4}')
    with refused(offload.ConfigError, "config.json", "given twice: train_batch_size"):
        deepspeed.initialize(model=small(), config=str(path))


def test_weights_of_a_checkpoint_into_gathered_parameters(start: Start, tmp_path: Path) -> None:
    engine = start({"zero_optimization": {"stage": 3}})
    engine.save_checkpoint(str(tmp_path))
    saved = engine.module_state_dict()
    engine.backward(engine(data(0)).square().mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        model = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, str(tmp_path))
        assert_same_bits(dict(model.state_dict()), saved)
    assert_same_bits(engine.module_state_dict(), saved)


def test_torch_func_takes_the_derivative_of_the_model_itself() -> None:
    """Whatever the number of micro-batches: it is no backward of the loop's."""
    model = torch.nn.Linear(4, 1)
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found = torch.func.grad(lambda x: engine(x).sum())(torch.ones(4))
    expected = model.weight.detach().clone()
    engine.destroy()
    torch.testing.assert_close(found, expected[0])


def test_an_engine_without_an_optimizer_loads(tmp_path: Path) -> None:
    found = []
    for is_first in (True, False):
        model = torch.nn.Linear(4, 1)
        engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 1})
        if is_first:
            engine.save_checkpoint(str(tmp_path), tag="1")
        else:
            engine.load_checkpoint(str(tmp_path), tag="1", load_optimizer_states=False, load_lr_scheduler_states=False)
        found.append(engine.module.weight.detach().clone())
        engine.destroy()
    assert torch.equal(*found)


@pytest.mark.parametrize("nowhere", [None, ""])
def test_a_save_to_nowhere_is_a_wrong_value(nowhere: Any) -> None:
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 1})
    with pytest.raises(ValueError, match="name a folder"):
        engine.save_checkpoint(nowhere)
    engine.destroy()


def test_progressive_layer_drop_is_told_to_the_forward(start: Start) -> None:
    """theta falls from 1 with the steps, and is not given in evaluation."""

    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.told = small(), []

        def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
            self.told.append(keywords)
            return self.inner(x)

    config = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    engine = start(config, model=Dropping())
    told = engine.module.told
    for _ in range(3):
        engine.backward(engine(torch.ones(3, 4)).square().mean())
        engine.step()
    assert [one["pld_theta"] for one in told] == pytest.approx([1.0, 1.0, 0.5 * math.exp(-0.1) + 0.5])
    assert all(one["progressive_layer_drop"] is True for one in told)
    assert engine.get_pld_theta() == pytest.approx(0.5 * math.exp(-0.2) + 0.5)
    engine.eval()
    engine(torch.ones(3, 4))
    assert told[-1] == {}
    with refused(offload.ConfigError, "progressive_layer_drop", "offload.deepspeed.initialize"):
        offload.initialize(small(), None, config)


def test_a_layer_in_tiles_is_the_layer() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(7, 5)
    tiled = deepspeed.zero.TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=whole)
    assert [[tuple(tile.weight.shape) for tile in row] for row in tiled.linears] == [
        [(3, 3), (3, 2), (3, 2)],
        [(2, 3), (2, 2), (2, 2)],
    ]
    x = torch.randn(4, 7)
    torch.testing.assert_close(tiled(x), whole(x))
    apart = deepspeed.zero.TiledLinear(
        7, 5, in_splits=2, out_splits=2, init_linear=whole, input_is_already_split=True, combine_out_splits=False
    )
    torch.testing.assert_close(torch.cat(apart(list(x.split([4, 3], dim=1))), dim=1), whole(x))
    with refused(offload.UsageError, "in_splits=8", "1 to 7"):
        deepspeed.zero.TiledLinear(7, 5, in_splits=8)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_initialize_again_goes_on_with_the_values_of_the_engine_before(stage: int, start: Start) -> None:
    model = small()
    sections = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = {"zero_optimization": sections}
    first = start(config, model=model)
    first.backward(first(torch.ones(3, 4)).square().mean())
    first.step()
    values = {name: value.clone() for name, value in first.module_state_dict().items()}
    again = start(config, model=model)
    assert first.offload_engine.closed
    assert_same_bits(again.module_state_dict(), values)
    again.backward(again(torch.ones(3, 4)).square().mean())
    again.step()
