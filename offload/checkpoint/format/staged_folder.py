# SPDX-License-Identifier: Apache-2.0
"""Folders that are there whole or not at all: written under another name, made durable, then renamed.

What others put into a target is theirs: it moves on into the new one, whether it was there before or came while that was
written. What a kill leaves is found again by the names that `offload.checkpoint.format.leftovers` lists.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from offload.checkpoint.format.folders import lock_folder, make_parents, open_folder, sync
from offload.checkpoint.format.leftovers import (
    OUR_FILE,
    PREFIX,
    remove_for_all,
    remove_leftovers,
    remove_quietly,
    take_back,
)
from offload.checkpoint.format.manifest import MANIFEST_NAME
from offload.checkpoint.format.others_files import is_of_checkpoint, move_others
from offload.errors import CheckpointError, StorageError
from offload.tiers.io.failure import CHECKPOINT, errno_text, remedy_of, storage_error

_log = logging.getLogger(__name__)


def write_failure(operation: str, path: Path, error: OSError) -> StorageError:
    """The user's error for a failed write of a checkpoint or an export."""
    code = error.errno or errno.EIO
    remedy = remedy_of(code, CHECKPOINT)
    return StorageError(
        code, f"{operation} {str(path)!r} failed ({errno_text(code)}): {remedy}. Earlier checkpoints are untouched."
    )


def raise_if_short(path: Path, error: OSError) -> None:
    """Of a checkpoint that is read: what this process lacks says nothing of it, so it is not to be passed over."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise storage_error("cannot open", path, error.errno, CHECKPOINT) from error


def require_replaceable(target: Path, *, replace: bool) -> None:
    """Raise `CheckpointError` where `StagedFolder` would not give what is made the name `target`."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return
    name = str(target)
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{name!r} exists and is not a folder: remove it, or save under another name.")
    held = os.listdir(target)
    if not held:
        return
    foreign = [one for one in held if not OUR_FILE.fullmatch(one)]
    if not replace or not _is_checkpoint(held) or foreign:
        raise CheckpointError(
            f"{name!r} exists and holds {', '.join(sorted(foreign or held)[:3])}: only an empty folder"
            f"{' or a complete checkpoint' if replace else ''} is replaced. Remove it, or use another name."
        )


def _is_checkpoint(held: Collection[str]) -> bool:
    """Whether these are the names in a complete checkpoint, and not beside another program's MANIFEST.json."""
    return MANIFEST_NAME in held and any(is_of_checkpoint(name) for name in held if name != MANIFEST_NAME)


class StagedFolder:
    """The folder that becomes `target` at `commit`. A context manager: leaving it without a commit removes what was written.

    Owned by one thread. Errors of the file system are `StorageError`; a `target` that must not be replaced is a
    `CheckpointError`, known before anything is written.
    """

    def __init__(self, target: Path, *, replace: bool) -> None:
        """`replace`: a complete checkpoint of that name may be replaced. An empty folder always may."""
        self.target = Path(os.path.abspath(target))
        self._replace = replace
        self._filenos: list[int] = []
        self.path = self.target
        self._places: tuple[Path, ...] = ()
        """All that `path` may be before the commit: an interrupt may come between a call and the note of what it did."""

    def __enter__(self) -> StagedFolder:
        parent = self.target.parent
        try:
            make_parents(parent)
            take_back(parent)
            require_replaceable(self.target, replace=self._replace)
            remove_leftovers(parent)
            self._make()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise write_failure("making the folder", self.target, error) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for place in self._places if self.path != self.target else ():
                with suppress(FileNotFoundError):
                    remove_for_all(place)
        except OSError as error:
            _log.warning("left in place for the next save: %s (%s)", self.path, error.strerror)
        finally:
            self._close()

    def commit(self) -> None:
        """Give the folder its name. All its files are synced already; afterwards it is durable. What others have put into
        `target` is in it too, or where that cannot be, a `CheckpointError` names it."""
        asides: list[Path] = []
        try:
            os.fsync(self._filenos[0])
            self._take_name(asides)
            for aside in asides:
                move_others(aside, self.target)
            sync(self.target.parent)
        except (OSError, CheckpointError) as error:
            if self.path != self.target:
                for aside in asides:
                    self._put_back(aside)
            if isinstance(error, CheckpointError):
                raise
            raise write_failure("committing", self.target, error) from error
        self._close()
        for aside in asides:
            remove_quietly(aside, self.target)

    def _make(self) -> None:
        token = secrets.token_hex(8)
        new, saving = self._places = tuple(self.target.parent / f"{PREFIX}{stage}-{token}" for stage in ("new", "saving"))
        self.path = new
        os.mkdir(new, mode=0o755)
        self._filenos.append(open_folder(new))
        lock_folder(self._filenos[0])
        os.rename(new, saving)
        self.path = saving

    def _take_name(self, asides: list[Path]) -> None:
        """`asides`: gets what was moved out of the way."""
        while self.path != self.target:
            aside = self._move_aside()
            if aside is not None:
                asides.append(aside)
            try:
                os.rename(self.path, self.target)
                self.path = self.target
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Somebody has just put something there: that moves too.

    def _move_aside(self) -> Path | None:
        held = _names_in(self.target)
        if not held:
            return None  # rename replaces an empty folder by itself
        self._require_room_for(held)
        aside = self.target.parent / f"{PREFIX}aside-{secrets.token_hex(8)}-{self.target.name}"
        self._filenos.append(open_folder(self.target))
        lock_folder(self._filenos[-1])  # so that nobody takes it back in the moment between the two renames
        os.rename(self.target, aside)
        return aside

    def _require_room_for(self, held: list[str]) -> None:
        """Raise `CheckpointError` where something in the target cannot move into the folder that gets its name."""
        others = held
        if self._replace and _is_checkpoint(held):
            others = [name for name in held if not is_of_checkpoint(name)]
        blocked = sorted(name for name in others if is_of_checkpoint(name) or os.path.lexists(self.path / name))
        if blocked:
            raise CheckpointError(
                f"{str(self.target)!r} got {', '.join(blocked[:3])} while it was written, and has a file of that name itself: "
                "what is there stays, and nothing was written. Remove it, or use another name."
            )

    def _put_back(self, aside: Path) -> None:
        try:
            os.rename(aside, self.target)
        except OSError as error:
            # Whole, and found under this name by the next save or load (`take_back`).
            _log.warning("%s lies at %s now (%s)", self.target, aside, error.strerror)

    def _close(self) -> None:
        while self._filenos:
            os.close(self._filenos.pop())


def _names_in(target: Path) -> list[str]:
    """What a folder holds; nothing where there is none. Raises `CheckpointError` where it is something else."""
    try:
        if stat.S_ISDIR(os.lstat(target).st_mode):
            return os.listdir(target)
    except FileNotFoundError:
        return []
    raise CheckpointError(f"{str(target)!r} exists and is not a folder: remove it, or save under another name.")
