# SPDX-License-Identifier: Apache-2.0
"""One folder that all ranks write a checkpoint into, in parallel: the first makes and names it, each adds its part.

    enter    rank 0 makes the staged folder; all ranks are told its name (or why there is none)
    write    each rank its own files, then `part-<rank>.json`, a manifest of what it wrote: its word that all of it is durable
    commit   rank 0 waits for all parts, merges them into MANIFEST.json, removes them and renames the folder; the others wait
             until the folder has its name

From `enter` on ranks meet in the file system alone, so that the threads which save beside training never talk to each other
in any order that training could disturb. The folder must be one that all ranks see.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack
from pathlib import Path

from offload.checkpoint.agreement import Agreement
from offload.checkpoint.format.folders import open_folder
from offload.checkpoint.format.manifest import MANIFEST_NAME, Manifest, ParameterEntry, encode
from offload.checkpoint.format.manifest_decoding import decode
from offload.checkpoint.format.numbering import date_behind_others
from offload.checkpoint.format.staged_folder import StagedFolder
from offload.checkpoint.format.tensor_file import write_file
from offload.errors import CheckpointError, RankError
from offload.ranks.group import Group, Meeting
from offload.ranks.next_transfers import MeetingPoint

_POLL_SECONDS = 0.01


class RankFolder:
    """See the module. A context manager, as `StagedFolder`; entering it is collective."""

    def __init__(self, target: Path, ranks: Group, meeting: Meeting) -> None:
        self.target = Path(os.path.abspath(target))
        self.path = self.target
        self._ranks, self._meeting = ranks, meeting
        self._agreement = Agreement(ranks, meeting.meet)
        self._staged: StagedFolder | None = None
        self._fileno = -1
        self._part_written = False

    @property
    def is_first(self) -> bool:
        """Whether this rank names the folder."""
        return self._ranks.index == 0

    def __enter__(self) -> RankFolder:
        with ExitStack() as stack:
            self.path = Path(
                self._agreement.by_first(
                    MeetingPoint.SAVING,
                    lambda: self._make(stack),
                    lambda word: CheckpointError(f"rank 0 could not begin the checkpoint: {word}"),
                )
            )
            stack.callback(self._close)
            self._open()
            self._meeting.watch(True)
            stack.pop_all()
        return self

    def _make(self, stack: ExitStack) -> str:
        self._staged = stack.enter_context(StagedFolder(self.target, replace=True))
        return str(self._staged.path)

    def _open(self) -> None:
        """Raises `CheckpointError` on every rank where one does not see the folder."""
        failure: OSError | None = None
        try:
            self._fileno = open_folder(self.path)
        except OSError as error:
            failure = error
        blind = [rank for rank, sees in enumerate(self._agreement.exchange(MeetingPoint.SAVING, failure is None)) if not sees]
        if blind:
            raise CheckpointError(
                f"rank {blind[0]} does not see the folder {str(self.path.parent)!r} that rank 0 writes to: save to a file "
                "system that all ranks share."
            ) from failure

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        was_given_up = value is not None and self._staged is None and self._is_removed(value)
        if value is not None and not self._part_written and not was_given_up:
            self._say_failed(value)
        if self._staged is not None:
            self._staged.__exit__()
        self._close()
        if was_given_up:
            raise self._given_up() from value

    def commit(self, part: Manifest) -> None:
        """All of this rank's files are durable. Returns when the whole checkpoint is. Raises what kept it from that."""
        # Whoever sees the part sees all of it.
        coming = self.path / f"coming-{self._ranks.index:05d}.json"
        write_file(coming, encode(part))
        os.rename(coming, self.path / _part_name(self._ranks.index))
        self._part_written = True
        if self._staged is None:
            self._await_name()
            return
        merged = self._merge([self._await_part(index) for index in range(self._ranks.world_size)])
        for index in range(self._ranks.world_size):
            os.unlink(self.path / _part_name(index))
        write_file(self.path / MANIFEST_NAME, encode(merged))
        date_behind_others(self.path, self.target)
        self._staged.commit()
        self.path = self._staged.path

    def _merge(self, parts: list[Manifest]) -> Manifest:
        whole = parts[0]
        entries: dict[tuple[str, ...], ParameterEntry] = {tuple(entry.fqns): entry for entry in whole.parameters}
        for part in parts[1:]:
            for entry in part.parameters:
                known = entries.setdefault(tuple(entry.fqns), entry)
                if known is not entry:
                    known.pieces += entry.pieces
            whole.random += part.random
            whole.files += part.files
            whole.padding += part.padding
        whole.parameters = list(entries.values())
        for entry in whole.parameters:
            entry.pieces.sort(key=lambda piece: piece.start)
        return whole

    # ---- waiting -------------------------------------------------------------------------------------------------

    def _await_part(self, index: int) -> Manifest:
        path = self.path / _part_name(index)
        while True:
            try:
                return decode(path.read_bytes(), str(path))
            except FileNotFoundError:
                self._require_nobody_failed()
                time.sleep(_POLL_SECONDS)

    def _await_name(self) -> None:
        while True:
            has_left = not self._lies_at(self.path)
            if self._lies_at(self.target):
                return
            if has_left:
                raise self._given_up()
            self._require_nobody_failed()
            time.sleep(_POLL_SECONDS)

    def _lies_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fileno))
        except FileNotFoundError:
            return False

    def _require_nobody_failed(self) -> None:
        for index in range(self._ranks.world_size):
            try:
                word = (self.path / _failure_name(index)).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            raise RankError(f"rank {index} could not write its part of the checkpoint {str(self.target)!r}: {word}")
        failure = self._meeting.failure
        if failure is not None:
            raise RankError(f"the checkpoint {str(self.target)!r} was not completed: {failure}") from failure

    def _is_removed(self, error: BaseException) -> bool:
        """Whether it came of this, that the folder lost its name: the first rank has failed, or was interrupted."""
        is_missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ESTALE)
        return is_missing and self._fileno >= 0 and not self._lies_at(self.path)

    def _given_up(self) -> RankError:
        return RankError(f"rank 0 could not complete the checkpoint {str(self.target)!r}: see its error.")

    def _say_failed(self, error: BaseException) -> None:
        try:
            write_file(self.path / _failure_name(self._ranks.index), f"{type(error).__name__}: {error}".encode())
        except OSError:
            # A drive that takes nothing any more: the others learn it from the rendezvous.
            self._meeting.abandon(f"{type(error).__name__}: {error}")

    def _close(self) -> None:
        self._meeting.watch(False)
        fileno, self._fileno = self._fileno, -1
        if fileno >= 0:
            os.close(fileno)


def _part_name(index: int) -> str:
    return f"part-{index:05d}.json"


def _failure_name(index: int) -> str:
    return f"failed-{index:05d}.json"
