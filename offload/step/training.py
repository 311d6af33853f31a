# SPDX-License-Identifier: Apache-2.0
"""The loop's own calls: a step turns gradients into updates.

With `update="step"` all updates are enqueued at `step()`, in the order in which the next forward needs them, and run
under it. Otherwise a unit's update is enqueued when backward has left the unit and all its gradients are
there, if it can be undone: the norm may clip or leave out the step, and whatever looks at the weights before `step()` is to see
the old ones (`offload.step.speculation`). Where it cannot be undone it is enqueued at `step()`: the mode never changes a
number.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from offload.config import Config
from offload.errors import NonFiniteGradientError, UsageError
from offload.model.flat import ParameterInfo, some_of
from offload.model.unit import Unit
from offload.model.unit_state import ShardState
from offload.ranks.next_transfers import MeetingPoint
from offload.step.calls import RunningCalls
from offload.step.components import Components
from offload.step.gathered_blocks import Lender
from offload.step.gradients.norm import clip_factor, norm_of
from offload.step.loss_scale import LossScale
from offload.step.parameter_gradients import ParameterGradients
from offload.step.speculation import Speculation
from offload.step.thread_safety.call_depth import require_stack
from offload.step.thread_safety.failure_state import FailureState
from offload.step.thread_safety.taking_turns import Turn
from offload.step.update_making import HyperOf, UpdateMaker
from offload.step.uses import Uses

_NAMED = 5
"""How many names an error message lists."""


class Training(FailureState):
    """See the module. Owned by the thread that drives the model.

    synchronizing   False while backwards only accumulate (`Engine.no_sync`)
    loss_is_scaled  the backward that runs, or was cut short, is of a loss multiplied by the loss scale
    grad_norm       of the last step, before clipping
    """

    def __init__(self, parts: Components, config: Config, hyper_of: HyperOf | None, turn: Turn) -> None:
        """`hyper_of`: the optimizer's; None where nothing is trained."""
        super().__init__(parts.meeting, turn)
        self._units, self._residency, self._parameters = parts.units, parts.residency, parts.parameters
        self._chunk_gradients, self._updates, self._gradient_sync = parts.gradients, parts.updates, parts.gradient_sync
        self._parameter_store, self._records = parts.parameter_store, parts.records
        self._accelerator, self._timeline, self.recorder = parts.accelerator, parts.timeline, parts.accelerator.recorder
        self.loss_scale = LossScale.of(config.loss_scale, config.dtype)
        self._max_grad_norm = config.max_grad_norm
        self._maker = UpdateMaker(parts, hyper_of) if hyper_of is not None and parts.updates is not None else None
        alone = parts.ranks.world_size == 1
        begins_early = config.update != "step" and alone
        self.speculation = Speculation(
            parts,
            self._maker,
            begins_early=begins_early,
            norm_counts=config.needs_norm_first,
            micro_batches=config.micro_batches,
        )
        self.calls = RunningCalls(self.turn)
        self.uses = Uses(parts.units, parts.residency, self.speculation, self.calls, alone=alone)
        self.lender = Lender(parts, self, self.uses)
        self.parameter_gradients = ParameterGradients(
            parts, self._measure_now, self.require_scaled_loss, self.failures,
            micro_batches=config.micro_batches, narrow_sums=config.sums_are_narrow,
        )  # fmt: skip
        self.grad_norm: float | None = None
        self.synchronizing, self.loss_is_scaled = True, False
        self._scales = False
        """`scaled_backward` goes on."""
        self._scaled_backward: Callable[[], object] = lambda: None
        """What autograd keeps as long as the last backward of a loss of `scaled` goes on: a weak reference."""
        self._clip_once: float | None = None

    @property
    def step_count(self) -> int:
        """Steps done."""
        return self.parameter_gradients.step_index

    # ---- between steps -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Run every update that is enqueued; the tiers then hold the state after the last step, or get it as somebody asks for
        a record that visits the device. Raises failed writes."""
        self.speculation.undo()
        self.finish_updates()

    def bring_records_home(self) -> None:
        """Those that visit the device: somebody else than the thread that drives the model is about to ask for them."""
        if self._updates is not None and self._updates.visiting is not None:
            self._updates.visiting.leave_all()

    def finish_updates(self) -> None:
        """Those of the last step."""
        self.uses.end_cut_short()
        self._residency.finish_updates(besides=self.speculation.begun_units)
        self._settle_shards()
        for parameter_store in (self._parameter_store, self._records):
            if parameter_store is not None:
                parameter_store.raise_failed_writes()

    def _settle_shards(self) -> None:
        for unit in self._units:
            if unit.update is None and unit.shard.state is ShardState.UPDATING:
                unit.shard.become(ShardState.CLEAN)

    @property
    def is_within_step(self) -> bool:
        """Whether gradients wait for `step`, or updates of a step that is not over have begun."""
        return bool(self.speculation.begun_units) or self.parameter_gradients.any_given

    def restart(self, step_count: int) -> None:
        """Drop every gradient and what has begun of a step: the state is about to be that after `step_count` steps."""
        self._clip_once = self.grad_norm = None
        self.zero_grad()
        self.speculation.restart()
        self.parameter_gradients.step_index = step_count
        self.values_changed()
        self._residency.end_step()

    def values_changed(self, unit: Unit | None = None) -> None:
        """By a load, or of one unit by the user: what forward computed before is of other values."""
        for changed in self._units if unit is None else (unit,):
            changed.version += 1

    def bring_in(self, parameter_index: int) -> None:
        """A guarded parameter's value is asked for (`Uses.bring_in`)."""
        require_stack()
        with self.failures():
            self.uses.bring_in(self._parameters[parameter_index])

    # ---- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Gradients that arrive inside are of a loss multiplied by the loss scale."""
        before = self.loss_is_scaled, self._scales
        self.loss_is_scaled = self._scales = True
        try:
            yield
        except BaseException:
            if self.failure is None:
                with self.failures():
                    self.parameter_gradients.take_waiting()  # what the backward that was cut short brought is scaled too
            raise
        finally:
            self.loss_is_scaled, self._scales = before

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Engine.scaled`."""
        scaled = loss * self.loss_scale.value
        if scaled.requires_grad:
            scaled.register_hook(self._scaled_backward_begins)
        return scaled

    def _scaled_backward_begins(self, gradient: torch.Tensor) -> None:
        """A hook of a scaled loss: the backward that has just begun is of it."""

        def over() -> None:
            """Nothing is left to do."""

        torch.autograd.Variable._execution_engine.queue_callback(over)
        self.loss_is_scaled, self._scaled_backward = True, weakref.ref(over)

    def backward_begins(self) -> None:
        """An outermost backward reached the model. Whether it is of a scaled loss the one before it does not say: that may have
        left no gradient, as `torch.autograd.grad`, or have been cut short."""
        self.check()
        self.loss_is_scaled = self._scales or self._scaled_backward() is not None

    def set_loss_scale(self, value: float) -> None:
        """See `Engine.loss_scale`."""
        if not math.isfinite(value) or value <= 0:
            raise UsageError(f"loss_scale={value!r} is no positive number: set one above 0.")
        if self.is_within_step:
            raise UsageError("loss_scale was set while gradients of the former scale wait for a step: set it after the step.")
        self.loss_scale.value = float(value)

    def require_scaled_loss(self) -> None:
        """Raise where the gradients that come lack the loss scale."""
        if self.loss_scale.value != 1.0 and not self.loss_is_scaled:
            raise UsageError(
                f"Loss scaling is required: fp16 gradients need the loss scale ({self.loss_scale.value:g}): call "
                "engine.backward(loss) instead of loss.backward()."
            )

    def zero_grad(self, set_to_none: bool = True, besides: Collection[ParameterInfo] = ()) -> None:
        """Drop every gradient that no update has taken yet; without `set_to_none` put zeros where there was one. `besides`:
        what the optimizer has and does not train yet. Those of other parameters are the user's."""
        self.check()
        self.loss_is_scaled = False  # of a backward that was cut short
        self._clip_once = None  # of the gradients that are dropped
        with self.failures():
            self._gradient_sync.settle()
            self.parameter_gradients.adopt()
            self.speculation.drop()
            if not set_to_none:
                self._residency.finish_updates()
                # Now: after this a rank may be in a collective of the loop's own, where it gives others nothing.
                self.meet(MeetingPoint.PUTTING_ZEROS)
                self._settle_shards()
            self.parameter_gradients.drop(set_to_none, besides)

    def clip_at_step(self, max_norm: float) -> float:
        """Have the coming step clip to `max_norm`, if there are gradients; return the norm before clipping."""
        self.parameter_gradients.require_new("clip_grad_norm_()")
        with self.failures():
            self.speculation.undo_if_changed()
            self.parameter_gradients.take_assigned()
        norm = self._measure_now()
        self._clip_once = max_norm if norm else None
        return norm

    def _measure_now(self) -> float:
        self.check()
        with self.failures():
            self.speculation.undo_if_changed()
            self.grad_norm = self._measure_norm(MeetingPoint.CLIPPING)
        return self.grad_norm

    def _measure_norm(self, point: MeetingPoint, argument: int = 0) -> float:
        """The global L2 norm of the gradients as they stand, un-scaled; on several ranks, once all are at `point` with the same
        `argument`."""
        return norm_of(self.parameter_gradients.sum_of_squares(point, argument), self.loss_scale.value)

    # ---- step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Turn the gradients into updates; see the module for when they run."""
        self.check()
        require_stack()
        if self._maker is None:
            raise UsageError("step was called, but offload.initialize was given no optimizer: pass one to train.")
        if self.lender.lends_any:
            raise UsageError(
                "step was called inside `with engine.gathered(...)`, where values are lent: call it after the block."
            )
        self.parameter_gradients.require_new("optimizer.step()")
        self._maker.check_groups()
        with self.failures():
            self.speculation.undo_if_changed()
            self.finish_updates()
            self.parameter_gradients.take_assigned()
            argument = self._digest(self._maker) if self._meeting.waits_for_others else 0
            with self._timeline.waiting("gradients"):
                norm = self._measure_norm(MeetingPoint.STEP, argument)
            clip = self._clip(norm)
            self.speculation.norm_is_known(changes=clip != 1.0)
            if not math.isfinite(norm):
                self._leave_out_step()
                return
            self._enqueue(self._maker, clip / self.loss_scale.value)
            self.loss_scale.step_was_finite()
            self._finish_step()

    def _digest(self, maker: UpdateMaker) -> int:
        """Of what all ranks are to make the step with: where it differs their weights would."""
        clipping = self._clip_once, self._max_grad_norm, self.parameter_gradients.clipping.factor()
        return zlib.crc32(repr((maker.numbers(), clipping, self.loss_scale.value)).encode())

    def _clip(self, norm: float) -> float:
        """What the gradients are multiplied by; NaN where their norm is not finite."""
        max_norm = self._clip_once if self._clip_once is not None else self._max_grad_norm
        max_norm = self.parameter_gradients.clipping.max_norm(norm, max_norm)
        self._clip_once = None
        self.grad_norm = norm
        if not math.isfinite(norm):
            return math.nan
        return clip_factor(norm, max_norm) if max_norm is not None else 1.0

    def _enqueue(self, maker: UpdateMaker, factor: float) -> None:
        assert self._chunk_gradients is not None and self._updates is not None
        updated, coming = self.speculation.confirm()
        live = self.parameter_gradients.live()
        if updated:
            live = [info for info in live if info.index not in updated]
        self._chunk_gradients.consume(live)
        coming.update(maker.make(live, factor))
        self._accelerator.copy_in_after_compute()  # the lane may bring what an update needs as soon as it is enqueued
        for unit in self._residency.update_order() if coming else ():
            if unit in coming:
                self._updates.enqueue(unit, coming[unit])

    def _finish_step(self) -> None:
        assert self._updates is not None
        self.parameter_gradients.end_step()
        self.uses.abandon()  # of a backward that an exception cut short: what is in use is not fetched anew
        self._gradient_sync.end_step()
        self._residency.end_step()
        self._updates.read_ahead()
        self._residency.bring_first()
        self._residency.launch_resident()
        self._residency.fetch_first()
        for unit in self._updates.pending_units:
            if not unit.uses.count:
                unit.close_off()
        self._residency.bring_persistent()

    def _leave_out_step(self) -> None:
        assert self._chunk_gradients is not None
        listed = some_of(self._chunk_gradients.non_finite_parameters(), _NAMED) or "parameters in the shards of other ranks"
        if not self.loss_scale.skips:
            raise NonFiniteGradientError(
                f"the gradients of {listed} hold inf or NaN (step {self.step_count}). To leave such steps out set "
                "Config(loss_scale='skip'); to find the cause use torch.autograd.detect_anomaly()."
            )
        self.loss_scale.step_overflowed()
        self.zero_grad()
        self._residency.end_step()
        if self.loss_scale.is_hopeless:
            raise NonFiniteGradientError(
                f"the gradients of {listed} hold inf or NaN, and did in {self.loss_scale.lost_step_count} steps in a row, at a "
                f"loss scale of {self.loss_scale.value:g} that goes no lower: nothing is trained any more. Look for the cause "
                "with torch.autograd.detect_anomaly(), or go back to a checkpoint; dtype='bf16' overflows where fp32 does."
            )
