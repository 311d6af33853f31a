# SPDX-License-Identifier: Apache-2.0
"""A model and its optimizer in the hands of one set of parts: from the moment when they are taken until they are given back.

An engine has one at a time. It gets another where its parts are made anew: for what is newly trained, or after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build.assembly import DTYPES
from offload.build.ownership import Taking, disown
from offload.build.refitting import NewlyTrained
from offload.checkpoint.checkpoint import Checkpointing
from offload.checkpoint.export.exports import Exporting
from offload.checkpoint.format.values import read_values
from offload.config import Config
from offload.deferred_init.held_tensors import Slot
from offload.device.host_memory.memory_limits import host_memory_limit
from offload.device.recording import MAIN, WORK
from offload.errors import ParameterAccessError, UsageError
from offload.model.fingerprint import ModelFingerprint
from offload.model.flat import ParameterInfo
from offload.model.optimizer import OffloadOptimizer
from offload.model.peft_names import library_models
from offload.model.staying_places import StayingPlaces
from offload.model.taken_methods import Replacement, TakenMethods
from offload.profiling.profile import Profile
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.step.hooks.model_events import ModelEvents
from offload.step.hooks.module_hooks import Hooks
from offload.step.parameter_access.gathering import Gathering
from offload.step.parameter_access.named_states import NamedStates
from offload.step.thread_safety.held_interrupt import HeldInterrupt
from offload.step.thread_safety.taking_turns import Turn
from offload.step.timeline import LinkMeter
from offload.step.training import Training


class GivingUp:
    """Of a model and its optimizer on their way into an engine's hands: closing it undoes the way."""

    def __init__(self, taken: TakenModel) -> None:
        self._taken = taken

    def close(self) -> None:
        self._taken.give_up()


class TakenModel:
    """See the module. Owned by the thread that drives the model. It is what steps the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OffloadOptimizer | None,
        config: Config,
        parts: Components,
        successor: Callable[[], Hooks | None],
        turn: Turn,
    ) -> None:
        """`successor`: as of `Hooks`. `turn`: the same for all of an engine's."""
        self._model, self._optimizer = model, optimizer
        self.parts, self.links = parts, LinkMeter(parts.timeline, parts.backend)
        self.training = Training(parts, config, optimizer.hyper_of if optimizer is not None else None, turn)
        self.gathering = Gathering(parts, self.training)
        self.named = NamedStates(parts, self.training, self.gathering)
        self.checkpointing = Checkpointing(parts, self.training, self.gathering, model, optimizer)
        self.profile: Profile | None = None
        """The last one that was asked for."""
        self.exporting = Exporting(parts, self.training, self.gathering, self.checkpointing, model)
        self._newly_trained: NewlyTrained | None = None
        self._fingerprint: ModelFingerprint | None = None
        self._places = StayingPlaces(parts.parameters)
        self._by_id = {id(info.parameter): info for info in parts.parameters}
        if optimizer is not None:
            self._newly_trained = NewlyTrained(parts.parameters, lambda: optimizer.param_groups)
            self._fingerprint = ModelFingerprint(model, parts.parameters, lambda: optimizer.param_groups)
        input_dtype = DTYPES[config.dtype] if config.dtype is not None else None
        events = ModelEvents(parts, self.training, input_dtype=input_dtype)
        self.hooks = Hooks(parts.units, self.training, events, successor)
        self._methods: list[TakenMethods] = []
        self._taking: Taking | None = None
        """Until the model is kept: what `give_up` goes by."""

    def take(self, slots: Sequence[Slot]) -> None:
        """Take the model. `slots`: what is to be set in it besides. `keep` or `give_up` is to follow."""
        model, parts = self._model, self.parts
        parts.accelerator.wait_for_all()  # the loop may run on another stream than this call
        self._taking = Taking(model, parts, slots)
        self._taking.take(self.training, self.hooks)
        models = library_models(model)
        for one in models.values():
            self._replace(one, self.exporting.replaced_methods(one))
        for one in ({"": model} | models).values():
            self._replace(one, {"generate": self._generate}, set_too=True)

    def _replace(self, model: nn.Module, replacements: Mapping[str, Replacement], *, set_too: bool = False) -> None:
        self._methods.append(TakenMethods(model))
        self._methods[-1].take(model, replacements, set_too=set_too)

    def begin(self) -> None:
        """Bring in what is there between steps too."""
        with self.training.failures():
            self.parts.residency.bring_persistent()

    def commit(self) -> None:
        """They are taken for good. What the parameters held is let go."""
        self._taking = None

    def give_up(self) -> None:
        """Model and optimizer are as they were before `take`, however far that came, unless that was committed."""
        if self._taking is None:
            return
        for methods in self._methods:
            methods.give_back()
        self._taking.undo()
        if self._optimizer is not None:
            self._optimizer.disown()

    # ---- what steps the optimizer --------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Steps done."""
        return self.training.step_count

    def step(self) -> None:
        """See `Training.step`. Raises first what is to be known before anything is done."""
        self.training.check()
        self.checkpointing.saver.raise_unseen()
        self._check_fingerprint()
        recording = self.training.recorder.to
        if recording is None:
            self.training.step()
            return
        with recording.span(MAIN, WORK, "step"):
            self.training.step()
        if self.profile is not None and self.profile.is_recording:
            self.profile.step_ended()

    def clip_at_step(self, max_norm: float) -> float:
        """See `Training.clip_at_step`. Raises where the step would, so that the norm is of all that it would use."""
        self.training.check()
        self._check_fingerprint()
        return self.training.clip_at_step(max_norm)

    def _check_fingerprint(self) -> None:
        """Raise where the model or the optimizer's groups are not what the engine was made for, or lie elsewhere."""
        self._places.check()
        if self._fingerprint is not None:
            self._fingerprint.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `Training.zero_grad`."""
        besides = self._newly_trained.without_states() if self._newly_trained is not None else ()
        self.training.zero_grad(set_to_none, besides)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """See `Engine.resident`."""
        training, residency = self.training, self.parts.residency
        with training.failures():
            free = self.parts.accelerator.free_nbytes()
            before = residency.begin_staying((host_memory_limit().free_nbytes if free is None else free) // 2)
        try:
            yield
        finally:
            if training.is_usable:  # else nothing stays, or what failed is on its way to the user
                with training.failures():
                    residency.end_staying(before)

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """See `Engine.gathered`."""
        infos: list[ParameterInfo] = []
        for position, parameter in enumerate(params):
            if not self.owns(parameter):
                raise ParameterAccessError(f"parameter {position} given to gathered is not a parameter of this engine's model.")
            infos.append(self._by_id[id(parameter)])
        # What is written inside goes around the updates.
        return self.gathering.gathered(infos, first=self.checkpointing.saver.settle)

    def state_dict(self, full: bool = True, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """See `Engine.state_dict`."""
        ranks = self.parts.ranks
        wanted = (lambda _: ranks.index == 0) if rank0_only else (lambda place: full or place % ranks.world_size == ranks.index)
        return self.gathering.state_dict(self._model, wanted)

    def values_of(self, checkpoint: Path, strict: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What `Engine.load_values` sets: of a strict load this rank's share; and the client_state."""
        index, count = self.parts.ranks.index, self.parts.ranks.world_size
        state, manifest = read_values(checkpoint, lambda position: not strict or position % count == index)
        if not strict:
            own = self.state_dict()
            state = own | {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
        elif any(manifest.leaves_out(one) for one in manifest.parameters):
            frozen = {fqn for one in manifest.parameters if manifest.leaves_out(one) for fqn in one.fqns}
            state |= {name: value for name, value in self.state_dict(rank0_only=True).items() if name in frozen}
        return state, manifest.client_state

    def info_of(self, parameter: nn.Parameter) -> ParameterInfo:
        """What the engine knows of one of the model's."""
        if not self.owns(parameter):
            raise ParameterAccessError("the parameter given is not one of this engine's model.")
        return self._by_id[id(parameter)]

    def _generate(self, own: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        with self.resident():
            return own(*args, **keywords)

    def owns(self, parameter: object) -> bool:
        """Whether it is one of the model's."""
        return id(parameter) in self._by_id

    def begin_profile(self, config: Config, path: Path, steps: int | None) -> Profile:
        """See `Engine.profile`."""
        if self.profile is not None and self.profile.is_recording:
            raise UsageError(f"a profile is being recorded, for {str(self.profile.path)!r}: close it before the next.")
        self.profile = Profile(self.parts, config, path, steps)
        return self.profile

    # ---- the end -------------------------------------------------------------------------------------------------

    @property
    def is_between_steps(self) -> bool:
        """Whether nothing is under way that parts made anew would cut short: gradients, lent values, a profile."""
        profiles = self.profile is not None and self.profile.is_recording
        return not (self.training.is_within_step or self.training.lender.lends_any or profiles)

    def newly_trained(self) -> list[ParameterInfo]:
        """What was unfrozen or added to the optimizer, and has no states."""
        return self._newly_trained.find() if self._newly_trained is not None else []

    def close(self) -> None:
        """`end`; the model is no engine's then."""
        self.training.closed = True
        disown(self.parts)
        try:
            self.end()
        finally:
            for unit in self.parts.units:
                unit.leave()

    def end(self) -> None:
        """Give back everything that was taken; the first failure of it is raised after all of it."""
        try:
            if self.profile is not None:
                self.profile.close()
        finally:
            self._end()

    def _end(self) -> None:
        parts = self.parts
        for methods in self._methods:
            methods.give_back()
        self.hooks.remove()
        self.training.uses.abandon()
        held = HeldInterrupt()
        try:
            self.checkpointing.saver.close()
        finally:
            if not parts.meeting.waits_for_others:
                held.begin()
            try:
                self._give_back()
            finally:
                held.end()

    def _give_back(self) -> None:
        parts = self.parts
        failure: BaseException | None = self.training.untold
        try:
            if self.training.failure is None:
                with self.training.turn_of_its_own():  # another thread may be in the middle of an evaluation
                    parts.residency.finish_updates()
                parts.meeting.meet(MeetingPoint.CLOSING)
                for store in (parts.parameter_store, parts.records):
                    if store is not None:
                        store.settle_writes()
        except BaseException as error:
            failure = error
        for unit in parts.units:
            for info in unit.parameters:
                info.parameter.grad = None
            if not unit.route.has_store:
                unit.open_up()
        parts.close(failure)
