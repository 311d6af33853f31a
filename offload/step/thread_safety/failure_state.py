# SPDX-License-Identifier: Apache-2.0
"""Whether an engine can still be used: it was not closed, and nothing failed that leaves its state undefined."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from offload.errors import EngineFailedError, NonFiniteGradientError, ParameterAccessError, UsageError, words_of
from offload.ranks.group import Meeting
from offload.ranks.next_transfers import MeetingPoint
from offload.step.thread_safety import held_interrupt
from offload.step.thread_safety.held_interrupt import HeldInterrupt
from offload.step.thread_safety.taking_turns import Turn, Turned

_forks = 0
"""Of this process from others, as far as Python knows: to ask the system for the process is more than most work here."""


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)

_ANSWERS = (ParameterAccessError, UsageError, EngineFailedError, NonFiniteGradientError)
"""To an error of the user's: they leave the engine as it was."""


class _OwnWork(HeldInterrupt):
    """Around the engine's own work. No generator: there an interrupt could come between its `yield` and the work."""

    __slots__ = ("_began", "_holds", "_outside", "_turn", "_usable")

    _outside: AbstractContextManager[object] | None
    """Where torch.func (grad, jvp, vmap, ...) transforms a function around it: what takes the work out of that."""

    def __init__(self, usable: FailureState, turn: Turn | None, *, holds: bool) -> None:
        """`holds`: interrupts, until it is over."""
        self._usable, self._turn, self._holds = usable, turn, holds
        self._hold = self._outside = None

    def __enter__(self) -> None:
        usable = self._usable
        if usable.fork_count != _forks:
            usable.check_process()
        self._began = held_interrupt.now()
        try:
            if self._turn is not None:
                self._turn.acquire(self)
            if self._holds:
                self.begin()
            if usable.failure is not None or usable.closed or usable.retired:
                check = usable.check if self._turn is not None else usable.check_not_failed
                check()
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self._outside = temporarily_clear_interpreter_stack()
                self._outside.__enter__()
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            if not isinstance(error, _ANSWERS) and not getattr(error, "changed_nothing", False):
                self._usable.fail(error)
            if not self._holds:
                held_interrupt.end_since(self._began)
        self._end()

    def _end(self) -> None:
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
        if self._turn is not None:
            self._turn.release(self)
        if self._hold is not None:
            self.end()


class FailureState:
    """See the module. The part of `Training` that takes failures in.

    turn  whose turn it is: of the thread that drives the model while it is in it or the engine is at work for it, and of who
          does some of that work while it does nothing (`offload.checkpoint.saving.idleness`)
    """

    def __init__(self, meeting: Meeting, turn: Turn) -> None:
        """`meeting`: with the other ranks, which are told of a failure."""
        self._meeting, self.turn = meeting, turn
        self._process_id, self.fork_count = os.getpid(), _forks
        self.failure: BaseException | None = None
        self.untold: Exception | None = None
        """The failure, where PyTorch made a warning of it: a hook that raises behind an error of the user's is not heard."""
        self.closed = self.retired = False
        self.turn_count = 0
        """How often the thread that drives the model asked for its turn."""

    def failures(self, *, holds_interrupts: bool = True) -> _OwnWork:
        """A failure of the engine's own work leaves its state undefined; an answer to the user's error does not.

        Ctrl-C waits for the end of the work, but where that may take long: where others are waited for, or as asked for."""
        self.turn_count += 1
        return _OwnWork(self, self.turn, holds=holds_interrupts and not self._meeting.waits_for_others)

    def failures_beside(self) -> _OwnWork:
        """The same on a thread that does not drive the model: also while that closes the engine, which waits for it."""
        return _OwnWork(self, None, holds=False)

    def turn_of_its_own(self) -> Turned:
        """Around work of an engine that may have failed or be closed: nothing is looked at, and no failure taken in."""
        return Turned(self.turn)

    def fail(self, error: BaseException) -> None:
        """The engine's state is undefined from now on, because of `error`."""
        self.failure = error
        self.turn.begin_anew()
        self._meeting.abandon(f"{type(error).__name__}: {error}")

    def leave_others(self, because: BaseException) -> None:
        """The other ranks may be anywhere: this one cannot wait for them, and they must not wait for it."""
        self._meeting.abandon(f"{type(because).__name__}: {because}")
        self.failure = self.failure or because

    def meet(self, point: MeetingPoint, action: Callable[[], Any] | None = None, *, argument: int = 0) -> Any:
        """`Meeting.meet`, which fails the engine where another rank failed."""
        with self.failures() if self._meeting.waits_for_others else nullcontext():
            return self._meeting.meet(point, action, argument=argument)

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    @property
    def is_usable(self) -> bool:
        """Whether `check` raises nothing, in the engine's own process."""
        return self.failure is None and not self.closed and not self.retired

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that was forked from the engine's: its threads and files are not here."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Raise if this is not the engine's process."""
        if self.is_forked:
            raise UsageError(
                f"the engine belongs to process {self._process_id}, and this one was forked from it, without its threads and "
                "files. Use the model there. What a worker needs of it, give it before the fork: engine.state_dict(), or a "
                "copy of the model that was made inside `with engine.gathered(model.parameters()):`."
            )

    def check(self) -> None:
        """Raise if the engine is another process's or closed, or if an earlier failure left it unusable."""
        self.check_process()
        if self.retired:
            raise UsageError(
                "backward reached a forward that ran before parameters were unfrozen or added to the optimizer, or before the "
                "last step: run the forward again."
            )
        if self.closed:
            raise UsageError("the engine was closed: call offload.initialize again.")
        untold, self.untold = self.untold, None
        if untold is not None:
            raise untold
        self.check_not_failed()

    def check_not_failed(self) -> None:
        """Raise if an earlier failure left the engine unusable."""
        if self.failure is not None:
            raise EngineFailedError(
                f"the engine failed earlier and its state is undefined: {words_of(self.failure)}. Go on from the last "
                "checkpoint: engine.load_checkpoint(dir) on one rank, else start again."
            ) from self.failure
