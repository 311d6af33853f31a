"""Saves that run beside training, one at a time: the state of now, copied by a lane of its own, then made durable and named.

A save that failed takes nothing with it: no half checkpoint is left, earlier ones are untouched, training may go on. Its
failure is raised by whoever waits for it, else by the next step, save or load, or by `close`, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from torch import nn

from offload.device.lane import HostLane
from offload.device.pending import Pending, Settled
from offload.runtime.checkpointing.manifest import Manifest, encode
from offload.runtime.checkpointing.numbering import retire_older
from offload.runtime.checkpointing.rank_folder import RankFolder
from offload.runtime.checkpointing.staged_folder import MANIFEST_NAME, StagedFolder
from offload.runtime.checkpointing.tensor_file import write_file
from offload.runtime.checkpointing.writing import Failures, Snapshot
from offload.runtime.parts import Parts

Folder = StagedFolder | RankFolder


class Save(Pending):
    """One checkpoint in the making, or made. `wait` and `done` may be called from any thread."""

    def __init__(self, path: Path, work: Pending) -> None:
        self.path = path
        self.seen = False
        self._work = work

    def wait(self) -> None:
        """Return when the checkpoint is there, whole and durable; raise why it is not."""
        self.seen = True
        self._work.wait()

    def settle(self) -> None:
        """Return when it is over, well or not; a failure stays unseen."""
        try:
            self._work.wait()
        except Exception:
            return  # kept by the work: `wait` raises it

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._work.done()


class Saver:
    """Makes the saves of one engine. Owned by the thread that drives the model."""

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        self._parts, self._model = parts, model
        self._lane: HostLane | None = None
        self._last: Save | None = None

    def save(self, path: Path, manifest: Manifest, keep_last: int | None, failures: Failures) -> Save:
        """Write the whole checkpoint now."""
        with self._snapshot_into(path, manifest, failures) as (folder, snapshot):
            _write(folder, snapshot, manifest, keep_last)
        return Save(folder.target, Settled())

    def start(self, path: Path, manifest: Manifest, keep_last: int | None) -> Save:
        """Begin a checkpoint of the state of now; updates from now on copy first what they are about to overwrite."""
        with ExitStack() as stack:
            folder, snapshot = stack.enter_context(self._snapshot_into(path, manifest, nullcontext))
            self._reach_device()
            opened = stack.pop_all()

        def run() -> None:
            with opened:
                try:
                    _write(folder, snapshot, manifest, keep_last)
                finally:
                    self._hook(None)

        if self._lane is None:
            self._lane = self._parts.accelerator.host_lane("checkpoint", waits_for_io=True)
        self._hook(snapshot)
        self._last = Save(folder.target, self._lane.submit(run))
        return self._last

    def settle(self) -> None:
        """Wait until the save that runs, if one does, is over: then anything may be overwritten. A failure stays with it."""
        if self._last is not None:
            self._last.settle()

    def finish(self) -> None:
        """As `settle`, and raise the failure if nobody has seen it."""
        last, self._last = self._last, None
        if last is not None and last.seen:
            last.settle()
        elif last is not None:
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
    def _snapshot_into(self, path: Path, manifest: Manifest, failures: Failures) -> Iterator[tuple[Folder, Snapshot]]:
        ranks, rendezvous = self._parts.ranks, self._parts.rendezvous
        shared = RankFolder(path, ranks, rendezvous) if ranks is not None and rendezvous is not None else None
        with shared or StagedFolder(path, replace=True) as folder:
            snapshot = Snapshot(folder.path, self._parts, manifest, self._model, failures)
            try:
                yield folder, snapshot
            finally:
                snapshot.close()

    def _hook(self, snapshot: Snapshot | None) -> None:
        if self._parts.updates is not None:
            self._parts.updates.before_update = snapshot.before_update if snapshot is not None else None

    def _reach_device(self) -> None:
        """What was given to compute so far is done before another thread reads device memory."""
        accelerator, flats = self._parts.accelerator, [flat for unit in self._parts.units for flat in unit.flats]
        if not accelerator.unified and self._parts.places is None and flats:
            byte = flats[0].memory.flat[:1]
            accelerator.copy_out(byte.new_empty(1, device="cpu"), byte).wait()


def _write(folder: Folder, snapshot: Snapshot, manifest: Manifest, keep_last: int | None) -> None:
    snapshot.copy()
    if isinstance(folder, RankFolder):
        folder.commit(manifest)
    else:
        write_file(folder.path / MANIFEST_NAME, encode(manifest))
        folder.commit()
    if keep_last is not None and not (isinstance(folder, RankFolder) and not folder.is_first):
        retire_older(folder.target, keep_last)
