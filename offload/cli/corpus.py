# SPDX-License-Identifier: Apache-2.0
"""Text as tokens: the documents of a file or folder, by bytes or by a tokenizer, cut into windows.

A document is a file. Each is preceded by the mark that begins a document (256 in the byte-level vocabulary), and the
documents, in the order of their paths, make one stream of tokens. Windows are its consecutive pieces of `sequence`
tokens; a share of them, drawn once from the seed, is held out of training.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy
import torch

from offload.errors import ConfigError

BYTE_VOCABULARY_SIZE = 257
BYTE_BOS = 256
STDLIB = "stdlib"
HELD_OUT_SHARE = 0.05

_SNIFF_NBYTES = 8192
_ENCODE_CHARACTERS = 1 << 20
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_SKIPPED_IN_STDLIB = frozenset({"test", "tests", "idle_test"})


class TokenStream(Protocol):
    """A sequence of tokens too long to be held at once."""

    vocabulary_size: int
    document_count: int

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The tokens [start, stop): int64 [stop - start]."""
        ...


def find_documents(data: str) -> list[Path]:
    """The text files that `data` (a file, a folder, or "stdlib") names, in order. Raises `ConfigError`."""
    if data == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [path for path in _walk(root, _SKIPPED_FOLDERS | _SKIPPED_IN_STDLIB) if path.suffix == ".py"]
    else:
        root = Path(data).expanduser()
        if not data.strip() or not root.exists():
            raise ConfigError(f"--data {data!r} does not exist: name a text file, a folder, or {STDLIB!r}.")
        found = [root] if root.is_file() else _walk(root, _SKIPPED_FOLDERS)
    documents = [path for path in found if _is_text(path)]
    if not documents:
        raise ConfigError(f"--data {data!r} holds no text (empty, binary and hidden files are left out).")
    return documents


def _walk(root: Path, skipped: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for folder, children, names in os.walk(root):
        children[:] = sorted(child for child in children if child not in skipped and not child.startswith("."))
        found.extend(Path(folder, name) for name in sorted(names) if not name.startswith("."))
    return found


def _is_text(path: Path) -> bool:
    """Whether the file is readable and begins like text: not empty, without a zero byte."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            beginning = file.read(_SNIFF_NBYTES)
    except OSError:
        return False
    return bool(beginning) and b"\0" not in beginning


class ByteStream:
    """Every byte a token, read from the files when asked for: host memory does not grow with the text."""

    vocabulary_size = BYTE_VOCABULARY_SIZE

    def __init__(self, documents: Sequence[Path]) -> None:
        self._documents = list(documents)
        self.document_count = len(self._documents)
        sizes = [path.stat().st_size for path in self._documents]
        # Where each document's mark stands.
        self._starts = list(itertools.accumulate((size + 1 for size in sizes), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> torch.Tensor:
        tokens = numpy.empty(stop - start, dtype=numpy.int64)
        position = start
        while position < stop:
            index = bisect.bisect_right(self._starts, position) - 1
            begin, end = self._starts[index], min(self._starts[index + 1], stop)
            if position == begin:
                tokens[position - start] = BYTE_BOS
                position += 1
            if position < end:
                tokens[position - start : end - start] = self._bytes(index, position - begin - 1, end - position)
                position = end
        return torch.from_numpy(tokens)

    def _bytes(self, index: int, offset: int, count: int) -> Any:
        path = self._documents[index]
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(count)
        if len(content) != count:
            raise ConfigError(f"{str(path)!r} became shorter while it was read: leave the data alone during a run.")
        return numpy.frombuffer(content, dtype=numpy.uint8)


class TokenizedStream:
    """The documents through a Hugging Face tokenizer, once, into a temporary file without a name."""

    def __init__(self, documents: Sequence[Path], tokenizer: Any) -> None:
        self.document_count = len(documents)
        self.vocabulary_size = len(tokenizer)
        dtype = numpy.uint16 if self.vocabulary_size <= 1 << 16 else numpy.uint32
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the stream
        mark = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        for path in documents:
            if mark is not None:
                self._file.write(numpy.array([mark], dtype=dtype).tobytes())
            for text in _pieces(path):
                encoded = tokenizer.encode(text, add_special_tokens=False, verbose=False)
                self._file.write(numpy.array(encoded, dtype=dtype).tobytes())
        self._file.flush()
        if self._file.tell() == 0:
            raise ConfigError("the tokenizer makes no tokens of the data.")
        self._tokens = numpy.memmap(self._file, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[start:stop].astype(numpy.int64))


def _pieces(path: Path) -> Iterator[str]:
    """The text in pieces of whole lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(_ENCODE_CHARACTERS):
            yield "".join(lines)


class Windows:
    """The windows of a stream, split once into those to train on and those held out, both by `seed` alone."""

    def __init__(self, stream: TokenStream, sequence: int, batch: int, seed: int) -> None:
        self._stream, self._sequence, self._batch, self._seed = stream, sequence, batch, seed
        count = len(stream) // sequence
        held_out_count = max(1, int(count * HELD_OUT_SHARE))
        if count - held_out_count < batch:
            raise ConfigError(
                f"the data holds {len(stream)} tokens, and one batch of {batch} x {sequence} with a window held out needs "
                f"{(batch + held_out_count) * sequence}: give more text, or lower --batch or --sequence."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=torch.int32, device="cpu")
        self._held_out, self._training = order[:held_out_count], order[held_out_count:]

    def training_batches(self, passed_count: int = 0) -> Iterator[torch.Tensor]:
        """Batches int64 [batch, sequence] without end, the first `passed_count` left out; every pass over the windows in
        another order."""
        first_epoch, passed_count = divmod(passed_count, len(self._training) // self._batch)
        for epoch in itertools.count(first_epoch):
            draw = torch.Generator().manual_seed(self._seed + 1 + epoch)
            order = torch.randperm(len(self._training), generator=draw, dtype=torch.int32, device="cpu")
            skipped = passed_count * self._batch if epoch == first_epoch else 0
            for first in range(skipped, len(order) - self._batch + 1, self._batch):
                yield self._read(self._training[order[first : first + self._batch].long()])

    def held_out_batches(self, count: int) -> Iterator[torch.Tensor]:
        """At most `count` batches of held-out windows, always the same."""
        chosen = self._held_out[: count * self._batch]
        for first in range(0, len(chosen), self._batch):
            yield self._read(chosen[first : first + self._batch])

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        size = self._sequence
        return torch.stack([self._stream.read(row * size, (row + 1) * size) for row in rows.tolist()])
