# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed does and the engine alone does not: small parameters that stay whole, sums in 16 bits, a state that is read, a
layer of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.deepspeed.moe.layer import MoE
from offload.deepspeed.moe.utils import has_moe_layers
from offload.deepspeed.ops.adam import DeepSpeedCPUAdam
from offload.deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer

import offload
import offload.deepspeed as deepspeed
from offload.deepspeed.hidden_states import SavedTensor

from ..acceptance.runs import assert_same_bits, refused
from ..ranks.crew import Crew
from .conftest import small

Start = Callable[..., deepspeed.DeepSpeedEngine]
BF16 = {"bf16": {"enabled": True}}


def train(engine: deepspeed.DeepSpeedEngine, steps: int = 3) -> None:
    for index in range(steps):
        given = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        engine.backward(engine(given).square().mean())
        engine.step()


# ---- parameters below stage3_param_persistence_threshold -------------------------------------------------------------


def test_one_rank_of_two_reads_small_parameters_without_a_block(two: Crew, tmp_path: Path) -> None:
    first, second = two.do("kept", folder=str(tmp_path))
    for moment in ("beginning", "step 0", "step 1", "loaded"):
        assert first[moment] == [True, second[moment][1]] and second[moment][0], moment
    values = [first[moment][1] for moment in ("beginning", "step 0", "step 1")]
    assert values[0] != values[1] != values[2] and first["loaded"][1] == values[1]
    for said in (first["larger"], second["larger"]):
        assert "is not in memory" in said and "gathered" in said


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_what_stays_whole_changes_no_bit(start: Start, device: str, tmp_path: Path) -> None:
    tier = {"device": device} | ({"nvme_path": str(tmp_path)} if device == "nvme" else {})
    found = []
    for threshold in ("auto", 0):
        sections = {
            "stage": 3,
            "offload_param": tier,
            "offload_optimizer": tier,
            "stage3_param_persistence_threshold": threshold,
        }
        engine = start({"zero_optimization": sections} | BF16)
        for index in range(3):
            given = torch.randn(3, 4, generator=torch.Generator().manual_seed(index)).bfloat16()
            engine.backward(engine(given).float().square().mean())
            engine.step()
        found.append(engine.module_state_dict())
        engine.destroy()
    assert_same_bits(found[0], found[1])


def test_a_small_parameter_is_read_between_backward_and_step(start: Start, tmp_path: Path) -> None:
    """An update may have begun: what is read is the value before it."""
    tier = {"device": "nvme", "nvme_path": str(tmp_path)}
    engine = start({"zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier}})
    weight = engine.module[0].weight
    for index in range(3):
        before = weight.detach().clone()
        engine.backward(engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(index))).square().mean())
        assert torch.equal(weight, before)
        engine.step()
        assert not torch.equal(weight, before)
        assert torch.equal(weight.detach(), engine.module_state_dict()["0.weight"])
    with refused(offload.errors.ParameterAccessError, "0.weight", "written outside"):
        weight.data.clamp_(0, 1)


def test_ranks_that_are_seeded_alike_go_on_alike_after_the_block(two: Crew) -> None:
    first, second = two.do("drawn", seed=5, differs=False)
    assert first == second and first[0] == first[1]
    first, second = two.do("drawn", seed=5, differs=True)
    assert first[0] == first[1] and second[0] not in (first[0], second[1])


# ---- data_types ------------------------------------------------------------------------------------------------------


def expected_sums(dtype: torch.dtype) -> list[float]:
    total = torch.zeros(16, dtype=dtype)
    for index in range(3):
        total = total + torch.randn(1, 16, generator=torch.Generator().manual_seed(index)).bfloat16()[0].to(dtype)
    return list(total.bfloat16().tolist())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_of_micro_batches_are_rounded_as_deepspeeds(two: Crew, stage: int) -> None:
    assert expected_sums(torch.bfloat16) != expected_sums(torch.float32)
    for said, dtype in ((None, torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        first, second = two.do("sums", stage=stage, said=said)
        assert first == second == expected_sums(dtype), (stage, said)


def test_a_micro_batch_of_the_scripts_own_backward_is_rounded_too(start: Start) -> None:
    """PyTorch's own sums in `p.grad` are the reference, to the bit."""
    plain = nn.Linear(16, 3)
    ours = nn.Linear(16, 3)
    ours.load_state_dict(plain.state_dict())
    plain.bfloat16()
    keys = {"gradient_accumulation_steps": 4, "train_batch_size": 4, "zero_optimization": {"stage": 1}} | BF16
    engine = start(keys, model=ours)
    for index in range(4):
        given = torch.randn(1, 16, generator=torch.Generator().manual_seed(index)).bfloat16()
        (plain(given).float().square().sum() / 4).backward()
        engine(given).float().square().sum().backward()
        if index < 3:
            engine.step()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        found = deepspeed.utils.safe_get_full_grad(other)
        assert found is not None and torch.equal(found, one.grad)


def test_sums_in_a_dtype_that_nobody_computes_in(start: Start) -> None:
    wrong = {"data_types": {"grad_accum_dtype": "fp16"}} | BF16
    with refused(NotImplementedError, "grad_accum_dtype='fp16'", "bf16", "choose one of these"):
        start(wrong)
    train_free = start(wrong | {"zero_optimization": {"stage": 1}})
    assert train_free._config.grad_accum_dtype == "fp16"
    for stage_one in ({"zero_optimization": True}, {"stage": 1}):  # by the oldest form, and by a key of this project's
        assert start(wrong | stage_one)._config.grad_accum_dtype == "fp16"
    with refused(offload.ConfigError, "gradient_allreduce_op='sum'", "stage 3"):
        start({"gradient_allreduce_op": "sum", "stage": 3})
    with refused(offload.ConfigError, "data_types.grad_accum_dtype='int8'", "'bf16'"):
        start({"data_types": {"grad_accum_dtype": "int8"}})
    with refused(offload.ConfigError, "data_types.param_dtype='fp16'", "bf16"):
        start({"data_types": {"param_dtype": "fp16"}} | BF16)


def test_buffers_are_cast_where_the_config_says_so(start: Start) -> None:
    def built() -> nn.Module:
        model = small()
        model.register_buffer("scale", torch.full((3,), 1.001))
        model.register_buffer("count", torch.tensor(3))
        return model

    engine = start({"data_types": {"buffer_dtype": "bf16"}} | BF16, model=built())
    assert engine.module.scale.dtype == torch.bfloat16 and engine.module.count.dtype == torch.int64
    assert start(BF16, model=built()).module.scale.dtype == torch.float32
    kept = built()
    with pytest.raises(offload.ConfigError):  # no such device memory
        start({"data_types": {"buffer_dtype": "bf16"}, "device_memory": 16} | BF16, model=kept)
    assert torch.equal(kept.scale, torch.full((3,), 1.001))


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def test_the_state_is_read_by_parameter(start: Start) -> None:
    plain = small()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    engine = start({"gradient_clipping": 0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    state = engine.optimizer.optimizer.state
    weight, frozen = engine.module[0].weight, nn.Parameter(torch.zeros(1))
    assert len(state) == 0 and weight not in state
    for index in range(2):
        given = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        theirs.zero_grad()
        plain(given).square().mean().backward()
        theirs.step()
    train(engine, 2)
    assert len(state) == 4 and weight in state and frozen not in state
    for one, other in zip(plain.parameters(), engine.module.parameters(), strict=True):
        assert set(state[other]) == {"step", "exp_avg", "exp_avg_sq"} and state[other]["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[other][name], theirs.state[one][name])
    with pytest.raises(KeyError):
        state[frozen]
    narrow = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    other_engine = start(narrow | {"zero_optimization": {"stage": 1}})
    other_engine.backward(other_engine(torch.ones(3, 4).bfloat16()).float().square().mean())
    other_engine.step()
    assert {one["exp_avg"].dtype for one in other_engine.optimizer.optimizer.state.values()} == {torch.bfloat16}


def test_an_optimizer_made_for_wide_states_beside_narrow_ones(start: Start) -> None:
    narrow = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    config = narrow | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    model = small()
    with refused(AssertionError, "fp32_optimizer_states=False", "bf16_optimizer_states"):
        start(config, model=model, optimizer=DeepSpeedCPUAdam(model.parameters()))
    start(config, model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False))


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_token_gets_the_answers_of_its_experts(k: int) -> None:
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6), num_experts=4, k=k, drop_tokens=False, top2_2nd_expert_sampling=False)
    given = torch.randn(3, 5, 6)
    output, auxiliary, counts = layer(given)
    assert auxiliary is not None and counts is not None
    tokens, inner = given.reshape(-1, 6), layer.deepspeed_moe
    gates = F.linear(tokens, inner.gate.wg.weight).softmax(dim=1)
    weights, experts = gates.topk(k, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True) if k > 1 else weights
    expected = [
        sum(weights[token, one] * inner.experts.deepspeed_experts[experts[token, one]](tokens[token]) for one in range(k))
        for token in range(15)
    ]
    torch.testing.assert_close(output, torch.stack(expected).reshape(3, 5, 6))  # type: ignore[arg-type]
    assert counts.tolist() == torch.bincount(experts.flatten(), minlength=4).tolist()
    first = torch.bincount(experts[:, 0], minlength=4) / 15
    torch.testing.assert_close(auxiliary, (gates.mean(dim=0) * first).sum() * 4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_expert_that_is_full_leaves_tokens_out(k: int) -> None:
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6, bias=False), num_experts=4, k=k, capacity_factor=0.5, min_capacity=1)
    seen: list[int] = []
    for one in layer.deepspeed_moe.experts.deepspeed_experts:
        one.register_forward_pre_hook(lambda module, given: seen.append(int((given[0] != 0).any(dim=1).sum())))
    layer(torch.randn(16, 6))
    assert len(seen) == 4 and max(seen) <= 2 * k and sum(seen) > 0


def test_a_model_with_experts_trains_from_a_tier_to_the_same_bits(start: Start) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)

        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.moe = MoE(4, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), num_experts=4, ep_size=2, use_residual=True)
                self.head = nn.Linear(4, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                output, auxiliary, _ = self.moe(x)
                return self.head(output) + 0.01 * auxiliary

        return Mixed()

    assert has_moe_layers(built()) == (True, 4) and has_moe_layers(small()) == (False, 0)
    found = []
    for device in ("none", "cpu"):
        tier = {"device": device}
        sections = {"stage": 3, "offload_param": tier, "offload_optimizer": tier, "stage3_param_persistence_threshold": 0}
        engine = start({"zero_optimization": sections}, model=built())
        torch.manual_seed(1)
        train(engine)
        found.append(engine.module_state_dict())
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_experts": 4, "ep_size": 3}, "ep_size=3"),
        ({"num_experts": 4, "k": 5}, "k=5"),
        ({"noisy_gate_policy": "Loud"}, "'Loud'"),
        ({"use_tutel": True}, "Tutel"),
        ({"capacity": 2}, "no argument 'capacity'"),
    ],
)
def test_experts_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with refused(offload.UsageError, said):
        MoE(4, nn.Linear(4, 4), **given)


# ---- activations -------------------------------------------------------------------------------------------------------


def test_the_input_of_a_checkpointed_layer_is_marked_inside_the_block_alone() -> None:
    class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.sin().square()

    call = GradientCheckpointingLayer.__call__
    layer = Layer().train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    given = torch.randn(4, 8, requires_grad=True)
    block = CheckpointHiddenStatesOffload(min_offload_bytes=0, keep_last_count=0)
    with block:
        watched = GradientCheckpointingLayer.__call__
        with CheckpointHiddenStatesOffload():
            assert GradientCheckpointingLayer.__call__ is watched is not call
        layer(given).sum().backward()
        with refused(RuntimeError, "not re-entrant"):
            block.__enter__()
    assert GradientCheckpointingLayer.__call__ is call
    assert (block.stats.marked_tensors, block.stats.skipped_marked_tensors) == (1, 1)  # it is on the CPU already
    layer(given)
    assert block.stats.marked_tensors == 1
    by_its_other_name = get_checkpoint_hidden_states_offloading_ctx_manager(False, False, 0)
    assert isinstance(by_its_other_name, CheckpointHiddenStatesOffload)
    with refused(ValueError, "keep_last_count=-1"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)


def test_what_was_offloaded_comes_back_as_it_was() -> None:
    for tensor in (torch.randn(6, 8), torch.randn(6, 8)[:, ::2], torch.randn(6, 8)[2:].t()):
        saved = SavedTensor(tensor)
        assert saved.leave(pinned=False, stream=None) == tensor.nbytes and saved.tensor is None
        for moved in (tensor.nbytes, 0):  # once; a graph that is retained asks again
            back, nbytes = saved.back()
            assert torch.equal(back, tensor) and back.stride() == tensor.stride() and nbytes == moved


def test_an_optimizer_of_its_own_computes_in_fp32() -> None:
    torch.manual_seed(0)
    values, gradients = torch.randn(64).bfloat16(), [torch.randn(64).bfloat16() for _ in range(3)]
    wide, narrow = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    reference = values.float()
    first, second = torch.zeros(64), torch.zeros(64)
    optimizers = DeepSpeedCPUAdam([wide], lr=0.01), DeepSpeedCPUAdam([narrow], lr=0.01, fp32_optimizer_states=False)
    for step, gradient in enumerate(gradients, 1):
        wide.grad, narrow.grad = gradient.clone(), gradient.clone()
        for one in optimizers:
            one.step()
        assert wide.dtype == torch.bfloat16 and torch.equal(wide.grad, gradient)
        first.lerp_(gradient.float(), 0.1)
        second.mul_(0.999).addcmul_(gradient.float(), gradient.float(), value=0.001)
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        reference = (reference - 0.01 * update).bfloat16().float()
    torch.testing.assert_close(wide.float(), reference)
    states = [one.state[p]["exp_avg"].dtype for one, p in zip(optimizers, (wide, narrow), strict=True)]
    assert states == [torch.float32, torch.bfloat16]


# ---- parameters that a step's loss does not depend on ----------------------------------------------------------------


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        first = self.first(x)
        return (self.second(first) if both else first).square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_loss_does_not_depend_on_has_gradients_of_zero(start: Start, stage: int) -> None:
    """Weight decay goes on from the first step, moments after the second, as DeepSpeed's optimizer has zeros there."""
    given = [torch.randn(3, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)]
    plain = Either()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for index, one in enumerate(given):
        expected.zero_grad()
        plain(one, index == 1).backward()
        for parameter in plain.parameters():
            parameter.grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        expected.step()
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, "gradient_clipping": 0.0}
    engine = start(config | {"zero_optimization": {"stage": stage}}, model=Either())
    for index, one in enumerate(given):
        engine.backward(engine(one, index == 1))
        engine.step()
    found = engine.module_state_dict()
    for name, value in plain.named_parameters():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name
    assert (found["second.weight"] - Either().second.weight).abs().max() > 0.015  # half of it after its only use


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zeros_do_not_stand_for_the_gradient_of_another_rank(two: Crew, stage: int) -> None:
    first, second = two.do("unused", stage=stage)
    assert first == second
    steps = [torch.tensor(value) for value in first]
    assert torch.equal(steps[0], _initial_second())  # AdamW of the config decays nothing
    assert (steps[1] - steps[0]).abs().max() > 0.007 and (steps[2] - steps[1]).abs().max() > 0.005


def _initial_second() -> torch.Tensor:
    torch.manual_seed(0)
    nn.Linear(2, 2)
    return nn.Linear(2, 2).weight.detach()
