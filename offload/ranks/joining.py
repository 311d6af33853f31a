# SPDX-License-Identifier: Apache-2.0
"""How a process finds the ranks that it trains with: torchrun's environment, the process group, the mesh."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from offload.errors import ConfigError
from offload.ranks.arrangement import Arrangement
from offload.ranks.group import Alone, Group
from offload.ranks.transport import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def join_ranks(mesh: DeviceMesh | None) -> Group:
    """The ranks of `mesh`, or all of them: `Ranks` where there are several.

    Starts the process group from torchrun's environment. Collective. Raises `ConfigError` where the environment and the
    process group contradict each other.
    """
    if not dist.is_available():
        return Alone()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized():
        if launched == 1:
            return Alone()
        if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE={launched}, but RANK or MASTER_ADDR is not set: launch with torchrun, or call "
                "torch.distributed.init_process_group first."
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_world_size() == 1:
        return Alone()
    arrangement = Arrangement.of(mesh)
    if len(arrangement.members) == 1:
        return Alone()
    ranks = Ranks(arrangement, _timeout_of_default_group())
    hosts = ranks.exchange_bytes(os.uname().nodename.encode())
    ranks.local_world_size = hosts.count(hosts[ranks.index])
    return ranks


def _timeout_of_default_group() -> timedelta:
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cpu") if "gloo" in dist.get_backend_config() else torch.device("cuda")
    timeout = group._get_backend(device).options._timeout
    return timeout if isinstance(timeout, timedelta) else timedelta(minutes=30)
