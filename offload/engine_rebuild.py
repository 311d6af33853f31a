# SPDX-License-Identifier: Apache-2.0
"""An engine rebuilt behind its face: it has one set of parts at a time, which has the model, and another takes it over.

That is so for what is newly trained, whose states need room; where budgets are given and a step turned out to have more
micro-batches than states were placed for; and after a failure, when a load brings back a state.
"""

from __future__ import annotations

import logging
import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from offload.build.refitting import rebuild, refitted, routes_for
from offload.checkpoint.carry_over import has_room, passing_checkpoint
from offload.checkpoint.matching import StatesMissing
from offload.config import Config
from offload.deferred_init.held_tensors import Slot
from offload.errors import OffloadError, UsageError
from offload.model.optimizer import OffloadOptimizer
from offload.model.taken_gradient import TakenGradient
from offload.planning.free_memory import FreeMemory
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components, give_back
from offload.step.hooks.module_hooks import Hooks
from offload.step.thread_safety.held_interrupt import HeldInterrupt
from offload.step.thread_safety.taking_turns import Turn
from offload.taken_model import GivingUp, TakenModel

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Rebuilding:
    """See the module. `current` has the model now. Owned by the thread that drives the model."""

    def __init__(
        self, model: nn.Module, optimizer: OffloadOptimizer | None, config: Config, parts: Components, slots: Sequence[Slot]
    ) -> None:
        """Takes the model and the optimizer last of all, and begins. Until they are kept (`TakenModel.keep`) it undoes that to
        close `parts.made`."""
        self._model, self._optimizer, self._config = model, optimizer, config
        self._turn = Turn(backward_elsewhere=parts.accelerator.device.type != "cpu")
        self._planned_for = config.micro_batches
        """Micro-batches a step: as many as places were decided for, or were found to be no reason for others."""
        self._step_of_forward = -1
        """How many steps were done when the last forward that was recorded began."""
        self.current = self._made_of(parts)
        parts.made.append(GivingUp(self.current))
        self._take(slots)
        self.current.begin()

    def _made_of(self, parts: Components) -> TakenModel:
        reference = weakref.ref(self)

        def successor() -> Hooks | None:
            rebuilding = reference()
            return rebuilding._anew() if rebuilding is not None else None

        return TakenModel(self._model, self._optimizer, self._config, parts, successor, self._turn)

    def _take(self, slots: Sequence[Slot] = ()) -> None:
        self.current.take(slots)
        if self._optimizer is not None:
            self._optimizer.stepper = self.current

    def _hand_over(self, parts: Components) -> None:
        """What has the model is the current one, also where an interrupt comes here: a load ends it."""
        self.current = self._made_of(parts)
        self._take()
        self.current.commit()

    def _anew(self) -> Hooks | None:
        """At the begin of a forward."""
        return self._fit_newly_trained() or self._plan_for_micro_batches()

    # ---- what is newly trained -----------------------------------------------------------------------------------

    def _fit_newly_trained(self) -> Hooks | None:
        """At the begin of a forward: give states to what was unfrozen or added to the optimizer since the last one."""
        found = self.current.newly_trained()
        if not found:
            return None
        names = f"parameter {found[0].fqn!r} was unfrozen or added to the optimizer"
        if self.current.training.is_within_step or self.current.training.lender.lends_any:
            raise UsageError(
                f"{names} while gradients wait for a step, or inside engine.gathered: do that between optimizer.step() and the "
                "next forward."
            )
        self._refit({info.index for info in found}, self._as_placed())
        return self.current.hooks

    def _as_placed(self) -> Config:
        """The configuration with the tiers that it was placed in."""
        placement = self.current.parts.placement
        return replace(self._config, parameters=placement.parameters, optimizer_states=placement.optimizer_states)

    def with_states(self, load: Callable[[], T]) -> T:
        """`load`, once there are states for what it brings states of."""
        try:
            return load()
        except StatesMissing as missing:
            self.current.training.zero_grad()
            self._refit(missing.parameter_indices, self._as_placed())
        return load()

    def _refit(self, trained: Collection[int], config: Config, free: FreeMemory | None = None) -> None:
        """Make the parts anew, as `refitted` does, with states for the parameters of these indices too, and carry everything
        over. Where there is no room for them all is as it was; Ctrl-C waits until it is, or all is new. On several ranks all of
        them come here with the same parameters."""
        parts = self.current.parts
        parts.meeting.meet(MeetingPoint.UNFREEZING, argument=zlib.crc32(repr(sorted(trained)).encode()))
        held = HeldInterrupt()
        try:
            with passing_checkpoint(self._config, parts.ranks, parts.meeting) as path:
                self.current.checkpointing.save(path, None, None)
                if not parts.meeting.waits_for_others:
                    held.begin()  # until nothing is left of what passed, too
                self._exchange_parts(path, trained, config, free)
        finally:
            held.end()

    def _exchange_parts(self, path: Path, trained: Collection[int], config: Config, free: FreeMemory | None) -> None:
        optimizer = self._optimizer
        assert optimizer is not None, "without one nothing is trained"
        parts, training = self.current.parts, self.current.training
        # Those of what is not trained are the user's; the others a step has consumed.
        own = {info.index: info.parameter.grad for info in parts.parameters}
        failure: Exception | None = None
        try:
            # Also for the parts as they were: where one rank is gone by then, no connection is waited for.
            ranks, others = parts.meeting.alongside(
                MeetingPoint.UNFREEZING, lambda: (parts.ranks.renewed(), parts.ranks.renewed())
            )
            self.current.end()
            try:
                made = refitted(parts, config, optimizer.moments, optimizer.param_groups, trained, ranks, free)
            except Exception as error:
                failure, made = error, rebuild(parts, self._config, optimizer.moments, others)
            self._hand_over(made)
            self.current.checkpointing.load(path)
            made.meeting.meet(MeetingPoint.UNFREEZING)  # nobody reads it any more
        except BaseException as error:
            self.current.training.fail(error)
            raise
        training.retired = True
        now = self.current.training
        now.synchronizing, now.grad_norm = training.synchronizing, training.grad_norm
        for info in made.parameters:
            if isinstance(own[info.index], TakenGradient):
                now.parameter_gradients.put_consumed(info)
            else:
                info.parameter.grad = own[info.index]
        if failure is not None:
            raise failure

    # ---- what is newly known -------------------------------------------------------------------------------------

    def _plan_for_micro_batches(self) -> Hooks | None:
        """Once a step had at least twice as many micro-batches as places were decided for: have those that a loop gets that
        says so beforehand (`Config.expecting`), where budgets make them others. Only at the first forward after a step:
        backward may yet come through any other."""
        config, parts, training = self._config, self.current.parts, self.current.training
        count = training.parameter_gradients.micro_batches.of_last_step
        is_first, self._step_of_forward = training.step_count != self._step_of_forward, training.step_count
        if not is_first or count < 2 * self._planned_for or not self.current.is_between_steps:
            return None
        self._planned_for, expecting = count, config.expecting(count)
        verdict, optimizer = parts.placement.verdict, self._optimizer
        bounded = config.device_memory is not None or config.cpu_memory is not None
        if optimizer is None or verdict is None or not bounded or parts.ranks.world_size > 1:
            return None
        try:
            if routes_for(parts, expecting, optimizer.moments) == parts.placement.routes or not has_room(config, parts):
                return None
            _log.info("places are decided anew, for the %d micro-batches that a step has", count)
            self._refit((), expecting, verdict.free)
        except (OffloadError, OSError) as error:
            if self.current.training.has_failed:
                raise
            _log.warning("places stay as they were decided for fewer micro-batches than the %d a step has: %s", count, error)
            return None if self.current.parts is parts else self.current.hooks
        self._config = expecting
        return self.current.hooks

    # ---- after a failure -----------------------------------------------------------------------------------------

    @contextmanager
    def revived(self) -> Iterator[BaseException | None]:
        """A failed engine is made anew for the load inside, and stays unusable if that fails. Gives its failure."""
        self.current.training.check_process()
        failure = self.current.training.failure
        parts = self.current.parts
        if failure is None or self.current.training.closed or parts.ranks.world_size > 1:
            yield failure  # other ranks have left, or wait for no load
            return
        try:
            try:
                self.current.end()
            except Exception as error:  # of the state that is let go; what failed first is known
                warnings.warn(f"while what the failed engine held was given back: {error}", RuntimeWarning, stacklevel=4)
            moments = self._optimizer.moments if self._optimizer is not None else ()
            made = rebuild(parts, self._config, moments, parts.ranks.renewed())
            try:
                self._hand_over(made)
            except BaseException:
                give_back(made.made)
                raise
            yield failure
        except BaseException:
            self.current.training.failure = failure
            raise
