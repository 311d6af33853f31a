# SPDX-License-Identifier: Apache-2.0
"""`offload.deepspeed` by itself: schedules with DeepSpeed's numbers, what is refused, what is not there, checkpoints' edges."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload.checkpoint.format.packing import packed, unpacked

from ..acceptance.runs import assert_same_bits, refused
from .conftest import CONFIG, small


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")


def micro_step(engine: deepspeed.DeepSpeedEngine, seed: int = 0) -> None:
    engine.backward(engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean())
    engine.step()


# Rates that DeepSpeed 0.19.8 sets for a group of 0.5: when the schedule is made, then after each of 8 steps.
RATES: list[tuple[Callable[[Any], Any], list[float]]] = [
    (lambda o: WarmupLR(o, 0.1, 0.9, 4), [0.1, 0.1, 0.5, 0.7339850002884626, 0.9, 0.9, 0.9, 0.9, 0.9]),
    (
        lambda o: WarmupLR(o, 0.1, 0.9, 4, "linear"),
        [0.1, 0.1, 0.30000000000000004, 0.5, 0.7000000000000001, 0.9, 0.9, 0.9, 0.9],
    ),
    (lambda o: WarmupLR(o, warmup_num_steps=1), [0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    (lambda o: WarmupDecayLR(o, 7, 0.0, 0.9, 3, "linear"), [0.0, 0.0, 0.3, 0.6, 0.9, 0.675, 0.45, 0.225, 0.0]),
    (lambda o: WarmupDecayLR(o, 7, 0.0, 0.9, 3), [0.0, 0.0, 0.5678367782143116, 0.9, 0.9, 0.675, 0.45, 0.225, 0.0]),
    (
        lambda o: WarmupCosineLR(o, 7, 0.1, 3, 0.01, "linear"),
        [0.0, 0.05, 0.2, 0.35, 0.4275089283436705, 0.2525, 0.07749107165632951, 0.005, 0.005],
    ),
    (
        lambda o: WarmupCosineLR(o, 7, 0.1, 3),
        [0.0, 0.05, 0.33391838910715577, 0.5, 0.4267840176271072, 0.250025, 0.0732659823728928, 5e-05, 5e-05],
    ),
    (lambda o: LRRangeTest(o, 0.1, 3, 0.5), [0.1, *(0.1 + 0.05 * step / 3 for step in range(1, 9))]),
    (lambda o: LRRangeTest(o, 0.1, 3, 0.5, True), [0.1, 0.1, 0.1, 0.15, 0.15, 0.15, 0.2, 0.2, 0.2]),
    (
        lambda o: OneCycle(o, 0.1, 0.9, 0.5, 3, 2, decay_step_size=2, cycle_momentum=False),
        [0.1, 0.3666666666666666, 0.6333333333333332, 0.9, 0.5, 0.1, 0.08, 0.06666666666666667, 0.05714285714285715],
    ),
]


@pytest.mark.parametrize(("make", "expected"), RATES)
def test_rates_are_those_of_deepspeed(make: Callable[[Any], Any], expected: list[float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = make(optimizer)
    for rate in expected:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-14, abs=1e-17)
        assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        schedule.step()
    other = make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5))
    other.load_state_dict(schedule.state_dict())
    schedule.step()
    other.step()
    assert schedule.get_last_lr() == other.get_last_lr()


def test_a_cycle_in_stairs_moves_the_momentum_the_other_way() -> None:
    """Figures of DeepSpeed 0.19.8."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = OneCycle(
        optimizer, 0.1, 0.9, cycle_first_step_size=4, cycle_first_stair_count=2, decay_mom_rate=0.1, decay_step_size=1
    )
    momenta, rates = (
        [0.8, 0.9, 0.85, 0.85, 0.8, 0.85, 0.85, 0.9, 0.9, 0.99, 1.08],
        [0.1, 0.1, 0.5, 0.5, 0.9, 0.5, 0.5, 0.1, 0.1],
    )
    for step, momentum in enumerate(momenta):
        group = optimizer.param_groups[0]
        assert group["betas"] == (pytest.approx(momentum, rel=1e-14), 0.99)
        assert group["lr"] == pytest.approx(rates[step] if step < len(rates) else 0.1, rel=1e-14)
        schedule.step()


def test_schedules_that_cannot_be() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with refused(offload.ConfigError, "warmup_type='cubic'", "'linear'"):
        WarmupLR(optimizer, warmup_type="cubic")
    with refused(offload.ConfigError, "warmup_num_steps=0"):
        WarmupLR(optimizer, warmup_num_steps=0)
    with refused(offload.ConfigError, "warmup_max_lr has 2 numbers"):
        WarmupLR(optimizer, warmup_max_lr=[0.1, 0.2])


def test_the_drop_in_costs_nothing_until_it_is_imported() -> None:
    code = "import sys, offload; print(any(name.startswith('offload.deepspeed.') for name in sys.modules)); "
    code += "import offload.deepspeed; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("where", "name", "said"),
    [
        (deepspeed, "PipelineEngine", "whole layers"),
        (deepspeed, "init_distribute", "deepspeed.init_distributed"),
        (deepspeed.checkpointing, "chekpoint", "deepspeed.checkpointing.checkpoint"),
        (deepspeed.zero, "TiledLinearReturnBias", "TiledLinear"),
        (deepspeed.zero, "GatherParameters", "deepspeed.zero.GatheredParameters"),
        (deepspeed.ops.adam, "FusedAdamW", "deepspeed.ops.adam.FusedAdam"),
        (deepspeed.ops, "transformer", "adagrad"),
        (deepspeed.utils, "safe_get_full_fp32_params", "safe_get_full_fp32_param"),
        (deepspeed.comm, "get_rnk", "deepspeed.comm.get_rank"),
        (deepspeed.runtime.lr_schedules, "OneCycles", "OneCycle"),
    ],
)
def test_what_is_not_there_is_named(where: Any, name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} is not in offload.*{said}"):
        getattr(where, name)


def test_comm_is_torch_distributed() -> None:
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()) == (0, 1, 0)
    deepspeed.comm.barrier()
    assert deepspeed.comm.ReduceOp is torch.distributed.ReduceOp and not deepspeed.comm.is_initialized()


def test_a_launched_process_computes_on_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts put their batches on `engine.local_rank`, and set no device."""
    taken: list[int] = []
    deepspeed.init_distributed()
    try:
        with monkeypatch.context() as patch:
            for name, value in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "1")):
                patch.setenv(name, value)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "device_count", lambda: 2)
            patch.setattr(torch.cuda, "set_device", taken.append)
            engine, *_ = deepspeed.initialize(model=small(), config=CONFIG)
            assert engine.local_rank == 1
            engine.destroy()
    finally:
        torch.distributed.destroy_process_group()
    assert taken == [1]


@pytest.mark.parametrize("kind", ["DEEPSPEED", "NO"])
def test_a_process_group_is_there_where_accelerate_counts_on_one(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In a process that nobody launched it leaves that to DeepSpeed; test_deepspeed_tools.py has Trainer there."""
    known = {"distributed_type": kind, "backend": None}
    state = argparse.Namespace(PartialState=argparse.Namespace(_shared_state=known))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    engine, *_ = deepspeed.initialize(model=small(), config=CONFIG)
    try:
        assert torch.distributed.is_initialized() == (kind == "DEEPSPEED")
        micro_step(engine)
        engine.destroy()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_the_memory_asked_for_is_that_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sizes = {0: 10, 1: 20, None: 20}
    properties = {index: argparse.Namespace(total_memory=nbytes) for index, nbytes in sizes.items()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    found = type(deepspeed.get_accelerator())()
    assert [found.total_memory(index) for index in (None, 0, 1)] == [20, 10, 20]


def test_arguments() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None}


def test_initialize_refuses(start: Callable[..., Any], tmp_path: Path) -> None:
    with refused(offload.UsageError, "0 configs"):
        deepspeed.initialize(model=small())
    with refused(offload.UsageError, "2 configs"):
        deepspeed.initialize(argparse.Namespace(deepspeed_config="x.json"), small(), config=CONFIG)
    with refused(offload.ConfigError, "batch size", "'auto'", "Accelerate"):
        start({"train_batch_size": "auto"})
    with refused(offload.ConfigError, "scheduler.type='OneCycles'", "WarmupLR"):
        start({"scheduler": {"type": "OneCycles", "params": {}}})
    with refused(offload.ConfigError, "scheduler.params", "WarmupLR"):
        start({"scheduler": {"type": "WarmupLR", "params": {"warm": 1}}})
    with refused(offload.UsageError, "mpu"):
        start(mpu=object())
    with refused(offload.UsageError, "'collate'", "'collate_fn'"):
        start(collate=1)
    with refused(offload.UsageError, "NoneType"):
        deepspeed.initialize(config=CONFIG)
    engine = deepspeed.initialize(model=small(), config={"train_batch_size": 3})[0]
    with refused(offload.UsageError, "without an optimizer"):
        engine.step()
    engine.destroy()


def test_what_is_passed_wins_over_the_config(start: Callable[..., Any]) -> None:
    schedule = {"scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.warns(UserWarning, match="optimizer, scheduler: without effect") as caught:
        engine = start(
            schedule,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
    assert caught[0].filename.endswith("conftest.py")  # where initialize was called
    micro_step(engine)
    assert engine.get_lr() == [0.15] and isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.StepLR)


def test_training_data_comes_in_deepspeeds_order(start: Callable[..., Any]) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(10, 1))
    engine = start({"train_batch_size": 2}, training_data=data)
    batches = [batch[0].flatten().tolist() for batch in engine.training_dataloader]
    assert batches == [[4, 1], [7, 5], [3, 9], [0, 8], [6, 2]]  # DeepSpeed 0.19.8


def test_the_engine_is_a_module_over_the_model(start: Callable[..., Any]) -> None:
    engine = start({"gradient_accumulation_steps": 3, "gradient_clipping": 0.5})
    assert [name for name, _ in engine.named_parameters()][:2] == ["module.0.weight", "module.0.bias"]
    assert list(engine.state_dict())[:2] == ["module.0.weight", "module.0.bias"]
    assert engine.get_batch_info() == (3, 1, 3) and engine.gradient_clipping() == 0.5
    assert engine.train() is engine and not engine.eval().module.training and engine.to("cpu") is engine
    with refused(offload.UsageError, "stays where the config says"):
        engine.to(torch.float16)
    with refused(offload.UsageError, "stay where the config says"):
        engine.half()
    with pytest.raises(AttributeError, match=r"no 'get_lrs'.*the nearest is get_lr"):
        _ = engine.get_lrs
    with refused(offload.UsageError, "one element"):
        engine.backward(engine(torch.ones(2, 4)))
    doubled = {name: 2 * value for name, value in engine.state_dict().items()}
    engine.load_state_dict(doubled)
    assert_same_bits(engine.state_dict(), doubled)


def test_a_boundary_that_the_script_sets(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3})
    for index in range(4):
        engine.set_gradient_accumulation_boundary(index == 1)
        micro_step(engine, index)
        assert engine.was_step_applied() == (index == 1)
    assert engine.global_steps == 1 and engine.micro_steps == 4
    values = engine.module_state_dict()
    assert engine.save_checkpoint(str(tmp_path))  # what has accumulated is not in it, and goes on waiting
    engine.set_gradient_accumulation_boundary(True)
    micro_step(engine, 4)
    after = engine.module_state_dict()
    engine.load_checkpoint(str(tmp_path))
    assert_same_bits(engine.module_state_dict(), values)
    for index in (2, 3, 4):
        engine.set_gradient_accumulation_boundary(index == 4)
        micro_step(engine, index)
    assert_same_bits(engine.module_state_dict(), after)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("whose", ["engine", "optimizer"])
def test_zero_grad_between_micro_batches(start: Callable[..., Any], stage: int, whose: str) -> None:
    """DeepSpeed 0.19.8: at stage 2, and by the engine at stage 3, what has accumulated stays."""
    norms = []
    for drops in (False, True):
        engine = start({"gradient_accumulation_steps": 3, "zero_optimization": {"stage": stage}})
        for index in range(3):
            if drops:
                (engine if whose == "engine" else engine.optimizer).zero_grad()
            micro_step(engine, index)
        norms.append(engine.get_global_grad_norm())
    stays = stage == 2 or (stage == 3 and whose == "engine")
    assert (norms[0] == norms[1]) == stays


def test_non_finite_steps_are_left_out_in_bf16(start: Callable[..., Any]) -> None:
    engine = start({"bf16": {"enabled": True}, "scheduler": {"type": "WarmupLR", "params": {}}})
    before = engine.module_state_dict()
    engine.backward(engine(torch.full((3, 4), float("inf"))).square().mean())
    engine.step()
    assert (engine.skipped_steps, engine.global_steps, engine.was_step_applied()) == (1, 1, False)
    assert engine.lr_scheduler.last_batch_iteration == -1
    assert_same_bits(engine.module_state_dict(), before)


def test_checkpoints(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(lr_scheduler=lambda made: torch.optim.lr_scheduler.MultiStepLR(made, [1, 2], gamma=0.1))
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    micro_step(engine)
    assert engine.save_checkpoint(str(tmp_path), tag="a", save_latest=False) and not (tmp_path / "latest").exists()
    expected = engine.module_state_dict()
    micro_step(engine)
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert engine.load_checkpoint(str(tmp_path), tag="a") == (str(tmp_path / "a"), {})
    assert engine.global_steps == 1 and engine.get_lr() == pytest.approx([0.001])
    assert_same_bits(engine.module_state_dict(), expected)
    micro_step(engine)
    assert engine.get_lr() == pytest.approx([0.0001])
    assert engine.load_checkpoint(str(tmp_path)) == (str(tmp_path / "global_step2"), {"epoch": 3})
    with refused(offload.UsageError, "client_state"):
        engine.save_checkpoint(str(tmp_path), client_state={"x": object()})
    with refused(offload.UsageError, "custom_load_fn"):
        engine.load_checkpoint(str(tmp_path), custom_load_fn=print)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").touch()
    with refused(offload.CheckpointError, "theirs", "mp_rank_00_model_states.pt", "read safely"):
        engine.load_checkpoint(str(tmp_path), tag="theirs")


def test_weights_as_safetensors_without_the_frozen_ones(start: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = small()
    model[0].requires_grad_(False)
    engine = start({"bf16": {"enabled": True}}, model=model)
    assert engine.save_fp16_model(str(tmp_path / "new"), "model.safetensors", exclude_frozen_parameters=True)
    saved = load_file(tmp_path / "new" / "model.safetensors")
    expected = {name: value.bfloat16() for name, value in engine.module_state_dict().items() if name.startswith("2.")}
    assert_same_bits(saved, expected)


def test_states_of_schedulers_are_json() -> None:
    value = {"a": {1: 2, 3: [4.5, float("inf")]}, "b": [None, True, "x"], "c": float("-inf")}
    assert unpacked(packed(value)) == value


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (3, 0, 2), (0,), (), (2, 3)], ids=str)
def test_states_of_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    assert_same_bits(unpacked(json.loads(json.dumps(packed(torch.ones(shape, dtype=torch.int16))))), torch.ones(shape).short())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_elements_to_write_is_refused(start: Callable[..., Any], tensor: torch.Tensor, tmp_path: Path) -> None:
    engine = start()
    micro_step(engine)
    with refused(offload.UsageError, "['x']", "Tensor"):
        engine.save_checkpoint(str(tmp_path), client_state={"x": tensor})


@pytest.mark.parametrize("stage", [0, 3])
def test_what_scripts_keep_beside_a_checkpoint_comes_back_as_it_was(
    start: Callable[..., Any], stage: int, tmp_path: Path
) -> None:
    generator = random.Random(7)
    kept = {
        "best": float("inf"), "seen": {3: 0.5, (1, 2): "x"}, "python": generator.getstate(),
        "torch": torch.get_rng_state(), "marked": {"__tuple__": [1]},
    }  # fmt: skip
    engine = start({"zero_optimization": {"stage": stage}})
    micro_step(engine)
    engine.save_checkpoint(str(tmp_path), client_state=kept)
    expected = generator.random()
    found = engine.load_checkpoint(str(tmp_path))[1]
    generator.setstate(found["python"])
    assert generator.random() == expected
    assert torch.equal(found.pop("torch"), kept.pop("torch"))
    assert found == kept


def test_rates_that_are_tensors_are_saved_with_the_scheduler_that_sets_them(start: Callable[..., Any], tmp_path: Path) -> None:
    found = []
    for resumes in (False, True):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        given = {"optimizer": optimizer, "lr_scheduler": lambda made: torch.optim.lr_scheduler.MultiStepLR(made, [1, 3])}
        engine = start(model=model, **given)
        if resumes:
            engine.load_checkpoint(str(tmp_path))
        for seed in (2, 3) if resumes else (0, 1, 2, 3):
            engine.backward(engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean())
            engine.step()
            if seed == 1:
                engine.save_checkpoint(str(tmp_path))
        found.append([engine.module_state_dict(), engine.lr_scheduler.state_dict()["base_lrs"], engine.get_lr()])
    assert_same_bits(*found)


def test_parameters_of_several_models_are_not_gathered(start: Callable[..., Any]) -> None:
    first, second = start(), start()
    free = nn.Parameter(torch.ones(2))
    for mixed in ([first.module[0].weight, second.module[0].weight], [first.module[0].weight, free]):
        with refused(offload.ParameterAccessError, "several models"), deepspeed.zero.GatheredParameters(mixed):
            pass
    with deepspeed.zero.GatheredParameters([free]):
        free.data.fill_(2.0)
    first.destroy()
    with deepspeed.zero.GatheredParameters(first.module.parameters()):
        pass  # what is closed belongs to nobody


def test_init_asks_for_nothing_else() -> None:
    with deepspeed.zero.Init(enabled=False, config_dict_or_path={}, dtype=torch.bfloat16):
        assert not nn.Linear(2, 2).weight.is_meta
    with refused(offload.UsageError, "mpu"):
        deepspeed.zero.Init(mpu=object())
    with refused(offload.UsageError, "'confg'", "'config'"):
        deepspeed.zero.Init(confg={})
