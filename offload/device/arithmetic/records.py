# SPDX-License-Identifier: Apache-2.0
"""State formats: which arrays an optimizer record consists of, and how fp32 weights and moments get in and out of it.

A record is the optimizer state of one chunk of n elements (a multiple of 64), its arrays end to end, n each unless said
otherwise:

    fp32    [master f32 |] moments f32       master: not where the fp32 parameters are their own
    split   remainder i16 | moments f32      the bf16 parameter and its remainder are the master, exactly
    bf16    remainder i16 | moments bf16     rounded stochastically at each update
    8bit    remainder i16 | moments 8-bit | for each moment n / 64 scale bytes

The moments are those of the rule (`offload.device.arithmetic.rules`). In all but fp32 the parameter's own bytes are a part of
the state: whoever updates a weight or reads its master needs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.device.arithmetic import encoding, kernels
from offload.device.arithmetic.encoding import CODES, ROOT, SCALE_GROUP
from offload.device.arithmetic.rules import MOMENTS
from offload.device.arithmetic.segment import MASTER, REMAINDER, StateFormat, scale_name


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """`own_master`, of fp32 only: False where the parameters are fp32 and within reach of the kernel that updates them."""

    state_format: StateFormat
    moments: tuple[str, ...] = MOMENTS
    own_master: bool = True

    @property
    def needs_values(self) -> bool:
        """Whether an update needs the old parameters: they are the master, or a part of it."""
        return self.state_format.is_split or not self.own_master

    def arrays(self, numel: int) -> tuple[tuple[str, torch.dtype, int], ...]:
        """(name, dtype, elements) in their order in the record of a chunk of `numel` elements."""
        found = []
        if self.state_format.is_split:
            found.append((REMAINDER, torch.int16, numel))
        elif self.own_master:
            found.append((MASTER, torch.float32, numel))
        found += [(name, self.state_format.moment_dtype(name), numel) for name in self.moments]
        if self.state_format is StateFormat.EIGHT_BIT:
            found += [(scale_name(name), torch.uint8, encoding.group_count(numel)) for name in self.moments]
        return tuple(found)

    def nbytes(self, numel: int) -> int:
        return sum(count * dtype.itemsize for _, dtype, count in self.arrays(numel))

    def over(self, buffer: Tensor, numel: int) -> Record:
        """Cut a uint8 buffer of at least `nbytes(numel)` into the arrays of a record."""
        arrays: dict[str, Tensor] = {}
        start = 0
        for name, dtype, count in self.arrays(numel):
            stop = start + count * dtype.itemsize
            arrays[name] = buffer[start:stop].view(dtype)
            start = stop
        return Record(self, arrays)

    def round_values(self, values: Tensor, master: Tensor) -> None:
        """values = the parameters (in their dtype) of fp32 masters, as an update would leave them."""
        if self.state_format.is_split:
            encoding.put_upper_half(values, master)
        else:
            kernels.convert(values, master)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one chunk as views of one buffer. Elements are the chunk's; `low` and `high` cut one slot's piece."""

    format: RecordFormat
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """That it lies on, if it holds anything."""
        return next(iter(self.arrays.values())).device

    def part(self, low: int, high: int) -> dict[str, Tensor]:
        """The arrays of elements [low, high); scale bytes from the group that begins at `low`."""
        cut = {}
        for name, array in self.arrays.items():
            if name.endswith("_scale"):
                first = low // SCALE_GROUP
                cut[name] = array[first : first + encoding.group_count(high - low)]
            else:
                cut[name] = array[low:high]
        return cut

    def master(self, low: int, high: int, values: Tensor) -> Tensor:
        """The fp32 masters of [low, high), given their parameters `values` [high - low]. A view where there is one."""
        if MASTER in self.arrays:
            return self.arrays[MASTER][low:high]
        if REMAINDER in self.arrays:
            return encoding.joined(values, self.arrays[REMAINDER][low:high])
        return values

    def put_master(self, low: int, high: int, master: Tensor) -> None:
        """Store the record's part of masters [high - low]; the parameters' part is `RecordFormat.round_values`."""
        if MASTER in self.arrays:
            self.arrays[MASTER][low:high].copy_(master)
        elif REMAINDER in self.arrays:
            encoding.put_remainder(self.arrays[REMAINDER][low:high], master.float())

    def replace_master(self, low: int, high: int, mask: Tensor, values: Tensor) -> None:
        """Where `mask`: somebody wrote `values` [high - low] to the parameters; the masters are those numbers now."""
        if MASTER in self.arrays:
            self.arrays[MASTER][low:high][mask] = values.float()[mask]
        elif REMAINDER in self.arrays:
            self.arrays[REMAINDER][low:high][mask] = 0  # a bf16 number has nothing below its upper half

    def moment(self, name: str, low: int, high: int) -> Tensor:
        """A moment of [low, high) in fp32: exactly what the next update starts from. A view where there is one."""
        array = self.arrays[name][low:high]
        if self.format.state_format is not StateFormat.EIGHT_BIT:
            return array.float()
        values = encoding.values_of(array, self.part(low, high)[scale_name(name)], CODES[name])
        return values * values if CODES[name] is ROOT else values

    def put_moment(self, name: str, low: int, high: int, moment: Tensor) -> None:
        """Store a moment given in fp32, rounded to nearest where the format is narrower."""
        if self.format.state_format is not StateFormat.EIGHT_BIT:
            self.arrays[name][low:high].copy_(moment)
            return
        code = CODES[name]
        exact = moment.float()
        codes, scale_bytes = encoding.codes_of(encoding.root_of(exact) if code is ROOT else exact, code, None)
        self.arrays[name][low:high].copy_(codes)
        self.part(low, high)[scale_name(name)].copy_(scale_bytes)
