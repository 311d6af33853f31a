# SPDX-License-Identifier: Apache-2.0
"""Which ranks train one model together, and which of them share its shards.

    members   every rank of the mesh, in its order; a *member index* names one
    shards    those that share one set of shards: all members, or a row of a 2-D mesh (hybrid sharding)
    replicas  those that hold the same shard in other rows

What talks to them is in `offload.ranks.transport`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from offload.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REPLICATE_NAMES = ("replicate", "dp_replicate")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Global ranks of all members, and member indices of those that share this rank's shards and that replicate its shard."""

    members: tuple[int, ...]
    shards: tuple[int, ...]
    replicas: tuple[int, ...]

    @staticmethod
    def of(mesh: DeviceMesh | None) -> Arrangement:
        """All ranks in one row, a 1-D mesh, or a 2-D mesh (replicate, shard)."""
        if mesh is None:
            everybody = tuple(range(dist.get_world_size()))
            return Arrangement(everybody, everybody, (dist.get_rank(),))
        grid = mesh.mesh
        if grid.ndim > 2:
            raise ConfigError(f"mesh has {grid.ndim} dimensions: expected (shard,) or (replicate, shard).")
        names = mesh.mesh_dim_names or ()
        if grid.ndim == 2 and len(names) == 2 and names[1] in _REPLICATE_NAMES:
            grid = grid.T
        rows = [[int(rank) for rank in row] for row in grid.reshape(-1, grid.shape[-1])]
        members = tuple(rank for row in rows for rank in row)
        if dist.get_rank() not in members:
            raise ConfigError(f"rank {dist.get_rank()} is not in the mesh {grid.tolist()}: call initialize on its ranks only.")
        row_index, column = divmod(members.index(dist.get_rank()), grid.shape[-1])
        width = grid.shape[-1]
        shards = tuple(range(row_index * width, (row_index + 1) * width))
        return Arrangement(members, shards, tuple(row * width + column for row in range(len(rows))))
