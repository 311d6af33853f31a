# SPDX-License-Identifier: Apache-2.0
"""What is read from a scratch file is what was written there, or an error that says which bytes are not."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from offload import _native
from offload.device.arithmetic.checksums import SummedMemory
from offload.errors import ConfigError, CorruptDataError
from offload.layout import Extent
from offload.tiers.io import Priority
from offload.tiers.memory import HostMemory
from offload.tiers.nvme import NvmeStore
from offload.tiers.scratch import ScratchFolder
from offload.tiers.verification import checksum, checksum_of_blocks
from tests.native.paths import torch_form

from ..scratch_files import scratch_files
from .faulty_io import Fault, FaultyBackend

EXTENTS = [Extent(0, 8192), Extent(8192, 4096), Extent(16384, 65536)]


def memory(nbytes: int, seed: int) -> Tensor:
    tensor = HostMemory(nbytes, "test").tensor
    tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor


def store_of(path: Path, backend: FaultyBackend, path_count: int = 1) -> NvmeStore:
    folder = ScratchFolder([path / f"drive{index}" for index in range(path_count)])
    return NvmeStore("records", EXTENTS, folder, backend, stripe_nbytes=8192)


@pytest.mark.parametrize("path_count", [1, 3])
@pytest.mark.parametrize("on_write", [True, False])
def test_every_flipped_bit_is_found_and_named(tmp_path: Path, on_write: bool, path_count: int) -> None:
    counting = store_of(tmp_path, backend := FaultyBackend(), path_count)
    for extent in EXTENTS:
        counting.write(extent, memory(extent.nbytes, 0)).wait()
    counting.close()
    transfer_count = backend.submitted_count  # whatever the seed
    for seed in range(40):
        draw = random.Random(seed)
        index = draw.randrange(transfer_count) + (0 if on_write else transfer_count)
        backend = FaultyBackend(seed, {index: Fault("bit_flip")})
        store = store_of(tmp_path, backend, path_count)
        for extent in EXTENTS:
            store.write(extent, memory(extent.nbytes, seed)).wait()
        failures = []
        for extent in EXTENTS:
            into = memory(extent.nbytes, 99)
            read = store.read(extent, into)
            try:
                read.wait()
                assert torch.equal(into, memory(extent.nbytes, seed))
            except CorruptDataError as error:
                failures.append(error)
                with pytest.raises(CorruptDataError):
                    read.wait()
        assert len(failures) == 1 and failures[0].errno == errno.EBADMSG
        moved = next(entry for entry in backend.log if entry[0] == index)
        named = f"bytes [{moved[2]}, {moved[2] + moved[3]}) of"
        assert named in str(failures[0]) and "records.swap" in str(failures[0]) and "last checkpoint" in str(failures[0])
        store.close()


def test_what_another_program_wrote_is_found(tmp_path: Path) -> None:
    store = store_of(tmp_path, FaultyBackend(1))
    store.write(EXTENTS[0], memory(8192, 1)).wait()
    (path,) = scratch_files(tmp_path, "records")
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00")
    os.sync()
    with pytest.raises(CorruptDataError, match=r"bytes \[0, 8192\)"):
        store.read(EXTENTS[0], memory(8192, 2)).wait()
    store.write(EXTENTS[0], memory(8192, 3)).wait()
    into = memory(8192, 2)
    store.read(EXTENTS[0], into).wait()
    assert torch.equal(into, memory(8192, 3))
    store.close()


def test_a_read_is_compared_once_and_the_memory_is_its_holders_then(tmp_path: Path) -> None:
    store = store_of(tmp_path, FaultyBackend(1))
    store.write(EXTENTS[0], memory(8192, 1)).wait()
    into = memory(8192, 2)
    read = store.read(EXTENTS[0], into)
    read.wait()
    into.zero_()
    read.wait()
    store.read(EXTENTS[1], memory(4096, 2)).wait()  # never written: zeros, and nothing to compare with
    store.close()


def block_sums(tensor: Tensor) -> Tensor:
    """As an update leaves them that passes over all of it."""
    summed = SummedMemory(tensor, None, stored=True)
    _native.update_rows(0, 0, [summed.arguments])
    assert summed.after is not None
    return summed.after


@pytest.mark.parametrize("path_count", [1, 3])
def test_who_passes_over_it_anyway_gives_the_sums(tmp_path: Path, path_count: int) -> None:
    """Written by the sums of blocks, or compared by them, or both: nothing is found but the bit that was flipped."""
    if not _native.available():
        pytest.skip("no native library")
    for seed in range(12):
        flipped = random.Random(seed).randrange(8 if path_count > 1 else 3)
        store = store_of(tmp_path, FaultyBackend(seed, {flipped: Fault("bit_flip")} if seed % 3 else {}), path_count)
        failures = 0
        for extent in EXTENTS:
            source = memory(extent.nbytes, seed)
            store.write(extent, source, sums=block_sums(source) if seed % 2 else None).wait()
        for extent in EXTENTS:
            into = memory(extent.nbytes, 99)
            reading = store.read(extent, into)
            assert reading.arrive()
            sums = block_sums(into)
            into.zero_()  # the holder's now: who waits, or looks at what is in flight, has nothing to compare
            reading.wait()
            store.flush()
            try:
                reading.compare(sums)
            except CorruptDataError as error:
                failures += 1
                assert "records.swap" in str(error)
                with pytest.raises(CorruptDataError):
                    reading.compare(sums)
                with pytest.raises(CorruptDataError):
                    reading.wait()
        assert failures == (1 if seed % 3 else 0)
        store.close()


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_VERIFY", "0")
    store = store_of(tmp_path, FaultyBackend(1, {0: Fault("bit_flip")}))
    store.write(EXTENTS[0], memory(8192, 1)).wait()
    store.read(EXTENTS[0], memory(8192, 2), priority=Priority.STATE).wait()
    store.close()


@pytest.mark.parametrize("value", ["maybe", "2", "off", " 0"])
def test_a_setting_that_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Before a file is made: who meant to switch it off is told so."""
    monkeypatch.setenv("OFFLOAD_VERIFY", value)
    with pytest.raises(ConfigError, match=f"OFFLOAD_VERIFY='{value}' is unknown: expected 1 .* or 0 "):
        store_of(tmp_path, FaultyBackend(1))
    assert scratch_files(tmp_path) == []


@pytest.mark.parametrize("value", ["1", ""])
def test_on_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OFFLOAD_VERIFY", value)
    store = store_of(tmp_path, FaultyBackend(1, {0: Fault("bit_flip")}))
    store.write(EXTENTS[0], memory(8192, 1)).wait()
    with pytest.raises(CorruptDataError):
        store.read(EXTENTS[0], memory(8192, 2), priority=Priority.STATE).wait()
    store.close()


@pytest.fixture(params=["native", "zlib"])
def sums(request: pytest.FixtureRequest) -> Iterator[Callable[[Tensor], int]]:
    if request.param == "native" and not _native.available():
        pytest.skip("no native library")
    with torch_form() if request.param == "zlib" else nullcontext():
        yield checksum


def test_known_checksums() -> None:
    """Of the page in native/src/checksum.h, computed once more in Python."""
    if not _native.available():
        pytest.skip("no native library")
    mask, multiplier = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def step(total: int, word: int) -> int:
        product = (total ^ word) * multiplier & mask
        return (product << 29 | product >> 35) & mask

    def key(index: int) -> int:
        z = (index + 1) * multiplier & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    def of_block(content: bytes) -> int:
        words = [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content) // 8 * 8, 8)]
        products, sums, whole = [0] * 8, [0] * 8, len(words) // 8 * 8
        for position, word in enumerate(words[:whole]):
            line, lane = divmod(position, 8)
            mixed = word ^ key(line + lane)
            products[lane] = products[lane] + (mixed & 0xFFFFFFFF) * (mixed >> 32) & mask
            sums[lane] = sums[lane] + word & mask
        total = len(content)
        for product, of_words in zip(products, sums, strict=True):
            total = step(total, step(step(0, product), of_words))
        for word in (*words[whole:], *content[len(words) * 8 :]):
            total = step(total, word)
        return total

    for nbytes in (0, 1, 7, 64, 65, 256, 257, 4096, 4096 + 63, 8192 + 256 + 71):
        content = bytes(memory(max(nbytes, 1), nbytes)[:nbytes].tolist())
        total, sums = nbytes, [of_block(content[at : at + 4096]) for at in range(0, nbytes, 4096)]
        for one in sums:
            total = step(total, one)
        tensor = torch.tensor(list(content), dtype=torch.uint8)
        assert checksum(tensor) == total
        signed = [one - (1 << 64) if one >> 63 else one for one in sums]
        assert checksum_of_blocks(torch.tensor(signed, dtype=torch.int64), nbytes) == total


def test_what_moves_is_found(sums: Callable[[Tensor], int]) -> None:
    """Words or lines that change places, within a block and between blocks."""
    tensor = memory(3 * 4096, 5)
    total = sums(tensor)
    for nbytes in (8, 64, 4096):
        parts = tensor.view(-1, nbytes)
        for first, second in ((0, 1), (0, len(parts) - 1), (1, len(parts) - 1)):
            moved = parts.clone()
            moved[[first, second]] = parts[[second, first]]
            assert sums(moved.flatten()) != total


@settings(max_examples=300)
@given(data=st.data())
def test_any_change_is_found(data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(1, 700))
    tensor = memory(nbytes, data.draw(st.integers(0, 3)))
    before, total = tensor.clone(), checksum(tensor)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, nbytes - 1))
        tensor[position] ^= 1 << data.draw(st.integers(0, 7))
    assert (checksum(tensor) == total) == torch.equal(tensor, before)


def test_the_highest_bits_do_not_cancel(sums: Callable[[Tensor], int]) -> None:
    """Two signs flipped in one chain: a product alone would carry both to the same bit."""
    tensor = torch.zeros(4096, dtype=torch.uint8)
    total, found = sums(tensor), set()
    for first in range(7, 4096, 64):
        for second in range(first + 64, 4096, 64):
            tensor[first], tensor[second] = 0x80, 0x80
            found.add(sums(tensor))
            tensor[first], tensor[second] = 0, 0
    assert total not in found and len(found) == 63 * 64 // 2
