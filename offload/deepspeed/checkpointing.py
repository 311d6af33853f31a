# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.checkpointing`: torch's activation checkpointing, with inputs in CPU memory where the config asks for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as checkpointed

from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.accelerator import get_accelerator

_MODEL_PARALLEL_SEED = "model-parallel-rng"
_SEED_OFFSET = 2718


class _Settings:
    configured = False
    in_cpu = False


_settings = _Settings()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    **section: Any,
) -> None:
    """With `checkpoint_in_cpu` (`cpu_checkpointing`) what a checkpoint keeps lies in CPU memory until its backward.

    The other arguments change nothing: every rank computes whole layers, so there is nothing to partition over
    model-parallel ranks, and torch manages the buffers.
    """
    from offload.deepspeed.settings import read_config

    del partition_activations, synchronize, profile
    if mpu_ is not None and _model_parallel_ranks(mpu_) > 1:
        raise AskedWrongly(
            "checkpointing.configure(mpu_) is given several model-parallel ranks: every rank computes whole layers."
        )
    if deepspeed_config is not None:
        section = dict(read_config(deepspeed_config).get("activation_checkpointing") or {}) | section
    contiguous = contiguous_checkpointing or section.get("contiguous_memory_optimization")
    if contiguous and num_checkpoints is None and section.get("number_checkpoints") is None:
        raise AskedWrongly("contiguous_memory_optimization needs number_checkpoints (num_checkpoints), the number of layers.")
    asked = checkpoint_in_cpu if checkpoint_in_cpu is not None else section.get("cpu_checkpointing")
    _settings.configured, _settings.in_cpu = True, bool(asked)


def _model_parallel_ranks(mpu: Any) -> int:
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 1


def is_configured() -> bool:
    return _settings.configured


def reset() -> None:
    """Do nothing: nothing is left over between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **keywords: Any) -> Any:
    """Return function(*args), whose backward computes the function once more instead of keeping what lies between."""
    del use_reentrant
    if not _settings.in_cpu:
        return checkpointed(function, *args, use_reentrant=False, **keywords)
    devices = [one.device if isinstance(one, torch.Tensor) else None for one in args]
    held = [one.to("cpu") if isinstance(one, torch.Tensor) else one for one in args]

    def again(*inputs: Any) -> Any:
        return function(*(one if device is None else one.to(device) for one, device in zip(inputs, devices, strict=True)))

    return checkpointed(again, *held, use_reentrant=False, **keywords)


non_reentrant_checkpoint = checkpoint


def set_num_layers(nlayers: int) -> None:
    """Do nothing: no buffer is sized by the number of layers."""
    del nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing: see `configure`."""
    del partition_activation


class RandomStates:
    """Random states by name: of the device's generator, or of the CPU's where there is no device."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_.clear()
        self.seeds_.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise AskedWrongly(f"the random state {name!r}, or the seed {seed}, exists already.")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_SEED) -> Iterator[None]:
        """Inside, random numbers come from that state. The next time it goes on from where it stopped."""
        if name not in self.states_:
            raise AskedWrongly(f"there is no random state {name!r}: add it first.")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = RandomStates()


def get_cuda_rng_tracker() -> RandomStates:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and the state that model-parallel layers draw from."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL_SEED, seed + _SEED_OFFSET)
