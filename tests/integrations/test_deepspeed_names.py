# SPDX-License-Identifier: Apache-2.0
"""What scripts import from DeepSpeed by name and no other file of tests uses: what each does here."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from offload.deepspeed.runtime.config import DeepSpeedConfig
from offload.deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from offload.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload.deepspeed import checkpointing
from offload.deepspeed.loss_scaler import LossScaler
from offload.deepspeed.names import MODULES
from offload.deepspeed.owners import ZeroParamStatus, are_gathered
from offload.deepspeed.utils import RepeatingLoader, see_memory_usage, set_z3_leaf_modules, z3_leaf_module
from offload.deepspeed_config import Half

from ..acceptance.runs import assert_same_bits, refused
from ..ranks.crew import Crew
from .conftest import CONFIG

Start = Callable[..., deepspeed.DeepSpeedEngine]
THREE = {"zero_optimization": {"stage": 3}}


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def step(engine: deepspeed.DeepSpeedEngine, seed: int = 0) -> None:
    engine.backward(engine(drawn(seed)).square().mean())
    engine.step()


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, wanted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)])
        self.wanted, self.runs = wanted, 0

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return layer(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(self._layer, layer, x) if self.wanted else self._layer(layer, x)
        return x


@pytest.mark.parametrize("given", ["section", "call", "in_cpu"])
def test_checkpointed_layers_compute_twice_and_change_no_bit(start: Start, given: str) -> None:
    """By the config's section, by `configure`, and with what a checkpoint keeps in CPU memory."""
    section = {"partition_activations": True, "cpu_checkpointing": given != "call", "contiguous_memory_optimization": False}
    found = []
    for wanted in (False, True):
        model = Checkpointed(wanted)
        engine = start(THREE | ({"activation_checkpointing": section} if given == "section" else {}), model=model)
        if given != "section":
            checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=given == "in_cpu")
        assert checkpointing.is_configured()
        for seed in range(3):
            torch.manual_seed(seed)
            step(engine, seed)
        assert model.runs == (18 if wanted else 9)
        found.append(engine.module_state_dict())
    assert_same_bits(*found)


def test_what_activation_checkpointing_refuses() -> None:
    class Parallel:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with refused(offload.UsageError, "model-parallel ranks"):
        checkpointing.configure(Parallel())
    with refused(offload.UsageError, "number_checkpoints"):
        checkpointing.configure(None, {"activation_checkpointing": {"contiguous_memory_optimization": True}})


# ---- the config ------------------------------------------------------------------------------------------------------


def test_a_config_by_itself(tmp_path: Path) -> None:
    given = CONFIG | {"train_batch_size": 12, "gradient_accumulation_steps": 4, "fp16": {"enabled": True}}
    config = DeepSpeedConfig(given | {"zero_optimization": {"stage": 2}, "scheduler": {"type": "OneCycle"}})
    assert (config.train_batch_size, config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu) == (12, 4, 3)
    assert config.fp16_enabled and config.zero_enabled and config.zero_optimization_stage == 2
    assert config.optimizer_name == "adamw" and config.scheduler_name in VALID_LR_SCHEDULES
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert DeepSpeedConfig(path).train_batch_size == 3


def test_a_config_in_hjson(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.hjson"
    path.write_text(
        "{\n  # three at once\n  train_batch_size: 3\n  optimizer: {\n    type: AdamW\n    params: {lr: 0.01}\n  }\n}\n"
    )
    assert deepspeed.runtime.config.read_config(path) == CONFIG
    monkeypatch.setenv("HOME", str(tmp_path))
    assert deepspeed.runtime.config.read_config("~/config.hjson") == CONFIG
    engine = deepspeed.initialize(model=nn.Linear(4, 2), config=str(path))[0]
    step(engine)
    assert engine.global_steps == 1
    engine.destroy()
    path.write_text("{\n  # twice\n  steps_per_print: 1\n  steps_per_print: 2\n}\n")
    with refused(offload.ConfigError, "steps_per_print"):
        deepspeed.runtime.config.read_config(path)
    monkeypatch.setitem(sys.modules, "hjson", None)
    with refused(offload.ConfigError, "Install the package hjson"):
        deepspeed.runtime.config.read_config(path)
    with pytest.raises(offload.ConfigError, match=r"No such file[^I]*$"):
        deepspeed.runtime.config.read_config(tmp_path / "gone.json")


def test_what_an_average_is_computed_as_changes_no_bit(start: Start) -> None:
    """`prescale_gradients` divides before the sum what is else divided after it: averages here are neither."""
    found = []
    for own in ({}, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}):
        engine = start({"zero_optimization": {"stage": 1}} | own)
        step(engine)
        found.append(engine.module_state_dict())
    assert_same_bits(*found)


# ---- the engine and its optimizer ------------------------------------------------------------------------------------


def test_states_that_are_offloaded_and_reloaded(start: Start) -> None:
    """They lie where the config puts them; a script that moves them between two steps ends with the same bits."""
    found = []
    for moves in (False, True):
        engine = start(THREE)
        step(engine)
        if moves:
            engine.offload_states()
            engine.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params], device="cpu")
            engine.reload_states()
            engine.empty_partition_cache()
        step(engine, 1)
        found.append(engine.module_state_dict())
    assert_same_bits(*found)
    with refused(offload.ConfigError, "'weights'", "optim_states"):
        engine.offload_states(include=["weights"])
    with refused(offload.ConfigError, "'nvme'", "'cpu'"):
        engine.offload_states(device="nvme")


def test_what_the_optimizer_shows(start: Start) -> None:
    engine = start({"fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": {"stage": 2}})
    optimizer = engine.optimizer
    assert optimizer.dynamic_loss_scale and isinstance(optimizer.loss_scaler, LossScaler) and optimizer.cur_scale == 16
    assert not optimizer.overflow and engine.dynamic_loss_scale() and engine.loss_scale() == 0
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.01
    engine.backward(engine(drawn(0).half()).float().square().mean())
    engine.step()
    assert engine.get_global_grad_norm() == optimizer._global_grad_norm > 0
    assert engine._config.zero_optimization_stage == 2 and engine._config.fp16_enabled
    fixed = start().optimizer
    assert not fixed.dynamic_loss_scale and fixed.cur_scale == 1


def test_hysteresis_of_steps_in_a_row() -> None:
    """With `consecutive_hysteresis` every good step gives the patience back: only two overflows in a row lower the scale."""
    scales = []
    for consecutive in (False, True):
        half = Half(initial_scale_power=4, loss_scale_window=100, hysteresis=2, consecutive_hysteresis=consecutive)
        scaler = LossScaler.of(half, hesitates=True)
        for overflow in (True, False, True, False, True, True):
            scaler.update_scale(overflow)
        scales.append(scaler.cur_scale)
    assert scales == [2, 8]


def test_what_a_persistent_parameter_answers(start: Start) -> None:
    """`ds_persist` is False, whatever stays whole: scripts gather what is not persistent, and gathering works for all."""
    weight: Any = start(THREE).module[0].weight
    assert weight.ds_persist is False
    with deepspeed.zero.GatheredParameters([weight]):
        assert weight.shape == (8, 4) and weight.detach().clone().isfinite().all()
    assert weight.detach().clone().isfinite().all()  # small, so it can be read without the block too


@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_gathered_says_so_as_long_as_it_is(start: Start, deferred: bool) -> None:
    """Not in a block that is turned off; not after one that failed; still after a block inside of another."""
    with deepspeed.zero.Init(enabled=deferred):
        model: Any = nn.Linear(4, 2)
    both = list((model if deferred else start(THREE, model=model).module).parameters())
    between = [one.ds_status.now for one in both]

    def is_gathered() -> bool:
        return are_gathered(both[:1]) and are_gathered(both[1:])

    gathered = deepspeed.zero.GatheredParameters
    with gathered(both, enabled=False):
        assert not is_gathered() and [one.ds_status for one in both] == between
    with gathered(both):
        with gathered(both):
            assert is_gathered()
        assert is_gathered() and all(one.ds_status == ZeroParamStatus.AVAILABLE for one in both)
    with pytest.raises(ZeroDivisionError), gathered(both):
        1 / 0  # noqa: B018
    assert not is_gathered() and [one.ds_status for one in both] == between


@pytest.mark.parametrize("deferred", [False, True])
def test_who_writes_what_nobody_is_to_take_over(start: Start, deferred: bool) -> None:
    """With `enable_sanity_checks`, on one rank as on several: reading is right, writing needs a modifier_rank."""
    config = CONFIG | {"zero_optimization": {"stage": 3, "enable_sanity_checks": True}}
    if deferred:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Linear(4, 2)
    else:
        model = start(config, model=nn.Linear(4, 2)).module
    gathered = deepspeed.zero.GatheredParameters
    with gathered([model.weight]):
        assert model.weight.sum().isfinite()
    with refused(offload.UsageError, "in-place modification", "modifier_rank"), gathered([model.weight]), torch.no_grad():
        model.weight.add_(1.0)
    with gathered([model.weight], modifier_rank=0), torch.no_grad():
        model.weight.zero_()
    with gathered([model.weight]):
        assert not model.weight.any()
    plain = start(THREE, model=nn.Linear(4, 2)).module
    with gathered([plain.weight]), torch.no_grad():
        plain.weight.zero_()
    assert not plain.weight.detach().clone().any()


@pytest.mark.parametrize(("deferred", "told"), [(True, "in-place modification"), (False, "holds other values on rank")])
def test_all_ranks_are_told_of_what_one_wrote(two: Crew, deferred: bool, told: str) -> None:
    """Of an engine's parameters ranks are told without the key, too."""
    assert two.do("watched", deferred=deferred, writer=None) == ["", ""]
    assert all(told in said for said in two.do("watched", deferred=deferred, writer=1))


def test_weights_are_converted_whole_or_not_at_all(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there stays until the new files are whole: ranks may write one folder at once."""
    engine = start(THREE)
    engine.save_checkpoint(str(tmp_path / "saved"))
    convert = deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    for keywords, name in (
        ({"safe_serialization": True}, "model.safetensors"),
        ({"max_shard_size": None}, "pytorch_model.bin"),
    ):
        convert(str(tmp_path / "saved"), str(tmp_path / "out"), **keywords)
        assert (tmp_path / "out" / name).is_file()
    convert(str(tmp_path / "saved"), str(tmp_path / "parts"), max_shard_size="0.1KB")
    index = json.loads((tmp_path / "parts" / "pytorch_model.bin.index.json").read_text())
    assert set(index["weight_map"]) == set(engine.module_state_dict())
    assert {one.name for one in (tmp_path / "parts").iterdir()} == {
        *index["weight_map"].values(),
        "pytorch_model.bin.index.json",
    }
    before = (tmp_path / "out" / "pytorch_model.bin").read_bytes()
    monkeypatch.setattr(torch, "save", lambda values, path: Path(path).write_bytes(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(str(tmp_path / "saved"), str(tmp_path / "out"), max_shard_size=None)
    assert (tmp_path / "out" / "pytorch_model.bin").read_bytes() == before
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"model.safetensors", "pytorch_model.bin"}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_script_beside_a_checkpoint_writes_its_weights(start: Start, tmp_path: Path, stage: int) -> None:
    engine = start({"zero_optimization": {"stage": stage}})
    engine.save_checkpoint(str(tmp_path))
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--max_shard_size", "1GB"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    assert_same_bits(torch.load(tmp_path / "out" / "pytorch_model.bin"), engine.module_state_dict())


def test_the_number_of_micro_batches_is_changed_on_the_way(start: Start) -> None:
    """What follows is as in an engine that began with the other number."""
    changed, begun = start(), start({"train_batch_size": 6, "gradient_accumulation_steps": 2})
    changed.set_train_batch_size(6)
    assert changed.get_batch_info() == begun.get_batch_info() == (6, 3, 2)
    for index in range(4):
        given = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        for engine in (changed, begun):
            engine.backward(engine(given).square().mean())
            engine.step()
    assert changed.global_steps == 2 and changed.global_samples == 12
    assert_same_bits(changed.module_state_dict(), begun.module_state_dict())
    with pytest.raises(ValueError, match="divisible"):
        changed.set_train_batch_size(7)
    changed.set_train_micro_batch_size(5)
    assert changed.get_batch_info() == (10, 5, 2)


def test_what_compile_is_told_reaches_torch(start: Start) -> None:
    """As Accelerate tells it: the backend by itself, the rest in `compile_kwargs`."""
    seen: list[dict[str, Any]] = []

    def backend(graph: Any, inputs: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        return graph.forward

    engine = start(THREE)
    engine.compile(backend, compile_kwargs={"options": {"given": 1}}, schedule=None, compiled_autograd_enabled=False)
    step(engine)
    assert seen and all(keywords == {"options": {"given": 1}} for keywords in seen)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_passes_for_deepspeeds_optimizer(start: Start, stage: int) -> None:
    optimizer = start({"zero_optimization": {"stage": stage}}).optimizer
    assert isinstance(optimizer, DeepSpeedOptimizer) and isinstance(optimizer, ZeROOptimizer) == (stage == 1)
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), DeepSpeedOptimizer)


# ---- modules -----------------------------------------------------------------------------------------------------------


def test_modules_are_found_by_attribute() -> None:
    """But for one where there is a function of its name, as in DeepSpeed."""
    for path in MODULES:
        found: Any = deepspeed
        for name in path.split("."):
            found = getattr(found, name)
        if path != "utils.z3_leaf_module":
            assert found is sys.modules[f"offload.deepspeed.{path}"], path


# ---- utils -----------------------------------------------------------------------------------------------------------


def test_a_loader_that_begins_again() -> None:
    sampler = torch.utils.data.DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = RepeatingLoader(torch.utils.data.DataLoader(list(range(4)), batch_size=2, sampler=sampler))
    epochs = [torch.cat([next(loader), next(loader)]).tolist() for _ in range(3)]
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    assert epochs == expected and len(loader) == 2 and loader.epoch == 2


def test_memory_is_said_where_it_is_forced() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.utils.logger.addHandler(handler)
    try:
        see_memory_usage("quietly")
        assert not said
        see_memory_usage("here", force=True)
    finally:
        deepspeed.utils.logger.removeHandler(handler)
    assert len(said) == 1 and said[0].startswith("here | host: ") and "GiB used" in said[0]


def test_leaf_modules_by_class(start: Start) -> None:
    model = start(THREE).module
    (found,) = set_z3_leaf_modules(model, [nn.Tanh])
    assert found is model[1] and z3_leaf_module(found) and not z3_leaf_module(model[0])
    with refused(offload.ConfigError, "Conv2d"):
        set_z3_leaf_modules(model, [nn.Conv2d])


@pytest.mark.parametrize("kind", ["name", "suffix"])
def test_leaf_modules_by_their_names(kind: str) -> None:
    """In the order of the names; the flag is the third argument, as there; one that is missing raises after the others."""
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Tanh()})
    mark = getattr(deepspeed.utils, f"set_z3_leaf_modules_by_{kind}")
    assert mark(model, ["second", "first"]) == ([model["second"], model["first"]], [])
    assert mark(model, ["first", "third"], False, raise_if_not_found=False) == ([model["first"]], ["third"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model["second"]]
    with refused(offload.ConfigError, "'third'"):
        mark(model, ["first", "third"])
    assert z3_leaf_module(model["first"]) and mark(model, []) == ([], [])


def test_tensors_in_named_tuples() -> None:
    one, pair = torch.ones(1), namedtuple("Pair", "first second")
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"pair": pair(one, 3)})["pair"]
    moved = deepspeed.runtime.utils.move_to_device(pair(one, [one]), "cpu")
    assert copied[0] == 1 and copied[0].data_ptr() != one.data_ptr() and copied[1] == 3
    assert moved[0] is moved[1][0] is one


def test_pipelines_are_refused_by_name() -> None:
    with refused(offload.UsageError, "PipelineModule"):
        deepspeed.pipe.PipelineModule(layers=[nn.Linear(4, 2)], num_stages=1)
