"""Whether a checkpoint fits an engine: every name, shape, group and range, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import CheckpointError
from offload.runtime.assembly import Parts
from offload.runtime.checkpointing.manifest import MOMENTS, Manifest, ParameterEntry, TensorEntry
from offload.runtime.checkpointing.model_names import persistent_buffers
from offload.runtime.checkpointing.random_state import CPU, DEVICE, take_random_state
from offload.runtime.checkpointing.tensor_file import DTYPE_CODES, DTYPES
from offload.runtime.flats import ParameterInfo
from offload.runtime.weight_names import Differences

SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad"})
"""Keys of a parameter group that choose torch's implementation; they are the running program's."""


class Matching:
    """Checks one manifest against one engine. `entries`: the checkpoint's entry of each parameter, by its index."""

    def __init__(self, manifest: Manifest, origin: str, parts: Parts) -> None:
        self._manifest, self._origin, self._parts = manifest, origin, parts
        self.entries: dict[int, ParameterEntry] = {}

    def check(self, model: nn.Module, kind: str | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """`kind`: the optimizer's class, None without one: then weights are loaded and moments are left out.

        Raises `CheckpointError`.
        """
        if self._manifest.world_size < 1:
            raise self._misfit("its world_size is 0")
        self._check_names()
        for info in self._parts.parameters:
            self._check_parameter(info, self.entries[info.index], trains=kind is not None)
        if kind is not None:
            self._check_optimizer(kind, groups)
        self._check_buffers(model)
        self._check_random()

    def _misfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._origin!r} does not fit this run: {what}. Build the model, the optimizer and its groups as "
            "in the run that saved it, or load another checkpoint."
        )

    def _check_names(self) -> None:
        saved: dict[frozenset[str], ParameterEntry] = {}
        for entry in self._manifest.parameters:
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

    def _check_parameter(self, info: ParameterInfo, entry: ParameterEntry, *, trains: bool) -> None:
        trained = entry.group is not None
        if trains and trained != info.trainable:
            then, now = ("trained", "not trained now") if trained else ("not trained", "trained now")
            raise self._misfit(f"parameter {info.fqn!r} was {then} when it was saved and is {now}")
        if trains and entry.group != info.group_index:
            raise self._misfit(
                f"parameter {info.fqn!r} was in the optimizer's group {entry.group} and is in group {info.group_index} now"
            )
        if not is_dense(entry.shape, entry.stride):
            raise self._misfit(f"the strides {entry.stride} of {info.fqn!r} do not fill the shape {entry.shape}")
        if (DTYPES[entry.dtype].is_floating_point, DTYPES[entry.dtype].is_complex) != (
            info.dtype.is_floating_point,
            info.dtype.is_complex,
        ):
            raise self._misfit(f"parameter {info.fqn!r} was of dtype {entry.dtype} and is of {info.dtype} now")
        self._check_pieces(info.fqn, entry, "F32" if trained else entry.dtype)

    def _check_pieces(self, fqn: str, entry: ParameterEntry, value_dtype: str) -> None:
        position = 0
        for piece in sorted(entry.pieces, key=lambda piece: (piece.start, piece.stop)):
            if piece.start != position or piece.stop < piece.start:
                raise self._misfit(f"elements of {fqn!r} from {position} on are missing or there twice")
            position = piece.stop
            self._check_range(f"value of {fqn!r}", piece.value, piece.stop - piece.start, value_dtype)
            for name in MOMENTS:
                moment: TensorEntry | None = getattr(piece, name)
                if (moment is not None) != (entry.group is not None):
                    raise self._misfit(f"{name} of {fqn!r} is {'missing' if moment is None else 'there'}, against its group")
                if moment is not None:
                    self._check_range(f"{name} of {fqn!r}", moment, piece.stop - piece.start, "F32")
        if position != entry.numel:
            raise self._misfit(f"{fqn!r} has {position} elements there, expected {entry.numel}")

    def _check_range(self, what: str, tensor: TensorEntry, numel: int, dtype: str) -> None:
        if tensor.dtype != dtype or tensor.nbytes != numel * DTYPES[dtype].itemsize:
            raise self._misfit(f"{what} is {tensor.nbytes} bytes of {tensor.dtype}, expected {numel} elements of {dtype}")

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
        saved = {entry.fqn: entry for entry in self._manifest.buffers}
        buffers = dict(persistent_buffers(model))
        if saved.keys() != buffers.keys() or len(saved) != len(self._manifest.buffers):
            listed = ", ".join(sorted(saved.keys() ^ buffers.keys())[:5])
            raise self._misfit(f"these buffers are in only one of the two, or twice: {listed}")
        for fqn, buffer in buffers.items():
            entry = saved[fqn]
            if entry.shape != list(buffer.shape):
                raise self._misfit(f"buffer {fqn!r} has the shape {entry.shape}, the model's has {list(buffer.shape)}")
            self._check_range(f"buffer {fqn!r}", entry.data, buffer.numel(), DTYPE_CODES[buffer.dtype])

    def _check_random(self) -> None:
        by_rank = {entry.rank: entry for entry in self._manifest.random}
        if sorted(by_rank) != list(range(self._manifest.world_size)) or len(by_rank) != len(self._manifest.random):
            raise self._misfit("it does not hold one random state of each rank")
        present = take_random_state(self._parts.accelerator.device)
        for entry in by_rank.values():
            self._check_range("a random state", entry.cpu, present[CPU].numel(), "U8")
            if entry.device is not None and DEVICE in present:
                self._check_range("a device's random state", entry.device, present[DEVICE].numel(), "U8")


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides fill memory without gap or overlap."""
    if len(shape) != len(stride):
        return False
    expected, numel = 1, math.prod(shape)
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected and numel:
            return False
        expected *= size
    return True


def same_order(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two dense strides put the elements into the same order."""
    pairs = zip(shape, first, second, strict=True)
    return math.prod(shape) <= 1 or all(one == other for size, one, other in pairs if size != 1)


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
