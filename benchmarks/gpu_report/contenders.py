"""The ways to train that are compared. Each gives one step on a list of one micro-batch, with clipping to 1.0 and AdamW.

A contender that this machine is not for raises `Unavailable` with the reason; what is not installed is not called.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .model import Llama, Shape

CLIP = 1.0
LEARNING_RATE = 1e-4


class Unavailable(Exception):
    """Why a contender does not run here."""


@dataclass
class Contender:
    """`step(tokens)` returns the loss, a tensor; `stats()` what the contender says of itself; `nbytes_per_parameter`: H2D and
    D2H of a step of one micro-batch, by its formula (None: not known)."""

    step: Callable[[torch.Tensor], torch.Tensor]
    close: Callable[[], None]
    stats: Callable[[], dict[str, Any]] = dict
    nbytes_per_parameter: tuple[float, float] | None = None
    note: str = ""


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, **options)


def _step(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The step of whoever takes PyTorch's own way through it."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(shape: Shape, **fields: Any) -> Contender:
    """offload; `fields` of its configuration over parameters and states in CPU memory."""
    import offload

    with offload.deferred_init():
        model = Llama(shape)
    config = {"parameters": "cpu", "optimizer_states": "cpu", "dtype": "bf16", "max_grad_norm": CLIP} | fields
    engine = offload.initialize(model, _adamw(model.parameters()), config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        return loss.detach()

    moved = (4.0, 2.0) if config["parameters"] != "device" else (2.0, 2.0)
    return Contender(step, engine.close, engine.stats, moved if config["optimizer_states"] != "device" else None)


def ours_split(shape: Shape) -> Contender:
    """offload with split states: 12 bytes per parameter of host memory instead of 14, the same bits."""
    return ours(shape, state_format="split")


def ours_states_on_cpu(shape: Shape) -> Contender:
    """offload with the parameters on the device."""
    return ours(shape, parameters="device")


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

    def step(tokens: torch.Tensor) -> torch.Tensor:
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

    return Contender(_step(model, optimizer), lambda: None, note="bf16 states, no fp32 master")


def deepspeed(shape: Shape) -> Contender:
    """DeepSpeed ZeRO stage 3 with parameters and optimizer on the CPU, pinned, buckets of 200 M elements."""
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
            "offload_optimizer": place,
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

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contender(step, torch.distributed.destroy_process_group)


CONTENDERS: dict[str, Callable[[Shape], Contender]] = {
    "offload": ours,
    "offload, split states": ours_split,
    "offload, parameters on the device": ours_states_on_cpu,
    "FSDP2 CPUOffloadPolicy": fsdp2,
    "torchao CPUOffloadOptimizer": torchao,
    "DeepSpeed stage 3 cpu": deepspeed,
    "plain, in memory": in_memory,
}
