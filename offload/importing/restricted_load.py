"""Reading other projects' pickles without running what they name: only classes on a list are ever looked up.

`torch.load(weights_only=True)` is torch's own restricted unpickler. `.metadata` of torch.distributed.checkpoint is a
plain pickle, which torch reads without any restriction; `MetadataUnpickler` knows the few classes that it consists of.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch

from offload.importing.source import refused

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
    try:
        with open(path, "rb") as file:
            return MetadataUnpickler(file).load()
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # a malformed pickle may fail in any way
        raise refused(path, f"it is not the metadata of torch.distributed.checkpoint ({error})") from error


def load_plain(path: Path) -> Any:
    """What torch.save wrote to a file, if it is tensors and plain values; tensors are mapped, not read.

    Raises `CheckpointError`."""
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from error
    except Exception as error:
        raise refused(path, f"it is not a file of tensors that can be read safely ({_first_line(error)})") from error


def load_plain_bytes(content: bytes, what: str, path: Path) -> Any:
    """As `load_plain`, from bytes that lie somewhere in the file `path`."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise refused(path, f"{what} is not a tensor that can be read safely ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
