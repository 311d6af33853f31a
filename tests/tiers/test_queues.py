# SPDX-License-Identifier: Apache-2.0
"""Block size and depth never change a byte, and each device has a queue of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.layout import Extent
from offload.tiers import HostMemory, NvmeStore, Priority, ScratchFolder, open_backend
from offload.tiers.io.devices import DeviceBackends


@pytest.mark.parametrize(("block_nbytes", "depth"), [(4096, 1), (12288, 7), (1 << 22, 1024)])
def test_no_setting_changes_a_byte(block_nbytes: int, depth: int, tmp_path: Path) -> None:
    scratch = ScratchFolder([tmp_path / "a", tmp_path / "b"])
    backend = open_backend(paths=scratch.paths, block_nbytes=block_nbytes, queue_depth=depth)
    extents = [Extent(0, 4096 * 50), Extent(4096 * 50, 4096 * 333)]
    store = NvmeStore("states", extents, scratch, backend, stripe_nbytes=8192)
    for seed, extent in enumerate(extents):
        source, into = HostMemory(extent.nbytes, "source").tensor, HostMemory(extent.nbytes, "into").tensor
        source.copy_(torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
        backend.register_memory(source.data_ptr(), source.numel())
        store.write(extent, source).wait()
        store.read(extent, into).wait()
        assert torch.equal(source, into)
    store.close()
    backend.close()


def test_each_device_has_a_queue_of_its_own(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or os.stat(other).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system to write to")
    folder = other / f"offload-test-{os.getpid()}"
    folder.mkdir()
    try:
        with pytest.warns(RuntimeWarning):
            scratch = ScratchFolder([tmp_path, folder])
        backend = open_backend(paths=scratch.paths)
        assert isinstance(backend, DeviceBackends)
        queues = list(backend._by_device.values())
        files = scratch.create("states", [8192, 4096])
        memory = HostMemory(8192, "test").tensor.fill_(5)
        undo = backend.register_memory(memory.data_ptr(), 8192)
        backend.write(files[0], memory, 0, priority=Priority.STATE).wait()
        backend.write(files[1], memory[:4096], 0, priority=Priority.STATE).wait()
        into = HostMemory(4096, "test").tensor
        backend.read(files[1], into, 0, priority=Priority.PARAMETER).wait()
        assert into.eq(5).all()
        assert [(queue.stats().written_nbytes, queue.stats().read_nbytes) for queue in queues] == [(8192, 0), (4096, 4096)]
        assert (backend.stats().written_nbytes, backend.stats().read_nbytes) == (12288, 4096)
        undo()
        for file in files:
            file.close()
        backend.close()
    finally:
        folder.rmdir()
