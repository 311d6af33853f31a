# SPDX-License-Identifier: Apache-2.0
"""Local safetensors as a source of weights: one tensor at a time.

A source is a file, a directory with `model.safetensors`, or a directory with `model.safetensors.index.json` (or that
index itself) and the files it names. Opening reads headers only. Loading one tensor reads that tensor only.

The index is data, not a path language: a file which it names must lie in the index's own directory, so a name with a
separator or `..` in it is refused. A symbolic link is followed, since whoever owns the directory made it (model hubs
lay out their downloads as links). Files must not be truncated while they are being read: they are memory-mapped.

Names are the files' own, until `converted_for` makes them those of a model whose library renames or converts what it loads.
Of what is converted, the tensors that are needed are read when the first that they make is asked for, and what else they make
is kept until it is asked for too.

Thread-safety: any thread may load.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from offload.config import expanded
from offload.errors import InitializerError
from offload.model.conversions import Conversion, conversions, outline
from offload.model.file_dtypes import DTYPES
from offload.model.weight_names import Stored, match_names

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_COMPARE_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as it lies in a file, where it is called `name`."""

    file: Path
    name: str
    stored: Stored


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that is made of `parts`, by their names in the files."""

    conversion: Conversion
    parts: Mapping[str, _Entry]
    stored: Stored


class WeightSource:
    """The tensors of one checkpoint, by name. Made by `open_weights`."""

    def __init__(self, path: Path, entries: Mapping[str, _Entry | _Made]) -> None:
        self.path = path
        self._entries = dict(entries)
        self._lock = threading.Lock()
        self._unasked = {name for name, entry in self._entries.items() if isinstance(entry, _Made)}
        self._waiting: dict[str, Tensor] = {}
        """Of those: what was made with another."""

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, known without reading it."""
        return self._entry(name).stored.shape

    def load(self, name: str) -> Tensor:
        """One tensor: on the CPU, contiguous, in the dtype of the file, in memory that the caller owns.

        Errors: `InitializerError` for a name that is not there or a file that cannot be read.
        """
        entry = self._entry(name)
        if isinstance(entry, _Made):
            return self._load_made(name, entry)
        with _opened(entry.file) as file:
            # What the file gives may be a view of its mapping; the copy outlives the file and can be written to.
            return _checked_tensor(file.get_tensor(entry.name)).clone()

    def _load_made(self, name: str, entry: _Made) -> Tensor:
        with self._lock:
            self._unasked.discard(name)
            if name not in self._waiting:
                made = _converted(entry)
                self._waiting.update({other: made[other] for other in made if other == name or other in self._unasked})
            return self._waiting.pop(name)

    def converted_for(self, model: nn.Module) -> WeightSource:
        """The same tensors as transformers would load them into `model`, by the model's names; itself where that is no model
        of transformers. What no parameter is for keeps its name.

        Errors: `InitializerError` where a conversion cannot be done, or two tensors are one of the model's.
        """
        found = conversions(model, self._entries, str(self.path))
        if found is None:
            return self
        entries = {name: self._entries[given] for name, given in found.renamed.items()}
        for given, wanted in found.unexpected.items():
            entry = self._in_file(given)
            entries[given] = replace(entry, stored=replace(entry.stored, loaded_as=wanted))
        for conversion in found.joint:
            for name, made in self._made(conversion).items():
                if name in entries:
                    raise InitializerError(
                        f"{self.path} holds {name!r} and {conversion.names[0]!r}, of which {name!r} is made; keep one of them"
                    )
                entries[name] = made
        return WeightSource(self.path, entries)

    def _made(self, conversion: Conversion) -> dict[str, _Made]:
        """What it gives, by name: seen without reading."""
        parts = {name: self._in_file(name) for name in conversion.names}
        kinds = {_kind(part.stored) for part in parts.values()}
        if len(kinds) > 1 or None in kinds:
            found = sorted({part.stored.dtype_name for part in parts.values()})
            raise InitializerError(
                f"{self.path} holds {conversion.names[0]!r} and what else {conversion.first!r} is made of in "
                f"{', '.join(found)}: expected numbers of one kind, of a dtype that torch has"
            )
        made = conversion.made_of({name: outline(part.stored) for name, part in parts.items()})
        stored = {name: Stored(tuple(one.shape), one.dtype, str(one.dtype)) for name, one in made.items()}
        return {name: _Made(conversion, parts, stored[name]) for name in made}

    def _in_file(self, name: str) -> _Entry:
        entry = self._entry(name)
        assert isinstance(entry, _Entry)
        return entry

    def match(self, model: nn.Module) -> dict[str, str]:
        """Which tensor goes where: {fqn in `model`: name in the source}, without reading them.

        The fqns are those of the parameters and persistent buffers, a tied one under the first of its fqns. Nothing may
        be missing, left over or of another shape; of dtypes floating-point ones may differ (`file_dtypes.converts`), casting
        is up to the caller. Any of the names
        of a tied parameter will do; if several are there, they must be equal (they are compared in pieces).
        Of a model with PEFT's adapters the names are those of the base model, and adapters keep their own initial values.
        As in Hugging Face's `from_pretrained`, names may lack the model's `base_model_prefix` or have it in excess, and
        names which the model declares as ignorable (`_keys_to_ignore_on_load_missing`, `..._unexpected`) are: an fqn
        of the former kind is absent from the result and keeps its own initial value.

        Errors: `InitializerError` which lists the differences, with shapes, and says what to do.
        """
        stored = {name: entry.stored for name, entry in self._entries.items()}
        found = match_names(model, stored, str(self.path))
        for fqn, (first, *others) in found.items():
            for other in others:
                if not self._equal(first, other):
                    raise InitializerError(
                        f"{self.path} holds different values for {first!r} and {other!r}, which are one tied parameter "
                        f"({fqn}) of {type(model).__name__}; untie them in the model's configuration "
                        "(tie_word_embeddings=False in Hugging Face), or drop one of the two from the checkpoint"
                    )
        return {fqn: names[0] for fqn, names in found.items()}

    def _equal(self, first: str, second: str) -> bool:
        one, two = self._entry(first), self._entry(second)
        shape = one.stored.shape
        if not shape or 0 in shape or isinstance(one, _Made) or isinstance(two, _Made):
            return self.load(first).equal(self.load(second))
        with _opened(one.file) as file, _opened(two.file) as other_file:
            slices, other_slices = file.get_slice(one.name), other_file.get_slice(two.name)
            row_nbytes = max(1, _checked_tensor(slices[:1]).nbytes)
            step = max(1, _COMPARE_NBYTES // row_nbytes)
            return all(
                _checked_tensor(slices[row : row + step]).equal(_checked_tensor(other_slices[row : row + step]))
                for row in range(0, shape[0], step)
            )

    def _entry(self, name: str) -> _Entry | _Made:
        try:
            return self._entries[name]
        except KeyError:
            raise InitializerError(f"{self.path} holds no tensor {name!r}; names() lists what it holds") from None


def open_weights(path: str | os.PathLike[str]) -> WeightSource:
    """The weights at `path`: a safetensors file, a directory with one or with a sharded index, or such an index.

    Where a directory has both, the single file is taken. Errors: `InitializerError`, naming the file at fault.
    """
    path = expanded(path)
    if path.is_dir():
        chosen = next((path / name for name in (SINGLE_FILE, INDEX_FILE) if os.path.lexists(path / name)), None)
        if chosen is None:
            raise InitializerError(
                f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; name the safetensors file itself, or convert the "
                "checkpoint (in Hugging Face: save_pretrained)"
            )
    elif os.path.lexists(path):
        chosen = path
    else:
        raise InitializerError(f"{path} does not exist; give a safetensors file, or a directory with {SINGLE_FILE}")
    return WeightSource(path, _indexed(chosen) if chosen.suffix == ".json" else _file_entries(chosen))


def _file_entries(file: Path) -> dict[str, _Entry]:
    with _opened(file) as opened:
        return {name: _Entry(file, name, _stored(opened.get_slice(name))) for name in opened.keys()}  # noqa: SIM118


def _stored(slices: Any) -> Stored:
    code = str(slices.get_dtype())
    dtype = DTYPES.get(code)
    return Stored(tuple(slices.get_shape()), dtype, code if dtype is None else str(dtype))


def _require_regular(file: Path) -> None:
    """Opening a pipe would wait for somebody to write into it, and reading a device may never end."""
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        raise InitializerError(f"{file} cannot be read: {error.strerror}; fetch it again, or name another file") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise InitializerError(f"{file} is {kind}: expected a file of safetensors, or an index of such files")


def _indexed(index: Path) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    weight_map = _weight_map(index)
    by_file = {name: _file_entries(index.parent / name) for name in sorted(set(weight_map.values()))}
    for name, file_name in weight_map.items():
        if name not in by_file[file_name]:
            raise InitializerError(
                f"{index} says that {name!r} is in {file_name}, which does not hold it; the files are of different "
                "checkpoints or incomplete, fetch them again"
            )
        entries[name] = by_file[file_name][name]
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    _require_regular(index)
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InitializerError(f"{index} cannot be read as JSON: {error}; fetch it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InitializerError(f"{index} is not an index of safetensors: 'weight_map' must map tensor names to file names")
    for file_name in weight_map.values():
        if file_name in ("", ".", "..") or any(character in file_name for character in "/\\\0"):
            raise InitializerError(
                f"{index} names the file {file_name!r}; only plain names of files beside the index are accepted"
            )
    return weight_map


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    _require_regular(file)
    # safe_open reports a bad header, a bad offset and an unreadable file by different types.
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InitializerError):
            raise
        raise InitializerError(
            f"{file} cannot be read as safetensors: {error}; fetch it again, or name another file"
        ) from error


def _kind(stored: Stored) -> tuple[bool, bool] | None:
    """Of its numbers: those of one kind become the widest among them where they are put together."""
    return None if stored.dtype is None else (stored.dtype.is_floating_point, stored.dtype.is_complex)


def _converted(entry: _Made) -> dict[str, Tensor]:
    """All that its conversion makes, each in memory of its own."""
    with ExitStack() as stack:
        files = {file: stack.enter_context(_opened(file)) for file in {part.file for part in entry.parts.values()}}
        parts = {name: _checked_tensor(files[part.file].get_tensor(part.name)) for name, part in entry.parts.items()}
        of_files = {part.untyped_storage().data_ptr() for part in parts.values()}
        made = entry.conversion.made_of(parts)
        return {
            name: one.clone() if one.untyped_storage().data_ptr() in of_files else one.contiguous()
            for name, one in made.items()
        }


def _checked_tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
