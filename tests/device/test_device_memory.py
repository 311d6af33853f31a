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
    counts = {"allocated_bytes": 300, "active_bytes": 300, "reserved_bytes": 700}
    nested = {name: {"all": {"current": nbytes, "peak": nbytes}} for name, nbytes in counts.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested)
    assert CudaAccelerator().free_nbytes() == 500


def test_a_process_that_may_have_a_share_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 1000 bytes, of which torch has 300 and the driver would give 700 more: 200 of the half are left."""
    play(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: 0.5, raising=False)
    counts = {"allocated_bytes": 300, "active_bytes": 300, "reserved_bytes": 300}
    nested = {name: {"all": {"current": nbytes, "peak": nbytes}} for name, nbytes in counts.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested)
    accelerator = CudaAccelerator()
    use = accelerator.memory_use()
    assert accelerator.free_nbytes() == 200 and use is not None and use.total == 500


def test_an_allocator_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another library's, under which torch's figures raise: what the driver has is what there is."""
    counting = torch.cuda.memory_stats_as_nested_dict
    play(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counting)  # torch's own, over what refuses

    def refuse(device: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    for name in ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"):
        monkeypatch.setattr(torch._C, name, refuse, raising=False)
    for name in ("is_initialized", "is_available"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda device, optional=False: 0, raising=False)
    accelerator = CudaAccelerator()
    assert accelerator.free_nbytes() == 100
    assert accelerator.memory_use() is None and accelerator.peak_nbytes() is None
