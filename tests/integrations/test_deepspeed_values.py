# SPDX-License-Identifier: Apache-2.0
"""Reading and setting single parameters, gradients and moments, by the engine's calls and by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
import offload.deepspeed as deepspeed
from offload.deepspeed.loss_scaler import LossScaler
from offload.deepspeed_config import Half

from ..acceptance.runs import assert_same_bits, refused
from ..ranks.crew import Crew
from .conftest import small

Start = Callable[..., deepspeed.DeepSpeedEngine]
PLACES = [{}, {"parameters": "nvme", "optimizer_states": "nvme"}, {"dtype": "bf16"}, {"dtype": "bf16", "state_format": "split"}]


def data(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("accelerator", ["cpu", "deferred"])
def test_what_is_read_is_what_is_there(
    place: dict[str, Any], accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", accelerator)
    torch.manual_seed(0)
    model, plain = small(), small()
    nvme = {"nvme": str(tmp_path)} if "parameters" in place else {}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), place | nvme) as engine:
        weight = model[0].weight
        assert engine.read(weight, "gradient") is None
        for step in range(3):
            (engine.module(data(step).to(weight.device)).float().square().mean()).backward()
            gradient = engine.read(weight, "gradient")
            plain(data(step)).square().mean().backward()
            expected = plain[0].weight.grad
            assert gradient is not None and expected is not None and gradient.dtype == torch.float32
            tight = "dtype" not in place
            torch.testing.assert_close(gradient, expected, rtol=1e-6 if tight else 5e-2, atol=1e-7 if tight else 2e-2)
            engine.write(weight, "gradient", 2 * gradient)
            read = engine.read(weight, "gradient")
            assert read is not None and torch.equal(read, 2 * gradient)
            engine.write(weight, "gradient", gradient)
            engine.step()
            engine.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        value, first = engine.read(weight), engine.read(weight, "exp_avg")
        assert value is not None and first is not None and first.abs().sum() > 0
        assert torch.equal(value, engine.state_dict()["0.weight"])
        wanted = torch.randn(weight.shape)
        engine.write(weight, "value", wanted)
        engine.write(weight, "exp_avg", first * 3)
        assert torch.equal(engine.read(weight), wanted) and torch.equal(engine.read(weight, "exp_avg"), first * 3)
        with engine.gathered([weight]):
            assert torch.equal(weight.cpu().float(), wanted.to(weight.dtype).float())
        with refused(offload.UsageError, "'momentum'", "exp_avg"):
            engine.read(weight, "momentum")
        with refused(offload.UsageError, "shape"):
            engine.write(weight, "value", torch.zeros(3))
        with refused(offload.ParameterAccessError, "not one of this engine's"):
            engine.read(torch.nn.Parameter(torch.zeros(1)))


def test_a_gradient_that_was_set_is_what_the_step_takes(start: Start) -> None:
    ours, plain = start(), start()
    for engine, factor in ((ours, 1.0), (plain, 0.5)):
        engine.backward(factor * engine(data(0)).square().mean())
    for one in ours.module.parameters():
        gradient = deepspeed.utils.safe_get_full_grad(one)
        assert gradient is not None
        deepspeed.utils.safe_set_full_grad(one, 0.5 * gradient)
    ours.step()
    plain.step()
    assert ours.get_global_grad_norm() == plain.get_global_grad_norm()
    assert_same_bits(ours.module_state_dict(), plain.module_state_dict())


def test_gradients_of_half_precision_are_scaled_as_deepspeeds(start: Start) -> None:
    engine = start({"fp16": {"enabled": True, "initial_scale_power": 4}})
    engine.backward(engine(data(0)).square().mean())
    weight = engine.module[0].weight
    scaled, exact = deepspeed.utils.safe_get_full_grad(weight), engine.offload_engine.read(weight, "gradient")
    assert scaled is not None and exact is not None and scaled.dtype == torch.float16
    assert torch.equal(scaled.float(), exact * 16)
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert master is not None and master.dtype == torch.float32
    share = deepspeed.utils.safe_get_local_fp32_param(weight)
    assert share is not None and torch.equal(share, master.flatten())


def test_what_partitioned_parameters_answer(start: Start) -> None:
    model = small()
    engine = start({"zero_optimization": {"stage": 3}}, model=model)
    weight = model[0].weight
    assert weight.ds_numel == 32 and weight.ds_shape == weight.shape and weight.ds_tensor.numel() == 32  # type: ignore[attr-defined]
    assert weight.ds_status == deepspeed.ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.ds_status == deepspeed.ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(weight.ds_status.now))
    engine(data(0))
    assert seen == [deepspeed.ZeroParamStatus.AVAILABLE] and weight.ds_status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]
    with deepspeed.zero.Init():
        built = small()
    assert built[0].weight.ds_status == deepspeed.ZeroParamStatus.NOT_AVAILABLE
    engine.destroy()
    assert not hasattr(weight, "ds_id")
    assert not hasattr(start({"zero_optimization": {"stage": 2}}).module[0].weight, "ds_id")


def test_gradients_that_are_summed(two: Crew) -> None:
    """Over two ranks twice what their average is; clipping after it."""
    assert two.do("summed") == [True, True]


def test_the_loss_scale_hesitates() -> None:
    """DeepSpeed 0.19.8's rule; without ZeRO it knows no hysteresis, and stays at the lowest scale."""
    half = Half(initial_scale_power=3, loss_scale_window=2, hysteresis=2)
    scaler = LossScaler.of(half, hesitates=True)
    scales = []
    for overflow in (True, True, False, False, False, False, False, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.cur_scale)
    assert scales == [8, 4, 4, 4, 8, 8, 16, 16, 8]
    other = LossScaler.of(half, hesitates=True)
    other.load_state_dict(scaler.state_dict())
    assert other == scaler
    plain = LossScaler.of(half, hesitates=False)
    for _ in range(5):
        plain.update_scale(True)
    assert plain.cur_scale == 1
    scaler.cur_scale, scaler.cur_hysteresis = 1, 1
    with pytest.raises(RuntimeError, match="min_loss_scale=1"):
        scaler.update_scale(True)


def test_values_alone_are_loaded(start: Start, tmp_path: Path) -> None:
    saved = start({"zero_optimization": {"stage": 3}})
    saved.backward(saved(data(0)).square().mean())
    saved.step()
    saved.save_checkpoint(str(tmp_path), client_state={"a": 1})
    loaded = start({"zero_optimization": {"stage": 1}})
    assert loaded.load_checkpoint(str(tmp_path), load_module_only=True) == (str(tmp_path / "global_step1"), {"a": 1})
    assert loaded.global_steps == 0
    assert_same_bits(loaded.module_state_dict(), saved.module_state_dict())
    assert loaded.load_checkpoint(str(tmp_path), load_optimizer_states=False)[1] == {"a": 1}
    assert loaded.global_steps == 1 and not loaded.offload_engine.read(loaded.module[0].weight, "exp_avg").any()
    assert_same_bits(
        deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path)), saved.module_state_dict()
    )
    other = torch.nn.Sequential(small()[0], torch.nn.Tanh(), torch.nn.Linear(8, 3))
    partly = start(model=other)
    with refused(offload.UsageError, "2.weight"):
        partly.load_checkpoint(str(tmp_path), load_module_only=True)
    partly.load_checkpoint(str(tmp_path), load_module_strict=False)
    assert torch.equal(partly.module_state_dict()["0.weight"], saved.module_state_dict()["0.weight"])


def test_unseeded_ranks_and_values_on_two_ranks(two: Crew) -> None:
    for stage in (0, 1, 2, 3):
        first, second = two.do("values", stage=stage)
        assert first == second, stage


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_masters_begin_with_what_a_cast_to_16_bits_leaves(half: str) -> None:
    """As DeepSpeed's do, which makes them of the parameters after the cast: a first step begins with its numbers."""
    model = torch.nn.Linear(7, 5)
    expected = model.weight.detach().to(torch.bfloat16 if half == "bf16" else torch.float16).float()
    assert not torch.equal(expected, model.weight)
    config = {"train_batch_size": 1, half: {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found = deepspeed.utils.safe_get_full_fp32_param(model.weight)
    engine.destroy()
    assert found is not None and torch.equal(found, expected)


def test_initial_values_of_zero_init_are_rounded_too_and_a_model_that_cannot_be_taken_stays_as_it_was() -> None:
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    sections: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    torch.manual_seed(3)
    with deepspeed.zero.Init():
        deferred = torch.nn.Linear(7, 5)
    torch.manual_seed(3)
    model = torch.nn.Linear(7, 5)
    drawn = model.weight.detach().clone()
    engine, *_ = deepspeed.initialize(model=deferred, config=config | sections)
    found = deepspeed.utils.safe_get_full_fp32_param(deferred.weight)
    engine.destroy()
    assert found is not None and torch.equal(found, drawn.bfloat16().float())
    with pytest.raises(offload.ConfigError):  # no such device memory
        deepspeed.initialize(model=model, config=config | sections | {"device_memory": 16})
    assert torch.equal(model.weight, drawn)


def test_a_share_of_the_states_on_the_device_changes_no_bit_on_two_ranks(two: Crew) -> None:
    """`offload_optimizer.ratio`, by whole units: their updates are made there, and give what the host's give."""
    found = {}
    for ratio in (1.0, 0.5, 0.0):
        found[ratio], second = two.do("partly_on_device", ratio=ratio)
        assert found[ratio]["on device"] == second["on device"] and found[ratio]["values"] == second["values"]
        assert sum(found[ratio]["on device"]) == round((1 - ratio) * len(found[ratio]["on device"])), found[ratio]["on device"]
        assert found[ratio]["losses"] == found[1.0]["losses"] and found[ratio]["values"] == found[1.0]["values"], ratio
    assert len(found[1.0]["on device"]) > 1


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_without_what_is_frozen_on_two_ranks(stage: int, two: Crew, tmp_path: Path) -> None:
    for said in two.do("without_frozen", folder=str(tmp_path), stage=stage):
        assert said == [True, True, ["2.bias", "2.weight"]], said
