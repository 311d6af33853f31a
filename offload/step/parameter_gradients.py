# SPDX-License-Identifier: Apache-2.0
"""What `p.grad` holds: a token in place of each gradient that the engine took over (`offload.model.taken_gradient`).

waiting  small gradients, and where nothing is copied all: PyTorch accumulates undisturbed, and what waits in `p.grad` is
         taken over together. What is added to a token after that comes here by itself
coming   PyTorch is about to accumulate into it: an earlier gradient's token is taken out
arrived  PyTorch accumulated: the gradient is taken over, and a token put in its place
adopt    a gradient that another rank computed counts here too
take_assigned  one that the user put there counts like one that backward computed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import repeat
from operator import attrgetter
from typing import TypeGuard

import torch

from offload.errors import BudgetError, UsageError
from offload.model.flat import ParameterInfo, some_of
from offload.model.guard import unguarded
from offload.model.set_each import set_each
from offload.model.taken_gradient import TakenGradient
from offload.model.unit import Unit
from offload.model.unit_state import ShardState
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.step.gradients.filling import Filling
from offload.step.micro_batches import MicroBatches
from offload.step.torch_clipping import TokenClipping
from offload.step.waiting_gradients import WaitingGradients, gradient_nbytes

_STEP_OF = attrgetter("step_index")
_PARAMETER_OF, _GRADIENT_OF = attrgetter("parameter"), attrgetter("parameter.grad")
_TAKEN, _NOT_ASSIGNED = {TakenGradient}, {TakenGradient, type(None)}
_NAMED = 5
"""How many names an error message lists."""


class ParameterGradients:
    """See the module. Owned by the thread that drives the model, and backward's, never both at once."""

    def __init__(
        self,
        parts: Components,
        measure: Callable[[], float],
        require_scaled_loss: Callable[[], None],
        failures: Callable[[], AbstractContextManager[None]],
        *,
        micro_batches: int,
        narrow_sums: bool,
    ) -> None:
        """`measure`: gives the norm of the gradients as they stand. `require_scaled_loss`: raises where what comes lacks the
        loss scale. `failures`: `FailureState.failures`. `micro_batches`: of a step, as far as the loop said."""
        self._units, self._parameters = parts.units, parts.parameters
        self._gradients, self._gradient_sync = parts.gradients, parts.gradient_sync
        self._require_scaled_loss, self._failures = require_scaled_loss, failures
        self.micro_batches = MicroBatches(parts, micro_batches, narrow=narrow_sums)
        self.clipping = TokenClipping(parts.parameters, self.live, measure, self._accumulate)
        self.waiting = WaitingGradients(parts)
        self._trained = [info for info in parts.parameters if info.trainable]
        self.step_index = 0
        """Of the step that the gradients are for: that many were done."""
        self._consumed: dict[int, TakenGradient] = {}
        """While PyTorch accumulates into a gradient that the last step consumed: its token. PyTorch would add to it, so what
        comes is dropped, and whatever would use the sum raises (`require_new`)."""

    # ---- backward ------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """An outermost one."""
        self._drop_taken_out()
        self.micro_batches.backward_begins()

    def first_coming(self, info: ParameterInfo) -> bool:
        """`coming`, if there is no gradient yet: whether there is none."""
        assert self._gradients is not None
        if info.parameter.grad is not None or self._gradients.counts(info):
            return False
        self._consumed.pop(info.index, None)
        self.micro_batches.gradient_coming(info, is_second=False)
        return True

    def coming(self, info: ParameterInfo) -> None:
        """PyTorch is about to accumulate into the parameter's `grad`."""
        assert self._gradients is not None
        live, gradient = self._gradients.is_live(info), info.parameter.grad
        self._consumed.pop(info.index, None)
        if isinstance(gradient, TakenGradient) and not live:
            self._consumed[info.index], info.parameter.grad = gradient, None
            return
        self._further_coming(info, is_second=live)
        if isinstance(gradient, TakenGradient):
            _refuse_clipped(gradient)
            info.parameter.grad = None

    def arrived(self, info: ParameterInfo) -> torch.Tensor | None:
        """PyTorch accumulated. Returns what it brought; None: a function of the user's has no gradient to give, or the
        parameter was frozen since its forward."""
        gradient, consumed = info.parameter.grad, self._consumed.pop(info.index, None)
        if consumed is not None:
            info.parameter.grad = consumed
            return gradient
        if not _is_new(gradient):
            return None
        self._take_over(info, gradient, owned=True)
        return gradient

    def take_waiting(self, unit: Unit | None = None, module_id: int | None = None) -> int:
        """Backward left a module of the unit, or (None) is over: take over what waits in `p.grad`. Returns its bytes."""
        filling = self.waiting.filling(unit, module_id) if unit is not None else None
        if filling is not None and self._fill(filling):
            return filling.nbytes
        waiting = self.waiting.of(unit, module_id) if unit is not None else self.waiting.all()
        with unguarded():
            found = _new_gradients(waiting)
            if not found:
                return 0
            assert self._gradients is not None
            self._expect({info.index: info for info, _ in found}, {info.unit_index for info, _ in found})
            self._gradients.take(found)
            for info, _ in found:
                info.parameter.grad = self.clipping.token(info, self.step_index)
        return sum([gradient_nbytes(info) for info, _ in found])

    def _fill(self, filling: Filling) -> bool:
        """`take_waiting` of all its parameters, if each has a first gradient."""
        with unguarded():
            gradients = filling.gradients()
            if gradients is None:
                return False
            self._expect(filling.by_index, filling.unit_indices)
            assert self._gradients is not None
            if not self._gradients.fill(filling, gradients):
                return False
            self.clipping.put_tokens(filling, self.step_index)
        return True

    def _expect(self, coming: Mapping[int, ParameterInfo], unit_indices: Iterable[int]) -> None:
        """First gradients of these parameters of these units. Raises where they may not come: then what waits is dropped."""
        try:
            self._require_scaled_loss()
            for unit_index in unit_indices:
                unit = self._units[unit_index]
                if unit.update is not None:
                    raise stale_gradient(next(info.fqn for info in coming.values() if info.unit_index == unit_index))
                unit.shard.become(ShardState.REDUCING)
            self.micro_batches.first_gradients_coming(coming)
        except BaseException:
            self._drop_waiting()
            raise

    def _drop_waiting(self) -> None:
        for info in self.waiting.all():
            if _is_new(info.parameter.grad):
                info.parameter.grad = None

    def _accumulate(self, token: TakenGradient, gradient: torch.Tensor) -> None:
        """Autograd adds to a gradient that was taken over. To one that a step has consumed nothing is added, and whatever would
        use the sum raises (`require_new`)."""
        info = self._parameters[token.parameter_index]
        with self._failures(), unguarded():
            if self._gradients is None or not self._gradients.is_live(info):
                return
            self._require_scaled_loss()
            _refuse_clipped(token)
            self._further_coming(info, is_second=True)
            self._gradient_sync.arrive(info, gradient, owned=False, is_part=self.micro_batches.adds_part(info))

    def _further_coming(self, info: ParameterInfo, *, is_second: bool) -> None:
        """See `MicroBatches.gradient_coming`. Without room what waits goes with the rest."""
        try:
            self.micro_batches.gradient_coming(info, is_second=is_second)
        except BudgetError:
            self._drop_waiting()
            raise

    def _take_over(self, info: ParameterInfo, gradient: torch.Tensor, *, owned: bool) -> None:
        self._units[info.unit_index].shard.become(ShardState.REDUCING)
        is_part = self.micro_batches.adds_part(info)
        self._gradient_sync.arrive(info, gradient, owned=owned, is_part=is_part)
        info.parameter.grad = self.clipping.token(info, self.step_index)

    def adopt(self) -> None:
        """Gradients that other ranks computed count here too."""
        for index in self._gradient_sync.newly_present():
            info = self._parameters[index]
            if info.parameter.grad is None and self._gradients is not None:
                self._gradients.expect(info)
                self._units[info.unit_index].shard.become(ShardState.REDUCING)
                info.parameter.grad = self.clipping.token(info, self.step_index)

    # ---- between backward and step -------------------------------------------------------------------------------

    def live(self) -> list[ParameterInfo]:
        """The parameters whose gradients count for the coming step, in model order."""
        with unguarded():
            return self._gradients.live_parameters() if self._gradients is not None else []

    @property
    def any_given(self) -> bool:
        """Whether there is a gradient that a step would use."""
        with unguarded():
            return any(_is_new(info.parameter.grad) for info in self._trained) or bool(self.live())

    def _drop_taken_out(self) -> None:
        """On several ranks drop what the user took out of `p.grad` since, averaged or not: before others add to what this rank
        keeps of it, and before it goes to them. (What one rank has of it is dropped when somebody asks whether it is live.)"""
        self.adopt()
        with unguarded():
            infos = self._gradient_sync.remembered()
            taken_out = [info for info in infos if not isinstance(info.parameter.grad, TakenGradient)]
            if taken_out:
                self._gradient_sync.settle()
            for info in taken_out:
                self._gradient_sync.drop(info)

    def take_assigned(self) -> None:
        """A gradient that the user assigned to `p.grad` counts like one that backward computed."""
        self._drop_taken_out()
        with unguarded():
            for info, gradient in _new_gradients(self._trained):
                self._gradient_sync.drop(info)  # what stood there before it
                self._take_over(info, gradient, owned=False)

    # ---- a single one ----------------------------------------------------------------------------------------------

    def gather_in(self) -> None:
        """On several ranks have what has arrived averaged, also where backwards only accumulate. Collective."""
        self.take_assigned()
        self._gradient_sync.end()
        self.adopt()

    def is_live(self, info: ParameterInfo) -> bool:
        """Whether a gradient counts for the coming step."""
        with unguarded():
            return self._gradients is not None and self._gradients.is_live(info)

    def own(self, info: ParameterInfo) -> torch.Tensor:
        """This rank's pieces of a gradient as it lies in its buffers, scaled; fp32 [numel], zeros elsewhere."""
        values = torch.zeros(info.numel, dtype=torch.float32, device="cpu")
        assert self._gradients is not None
        self._gradients.settle()
        for chunk, piece in info.pieces:
            found = self._gradients.read(chunk, info.index, piece) if piece.numel else None
            if found is not None:
                values[piece.in_parameter].copy_(found)
        return values

    def replace(self, info: ParameterInfo, value: torch.Tensor) -> None:
        """What backward brought is forgotten; `value`, scaled, in the parameter's dtype and the same on all ranks, counts."""
        self._gradient_sync.settle()
        self.adopt()
        with unguarded():
            self._drop(info, set_to_none=True)
            self._take_over(info, value, owned=False)

    def put_consumed(self, info: ParameterInfo) -> None:
        """A step before these parts were made has consumed the gradient, and what stands in `p.grad` is to say so."""
        info.parameter.grad = self.clipping.token(info, self.step_index - 1)

    def require_new(self, what: str) -> None:
        """PyTorch would use the last step's gradients again; here that step has consumed them."""
        with unguarded():
            kinds, tokens = set(map(type, map(_GRADIENT_OF, self._parameters))), []
            if kinds - _TAKEN or set(map(_STEP_OF, map(_GRADIENT_OF, self._parameters))) - {self.step_index}:
                tokens = [(info, info.parameter.grad) for info in self._parameters]
        old = [info.fqn for info, one in tokens if isinstance(one, TakenGradient) and one.step_index != self.step_index]
        if old:
            raise UsageError(
                f"{what} was called while the gradients of {some_of(old, _NAMED)} were those of the last step. "
                "PyTorch would use them again, with what backward added since; here the step consumed them. Call "
                "optimizer.zero_grad() after each step; to apply a gradient twice, run forward and backward again."
            )

    def sum_of_squares(self, point: MeetingPoint, argument: int = 0) -> int | None:
        """See `GradientSync.sum`."""
        self._drop_taken_out()
        return self._gradient_sync.sum(point, self._squares, argument)

    def _squares(self) -> list[torch.Tensor]:
        """Sums of squares, block by block, of what this rank keeps of the gradients."""
        assert self._gradients is not None
        self.adopt()
        self._gradients.settle()
        self.live()  # forgets those that the user took out of p.grad
        return self._gradients.squares()

    def end_step(self) -> None:
        """The gradients belong to updates: those that come are for the next step."""
        self.step_index += 1
        self.micro_batches.step_ends()
        self.clipping.end_step()

    def drop(self, set_to_none: bool, besides: Collection[ParameterInfo]) -> None:
        """See `Training.zero_grad`."""
        self.micro_batches.step_begins_anew()
        with unguarded():
            infos = [*self._trained, *besides]
            if set_to_none and self._gradient_sync.is_empty:
                set_each(map(_PARAMETER_OF, infos), "grad", repeat(None))
            else:
                for info in infos:
                    self._drop(info, set_to_none)
        for unit in self._units if set_to_none else ():
            if unit.shard.state is ShardState.REDUCING:
                unit.shard.become(ShardState.CLEAN)

    def _drop(self, info: ParameterInfo, set_to_none: bool) -> None:
        had_gradient = info.parameter.grad is not None
        self._gradient_sync.drop(info)
        info.parameter.grad = None
        if had_gradient and not set_to_none:
            zeros = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=info.parameter.device).zero_()
            if info.trainable:
                self._take_over(info, zeros, owned=True)
            else:
                info.parameter.grad = zeros


def _is_new(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether it is one that was not taken over."""
    return gradient is not None and type(gradient) is not TakenGradient


def _new_gradients(infos: Collection[ParameterInfo]) -> list[tuple[ParameterInfo, torch.Tensor]]:
    """Of these parameters those with a gradient that was not taken over, and that."""
    if set(map(type, map(_GRADIENT_OF, infos))) <= _NOT_ASSIGNED:  # as most often
        return []
    return [(info, gradient) for info in infos if _is_new(gradient := info.parameter.grad)]


def _refuse_clipped(token: TakenGradient) -> None:
    if token.factor != 1.0:
        raise UsageError(
            f"backward reached {token.fqn!r} after its gradient was clipped. PyTorch would add to that; here the "
            "step clips. Clip after the last backward of the step."
        )


def stale_gradient(fqn: str) -> UsageError:
    """The refusal of what comes from a forward before the last step."""
    return UsageError(
        f"a gradient of {fqn!r} came from a forward that ran before optimizer.step(), whose update of it has not "
        "ended yet. Run the forward again after the step."
    )
