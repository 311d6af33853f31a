# SPDX-License-Identifier: Apache-2.0
"""A folder of torch.distributed.checkpoint: `.metadata` and `*.distcp`, from any number of ranks, read shard by shard.

Weights are the tensors of one mapping in the saved state (`{"model": model.state_dict(), ...}`, or the state itself);
moments are those under `state.<fqn>.exp_avg`, `.exp_avg_sq` and `.step`, as `get_state_dict` and
`get_optimizer_state_dict` name them.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.format.manifest import MOMENTS
from offload.checkpoint_import.restricted_load import load_metadata, load_plain_bytes
from offload.checkpoint_import.source import (
    Source,
    SourceParameter,
    SourceTensor,
    as_shape,
    as_step,
    check_moments,
    reading,
    refused,
)

KIND = "torch-dcp"
METADATA = ".metadata"

_Path = tuple[object, ...]


def recognises(path: Path) -> bool:
    """Whether the folder is one."""
    return (path / METADATA).is_file()


@dataclass(slots=True)
class _Shard:
    """Where a part of a tensor lies: [offset, offset + nbytes) of `file` is what torch.save wrote of it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[_Shard] = field(default_factory=list)


def open_source(path: Path, _: Sequence[str] | None = None) -> Source:
    """It names what it holds by itself. Raises `CheckpointError`."""
    metadata = load_metadata(path / METADATA)
    with reading(path / METADATA):
        stored = _stored(metadata, path / METADATA)
        paths = {name: _path_of(metadata, name) for name in stored}
    states = {state: name for name, parts in paths.items() if (state := _optimizer_state(parts)) is not None}
    trained = {fqn for fqn, _ in states}
    weights = _weights({name: parts for name, parts in paths.items() if _optimizer_state(parts) is None}, trained, path)
    folder = _Folder(path)
    for tensor in stored.values():
        for shard in tensor.shards:
            folder.check(shard, tensor.dtype)
    parameters = []
    for fqn, name in weights.items():
        parameter = SourceParameter([fqn], folder.tensor(stored[name], name))
        if fqn in trained:
            for kind in MOMENTS:
                if (fqn, kind) in states:
                    moment = states[fqn, kind]
                    setattr(parameter, kind, folder.tensor(stored[moment], moment))
            check_moments(parameter, path)
            parameter.step = _step(folder, stored, states.get((fqn, "step")), fqn, path)
        parameters.append(parameter)
    missing = ["the states of random generators", "the loss scale", "the numbers in param_groups", "anything else in the state"]
    return Source(KIND, parameters, [], max((one.step for one in parameters), default=0), missing)


def _stored(metadata: Any, path: Path) -> dict[str, _Stored]:
    """Every tensor, with its shards in the order of their place in it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found: dict[str, _Stored] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue  # bytes: numbers of param_groups and other objects, which are left alone
        tensor = _Stored(as_shape(tuple(entry.size), repr(name), path), entry.properties.dtype)
        if not isinstance(tensor.dtype, torch.dtype):
            raise ValueError(f"{name} is of dtype {tensor.dtype}")
        for chunk in entry.chunks:
            found_at = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if getattr(found_at, "transform_descriptors", None):
                raise ValueError(f"{name} was compressed when it was saved, which is not supported")
            start, shape = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
            place = (str(found_at.relative_path), int(found_at.offset), int(found_at.length))
            tensor.shards.append(_Shard(start, shape, *place))
        tensor.shards.sort(key=lambda shard: shard.start)
        if not _covers(tensor):
            raise ValueError(f"the shards of {name} do not make up {list(tensor.shape)}")
        found[str(name)] = tensor
    return found


def _covers(tensor: _Stored) -> bool:
    """Whether every element is in one shard: all lie inside, no two overlap, and their sizes add up."""
    boxes = [(shard.start, shard.shape) for shard in tensor.shards if math.prod(shard.shape)]
    dimensions = range(len(tensor.shape))
    inside = all(
        len(start) == len(shape) == len(tensor.shape)
        and all(start[d] >= 0 and shape[d] >= 0 and start[d] + shape[d] <= tensor.shape[d] for d in dimensions)
        for start, shape in boxes
    )
    disjoint = inside and not any(
        all(start[d] < other[d] + size[d] and other[d] < start[d] + shape[d] for d in dimensions)
        for index, (start, shape) in enumerate(boxes)
        for other, size in boxes[index + 1 :]
    )
    return disjoint and sum(math.prod(shape) for _, shape in boxes) == math.prod(tensor.shape)


def _path_of(metadata: Any, name: str) -> _Path:
    """The keys that lead to a tensor in the state that was saved."""
    paths = metadata.planner_data
    parts = paths.get(name) if isinstance(paths, dict) else None
    if not (isinstance(parts, (tuple, list)) and parts):
        return (name,)
    if not all(isinstance(part, (str, int)) for part in parts):
        raise ValueError(f"the keys that lead to {name} are {parts!r}")
    return tuple(parts)


def _optimizer_state(parts: _Path) -> tuple[str, str] | None:
    """(fqn, kind) of a tensor that is an optimizer's state."""
    if len(parts) >= 3 and parts[-3] == "state" and parts[-1] in (*MOMENTS, "step") and isinstance(parts[-2], str):
        return parts[-2], str(parts[-1])
    return None


def _weights(paths: dict[str, _Path], trained: set[str], path: Path) -> dict[str, str]:
    """fqn -> name of the tensors of the one mapping that holds the model."""
    mappings: dict[_Path, dict[str, str]] = {}
    for name, parts in paths.items():
        mappings.setdefault(parts[:-1], {})[str(parts[-1])] = name
    holding = [key for key, names in mappings.items() if trained <= names.keys()]
    if len(holding) != 1:
        listed = ", ".join(".".join(map(str, key)) or "(the state itself)" for key in mappings)
        raise refused(
            path, f"{len(holding)} of its mappings of tensors ({listed}) hold every parameter of the optimizer: expected one, "
            "as {'model': model.state_dict(), 'optim': ...} saved with get_state_dict has it"
        )  # fmt: skip
    return mappings[holding[0]]


def _step(folder: _Folder, stored: dict[str, _Stored], name: str | None, fqn: str, path: Path) -> int:
    if name is None:
        raise refused(path, f"nothing says how many steps the moments of {fqn!r} have had")
    steps = folder.tensor(stored[name], name)
    if steps.numel != 1:
        raise refused(path, f"the step of {fqn!r} is a tensor of shape {list(steps.shape)}")
    (part,) = steps.parts()
    return as_step(part, f"the step of {fqn!r}", path)


class _Folder:
    """The data files, opened by plain names; links are not followed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tensor(self, stored: _Stored, name: str) -> SourceTensor:
        return SourceTensor(stored.shape, stored.dtype, lambda: self._parts(stored, name))

    def _parts(self, stored: _Stored, name: str) -> Iterator[torch.Tensor]:
        """Shards that follow one another along the first dimension come one by one; others are put together first."""
        rest = stored.shape[1:]
        if all(shard.shape[1:] == rest and not any(shard.start[1:]) for shard in stored.shards):
            for shard in stored.shards:
                yield self._load(shard, stored.dtype, name).reshape(-1)
            return
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for shard in stored.shards:
            place = tuple(slice(low, low + size) for low, size in zip(shard.start, shard.shape, strict=True))
            whole[place] = self._load(shard, stored.dtype, name)
        yield whole.reshape(-1)

    def _load(self, shard: _Shard, dtype: torch.dtype, name: str) -> torch.Tensor:
        tensor = load_plain_bytes(self._read(shard), f"a shard of {name!r}", self._path / shard.file)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shard.shape:
            raise refused(self._path / shard.file, f"a shard of {name!r} is not a tensor of {list(shard.shape)}, {dtype}")
        return tensor.contiguous()

    def check(self, shard: _Shard, dtype: torch.dtype) -> None:
        """Whether the file can hold what the metadata says, before memory is taken for it."""
        if shard.nbytes < math.prod(shard.shape) * dtype.itemsize:
            raise refused(self._path / METADATA, f"a shard of {list(shard.shape)}, {dtype} has {shard.nbytes} bytes")
        os.close(self._open(shard))

    def _open(self, shard: _Shard) -> int:
        path = self._path / shard.file
        if shard.file != os.path.basename(shard.file) or shard.file in ("", ".", ".."):
            raise refused(self._path, f"its metadata names the file {shard.file!r}, which is no plain name")
        try:
            fileno = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise refused(path, f"it cannot be read ({error})") from error
        status, end = os.fstat(fileno), shard.offset + shard.nbytes
        if not stat.S_ISREG(status.st_mode) or min(shard.offset, shard.nbytes) < 0 or end > status.st_size:
            os.close(fileno)
            raise refused(path, f"it is no file of at least {end} bytes")
        return fileno

    def _read(self, shard: _Shard) -> bytearray:
        """One call reads 2,147,479,552 bytes at most, and may be cut short by a signal or a network."""
        content = bytearray(shard.nbytes)
        view, fileno = memoryview(content), self._open(shard)
        try:
            while view:
                count = os.preadv(fileno, [view], shard.offset + shard.nbytes - len(view))
                if not count:
                    raise refused(self._path / shard.file, f"it ended {len(view)} bytes before a shard did")
                view = view[count:]
        except OSError as error:
            raise refused(self._path / shard.file, f"it cannot be read ({error.strerror})") from error
        finally:
            os.close(fileno)
        return content
