# SPDX-License-Identifier: Apache-2.0
"""What an importer finds in another project's checkpoint: tensors that are read in parts, and what they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.errors import CheckpointError, OffloadError


@dataclass(slots=True)
class SourceTensor:
    """`parts()`: its elements, row by row, as 1-D CPU tensors of `dtype`, each valid until the next is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterator[torch.Tensor]]

    @staticmethod
    def of(tensor: torch.Tensor) -> SourceTensor:
        """One in memory (or mapped), as one part."""
        return SourceTensor(tuple(tensor.shape), tensor.dtype, lambda: in_parts(tensor))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class SourceParameter:
    """One parameter under all its known names. Moments are None where the source has none; `step` is 0 then."""

    fqns: list[str]
    value: SourceTensor
    exp_avg: SourceTensor | None = None
    exp_avg_sq: SourceTensor | None = None
    step: int = 0

    @property
    def trained(self) -> bool:
        return self.exp_avg is not None


@dataclass(slots=True)
class Source:
    """A whole checkpoint. A tensor that may be a parameter or a buffer is among the parameters, without moments.

    `missing`: what the source does not say, as clauses for the user.
    """

    kind: str
    parameters: list[SourceParameter]
    buffers: list[tuple[str, SourceTensor]] = field(default_factory=list)
    step_count: int = 0
    missing: list[str] = field(default_factory=list)
    progress: Mapping[str, object] = field(default_factory=dict)
    """What `offload.deepspeed` goes on from: counts of steps, states of scheduler and scaler; empty where nothing says it."""


_MALFORMED = (
    AttributeError, TypeError, KeyError, IndexError, ValueError, OverflowError, RecursionError, RuntimeError, EOFError,
)  # fmt: skip


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong inside with what `path` holds is a `CheckpointError`: somebody else wrote it, and it may be anything."""
    try:
        yield
    except OffloadError:
        raise
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from error
    except _MALFORMED as error:
        raise refused(path, f"its parts do not fit together ({error!r})") from error


def as_shape(value: object, what: str, path: Path) -> tuple[int, ...]:
    """A shape from any sequence of whole numbers. Raises `CheckpointError`."""
    sizes = tuple(value) if isinstance(value, (list, tuple)) else None
    if sizes is None or not all(isinstance(size, int) and 0 <= size < 2**63 for size in sizes):
        raise refused(path, f"the shape of {what} is {value!r}, which is no list of sizes")
    return sizes


def check_source(source: Source, path: Path) -> None:
    """Names that a checkpoint can have, each once; steps and sizes that are none below 0. Raises `CheckpointError`."""
    names = [fqn for parameter in source.parameters for fqn in parameter.fqns] + [fqn for fqn, _ in source.buffers]
    for name in names:
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise refused(path, f"it names a tensor {name!r}, which no parameter or buffer can be called")
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise refused(path, f"it holds {twice!r} twice")
    if source.step_count < 0:
        raise refused(path, f"it is at step {source.step_count}")


def check_moments(parameter: SourceParameter, path: Path) -> None:
    """Both or none, of the parameter's shape, all of them floating-point. Raises `CheckpointError`."""
    moments = (parameter.exp_avg, parameter.exp_avg_sq)
    if (parameter.exp_avg is None) != (parameter.exp_avg_sq is None):
        raise refused(path, f"{parameter.fqns[0]!r} has one of exp_avg and exp_avg_sq without the other")
    for moment in moments:
        if moment is not None and moment.shape != parameter.value.shape:
            shapes = f"{list(moment.shape)} and {list(parameter.value.shape)}"
            raise refused(path, f"a moment of {parameter.fqns[0]!r} and its value have the shapes {shapes}")
    for tensor in (parameter.value, *moments):
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise refused(path, f"{parameter.fqns[0]!r} is trained and of dtype {tensor.dtype}: expected floating point")


def refused(path: Path, what: str) -> CheckpointError:
    """The error for a source that cannot be imported."""
    return CheckpointError(f"{str(path)!r} cannot be imported: {what}.")


def as_step(value: object, what: str, path: Path) -> int:
    """A step count from a number or a tensor of one."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 2**53 or number != int(number):
        raise refused(path, f"{what} is {value!r}, which is no number of steps")
    return int(number)


def in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in memory (or mapped) as one part, row by row."""
    yield tensor.detach().contiguous().reshape(-1)
