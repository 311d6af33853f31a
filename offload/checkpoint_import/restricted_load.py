# SPDX-License-Identifier: Apache-2.0
"""Reading other projects' pickles without running what they name: only classes on a list are ever looked up.

`torch.load(weights_only=True)` is torch's own restricted unpickler. `.metadata` of torch.distributed.checkpoint is a
plain pickle, which torch reads without any restriction; `MetadataUnpickler` knows the few classes that it consists of.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint_import.source import refused

_METADATA_CLASSES = frozenset(
    {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    }
)  # fmt: skip
_DTYPE_NAMES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))


class MetadataUnpickler(pickle.Unpickler):
    """Finds the classes of DCP's metadata, dtypes, sizes and paths, and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        if module_name == "torch.distributed.checkpoint.metadata" and global_name in _METADATA_CLASSES:
            return getattr(metadata, global_name)
        if module_name == "torch.distributed.checkpoint.filesystem" and global_name == "_StorageInfo":
            return filesystem._StorageInfo
        if module_name == "torch" and (global_name == "Size" or global_name in _DTYPE_NAMES):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict
        if module_name in ("pathlib", "pathlib._local") and global_name in ("PosixPath", "PurePosixPath"):
            return pathlib.PurePosixPath
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint's metadata consists of")


def _layout(name: str) -> str:
    return name


def load_metadata(path: Path) -> Any:
    """The `Metadata` object in DCP's file `path`. Raises `CheckpointError`."""
    _require_regular(path)
    try:
        with open(path, "rb") as file:
            return MetadataUnpickler(file).load()
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # a malformed pickle may fail in any way
        raise refused(path, f"it is not the metadata of torch.distributed.checkpoint ({error})") from error


def load_plain(path: Path) -> Any:
    """What torch.save wrote to a file, if it is plain values and tensors that have all their elements in it; these are
    mapped, not read. Raises `CheckpointError`."""
    content = load_unchecked(path)
    require_whole_tensors(content, path)
    return content


def load_unchecked(path: Path) -> Any:
    """As `load_plain`, for `require_whole_tensors` to look at."""
    _require_regular(path)
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # a malformed pickle may fail in any way
        raise refused(path, f"it is not a file of tensors that can be read safely ({_reason(error)})") from None
    return content


class Unknown:
    """An object of a class that was not looked up: what its pickle says of it. `state`: its attributes."""

    state: dict[str, Any]

    def __new__(cls, *_: Any) -> Unknown:  # the one that every kind of pickle calls
        made = object.__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = {str(name): value for name, value in state.items()} if isinstance(state, Mapping) else {}


def load_naming(path: Path, classes: Sequence[str]) -> Any:
    """As `load_plain`, where the pickle may name `classes` ("package.module.Class"): an `Unknown` is made for each object."""
    _require_regular(path)
    stand_ins = [(type("Unknown", (Unknown,), {}), name) for name in classes]  # one each: torch knows them by the class
    with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
        content = load_unchecked(path)
    require_whole_tensors(content, path)
    return content


def load_plain_bytes(content: bytes | bytearray, what: str, path: Path) -> Any:
    """As `load_plain`, from bytes that lie somewhere in the file `path`."""
    try:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise refused(path, f"{what} is not a tensor that can be read safely ({_reason(error)})") from None
    require_whole_tensors(loaded, path)
    return loaded


def _reason(error: Exception) -> str:
    """What torch says, without its advice to read the file in a way that runs what is in it."""
    text = str(error).strip()
    named = re.search(r"GLOBAL (\S+)", text)
    if named is not None:
        return f"it names {named[1]}"
    first = (text.splitlines() or [type(error).__name__])[0]
    return type(error).__name__ if isinstance(error, pickle.UnpicklingError) or "weights_only" in first else first


def _require_regular(path: Path) -> None:
    """Opening a pipe would wait for somebody to write into it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise refused(path, "it is no regular file")


def require_whole_tensors(content: Any, path: Path) -> None:
    """Every tensor in nested lists and mappings has an element in the file for each of its own. Raises `CheckpointError`."""
    pending, seen = [content], set()
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            plain = type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided
            if not plain or one.is_meta or one.is_quantized or one.is_conj() or one.is_neg():
                raise refused(path, "it holds a tensor that is not a plain one (sparse, quantized, without values, ...)")
            if one.numel() * one.element_size() > one.untyped_storage().nbytes():
                raise refused(path, f"it holds a tensor of shape {list(one.shape)} in {one.untyped_storage().nbytes()} bytes")
        elif isinstance(one, (Mapping, list, tuple, set, frozenset)) and id(one) not in seen:
            seen.add(id(one))
            pending.extend(one.values() if isinstance(one, Mapping) else one)
