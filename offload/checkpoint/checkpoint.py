# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the state of one engine, and exporting its weights. The format: docs/checkpoint-format.md.

A save is whole or not there: everything is written into a folder of another name, synced, and only then renamed. A load
checks everything first; a checkpoint that is refused has changed nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.checkpoint.agreement import Agreement
from offload.checkpoint.client_state import checked_client_state
from offload.checkpoint.format.manifest import LossScaleEntry, Manifest, ModelEntry, OptimizerEntry
from offload.checkpoint.format.numbering import check_keep_last, checked_target, highest_number, numbered
from offload.checkpoint.format.opened import OpenedCheckpoint
from offload.checkpoint.matching import Matching, StatesMissing
from offload.checkpoint.model_names import buffers_once, kept_fqn, model_configs
from offload.checkpoint.param_groups import group_numbers, restore_group_numbers
from offload.checkpoint.random_state import CPU, DEVICE, put_random_state
from offload.checkpoint.restoring import StateWriter, StoredParameter
from offload.checkpoint.saving.saves import Save, Saver
from offload.errors import CheckpointError, EngineFailedError, RankError, UsageError, words_of
from offload.model.optimizer import OffloadOptimizer
from offload.model.weight_names import set_buffer
from offload.ranks.next_transfers import MeetingPoint
from offload.step.calls import in_backward
from offload.step.components import Components
from offload.step.parameter_access.gathering import Gathering
from offload.step.training import Training

T = TypeVar("T")


class Checkpointing:
    """See the module. Owned by the thread that drives the model."""

    def __init__(
        self,
        parts: Components,
        training: Training,
        gathering: Gathering,
        model: nn.Module,
        optimizer: OffloadOptimizer | None,
    ) -> None:
        self._parts, self._training, self._model, self._optimizer = parts, training, model, optimizer
        self._agreement = Agreement(parts.ranks, gathering.meet)
        self.saver = Saver(parts, training, model, self._finish_updates)

    # ---- save ----------------------------------------------------------------------------------------------------

    def save(
        self,
        dir: str | os.PathLike[str],
        client_state: Mapping[str, Any] | None,
        keep_last: int | None,
        *,
        wait: bool = True,
        leave_gradients: bool = False,
        without_frozen: bool = False,
    ) -> Save:
        """See `Engine.save_checkpoint`."""
        self._training.check()
        path, client = self._agreed(lambda: self._checked(dir, client_state, keep_last, leave_gradients), without_frozen)
        with self._training.failures():
            if leave_gradients or not self.saver.follows_updates:
                self._training.settle()
            self._training.bring_records_home()
        manifest = self._manifest(client)
        manifest.without_frozen = without_frozen
        return self.saver.save(path, manifest, keep_last, wait=wait)

    def _checked(
        self,
        dir: str | os.PathLike[str],
        client_state: Mapping[str, Any] | None,
        keep_last: int | None,
        leave_gradients: bool,
    ) -> tuple[Path, dict[str, Any]]:
        path = checked_target(dir)
        check_keep_last(path, keep_last)
        client = checked_client_state(client_state)
        self.saver.finish()
        self._training.check()
        if not leave_gradients and self._training.is_within_step:
            raise UsageError(
                "save_checkpoint was called while gradients wait for a step, which checkpoints do not hold: call it after "
                "optimizer.step() (and before zero_grad(set_to_none=False)), or drop them by optimizer.zero_grad()."
            )
        self._require_outside("save_checkpoint")
        return path, client

    def _agreed(self, check: Callable[[], tuple[Path, dict[str, Any]]], without_frozen: bool) -> tuple[Path, dict[str, Any]]:
        """What `check` gives. On several ranks only if all of them may save, the same in the same folder; else each raises why
        not."""
        (path, client), asked = self._agreement.on_all(
            MeetingPoint.SAVING,
            check,
            lambda checked: {"folder": os.path.abspath(checked[0]), "without_frozen": without_frozen},
            lambda index, _, word: RankError(
                f"rank {index} refused to save, so no rank does; training may go on. It said: {word}"
            ),
        )
        for index, other in enumerate(asked):
            for what, first in asked[0].items():
                if other[what] != first:
                    raise RankError(
                        f"save_checkpoint was given {what} {first!r} on rank 0 and {other[what]!r} on rank {index}: give all "
                        "ranks the same (a time stamp is taken on one of them, and told by "
                        "torch.distributed.broadcast_object_list). Nothing was written; training may go on."
                    )
        return path, client

    def _finish_updates(self) -> None:
        """Of the last step. Raises `EngineFailedError` where one failed already."""
        training = self._training
        self._require_outside("waiting for a save")
        if training.closed:  # by `close`, which raises what fails here
            if training.failure is not None:
                raise EngineFailedError(f"the engine failed: {words_of(training.failure)}") from training.failure
            with training.turn_of_its_own():
                training.settle()
            return
        with training.failures():
            training.settle()

    def prepare(self, what: str) -> None:
        """No save runs any more, and the user may call `what` now; else raises why not."""
        self._training.check()
        self.saver.finish()
        self._require_outside(what)

    def _require_outside(self, what: str) -> None:
        if self._training.uses.in_forward or in_backward():
            raise UsageError(f"{what} was called inside a forward or backward of the model: call it between steps.")
        if self._training.lender.lends_any:
            raise UsageError(f"{what} was called inside `with engine.gathered(...)`: call it after the block.")

    def _manifest(self, client_state: dict[str, Any]) -> Manifest:
        scale, optimizer = self._training.loss_scale, self._optimizer
        entry = None
        if optimizer is not None:
            entry = OptimizerEntry(optimizer.kind_name, group_numbers(optimizer.param_groups))
        tied = [info for info in self._parts.parameters if len(info.fqns) > 1]
        return Manifest(
            world_size=self._parts.ranks.world_size,
            step_count=self._training.step_count,
            loss_scale=LossScaleEntry(scale.value, scale.dynamic, scale.good_step_count, scale.skipped_step_count),
            optimizer=entry,
            model=ModelEntry(
                type(self._model).__name__,
                model_configs(self._model),
                [kept_fqn(self._model, info.fqns) for info in tied],
            ),
            parameters=[],
            buffers=[],
            random=[],
            files=[],
            client_state=client_state,
        )

    # ---- load ----------------------------------------------------------------------------------------------------

    def load(self, path: Path) -> dict[str, Any]:
        """See `Engine.load_checkpoint`."""
        self.prepare("load_checkpoint")
        return self._load(path)

    def _load(self, path: Path) -> dict[str, Any]:
        """Check and restore; on several ranks none of them changes anything unless all of them can."""
        with ExitStack() as stack:
            opened, matching = self._open_together(stack, path)
            if isinstance(matching, StatesMissing):  # on all ranks: it is the model's groups and the manifest that say so
                raise matching
            self._restore(opened, matching)
            return opened.manifest.client_state

    def _open_checked(self, stack: ExitStack, path: Path) -> tuple[OpenedCheckpoint, Matching | StatesMissing]:
        opened = stack.enter_context(OpenedCheckpoint(path))
        try:
            return opened, self._check(opened)
        except StatesMissing as missing:
            return opened, missing

    def _open_together(self, stack: ExitStack, path: Path) -> tuple[OpenedCheckpoint, Matching | StatesMissing]:
        """On several ranks: what fails on one fails on all, and all open the same checkpoint."""
        found, places = self._agreement.on_all(
            MeetingPoint.LOADING,
            lambda: self._open_checked(stack, path),
            lambda found: [found[0].digest, str(path)],
            lambda index, kind, word: (CheckpointError if kind == CheckpointError.__name__ else RankError)(
                f"on rank {index}: {word}"
            ),
        )
        for index, (digest, place) in enumerate(places):
            if digest != places[0][0]:
                raise RankError(
                    f"load_checkpoint was given {places[0][1]!r} on rank 0, and on rank {index} another, {place!r}: "
                    "give all ranks the same. Nothing was loaded; training may go on."
                )
        return found

    def save_next(self, folder: Path, client_state: Mapping[str, Any] | None, keep_last: int | None) -> None:
        """Save as the newest checkpoint in `folder`: "step-<steps done>", or one more than the highest number there."""
        done = self._training.step_count + self._training.loss_scale.skipped_step_count
        highest = self._found(MeetingPoint.SAVING, lambda: highest_number(folder))
        self.save(folder / f"step-{done if highest <= done else highest + 1}", client_state, keep_last)

    def resume_or_start(self, path: Path) -> dict[str, Any] | None:
        """See `Engine.resume_or_start`."""
        self.prepare("resume_or_start")
        failures: list[CheckpointError] = []
        for candidate in self._candidates(path):
            try:
                state = self._load(candidate)
                for failure in failures:
                    warnings.warn(f"an older checkpoint was resumed from: {failure}", RuntimeWarning, stacklevel=3)
                return state
            except CheckpointError as error:
                if self._training.failure is not None:
                    raise
                failures.append(error)
        if failures:
            raise CheckpointError(
                f"none of the {len(failures)} checkpoints in {str(path)!r} can be resumed from; the newest: {failures[0]} "
                "To start anew, name an empty folder."
            ) from failures[0]
        return None

    def _candidates(self, path: Path) -> list[Path]:
        """The numbered checkpoints in a folder, the newest first."""
        return [path / name for name in self._found(MeetingPoint.LOADING, lambda: [one.name for one in numbered(path)])]

    def _found(self, point: MeetingPoint, look: Callable[[], T]) -> T:
        """On several ranks what the first one sees."""
        return self._agreement.by_first(point, look, lambda word: RankError(f"rank 0 could not look for checkpoints: {word}"))

    def agree_to_end(self, requested: bool) -> bool:
        """Whether any rank is to end."""
        return any(self._agreement.exchange(MeetingPoint.SAVING, requested))

    def _check(self, opened: OpenedCheckpoint) -> Matching:
        matching = Matching(opened.manifest, str(opened.path), self._parts)
        optimizer = self._optimizer
        kind = optimizer.kind_name if optimizer is not None else None
        matching.check(self._model, kind, optimizer.param_groups if optimizer is not None else ())
        opened.check_files()
        ranks = self._parts.ranks
        opened.check_contents(ranks.index, ranks.world_size)
        if ranks.world_size == 1:
            self.saver.soundness.note_sound(opened.path)
        return matching

    def _restore(self, opened: OpenedCheckpoint, matching: Matching) -> None:
        """Overwrite the engine's state. From here on a failure leaves it undefined."""
        training, residency, manifest = self._training, self._parts.residency, opened.manifest
        infos = {info.index: info for info in self._parts.parameters}
        stored = {
            index: StoredParameter(opened, entry, infos[index])
            for index, entry in matching.entries.items()
            if not manifest.leaves_out(entry)
        }
        with training.failures(holds_interrupts=False):
            training.uses.abandon()
            training.settle()
            training.restart(manifest.step_count)
            residency.evict_all()
            for info in self._parts.parameters:
                info.step = matching.entries[info.index].step
            with closing(StateWriter(self._parts, stored)) as writer:
                for unit in self._parts.units:
                    writer.unit(unit)
            residency.bring_persistent()
            self._restore_buffers(opened, matching)
            if manifest.imported is not None:
                return  # it has no loss scale, no numbers of groups and no random states: the engine's own stay
            self._restore_loss_scale(manifest.loss_scale)
            if self._optimizer is not None and manifest.optimizer is not None:
                restore_group_numbers(self._optimizer.param_groups, manifest.optimizer.param_groups)
            self._restore_random(opened)

    def _restore_buffers(self, opened: OpenedCheckpoint, matching: Matching) -> None:
        for fqn, buffer in buffers_once(self._model):
            if fqn in matching.buffers:
                value = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                opened.read_elements(matching.buffers[fqn], 0, value)
                set_buffer(buffer, value)

    def _restore_loss_scale(self, saved: LossScaleEntry) -> None:
        scale = self._training.loss_scale
        scale.good_step_count, scale.skipped_step_count = saved.good_step_count, saved.skipped_step_count
        if scale.dynamic and saved.dynamic:  # a fixed scale is the configuration's
            scale.value = saved.value

    def _restore_random(self, opened: OpenedCheckpoint) -> None:
        rank = self._parts.ranks.index
        entry = next((one for one in opened.manifest.random if one.rank == rank), None)
        if entry is None:
            return  # more ranks than saved: two of them must not draw the same numbers, so this one keeps its own
        states = {}
        for name, tensor in ((CPU, entry.cpu), (DEVICE, entry.device)):
            if tensor is not None:
                states[name] = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
                opened.read_elements(tensor, 0, states[name])
        put_random_state(self._parts.accelerator.device, states)
