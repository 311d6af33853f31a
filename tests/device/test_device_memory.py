# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from offload.device.cuda import CudaAccelerator
from offload.device.deferred import DeferredAccelerator
from tests.device.played_cuda import play


def test_memory_is_in_use_until_the_last_tensor_over_it_is_gone() -> None:
    accelerator = DeferredAccelerator(nbytes=1000)
    memory = accelerator.memory(600)
    part = memory[:100]
    del memory
    assert accelerator.free_nbytes() == 400
    with pytest.raises(torch.OutOfMemoryError, match="1000 bytes, 600 are in use, and 500 more"):
        accelerator.memory(500)
    del part
    assert accelerator.free_nbytes() == 1000 and accelerator.peak_nbytes() == 600


def test_what_torch_keeps_of_freed_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes the driver has 100 and torch 700, 300 of which are in tensors: so much may the next one take."""
    play(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert CudaAccelerator().free_nbytes() == 500
