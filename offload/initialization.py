# SPDX-License-Identifier: Apache-2.0
"""From a model, an optimizer and a config to an `Engine`: the first call of every training run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn, optim

from offload.build.assembly import Assembly
from offload.build.ownership import check_free
from offload.checkpoint.carry_over import remove_abandoned
from offload.config import Config
from offload.deepspeed_config import read_settings
from offload.deferred_init.deferred_init import end_recording
from offload.engine import Engine
from offload.model.weights import open_weights
from offload.ranks.all_or_none import together
from offload.ranks.joining import join_ranks
from offload.ranks.virtual_ranks import virtual_ranks
from offload.step.components import give_back

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def initialize(
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
    sync_module_states: bool = False,
) -> Engine:
    """Move `model`'s parameters and `optimizer`'s states into their tiers and return the engine that trains them.

    The model is changed in place and used as before; the loop uses `engine.optimizer`.

    model      any module; on the CPU, or (parts of it) on the meta device under `offload.deferred_init()` or with
               `weights`. Its buffers are moved to the device.
    optimizer  `torch.optim.AdamW`, `Adam`, `Adagrad`, `SGD` or `offload.Lion` (also lion-pytorch's and timm's) over the
               model's trainable parameters, or another that computes element by element. State that it already has is
               taken over. None: the one that a config with DeepSpeed's keys describes; if there is none either, the engine
               runs forward, evaluation and generation only
    config     a `Config`; or a mapping, or the path of a JSON file, with its keys or with DeepSpeed's (docs/deepspeed.md)
    weights    a safetensors file, or a folder with one or with a sharded index: read unit by unit into the tiers; into a model
               of transformers as its `from_pretrained` would, which converts what some models have on disk
    mesh       the ranks that train together, as a `DeviceMesh`: one dimension (all share the shards) or two, (replicate,
               shard): shards within a node, copies across. None: all ranks of the process group, which is started from
               torchrun's environment if it was not; without either, one rank
    sync_module_states  True: every rank begins with rank 0's parameters and buffers. False: a `ConfigError` where ranks
               differ in them; seed them alike

    On several ranks this and every other call is collective: all ranks make it.

    The log, `logging.getLogger("offload")` at level INFO, says how far it is.

    Raises `ConfigError` (also `BudgetError`) and `InitializerError`, before anything is allocated where that can be known,
    and `StorageError` where a path fails. Whatever it raises, the model and the optimizer are as they were.
    """
    end_recording()
    ranks = virtual_ranks() or join_ranks(mesh)

    def prepare() -> tuple[Config, optim.Optimizer | None, Assembly]:
        check_free(model, optimizer)
        resolved, chosen = read_settings(config, model, optimizer, ranks.world_size)
        source = open_weights(weights) if weights is not None else None
        return resolved, chosen, Assembly(model, chosen, resolved, source, ranks, sync_module_states=sync_module_states)

    resolved, chosen, assembly = together(ranks, prepare, lambda _: {})
    remove_abandoned(resolved)
    parts = assembly.build()
    try:
        engine = Engine(model, chosen, resolved, parts, assembly.slots)
        for introduce in introductions:
            introduce(engine)
        engine._taken.commit()
    except BaseException:
        give_back(parts.made)
        raise
    return engine


introductions: list[Callable[[Engine], None]] = []
"""Called with every engine that `initialize` returns: frameworks that a script has imported are to find it in their way."""
