# SPDX-License-Identifier: Apache-2.0
"""`get_accelerator()`: what torch says about the device, under DeepSpeed's names."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import Any

import psutil
import torch

from offload.deepspeed.absent import absent


class Accelerator:
    """CUDA where torch sees a device, else the CPU."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: Any = torch.cuda if self._name == "cuda" else torch.cpu
        self._communication_backend_name = "nccl" if self._name == "cuda" else "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> Any:
        return torch.cuda.current_device() if self._name == "cuda" else os.environ.get("LOCAL_RANK", 0)

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index) if self._name == "cuda" else nullcontext()

    def set_device(self, device_index: int) -> None:
        self._module.set_device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._name == "cuda" else int(os.environ.get("LOCAL_SIZE", "1"))

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_triton_supported(self) -> bool:
        return False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        del align_bytes
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned() if self._name == "cuda" else tensor.device.type == "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        self._module.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return int(torch.cuda.initial_seed() if self._name == "cuda" else torch.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._name == "cuda" else torch.default_generator

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.set_rng_state(new_state, device_index if device_index is not None else "cuda")
        else:
            torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._name == "cuda":
            return torch.cuda.get_rng_state(device_index if device_index is not None else "cuda")
        return torch.get_rng_state()

    def _memory(self, name: str, device_index: int | None = None) -> int:
        """In bytes; on the CPU those of the whole process."""
        if self._name == "cuda":
            return int(getattr(torch.cuda, name)(device_index))
        return int(psutil.Process().memory_info().rss)

    memory_allocated = functools.partialmethod(_memory, "memory_allocated")
    max_memory_allocated = functools.partialmethod(_memory, "max_memory_allocated")
    memory_reserved = memory_cached = functools.partialmethod(_memory, "memory_reserved")
    max_memory_reserved = max_memory_cached = functools.partialmethod(_memory, "max_memory_reserved")

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        if self._name == "cuda":
            return int(torch.cuda.get_device_properties(device_index).total_memory)
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._name == "cuda":
            return int(torch.cuda.mem_get_info(device_index)[0])
        return int(psutil.virtual_memory().available)

    def range_push(self, message: str) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        """Streams, events and typed tensors are the device's own, under torch's names."""
        module = self.__dict__.get("_module")
        if module is not None and not name.startswith("_") and hasattr(module, name):
            return getattr(module, name)
        raise absent("deepspeed.accelerator.get_accelerator()", name, dir(type(self)))


@functools.cache
def get_accelerator() -> Accelerator:
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
