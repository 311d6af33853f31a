"""Saving and loading the state of one engine, and exporting its weights. The format: docs/checkpoint-format.md.

A save is whole or not there: everything is written into a folder of another name, synced, and only then renamed. A load
checks everything first; a checkpoint that is refused has changed nothing.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import CheckpointError, StorageError, UsageError
from offload.runtime.assembly import Parts
from offload.runtime.checkpointing.client_state import checked_client_state
from offload.runtime.checkpointing.export import Exporter
from offload.runtime.checkpointing.manifest import LossScaleEntry, Manifest, ModelEntry, OptimizerEntry, encode
from offload.runtime.checkpointing.matching import Matching
from offload.runtime.checkpointing.model_names import kept_fqn, model_configs, persistent_buffers
from offload.runtime.checkpointing.opened import OpenedCheckpoint
from offload.runtime.checkpointing.param_groups import group_numbers, restore_group_numbers
from offload.runtime.checkpointing.random_state import CPU, DEVICE, put_random_state
from offload.runtime.checkpointing.restoring import StateWriter, StoredParameter
from offload.runtime.checkpointing.staged_folder import MANIFEST_NAME, StagedFolder, retire, take_back
from offload.runtime.checkpointing.state_reading import StateReader
from offload.runtime.checkpointing.tensor_file import write_file
from offload.runtime.checkpointing.writing import CheckpointWriter
from offload.runtime.hooks import in_backward
from offload.runtime.optimizer import OffloadOptimizer
from offload.runtime.training import Training

_NUMBERED = re.compile(r"step-(\d{1,18})")


class Checkpointing:
    """See the module. Owned by the thread that drives the model."""

    def __init__(self, parts: Parts, training: Training, model: nn.Module, optimizer: OffloadOptimizer | None) -> None:
        self._parts, self._training, self._model, self._optimizer = parts, training, model, optimizer

    # ---- save ----------------------------------------------------------------------------------------------------

    def save(self, path: Path, client_state: Mapping[str, Any] | None, keep_last: int | None) -> None:
        """See `Engine.save_checkpoint`."""
        _check_keep_last(path, keep_last)
        client = checked_client_state(client_state)
        self._settle("save_checkpoint")
        manifest = self._manifest(client)
        reader = StateReader(self._parts, self._training.failures)
        with StagedFolder(path, replace=True) as folder, closing(reader):
            CheckpointWriter(folder.path, self._parts, reader, manifest).write(self._model)
            write_file(folder.path / MANIFEST_NAME, encode(manifest))
            folder.commit()
        if keep_last is not None:
            _retire_older(folder.target, keep_last)

    def _settle(self, what: str) -> None:
        """Between steps, with nothing enqueued; else raise what to do."""
        self._training.check()
        if self._training.is_within_step:
            raise UsageError(
                f"{what} was called while gradients wait for a step, which checkpoints do not hold: call it after "
                "optimizer.step() (and before zero_grad(set_to_none=False)), or drop them by optimizer.zero_grad()."
            )
        self._require_outside(what)
        with self._training.failures():
            self._training.settle()

    def _require_outside(self, what: str) -> None:
        if self._parts.residency.in_forward or in_backward():
            raise UsageError(f"{what} was called inside a forward or backward of the model: call it between steps.")
        if self._parts.residency.holds_any:
            raise UsageError(f"{what} was called inside `with engine.gathered(...)`: call it after the block.")

    def _manifest(self, client_state: dict[str, Any]) -> Manifest:
        scale, optimizer = self._training.loss_scale, self._optimizer
        entry = None
        if optimizer is not None:
            entry = OptimizerEntry(optimizer.source_class.__name__, group_numbers(optimizer.param_groups))
        tied = [info for info in self._parts.parameters if len(info.fqns) > 1]
        return Manifest(
            world_size=self._parts.layout.world_size,
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
        self._training.check()
        self._require_outside("load_checkpoint")
        with OpenedCheckpoint(path) as opened:
            entries = self._check(opened)
            self._restore(opened, entries)
            return opened.manifest.client_state

    def resume_or_start(self, path: Path) -> dict[str, Any] | None:
        """See `Engine.resume_or_start`."""
        self._training.check()
        self._require_outside("resume_or_start")
        failures: list[CheckpointError] = []
        for candidate in numbered(path):
            try:
                with OpenedCheckpoint(candidate) as opened:
                    entries = self._check(opened)
                    for failure in failures:
                        warnings.warn(f"an older checkpoint is resumed from: {failure}", RuntimeWarning, stacklevel=3)
                    self._restore(opened, entries)
                    return opened.manifest.client_state
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

    def _check(self, opened: OpenedCheckpoint) -> dict[int, StoredParameter]:
        matching = Matching(opened.manifest, str(opened.path), self._parts)
        optimizer = self._optimizer
        kind = optimizer.source_class.__name__ if optimizer is not None else None
        matching.check(self._model, kind, optimizer.param_groups if optimizer is not None else ())
        opened.check_files()
        opened.check_contents()
        by_index = {info.index: info for info in self._parts.parameters}
        return {index: StoredParameter(opened, entry, by_index[index]) for index, entry in matching.entries.items()}

    def _restore(self, opened: OpenedCheckpoint, stored: dict[int, StoredParameter]) -> None:
        """Overwrite the engine's state. From here on a failure leaves it undefined."""
        training, residency, manifest = self._training, self._parts.residency, opened.manifest
        with training.failures():
            residency.abandon_uses()
            training.settle()
            training.restart(manifest.step_count)
            residency.evict_all()
            for info in self._parts.parameters:
                info.step = stored[info.index].entry.step
            with closing(StateWriter(self._parts, stored)) as writer:
                for unit in self._parts.units:
                    writer.unit(unit)
            self._restore_buffers(opened)
            self._restore_loss_scale(manifest.loss_scale)
            if self._optimizer is not None and manifest.optimizer is not None:
                restore_group_numbers(self._optimizer.param_groups, manifest.optimizer.param_groups)
            self._restore_random(opened)

    def _restore_buffers(self, opened: OpenedCheckpoint) -> None:
        entries = {entry.fqn: entry for entry in opened.manifest.buffers}
        for fqn, buffer in persistent_buffers(self._model):
            value = torch.empty(buffer.shape, dtype=buffer.dtype)
            opened.read_elements(entries[fqn].data, 0, value)
            with torch.no_grad():
                buffer.copy_(value)

    def _restore_loss_scale(self, saved: LossScaleEntry) -> None:
        scale = self._training.loss_scale
        scale.good_step_count, scale.skipped_step_count = saved.good_step_count, saved.skipped_step_count
        if scale.dynamic and saved.dynamic:  # a fixed scale is the configuration's
            scale.value = saved.value

    def _restore_random(self, opened: OpenedCheckpoint) -> None:
        entry = next(one for one in opened.manifest.random if one.rank == self._parts.layout.rank)
        states = {}
        for name, tensor in ((CPU, entry.cpu), (DEVICE, entry.device)):
            if tensor is not None:
                states[name] = torch.empty(tensor.nbytes, dtype=torch.uint8)
                opened.read_elements(tensor, 0, states[name])
        put_random_state(self._parts.accelerator.device, states)

    # ---- export --------------------------------------------------------------------------------------------------

    def export(self, path: Path, dtype: torch.dtype | None, max_shard_nbytes: int) -> None:
        """See `Engine.export`."""
        self._require_outside("export")
        with self._training.failures():
            self._training.settle()
        model, parameters = self._model, self._parts.parameters
        names = {info.index: kept_fqn(model, info.fqns) for info in parameters}
        exporter = Exporter(path, dtype, max_shard_nbytes)
        for info in parameters:
            exporter.add(names[info.index], info.shape, info.stride, info.dtype)
        for fqn, buffer in persistent_buffers(model):
            exporter.add_buffer(fqn, buffer.shape, buffer.dtype)
        reader = StateReader(self._parts, self._training.failures)
        with exporter, closing(reader):
            for unit in self._parts.units:
                for state in reader.pieces(unit):
                    exporter.append(names[state.info.index], state.value)
            for fqn, buffer in persistent_buffers(model):
                exporter.append(fqn, buffer.detach().cpu().contiguous().reshape(-1))
            exporter.commit(type(model).__name__, model_configs(model))


def numbered(path: Path) -> list[Path]:
    """The checkpoints `step-<n>` in a folder, the newest first. Raises `StorageError` where it cannot be listed."""
    try:
        take_back(path)
        found = [(int(match[1]), path / match[0]) for name in os.listdir(path) if (match := _NUMBERED.fullmatch(name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            error.errno, f"{str(path)!r} cannot be listed ({error.strerror}): name the folder that holds the checkpoints."
        ) from error
    return [one for _, one in sorted(found, reverse=True)]


def _check_keep_last(path: Path, keep_last: int | None) -> None:
    if keep_last is None:
        return
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise UsageError(f"keep_last={keep_last!r} is not a count of checkpoints: expected 1, 2, ... or None.")
    if not _NUMBERED.fullmatch(path.name):
        raise UsageError(
            f"keep_last={keep_last} needs checkpoints that are numbered, and {path.name!r} is not: save to 'folder/step-<n>'."
        )


def _retire_older(saved: Path, keep_last: int) -> None:
    for path in numbered(saved.parent)[keep_last:]:
        if path.name != saved.name and not path.is_symlink() and (path / MANIFEST_NAME).is_file():
            try:
                retire(path)
            except OSError as error:
                raise StorageError(
                    error.errno,
                    f"{str(path)!r} cannot be removed ({error.strerror}), {str(saved)!r} is saved: remove it yourself.",
                ) from error
