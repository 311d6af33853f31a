# SPDX-License-Identifier: Apache-2.0
"""The engine's ears in the model: hooks of modules and parameters.

    forward      a pre-hook starts the unit's use, a hook ends it
    backward     hooks of a call's outputs and inputs say where it is (`offload.step.hooks.backward_passes`)
    covered      where all units stay, calls inside a forward or backward of the whole model only leave word of the values that
                 they computed with: backward is to find the same
    gradients    right before PyTorch accumulates into `p.grad` the token of an earlier gradient is taken out; right
                 after, the gradient is handed over and a token put in its place; the parts of a shared parameter's are
                 added by `offload.step.hooks.shared_gradients`

Recomputation (activation checkpointing, reentrant or not) is a forward inside backward, and simply nests.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from offload.errors import UsageError
from offload.model.flat import ParameterInfo
from offload.model.guard import refuse_loading
from offload.model.partition import can_be_called, is_lookup, renormalizing
from offload.model.unit import Unit
from offload.step.calls import FORWARD, Call, in_backward, stack_of
from offload.step.hooks.backward_passes import BackwardPasses, BackwardUse
from offload.step.hooks.model_events import ModelEvents
from offload.step.hooks.uncompiled import Uncompiled
from offload.step.nested_tensors import tensors_in, tensors_in_call
from offload.step.second_order import levels_of
from offload.step.thread_safety.call_depth import require_stack
from offload.step.training import Training


class _ModuleHook(Uncompiled):
    """Reports what a module does. In a copy of the module, by `copy` or `pickle`, it does nothing: that is no engine's."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        """As of a function. torch.jit.script asks hooks for it, to compile them: no other place tells of it."""
        if any(frame.f_globals.get("__name__", "").startswith("torch.jit") for frame in stack_of(threading.get_ident())):
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


class Hooks:
    """Installs the hooks, and takes them out again.

    Everything runs in the thread that runs the model's forward or autograd's backward.
    """

    def __init__(
        self, units: Sequence[Unit], training: Training, events: ModelEvents, successor: Callable[[], Hooks | None]
    ) -> None:
        """`events` hears what the hooks report. `successor`, asked when an outermost forward begins that is recorded: the hooks
        that have taken the place of these, if the engine's parts were made anew for it."""
        self._units, self._training, self._events, self._successor = units, training, events, successor
        self._uses, self._calls = training.uses, training.calls
        self._backwards = BackwardPasses(units, training, events)
        self._covers = events.all_stays
        self._units_at: dict[int, list[Unit]] = {}
        """By id of a hooked module: the units that a call of it uses, in the order of their hooks."""
        self._left_in_between: list[tuple[Unit, Unit]] = []
        """Units, and what comes with them since its forward was cut short in this outermost one, which may have caught that."""
        self._first_numbers: dict[int, int] = {}
        """By id of a unit's module: what autograd numbered the first function of its last covered call."""
        self._heard: set[tuple[int, int]] = set()
        """By unit and id of its module: those of whose parameters all say when their gradients came."""
        self._removers: list[Callable[[], None]] = []
        self._root = units[0].modules[0]
        self._renormalized = {id(module.weight) for module in renormalizing(self._root).values()}

    def install(self) -> None:
        for unit in self._units:
            for module in _use_modules(unit, unit is self._units[0]):
                self._hook_module(unit, module)
            waiting = {info.index for info in self._training.parameter_gradients.waiting.of(unit)}
            for position, info in enumerate(unit.parameters):
                if (info.parameter.requires_grad or info.trainable) and info.index not in waiting:
                    self._hook_parameter(unit.index, position, info)
        for module in self._root.modules():
            if module._parameters:
                refusal = _ModuleHook(lambda module, *_: refuse_loading(module))
                self._removers.append(module.register_load_state_dict_pre_hook(refusal).remove)

    def remove(self) -> None:
        while self._removers:
            self._removers[-1]()  # first: one that an interrupt leaves out is removed by the next call, again does no harm
            self._removers.pop()

    def _hook_module(self, unit: Unit, module: nn.Module) -> None:
        self._units_at.setdefault(id(module), []).insert(0, unit)
        before = _ModuleHook(lambda module, args, kwargs=None: self._report_forward(unit, module, args, kwargs))
        after = _ModuleHook(lambda module, args, kwargs, output: self._leave_module(unit, module, output))
        self._removers.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _hook_parameter(self, unit_index: int, position: int, info: ParameterInfo, *, waits: bool = False) -> None:
        """`waits`: its gradient stays in `p.grad`; that it came is told all the same."""
        # The hooks of a parameter lie where Python's collector does not look: what they hold strongly, and lead back to the
        # parameter, would never be freed. The hooks of the modules keep the passes alive as long as the model lives.
        reference = weakref.ref(self._backwards)

        def before_accumulation(_: torch.Tensor) -> None:
            passes = reference()
            if passes is not None:
                unit = passes.units[unit_index]
                passes.before_accumulation(unit, unit.parameters[position])

        def after_accumulation(_: torch.Tensor) -> None:
            passes = reference()
            if passes is not None:
                unit = passes.units[unit_index]
                (passes.accumulated if waits else passes.after_accumulation)(unit, unit.parameters[position])

        is_frozen = not info.parameter.requires_grad  # for now: PyTorch takes hooks of what requires a gradient alone
        info.parameter.requires_grad_(True)
        if not waits:
            self._removers.append(info.parameter.register_hook(Uncompiled(before_accumulation)).remove)
        self._removers.append(info.parameter.register_post_accumulate_grad_hook(Uncompiled(after_accumulation)).remove)
        info.parameter.requires_grad_(not is_frozen)

    # ---- before a forward ----------------------------------------------------------------------------------------

    def _report_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """`kwargs`: None where another hook of this call had these taken out: PyTorch goes on with those that it found, and
        takes no account of the new ones, which `_begin` reported to."""
        return self._before_forward(unit, module, args, kwargs) if kwargs is not None else None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The forward of a module began as these hooks took the place of others."""
        changed = None
        for unit in self._units_at[id(module)]:
            changed = self._before_forward(unit, module, *(changed or (args, kwargs))) or changed
        return changed

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inside_backward = in_backward()
        if self._covers and self._is_covered(unit, module, inside_backward):
            if unit.update is not None:
                require_stack()
                with self._training.failures():
                    self._uses.settle(unit)
            self._first_numbers[id(module)] = torch._C._autograd._get_sequence_nr()
            return None
        try:
            require_stack()
        except RecursionError:
            self._calls.push(Call(module))  # the hook after the forward takes it away again
            raise
        with self._training.failures():
            call = self._push_call(module, inside_backward)
            is_outermost = not inside_backward and len(self._calls) == 1
            if not is_outermost:
                self._start_use(call, unit, inside_backward)
        if is_outermost:
            successor = self._outermost_begins()
            if successor is not None:
                self._calls.pop()
                return successor._begin(module, args, kwargs)
            self._events.forward_begins(unit, (args, kwargs))
            with self._training.failures():
                self._start_use(call, unit, inside_backward)
        if not call.started:
            return None
        changed = None
        if module is self._root:
            args, kwargs = changed = self._events.cast_inputs(args, kwargs)
        if (recording := self._training.recorder.to) is not None:
            call.told = recording.use("recompute" if inside_backward else "forward", unit)
        if torch.is_grad_enabled():
            self._follow_backward(call, unit, args, kwargs, computed_again=inside_backward)
        elif not inside_backward and (call.recorded or self._calls[0].unit is not self._units[0]):
            # An evaluation of the whole model is no checkpoint's; one of a part alone cannot be told from it.
            self._backwards.passed(unit, self._calls[0].use)
        return changed

    def _is_covered(self, unit: Unit, module: nn.Module, inside_backward: bool) -> bool:
        """Whether a forward or backward of the whole model has opened the unit, and nothing else has to know of its call."""
        if module is self._root or unit.shares_parameters or self._training.recorder.to is not None:
            return False
        if not inside_backward:
            return self._calls.are_covered
        if torch.is_grad_enabled():
            self._backwards.enter()
        return self._uses.covers_all and not len(self._calls)

    def _push_call(self, module: nn.Module, inside_backward: bool) -> Call:
        call = Call(module)
        if self._calls:
            self._uses.end_cut_short(call)
        self._calls.push(call)  # first of all: the hook after the forward runs even if this one raises
        if not inside_backward and len(self._calls) == 1:
            # Nothing of an earlier forward or backward that was cut short is still going on.
            self._training.turn.begin_anew()
            self._backwards.forward_begins()
            self._uses.abandon()
            self._training.recorder.look()
            self._training.turn.begin(FORWARD, call.is_running)
        return call

    def _start_use(self, call: Call, unit: Unit, inside_backward: bool) -> None:
        """Of the unit by the call, unless one that encloses it uses the unit."""
        if inside_backward and torch.is_grad_enabled():
            self._backwards.enter()  # before a backward inside this one is taken for the whole
        if call.module not in unit.modules and unit.uses.count:
            return
        call.unit = unit
        call.recorded = inside_backward or torch.is_grad_enabled() or self._calls.is_recorded
        self._uses.start(unit, recorded=call.recorded, module_id=id(call.module))
        call.started = True
        if self._covers and unit is self._units[0] and not inside_backward:
            self._uses.cover()
            call.covers = True

    def _outermost_begins(self) -> Hooks | None:
        """The hooks that have taken the place of these, if any have."""
        if torch._C._get_tracing_state() is not None:
            raise UsageError(
                "the model was traced (torch.jit.trace, torch.onnx.export): what that makes reads parameters where they "
                "lie now, which is not where they will be. Trace a copy: copy.deepcopy(model) inside "
                "`with engine.gathered(model.parameters()):`."
            )
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            raise UsageError(
                "the model was called on fake tensors (FakeTensorMode, torch.export), where copies move nothing: its "
                "parameters would not be fetched. Call a copy: copy.deepcopy(model) inside "
                "`with engine.gathered(model.parameters()):`."
            )
        self._training.check()
        return self._successor() if torch.is_grad_enabled() else None

    def _follow_backward(self, call: Call, unit: Unit, args: Any, kwargs: Any, *, computed_again: bool) -> None:
        if computed_again:
            self._backwards.computed_again(unit)
        reads_values = call.module not in unit.modules or not is_lookup(call.module)
        call.use = use = BackwardUse(self._backwards, unit, call.module, reads_values=reads_values)
        # Before the forward: an in-place operation in it would move the hook to a place inside the unit.
        call.inputs = inputs = [tensor for tensor in tensors_in_call(args, kwargs) if tensor.requires_grad]
        # With a leaf among them PyTorch cannot tell when all are done: then the use ends with the graph task.
        if inputs and all(tensor.grad_fn is not None for tensor in inputs):
            if len(inputs) == 1:
                inputs[0].register_hook(use.end)
            else:
                register_multi_grad_hook(inputs, use.end, mode="all")

    # ---- after it ------------------------------------------------------------------------------------------------

    def _leave_module(self, unit: Unit, module: nn.Module, output: Any) -> None:
        was_cut_short = output is None and _is_cut_short()
        try:
            self._end_forward(unit, module, output)
        except Exception as error:
            if was_cut_short and self._training.failure is error:  # PyTorch goes on with what ended the forward
                self._training.untold = error
            raise
        if self._left_in_between and not self._calls:
            for enclosing, left in self._left_in_between if was_cut_short else ():
                enclosing.uses.companions.remove(left)
            self._left_in_between.clear()

    def _end_forward(self, unit: Unit, module: nn.Module, output: Any) -> None:
        if self._covers and not self._calls.has(module):
            first = self._first_numbers.get(id(module))  # none where what comes before a first forward failed
            if first is not None and torch.is_grad_enabled() and not is_lookup(module):
                self._backwards.watch_values(unit, id(module), first, output)
            return
        try:
            if self._calls.has_inside(module) and not self._training.has_failed:
                with self._training.failures():
                    self._uses.end_cut_short()  # of what this forward called, and caught the end of
            call = self._calls.pop(module)
            if call is not None and call.told is not None:
                call.told()
            if call is not None and call.unit is not None and call.started and not self._training.has_failed:
                self._after_forward(call, call.unit, output)
        finally:
            if not self._calls:
                self._training.turn.end(FORWARD)

    def _after_forward(self, call: Call, unit: Unit, output: Any) -> None:
        if isinstance(call.use, BackwardUse):
            self._await_backward(call, call.use, unit, output)
        with self._training.failures():
            try:
                for one in (*self._units[1:], unit) if call.covers else (unit, *unit.uses.companions):
                    self._report_writes(one)
            finally:
                self._uses.end(unit, recorded=call.recorded)
                if call.covers:
                    self._uses.uncover()
                if not self._calls and not in_backward():
                    self._events.forward_ended()

    def _await_backward(self, call: Call, use: BackwardUse, unit: Unit, output: Any) -> None:
        if type(output) is torch.Tensor and torch._C._functorch.peek_interpreter_stack() is None:
            outputs = [output] if output.requires_grad else []
        else:
            outputs = [level for tensor in tensors_in(output) for level in levels_of(tensor) if level.requires_grad]
        use.ended = self._backwards.tick()
        use.ends_with_parameters = not call.inputs and not _trains_others(unit, call.module)
        if use.ends_with_parameters and not self._covers and (unit.index, use.module_id) not in self._heard:
            self._hear_parameters(unit, use.module_id)
        if outputs:
            if len(outputs) == 1:
                outputs[0].register_hook(use.reach)
            else:
                register_multi_grad_hook(outputs, use.start, mode="any")
                for tensor in outputs:
                    tensor.register_hook(use.differentiate)
            self._backwards.shared_gradients.watch(unit, call.inputs, outputs)
        elif use.recorded_a_graph():
            # What it computed left by another way than its output: backward reaches it when it reaches its parent.
            enclosing = self._calls.innermost_unit(started=False)
            if enclosing is not None and self._uses.accompany(enclosing, unit) and output is None and _is_cut_short():
                self._left_in_between.append((enclosing, unit))

    def _hear_parameters(self, unit: Unit, module_id: int) -> None:
        """The gradients of a module's parameters, the last of which ends a use of it, are told of from now on."""
        with self._training.failures():
            waiting = {info.index for info in self._training.parameter_gradients.waiting.of(unit, module_id)}
            for position, info in enumerate(unit.parameters):
                if info.index in waiting:
                    self._hook_parameter(unit.index, position, info, waits=True)
            self._heard.add((unit.index, module_id))

    def _report_writes(self, unit: Unit) -> None:
        """What this forward wrote in place to the unit's parameters."""
        written = unit.written_parameters
        if torch.is_inference_mode_enabled():  # no versions are counted there
            written = [info for info in unit.open_parameters if info.was_written or id(info.parameter) in self._renormalized]
        for info in written:
            if not info.lent_count:
                info.note_version()
                self._events.forward_wrote(info)


def _is_cut_short() -> bool:
    """Whether the hook that asks, behind a forward without a result, is called on the way of an exception out of it."""
    return sys.exc_info()[1] is not None


def _trains_others(unit: Unit, module: nn.Module) -> bool:
    """Whether backward through a call of the module goes on to the gradients of other units. On its way it may read values of
    the unit, or of what comes with it, that are frozen or were detached: the gradients of the unit's own do not tell when it is
    through."""
    own = {id(info.parameter) for info in unit.part_of(id(module))}
    return any(parameter.requires_grad and id(parameter) not in own for parameter in module.parameters())


def _use_modules(unit: Unit, is_root: bool) -> list[nn.Module]:
    """The modules whose forward is a use of the unit: its own, and for the root those that hold its parameters too.

    The latter so that a part of the model that is called on its own finds the root's parameters there.
    """
    if not is_root:
        return unit.modules
    root = unit.modules[0]
    owned = {id(info.parameter) for info in unit.parameters}
    holders = [module for module in root.modules() if module is not root and _holds(module, owned)]
    return [root, *holders]


def _holds(module: nn.Module, owned: set[int]) -> bool:
    """Whether the module has one of these parameters, or a list or dict in it has, which is never called itself."""
    return any(id(parameter) in owned for parameter in module.parameters(recurse=False)) or any(
        not can_be_called(child) and _holds(child, owned) for child in module.children()
    )
