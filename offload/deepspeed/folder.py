"""DeepSpeed's folder of checkpoints: one folder for each tag, and the file "latest", which names the newest."""

from __future__ import annotations

import os
from pathlib import Path

from offload.deepspeed import comm
from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.utils import logger
from offload.errors import CheckpointError, StorageError

LATEST = "latest"


def agreed_tag(tag: str, validation: str) -> str:
    """Rank 0's, as all ranks write into one folder. Where another's differs: `validation` is "fail", "warn" or "ignore".

    Raises `AskedWrongly` on every rank. Collective."""
    tags = comm.gathered_objects(tag)
    for rank, other in enumerate(tags):
        if other != tags[0]:
            said = f"the checkpoint's tag is {tags[0]!r} on rank 0, and {other!r} on rank {rank}"
            if validation == "fail":
                raise AskedWrongly(f"{said}: name one tag on all ranks, or set checkpoint.tag_validation to 'Warn'.")
            if validation == "warn" and tag != tags[0]:
                logger.warning("%s: rank 0's is taken.", said)
            break
    return tags[0]


def write_latest(folder: Path, tag: str) -> None:
    """Name the newest; whatever kills the process, the file holds one tag or the other."""
    path, partial = folder / LATEST, folder / f"{LATEST}.partial"
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise StorageError(
            error.errno, f"{str(path)!r} cannot be written ({error.strerror}); the checkpoint {tag!r} itself is whole."
        ) from error


def read_latest(folder: Path) -> str | None:
    """The newest one's tag; None where no file says it."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(error.errno, f"{str(folder / LATEST)!r} cannot be read ({error.strerror}).") from error


def check_whose(path: Path) -> None:
    """Raise `CheckpointError` for a checkpoint that DeepSpeed itself wrote."""
    if path.is_dir() and any(path.glob("*model_states.pt")):
        raise CheckpointError(
            f"{str(path)!r} was written by DeepSpeed: make a universal checkpoint of it with DeepSpeed's ds_to_universal, and "
            "convert that with `python -m offload import`."
        )
