# SPDX-License-Identifier: Apache-2.0
"""The ways to train that are compared. Each gives one step on a list of micro-batches, with clipping to 1.0 and AdamW.

A contender that this machine is not for raises `Unavailable` with the reason; what is not installed is not called.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .model import Llama, Shape
from .traffic import Traffic

CLIP = 1.0
LEARNING_RATE = 1e-4


class Unavailable(Exception):
    """Why a contender does not run here."""


@dataclass
class Contender:
    """`step(batches)` returns the loss of the last, a tensor; `stats()` what the contender says of itself; `traffic`: what a
    step moves by its formula (None: not known)."""

    step: Callable[[list[torch.Tensor]], torch.Tensor]
    close: Callable[[], None]
    stats: Callable[[], dict[str, Any]] = dict
    traffic: Traffic | None = None
    note: str = ""
    micro_batches_per_step: int = 1
    recomputes: bool = True


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, **options)


def _step(model: nn.Module, optimizer: Any) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The step of whoever takes PyTorch's own way through it."""

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batches
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(shape: Shape, *, micro_batches: int = 1, recomputes: bool = True, note: str = "", **fields: Any) -> Contender:
    """offload; `fields` of its configuration over parameters and states in CPU memory."""
    import offload

    with offload.deferred_init():
        model = Llama(shape, recomputes=recomputes)
    config = {"parameters": "cpu", "optimizer_states": "cpu", "dtype": "bf16", "max_grad_norm": CLIP} | fields
    engine = offload.initialize(model, _adamw(model.parameters()), config)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        for position, tokens in enumerate(batches):
            with contextlib.nullcontext() if position == len(batches) - 1 else engine.no_sync():
                loss = model(tokens)
                engine.backward(loss / len(batches))
        engine.step()
        engine.zero_grad()
        return loss.detach()

    where = config["parameters"], config["optimizer_states"], config.get("state_format", "fp32")
    return Contender(step, engine.close, engine.stats, Traffic.of(*where, micro_batches), note, micro_batches, recomputes)


def ours_split(shape: Shape) -> Contender:
    """offload with split states: 12 bytes per parameter of host memory instead of 14, the same bits."""
    return ours(shape, state_format="split")


def ours_states_on_cpu(shape: Shape) -> Contender:
    """offload with the parameters on the device."""
    return ours(shape, parameters="device")


def ours_accumulating(shape: Shape) -> Contender:
    """offload with four micro-batches to a step."""
    return ours(shape, micro_batches=4)


def ours_in_backward(shape: Shape) -> Contender:
    """offload that updates a unit as backward leaves it; nothing may clip it then."""
    return ours(shape, update="backward", max_grad_norm=None, note="no clip")


def ours_without_checkpointing(shape: Shape) -> Contender:
    """offload without activation checkpointing."""
    return ours(shape, recomputes=False)


def ours_on_nvme(shape: Shape) -> Contender:
    """offload with parameters and states on a drive."""
    return ours(shape, parameters="nvme", optimizer_states="nvme", nvme=nvme_folder())


def nvme_folder() -> str:
    """Where the report may write: the folder in GPU_REPORT_NVME, else the system's for temporary files."""
    return os.environ.get("GPU_REPORT_NVME") or tempfile.gettempdir()


class _Masters:
    """fp32 masters on the device under torch's fused AdamW, bf16 weights copied from them."""

    def __init__(self, model: nn.Module) -> None:
        self.low = list(model.parameters())
        self.high = [parameter.detach().float().requires_grad_() for parameter in self.low]
        self.inner = _adamw(self.high, fused=torch.cuda.is_available())

    def step(self) -> None:
        for high, low in zip(self.high, self.low, strict=True):
            high.grad, low.grad = low.grad.float() if low.grad is not None else None, None
        torch.nn.utils.clip_grad_norm_(self.high, CLIP)
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.low, self.high)


def in_memory(shape: Shape) -> Contender:
    """Plain PyTorch with everything on the device."""
    model = Llama(shape).to(_device())
    optimizer = _Masters(model)  # before the weights are rounded
    model.to(torch.bfloat16)
    optimizer.low = list(model.parameters())

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batches
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Contender(step, lambda: None)


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise Unavailable("needs a GPU")


def _one_rank() -> None:
    if not torch.distributed.is_initialized():
        store = tempfile.NamedTemporaryFile(prefix="gpu-report-", delete=False).name  # noqa: SIM115 - the store keeps it
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", f"file://{store}", rank=0, world_size=1)


def fsdp2(shape: Shape) -> Contender:
    """torch.distributed.fsdp.fully_shard on one rank with CPUOffloadPolicy; AdamW (fused) on the CPU in fp32."""
    _require_gpu()
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_rank()
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    model = Llama(shape)
    for layer in model.layers:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    optimizer = _adamw(model.parameters(), fused=True)

    return Contender(_step(model, optimizer), torch.distributed.destroy_process_group, note="fp32 parameters cross H2D")


def torchao(shape: Shape) -> Contender:
    """torchao's CPUOffloadOptimizer: parameters and gradients on the device, AdamW and its states on the CPU."""
    _require_gpu()
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError:
        from torchao.prototype.low_bit_optim import CPUOffloadOptimizer
    model = Llama(shape).to(_device(), torch.bfloat16)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1, fused=True)

    # It begins to copy a gradient to the host when autograd has it, before anything could clip it.
    return Contender(_step(model, optimizer), lambda: None, note="bf16 states, no fp32 master; its clip has no effect")


def deepspeed(shape: Shape, *, super_offload: bool = False) -> Contender:
    """DeepSpeed ZeRO stage 3 with parameters and optimizer on the CPU, pinned, buckets of 200 M elements.

    `super_offload`: its SuperOffload, with the share of updates left on the GPU that its tutorial recommends."""
    _require_gpu()
    import deepspeed as package
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    place = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place | ({"super_offload": True, "ratio": 0.9} if super_offload else {}),
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 200_000_000,
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_param_persistence_threshold": 100_000,
        },
    }
    with package.zero.Init(config_dict_or_path=config):
        model = Llama(shape)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batches
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contender(step, torch.distributed.destroy_process_group)


def deepspeed_super_offload(shape: Shape) -> Contender:
    """DeepSpeed with SuperOffload."""
    return deepspeed(shape, super_offload=True)


CONTENDERS: dict[str, Callable[[Shape], Contender]] = {
    "offload": ours,
    "offload, split states": ours_split,
    "offload, parameters on the device": ours_states_on_cpu,
    "offload, accumulation 4": ours_accumulating,
    "offload, update in backward": ours_in_backward,
    "offload, no checkpointing": ours_without_checkpointing,
    "offload, on NVMe": ours_on_nvme,
    "FSDP2 CPUOffloadPolicy": fsdp2,
    "torchao CPUOffloadOptimizer": torchao,
    "DeepSpeed stage 3 cpu": deepspeed,
    "DeepSpeed SuperOffload": deepspeed_super_offload,
    "plain, in memory": in_memory,
}
