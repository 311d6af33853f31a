# SPDX-License-Identifier: Apache-2.0
"""Whether a manifest is consistent in itself: what it says of a parameter's elements can be there, and only once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offload.checkpoint.format.manifest import MOMENTS, Manifest, ParameterEntry, TensorEntry
from offload.model.file_dtypes import DTYPES
from offload.model.optimizer_kinds import moments_saved_by


class Inconsistent(Exception):
    """What is wrong with a manifest's entry, as a clause."""


def moments_of(manifest: Manifest) -> tuple[str, ...]:
    """What it holds of every trained parameter."""
    saved = manifest.optimizer
    return MOMENTS if saved is None else moments_saved_by(saved.kind, saved.param_groups)


def check_parameter(entry: ParameterEntry, moments: Sequence[str]) -> None:
    """`moments`: what is held of a trained one.

    Its strides are dense, and its pieces hold every element once, in the dtypes of a trained or an untrained one.

    Raises `Inconsistent`.
    """
    fqn = entry.fqns[0]
    if not is_dense(entry.shape, entry.stride):
        raise Inconsistent(f"the strides {entry.stride} of {fqn!r} do not fill the shape {entry.shape}")
    value_dtype = "F32" if entry.group is not None else entry.dtype
    position = 0
    for piece in sorted(entry.pieces, key=lambda piece: (piece.start, piece.stop)):
        if piece.start != position or piece.stop < piece.start:
            raise Inconsistent(f"elements of {fqn!r} from {position} on are missing or there twice")
        position = piece.stop
        check_range(f"value of {fqn!r}", piece.value, piece.stop - piece.start, value_dtype)
        for name in MOMENTS:
            moment: TensorEntry | None = getattr(piece, name)
            expected = entry.group is not None and name in moments
            if (moment is not None) != expected:
                raise Inconsistent(f"{name} of {fqn!r} is {'missing' if moment is None else 'there'}, against its group")
            if moment is not None:
                check_range(f"{name} of {fqn!r}", moment, piece.stop - piece.start, "F32")
    if position != entry.numel:
        raise Inconsistent(f"{fqn!r} has {position} elements there, expected {entry.numel}")


def check_range(what: str, tensor: TensorEntry, numel: int, dtype: str) -> None:
    """`tensor` is `numel` elements of `dtype`. Raises `Inconsistent`."""
    if tensor.dtype != dtype or tensor.nbytes != numel * DTYPES[dtype].itemsize:
        raise Inconsistent(f"{what} is {tensor.nbytes} bytes of {tensor.dtype}, expected {numel} elements of {dtype}")


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


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
