# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.comm`: torch.distributed, and answers for one rank where no process group was started."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from offload.deepspeed.absent import absent, check_keywords

T = TypeVar("T")

_TUNING = ("auto_mpi_discovery", "distributed_port", "verbose", "dist_init_required", "config")


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **tuning: Any,
) -> None:
    """Start the process group if it was not started: from the launcher's environment or the arguments, else with one rank.

    `dist_backend` changes nothing: what lies in host memory goes through gloo, what lies on GPUs through NCCL.
    """
    del dist_backend
    check_keywords("deepspeed.init_distributed", tuning, _TUNING)
    if dist.is_initialized():
        return
    if world_size > 0 or _was_launched():
        dist.init_process_group(_backend(), init_method, timeout, world_size, rank)
    else:
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    _tell_accelerate()


def _tell_accelerate() -> None:
    """Accelerate's `PartialState` calls `init_distributed`, then counts one process if it knows no backend; without a GPU it
    names none. What was started is written where `InitProcessGroupKwargs(backend=...)` would have had it written."""
    known = _known_to_accelerate()
    if known.get("backend", "") is None:
        known["backend"] = dist.get_backend()


def _known_to_accelerate() -> dict[str, Any]:
    """What Accelerate, where it is in use, knows of this process and of the others."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    known: dict[str, Any] = getattr(state, "_shared_state", {})
    return known


def start_where_expected() -> None:
    """Start the process group where one is expected and nobody did it yet.

    A launcher's processes expect one, and so do Accelerate and Hugging Face's Trainer where they train with DeepSpeed: in a
    process that nobody launched they leave it to DeepSpeed, and then gather over it.
    """
    if _was_launched() or _known_to_accelerate().get("distributed_type") == "DEEPSPEED":
        init_distributed()


def _was_launched() -> bool:
    return "WORLD_SIZE" in os.environ


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def is_initialized() -> bool:
    return bool(dist.is_initialized())


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier(group: Any = None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def gathered_objects(value: T) -> list[T]:
    """Return what each rank gives, in the order of the ranks. Collective."""
    if get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(dist, name):
        return getattr(dist, name)
    raise absent("deepspeed.comm", name, ("init_distributed", "get_local_rank", *dir(dist)))
