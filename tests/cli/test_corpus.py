# SPDX-License-Identifier: Apache-2.0
"""Documents, tokens and windows: what is read is what the files hold, and the split is clean."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from offload.cli.corpus import BYTE_BOS, ByteStream, Windows, find_documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b" / "__pycache__").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "z.md").write_bytes(b"zz")
    (root / "a.txt").write_bytes("aé".encode())
    (root / "b" / "c.py").write_bytes(b"c" * 5)
    (root / "empty.txt").write_bytes(b"")
    (root / "picture.png").write_bytes(b"\x89PNG\0")
    (root / ".git" / "config").write_bytes(b"hidden")
    (root / "b" / "__pycache__" / "c.pyc").write_bytes(b"cc")
    (root / "gone.txt").symlink_to(root / "nowhere")
    return root


def test_documents_are_the_text_files_in_order(folder: Path) -> None:
    assert [path.name for path in find_documents(str(folder))] == ["a.txt", "z.md", "c.py"]
    assert find_documents(str(folder / "z.md")) == [folder / "z.md"]


def test_the_standard_library_is_its_sources() -> None:
    documents = find_documents("stdlib")
    names = {path.name for path in documents}
    assert {"argparse.py", "dataclasses.py", "json"} - {"json"} <= names
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in documents)


def test_a_stream_is_every_byte_behind_a_mark_for_each_document(folder: Path) -> None:
    stream = ByteStream(find_documents(str(folder)))
    expected = [BYTE_BOS, *"aé".encode(), BYTE_BOS, *b"zz", BYTE_BOS, *b"ccccc"]
    assert len(stream) == len(expected)
    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1):
            assert stream.read(start, stop).tolist() == expected[start:stop]


class Counting:
    """Token i is i."""

    vocabulary_size, document_count = 10_000, 1

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop)


def test_windows_cover_the_text_once_and_none_is_trained_on_and_held_out() -> None:
    windows = Windows(Counting(1003), sequence=10, batch=5, seed=3)
    held_out = torch.cat(list(windows.held_out_batches(100))).flatten()
    epoch = torch.cat(list(islice(windows.training_batches(), 95 // 5))).flatten()
    assert len(held_out) == 50 and len(epoch) == 950
    assert torch.cat([held_out, epoch]).sort().values.tolist() == list(range(1000))
    second = torch.cat(list(islice(windows.training_batches(), 19, 38))).flatten()
    assert second.sort().values.tolist() == epoch.sort().values.tolist() and second.tolist() != epoch.tolist()


def test_batches_can_be_taken_up_anywhere() -> None:
    windows = Windows(Counting(1000), 10, 5, seed=3)
    whole = torch.stack(list(islice(windows.training_batches(), 45)))  # more than two passes of 19
    for passed in (0, 1, 18, 19, 20, 38):
        assert torch.equal(torch.stack(list(islice(windows.training_batches(passed), 45 - passed))), whole[passed:])


def test_the_seed_alone_decides_the_order() -> None:
    def first(seed: int) -> list[list[int]]:
        return next(Windows(Counting(5000), 10, 4, seed).training_batches()).tolist()

    assert first(1) == first(1) != first(2)
    few, many = (Windows(Counting(5000), 10, 4, 1).held_out_batches(count) for count in (1, 3))
    assert next(few).tolist() == next(many).tolist()
