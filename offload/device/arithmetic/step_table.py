# SPDX-License-Identifier: Apache-2.0
"""One call for the step of a whole chunk: what it is told of each piece is put together once, in a table.

On the host it is a call of the native library, on a device a launch of the compiled kernel. Where a piece's arrays lie is known
but for where the record, the values and the gradients are this time; of the rest only the numbers of the optimizer change. The
bits are those of `offload.device.arithmetic.optimizer_step` over the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload import _native
from offload.device.arithmetic import compiled_kernels
from offload.device.arithmetic.checksums import SummedMemory
from offload.device.arithmetic.encoding import SCALE_GROUP
from offload.device.arithmetic.flat import DTYPE_CODES
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.rules import Hyper
from offload.device.arithmetic.segment import MASTER, REMAINDER, StateFormat

_ROW = _native.UPDATE_ROW
_ALL = slice(None)
_HOST = torch.device("cpu")
Numbers = tuple[Hyper, int] | list[tuple[Hyper, int]]
"""The optimizer's, and the step, from 1: of all pieces, or of each."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece: elements [low, high) of its chunk, the first of which is number `first_index` of the parameter that
    `rounding_seed` names."""

    low: int
    high: int
    first_index: int
    rounding_seed: int


class Place(NamedTuple):
    """Where a step finds a chunk's states, and where it leaves them, all on one device.

    record  uint8, at least the record
    values  [numel] in their dtype
    source  the record that is read instead, and stays as it is; then all pieces are of the step
    """

    record: Tensor
    values: Tensor
    source: Tensor | None = None

    @property
    def addresses(self) -> tuple[int, int, int]:
        """0: nothing lies elsewhere."""
        return self.record.data_ptr(), self.values.data_ptr(), self.source.data_ptr() if self.source is not None else 0


class StepTable:
    """Of one chunk, whose record and values lie on one device. One thread at a time.

    numel         of the chunk; `low`: where in it each piece begins, uint64 [pieces]
    reads_values  whether a step computes with the values that it finds, rather than only leave new ones
    """

    def __init__(
        self,
        record_format: RecordFormat,
        numel: int,
        values_dtype: torch.dtype,
        spans: Sequence[Span],
        device: torch.device = _HOST,
    ) -> None:
        """`device`: one with compiled kernels, or the host."""
        self.device, self._device_index = device, _index(device)
        self.numel, self._values_dtype = numel, values_dtype
        self.record_nbytes = record_format.nbytes(numel)
        state_format = record_format.state_format
        if state_format.is_split and values_dtype != torch.bfloat16:
            raise AssertionError(f"{state_format.value} states need bfloat16 values")
        if state_format is StateFormat.EIGHT_BIT and any(span.first_index % SCALE_GROUP for span in spans):
            raise AssertionError(f"first_index must be a multiple of {SCALE_GROUP}")
        self.moments = frozenset(record_format.moments)
        """What the record keeps."""
        self._table = _Table(np.zeros(len(spans), _ROW), device)
        rows = self._table.rows
        self._where: object = None
        """What the rows were told last of where all arrays lie."""
        low = np.array([span.low for span in spans], np.uint64)
        rows["numel"] = [span.high - span.low for span in spans]
        rows["first_index"] = [span.first_index for span in spans]
        rows["rounding_seed"] = [span.rounding_seed for span in spans]
        rows["state_format"] = _native.STATE_FORMATS[state_format.value]
        own_master = state_format.is_split or record_format.own_master
        self.reads_values = record_format.needs_values
        rows["values_dtype"] = DTYPE_CODES[values_dtype] if own_master else _native.F32
        self.low, self._value_offsets = low, low * values_dtype.itemsize
        self._values_column = "values" if own_master else "master"
        self._record_offsets = _offsets(record_format, numel, low)

    def update(
        self,
        which: Sequence[int] | None,
        place: Place,
        gradients: Tensor | Sequence[Tensor],
        numbers: Numbers,
        grad_factor: float,
        summed: Sequence[SummedMemory] = (),
    ) -> None:
        """One step. `which`: the positions of the pieces that it is of, None: of all. `gradients`: [numel], or by piece [its
        numel]. `summed`, on the host alone: of what checksums are taken."""
        if which is None and isinstance(gradients, Tensor):
            where = (place.addresses, gradients.data_ptr(), gradients.dtype, gradients.numel())
            if where != self._where:
                self._place_gradients(self.placed(_ALL, place), _ALL, gradients)
                self._where = where
            self._table.step(self.moments, numbers, grad_factor, summed)
            return
        rows = self.placed(_ALL if which is None else which, place)
        if isinstance(gradients, Tensor):
            self._place_gradients(rows, _ALL if which is None else which, gradients)
        else:
            _place_gradients(rows, gradients, self._device_index)
        table = self._table if which is None else _Table(rows, self.device)
        table.step(self.moments, numbers, grad_factor, summed)

    def _place_gradients(self, rows: Any, which: Sequence[int] | slice, gradients: Tensor) -> None:
        _check_gradients(gradients, self.numel, self._device_index)
        rows["grad"] = self.low[which] * gradients.itemsize + gradients.data_ptr()
        rows["grad_dtype"] = DTYPE_CODES[gradients.dtype]

    def placed(self, which: Sequence[int] | slice, place: Place) -> Any:
        """The rows of these pieces, told where all but the gradients lie."""
        self._check(place.record, place.values)
        if place.source is not None:
            self._check(place.source, place.values)
        record, values, source = place.addresses
        self._where = None
        rows = self._table.rows[which]
        for column, offsets in self._record_offsets:
            rows[column] = offsets[which] + record
        rows["source_distance"] = source - record if source else 0
        rows[self._values_column] = self._value_offsets[which] + values
        return rows

    def _check(self, record: Tensor, values: Tensor) -> None:
        index = self._device_index
        if record.dtype != torch.uint8 or record.numel() < self.record_nbytes or not _is_flat_on(index, record):
            raise AssertionError(f"a record of {self.record_nbytes} bytes on {self.device} is needed")
        if values.dtype != self._values_dtype or values.numel() != self.numel or not _is_flat_on(index, values):
            raise AssertionError(f"values must be [{self.numel}] of {self._values_dtype} on {self.device}")


class JoinedTable:
    """Of several chunks whose records and values stay where they are, on one device: one call for all of them."""

    def __init__(self, parts: Sequence[tuple[StepTable, Place]]) -> None:
        self._kept = parts  # as long as their addresses are here
        tables = [table for table, _ in parts]
        rows = np.concatenate([table.placed(_ALL, place) for table, place in parts])
        self._table, self._device_index = _Table(rows, tables[0].device), _index(tables[0].device)
        self._numels, self._counts = [table.numel for table in tables], [len(table.low) for table in tables]
        self._low = np.concatenate([table.low for table in tables])
        self._moments = frozenset.intersection(*(table.moments for table in tables))

    def update(self, gradients: Sequence[Tensor], numbers: Numbers, grad_factor: float) -> None:
        """One step of all pieces, in place; as `StepTable.update`."""
        _place_gradients(self._table.rows, gradients, self._device_index)
        self._table.step(self._moments, numbers, grad_factor)

    def update_chunks(self, gradients: Sequence[Tensor], numbers: Numbers, grad_factor: float) -> None:
        """`update` with the gradients of each chunk in one, [its numel]."""
        for numel, gradient in zip(self._numels, gradients, strict=True):
            _check_gradients(gradient, numel, self._device_index)
        itemsizes = np.repeat(np.array([one.itemsize for one in gradients], np.uint64), self._counts)
        rows, addresses = self._table.rows, np.array([one.data_ptr() for one in gradients], np.uint64)
        rows["grad"] = self._low * itemsizes + np.repeat(addresses, self._counts)
        rows["grad_dtype"] = np.repeat([DTYPE_CODES[one.dtype] for one in gradients], self._counts)
        self._table.step(self._moments, numbers, grad_factor)


class _Table:
    """Rows, and what they were told last."""

    def __init__(self, rows: Any, device: torch.device) -> None:
        self.rows, self._count, self._address = rows, len(rows), rows.ctypes.data
        self._compiled = compiled_kernels.of(device)
        if self._compiled is None and device.type != "cpu":
            raise AssertionError(f"there are no compiled kernels for {device}")
        self._told: object = None

    def step(self, moments: Set[str], numbers: Numbers, grad_factor: float, summed: Sequence[SummedMemory] = ()) -> None:
        """The rows know where everything lies: compute."""
        if isinstance(numbers, list):
            self._tell_each(moments, numbers, grad_factor)
        else:
            self._tell(moments, *numbers, grad_factor)
        if self._compiled is None:
            _native.update_rows(self._address, self._count, [one.arguments for one in summed])
        else:
            self._compiled.update(_native.UpdateArguments(*row) for row in self.rows.tolist())

    def _tell(self, moments: Set[str], hyper: Hyper, step: int, grad_factor: float) -> None:
        if step < 1 or not self._count:
            raise AssertionError("there are pieces, and steps count from 1")
        self.rows["step"] = step
        told = (hyper, hyper.lr_at(step), grad_factor)
        if told != self._told:
            self._told = None
            _put_numbers(self.rows, _ALL, moments, hyper, step, grad_factor)
            self._told = told

    def _tell_each(self, moments: Set[str], numbers: Sequence[tuple[Hyper, int]], grad_factor: float) -> None:
        steps, rows = [step for _, step in numbers], self.rows
        if len(steps) != self._count or not steps or min(steps) < 1:
            raise AssertionError(f"{self._count} pieces need as many numbers, not {len(steps)}, and steps count from 1")
        first, first_step = numbers[0]
        if all(one is first and step == first_step for one, step in numbers):
            self._tell(moments, first, first_step, grad_factor)
            return
        self._told = None
        rows["step"] = steps
        alike: dict[tuple[int, int], list[int]] = {}
        for index, (hyper, step) in enumerate(numbers):
            alike.setdefault((id(hyper), step), []).append(index)
        for which in alike.values():
            _put_numbers(rows, which, moments, *numbers[which[0]], grad_factor)


def _put_numbers(
    rows: Any, which: Sequence[int] | slice, moments: Set[str], hyper: Hyper, step: int, grad_factor: float
) -> None:
    if not moments >= set(hyper.moments):
        raise AssertionError(f"the record has no {', '.join(hyper.moments)}")
    rows["lr"][which], rows["beta1"][which], rows["beta2"][which] = hyper.lr_at(step), hyper.beta1, hyper.beta2
    rows["eps"][which], rows["weight_decay"][which] = hyper.eps, hyper.weight_decay
    rows["grad_factor"][which] = -grad_factor if hyper.maximize else grad_factor
    rows["rule"][which] = _native.RULES[hyper.rule.value]
    rows["decoupled"][which], rows["nesterov"][which] = hyper.decoupled, hyper.nesterov


# Assertions: these are the contract between our own layers, and native code behind a wrong size would corrupt memory.


def _place_gradients(rows: Any, gradients: Sequence[Tensor], device_index: int) -> None:
    if len(gradients) != len(rows):
        raise AssertionError(f"{len(rows)} pieces need as many gradients, not {len(gradients)}")
    for numel, gradient in zip(rows["numel"].tolist(), gradients, strict=True):
        if gradient.numel() != numel or not _is_flat_on(device_index, gradient):
            raise AssertionError(f"a gradient must be [{numel}] where the record is")
    rows["grad"] = [gradient.data_ptr() for gradient in gradients]
    rows["grad_dtype"] = [DTYPE_CODES[gradient.dtype] for gradient in gradients]


def _check_gradients(gradients: Tensor, numel: int, device_index: int) -> None:
    if gradients.numel() != numel or not _is_flat_on(device_index, gradients):
        raise AssertionError(f"gradients must be [{numel}] where the record is")


def _is_flat_on(device_index: int, tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_contiguous() and tensor.get_device() == device_index


def _index(device: torch.device) -> int:
    """As `Tensor.get_device` gives it."""
    return -1 if device.index is None else device.index


def _offsets(record_format: RecordFormat, numel: int, low: Any) -> list[tuple[str, Any]]:
    """By column of the table: where each piece's part of a record's array begins, in bytes of the record."""
    found, start = [], 0
    for name, dtype, count in record_format.arrays(numel):
        first = low // SCALE_GROUP if name.endswith("_scale") else low
        found.append((MASTER if name == REMAINDER else name, start + first * dtype.itemsize))
        start += count * dtype.itemsize
    return found
