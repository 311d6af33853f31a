# SPDX-License-Identifier: Apache-2.0
"""Scripts as DeepSpeed's users write them, in processes of their own; the same training by offload's own calls, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.warm import WarmProcess

from ..acceptance.models import gpt2
from ..acceptance.runs import digest

ROOT = Path(__file__).resolve().parents[2]
ON_NVME = {"parameters": "nvme", "optimizer_states": "nvme"}

HEAD = """
import argparse, atexit, json, os, sys, torch
import offload.deepspeed as deepspeed
from tests.acceptance.models import gpt2
from tests.acceptance.runs import digest

def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def show(**values):
    with open(os.environ["SHOWN"], "a") as shown:
        shown.write(json.dumps(values) + "\\n")
"""


def run(body: str, *arguments: object, launcher: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What the script showed, on every rank: in a file, each a write of its own, as on one stdout the ranks' lines may mix."""
    path = Path(os.environ["PYTEST_SCRIPT_FOLDER"]) / "script.py"
    shown = path.with_name("shown")
    shown.write_text("")
    path.write_text(HEAD + body)
    done = WarmProcess.run([*launcher, str(path), *map(str, arguments)], 240, PYTHONPATH=str(ROOT), SHOWN=str(shown))
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in shown.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _as_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread here too: torch's products of 16-bit matrices depend on their number."""
    monkeypatch.setenv("PYTEST_SCRIPT_FOLDER", str(tmp_path))
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As DeepSpeed makes it before it makes the masters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


ACCUMULATING = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
config = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True},
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 2,
}
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
engine.train()
shown = []
for i in range(6):
    loss = engine(data(i, 3, 4)).square().mean()
    boundary = engine.is_gradient_accumulation_boundary()
    scaled = engine.backward(loss)
    engine.step()
    norm = engine.get_global_grad_norm() or 0.0
    shown.append([boundary, loss.item(), scaled.item(), engine.global_steps, engine.micro_steps, engine.get_lr()[0], norm])
show(shown=shown, digest=digest(engine.module_state_dict()), samples=engine.global_samples, last=scheduler.get_last_lr())
"""

# The same script with DeepSpeed 0.19.8 on a CPU: boundary, loss, what backward returns, steps, micro-steps, rate, norm.
DEEPSPEED = [
    [False, 0.16563966870307922, 0.08281983435153961, 0, 1, 0.01, 0.0],
    [True, 0.14689263701438904, 0.07344631850719452, 1, 2, 0.009000000000000001, 0.7945973873138428],
    [False, 0.16462232172489166, 0.08231116086244583, 1, 3, 0.009000000000000001, 0.7945973873138428],
    [True, 0.1350730061531067, 0.06753650307655334, 2, 4, 0.008100000000000001, 0.8436034321784973],
    [False, 0.17176572978496552, 0.08588286489248276, 2, 5, 0.008100000000000001, 0.8436034321784973],
]


def test_a_loop_with_accumulation_and_a_scheduler_of_its_own() -> None:
    (shown,) = run(ACCUMULATING)
    for ours, theirs in zip(shown["shown"], DEEPSPEED, strict=False):
        assert [ours[0], *ours[3:6]] == [theirs[0], *theirs[3:6]]
        assert [ours[1], ours[2], ours[6]] == pytest.approx([theirs[1], theirs[2], theirs[6]], rel=1e-5)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with offload.initialize(model, optimizer, {"optimizer_states": "cpu", "max_grad_norm": 0.05}) as engine:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.9)
        for step in range(3):
            for i in (2 * step, 2 * step + 1):
                (model(data(i, 3, 4)).square().mean() / 2).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            scheduler.step()
        assert shown["digest"] == digest(engine.state_dict())
        assert shown["last"] == scheduler.get_last_lr()
    assert shown["samples"] == 18


HUGGING_FACE = """
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
assert args.deepspeed
atexit.register(lambda: show(closed=engine.offload_engine.closed))
deepspeed.init_distributed()
model = gpt2()
engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
engine.train()
losses = []
for step in range(6):
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step)).to(engine.device)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
engine.eval()
with torch.no_grad():
    ids = engine.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
show(losses=losses, lr=scheduler.get_last_lr(), ids=ids.tolist(), digest=digest(engine.module_state_dict()),
     kind=type(model.config).__name__, vocabulary=engine.config.vocab_size, boundary=engine.train_batch_size())
"""


def test_a_hugging_face_model_with_everything_from_the_config(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4}
    config = {  # Hugging Face's template, its "auto" filled in but for what makes no difference
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-2,
                "warmup_num_steps": 3,
                "total_num_steps": 8,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": nvme,
            "offload_param": nvme | {"buffer_size": 1e8},
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "aio": {"block_size": 262144, "queue_depth": 32},
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    shown, at_exit = run(HUGGING_FACE, "--deepspeed", "--deepspeed_config", path)
    assert at_exit == {"closed": True}
    model = rounded(gpt2(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    own = {"dtype": "bf16", "loss_scale": "skip", "max_grad_norm": 1.0, "nvme": str(tmp_path)} | ON_NVME
    losses, rates = [], [0.0, 0.0, 1e-2 / 3, 2e-2 / 3, 1e-2, 8e-3]
    with offload.initialize(model, optimizer, own) as engine:
        model.train()
        for step in range(6):
            engine.optimizer.param_groups[0]["lr"] = rates[step]
            ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
            losses.append(loss.item())
        model.eval()
        ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert shown["losses"] == losses and shown["digest"] == digest(engine.state_dict())
    assert shown["ids"] == ids.tolist() and shown["vocabulary"] == 256 and shown["boundary"] == 2
    assert shown["lr"] == pytest.approx([6e-3])
    assert not [one for one in os.listdir(tmp_path) if one.startswith("offload-")]


RESUMING = """
folder, steps, scratch = sys.argv[1], int(sys.argv[2]), sys.argv[3]
offloading = {"device": "nvme", "nvme_path": scratch}
config = {
    "train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "offload_param": offloading, "offload_optimizer": offloading},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": False}},
}
torch.manual_seed(7)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
assert model[0].weight.is_meta
with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
    torch.nn.init.constant_(model[0].weight, 0.25)
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, config_params=config, lr_scheduler=lambda made: torch.optim.lr_scheduler.MultiStepLR(made, [1, 3], gamma=0.5)
)
with deepspeed.zero.GatheredParameters([model[2].bias]):
    bias = model[2].bias.tolist()
with deepspeed.zero.GatheredParameters(model[2], modifier_rank=0):
    model[2].bias.data.fill_(0.5)
path, client = engine.load_checkpoint(folder)
first = 0 if path is None else client["micro"]
for i in range(first, steps):
    engine.backward(engine(data(i, 3, 4)).square().mean())
    engine.step()
    if i == 3:
        assert engine.save_checkpoint(folder, client_state={"micro": i + 1})
engine.save_16bit_model(folder, "weights.bin")
show(first=first, digest=digest(engine.module_state_dict()), lr=engine.get_lr(), steps=engine.global_steps, bias=bias)
"""


def test_a_deferred_model_that_is_saved_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    (whole,) = run(RESUMING, folder, 8, tmp_path)
    assert (folder / "latest").read_text() == "global_step2" and (folder / "global_step2" / "MANIFEST.json").is_file()
    (resumed,) = run(RESUMING, folder, 8, tmp_path)
    assert (whole["first"], resumed["first"]) == (0, 4)
    assert {key: whole[key] for key in ("digest", "lr", "steps")} == {key: resumed[key] for key in ("digest", "lr", "steps")}
    assert whole["lr"] == [0.01 * 0.25] and whole["steps"] == 4
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    assert whole["bias"] == model[2].bias.tolist()  # what the initialisers gave
    with torch.no_grad():
        model[0].weight.fill_(0.25)
        model[2].bias.fill_(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with offload.initialize(model, optimizer, {"max_grad_norm": 1.0}) as engine:  # DeepSpeed's default
        for step in range(4):
            for i in (2 * step, 2 * step + 1):
                (model(data(i, 3, 4)).square().mean() / 2).backward()
            optimizer.param_groups[0]["lr"] = [0.01, 0.005, 0.005, 0.0025][step]
            engine.step()
            engine.zero_grad()
        assert digest(engine.state_dict()) == whole["digest"]
    saved = torch.load(folder / "weights.bin", weights_only=True)
    assert digest(saved) == whole["digest"] and saved["0.weight"].dtype == torch.float32


HALF = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=0.01)
config = {
    "train_batch_size": 3,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 1},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}},
}
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
shown = []
for i in range(6):
    loss = 30 * engine(data(i, 3, 4).half()).square().mean()
    engine.backward(loss)
    engine.step()
    shown.append([engine.cur_scale, engine.skipped_steps, engine.was_step_applied(), scheduler.last_batch_iteration])
engine.save_16bit_model(sys.argv[1])
show(shown=shown, digest=digest(engine.module_state_dict()), scale=engine.loss_scale(), steps=engine.global_steps)
"""


def test_half_precision_with_a_dynamic_scale(tmp_path: Path) -> None:
    (shown,) = run(HALF, tmp_path)
    model = rounded(small(), torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    iteration, expected, rates = -1, [], {-1: 0.0, 0: 0.0, 1: 0.05, 2: 0.07924812503605781, 3: 0.1, 4: 0.1}
    with offload.initialize(model, optimizer, {"dtype": "fp16", "optimizer_states": "cpu"}) as engine:
        for i in range(6):
            optimizer.param_groups[0]["lr"] = rates[iteration]
            engine.backward(30 * model(data(i, 3, 4).half()).square().mean())
            before = engine.stats()["skipped_steps"]
            engine.step()
            engine.zero_grad()
            skipped = engine.stats()["skipped_steps"]
            iteration += skipped == before
            expected.append([engine.loss_scale, skipped, skipped == before, iteration])
        assert shown["shown"] == expected and 0 < skipped < 6
        assert shown["digest"] == digest(engine.state_dict())
    assert shown["scale"] == 0 and shown["steps"] == 6
    assert {value.dtype for value in torch.load(tmp_path / "pytorch_model.bin", weights_only=True).values()} == {torch.float16}


RANKS = """
deepspeed.init_distributed("nccl")
rank = deepspeed.comm.get_rank()
config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
with deepspeed.zero.Init():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=1):
    model[0].weight.data.fill_(0.1 * (rank + 1))
for i in range(4):
    engine.backward(engine(data(2 * i + rank, 3, 4)).square().mean())
    engine.step()
engine.save_checkpoint(sys.argv[1], tag="here", client_state={"n": 1})
deepspeed.comm.barrier()
values = engine.module_state_dict()
engine.load_checkpoint(sys.argv[1])
assert digest(values) == digest(engine.module_state_dict())
from tests.integrations.test_deepspeed_scripts import by_own_calls
show(rank=rank, world=engine.world_size, batch=engine.train_batch_size(), digest=digest(values), own=by_own_calls(rank))
"""


def by_own_calls(rank: int) -> str:
    """`RANKS` without DeepSpeed's calls, at another stage."""
    model = small()
    with torch.no_grad():
        model[0].weight.fill_(0.2)
    with offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), {"stage": 1}) as engine:
        for step in range(2):
            with engine.no_sync():
                (model(data(4 * step + rank, 3, 4)).square().mean() / 2).backward()
            (model(data(4 * step + 2 + rank, 3, 4)).square().mean() / 2).backward()
            engine.step()
            engine.zero_grad()
        return digest(engine.state_dict())


def test_two_ranks(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    shown = run(RANKS, tmp_path / "saves", launcher=launcher)
    assert sorted(one["rank"] for one in shown) == [0, 1] and {one["world"] for one in shown} == {2}
    assert len({one["digest"] for one in shown} | {one["own"] for one in shown}) == 1
    assert {one["batch"] for one in shown} == {12}
    assert (tmp_path / "saves" / "latest").read_text() == "here"
