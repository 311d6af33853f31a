# SPDX-License-Identifier: Apache-2.0
"""What an engine takes into its hands of the user's model: which parameters are whose, their memory, guards and hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from offload.deferred_init.held_tensors import Slot
from offload.errors import ConfigError, UsageError
from offload.model.flat import ParameterInfo
from offload.model.guard import ParameterGuard, Remains
from offload.model.optimizer import OffloadOptimizer
from offload.model.unit import refer_to_own_weights
from offload.step.components import Components
from offload.step.hooks.module_hooks import Hooks
from offload.step.training import Training

_owned = WeakIdKeyDictionary()
"""Parameters that an open engine owns."""
_MODULE_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_load_state_dict_pre_hooks",
)  # fmt: skip
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_free(model: object, optimizer: object) -> None:
    """Raise where `model` and `optimizer` are not what an engine can be made of, or belong to one already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is of type {type(model).__name__}: expected a torch.nn.Module.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is of type {type(optimizer).__name__}: expected a torch.optim.Optimizer, or None.")
    check_modules(model)
    for fqn, parameter in model.named_parameters():
        if parameter in _owned:
            raise UsageError(
                f"parameter {fqn!r} is in an engine already: initialize was called before on this model or a part of "
                "it. Close that engine first, or keep using it."
            )
    if isinstance(optimizer, OffloadOptimizer):
        raise ConfigError(
            "optimizer is an engine's own: pass the torch.optim optimizer that was made from the model to initialize."
        )


def check_modules(model: nn.Module) -> None:
    """Raise where one of the modules is of a kind that cannot be trained here."""
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{what} is a ScriptModule ({type(module).__name__}), whose parameters TorchScript keeps out of reach: pass "
                "the module that it was made from, and torch.compile its blocks instead."
            )
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        lazy = [own for own, tensor in tensors if nn.parameter.is_lazy(tensor)]
        if lazy:
            raise ConfigError(
                f"{lazy[0]!r} of {what} ({type(module).__name__}) has no shape yet: run one forward of the model, on the CPU, "
                "before the optimizer is made and offload.initialize is called."
            )


class Taking:
    """A model on its way into an engine's hands: all of it, or it stays as it was before this was made.

    As long as there is this, what the parameters held stays in memory.
    """

    def __init__(self, model: nn.Module, parts: Components, slots: Sequence[Slot]) -> None:
        """`slots`: what is to be set besides."""
        self._model, self._parts = model, parts
        self._infos = parts.parameters
        self._guards = [info.guard for info in self._infos]
        self._owned = [info.parameter in _owned for info in self._infos]
        self._remains = Remains(info.parameter for info in self._infos)
        self._held: dict[int, torch.Tensor] = {}
        """By parameter index: what a parameter held; of one on the meta device the Parameter that has it meanwhile."""
        self._slots = slots
        self._former_slots: list[Slot] = [(slots, name, slots[name]) for slots, name, _ in self._slots]
        self._attributes = [(module, frozenset(vars(module))) for module in model.modules()]
        self._hooks = [
            (holder, name, frozenset(getattr(holder, name) or ()))
            for holders, names in (
                (list(model.modules()), _MODULE_HOOKS),
                ([info.parameter for info in self._infos], _PARAMETER_HOOKS),
            )
            for holder in holders
            for name in names
        ]

    def take(self, training: Training, hooks: Hooks) -> None:
        """Point the parameters at their flats, put the buffers in their places, a guard before every parameter: from now on
        its value is there during uses only. What is raised on the way, an interrupt too, has changed nothing."""
        try:
            self._remains.take()
            for unit in self._parts.units:
                unit.open_up()
                unit.point_parameters_at_flats(self._held)
            for slots, name, tensor in self._slots:
                slots[name] = tensor
            for info in self._infos:
                info.guard = ParameterGuard(info.fqn, info.parameter, _bringer(training, info.index))
            for unit in self._parts.units:
                unit.join_guards()
                unit.close_off()
            hooks.install()
            for info in self._infos:
                _owned[info.parameter] = True
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Also what `take` has done wholly, and attributes that modules got since. Twice is as once."""
        while True:
            try:
                self._undo()
                return
            except KeyboardInterrupt:
                continue  # nothing is left half done; what began the undoing is raised

    def _undo(self) -> None:
        """Can be done again where it was interrupted."""
        for info, guard, owned in zip(self._infos, self._guards, self._owned, strict=True):
            if not owned:
                _owned.pop(info.parameter, None)
            if info.guard is not None and info.guard is not guard:
                info.guard.release()
            self._undo_pointing(info)
            info.guard = guard
            if guard is not None:  # of the engine that this one was to be made anew from
                guard.close_off(readable=False)
        refer_to_own_weights([self._model])
        self._remains.put_back()
        for slots, name, former in self._former_slots:
            slots[name] = former
        for module, own in self._attributes:
            for name in vars(module).keys() - own:
                del vars(module)[name]
        for holder, name, before in self._hooks:  # also of a hook whose installing was interrupted
            known: dict[int, Any] = getattr(holder, name) or {}
            for key in known.keys() - before:
                del known[key]

    def _undo_pointing(self, info: ParameterInfo) -> None:
        held = self._held.get(info.index)
        if held is None:
            return
        if isinstance(held, nn.Parameter):
            if held.is_meta:  # else the two were not swapped yet. The guard may have left weak references, which do no harm
                torch._C._swap_tensor_impl(info.parameter, held)
        else:
            info.parameter.data = held


def disown(parts: Components) -> None:
    """They belong to none any more."""
    for info in parts.parameters:
        _owned.pop(info.parameter, None)


def _bringer(training: Training, parameter_index: int) -> Callable[[], None]:
    # Guards are found through a table of the process: it must not keep the engine, or its memory, alive.
    training_reference = weakref.ref(training)

    def bring_in() -> None:
        training = training_reference()
        if training is None:
            raise UsageError("the engine of this parameter is gone without close(): its value cannot be read any more.")
        training.bring_in(parameter_index)

    return bring_in
