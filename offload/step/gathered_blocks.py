# SPDX-License-Identifier: Apache-2.0
"""Parameters that are lent to the user as ordinary tensors: `engine.gathered`.

A block ends by `Lending.__exit__`, or without it: where an interrupt comes just as that begins, Python runs none of it. So the
units that are held are known by a weak reference to the block's object; what it cannot end any more is ended by who comes next.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from traceback import walk_tb
from types import TracebackType

import torch

from offload.errors import BudgetError, RankError, UsageError
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.ranks.all_or_none import checksum
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.step.homes import Homes
from offload.step.thread_safety.call_depth import require_stack
from offload.step.thread_safety.failure_state import FailureState
from offload.step.uses import Uses


class Lender:
    """See the module. Owned by the thread that drives the model."""

    def __init__(self, parts: Components, failures: FailureState, uses: Uses) -> None:
        self._parts, self._failures, self._uses, self._homes = parts, failures, uses, Homes(parts)
        self._lent: list[tuple[weakref.ref[Lending], Sequence[ParameterInfo]]] = []

    @property
    def lends_any(self) -> bool:
        """Whether something is lent: the block has not ended."""
        self.end_left()
        return any(unit.uses.held_count for unit in self._parts.units)

    def lend(self, lending: Lending, infos: Sequence[ParameterInfo]) -> None:
        """Bring the parameters' units in and lend the parameters: inside they are tensors of their own, as a plain model's
        are."""
        require_stack()
        residency = self._parts.residency
        with self._failures.failures():
            residency.finish_updates()
            units = list(self._units(infos))
            if lacking_nbytes := residency.lacking_nbytes(units):
                raise _too_many(len(units), lacking_nbytes)
            for unit in units:
                self._uses.hold(unit)
            # Now: inside the block a rank may be in a collective of the loop's own, where it gives others nothing.
            self._parts.meeting.meet(MeetingPoint.GATHERED, argument=_digest(infos))
            for info in infos:
                self._lend(info)
            self._lent.append((weakref.ref(lending), infos))  # in there: an interrupt that was held comes after it

    def take_back(self, lending: Lending) -> None:
        """Carry home what was written, on the way out; nothing if it was not lent, or was taken back."""
        for entry in [entry for entry in self._lent if entry[0]() is lending]:
            self._take_all_back(entry)

    def give_up(self, lending: Lending) -> None:
        """Its block does not begin."""
        if not self._failures.has_failed:
            self.take_back(lending)

    def end_left(self) -> None:
        """Take back what an interrupt kept from being taken back."""
        for entry in list(self._lent):
            lending = entry[0]()
            if lending is None or _was_cut_short(lending):
                self._take_all_back(entry)

    def _take_all_back(self, entry: tuple[weakref.ref[Lending], Sequence[ParameterInfo]]) -> None:
        infos = entry[1]
        with self._failures.failures():
            refusals = [refusal for info in infos if (refusal := self._refusal(info)) is not None]
            if not refusals:
                self._require_same_writes(infos)
            for info in infos:
                self._take_back(info, carries=not refusals)
            for unit in self._units(infos):
                self._uses.release(unit)
            self._lent.remove(entry)
            if refusals:
                raise UsageError(f"{refusals[0]} Nothing that was written inside has an effect.")

    def _units(self, infos: Sequence[ParameterInfo]) -> Iterator[Unit]:
        return (self._parts.units[index] for index in sorted({info.unit_index for info in infos}))

    def _lend(self, info: ParameterInfo) -> None:
        assert info.guard is not None
        if not info.lent_count:
            self._parts.units[info.unit_index].lend(info)
            info.parameter.data = info.view.clone()
        info.lent_count += 1

    def _refusal(self, info: ParameterInfo) -> str | None:
        lent, view = info.parameter, info.view
        if (lent.shape, lent.dtype, lent.device) == (view.shape, view.dtype, view.device):
            return None
        return (
            f"parameter {info.fqn!r} was made {tuple(lent.shape)}, {lent.dtype} on {lent.device} inside engine.gathered, where "
            f"it is {tuple(view.shape)}, {view.dtype} on {view.device}: only values can be written. Change a model before "
            "offload.initialize; the dtype of its forward is Config(dtype=...)."
        )

    def _take_back(self, info: ParameterInfo, *, carries: bool) -> None:
        lent, view = info.parameter.detach(), info.view
        if carries:
            # Bits, not values: a NaN that was there before is no change.
            written = _bits(info.in_memory_order(lent)) != _bits(info.in_memory_order(view))
            if bool(written.any()):
                view.copy_(lent)
                self._homes.write(info, written)
                self._parts.units[info.unit_index].version += 1
        info.lent_count -= 1
        if not info.lent_count:
            info.parameter.data = view
        info.note_version()

    def _require_same_writes(self, infos: Sequence[ParameterInfo]) -> None:
        """Each rank carries its shard home, so all must have written the same."""
        ranks = self._parts.ranks
        if ranks.world_size == 1:
            return
        sums = torch.tensor([checksum(info.parameter) for info in infos], dtype=torch.int64, device="cpu")
        said = self._failures.meet(MeetingPoint.WRITTEN, lambda: ranks.exchange(sums), argument=_digest(infos))
        for index, other in enumerate(said):
            for info, here, there in zip(infos, sums.tolist(), other.tolist(), strict=True):
                if here != there:
                    raise RankError(
                        f"parameter {info.fqn!r} holds other values on rank {index} than on rank {ranks.index} at the end of "
                        "engine.gathered(): write the same on all ranks. The engine's state is undefined now."
                    )


def _too_many(unit_count: int, lacking_nbytes: int) -> BudgetError:
    error = BudgetError(
        f"engine.gathered was given parameters of {unit_count} units: together they take {lacking_nbytes} bytes more than "
        "device_memory leaves for parameters. Gather those of fewer units at a time, use engine.state_dict() for the whole "
        f"model, or raise device_memory by at least {lacking_nbytes} bytes."
    )
    error.changed_nothing = True
    return error


class Lending:
    """One `with engine.gathered(...)`."""

    def __init__(self, lender: Lender, infos: Sequence[ParameterInfo], first: Callable[[], None]) -> None:
        """`first` is called when the block begins."""
        self._lender, self._infos, self._first = lender, infos, first

    def __enter__(self) -> None:
        self._first()
        try:
            self._lender.lend(self, self._infos)
        except BaseException:
            self._lender.give_up(self)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lender.take_back(self)


def _was_cut_short(lending: Lending) -> bool:
    """Whether an exception that is handled now came out of the end of the block, and so keeps its object alive."""
    errors, error = dict[int, BaseException](), sys.exc_info()[1] or getattr(sys, "last_value", None)
    while error is not None and id(error) not in errors:
        errors[id(error)] = error
        error = error.__context__
    frames = (frame for error in errors.values() for frame, _ in walk_tb(error.__traceback__))
    end = Lending.__exit__.__code__
    return any(frame.f_code is end and frame.f_locals.get("self") is lending for frame in frames)


def _digest(infos: Sequence[ParameterInfo]) -> int:
    return zlib.crc32(repr([info.index for info in infos]).encode())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])
