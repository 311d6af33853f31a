"""What happens in a training loop: gradients are taken over as backward computes them, a step turns them into updates.

With `update="step"` all updates are enqueued at `step()`, in the order in which the next forward needs them, and run
under it. With `update="backward"` a unit's update is enqueued when backward has left the unit and all its gradients are
there, if it can be undone: the norm may clip or leave out the step, and whatever looks at the weights before `step()` is to see
the old ones (`offload.step.speculation`). Where it cannot be undone it is enqueued at `step()`: the mode never changes a
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.device.rules import Hyper
from offload.errors import NonFiniteGradientError, UsageError
from offload.model.flat import ParameterInfo, some_of
from offload.model.taken_gradient import TakenGradient
from offload.model.unit import ShardState, Unit
from offload.model.update import chunk_updates
from offload.ranks.agreement import MeetingPoint
from offload.step.components import Components
from offload.step.failure_state import FailureState
from offload.step.homes import Homes
from offload.step.hooks import Hooks, cast_floating
from offload.step.loss_scale import LossScale
from offload.step.micro_batches import MicroBatches
from offload.step.norm import clip_factor, norm_of
from offload.step.speculation import Speculation
from offload.step.token_clipping import TokenClipping

_NAMED = 5
"""How many names an error message lists."""


class Training(FailureState):
    """See the module. Owned by the thread that drives the model; hooks run in it or in autograd's."""

    def __init__(self, parts: Components, loss_scale: LossScale, *, norm_counts: bool = True) -> None:
        """`norm_counts`: whether the norm may change what a step does."""
        super().__init__(parts.meeting, backward_elsewhere=parts.accelerator.device.type != "cpu")
        self._units, self._residency, self._parameters = parts.units, parts.residency, parts.parameters
        self._gradients, self._updates = parts.gradients, parts.updates
        self._ranks, self._intake = parts.ranks, parts.intake
        self._places, self._records = parts.parameter_store, parts.records
        self._accelerator, self._timeline = parts.accelerator, parts.timeline
        self._memory_is_short = parts.parameter_store is not None or parts.placement.uses_nvme
        self._homes, self.micro_batches = Homes(parts), MicroBatches(parts)
        self.loss_scale = loss_scale
        self.max_grad_norm: float | None = None
        self.input_dtype: torch.dtype | None = None
        self.speculation = Speculation(parts, norm_counts=norm_counts)
        parts.residency.before_use = self._undo_for
        self.hyper_of: Callable[[int], Hyper] | None = None
        self.step_count = 0
        self.grad_norm: float | None = None
        self.synchronizing = True
        self.backward_updates = False
        self.check_unchanged: Callable[[], None] | None = None
        self.refit: Callable[[], Hooks | None] | None = None
        """Makes room for the states of what is newly trained; the hooks that then take the place of the present ones."""
        self.before_step: Callable[[], None] | None = None
        """Raises what is to be known before anything of a step is done."""
        self._scaled_backward = False
        self._group_indices = sorted({info.group_index for info in parts.parameters if info.group_index is not None})
        self._late = parts.expected.late_units
        self._clip_once: float | None = None
        self._consumed: dict[int, TakenGradient] = {}
        """While PyTorch accumulates into a gradient that the last step consumed: its token. PyTorch would add to it, so what
        comes is dropped, and whatever would use the sum raises (`_require_new_gradients`)."""
        self._token_clipping = TokenClipping(parts.parameters, self._live_parameters, self._measure_now)
        self._flat_of = {info.index: flat for unit in parts.units for flat in unit.flats for info in flat.parameters}

    # ---- forward and backward ------------------------------------------------------------------------------------

    def bring_in(self, parameter_index: int) -> None:
        """A guarded parameter's value is asked for (`Residency.bring_in`)."""
        with self.failures():
            self._residency.bring_in(self._parameters[parameter_index])

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args, kwargs) if self.input_dtype is None else cast_floating(args, kwargs, self.input_dtype)

    def forward_begins(self) -> Hooks | None:
        self.check()
        return self.refit() if self.refit is not None and torch.is_grad_enabled() else None

    def forward_ended(self) -> None:
        # What this forward did not use (an expert, a head) is not updated under it: do it now.
        self._finish_updates()

    def forward_wrote(self, info: ParameterInfo) -> None:
        """Carry all its values home: of fp32 parameters, and of what is not trained, that is exactly what was written."""
        wrote = f"a forward wrote to parameter {info.fqn!r} in place"
        instead = "Write to it between steps, inside `with engine.gathered([parameter]):`."
        if self._ranks.world_size > 1:
            raise UsageError(f"{wrote}: each rank's would write something else to what all share. {instead}")
        if info.trainable and info.dtype != torch.float32:
            raise UsageError(f"{wrote}, which its fp32 master does not see: its next update would undo it. {instead}")
        if self._updates is not None and self._updates.watcher is not None:
            raise UsageError(f"{wrote} while a save with wait=False copies it: wait for the save first. {instead}")
        self._homes.write(info, torch.ones(info.numel, dtype=torch.bool))

    def backward_begins(self) -> None:
        self.check()
        self.micro_batches.backward_begins()

    def version_of(self, unit: Unit) -> int:
        return unit.version

    def backward_reaches(self, unit: Unit, version: int | None) -> None:
        self._undo_for(unit)
        if version is not None and version != unit.version:
            raise UsageError(
                f"backward reached unit {unit.name} through a forward that ran before optimizer.step() (a load, a write): its "
                "parameters have changed since. Run the forward again after the step."
            )
        if self._memory_is_short:
            self._accelerator.about_to_allocate(unit.largest_gradient_nbytes)

    def gradient_coming(self, unit: Unit, info: ParameterInfo) -> None:
        if self._gradients is None:
            raise UsageError("backward was called, but offload.initialize was given no optimizer: pass one to train.")
        if self.loss_scale.value != 1.0 and not self._scaled_backward:
            raise UsageError(
                f"fp16 gradients need the loss scale ({self.loss_scale.value:g}): call engine.backward(loss) instead "
                "of loss.backward()."
            )
        self._undo_for(unit)
        if unit.update is not None:
            raise UsageError(
                f"a gradient of {info.fqn!r} came from a forward that ran before optimizer.step(), whose update of it has not "
                "ended yet. Run the forward again after the step."
            )
        live, gradient = self._gradients.is_live(info), info.parameter.grad
        self._consumed.pop(info.index, None)
        if isinstance(gradient, TakenGradient) and not live:
            self._consumed[info.index], info.parameter.grad = gradient, None
            return
        self.micro_batches.gradient_coming(info, is_second=live)
        if isinstance(gradient, TakenGradient):
            if gradient.factor != 1.0:
                raise UsageError(
                    f"backward reached {info.fqn!r} after its gradient was clipped. PyTorch would add to that; here the "
                    "step clips. Clip after the last backward of the step."
                )
            info.parameter.grad = None

    def gradient_arrived(self, unit: Unit, info: ParameterInfo) -> None:
        assert self._gradients is not None
        gradient, consumed = info.parameter.grad, self._consumed.pop(info.index, None)
        if consumed is not None:
            info.parameter.grad = consumed
        elif gradient is not None:
            with self._timeline.working("gradients"):
                self._take_over(unit, info, gradient, owned=True)
        if gradient is None:
            return  # a function of the user's has none to give
        self._residency.go_on()
        if self._memory_is_short and gradient.layout is torch.strided:
            self._accelerator.about_to_free(gradient.nbytes)

    def _take_over(self, unit: Unit, info: ParameterInfo, gradient: torch.Tensor, *, owned: bool) -> None:
        assert self._gradients is not None
        unit.shard.become(ShardState.REDUCING)
        flat, is_part = self._flat_of[info.index], self.micro_batches.began_now(info)
        self._intake.arrive(info, flat, gradient, owned=owned, is_part=is_part)
        info.parameter.grad = self._token_clipping.token(info, self.step_count)

    def backward_leaves(self, unit: Unit) -> None:
        # Late units wait for the end of backward: what modules share gets more after one of them is done, and in the root a
        # reentrant checkpoint's backward inside this one may accumulate a second time.
        if not self.synchronizing:
            return
        self._intake.leave(unit)
        if self.backward_updates and self._gradients is not None and unit.index not in self._late:
            if not all(self._gradients.is_complete(one) for one in unit.trained_chunks):
                return
            if self.speculation.may_begin(unit) and not self._residency.holds_any:  # where values are lent
                live = [info for info in unit.parameters if info.trainable and self._gradients.is_live(info)]
                self._enqueue(live, 1.0 / self.loss_scale.value, undoable=True)
                self._launch()

    def backward_ended(self) -> None:
        self._scaled_backward = False
        if self.synchronizing:
            self._intake.end()
            self._adopt_reduced()

    def _undo(self) -> None:
        """Undo what was updated before the norm was known."""
        for unit in self.speculation.undo():
            unit.version -= 1
            unit.shard.become(ShardState.REDUCING)

    def _undo_for(self, unit: Unit) -> None:
        """The unit is about to be used: by anything but the next step, if its update may still be undone."""
        if unit.early is not None:
            self._undo()

    def _undo_if_changed(self) -> None:
        """Undo it if the step is to do something else now."""
        if self.hyper_of is not None and not self.speculation.holds(self.hyper_of):
            self._undo()

    @contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Gradients that arrive inside are of a loss multiplied by the loss scale."""
        before, self._scaled_backward = self._scaled_backward, True
        try:
            yield
        finally:
            self._scaled_backward = before

    def scaled_backward_begins(self, gradient: torch.Tensor) -> None:
        """A hook of a scaled loss: the backward that has just begun is of it."""
        self._scaled_backward = True

    # ---- between steps -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Run every update that is enqueued; the tiers then hold the state after the last step. Raises failed writes."""
        self._undo()
        self._finish_updates()

    def _finish_updates(self) -> None:
        """Of the last step."""
        self._residency.finish_updates(besides=self.speculation.units)
        self._settle_shards()
        for places in (self._places, self._records):
            if places is not None:
                places.raise_failed_writes()

    @property
    def is_within_step(self) -> bool:
        """Whether gradients wait for `step`, or updates of a step that is not over have begun (update="backward")."""
        given = any(
            info.trainable and info.parameter.grad is not None and not isinstance(info.parameter.grad, TakenGradient)
            for unit in self._units
            for info in unit.parameters
        )
        return given or self.speculation.has_begun or (self._gradients is not None and bool(self._gradients.live_parameters()))

    def restart(self, step_count: int) -> None:
        """Drop every gradient and what has begun of a step: the state is about to be that after `step_count` steps."""
        self._clip_once = self.grad_norm = None
        self.zero_grad()
        self.speculation.restart()
        self.step_count = step_count
        self.values_changed()
        self._residency.end_step()

    def values_changed(self, unit: Unit | None = None) -> None:
        """By a load, or of one unit by the user: what forward computed before is of other values."""
        for changed in self._units if unit is None else (unit,):
            changed.version += 1

    # ---- step ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient that no update has taken yet; without `set_to_none` put zeros where there was one."""
        self.check()
        self._scaled_backward = False  # of a backward that was cut short
        self._clip_once = None  # of the gradients that are dropped
        self._intake.settle()
        self._adopt_reduced()
        with self.failures():
            self._undo()
            self.speculation.end_step()
            if not set_to_none:
                self._residency.finish_updates()
                self._settle_shards()
            for unit in self._units:
                for info in unit.parameters:
                    self._zero(unit, info, set_to_none)
                if set_to_none and unit.shard.state is ShardState.REDUCING:
                    unit.shard.become(ShardState.CLEAN)

    def _zero(self, unit: Unit, info: ParameterInfo, set_to_none: bool) -> None:
        had_gradient = info.parameter.grad is not None
        self._intake.drop(info)
        info.parameter.grad = None
        if had_gradient and not set_to_none:
            zeros = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=info.parameter.device).zero_()
            if info.trainable:
                self._take_over(unit, info, zeros, owned=True)
            else:
                info.parameter.grad = zeros

    def measure_norm(self, point: MeetingPoint) -> float:
        """The global L2 norm of the gradients as they stand, un-scaled; on several ranks, once all are at `point`."""
        return norm_of(self._intake.sum(point, self._squares), self.loss_scale.value)

    def _squares(self) -> list[torch.Tensor]:
        assert self._gradients is not None
        self._adopt_reduced()
        self._gradients.settle()
        self._gradients.live_parameters()  # forgets those that the user took out of p.grad
        return self._gradients.squares()

    def _adopt_reduced(self) -> None:
        """Gradients that other ranks computed count here too."""
        for index in self._intake.newly_present():
            info = self._parameters[index]
            if info.parameter.grad is None and self._gradients is not None:
                self._gradients.expect(info)
                self._units[info.unit_index].shard.become(ShardState.REDUCING)
                info.parameter.grad = self._token_clipping.token(info, self.step_count)

    def clip_at_step(self, max_norm: float) -> float:
        """Have the coming step clip to `max_norm`, if there are gradients; return the norm before clipping."""
        self._require_new_gradients("clip_grad_norm_()")
        with self.failures():
            self._undo_if_changed()
            self._take_user_gradients()
        norm = self._measure_now()
        self._clip_once = max_norm if norm else None
        return norm

    def _measure_now(self) -> float:
        self.check()
        with self.failures():
            self._undo_if_changed()
            self.grad_norm = self.measure_norm(MeetingPoint.CLIPPING)
        return self.grad_norm

    def _live_parameters(self) -> list[ParameterInfo]:
        return self._gradients.live_parameters() if self._gradients is not None else []

    def step(self) -> None:
        """Turn the gradients into updates; see the module for when they run."""
        self.check()
        if self._gradients is None or self._updates is None:
            raise UsageError("step was called, but offload.initialize was given no optimizer: pass one to train.")
        if self._residency.holds_any:
            raise UsageError(
                "step was called inside `with engine.gathered(...)`, where values are lent: call it after the block."
            )
        if self.before_step is not None:
            self.before_step()
        if self.check_unchanged is not None:
            self.check_unchanged()
        self._require_new_gradients("optimizer.step()")
        assert self.hyper_of is not None
        for group_index in self._group_indices:
            self.hyper_of(group_index)  # raises where its numbers make no sense
        with self.failures():
            self._undo_if_changed()
            self._finish_updates()
            self._take_user_gradients()
            with self._timeline.waiting("gradients"):
                norm = self.measure_norm(MeetingPoint.STEP)
            max_norm = self._clip_once if self._clip_once is not None else self.max_grad_norm
            max_norm = self._token_clipping.max_norm(norm, max_norm)
            self._clip_once = None
            self.grad_norm = norm
            is_finite = math.isfinite(norm)
            clip = clip_factor(norm, max_norm) if max_norm is not None and is_finite else 1.0
            self.speculation.strikes.record(clip != 1.0 or not is_finite)
            if clip != 1.0 or not is_finite:
                self._undo()
            if not is_finite:
                self._non_finite_step()
                return
            updated = self.speculation.confirm()
            live = [info for info in self._gradients.live_parameters() if info.index not in updated]
            if live:
                self._enqueue(live, clip / self.loss_scale.value)
            self.loss_scale.step_was_finite()
            self._finish_step()

    def _require_new_gradients(self, what: str) -> None:
        """PyTorch would use the last step's gradients again; here that step has consumed them."""
        old = [
            info.fqn
            for info in self._parameters
            if isinstance(info.parameter.grad, TakenGradient) and info.parameter.grad.step_index != self.step_count
        ]
        if old:
            raise UsageError(
                f"{what} was called while the gradients of {some_of(old, _NAMED)} were those of the last step. "
                "PyTorch would use them again, with what backward added since; here the step consumed them. Call "
                "optimizer.zero_grad() after each step; to apply a gradient twice, run forward and backward again."
            )

    def _finish_step(self) -> None:
        assert self._updates is not None
        self.step_count += 1
        self._residency.abandon_uses()  # of a backward that an exception cut short: what is in use is not fetched anew
        self._intake.end_step()
        self._residency.end_step()
        self._accelerator.copy_in_after_compute()
        self._updates.read_ahead()
        self._residency.bring_first()
        self._residency.launch_resident()
        for unit in self._updates.pending_units:
            if not self._residency.in_use(unit):
                self._residency.close_off(unit)

    def _non_finite_step(self) -> None:
        assert self._gradients is not None
        names = self._gradients.non_finite_parameters()
        listed = some_of(names, _NAMED) or "parameters in the shards of other ranks"
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
                f"the gradients of {listed} hold inf or NaN for the "
                f"{self.loss_scale.lost_step_count}th step in a row, at a loss scale of {self.loss_scale.value:g} that goes no "
                "lower: nothing is trained any more. Look for the cause with torch.autograd.detect_anomaly(), or go back to a "
                "checkpoint; dtype='bf16' overflows where fp32 does."
            )

    def _take_user_gradients(self) -> None:
        """A gradient that the user assigned to `p.grad` counts like one that backward computed."""
        for unit in self._units:
            for info in unit.parameters:
                gradient = info.parameter.grad
                if info.trainable and gradient is not None and not isinstance(gradient, TakenGradient):
                    assert self._gradients is not None
                    self._gradients.is_live(info)
                    self._take_over(unit, info, gradient, owned=False)

    def _launch(self) -> None:
        self._accelerator.copy_in_after_compute()
        self._residency.launch_resident()

    def _enqueue(self, live: list[ParameterInfo], factor: float, *, undoable: bool = False) -> None:
        """`undoable`: all of one unit, before the norm is known."""
        assert self._gradients is not None and self._updates is not None and self.hyper_of is not None
        hypers = {index: self.hyper_of(index) for index in {info.group_index for info in live if info.group_index is not None}}
        steps: dict[int, tuple[Hyper, int]] = {}
        for info in live:
            assert info.group_index is not None
            info.step += 1
            steps[info.index] = (hypers[info.group_index], info.step)
            if not undoable:
                self._gradients.consume(info)
        self._intake.forget(live)
        touched = {info.unit_index for info in live}
        for unit in self._residency.next_order():
            if unit.index in touched:
                unit.version += 1
                unit.shard.become(ShardState.REDUCING)
                unit.shard.become(ShardState.UPDATING)
                updates = chunk_updates(unit.trained_chunks, steps, factor)
                if undoable:
                    self.speculation.begin(unit, live, updates, hypers)
                self._updates.enqueue(unit, updates)

    def _settle_shards(self) -> None:
        for unit in self._units:
            if unit.update is None and unit.shard.state is ShardState.UPDATING:
                unit.shard.become(ShardState.CLEAN)
