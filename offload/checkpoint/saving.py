"""Saves that run beside training, one at a time: the state of now, copied by a lane of its own, then made durable and named.

Updates of the last step may still be to come: they are made when training comes to them, under the next forward, and the save
takes what they leave. Whoever waits for the save on the thread that drives the model has them made first.

A save that failed takes nothing with it: no half checkpoint is left, earlier ones are untouched, training may go on. Its
failure is raised by whoever waits for it, else by the next step, save or load, or by `close`, whichever comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from torch import nn

from offload.checkpoint.manifest import Manifest, encode
from offload.checkpoint.numbering import retire_older
from offload.checkpoint.rank_folder import RankFolder
from offload.checkpoint.staged_folder import MANIFEST_NAME, StagedFolder
from offload.checkpoint.state_reading import Failures
from offload.checkpoint.tensor_file import write_file
from offload.checkpoint.writing import Snapshot
from offload.device.lane import HostLane
from offload.device.pending import Pending, Settled
from offload.errors import EngineFailedError, UsageError
from offload.step.parts import Parts

Folder = StagedFolder | RankFolder


class Save(Pending):
    """One checkpoint in the making, or made. `wait` and `done` may be called from any thread."""

    def __init__(self, path: Path, work: Pending, drive: Callable[[], None] = lambda: None) -> None:
        """`drive`: has what the save waits for done, on the thread that made this."""
        self.path = path
        self.seen = False
        self._work, self._drive = work, drive
        self._driver = threading.get_ident()

    def wait(self) -> None:
        """Return when the checkpoint is there, whole and durable; raise why it is not.

        On another thread than that which drives the model: not before that one has gone on to the next forward, or waits for
        the save itself."""
        self.seen = True
        if threading.get_ident() == self._driver:
            self._have_updates_made()
        self._work.wait()

    def settle(self) -> None:
        """Return when it is over, well or not; a failure stays unseen. On the thread that drives the model."""
        self._have_updates_made()
        try:
            self._work.wait()
        except Exception:
            return  # kept by the work: `wait` raises it

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._work.done()

    def _have_updates_made(self) -> None:
        try:
            self._drive()
        except EngineFailedError:
            self.seen = True  # whoever drives the model was told when it failed
        except UsageError:  # called at a wrong time: the save is none the worse
            raise
        except BaseException:
            self.seen = True
            raise


class Saver:
    """Makes the saves of one engine. Owned by the thread that drives the model."""

    def __init__(self, parts: Parts, model: nn.Module, finish_updates: Callable[[], None]) -> None:
        """`finish_updates`: has every update that is enqueued made, or raises why it cannot be."""
        self._parts, self._model, self._finish_updates = parts, model, finish_updates
        self._lane: HostLane | None = None
        self._last: Save | None = None

    def save(self, path: Path, manifest: Manifest, keep_last: int | None, failures: Failures) -> Save:
        """Write the whole checkpoint now, with the updates that are still to come if it `follows_updates`."""
        with self._snapshot_into(path, manifest, failures, beside=False) as (folder, snapshot):
            if self.follows_updates:
                self._watch(snapshot)
                try:
                    self._expect_updates(snapshot)
                    self._finish_updates()
                finally:
                    self._watch(None)
            _write(folder, snapshot, manifest, keep_last)
        return Save(folder.target, Settled())

    @property
    def follows_updates(self) -> bool:
        """Whether a save can begin while updates of the last step are still to come.

        That takes state that all lies in stores, a thread that updates it, and no other rank that waits for this one."""
        parts = self._parts
        return parts.ranks is None and parts.places is not None and parts.updates is not None and parts.updates.runs_beside

    def start(self, path: Path, manifest: Manifest, keep_last: int | None) -> Save:
        """Begin a checkpoint of the state of now, with the updates that are still to come if it `follows_updates`."""
        with ExitStack() as stack:
            folder, snapshot = stack.enter_context(self._snapshot_into(path, manifest, nullcontext, beside=True))
            self._reach_device()
            opened = stack.pop_all()
        driver = threading.current_thread()

        def may_go_on() -> None:
            if not driver.is_alive():
                raise UsageError(
                    f"the thread that drove the model ended before the updates were made that the checkpoint "
                    f"{str(folder.target)!r} is of: wait for the save on that thread, or close the engine there."
                )

        def run() -> None:
            with opened:
                try:
                    _write(folder, snapshot, manifest, keep_last, may_go_on)
                finally:
                    self._watch(None)

        if self._lane is None:
            self._lane = self._parts.accelerator.host_lane("checkpoint", waits_for_io=True)
        self._watch(snapshot)
        self._expect_updates(snapshot)
        self._last = Save(folder.target, self._lane.submit(run), lambda: self._drive(snapshot))
        return self._last

    def _drive(self, snapshot: Snapshot) -> None:
        if snapshot.copies.is_coming:
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
            self._last.settle()

    def finish(self) -> None:
        """As `settle`, and raise the failure if nobody has seen it."""
        last, self._last = self._last, None
        if last is not None:
            last.settle()
            if not last.seen:
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
            if self._lane is not None:
                self._lane.close()

    # ---- parts of a save -------------------------------------------------------------------------------------------

    @contextmanager
    def _snapshot_into(
        self, path: Path, manifest: Manifest, failures: Failures, *, beside: bool
    ) -> Iterator[tuple[Folder, Snapshot]]:
        ranks, rendezvous = self._parts.ranks, self._parts.rendezvous
        shared = RankFolder(path, ranks, rendezvous) if ranks is not None and rendezvous is not None else None
        with shared or StagedFolder(path, replace=True) as folder:
            snapshot = Snapshot(folder.path, self._parts, manifest, self._model, failures, beside=beside)
            try:
                yield folder, snapshot
            finally:
                snapshot.close()

    def _expect_updates(self, snapshot: Snapshot) -> None:
        snapshot.copies.expect(self._parts.updates.coming() if self._parts.updates is not None else ())

    def _watch(self, snapshot: Snapshot | None) -> None:
        if self._parts.updates is not None:
            self._parts.updates.watcher = snapshot

    def _reach_device(self) -> None:
        """What was given to compute so far is done before another thread reads device memory."""
        accelerator, flats = self._parts.accelerator, [flat for unit in self._parts.units for flat in unit.flats]
        if not accelerator.unified and self._parts.places is None and flats:
            byte = flats[0].memory.flat[:1]
            accelerator.copy_out(byte.new_empty(1, device="cpu"), byte).wait()


def _write(
    folder: Folder,
    snapshot: Snapshot,
    manifest: Manifest,
    keep_last: int | None,
    may_go_on: Callable[[], None] = lambda: None,
) -> None:
    snapshot.copy(may_go_on)
    if isinstance(folder, RankFolder):
        folder.commit(manifest)
    else:
        write_file(folder.path / MANIFEST_NAME, encode(manifest))
        folder.commit()
    if keep_last is not None and not (isinstance(folder, RankFolder) and not folder.is_first):
        retire_older(folder.target, keep_last)
