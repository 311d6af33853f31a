# SPDX-License-Identifier: Apache-2.0
"""Pretrained models under ZeRO-3, through `zero.Init` as Transformers enters it: what LLaMA-Factory, axolotl and Trainer do
before they call `initialize`, and the scripts of DeepSpeed's tutorials. In processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

from .test_deepspeed_tools import run

_LAUNCHER = ("-c", "from offload.deepspeed.launching import launch; launch()")
LAUNCH = (*_LAUNCHER, "--num_gpus", "2", "--no_local_rank", "--master_port")

RESIZED = """
import json, os, sys, torch, deepspeed
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.integrations import HfDeepSpeedConfig
torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
saved = GPT2LMHeadModel(GPT2Config(**sizes))
zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
config = {"train_batch_size": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2,
    "weight_decay": 0.1}}}
for how in ("mean", "normal"):
    folder = os.path.join(sys.argv[1], how)
    saved.save_pretrained(folder)
    kept = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    partitioned = all(hasattr(one, "ds_id") and one.is_meta for one in model.parameters())
    model.resize_token_embeddings(70, mean_resizing=how == "mean")
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    engine, *_ = deepspeed.initialize(model=model, config=config)
    before = engine.module_state_dict()
    torch.save({name: value.clone() for name, value in before.items()}, folder + "/before.pt")
    ids, losses = torch.arange(60, 68)[None], []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    del kept
    print()
    print(json.dumps({"partitioned": partitioned, "tied": tied, "losses": losses}))
"""


def test_embeddings_of_a_pretrained_model_are_resized(tmp_path: Path) -> None:
    """New rows by the mean of the others, or by a normal distribution: one after the other, as importing takes longest."""
    from transformers import AutoModelForCausalLM

    for how, shown in zip(("mean", "normal"), run(tmp_path, RESIZED, tmp_path), strict=True):
        assert shown["partitioned"] and shown["tied"]
        before = torch.load(tmp_path / how / "before.pt", weights_only=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / how, local_files_only=True)
        for name, value in model.state_dict().items():  # to the bit, and new rows beside
            assert torch.equal(before[name][: len(value)], value), name
        added = before["transformer.wte.weight"][64:]
        assert added.shape == (6, 16) and bool(added.isfinite().all()) and bool((added != 0).all())
        model.resize_token_embeddings(70)
        model.load_state_dict(before)
        ids, losses = torch.arange(60, 68)[None], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        with offload.initialize(model, optimizer, {"max_grad_norm": 1.0}) as engine:
            model.train()
            for _ in range(3):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                engine.step()
                engine.zero_grad()
                losses.append(loss.item())
        assert shown["losses"] == pytest.approx(losses, rel=1e-6)


ADAPTERS = """
import json, os, sys, torch, deepspeed
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.integrations import HfDeepSpeedConfig
folder = sys.argv[1]
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
if rank == 0:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
deepspeed.comm.barrier()
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
kept = HfDeepSpeedConfig(config)
torch.manual_seed(rank)
model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16)
model.resize_token_embeddings(70)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"]))
engine, *_ = deepspeed.initialize(model=model, config=config)
losses = []
for _ in range(3):
    ids = torch.arange(8)[None] + rank
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
whole = engine.module_state_dict()
total = sum(value.double().abs().sum().item() for value in whole.values())
values = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
if rank == 0:
    model.save_pretrained(folder + "/adapter", state_dict=values)
shown = {"rank": rank, "losses": losses, "total": total, "kept": len(values or ())}
with open(f"{folder}/shown-{rank}", "w") as file:
    json.dump(shown, file)
"""


@pytest.mark.slow
def test_adapters_on_a_pretrained_model_on_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run(tmp_path, ADAPTERS, folder, launcher=(*LAUNCH, "23981"))
    first, second = (json.loads((folder / f"shown-{rank}").read_text()) for rank in (0, 1))
    assert first["total"] == second["total"] and (first["kept"], second["kept"]) == (4, 0)
    assert first["losses"][-1] < first["losses"][0] and second["losses"][-1] < second["losses"][0]
    from safetensors.torch import load_file

    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert sum("lora" in name for name in saved) == 4 and all(bool(one.isfinite().all()) for one in saved.values())


# The loops of DeepSpeed's tutorials (getting started, CIFAR-10, ZeRO), with what they leave open filled in.
TUTORIAL = """
import argparse, json, sys, torch
import deepspeed
parser = argparse.ArgumentParser(description="My training script.")
parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
parser.add_argument("--save_dir")
parser = deepspeed.add_config_arguments(parser)
cmd_args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
draw = torch.Generator().manual_seed(1)
trainset = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=draw), torch.randn(64, 2, generator=draw))
parameters = filter(lambda p: p.requires_grad, net.parameters())
given = {"args": cmd_args} if cmd_args.deepspeed_config else {"config_params": json.loads(CONFIG)}
model_engine, optimizer, trainloader, __ = deepspeed.initialize(
    model=net, model_parameters=parameters, training_data=trainset, **given
)
losses, scales = [], []
for i, data in enumerate(trainloader):
    inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
    if model_engine.fp16_enabled():
        inputs, labels = inputs.half(), labels.half()
    loss = torch.nn.functional.mse_loss(model_engine(inputs), labels)
    model_engine.backward(loss)
    model_engine.step()
    losses.append(loss.item())
    scales.append(model_engine.cur_scale)
client_sd = {"step": i}
ckpt_id = loss.item()
model_engine.save_checkpoint(cmd_args.save_dir, ckpt_id, client_state=client_sd)
_, client_sd = model_engine.load_checkpoint(cmd_args.save_dir, ckpt_id)
print()
print(json.dumps({"losses": losses, "steps": model_engine.global_steps, "step": client_sd["step"], "scales": scales,
                  "skipped": model_engine.skipped_steps}))
"""
_ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}


def _tutorials(nvme: Path) -> dict[str, dict[str, Any]]:
    offloading = {"device": "nvme", "nvme_path": str(nvme), "pin_memory": True, "buffer_count": 5}
    infinity = {"stage": 3, "contiguous_gradients": True, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    infinity |= {"stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 1e7}
    return {
        "getting started": {"train_batch_size": 8, "gradient_accumulation_steps": 1, "zero_optimization": True},
        "fp16, stage 2, accumulation": {
            **{"train_batch_size": 8, "gradient_accumulation_steps": 4, "fp16": {"enabled": True, "initial_scale_power": 8}},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
        },
        "ZeRO-Infinity": {
            "train_batch_size": 8,
            "zero_optimization": infinity
            | {"sub_group_size": 1e9, "offload_optimizer": offloading | {"pipeline_read": True}, "offload_param": offloading},
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["getting started", "fp16, stage 2, accumulation", "ZeRO-Infinity"])
def test_the_loops_of_the_tutorials(tmp_path: Path, name: str) -> None:
    config: dict[str, Any] = {"optimizer": _ADAM, "gradient_clipping": 1.0} | _tutorials(tmp_path)[name]
    by_argument = name == "getting started"
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    arguments = ("--save_dir", tmp_path / "saves")
    said = ("--deepspeed", "--deepspeed_config", path) if by_argument else ()
    (shown,) = run(tmp_path, TUTORIAL.replace("CONFIG)", f"{json.dumps(config)!r})"), *arguments, *said)
    accumulation = config.get("gradient_accumulation_steps", 1)
    assert shown["step"] == len(shown["losses"]) - 1 and shown["steps"] == len(shown["losses"]) // accumulation
    assert shown["losses"] == pytest.approx(_plainly(accumulation, 8 // accumulation), rel=2e-2 if "fp16" in config else 1e-5)
    assert shown["skipped"] == 0 and set(shown["scales"]) == ({256.0} if "fp16" in config else {1.0})


def _plainly(accumulation: int, micro: int) -> list[float]:
    """The same by torch alone, in fp32, in the order in which the loader draws."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=draw), torch.randn(64, 2, generator=draw))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.999), weight_decay=3e-7)
    losses = []
    for i, (inputs, labels) in enumerate(torch.utils.data.DataLoader(data, micro, sampler=sampler)):
        loss = torch.nn.functional.mse_loss(net(inputs), labels)
        (loss / accumulation).backward()
        if (i + 1) % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
