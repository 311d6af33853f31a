# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between DeepSpeed and the drop-in: read without running what they name, and both ways with the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import offload
import offload.deepspeed as deepspeed
from offload.cli.main import main as command

from ..acceptance.runs import refused
from .peers import PEER, drop_in, real

SHAPES = {"up.weight": (5, 3), "up.bias": (5,), "down.weight": (2, 5)}
GROUPS = [["up.weight", "down.weight"], ["up.bias"]]


Stage = IntEnum("ZeroStageEnum", {"gradients": 2, "weights": 3}, module="deepspeed.runtime.zero.config")


@dataclass
class Address:
    numel: int
    start: int


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


for kind, name in ((Address, "tensor_fragment.fragment_address"), (LossScaler, "fp16.loss_scaler.LossScaler")):
    place, _, kind.__name__ = f"deepspeed.{'utils' if kind is Address else 'runtime'}.{name}".rpartition(".")
    kind.__module__, kind.__qualname__ = place, kind.__name__


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.frozen = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False), torch.nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.down(self.up(x))).square().mean()


def drawn(name: str, kind: str) -> torch.Tensor:
    seed = torch.Generator().manual_seed(sum(map(ord, name + kind)))
    return torch.rand(SHAPES[name], generator=seed)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes with the names of DeepSpeed's, for the pickler; they are gone when the files are read."""
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    for kind in (Address, LossScaler, Stage):
        module = ModuleType(kind.__module__)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, kind.__module__, module)


def model_states(stage: int) -> dict[str, Any]:
    whole = {name: drawn(name, "fp32") for name in SHAPES}
    whole |= {"frozen.weight": torch.full((2, 2), 4.0), "frozen.bias": torch.full((2,), 5.0), "seen": torch.full((3,), 6.0)}
    return {
        "module": {"seen": whole["seen"]} if stage == 3 else whole,
        "buffer_names": ["seen"],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(SHAPES[name]) for name in group} for group in GROUPS],
        "frozen_param_shapes": {"frozen.weight": torch.Size((2, 2)), "frozen.bias": torch.Size((2,))},
        "frozen_param_fragments": {},
        "shared_params": {},
        "lr_scheduler": {"last_batch_iteration": 2},
        "global_steps": 3,
        "global_samples": 9,
        "skipped_steps": 0,
        "ds_version": "0.19.8",
        "position": 7,
    }


def write(folder: Path, stage: int, ranks: int = 2) -> Path:
    """A checkpoint of `ranks` ranks, with the values of `drawn`."""
    folder.mkdir()
    numbers = {"lr": 0.25, "betas": (0.5, 0.75), "weight_decay": 0.125}
    for rank in range(ranks):
        own: dict[str, list[torch.Tensor]] = {kind: [] for kind in ("fp32", "exp_avg", "exp_avg_sq")}
        slices: list[dict[str, Address]] = []
        for group in GROUPS:
            slices.append({})
            for kind, flats in own.items():
                if stage == 3:
                    flats.append(torch.cat([share(drawn(name, kind), ranks)[rank] for name in group]))
                    continue
                whole = torch.cat([drawn(name, kind).reshape(-1) for name in group])
                size = -(-whole.numel() // ranks)
                flats.append(whole[rank * size :][:size])
            first = 0
            for name in group:
                low, high = max(first, rank * size) if stage < 3 else 0, 0
                if stage < 3:
                    high = min(first + drawn(name, "fp32").numel(), (rank + 1) * size)
                    if low < high:
                        slices[-1][name] = Address(high - low, low - rank * size)
                first += drawn(name, "fp32").numel()
        states = {
            index: {"step": 3, "exp_avg": own["exp_avg"][index], "exp_avg_sq": own["exp_avg_sq"][index]} for index in (0, 1)
        }
        base = {"state": states, "param_groups": [numbers | {"params": [index]} for index in (0, 1)]}
        said: dict[str, Any] = {"loss_scaler": LossScaler(), "zero_stage": Stage(stage), "overflow": False}
        if stage == 3:
            said |= {"optimizer_state_dict": base, "fp32_flat_groups": own["fp32"]}
        else:
            said |= {
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": own["fp32"],
                "param_slice_mappings": slices,
            }
        torch.save({"optimizer_state_dict": said}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = model_states(stage)
        model["frozen_param_fragments"] = {
            "frozen.weight": torch.full((2,), 4.0) if stage == 3 else torch.full((2, 2), 4.0),
            "frozen.bias": torch.full((1,), 5.0) if stage == 3 else torch.full((2,), 5.0),
        }
        if stage == 3 or not rank:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, folder / f"{name}_model_states.pt")
    return folder


def move_to_nvme(folder: Path) -> None:
    """As where the states lay on NVMe: empty tensors that have a name, and raw files of that name, longer than the tensors."""
    for file in sorted(folder.glob("*_optim_states.pt")):
        content = torch.load(file, weights_only=False)
        said = content["optimizer_state_dict"]
        raw = folder / "offloaded_tensors" / f"rank{int(file.name.split('_')[3]):02d}"
        raw.mkdir(parents=True)
        for index, flat in enumerate(said["fp32_flat_groups"]):
            empty = torch.Tensor()
            empty.ds_id = f"{index}_{index + 4}"  # type: ignore[attr-defined]
            own, said["fp32_flat_groups"][index] = said["optimizer_state_dict"]["state"][index], empty
            for name, values in (("", flat), ("exp_avg-", own["exp_avg"]), ("exp_avg_sq-", own["exp_avg_sq"])):
                padded = torch.full((1024,), 9.0)
                padded[: values.numel()] = values
                padded.numpy().tofile(raw / f"{name}{index}_{index + 4}.tensor.swp")
            own["exp_avg"] = own["exp_avg_sq"] = torch.Tensor()
        torch.save(content, file)


def share(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    size = -(-whole.numel() // ranks)
    padded = torch.zeros(size * ranks)
    padded[: whole.numel()] = whole.reshape(-1)
    return list(padded.split(size))


CONFIG = {
    "train_batch_size": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
}
Forget = Callable[[], None]


@pytest.fixture
def forget(named: None, monkeypatch: pytest.MonkeyPatch) -> Forget:
    """From its call on DeepSpeed's names lead nowhere."""

    def call() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            monkeypatch.delitem(sys.modules, name)

    return call


@pytest.mark.parametrize(("stage", "nvme"), [(2, False), (3, False), (3, True)])
def test_an_ordinary_checkpoint_is_gone_on_from(tmp_path: Path, stage: int, nvme: bool, forget: Forget) -> None:
    write(tmp_path / "global_step3", stage)
    if nvme:
        move_to_nvme(tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3")
    forget()
    groups = [{"params": []}, {"params": []}]
    model = Tower()
    for name, one in model.named_parameters():
        if one.requires_grad:
            groups[name == "up.bias"]["params"].append(one)
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, model_parameters=groups, config=CONFIG)
    path, state = engine.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "global_step3") and state == {"position": 7}
    for name in SHAPES:
        parameter = model.get_parameter(name)
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), drawn(name, "fp32"))
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(parameter, kind), drawn(name, kind))
    assert model.seen.tolist() == [6.0] * 3 and engine.module_state_dict()["frozen.weight"].tolist() == [[4.0] * 2] * 2
    assert engine.global_steps == 3 and engine.global_samples == 9 and scheduler.last_batch_iteration == 2
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.25, (0.5, 0.75), 0.125)
    ] * 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["global_step3", "latest"]
    engine.destroy()


def steps_of(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.MultiStepLR:
    return torch.optim.lr_scheduler.MultiStepLR(made, [2, 4], gamma=0.1)


def test_a_scheduler_and_a_state_of_more_than_json_are_gone_on_from(tmp_path: Path, forget: Forget) -> None:
    """Milestones are a Counter, whose keys are numbers. What cannot be kept of a client_state takes nothing else with it."""
    folder = write(tmp_path / "global_step3", 2)
    scheduler = steps_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25))
    for _ in range(3):
        scheduler.step()
    file = folder / "mp_rank_00_model_states.pt"
    given = {"best": float("inf"), "seen": {3: (0.5, 1)}, "random": torch.arange(4), "position": 7}
    given["marked"] = {"__tuple__": [1]}
    content = torch.load(file, weights_only=False) | given | {"strange": {1, 2}, "lr_scheduler": scheduler.state_dict()}
    torch.save(content, file)
    forget()
    config = {key: one for key, one in CONFIG.items() if key != "scheduler"}
    engine, optimizer, _, scheduler = deepspeed.initialize(model=Tower(), config=config, lr_scheduler=steps_of)
    state = engine.load_checkpoint(str(tmp_path), tag="global_step3")[1]
    assert torch.equal(state.pop("random"), given.pop("random")) and state == given
    rates = []
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 3)))
        engine.step()
        rates.append(optimizer.param_groups[0]["lr"])
    engine.destroy()
    assert rates == pytest.approx([0.025, 0.025])


def test_what_is_exported_has_the_scheduler_and_the_state_as_they_were(tmp_path: Path) -> None:
    given = {"best": float("inf"), "seen": {3: (0.5, 1)}}
    config = {key: one for key, one in CONFIG.items() if key != "scheduler"}
    engine, _, _, scheduler = deepspeed.initialize(model=Tower(), config=config, lr_scheduler=steps_of)
    engine.backward(engine(torch.ones(3, 3)))
    engine.step()
    engine.save_checkpoint(str(tmp_path), tag="one", client_state=given)
    expected = scheduler.state_dict()
    engine.destroy()
    universal = tmp_path / "one_universal"
    assert command(["export", str(tmp_path / "one"), str(universal), "--format", "deepspeed-universal"]) == 0
    found = torch.load(universal / "mp_rank_00_model_states.pt", weights_only=True)
    assert found["lr_scheduler"] == expected and {name: found[name] for name in given} == given


def test_weights_of_it_and_what_import_says(tmp_path: Path, forget: Forget, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "global_step3", 3)
    (tmp_path / "latest").write_text("global_step3")
    forget()
    found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert all(torch.equal(found[name], drawn(name, "fp32")) for name in SHAPES) and found["frozen.bias"].tolist() == [5.0] * 2
    assert command(["import", str(tmp_path / "global_step3"), str(tmp_path / "own")]) == 0
    assert "deepspeed-zero: 5 tensors" in capsys.readouterr().out


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("this was run",))


def test_what_a_pickle_names_is_not_run(tmp_path: Path, forget: Forget, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "global_step3", 2)
    hostile = {"optimizer_state_dict": {"param_slice_mappings": [], "loss_scaler": Runs()}}
    torch.save(hostile, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    forget()
    with refused(offload.CheckpointError, "zero_pp_rank_1", "names print"):
        offload.import_checkpoint(folder, tmp_path / "own")
    assert not (tmp_path / "own").exists() and "this was run" not in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["rank", "parallel", "short", "groups", "places"])
def test_parts_that_do_not_fit(tmp_path: Path, fault: str, forget: Forget) -> None:
    stage = 3 if fault in ("short", "groups") else 2
    folder = write(tmp_path / "global_step3", stage, 3)
    last = folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    content = torch.load(last, weights_only=False)
    said = content["optimizer_state_dict"]
    if fault == "rank":
        (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    elif fault == "parallel":
        last.rename(folder / "zero_pp_rank_2_mp_rank_01_optim_states.pt")
    elif fault == "short":
        said["fp32_flat_groups"][0] = said["fp32_flat_groups"][0][:-3]
    elif fault == "groups":
        said["fp32_flat_groups"].pop()
    else:
        said["param_slice_mappings"][0]["down.weight"] = Address(50, 0)
    if fault in ("short", "groups", "places"):
        torch.save(content, last)
    forget()
    words = {
        "rank": "some are missing", "parallel": "ds_to_universal", "short": "not in a flat", "groups": "2 sub-groups",
        "places": "not in a flat",
    }  # fmt: skip
    with refused(offload.CheckpointError, words[fault]):
        offload.import_checkpoint(folder, tmp_path / "own")


def test_a_universal_checkpoint_there_and_back(tmp_path: Path) -> None:
    """What is exported is loaded again: values, moments, steps, rates."""

    def made() -> Any:
        torch.manual_seed(0)
        return deepspeed.initialize(model=Tower(), config=CONFIG | {"checkpoint": {"load_universal": True}})[0]

    engine = made()
    losses = []
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(str(tmp_path / "own"), tag="two", client_state={"position": 5})
        loss = engine(torch.full((3, 3), 1.0 + step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    universal = tmp_path / "all" / "two_universal"
    assert command(["export", str(tmp_path / "own" / "two"), str(universal), "--format", "deepspeed-universal"]) == 0
    (tmp_path / "all" / "latest_universal").write_text("two_universal")
    engine = made()
    assert engine.load_checkpoint(str(tmp_path / "all"))[1] == {"position": 5}
    again = []
    for step in (2, 3):
        loss = engine(torch.full((3, 3), 1.0 + step))
        engine.backward(loss)
        engine.step()
        again.append(loss.item())
    engine.destroy()
    assert again == losses[2:]


def training(stage: int, **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": 300} if stage == 3 else {"stage": stage}
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}, "zero_optimization": zero,
        "scheduler": {
            "type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 12},
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return {"config": config, "steps": 3} | keys


needs_the_real_one = pytest.mark.skipif(PEER is None, reason="DEEPSPEED_PYTHON names no Python with the real DeepSpeed")


@pytest.mark.slow
@needs_the_real_one
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 1), (2, 2), (3, 1), (3, 2)])
def test_what_the_real_one_saved_is_gone_on_from(tmp_path: Path, stage: int, ranks: int) -> None:
    real(tmp_path, training(stage, save=[str(tmp_path / "theirs"), "three"]), ranks)
    goes_on = training(stage, load=[str(tmp_path / "theirs"), "three"], first=3)
    theirs, ours = real(tmp_path, goes_on, ranks), drop_in(tmp_path, goes_on, ranks)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-6)
    assert ours["rates"] == theirs["rates"] and ours["seen"] == theirs["seen"] and ours["global_steps"] == 6


@pytest.mark.slow
@needs_the_real_one
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_what_was_exported_the_real_one_goes_on_from(tmp_path: Path, stage: int, ranks: int) -> None:
    own = training(stage, save=[str(tmp_path / "ours"), "three"], one_decay=True)
    drop_in(tmp_path, own, 1)
    command(["export", str(tmp_path / "ours/three"), str(tmp_path / "all/three"), "--format", "deepspeed-universal"])
    goes_on = training(stage, load=[str(tmp_path / "all"), "three"], first=3, one_decay=True)
    goes_on["config"]["checkpoint"] = {"load_universal": True}
    goes_on["config"]["optimizer"]["params"].pop("torch_adam")  # torch's wants steps that are tensors
    theirs, ours = real(tmp_path, goes_on, ranks), drop_in(tmp_path, goes_on, ranks)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-6)
    assert ours["rates"] == theirs["rates"] and theirs["global_steps"] == 6
