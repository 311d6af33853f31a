# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint fits an engine: every name, shape, group and range, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.checkpoint.format.consistency import Inconsistent, check_parameter, check_range, moments_of
from offload.checkpoint.format.manifest import BufferEntry, Manifest, ParameterEntry, TensorEntry
from offload.checkpoint.model_names import buffers_once
from offload.checkpoint.random_state import CPU, DEVICE, take_random_state
from offload.errors import CheckpointError
from offload.model.file_dtypes import DTYPE_CODES, DTYPES
from offload.model.flat import ParameterInfo
from offload.model.weight_names import Differences
from offload.step.components import Components

SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad"})
"""Keys of a parameter group that choose torch's implementation; they are the running program's."""


class StatesMissing(Exception):
    """The engine must first have states for the parameters of these indices, which are frozen."""

    def __init__(self, parameter_indices: frozenset[int]) -> None:
        super().__init__(parameter_indices)
        self.parameter_indices = parameter_indices


class Matching:
    """Checks one manifest against one engine.

    `entries`: the checkpoint's entry of each parameter, by its index; `buffers`: the range of each buffer it holds, by fqn.
    """

    def __init__(self, manifest: Manifest, origin: str, parts: Components) -> None:
        self._manifest, self._origin, self._parts = manifest, origin, parts
        self._parameters, self._buffers = list(manifest.parameters), list(manifest.buffers)
        self._moments = moments_of(manifest)
        self.entries: dict[int, ParameterEntry] = {}
        self.buffers: dict[str, TensorEntry] = {}

    def check(self, model: nn.Module, kind: str | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """`kind`: the optimizer's class, None without one: then weights are loaded and moments are left out.

        Raises `CheckpointError`.
        """
        if self._manifest.world_size < 1:
            raise self._misfit("its world_size is 0")
        try:
            if self._manifest.imported is not None:
                self._adopt(model)
            self._check_names()
            self._check_states(groups)
            for info in self._parts.parameters:
                self._check_parameter(info, self.entries[info.index], trains=kind is not None)
            self._check_buffers(model)
            if self._manifest.imported is None:
                if kind is not None:
                    self._check_optimizer(kind, groups)
                self._check_random()
        except Inconsistent as clause:
            raise self._misfit(str(clause)) from clause

    def _misfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._origin!r} does not fit this run: {what}. Build the model, the optimizer and its groups as "
            "in the run that saved it, or load another checkpoint."
        )

    def _adopt(self, model: nn.Module) -> None:
        """An imported checkpoint does not know which tensors are buffers, nor which parameters are tied: the model does."""
        buffers = dict(buffers_once(model))
        for entry in [entry for entry in self._parameters if entry.group is None and entry.fqns[0] in buffers]:
            self._parameters.remove(entry)
            check_parameter(entry, self._moments)
            if len(entry.pieces) != 1:
                raise Inconsistent(f"buffer {entry.fqns[0]!r} is there in {len(entry.pieces)} pieces")
            self._buffers.append(BufferEntry(entry.fqns[0], entry.shape, entry.pieces[0].value))
        for info in self._parts.parameters:
            if len(info.fqns) > 1:
                self._join([entry for entry in self._parameters if set(entry.fqns) < set(info.fqns)], list(info.fqns))

    def _join(self, entries: list[ParameterEntry], fqns: list[str]) -> None:
        """One entry for a parameter that the model knows under all of `fqns`; the same values may be there several times."""
        kept = next((entry for entry in entries if entry.group is not None), entries[0] if entries else None)
        if kept is None:
            return
        for entry in entries:
            values = [[piece.value.crc32 for piece in one.pieces] for one in (kept, entry)]
            if entry is not kept and (entry.group is not None or values[0] != values[1]):
                raise Inconsistent(f"{kept.fqns[0]!r} and {entry.fqns[0]!r} are one parameter in the model and two here")
        self._parameters = [one for one in self._parameters if one not in entries]
        self._parameters.append(replace(kept, fqns=fqns))

    def _check_names(self) -> None:
        saved: dict[frozenset[str], ParameterEntry] = {}
        for entry in self._parameters:
            if saved.setdefault(frozenset(entry.fqns), entry) is not entry:
                raise self._misfit(f"it holds {entry.fqns[0]!r} twice")
        differences = Differences()
        known = {frozenset(info.fqns) for info in self._parts.parameters}
        for info in self._parts.parameters:
            found = saved.get(frozenset(info.fqns))
            if found is None:
                differences.missing.append(f"{' = '.join(info.fqns)} {list(info.shape)}")
            elif found.shape != list(info.shape):
                differences.misshapen.append(f"{info.fqn} (model: {list(info.shape)}, checkpoint: {found.shape})")
            else:
                self.entries[info.index] = found
        differences.unexpected = [
            f"{' = '.join(entry.fqns)} {entry.shape}" for names, entry in saved.items() if names not in known
        ]
        if differences:
            raise self._misfit(f"of its parameters there are {differences}")

    def _check_states(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """What was trained and is frozen now keeps its states, so it needs a place for them."""
        group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        frozen = [info for info in self._parts.parameters if not info.trainable and id(info.parameter) in group_of]
        missing = [info for info in frozen if self.entries[info.index].group == group_of[id(info.parameter)]]
        if missing and self._manifest.imported is None:
            raise StatesMissing(frozenset(info.index for info in missing))

    def _check_parameter(self, info: ParameterInfo, entry: ParameterEntry, *, trains: bool) -> None:
        trained, imported = entry.group is not None, self._manifest.imported is not None
        if trains and trained and not info.trainable and not imported:
            raise self._misfit(f"parameter {info.fqn!r} was trained when it was saved and is not trained now")
        if trains and trained and entry.group != info.group_index and not imported:
            raise self._misfit(
                f"parameter {info.fqn!r} was in the optimizer's group {entry.group} and is in group {info.group_index} now"
            )
        if (DTYPES[entry.dtype].is_floating_point, DTYPES[entry.dtype].is_complex) != (
            info.dtype.is_floating_point,
            info.dtype.is_complex,
        ):
            raise self._misfit(f"parameter {info.fqn!r} was of dtype {entry.dtype} and is of {info.dtype} now")
        if self._manifest.leaves_out(entry):
            if info.trainable:
                raise self._misfit(f"parameter {info.fqn!r} was frozen, its value was left out, and it is trained now")
            return
        check_parameter(entry, self._moments)
        records = self._parts.records
        missing = set(records.moments) - set(self._moments) if records is not None and trained else None
        if trains and missing:
            raise self._misfit(
                f"it has no {' and no '.join(sorted(missing))} of {info.fqn!r}, which this run's optimizer keeps"
            )

    def _check_optimizer(self, kind: str, groups: Sequence[Mapping[str, Any]]) -> None:
        saved = self._manifest.optimizer
        if saved is None or saved.kind != kind:
            raise self._misfit(f"it was saved with the optimizer {saved.kind if saved else None}, not {kind}")
        if len(saved.param_groups) != len(groups):
            raise self._misfit(f"it has {len(saved.param_groups)} parameter groups, not {len(groups)}")
        for index, (before, now) in enumerate(zip(saved.param_groups, groups, strict=True)):
            for key, value in before.items():
                if key == "params" or (key in now and key not in SWITCHES and not same_kind(value, now[key])):
                    raise self._misfit(f"{key!r} of its parameter group {index} is {value!r}")

    def _check_buffers(self, model: nn.Module) -> None:
        saved = {entry.fqn: entry for entry in self._buffers}
        buffers = dict(buffers_once(model))
        unknown = saved.keys() ^ buffers.keys() if self._manifest.imported is None else saved.keys() - buffers.keys()
        if unknown or len(saved) != len(self._buffers):
            listed = ", ".join(sorted(unknown)[:5])
            raise self._misfit(f"these buffers are in only one of the two, or twice: {listed}")
        for fqn, entry in saved.items():
            buffer = buffers[fqn]
            if entry.shape != list(buffer.shape):
                raise self._misfit(f"buffer {fqn!r} has the shape {entry.shape}, the model's has {list(buffer.shape)}")
            check_range(f"buffer {fqn!r}", entry.data, buffer.numel(), DTYPE_CODES[buffer.dtype])
            self.buffers[fqn] = entry.data

    def _check_random(self) -> None:
        by_rank = {entry.rank: entry for entry in self._manifest.random}
        if sorted(by_rank) != list(range(self._manifest.world_size)) or len(by_rank) != len(self._manifest.random):
            raise self._misfit("it does not hold one random state of each rank")
        present = take_random_state(self._parts.accelerator.device)
        for entry in by_rank.values():
            check_range("a random state", entry.cpu, present[CPU].numel(), "U8")
            if entry.device is not None and DEVICE in present:
                check_range("a device's random state", entry.device, present[DEVICE].numel(), "U8")


def same_kind(saved: Any, present: Any) -> bool:
    """Whether a number of a parameter group may take the place of what is there now."""
    if isinstance(present, (bool, str)) or present is None:
        return saved == present or (present is None and not isinstance(saved, (list, dict)))
    if isinstance(present, torch.Tensor):
        return present.numel() == 1 and is_number(saved)
    if isinstance(present, (list, tuple)):
        return (
            isinstance(saved, list)
            and len(saved) == len(present)
            and all(same_kind(one, other) for one, other in zip(saved, present, strict=True))
        )
    return is_number(saved) and isinstance(present, (int, float))


def is_number(value: Any) -> bool:
    """A finite number that is no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300
