# SPDX-License-Identifier: Apache-2.0
"""Tools that speak DeepSpeed, unmodified, on the drop-in: Trainer, Accelerate, the launcher; and the real one beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
import offload.deepspeed as deepspeed
from tests.warm import WarmProcess

from ..acceptance.runs import refused
from . import entry_points

ROOT = Path(__file__).resolve().parents[2]
PEER = os.environ.get("DEEPSPEED_PYTHON")
"""A Python that has the real DeepSpeed (and torch), where there is one."""


def run(folder: Path, body: str, *arguments: object, launcher: tuple[str, ...] = ("-m", "offload.deepspeed")) -> Any:
    """What the script printed last, as JSON."""
    path = folder / "script.py"
    path.write_text(body)
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    settings = {"OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(path), *map(str, arguments)]
    done = subprocess.run(command, env=plain | settings, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


NAMES = """
import importlib.metadata, importlib.util, json, subprocess, sys
import deepspeed, deepspeed.ops.adam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad, z3_leaf_module
inner = "import deepspeed, deepspeed.zero; print(deepspeed.__name__)"
child = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, check=True).stdout.strip()
found = importlib.util.find_spec("deepspeed") is not None
print(json.dumps({"version": importlib.metadata.version("deepspeed"), "found": found,
    "name": deepspeed.__name__, "same": deepspeed.ops.adam is sys.modules["offload.deepspeed.ops.adam"], "child": child,
    "arguments": sys.argv[1:]}))
"""


def test_plain_import_deepspeed(tmp_path: Path) -> None:
    (shown,) = run(tmp_path, NAMES, "--flag", 3)
    assert shown == {
        "version": "0.19.8", "found": True, "name": "offload.deepspeed", "same": True, "child": "offload.deepspeed",
        "arguments": ["--flag", "3"],
    }  # fmt: skip


def test_the_real_one_is_not_hidden_unasked(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import offload.deepspeed; offload.deepspeed.install()"
    done = WarmProcess.run(["-c", code], 60)
    assert done.returncode == 1 and "the real DeepSpeed is installed" in done.stderr and "shadow=True" in done.stderr


ACCELERATE = """
import json, sys, torch
from accelerate import Accelerator, DeepSpeedPlugin
autos = "gradient_accumulation_steps gradient_clipping train_batch_size train_micro_batch_size_per_gpu"
auto = dict.fromkeys(autos.split(), "auto")
zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
halves = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
plugin = DeepSpeedPlugin(hf_ds_config=auto | halves | {"zero_optimization": zero})
accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
losses = []
for (batch,) in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
names = sorted(accelerator.get_state_dict(model))
print(json.dumps({"kind": str(accelerator.distributed_type), "losses": losses, "names": names}))
"""


@pytest.mark.slow
def test_accelerate_with_a_plugin(tmp_path: Path) -> None:
    (shown,) = run(tmp_path, ACCELERATE, tmp_path / "state")
    assert shown["kind"] == "DistributedType.DEEPSPEED" and shown["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for index, expected in enumerate(shown["losses"]):
        loss = model(data[2 * index : 2 * index + 2]).square().mean()
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        (loss / 2).backward()
        if index % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


TRAINER = """
import json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
def section(*names): return dict.fromkeys(names, "auto")
config = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
        "offload_param": {"device": "cpu", "pin_memory": True}, "contiguous_gradients": True, "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        **section("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")},
    "optimizer": {"type": "AdamW", "params": section("lr", "betas", "eps", "weight_decay")},
    "scheduler": {"type": "WarmupDecayLR",
        "params": section("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"}, "steps_per_print": 2000, "wall_clock_breakdown": False,
    **section("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
}
folder, resumed = sys.argv[1], len(sys.argv) > 2
arguments = TrainingArguments(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, seed=1,
    learning_rate=1e-3, warmup_steps=1, logging_steps=1, save_steps=2, report_to=[], deepspeed=config)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(24)]
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train(resume_from_checkpoint=folder + "/checkpoint-2" if resumed else None)
trainer.save_model(folder + "/final")
print()
print(json.dumps({"losses": [one["loss"] for one in trainer.state.log_history if "loss" in one]}))
"""


@pytest.mark.slow
def test_trainer_with_a_config_of_autos_and_its_resume(tmp_path: Path) -> None:
    (whole,) = run(tmp_path, TRAINER, tmp_path / "out")
    assert len(whole["losses"]) == 4 and (tmp_path / "out" / "final" / "model.safetensors").is_file()
    (resumed,) = run(tmp_path, TRAINER, tmp_path / "out", "resume")
    assert resumed["losses"] == whole["losses"]


INSTALLED = "import offload.deepspeed; offload.deepspeed.install()\n"

ON_A_GPU = """
import os, torch, transformers.trainer
import offload.deepspeed.comm
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
plays = {"is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "empty_cache": None}
for name, value in plays.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)
there = transformers.TrainingArguments
there.device = property(lambda self: (self._setup_devices, torch.device("cpu"))[1])
offload.deepspeed.comm._backend = lambda: "gloo"
"""
"""Hugging Face's libraries take a GPU for granted, and name NCCL; batches and the engine stay on the CPU."""

WAYS = {
    "alone": (),
    "module": ("-m", "offload.deepspeed"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
    "command": ("-c", "from offload.deepspeed.launching import launch; launch()", "--num_gpus", "1", "--no_local_rank"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "played"), [*((way, True) for way in WAYS), ("alone", False)])
def test_trainer_however_it_is_started(tmp_path: Path, way: str, played: bool) -> None:
    """Trainer gathers losses over the process group at every log, be it of one process that nobody launched."""
    (expected,) = run(tmp_path, TRAINER, tmp_path / "out")
    body = INSTALLED + (ON_A_GPU if played else "") + TRAINER
    (shown,) = run(tmp_path, body, tmp_path / "again", launcher=WAYS[way])
    assert shown["losses"] == expected["losses"]


PEER_LOOP = """
import json, sys, torch
import deepspeed
stage = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4))
config = {
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05, "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 12}},
    "zero_allow_untested_optimizer": True,
}
engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
losses = []
for index in range(24):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(index // 2))
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print()
print(json.dumps({"losses": losses, "lr": engine.get_lr(), "norm": float(engine.get_global_grad_norm())}))
"""


def _by_the_real_one(folder: Path, stage: int) -> Any:
    path = folder / "peer.py"
    path.write_text(PEER_LOOP)
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(23456 + stage),
    }
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(PEER), str(path), str(stage)], env=kept | environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"'))


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="DEEPSPEED_PYTHON names no Python with the real DeepSpeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_training_by_the_real_deepspeed(tmp_path: Path, stage: int) -> None:
    theirs = _by_the_real_one(tmp_path, stage)
    (ours,) = run(tmp_path, PEER_LOOP, stage)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-6)
    assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12) and ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)


def test_the_launcher_refuses_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.deepspeed import launching
    from offload.deepspeed.launching import _devices

    assert _devices("localhost:0,2", "") == [0, 2] and _devices("", "") is None
    monkeypatch.setattr(launching, "_device_count", lambda: 3)
    assert _devices("localhost", "") == [0, 1, 2] and _devices("", "localhost:1") == [0, 2]
    for all_of_them in ("localhost", "localhost:0,1,2"):
        with refused(offload.UsageError, "--exclude", "no device"):
            _devices("", all_of_them)
    with refused(offload.UsageError, "another machine", "--node_rank"):
        _devices("worker-1:0", "")
    with refused(offload.UsageError, "--include and --exclude"):
        _devices("localhost:0", "localhost:1")
    assert deepspeed.launcher.runner.main is not None


@pytest.mark.parametrize("command", ["main", "launch"])
def test_what_cannot_be_started_is_said_in_one_place(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    from offload.deepspeed import launching

    (there := tmp_path / "there.py").touch()
    for given, said in (
        ([str(tmp_path / "gone.py")], "there is no script"),
        (["--include", "localhost:x", str(there)], "names no devices"),
    )[: 1 if command == "main" else 2]:
        with pytest.raises(SystemExit) as ended:
            getattr(launching, command)(given)
        assert ended.value.code == 2 and said in capsys.readouterr().err


LAUNCHED = """
import json, os, sys, deepspeed
deepspeed.init_distributed()
path = f"{os.environ['SHOWN']}-{deepspeed.comm.get_rank()}"
with open(path, "w") as file:
    json.dump([deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), sys.argv[1:]], file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("without", [[], ["--no_local_rank"]])
def test_the_launcher_starts_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: list[str]) -> None:
    """Each is told its number among those of the machine, unless it takes none."""
    monkeypatch.setenv("SHOWN", str(tmp_path / "rank"))
    start = ("-c", "from offload.deepspeed.launching import launch; launch()", "--num_gpus", "2", "--master_port", "23987")
    run(tmp_path, LAUNCHED, launcher=(*start, *without))
    found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 1)]
    assert found == [[rank, 2, [] if without else [f"--local_rank={rank}"]] for rank in (0, 1)]


LAUNCHED_BY_ACCELERATE = """
import json, torch
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for batch in data:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print()
print(json.dumps({"losses": losses, "type": accelerator.distributed_type.value, "engine": type(model).__module__}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_launch_with_deepspeed(tmp_path: Path, stage: int, processes: int) -> None:
    """Unmodified; without a GPU two processes are two ranks, each with every second batch."""
    options = f"--use_deepspeed --zero_stage {stage} --offload_optimizer_device cpu --gradient_clipping 1.0 "
    options += f"--num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no "
    options += f"--main_process_port {29777 + 2 * processes + stage}"
    launcher = ("-m", "offload.deepspeed", "--module", "accelerate.commands.launch", *options.split())
    shown = run(tmp_path, LAUNCHED_BY_ACCELERATE, launcher=launcher)
    assert [(one["type"], one["engine"]) for one in shown] == [("DEEPSPEED", "offload.deepspeed.engine")] * processes
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for batches in torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).split(2 * processes):
        of_ranks = [model(batch).square().mean() for batch in batches.split(2)]
        (sum(of_ranks) / processes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_ranks])
    by_rank = sorted(one["losses"] for one in shown)
    for found, expected in zip(by_rank, sorted(map(list, zip(*losses, strict=True))), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_what_the_entry_points_of_other_tools_gave_is_whole_and_within_rounding() -> None:
    report = json.loads(entry_points.RESULT.read_text(encoding="utf-8"))
    assert report
    for tool, said in report.items():
        assert [(run["tuning"], run["config"]) for run in said["runs"]] == entry_points.TOOLS[tool]["runs"]
        assert all(entry_points.within_rounding(run) and run["steps"] == 3 for run in said["runs"])
