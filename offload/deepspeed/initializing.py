# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.initialize`: from DeepSpeed's arguments and config to an engine."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import offload
from offload.deepspeed import checkpointing, comm, lr_schedules, utils
from offload.deepspeed.absent import WHOLE_LAYERS, AskedWrongly, NotDone, check_keywords
from offload.deepspeed.checks import KEY, asks_for_checks, watch
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.owners import answer, engines_of, forget, own
from offload.deepspeed.settings import read_config
from offload.deepspeed.zero_config import DeepSpeedZeroLeafModuleConfig
from offload.deepspeed_config import Maker, Translation, as_there, make_optimizer, translate
from offload.deferred_init.deferred_init import end_recording
from offload.errors import ConfigError
from offload.model.guard import Remains
from offload.model.optimizer_kinds import kind_of

_TUNING = ("distributed_port", "dist_init_required", "collate_fn", "config", "config_params")
_REFUSED = {
    "mpu": WHOLE_LAYERS,
    "mesh_param": "offload.initialize(mesh=...) shards within a node and replicates across",
}
_LOADER_WORKERS = 2


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Return the engine, its optimizer, the loader of `training_data`, and the scheduler.

    args              `args.deepspeed_config` is the path of the config where `config` is not given
    optimizer         a torch optimizer, or a function that makes one from the parameters. Without it the config describes the
                      optimizer. If the config has none either, the engine does not train
    model_parameters  what the config's optimizer trains: parameters or groups. The default is all
    lr_scheduler      a scheduler, or a function that makes one from the optimizer. Without it the config describes it
    config            a mapping or the path of a JSON file, in DeepSpeed's keys. `config_params` is its older name
    collate_fn        the loader's `collate_fn`
    """
    check_keywords("deepspeed.initialize", others, _TUNING, _REFUSED)
    if not isinstance(model, nn.Module):
        raise AskedWrongly(
            f"deepspeed.initialize requires a model; it is of type {type(model).__name__}: pass a torch.nn.Module."
        )
    comm.start_where_expected()
    _take_device(args)
    said = _settings(args, others)
    trained_by = _optimizer(optimizer, said, model_parameters if model_parameters is not None else model.parameters())
    passed = {"optimizer": optimizer, "scheduler": lr_scheduler}
    said.warn(2, tuple(key for key, one in passed.items() if one is not None and getattr(said, key) is not None))
    end_recording()
    _take_back(model)
    forget(model.parameters())
    classes = {id(one): type(one) for one in model.parameters()}
    with _buffers_in(model, said.data_types.buffer_dtype):
        engine = offload.initialize(model, trained_by, _config_of(said), sync_module_states=True)
        try:
            if said.config.stage == 3:
                answer(model.parameters(), comm.get_world_size(), classes)
                if asks_for_checks(said.given):
                    watch(model.parameters())
            own(engine)
            scheduler = _scheduler(lr_scheduler, said.scheduler, engine.optimizer if engine.trains else None)
            loader = _loader(training_data, said, others.get("collate_fn")) if training_data is not None else None
            made = DeepSpeedEngine(engine, said, scheduler, loader)
        except BaseException:
            forget(model.parameters())
            engine.close()
            raise
    _mark_leaves(model, DeepSpeedZeroLeafModuleConfig(**said.leaf_modules))
    if said.activation_checkpointing:
        checkpointing.configure(None, **said.activation_checkpointing)
    atexit.register(_close_at_exit, weakref.ref(engine))
    return made, made.optimizer, loader, scheduler


def _take_device(args: Any) -> None:
    """Make the current device the GPU of this process's number on the machine (or of `args.device_rank`), as DeepSpeed does."""
    number = str(getattr(args, "device_rank", os.environ.get("LOCAL_RANK", "")))
    if number.isdecimal() and torch.cuda.is_available() and int(number) < torch.cuda.device_count():
        torch.cuda.set_device(int(number))


@contextmanager
def _buffers_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """The model's buffers of floating point are in `dtype`, from now on unless the block fails."""
    holders = [module._buffers for module in model.modules()] if dtype is not None else []
    before = [(buffers, name, buffer) for buffers in holders for name, buffer in buffers.items()]
    try:
        for buffers, name, buffer in before:
            if buffer is not None and buffer.is_floating_point():
                buffers[name] = buffer.to(dtype)
        yield
    except BaseException:
        for buffers, name, buffer in before:
            buffers[name] = buffer
        raise


def _take_back(model: nn.Module) -> None:
    """Close the engine that still has the model: initialize may be called on a model again. Collective."""
    for earlier in [engine for engine in engines_of(model.parameters()) if engine is not None]:
        utils.logger.warning("initialize was called on a model that an engine has: that engine is closed.")
        values = earlier.state_dict()
        earlier.close()
        Remains(earlier.module.parameters()).take()
        for name, parameter in earlier.module.named_parameters():
            parameter.data = values[name].to(parameter.device, parameter.dtype)


def _mark_leaves(model: nn.Module, leaves: DeepSpeedZeroLeafModuleConfig) -> None:
    if leaves.classes:
        utils.set_z3_leaf_modules(model, leaves.classes, raise_if_not_found=False)
    utils.set_z3_leaf_modules_by_name(model, leaves.names, raise_if_not_found=False)
    utils.set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes, raise_if_not_found=False)


def _config_of(said: Translation) -> offload.Config:
    """fp16's scale is set by the drop-in's own rule; a step that overflows is left out in any case."""
    config = as_there(said)
    return config if said.half is None else dataclasses.replace(config, loss_scale="skip")


def _settings(args: Any, others: Mapping[str, Any]) -> Translation:
    of_arguments = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = [one for one in (others.get("config"), others.get("config_params"), of_arguments) if one is not None]
    if len(given) != 1:
        raise AskedWrongly(
            f"{len(given)} configs were given (DeepSpeed requires --deepspeed_config to specify configuration file): "
            "pass exactly one, as initialize(config=...) or as --deepspeed_config."
        )
    mapping = read_config(given[0])
    said = translate(mapping, comm.get_world_size())
    said = dataclasses.replace(said, without_effect=tuple(one for one in said.without_effect if one != KEY))
    if said.data_types.refusal is not None:
        raise NotDone(said.data_types.refusal)
    if said.batch.train is None:
        auto = " (Hugging Face's Trainer or Accelerate fill 'auto' in; here nobody does)" if "auto" in mapping.values() else ""
        raise ConfigError(f"the config has no batch size{auto}: set train_batch_size or train_micro_batch_size_per_gpu.")
    return said


def _optimizer(given: Any, said: Translation, parameters: Any) -> torch.optim.Optimizer | None:
    """The given one, or what a given function, or else the config, makes of the parameters."""
    optimizer: torch.optim.Optimizer | None = None
    if given is not None:
        optimizer = given if isinstance(given, torch.optim.Optimizer) else given(list(parameters))
    elif said.optimizer is not None:
        optimizer = make_optimizer(said.optimizer, parameters)
    if optimizer is not None and said.config.stage and not said.allows_untested and kind_of(type(optimizer)) is None:
        raise AskedWrongly(
            f"{type(optimizer).__name__} has no kernel here, and DeepSpeed has not tested it with ZeRO either: set "
            "zero_allow_untested_optimizer to true, and it is called on parts of parameters."
        )
    if given is not None and said.config.state_format == "bf16" and getattr(optimizer, "fp32_optimizer_states", False):
        raise AskedWrongly(
            "bf16.bf16_optimizer_states, and the optimizer was made to keep fp32 moments: make it with "
            "fp32_optimizer_states=False, or leave one out."
        )
    return optimizer


def _scheduler(given: Any, maker: Maker | None, optimizer: Any) -> Any:
    if given is not None:
        is_scheduler = isinstance(given, torch.optim.lr_scheduler.LRScheduler) or hasattr(given, "step")
        return given if is_scheduler else given(optimizer)
    if maker is None or optimizer is None:
        return None
    ours = lr_schedules.VALID_LR_SCHEDULES
    kind = getattr(lr_schedules if maker.type in ours else torch.optim.lr_scheduler, maker.type, None)
    if not isinstance(kind, type):
        raise ConfigError(
            f"scheduler.type={maker.type!r} is not supported: expected one of {', '.join(ours)}, or one of "
            "torch.optim.lr_scheduler."
        )
    try:
        return kind(optimizer, **maker.params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params {dict(maker.params)!r} cannot be those of {maker.type}: {error}.") from error


def _loader(data: Dataset[Any], said: Translation, collate_fn: Any) -> DataLoader[Any]:
    """This rank's share of the data, in micro-batches, in an order that its seed of 0 decides."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=comm.get_world_size(), rank=comm.get_rank())
    return DataLoader(
        data,
        batch_size=said.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=_LOADER_WORKERS,
        pin_memory=torch.cuda.is_available(),
        drop_last=said.drop_last,
    )


def _close_at_exit(reference: weakref.ref[offload.Engine]) -> None:
    """Scripts for DeepSpeed close nothing. Where the script failed, other ranks are told so instead of waited for."""
    engine = reference()
    if engine is not None and not engine.closed:
        failure: BaseException | None = getattr(sys, "last_value", None)
        engine.__exit__(type(failure) if failure is not None else None, failure, None)
