# SPDX-License-Identifier: Apache-2.0
"""Folders that are there whole or not at all: written under another name, made durable, then renamed.

Names in the parent of a target folder T, each with a token of its own:

    .offload-new-*         being made, not yet locked (microseconds)
    .offload-saving-*      being written; locked (flock on the folder) as long as its process lives
    .offload-aside-*-T     the former T, while the new one takes its name; holds until the new one has it
    .offload-removing-*    no longer wanted

What others put into T is theirs: it moves on into the new T, whether it was there before or came while that was written.

A kill leaves some of these. The next save in the same parent takes back or removes those whose lock is free: an aside
folder whose T is missing becomes T again, everything else goes. A folder whose lock is held belongs to a living process
and is left alone. On file systems without such locks (NFS has none for folders) so is what may be in writing; what is no
longer wanted goes, even if another process is reading it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from enum import Enum
from pathlib import Path

from offload.checkpoint.format.others_files import CHECKPOINT_FILE, is_of_checkpoint, move_others
from offload.errors import CheckpointError, StorageError
from offload.tiers.io.failure import CHECKPOINT, errno_text, remedy_of, storage_error

PREFIX = ".offload-"
_TOKEN = r"[0-9a-f]{16}"
_NEW = re.compile(rf"\.offload-new-{_TOKEN}")
_SAVING = re.compile(rf"\.offload-saving-{_TOKEN}")
_REMOVING = re.compile(rf"\.offload-removing-{_TOKEN}")
_STAGED = re.compile(rf"\.offload-(new|saving)-{_TOKEN}")
_ASIDE = re.compile(rf"\.offload-aside-{_TOKEN}-(.+)", re.DOTALL)
_NEW_LIFETIME_SECONDS = 3600
_LATE_FILES = 3
"""Of other ranks, which had found the folder before it lost its name."""
OUR_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(safetensors|json)|MANIFEST\.json(\.new)?")
"""What a folder made here may hold; a folder with anything else in it is never removed."""
_STAGED_FILE = re.compile(rf"{OUR_FILE.pattern}|[A-Za-z0-9_]+\.pt")
"""The same of one that has no name of its own yet, at any depth: what becomes another project's checkpoint, too."""
MANIFEST_NAME = "MANIFEST.json"

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


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    fileno = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fileno)
    finally:
        os.close(fileno)


def _make_parents(path: Path) -> None:
    missing: list[Path] = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


class Lock(Enum):
    """What came of asking for a folder's lock without waiting."""

    OURS = "ours"
    HELD = "held by a living process"
    UNKNOWN = "the file system has no locks"


def lock_folder(fileno: int, *, shared: bool = False) -> Lock:
    """Ask for the lock of an open folder; it is let go when `fileno` is closed."""
    try:
        fcntl.flock(fileno, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError as error:
        _log.debug("no folder locks: %s", error)
        return Lock.UNKNOWN
    return Lock.OURS


def open_folder(path: Path, *, follow: bool = False) -> int:
    """A descriptor of the folder `path`, which must be one itself unless links are to be followed."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))


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
            _make_parents(parent)
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
                    _remove_for_all(place)
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
                _move_on(aside, self.target)
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


def _move_on(aside: Path, target: Path) -> None:
    if move_others(aside, target):
        sync(target)


def take_back(parent: Path) -> None:
    """Give aside folders whose target is missing their name again: a kill came between two renames."""
    for name in _names(parent):
        match = _ASIDE.fullmatch(name)
        if match is None or os.path.lexists(parent / match[1]):
            continue
        try:
            fileno = open_folder(parent / name)
        except FileNotFoundError:
            continue
        try:
            if lock_folder(fileno) is not Lock.HELD and not os.path.lexists(parent / match[1]):
                os.rename(parent / name, parent / match[1])
                sync(parent)
        finally:
            os.close(fileno)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves left in `parent`."""
    for name in _names(parent):
        path, aside = parent / name, _ASIDE.fullmatch(name)
        if aside is not None:
            _remove_superseded(path, parent / aside[1])
        elif _SAVING.fullmatch(name) or _REMOVING.fullmatch(name) or _is_old_new(path):
            remove_quietly(path)


def _remove_superseded(aside: Path, target: Path) -> None:
    """Remove an aside folder, if another has its name."""
    if not os.path.lexists(target):
        return
    if os.path.lexists(aside / MANIFEST_NAME) and not os.path.lexists(target / MANIFEST_NAME):
        _log.warning("%s is no checkpoint; the one that was there lies at %s", target, aside)
    else:
        remove_quietly(aside, target)


def retire(path: Path) -> None:
    """Take a complete checkpoint's name away and remove it, unless it holds files that are not ours."""
    foreign = [name for name in os.listdir(path) if not (OUR_FILE.fullmatch(name) or _is_folder_of_ours(path / name))]
    if foreign:
        _log.warning("kept: %s, which holds %s", path, foreign[0])
        return
    removing = _renamed(path, "removing")  # first of all: nothing half removed is ever under a checkpoint's name
    sync(path.parent)
    remove_quietly(removing)


def remove_quietly(path: Path, target: Path | None = None) -> None:
    """Remove a folder of ours if no process uses it; what cannot be removed now is left for the next save.

    `target`: of an aside folder, that which has its name now."""
    try:
        fileno = open_folder(path)
        try:
            lock = lock_folder(fileno)
            if lock is Lock.UNKNOWN and _SAVING.fullmatch(path.name):
                _log.warning(
                    "left in place: %s. Its file system has no locks (flock), so another process may be writing it: remove it "
                    "yourself where none is.",
                    path,
                )
            elif lock is not Lock.HELD:
                if target is not None:
                    _move_on(path, target)
                _empty_and_remove(path, OUR_FILE if target is None else CHECKPOINT_FILE)
        finally:
            os.close(fileno)
    except FileNotFoundError:
        return  # somebody else removed it
    except OSError as error:
        _log.warning("left in place: %s (%s)", path, error.strerror)


def _renamed(path: Path, stage: str) -> Path:
    renamed = path.parent / f"{PREFIX}{stage}-{secrets.token_hex(8)}"
    os.rename(path, renamed)
    return renamed


def _remove_for_all(path: Path) -> None:
    """Remove a staged folder that other ranks may be writing to: what they are about to make they find no folder for."""
    removing = _renamed(path, "saving")
    for _ in range(_LATE_FILES):
        try:
            return _empty_and_remove(removing)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    _empty_and_remove(removing)


def _is_folder_of_ours(path: Path) -> bool:
    """Whether it is a folder with nothing but files that an export writes."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(OUR_FILE.fullmatch(name) for name in os.listdir(path))


def _empty_and_remove(path: Path, ours: re.Pattern[str] = OUR_FILE) -> None:
    """`ours`: the files that go; where anything else is left, so is the folder."""
    if _STAGED.fullmatch(path.name) and all(_STAGED_FILE.fullmatch(name) for *_, names in os.walk(path) for name in names):
        return shutil.rmtree(path)
    fileno = open_folder(path)
    try:
        # The manifest goes first, so that a half-removed checkpoint is none.
        for name in sorted(os.listdir(fileno), key=lambda name: name != MANIFEST_NAME):
            if ours.fullmatch(name):
                os.unlink(name, dir_fd=fileno)
            elif ours is OUR_FILE and _is_folder_of_ours(path / name):  # of an adapter
                _empty_and_remove(path / name)
    finally:
        os.close(fileno)
    os.rmdir(path)


def _names(parent: Path) -> list[str]:
    try:
        return [name for name in os.listdir(parent) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def _is_old_new(path: Path) -> bool:
    if not _NEW.fullmatch(path.name):
        return False
    try:
        return time.time() - os.lstat(path).st_mtime > _NEW_LIFETIME_SECONDS
    except FileNotFoundError:
        return False
