# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.zero`: build a model that is never in memory as a whole, and reach its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import offload
from offload.deepspeed import comm
from offload.deepspeed.absent import check_keywords
from offload.deepspeed.checks import asks_for_checks, unwritten, watch
from offload.deepspeed.owners import answer, owner_of, said_gathered
from offload.deepspeed.tiling import TiledLinear as TiledLinear
from offload.deferred_init.deferred_init import is_deferred, materialize
from offload.deferred_init.replay import plain_torch

_INIT_TUNING = (
    *("data_parallel_group", "mem_efficient_linear", "remote_device", "pin_memory", "config_dict_or_path", "config"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "dtype", "zero_param_parallel_group"),
    *("sequence_data_parallel_group", "param_swapper", "tensor_overrides"),
)
_INIT_REFUSED = {"mpu": "every rank computes whole layers"}


def Init(module: nn.Module | None = None, *, enabled: bool = True, **tuning: Any) -> AbstractContextManager[None]:
    """`offload.deferred_init()`: what is built inside remembers its initialisers, and `initialize` replays them unit by unit.

    Initial values are computed in the dtype that the model asks for. `initialize` rounds them to 16 bits where the config
    says so; DeepSpeed computes them in 16 bits. A `module` that is built already stays as it is.
    """
    check_keywords("deepspeed.zero.Init", tuning, _INIT_TUNING, _INIT_REFUSED)
    config = tuning.get("config_dict_or_path") or tuning.get("config")
    watches = config is not None and asks_for_checks(config)
    return _building(watches) if enabled and module is None else nullcontext()


@contextmanager
def _building(watches: bool) -> Iterator[None]:
    """Every rank draws what rank 0 draws. One that was seeded otherwise goes on with its own random numbers after it."""
    comm.start_where_expected()
    own = None
    if comm.get_world_size() > 1:
        before = torch.get_rng_state()
        first = comm.gathered_objects(before)[0]
        own = before if not torch.equal(before, first) else None
        torch.set_rng_state(first)
    built: dict[int, nn.Parameter] = {}

    def see(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            built[id(parameter)] = parameter

    seeing = register_module_parameter_registration_hook(see)
    try:
        with offload.deferred_init():
            yield
    finally:
        seeing.remove()
    with plain_torch():  # a block around this one goes on
        answer((one for one in built.values() if is_deferred(one) and not hasattr(one, "ds_id")), comm.get_world_size())
    if watches:
        watch(built.values())
    if own is not None:
        torch.set_rng_state(own)


@contextmanager
def GatheredParameters(
    params: Iterable[nn.Parameter] | nn.Parameter | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, the parameters are ordinary tensors: it is `Engine.gathered` of the engine that has them.

    Before `initialize`, parameters of `Init` can be read and written (initialised) inside; others are ordinary tensors
    anyway. What rank 0 writes then reaches the others in `initialize`, unit by unit. What another `modifier_rank` writes
    reaches them at once.

    modifier_rank  on several ranks, what this one has written counts. None: nothing may be written, or the same on all
                   ranks; with the config's `enable_sanity_checks` nothing, and on no rank
    """
    del fwd_module  # units are fetched with all that is read of them
    given = _listed(params) if enabled else []
    engine = owner_of(given)
    if engine is None:
        deferred = [one for one in given if is_deferred(one)]
        recording = offload.deferred_init() if deferred else nullcontext()
        with unwritten(deferred, modifier_rank), recording, said_gathered(given):
            yield
        if modifier_rank and comm.get_world_size() > 1:
            _take_over(deferred, modifier_rank)
        return
    with engine.gathered(given):
        with said_gathered(given), unwritten(given, modifier_rank):
            yield
        if modifier_rank is not None and comm.get_world_size() > 1:
            with torch.no_grad():
                for parameter in given:
                    dist.broadcast(parameter.data, src=modifier_rank)


def _take_over(deferred: Sequence[nn.Parameter], rank: int) -> None:
    """Their values on that rank are the initial values on all."""
    for parameter in deferred:
        [value] = materialize([parameter])
        dist.broadcast(value, src=rank)
        with offload.deferred_init(), torch.no_grad():
            parameter.copy_(value)


def _listed(params: Iterable[nn.Parameter] | nn.Parameter | nn.Module) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, nn.Parameter):
        return [params]
    return [one for one in params if one is not None]  # as the bias of a layer without one


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Inside, the whole model is gathered once for many tokens."""
    module: Any = model.module if hasattr(model, "offload_engine") else model
    with GatheredParameters(module):
        yield module


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a unit is fetched whole, whoever reads its parameters."""
    del module, parameter


unregister_external_parameter = register_external_parameter


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., torch.Tensor], *args: Any, **keywords: Any) -> Callable[..., Any]:
    """Return `fn` itself: `Init` changes no dtype of what is made in it. Transformers replaces this during a block."""
    del args, keywords
    return fn
