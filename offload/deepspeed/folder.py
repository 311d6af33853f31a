# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's folder of checkpoints: one folder for each tag, and the file "latest", which names the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import offload
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.deepspeed import comm
from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.utils import logger
from offload.errors import CheckpointError, OffloadError, StorageError

LATEST = "latest"
UNIVERSAL = "latest_universal"
_RECOVERY_SCRIPT = """#!/usr/bin/env python
# python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR
from offload.deepspeed.recovery import main

main()
"""


def agreed_tag(tag: str, validation: str) -> str:
    """Return rank 0's tag, as all ranks write into one folder. `validation` says what to do where another rank's differs:
    "fail", "warn" or "ignore".

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
    """Write the newest tag. Whatever kills the process, the file holds the old tag or the new one."""
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


def write_recovery_script(folder: Path) -> None:
    """`zero_to_fp32.py`, which stands beside a checkpoint of DeepSpeed's, too."""
    path = folder / "zero_to_fp32.py"
    path.write_text(_RECOVERY_SCRIPT, encoding="utf-8")
    path.chmod(0o755)


def read_latest(folder: Path, *, universal: bool = False) -> str | None:
    """The newest one's tag, of universal ones' where that is asked for; None where no file says it."""
    file = folder / (UNIVERSAL if universal else LATEST)
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(error.errno, f"{str(file)!r} cannot be read ({error.strerror}).") from error


def is_imported(path: Path) -> bool:
    """Whether a checkpoint of this package was converted from another project's."""
    with OpenedCheckpoint(path) as opened:
        return opened.manifest.imported is not None


@contextmanager
def own_checkpoint(path: Path, names: Sequence[str]) -> Iterator[Path]:
    """A checkpoint of this package with what `path` holds: itself, or what one of DeepSpeed's is converted into, beside it,
    while the block lasts. `names`: of the trained parameters, in the order of the optimizer's groups. Collective."""
    if not path.is_dir() or not any(path.glob("*model_states.pt")):
        yield path
        return
    made = path.with_name(f".{path.name}-imported")
    failure: list[OffloadError] = []
    if comm.get_rank() == 0:
        try:
            offload.import_checkpoint(path, made, names=names)
        except OffloadError as error:
            failure.append(error)
    said = next((one for one in comm.gathered_objects(str(failure[0]) if failure else None) if one is not None), None)
    if said is not None:
        raise CheckpointError(said) from (failure[0] if failure else None)
    try:
        yield made
        comm.barrier()
    finally:
        if comm.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)
