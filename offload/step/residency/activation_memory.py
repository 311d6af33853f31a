# SPDX-License-Identifier: Apache-2.0
"""What the model's activations take of device memory, as it was seen, and so how much units may take where no budget says it:
what is left, less a tenth.

What a forward and its backward take besides units is seen when they run, from the allocator's own figures. It holds for
every later one whose inputs are nowhere larger, and with the square of the growth for one whose inputs are a little larger.
A forward whose inputs are much larger than all that were seen runs with the least. What is in use grows in other ways too
(results that the loop keeps, another model, a generation's keys and values): so at every use of a unit as much is left as the
largest step from one use to the next took so far.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from offload.device.accelerator import Accelerator
from offload.device.device_memory import MemoryUse
from offload.step.calls import in_backward
from offload.step.nested_tensors import tensors_in

_SHARE = 0.9
"""Of what is left. The rest is for what the allocator cannot use of what it has, and for who else computes there."""
_KNOWN = 32
"""Inputs that are remembered of each kind, those seen last."""
_LITTLE = 1.25
"""Growth of inputs, the product of that of their dimensions, up to which what they take is not looked at anew."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Sizes of all dimensions of the inputs, and the bytes that they took."""

    sizes: tuple[int, ...]
    nbytes: int

    def covers(self, sizes: tuple[int, ...]) -> bool:
        return self._growth(sizes) == 1

    def foretells(self, sizes: tuple[int, ...]) -> bool:
        """Whether these tell what such inputs take."""
        return self._growth(sizes) <= _LITTLE

    def most(self, sizes: tuple[int, ...]) -> int:
        """Bytes that such inputs take at most."""
        return int(self.nbytes * self._growth(sizes) ** 2)

    def _growth(self, sizes: tuple[int, ...]) -> float:
        return math.prod(max(there / max(here, 1), 1.0) for here, there in zip(self.sizes, sizes, strict=True))


class ActivationMemory:
    """See the module. Owned by the thread that drives the model (backward's during backward).

    Each method is told what units take at the moment: `units_nbytes`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """`accelerator`: one that knows its `memory_use`."""
        self._accelerator = accelerator
        self._seen: dict[Hashable, list[_Seen]] = {}
        self._inputs: tuple[Hashable, tuple[int, ...]] | None = None
        """Kind and sizes of those of the last forward, until what it took is known."""
        self._needed_nbytes: int | None = None
        """What they are known to take; None: nothing as large was seen."""
        self._most_nbytes: int | None = None
        """What they take at most by the smaller ones that were seen; None: nothing tells."""
        self._total_nbytes = self._base_nbytes = self._taken_nbytes = self._in_one_use_nbytes = 0
        """In use besides units as the forward began; what it and its backward took beyond that; what one use of a unit did."""
        self._besides_nbytes = self._units_nbytes = self._peak_nbytes = 0
        """In use besides units and for units when that was looked at last, and the peak until then."""
        self._saw_backward = False

    def forward_begins(self, which: int, inputs: Any, *, recorded: bool, units_nbytes: int) -> None:
        """An outermost one, of the unit with this index. It begins what is looked at. `recorded`: a backward will follow."""
        self.ends(units_nbytes)
        shapes = [tensor.shape for tensor in tensors_in(inputs)]
        kind, sizes = (which, recorded, tuple(map(len, shapes))), tuple(size for shape in shapes for size in shape)
        self._inputs = kind, sizes
        seen, (_, _, dimensions) = self._seen.get(kind, ()), kind
        self._needed_nbytes = min((one.most(sizes) for one in seen if one.foretells(sizes)), default=None)
        trained = self._seen.get((which, True, dimensions), ())  # with its backward a forward takes no less
        self._most_nbytes = min((one.most(sizes) for one in seen or trained), default=None)
        self._taken_nbytes, self._saw_backward = 0, not recorded
        if self._needed_nbytes is None:
            self._accelerator.begin_peak()
            self._peak_nbytes = 0
        use = self._use()
        self._base_nbytes = self._besides_nbytes = use.now - units_nbytes
        self._units_nbytes, self._peak_nbytes = units_nbytes, max(self._peak_nbytes, use.peak)

    def left(self, units_nbytes: int) -> int:
        """A use of a unit begins or ends: bytes that units may take now; 0 where that is not known."""
        use = self._look(units_nbytes)
        self._saw_backward = self._saw_backward or in_backward()
        self._total_nbytes = use.total
        return self._left_by(self._needed_nbytes)

    def left_for_states(self) -> int:
        """The same as it was last found, for what takes long to come again: also of inputs much larger than what was seen."""
        return self._left_by(self._most_nbytes)

    def _left_by(self, needed_nbytes: int | None) -> int:
        if needed_nbytes is None:
            return 0
        needed = max(self._base_nbytes + needed_nbytes, self._besides_nbytes + self._in_one_use_nbytes)
        return max(int((self._total_nbytes - needed) * _SHARE), 0)

    def took(self, units_nbytes: int) -> None:
        """Since it was last looked at units took memory until it is so much, and nothing else did."""
        self._units_nbytes, self._peak_nbytes = units_nbytes, max(self._peak_nbytes, self._use().peak)

    def ends(self, units_nbytes: int) -> None:
        """Nothing more comes of the last forward and its backward."""
        if self._inputs is None:
            return
        self._look(units_nbytes)
        (kind, sizes), self._inputs = self._inputs, None
        if self._saw_backward and (self._needed_nbytes is None or self._taken_nbytes > self._needed_nbytes):
            self._needed_nbytes = self._most_nbytes = self._taken_nbytes
            others = self._seen.get(kind, ())
            # One that was larger takes as much at least, and one that was smaller and took no less tells nothing.
            larger = [_Seen(one.sizes, max(one.nbytes, self._taken_nbytes)) for one in others if one.covers(sizes)]
            rest = [one for one in others if not one.covers(sizes) and one.nbytes < self._taken_nbytes]
            self._seen[kind] = [*larger, *rest, _Seen(sizes, self._taken_nbytes)][-_KNOWN:]

    def _look(self, units_nbytes: int) -> MemoryUse:
        use = self._use()
        if use.peak > self._peak_nbytes:
            self._peak_nbytes = use.peak
            besides = use.peak - min(units_nbytes, self._units_nbytes)
            self._taken_nbytes = max(self._taken_nbytes, besides - self._base_nbytes)
            self._in_one_use_nbytes = max(self._in_one_use_nbytes, besides - self._besides_nbytes)
        self._besides_nbytes, self._units_nbytes = use.now - units_nbytes, units_nbytes
        return use

    def _use(self) -> MemoryUse:
        use = self._accelerator.memory_use()
        assert use is not None
        return use
