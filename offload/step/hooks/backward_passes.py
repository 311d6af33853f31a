# SPDX-License-Identifier: Apache-2.0
"""Backwards through the model: which uses of units they have open, and when each is over.

A backward is a graph task of autograd. When a gradient reaches an output of a unit its use starts; when the gradients of all
its inputs are computed, or (for a unit whose inputs need none) when all its parameters have theirs, the use ends; the latter
unless backward goes on to what other units inside the call train. It also ends before the use of a call starts that forward
made earlier: autograd goes through what one thread recorded from the last to the first. An input that several units share (of a
decoder the encoder's output) has its gradient only when backward is through with all of them. Whatever is still open ends with
its graph task: the backward, or the one inside it that goes through what a reentrant checkpoint computed again, whose inputs
are leaves there.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import UsageError
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.step.hooks.model_events import ModelEvents
from offload.step.hooks.shared_gradients import SharedGradients, is_accumulated
from offload.step.nested_tensors import tensors_in
from offload.step.second_order import SecondOrder, levels_of
from offload.step.thread_safety.call_depth import require_stack
from offload.step.thread_safety.taking_turns import Turn
from offload.step.training import Training


class BackwardUse:
    """One forward call's use of its unit in backward. `end` without `start` does nothing, and vice versa twice."""

    def __init__(self, passes: BackwardPasses, unit: Unit, module: nn.Module, *, reads_values: bool) -> None:
        """`module`: which was called. `reads_values`: whether backward computes with the values that forward finds."""
        # Autograd's graph holds uses where Python's collector sees them one layer of the model at a time.
        self._passes, self.unit_index, self.reads_values = weakref.ref(passes), unit.index, reads_values
        self._turn, self.module_id = weakref.ref(passes.turn), id(module)
        self.version = unit.version if reads_values else None
        self.ends_with_parameters = False
        """Whether backward reads no more of the unit when its parameters have their gradients."""
        self.graph_task = -1
        self.epoch = -1
        self.awaited: set[int] = set()
        self.told: Callable[[], None] | None = None
        self.thread = threading.get_ident()
        self.first_number = torch._C._autograd._get_sequence_nr()
        self.passed: Counter[int] | None = None
        """Of an outermost call, by unit: forwards inside it without a graph, which reentrant checkpoints compute again."""
        self.began, self.ended = passes.tick(), 0

    def is_behind(self, other: BackwardUse) -> bool:
        """Whether forward made this call, in the same thread, when it was through with that one."""
        return self.thread == other.thread and self.began > other.ended

    def recorded_a_graph(self) -> bool:
        """At the end of its forward: whether that made any function for backward, as one that is frozen throughout does not."""
        return torch._C._autograd._get_sequence_nr() > self.first_number

    def start(self, *_: Any) -> None:
        passes = self._passes()
        if passes is None:
            raise _parts_are_gone(self._turn())
        passes.start_use(self)

    def reach(self, gradient: torch.Tensor) -> None:
        """A gradient reaches the only output."""
        self.start()
        self.differentiate(gradient)

    def differentiate(self, _: torch.Tensor) -> None:
        """A gradient reaches an output."""
        passes = self._passes()
        if torch.is_grad_enabled() and passes is not None:  # the backward records a graph
            node = torch._C._current_autograd_node()
            passes.second_order.follow(node, self.unit_index, self.version, self.first_number)

    def end(self, *_: Any) -> None:
        passes = self._passes()
        if passes is not None:
            passes.end_use(self)

    def gradient_arrived(self, info: ParameterInfo) -> None:
        """Of a use that ends with its parameters."""
        self.awaited.discard(info.index)
        if not self.awaited:
            self.end()


class _ValuesMet:
    """A hook of what a covered call computed: backward is to find the values that forward found."""

    __slots__ = ("_first_number", "_module_id", "_passes", "_turn", "_unit_index", "_version")

    def __init__(self, passes: BackwardPasses, unit: Unit, module_id: int, first_number: int) -> None:
        self._turn, self._module_id = weakref.ref(passes.turn), module_id
        self._passes, self._unit_index, self._version = weakref.ref(passes), unit.index, unit.version
        self._first_number = first_number

    def __call__(self, _: torch.Tensor) -> None:
        passes = self._passes()
        if passes is None:
            raise _parts_are_gone(self._turn())
        passes.reach_covered(self._unit_index, self._module_id, self._version)
        if torch.is_grad_enabled():  # the backward records a graph
            node = torch._C._current_autograd_node()
            passes.second_order.follow(node, self._unit_index, self._version, self._first_number)


def _parts_are_gone(turn: Turn | None) -> UsageError:
    """`turn`: that of the engine, which all its parts share, whatever took their place; None: it is gone too."""
    if turn is None:
        return UsageError("backward reached a forward whose engine is gone, and its parameters with it: run the forward again.")
    return UsageError(
        "backward reached a forward that ran before parameters were unfrozen or added to the optimizer, before a load made a "
        "failed engine anew, or before the last step: run the forward again."
    )


class _GraphTaskEnd:
    """Called when a graph task is done; dropped uncalled where an exception cut it short, which the turn sees by itself: an
    interrupt that came in a `__del__` would be lost."""

    def __init__(self, passes: BackwardPasses, graph_task: int, training: Training) -> None:
        self._passes, self._graph_task, self._turn = passes, graph_task, training.turn

    def __call__(self) -> None:
        try:
            self._passes.graph_task_done(self._graph_task)
        finally:
            self._turn.end(self._graph_task)


class BackwardPasses:
    """See the module. Everything runs in autograd's thread, or in that of forward, never both at once."""

    def __init__(self, units: Sequence[Unit], training: Training, events: ModelEvents) -> None:
        self.units, self._training, self._uses, self._events = units, training, training.uses, events
        waiting = training.parameter_gradients.waiting
        self.turn, self._waiting, self._waits_until_the_end = training.turn, waiting.by_unit, waiting.until_the_end
        self._clock = itertools.count(1)
        self._open: dict[BackwardUse, None] = {}
        self._graph_tasks: dict[int, weakref.ref[_GraphTaskEnd]] = {}
        """Those that go on, with what PyTorch drops when an exception cuts one short."""
        self._passed: Counter[int] = Counter()
        """By unit: its forwards without a graph, in no call with one, that a reentrant checkpoint may yet compute again."""
        self._coming: Counter[int] = Counter()
        """By unit: those inside the call that backward is in, which it has not computed again yet."""
        self._left_early: dict[int, Unit] = {}
        self._reached: tuple[int, int] | None = None
        """The covered call that backward is in: its unit, and id of its module."""
        self._ended = self._accumulates = False
        self.shared_gradients = SharedGradients(units)
        self.second_order = SecondOrder(units, self._uses, self._second_order_reaches, training.failures)
        self._uses.ended_by(weakref.ref(self))  # hooks that others took the place of are not kept

    def tick(self) -> int:
        """Numbers the begins and ends of forward calls."""
        return next(self._clock)

    # ---- forward -------------------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A new outermost forward: nothing of an earlier backward that was cut short is still going on."""
        if self._graph_tasks and not self._waits_until_the_end:
            with torch.inference_mode(False):  # in which forward may be: nothing made there can be added to
                self._events.waiting_arrived()  # before another backward's come to them
        self._reached = None
        self._open.clear()
        self._graph_tasks.clear()
        self._left_early.clear()
        self._coming.clear()
        if self._ended:  # else this may be a second forward before one backward
            self._passed.clear()
        self._ended = False
        self.shared_gradients.forget()
        self.second_order.abandon()

    def passed(self, unit: Unit, outermost: object) -> None:
        """A forward of the unit made no graph, and may be a reentrant checkpoint's. `outermost`: the use of the call around."""
        counts = self._passed
        if isinstance(outermost, BackwardUse):
            counts = outermost.passed = outermost.passed or Counter()
        counts[unit.index] += 1

    def computed_again(self, unit: Unit) -> None:
        """Such a forward was made again, with a graph."""
        counts = self._coming if self._coming[unit.index] else self._passed
        counts[unit.index] -= counts[unit.index] > 0

    # ---- backward ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The backward that runs reached the model."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task not in self._graph_tasks:
            require_stack()
            with self._training.failures():
                self._uses.end_cut_short()
                if not self._graph_tasks:
                    self._accumulates = False
                    self._events.backward_begins()
                    if self._events.all_stays:
                        self._uses.cover()
                # Runs when this graph task is done; a reentrant checkpoint's backward is a graph task inside another.
                end = _GraphTaskEnd(self, graph_task, self._training)
                self._graph_tasks[graph_task] = weakref.ref(end)
                torch.autograd.Variable._execution_engine.queue_callback(end)
                self._training.turn.begin(graph_task, weakref.ref(end))

    def end_cut_short(self) -> bool:
        """Nothing of a backward that an exception cut short is going on, where no forward came since either. Whether another
        backward does."""
        if not self._graph_tasks:
            return False
        gone = [graph_task for graph_task, end in self._graph_tasks.items() if end() is None]
        for graph_task in gone:
            del self._graph_tasks[graph_task]
            self.shared_gradients.forget(graph_task)
        for use in [use for use in self._open if use.graph_task in gone]:
            del self._open[use]
            if use.told is not None:
                use.told()
            if use.reads_values and use.epoch == self._uses.epoch:
                self._uses.end(self.units[use.unit_index], recorded=True)
        if gone and not self._graph_tasks:
            if self._events.all_stays:
                self._uses.uncover()
            if not self._waits_until_the_end:
                self._events.waiting_arrived()
            self._reached = None
            self._left_early.clear()
            self._coming.clear()
            self.second_order.let_go()
        return bool(self._graph_tasks)

    def graph_task_done(self, graph_task: int) -> None:
        """A backward, or one inside another, is over."""
        self.shared_gradients.forget(graph_task)
        if graph_task not in self._graph_tasks:
            return
        del self._graph_tasks[graph_task]
        is_whole = not self._graph_tasks
        for use in [use for use in self._open if is_whole or use.graph_task == graph_task]:
            use.end()
        if is_whole:
            with self._training.failures():
                self.second_order.let_go()
            self._ended = True
            self._reached = None
            self._coming.clear()
            with self._training.failures():
                if self._events.all_stays:
                    self._uses.uncover()
                self._accumulates = self._events.waiting_arrived() or self._accumulates
                while self._left_early:
                    self._events.backward_leaves(self._left_early.popitem()[1])
                if self._accumulates:  # else it is `torch.autograd.grad`'s or a transform's, no part of the step
                    self._events.backward_ended()

    def watch_values(self, unit: Unit, module_id: int, first_number: int, output: Any) -> None:
        """A covered call of a module of the unit ended; forward numbered its functions from `first_number`."""
        met: _ValuesMet | None = None
        for tensor in tensors_in(output):
            for level in levels_of(tensor):
                if level.requires_grad and level.grad_fn is not None:
                    met = met or _ValuesMet(self, unit, module_id, first_number)
                    level.register_hook(met)

    def reach_covered(self, unit_index: int, module_id: int, version: int) -> None:
        """A gradient reaches what such a call computed: backward is mostly through with the call that it reached before. What
        comes later of that waits for the end."""
        self.enter()
        reached = unit_index, module_id
        if reached != self._reached:
            before, self._reached = self._reached, reached
            if before is not None and not self._waits_until_the_end and self._waiting.get(before[0]):
                with self._training.failures():
                    self._accumulates = self._events.waiting_arrived(self.units[before[0]], before[1]) or self._accumulates
        unit = self.units[unit_index]
        if unit.version != version or self._events.memory_is_short:
            with self._training.failures():
                self._events.backward_reaches(unit, version)

    def _second_order_reaches(self, unit_index: int, version: int | None) -> None:
        self.enter()
        self._events.backward_reaches(self.units[unit_index], version)

    # ---- uses ----------------------------------------------------------------------------------------------------

    def start_use(self, use: BackwardUse) -> None:
        """A gradient reached an output of the call."""
        self.enter()
        if use in self._open:
            return
        unit = self.units[use.unit_index]
        use.graph_task = torch._C._current_graph_task_id()
        if use.ends_with_parameters:
            use.awaited = {info.index for info in unit.part_of(use.module_id) if info.parameter.requires_grad}
        with self._training.failures():
            for other in [other for other in self._open if other.is_behind(use)]:
                self._end(other)
            self.second_order.let_go()  # a gradient is there: the function that made it is done
            self._events.backward_reaches(unit, use.version)
            if use.reads_values:
                self._uses.start(unit, recorded=True, module_id=use.module_id)
            use.epoch = self._uses.epoch
            self._open[use] = None
            if use.passed is not None:
                self._coming = use.passed.copy()
        if (recording := self._training.recorder.to) is not None:
            use.told = recording.use("backward", unit)

    def end_use(self, use: BackwardUse) -> None:
        """Backward is through with the call."""
        if use in self._open:
            with self._training.failures():
                self._end(use)

    def _end(self, use: BackwardUse) -> None:
        del self._open[use]
        if use.told is not None:
            use.told()
        unit = self.units[use.unit_index]
        if self._waiting.get(unit.index) and self._events.waiting_arrived(unit, use.module_id):
            self._accumulates = True
        if use.reads_values and use.epoch == self._uses.epoch:
            self._uses.end(unit, recorded=True, then=lambda: self._left(unit))
        else:
            self._left(unit)

    def _left(self, unit: Unit) -> None:
        if unit.uses.count:
            return
        if self._coming.get(unit.index) or self._passed.get(unit.index):
            self._left_early[unit.index] = unit  # each such checkpoint accumulates on its own: more may come
        else:
            self._left_early.pop(unit.index, None)
            self._events.backward_leaves(unit)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def before_accumulation(self, unit: Unit, info: ParameterInfo) -> None:
        """PyTorch is about to accumulate into `p.grad`; not where the parameter was frozen since its forward."""
        self.enter()
        if info.trainable and info.parameter.requires_grad and is_accumulated(torch._C._current_autograd_node()):
            self._accumulates = True
            if self._training.is_usable and self._events.first_gradient_coming(unit, info):
                return
            with self._training.failures():
                self._events.gradient_coming(unit, info)

    def after_accumulation(self, unit: Unit, info: ParameterInfo) -> None:
        """PyTorch accumulated."""
        if info.trainable:
            with self._training.failures():
                if unit.shares_parameters:
                    self.shared_gradients.deliver(info)
                self._events.gradient_arrived(unit, info)
        self.accumulated(unit, info)

    def accumulated(self, unit: Unit, info: ParameterInfo) -> None:
        """PyTorch accumulated; the gradient was taken over, or stays in `p.grad` until backward leaves the module."""
        index = unit.index
        for use in [use for use in self._open if use.unit_index == index and use.ends_with_parameters]:
            use.gradient_arrived(info)
