"""The engine's ears in the model: forward hooks, gradient hooks, the end of backward.

    forward      a pre-hook starts the unit's use, a hook ends it
    backward     when a gradient reaches an output of the unit its use starts; when the gradients of all its inputs are
                 computed, or (for a unit whose inputs need none) when all its parameters have theirs, the use ends. It
                 also ends before the use of a call starts that forward made earlier: autograd goes through what one
                 thread recorded from the last to the first. An input that several units share (of a decoder the
                 encoder's output) has its gradient only when backward is through with all of them. Whatever is still
                 open ends with its graph task: the backward, or the one inside it that goes through what a reentrant
                 checkpoint computed again, whose inputs are leaves there
    gradients    right before PyTorch accumulates into `p.grad` the token of an earlier gradient is taken out; right
                 after, the gradient is handed over and a token put in its place; the parts of a shared parameter's are
                 added by `offload.step.shared_gradients`

Recomputation (activation checkpointing, reentrant or not) is a forward inside backward, and simply nests.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from offload.errors import UsageError
from offload.model.flat import ParameterInfo
from offload.model.guard import refuse_loading
from offload.model.partition import is_lookup, renormalizing
from offload.model.unit import Unit
from offload.step.inputs import tensors_in
from offload.step.model_events import ModelEvents
from offload.step.residency import Residency
from offload.step.second_order import SecondOrder, levels_of
from offload.step.shared_gradients import SharedGradients, is_accumulated
from offload.step.training import Training


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's engine."""
    return torch._C._current_graph_task_id() != -1


class _BackwardUse:
    """One forward call's use of its unit in backward. `end` without `start` does nothing, and vice versa twice."""

    def __init__(self, hooks: Hooks, unit: Unit, version: int, *, reads_values: bool) -> None:
        """`version`: of the values that forward computes with. `reads_values`: whether backward computes with them."""
        # Autograd's graph holds uses where Python's collector sees them one layer of the model at a time.
        self._hooks, self._unit_index, self.reads_values = weakref.ref(hooks), unit.index, reads_values
        self.version = version if reads_values else None
        self.inputs_need_gradients = False
        self.graph_task = -1
        self.awaited: set[int] = set()
        self.thread = threading.get_ident()
        self.first_number = torch._C._autograd._get_sequence_nr()
        self.began, self.ended = next(hooks.clock), 0

    @property
    def unit(self) -> Unit:
        hooks = self._hooks()
        assert hooks is not None, "a use is asked by its hooks alone"
        return hooks._units[self._unit_index]

    def is_behind(self, other: _BackwardUse) -> bool:
        """Whether forward made this call, in the same thread, when it was through with that one."""
        return self.thread == other.thread and self.began > other.ended

    def recorded_a_graph(self) -> bool:
        """At the end of its forward: whether that made any function for backward, as one that is frozen throughout does not."""
        return torch._C._autograd._get_sequence_nr() > self.first_number

    def start(self, *_: Any) -> None:
        hooks = self._hooks()
        if hooks is None:
            raise UsageError(
                "backward reached a forward whose engine is gone, and its parameters with it: run the forward again."
            )
        hooks.enter_backward()
        if self not in hooks.open_uses:
            self.graph_task = torch._C._current_graph_task_id()
            self.awaited = {info.index for info in hooks._units[self._unit_index].parameters if info.parameter.requires_grad}
            hooks.backward_use_started(self)

    def differentiate(self, _: torch.Tensor) -> None:
        """A gradient reaches an output."""
        hooks = self._hooks()
        if torch.is_grad_enabled() and hooks is not None:  # the backward records a graph
            node = torch._C._current_autograd_node()
            hooks.second_order.follow(node, self._unit_index, self.version, self.first_number)

    def end(self, *_: Any) -> None:
        hooks = self._hooks()
        if hooks is not None and self in hooks.open_uses:
            hooks.backward_use_ended(self)

    def gradient_arrived(self, info: ParameterInfo) -> None:
        self.awaited.discard(info.index)
        if not self.awaited and not self.inputs_need_gradients:
            self.end()


def _stack(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, the innermost first; none of one that ended."""
    frame = sys._current_frames().get(thread) if thread != threading.get_ident() else sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


_CALLING_FILE = nn.Module._call_impl.__code__.co_filename


_FORWARD = "forward"


@dataclasses.dataclass(slots=True)
class _Call:
    """One forward call of a hooked module that is running. `unit` is None where an enclosing call covers its use."""

    module: nn.Module
    unit: Unit | None = None
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    use: _BackwardUse | None = None
    recorded: bool = False
    started: bool = False
    frame: FrameType | None = None
    """That of PyTorch's function which calls the module and its hooks."""

    def __post_init__(self) -> None:
        self.frame = next((frame for frame in _stack(self.thread) if frame.f_code.co_filename == _CALLING_FILE), None)

    def is_running(self) -> bool:
        """Whether the call goes on. PyTorch calls no hook after one that an interrupt ended (`KeyboardInterrupt` is no
        `Exception`): it is on the stack no more."""
        return self.frame is None or any(frame is self.frame for frame in _stack(self.thread))


class _ModuleHook:
    """Reports what a module does. In a copy of the module, by `copy` or `pickle`, it does nothing: that is no engine's."""

    def __init__(self, report: Callable[..., Any]) -> None:
        self._report = report

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any) -> Any:
        return self._report(*arguments)

    @property
    def __name__(self) -> str:
        """As of a function. torch.jit.script asks hooks for it, to compile them: no other place tells of it."""
        if any(frame.f_globals.get("__name__", "").startswith("torch.jit") for frame in _stack(threading.get_ident())):
            raise UsageError(
                "torch.jit.script was given a module that an engine has: what it makes reads parameters where they lie now, "
                "which is not where they will be. For speed use torch.compile; to export, script a module that is made anew "
                "and has loaded engine.state_dict()."
            )
        return "module_hook"

    def __reduce__(self) -> Any:
        return _copied_hook, ()


def _copied_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


class _GraphTaskEnd:
    """Called when a graph task is done; dropped uncalled where an exception cut it short, which the turn sees by itself: an
    interrupt that came in a `__del__` would be lost."""

    def __init__(self, hooks: Hooks, graph_task: int) -> None:
        self._hooks, self._graph_task, self._turn = hooks, graph_task, hooks._training.turn

    def __call__(self) -> None:
        try:
            self._hooks._graph_task_done(self._graph_task)
        finally:
            self._turn.end(self._graph_task)


class Hooks:
    """Installs the hooks, and takes them out again.

    Everything runs in the thread that runs the model's forward or autograd's backward.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        residency: Residency,
        training: Training,
        events: ModelEvents,
        successor: Callable[[], Hooks | None],
    ) -> None:
        """`events` hears what the hooks report. `successor`, asked when an outermost forward begins that is recorded: the hooks
        that have taken the place of these, if the engine's parts were made anew for it."""
        self._units = list(units)
        self._residency = residency
        self._training, self._events, self._successor = training, events, successor
        self._removers: list[Callable[[], None]] = []
        self._calls: list[_Call] = []
        self.clock = itertools.count(1)
        """Numbers the begins and ends of calls."""
        self.open_uses: dict[_BackwardUse, None] = {}
        self._graph_tasks: dict[int, weakref.ref[_GraphTaskEnd]] = {}
        """Those that go on, with what PyTorch drops when an exception cuts one short."""
        self._passed: Counter[int] = Counter()
        """By unit: its forwards without a graph that a reentrant checkpoint may yet compute again, and go through."""
        self._left_early: dict[int, Unit] = {}
        self._backward_ended = self._accumulates = False
        self._root = self._units[0].modules[0]
        self._renormalized = {id(module.weight) for module in renormalizing(self._root).values()}
        self._parts = SharedGradients(self._units)
        self.second_order = SecondOrder(self._units, residency, self._second_order_reaches, training.failures)
        residency.drop_abandoned_forwards = self.drop_abandoned

    def install(self) -> None:
        for unit_position, unit in enumerate(self._units):
            for module in _use_modules(unit, unit is self._units[0]):
                self._hook_module(unit, module)
            for parameter_position, info in enumerate(unit.parameters):
                if info.parameter.requires_grad or info.trainable:
                    self._hook_parameter(info, unit_position, parameter_position)

        for module in self._root.modules():
            if module._parameters:
                refusal = _ModuleHook(lambda module, *_: refuse_loading(module))
                self._removers.append(module.register_load_state_dict_pre_hook(refusal).remove)

    def remove(self) -> None:
        while self._removers:
            self._removers[-1]()  # first: one that an interrupt leaves out is removed by the next call, again does no harm
            self._removers.pop()

    # ---- forward -------------------------------------------------------------------------------------------------

    def _hook_module(self, unit: Unit, module: nn.Module) -> None:
        before = _ModuleHook(lambda module, args, kwargs: self._before_forward(unit, module, args, kwargs))
        after = _ModuleHook(lambda module, args, kwargs, output: self._leave_module(module, output))
        self._removers.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inside_backward = in_backward()
        with self._training.failures():
            if self._calls:
                self.drop_abandoned()
            call = _Call(module)
            self._calls.append(call)  # first of all: the hook after the forward runs even if this one raises
            if not inside_backward and len(self._calls) == 1:
                self._reset()
                self._training.turn.begin(_FORWARD, call.is_running)
        if not inside_backward and len(self._calls) == 1:
            if torch._C._get_tracing_state() is not None:
                raise UsageError(
                    "the model was traced (torch.jit.trace, torch.onnx.export): what that makes reads parameters where they "
                    "lie now, which is not where they will be. Trace a copy: copy.deepcopy(model) inside "
                    "`with engine.gathered(model.parameters()):`."
                )
            self._training.check()
            successor = self._successor() if torch.is_grad_enabled() else None
            if successor is not None:
                self._calls.pop()
                return successor._before_forward(successor._units[unit.index], module, args, kwargs)
        if inside_backward and torch.is_grad_enabled():
            self.enter_backward()  # before a backward inside this one is taken for the whole
        if module not in unit.modules and self._residency.in_use(unit):
            return None
        in_step = inside_backward or torch.is_grad_enabled() or any(other.recorded for other in self._calls)
        call.unit, call.recorded = unit, in_step
        changed = None
        if module is self._root:
            args, kwargs = changed = self._events.cast_inputs(args, kwargs)
        with self._training.failures():
            self._residency.start_use(unit, recorded=call.recorded)
        self._residency.enter_forward(unit)
        call.started = True
        if torch.is_grad_enabled():
            self._passed[unit.index] -= inside_backward and self._passed[unit.index] > 0
            reads_values = module not in unit.modules or not is_lookup(module)
            call.use = _BackwardUse(self, unit, unit.version, reads_values=reads_values)
            # Before the forward: an in-place operation in it would move the hook to a place inside the unit.
            call.inputs = inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            call.use.inputs_need_gradients = bool(inputs)
            # With a leaf among them PyTorch cannot tell when all are done: then the use ends with the graph task.
            if inputs and all(tensor.grad_fn is not None for tensor in inputs):
                register_multi_grad_hook(inputs, call.use.end, mode="all")
        elif not inside_backward:
            # An evaluation of the whole model is no checkpoint's; one of a part alone cannot be told from it.
            self._passed[unit.index] += in_step or self._calls[0].unit is not self._units[0]
        return changed

    def _leave_module(self, module: nn.Module, output: Any) -> None:
        try:
            self._after_forward(module, output)
        finally:
            if not self._calls:
                self._training.turn.end(_FORWARD)

    def _after_forward(self, module: nn.Module, output: Any) -> None:
        own = threading.get_ident()
        position = max(
            (index for index, call in enumerate(self._calls) if call.module is module and call.thread == own), default=None
        )
        if position is None:
            return  # a hook of the user's raised before it could begin
        call = self._calls[position]
        self._forget_calls(position + 1)
        self._calls.pop()
        if call.unit is None or not call.started or self._training.has_failed:
            return
        if call.use is not None:
            outputs = [level for tensor in tensors_in(output) for level in levels_of(tensor) if level.requires_grad]
            call.use.ended = next(self.clock)
            if outputs:
                register_multi_grad_hook(outputs, call.use.start, mode="any")
                for tensor in outputs:
                    tensor.register_hook(call.use.differentiate)
                self._parts.watch(call.unit, call.inputs, outputs)
            elif call.use.recorded_a_graph():
                # What it computed left by another way than its output: backward reaches it when it reaches its parent.
                enclosing = next((other.unit for other in reversed(self._calls) if other.unit is not None), None)
                if enclosing is not None:
                    self._residency.accompany(enclosing, call.unit)
        with self._training.failures():
            try:
                self._report_writes(call.unit)
            finally:
                self._residency.leave_forward(call.unit)
                self._residency.end_use(call.unit, recorded=call.recorded)
                if not self._calls and not in_backward():
                    self._events.forward_ended()

    def _report_writes(self, unit: Unit) -> None:
        """What this forward wrote in place to parameters that it had."""
        uncounted = self._renormalized if torch.is_inference_mode_enabled() else ()  # no versions are counted there
        for info in [info for one in (unit, *unit.residency.companions) for info in one.parameters]:
            if (info.was_written or id(info.parameter) in uncounted) and not info.lent_count:
                info.note_version()
                self._events.forward_wrote(info)

    def drop_abandoned(self) -> None:
        """Forget the calls that an interrupt ended."""
        count = len(self._calls)
        while count and not self._calls[count - 1].is_running():
            count -= 1
        self._forget_calls(count)
        if not count and not in_backward():
            self._reset()

    def _forget_calls(self, first: int) -> None:
        for call in self._calls[first:]:
            if call.unit is not None:
                self._residency.leave_forward(call.unit)
        del self._calls[first:]

    def _reset(self) -> None:
        """A new outermost forward: nothing of an earlier forward or backward that was cut short is still going on."""
        self._training.turn.begin_anew()
        self.open_uses.clear()
        self._graph_tasks.clear()
        self._left_early.clear()
        if self._backward_ended:  # else this may be a second forward before one backward
            self._passed.clear()
        self._backward_ended = False
        self._parts.forget()
        self.second_order.abandon()
        self._residency.abandon_uses()

    # ---- backward ------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """The backward that runs reached the model."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task not in self._graph_tasks:
            with self._training.failures():
                self._forget_cut_short()
                if not self._graph_tasks:
                    self._accumulates = False
                    self._events.backward_begins()
                # Runs when this graph task is done; a reentrant checkpoint's backward is a graph task inside another.
                end = _GraphTaskEnd(self, graph_task)
                self._graph_tasks[graph_task] = weakref.ref(end)
                torch.autograd.Variable._execution_engine.queue_callback(end)
                self._training.turn.begin(graph_task, weakref.ref(end))

    def _forget_cut_short(self) -> None:
        """Nothing of a backward that an exception cut short is going on, where no forward came since either."""
        gone = [graph_task for graph_task, end in self._graph_tasks.items() if end() is None]
        for graph_task in gone:
            del self._graph_tasks[graph_task]
            self._parts.forget(graph_task)
        for use in [use for use in self.open_uses if use.graph_task in gone]:
            del self.open_uses[use]
            if use.reads_values:
                self._residency.end_use(use.unit, recorded=True)
        if gone and not self._graph_tasks:
            self._left_early.clear()
            self.second_order.abandon()

    def _graph_task_done(self, graph_task: int) -> None:
        self._parts.forget(graph_task)
        if graph_task not in self._graph_tasks:
            return
        del self._graph_tasks[graph_task]
        is_whole = not self._graph_tasks
        for use in [use for use in self.open_uses if is_whole or use.graph_task == graph_task]:
            use.end()
        if is_whole:
            with self._training.failures():
                self.second_order.end()
            self._backward_ended = True
            with self._training.failures():
                while self._left_early:
                    self._events.backward_leaves(self._left_early.popitem()[1])
                if self._accumulates:  # else it is `torch.autograd.grad`'s or a transform's, no part of the step
                    self._events.backward_ended()

    def _second_order_reaches(self, unit_index: int, version: int | None) -> None:
        self.enter_backward()
        self._events.backward_reaches(self._units[unit_index], version)

    def backward_use_started(self, use: _BackwardUse) -> None:
        for other in [other for other in self.open_uses if other.is_behind(use)]:
            other.end()
        with self._training.failures():
            self._events.backward_reaches(use.unit, use.version)
            if use.reads_values:
                self._residency.start_use(use.unit, recorded=True)
            self.open_uses[use] = None

    def backward_use_ended(self, use: _BackwardUse) -> None:
        del self.open_uses[use]
        with self._training.failures():
            if use.reads_values:
                self._residency.end_use(use.unit, recorded=True, then=lambda: self._left(use.unit))
            else:
                self._left(use.unit)

    def _left(self, unit: Unit) -> None:
        if self._residency.in_use(unit):
            return
        if self._passed[unit.index]:
            self._left_early[unit.index] = unit  # each such checkpoint accumulates on its own: more may come
        else:
            self._left_early.pop(unit.index, None)
            self._events.backward_leaves(unit)

    def _hook_parameter(self, info: ParameterInfo, unit_position: int, parameter_position: int) -> None:
        # The hooks of a parameter lie where Python's collector does not look: what they hold strongly, and lead back to the
        # parameter, would never be freed. The hooks of the modules keep this object alive as long as the model lives.
        reference = weakref.ref(self)

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def before_accumulation(gradient: torch.Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks._before_accumulation(unit_position, parameter_position)

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def after_accumulation(parameter: torch.Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks._after_accumulation(unit_position, parameter_position)

        is_frozen = not info.parameter.requires_grad  # for now: PyTorch takes hooks of what requires a gradient alone
        info.parameter.requires_grad_(True)
        self._removers.append(info.parameter.register_hook(before_accumulation).remove)
        self._removers.append(info.parameter.register_post_accumulate_grad_hook(after_accumulation).remove)
        info.parameter.requires_grad_(not is_frozen)

    def _before_accumulation(self, unit_position: int, parameter_position: int) -> None:
        unit = self._units[unit_position]
        info = unit.parameters[parameter_position]
        self.enter_backward()
        if info.trainable and is_accumulated(torch._C._current_autograd_node()):
            self._accumulates = True
            with self._training.failures():
                self._events.gradient_coming(unit, info)

    def _after_accumulation(self, unit_position: int, parameter_position: int) -> None:
        unit = self._units[unit_position]
        info = unit.parameters[parameter_position]
        if info.trainable:
            with self._training.failures():
                self._parts.deliver(info)
                self._events.gradient_arrived(unit, info)
        for use in [use for use in self.open_uses if use.unit is unit]:
            use.gradient_arrived(info)


def _use_modules(unit: Unit, is_root: bool) -> list[nn.Module]:
    """The modules whose forward is a use of the unit: its own, and for the root those that hold its parameters too.

    The latter so that a part of the model that is called on its own finds the root's parameters there.
    """
    if not is_root:
        return unit.modules
    root = unit.modules[0]
    owned = {id(info.parameter) for info in unit.parameters}
    holders = [
        module
        for module in root.modules()
        if module is not root and any(id(parameter) in owned for parameter in module.parameters(recurse=False))
    ]
    return [root, *holders]
