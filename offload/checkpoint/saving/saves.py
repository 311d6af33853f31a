# SPDX-License-Identifier: Apache-2.0
"""Saves, one at a time: the state of now, copied by a lane of their own, then made durable and named.

Everything of a save is done on that lane, whose thread no signal ever interrupts, in three jobs:

    begin   the folder and the snapshot are made, the updates are watched; the caller waits for that
    run     everything is copied, and the checkpoint gets its name
    end     what is left of it is let go. A save that did not run is none: nothing of it is left

So an interrupt finds the caller waiting, and leaves nothing half done: the save is given up, or goes on where it had been let
go on already (`_Making.may_run`). Whoever comes next, the next save, a load, `gathered` or `close`, has `end` done first.

Beside training, updates of the last step may still be to come: they are made when training comes to them, under the next
forward, by whoever waits for the save on the thread that drives the model, or by the save where that thread does nothing
(`offload.checkpoint.saving.idleness`); the save takes what they leave. The interpreter does not end before a save that
runs does.

A save that failed takes nothing with it: no half checkpoint is left, earlier ones are untouched, training may go on. Its
failure is raised by whoever waits for it, else by the next step, save or load, or by `close`, whichever comes first; a warning
says it where none of these comes.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from offload.checkpoint.format.manifest import MANIFEST_NAME, Manifest, encode
from offload.checkpoint.format.numbering import date_behind_others, retire_older
from offload.checkpoint.format.soundness import Soundness
from offload.checkpoint.format.staged_folder import StagedFolder
from offload.checkpoint.format.tensor_file import write_file
from offload.checkpoint.saving.idleness import Idleness
from offload.checkpoint.saving.rank_folder import RankFolder
from offload.checkpoint.saving.writing import Small, Snapshot
from offload.checkpoint.state_reading import Failures
from offload.device.lane import HostLane, InlineLane, start_thread
from offload.device.pending import Pending
from offload.device.thread_end import has_ended, script_is_over
from offload.errors import CheckpointError, EngineFailedError, UsageError, words_of
from offload.planning.route import Memory
from offload.step.components import Components
from offload.step.training import Training

Folder = StagedFolder | RankFolder
_DRIVER_POLL_SECONDS = 0.1


@dataclass(slots=True)
class _Outcome:
    """What became of a save. It outlives who could be told, so it keeps what a failure says, not what its frames refer to."""

    path: Path
    over: bool = False
    failure: str | None = None
    seen: bool = False
    pid: int = field(default_factory=os.getpid)

    def warn_if_lost(self) -> None:
        """Nobody can be told any more but by a warning."""
        if self.seen or self.pid != os.getpid():
            return
        name = repr(str(self.path))
        if not self.over:
            said = f"the process ended before the checkpoint {name} was written: it is not there."
        elif self.failure is not None:
            said = f"the checkpoint {name} was not written: {self.failure}"
        else:
            return
        warnings.warn(said, RuntimeWarning, stacklevel=2)


class Save(Pending):
    """One checkpoint in the making, or made. `wait` and `done` may be called from any thread."""

    def __init__(self, making: _Making, drive: Callable[[], None], end: Callable[[], None]) -> None:
        """`drive`: has what the save waits for done, on the thread that made this. `end`: waits until it is over."""
        self._making, self._outcome = making, making.outcome
        self.path = self._outcome.path
        self._drive, self._end = drive, end
        self._driver = threading.get_ident()
        weakref.finalize(self, self._outcome.warn_if_lost)

    def wait(self) -> None:
        """Return when the checkpoint is there, whole and durable; raise why it is not.

        On another thread than that which drives the model, updates that are still to come are made when that thread comes to
        them, or when it has done nothing for a second."""
        try:
            self.settle()
        finally:
            self._outcome.seen = self._outcome.over
        if self._making.failure is not None:
            raise self._making.failure

    def settle(self, *, drives: bool = False) -> None:
        """Return when it is over, well or not; a failure stays unseen. `drives`: the calling thread drives the model now,
        though another may have begun the save."""
        if self._outcome.over:
            return
        if self._outcome.pid != os.getpid():
            raise UsageError(
                f"the save is made by process {self._outcome.pid}, which this one was forked from: wait for it there."
            )
        if drives or threading.get_ident() == self._driver:
            self._have_updates_made()
        self._end()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._outcome.over

    @property
    def seen(self) -> bool:
        """Whether somebody knows how it ended."""
        return self._outcome.seen

    def _have_updates_made(self) -> None:
        try:
            self._drive()
        except EngineFailedError:
            self._outcome.seen = True  # whoever drives the model was told when it failed
        except UsageError:  # called at a wrong time: the save is none the worse
            raise
        except Exception:
            self._outcome.seen = True
            raise


class _Making:
    """All that is held for one save. `begin`, `run` and `end` are jobs of the lane."""

    def __init__(self, folder: Folder, parts: Components, snapshot: Callable[[Path], Snapshot]) -> None:
        """`snapshot`: makes it, in a folder."""
        self.folder, self._parts, self._make_snapshot = folder, parts, snapshot
        self.outcome = _Outcome(folder.target)
        self.failure: BaseException | None = None
        self._stack = ExitStack()
        self._over = threading.Event()
        self._given_up = CheckpointError("the save was interrupted before it ran: nothing of it is left.")
        self.snapshot: Snapshot | None = None
        self.may_run = False
        """Set by the caller, once, when it knows that the state is still that of the snapshot."""

    def begin(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.folder)
            snapshot = self._make_snapshot(self.folder.path)
            stack.callback(snapshot.close)
            self._watch(snapshot)
            stack.callback(self._watch, None)
            self.snapshot = snapshot
            self._stack = stack.pop_all()

    def run(self, write: Callable[[], None]) -> None:
        try:
            with self._stack:
                if not self.may_run:
                    raise self._given_up
                write()
        except BaseException as error:
            self.failure, self.outcome.failure = error, words_of(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._be_over()

    def end(self) -> None:
        """Give up what has not run."""
        if not self.outcome.over:
            self.may_run = False
            self.run(lambda: None)

    def give_up(self) -> None:
        """By the caller, who was interrupted: nothing more of it is copied."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.copies.fail(self._given_up)

    def keep(self, save: Save, driver: threading.Thread, lane: HostLane) -> None:
        """Hold the process, and who can tell of a failure, until it is over. `driver`: the thread of the model, in whose end
        nobody waits for a lane without a thread of its own any more."""
        while not self._over.wait(_DRIVER_POLL_SECONDS if isinstance(lane, InlineLane) else None):
            if isinstance(lane, InlineLane) and has_ended(driver):
                lane.run_one()
        del save

    def _be_over(self) -> None:
        self.snapshot = None
        self.outcome.over = True
        self._over.set()

    def _watch(self, snapshot: Snapshot | None) -> None:
        if self._parts.updates is not None:
            self._parts.updates.watcher = snapshot.copies if snapshot is not None else None


class Saver:
    """Makes the saves of one engine. Owned by the thread that drives the model."""

    def __init__(self, parts: Components, training: Training, model: nn.Module, finish_updates: Callable[[], None]) -> None:
        """`finish_updates`: has every update that is enqueued made, or raises why it cannot be."""
        self._parts, self._training, self._model, self._finish_updates = parts, training, model, finish_updates
        self.soundness = Soundness()
        self._lane: HostLane | None = None
        self._making: _Making | None = None
        self._last: Save | None = None

    @property
    def follows_updates(self) -> bool:
        """Whether a save can begin while updates of the last step are still to come.

        That takes parameters that all lie within the host's reach, a thread that updates them, and no other rank that waits
        for this one."""
        parts = self._parts
        return (
            not parts.meeting.waits_for_others
            and all(unit.route.home_in is Memory.HOST for unit in parts.units)
            and parts.updates is not None
            and parts.updates.runs_beside
        )

    def save(self, path: Path, manifest: Manifest, keep_last: int | None, *, wait: bool) -> Save:
        """Write a checkpoint of the state of now, with the updates that are still to come if it `follows_updates`. Returns when
        it is there, or (`wait`: False) when it has begun."""
        parts, training = self._parts, self._training
        wait = wait or _is_ending()
        self._reach_device()
        small, idleness = Small.of(self._model, parts.accelerator.device), Idleness(parts, training)
        failures: Failures = training.failures_beside if wait else nullcontext
        folder = _folder(path, parts)
        making = _Making(folder, parts, lambda where: Snapshot(where, parts, manifest, small, failures, beside=not wait))
        lane = self._open_lane()
        save = Save(making, lambda: self._drive(making), lambda: lane.submit(making.end).wait())
        self._making, self._last = making, save  # from here on whoever comes next finds it
        try:
            if not parts.meeting.waits_for_others:
                lane.submit(making.begin).wait()
            else:
                making.begin()  # collective, so where the other calls are
            if not wait:
                keeping = (save, threading.current_thread(), lane)
                start_thread(threading.Thread(target=making.keep, args=keeping, name="offload-checkpoint-keeper", daemon=False))
            making.may_run = True
            running = lane.submit(lambda: making.run(lambda: self._write(making, manifest, keep_last, idleness)))
            if isinstance(lane, InlineLane) and making.snapshot is not None:
                making.snapshot.copies.run_lane = running.wait
            if wait:
                save.wait()
        except BaseException as error:
            making.outcome.seen = True
            making.give_up()
            ending = lane.submit(making.end)
            if isinstance(error, Exception):
                ending.wait()
            raise
        return save

    def _drive(self, making: _Making) -> None:
        snapshot = making.snapshot
        if snapshot is not None and snapshot.copies.is_coming:
            try:
                self._finish_updates()
            except UsageError:
                raise
            except Exception as error:  # the engine's own
                snapshot.copies.fail(error)
                raise

    def settle(self) -> None:
        """Wait until the save that runs, if one does, is over: then anything may be overwritten. A failure stays with it."""
        if self._last is not None:
            self._last.settle(drives=True)

    def finish(self) -> None:
        """As `settle`, and raise the failure if nobody has seen it."""
        self.settle()
        last, self._last, self._making = self._last, None, None
        if last is not None and not last.seen:
            last.wait()

    def raise_unseen(self) -> None:
        """Raise the failure of a save that is over and that nobody waited for. Never blocks."""
        if self._last is not None and self._last.done():
            self.finish()

    def close(self) -> None:
        """Finish the save that runs, and the lane. Idempotent."""
        try:
            self.finish()
        finally:
            if self._making is not None and self._lane is not None:
                self._making.give_up()
                self._lane.submit(self._making.end)
            if self._lane is not None:
                self._lane.close()

    def _write(self, making: _Making, manifest: Manifest, keep_last: int | None, idleness: Idleness) -> None:
        folder, snapshot = making.folder, making.snapshot
        assert snapshot is not None
        snapshot.copy(idleness.make_update)
        if isinstance(folder, RankFolder):
            folder.commit(manifest)
        else:
            write_file(folder.path / MANIFEST_NAME, encode(manifest))
            date_behind_others(folder.path, folder.target)
            folder.commit()
        self.soundness.note_sound(folder.target)
        if keep_last is not None and not (isinstance(folder, RankFolder) and not folder.is_first):
            retire_older(folder.target, keep_last, self.soundness)

    def _open_lane(self) -> HostLane:
        if self._lane is None:
            waits_for_ranks = self._parts.meeting.waits_for_others
            self._lane = self._parts.accelerator.host_lane("checkpoint", waits_for_io=True, waits_for_ranks=waits_for_ranks)
            self._parts.made.append(self._lane)  # closed first of all: a save that was given up still reads what others hold
        return self._lane

    def _reach_device(self) -> None:
        """What was given to compute so far is done before another thread reads device memory."""
        self._parts.accelerator.mark().wait()


def _is_ending() -> bool:
    """Whether this is an `atexit` function: the interpreter has waited for its threads already, and waits for no other."""
    return threading.current_thread() is threading.main_thread() and script_is_over()


def _folder(path: Path, parts: Components) -> Folder:
    if parts.ranks.world_size == 1:
        return StagedFolder(path, replace=True)
    return RankFolder(path, parts.ranks, parts.meeting)
