# SPDX-License-Identifier: Apache-2.0
"""The forward calls of hooked modules that are running: a stack."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import nn

from offload.model.unit import Unit
from offload.step.thread_safety.taking_turns import Turn

FORWARD = "forward"
"""What a turn lasts for while calls run outside of backward."""
_SUSPENDED_BY_ITSELF = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of the code of a frame that no thread's stack begins with."""
_CALLING_FILE = nn.Module._call_impl.__code__.co_filename


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's engine."""
    return torch._C._current_graph_task_id() != -1


def stack_of(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, the innermost first; none of one that ended."""
    frame = sys._current_frames().get(thread) if thread != threading.get_ident() else sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One forward call of a hooked module that is running. Written by `Hooks`.

    unit      None where an enclosing call covers its use
    inputs    those that need gradients; `use`: that of backward (`BackwardUse`), where forward makes a graph
    recorded  it is part of a training step
    started   the unit's use has started, and lasts as long as the call
    covers    so has one of all units
    told      to be called when it is over, where somebody records
    frame     that of PyTorch's function which calls the module and its hooks
    """

    module: nn.Module
    unit: Unit | None = None
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    use: object = None
    recorded: bool = False
    started: bool = False
    covers: bool = False
    told: Callable[[], None] | None = None
    frame: FrameType | None = None

    def __post_init__(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != _CALLING_FILE:
            frame = frame.f_back
        self.frame = frame

    def encloses(self, frame: FrameType | None) -> bool:
        """Whether it is on the stack that leads to `frame`."""
        own = self.frame
        while frame is not None and frame is not own:
            frame = frame.f_back
        return frame is not None

    def is_running(self) -> bool:
        """Whether the call goes on. PyTorch calls no hook after one that an interrupt ended (`KeyboardInterrupt` is no
        `Exception`): it is on the stack no more."""
        own = self.frame
        if own is None:
            return True
        while True:
            last = frame = sys._getframe() if self.thread == threading.get_ident() else sys._current_frames().get(self.thread)
            while frame is not None:
                if frame is own:
                    return True
                last, frame = frame, frame.f_back
            if last is None or not last.f_code.co_flags & _SUSPENDED_BY_ITSELF:
                return False
            # The thread goes on meanwhile: it left a generator, whose frame leads nowhere then. Once more.


class RunningCalls:
    """See the module. Changed by the thread whose turn it is."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: int) -> Call:
        return self._calls[index]

    def has(self, module: nn.Module) -> bool:
        """Whether one of them is the module's."""
        return any(call.module is module for call in self._calls)

    def push(self, call: Call) -> None:
        """The innermost from now on."""
        self._calls.append(call)

    def pop(self, module: nn.Module | None = None) -> Call | None:
        """Take the calling thread's innermost call (of a module) from the stack, and with it what it called; None: there is
        none, since a hook of the user's raised before it could begin."""
        own = threading.get_ident()
        if self._calls and self._calls[-1].module is module and self._calls[-1].thread == own:  # as most often
            return self._calls.pop()
        for position in reversed(range(len(self._calls))):
            call = self._calls[position]
            if module is None or (call.module is module and call.thread == own):
                del self._calls[position:]
                return call
        return None

    @property
    def are_covered(self) -> bool:
        """Whether the calling thread is inside a call that covers all units, and that goes on."""
        if not self._calls:
            return False
        outermost = self._calls[0]
        return outermost.covers and outermost.thread == threading.get_ident() and outermost.is_running()

    @property
    def any_goes_on(self) -> bool:
        """Whether one that uses a unit does. From any thread."""
        return any(call.started and call.unit is not None and call.is_running() for call in list(self._calls))

    @property
    def is_recorded(self) -> bool:
        """Whether one of them is part of a training step."""
        return any(call.recorded for call in self._calls)

    def innermost_unit(self, *, started: bool = True) -> Unit | None:
        """Of the innermost call that uses one; `started`: whose use has started."""
        units = (call.unit for call in reversed(self._calls) if call.started or not started)
        return next((unit for unit in units if unit is not None), None)

    def has_inside(self, module: nn.Module) -> bool:
        """Whether the calling thread's innermost call is another than of the module."""
        own = threading.get_ident()
        if self._calls and self._calls[-1].thread == own:  # as most often
            return self._calls[-1].module is not module
        innermost = next((call for call in reversed(self._calls) if call.thread == own), None)
        return innermost is not None and innermost.module is not module

    def drop_cut_short(self, inside: Call | None = None) -> list[Call]:
        """Forget the calls that an interrupt ended; returns them, the innermost first. `inside`: the calling thread is in this
        one, which is not among them yet."""
        if not self._calls or (inside is not None and self._calls[-1].encloses(inside.frame)):
            return []
        dropped = []
        while self._calls and not self._calls[-1].is_running():
            dropped.append(self._calls.pop())
        return dropped

    def none_goes_on(self) -> None:
        """No forward does, nor a backward: the thread's turn is over."""
        self._turn.begin_anew()

    def abandon_uses(self) -> None:
        """The uses of all of them were ended."""
        for call in self._calls:
            call.started = False
