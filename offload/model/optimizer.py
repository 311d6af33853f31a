# SPDX-License-Identifier: Apache-2.0
"""The optimizer that the user's loop sees."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from offload.device.arithmetic.rules import Hyper
from offload.errors import UsageError
from offload.model.optimizer_kinds import check_group, hyper_of_group, kind_name, moments_of, state_names

MARKER = "offload"
"""The entry of an optimizer's state_dict that says where the state is."""

_ELSEWHERE = (
    b"moments and step counts of this state_dict lie in the tiers of an offload engine: "
    b"engine.save_checkpoint(dir) saves them, engine.load_checkpoint(dir) loads them"
)
"""Stands for every value of the state, so that no other optimizer can take the state_dict for a fresh one's and begin anew:
torch's own ask a step count that is no tensor for a number when they load, and that error repeats these bytes. Plain bytes
pass through copies, `torch.save` and `torch.load` with weights_only."""


class Stepper(Protocol):
    """What the facade needs of the engine."""

    @property
    def step_count(self) -> int: ...

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def owns(self, parameter: object) -> bool: ...


class _StateInTiers(defaultdict[torch.Tensor, Any]):
    """Empty, and says why where somebody asks for a parameter's state."""

    def __missing__(self, key: torch.Tensor) -> Any:
        raise UsageError(
            "optimizer.state holds nothing: moments and step counts lie in the engine's tiers. "
            "engine.save_checkpoint(dir) writes them."
        )


class OffloadOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` over the user's own `param_groups`, whose state lies in the engine's tiers.

    Learning-rate schedulers work on it as on any other; `step()` and `zero_grad()` are the engine's. `param_groups` is
    the very list of the optimizer that was passed to `initialize`, so a scheduler built on that one works too.
    """

    # GradScaler hands an optimizer with this flag its scale instead of reading `p.grad`: then `step` can say what to
    # do.
    _step_supports_amp_scaling = True

    stepper: Stepper
    """What steps it now: another where the engine's parts were made anew. Set by the engine, before it is used."""

    def __init__(self, source: torch.optim.Optimizer) -> None:
        super().__init__([torch.nn.Parameter(torch.empty(0, device="cpu"))], dict(source.defaults))
        self.state = _StateInTiers()
        self.param_groups = source.param_groups
        self.defaults = source.defaults
        self.source_class, self._source = type(source), source
        refusal = source.register_step_pre_hook(_refuse_step)
        # Hooks around the steps of the optimizer that was given, whenever they are registered, are around those of this one.
        self._optimizer_step_pre_hooks = source._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = source._optimizer_step_post_hooks
        self._finalizer = weakref.finalize(self, refusal.remove)
        self._hypers: dict[int, Hyper] = {}
        """By group: the numbers as they were last, the same object as long as they are the same."""
        self.moments, self.kind_name = moments_of(source), kind_name(source)

    def disown(self) -> None:
        """The optimizer that was given is its user's again."""
        self._finalizer()

    def __reduce__(self) -> Any:
        raise UsageError(
            "an engine's optimizer cannot be copied or pickled, its state lies in the tiers: engine.save_checkpoint(dir) saves "
            "it, optimizer.state_dict() holds the numbers of its groups."
        )

    def hyper_of(self, group_index: int) -> Hyper:
        """The numbers of one parameter group, as they stand now. Raises `UsageError` where its records cannot follow them."""
        check_group(self._source, self.param_groups[group_index], group_index)
        hyper = hyper_of_group(self._source, self.param_groups[group_index])
        if not set(hyper.moments) <= set(self.moments):
            raise UsageError(
                f"momentum={hyper.beta1:g} of parameter group {group_index} was set after initialize, and without "
                "momentum no buffer was made for it: give the optimizer a momentum above 0 from the start."
            )
        if self._hypers.get(group_index) != hyper:
            self._hypers[group_index] = hyper
        return self._hypers[group_index]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Begin the update of every parameter that has a gradient. It runs on under the next forward."""
        if getattr(self, "grad_scale", None) is not None:
            raise UsageError(
                "torch.amp.GradScaler cannot scale gradients that the engine took over: drop the scaler, set "
                "Config(dtype='fp16') "
                "(loss_scale defaults to dynamic) and call engine.backward(loss)."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.stepper.step()
        # What learning-rate schedulers look at, to warn of a `scheduler.step()` that comes before the first of an optimizer.
        for one in (self, self._source):
            vars(one)["_opt_called"] = True
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all that it has; with `set_to_none=False` those that were there become zeros, which a step
        then applies. The latter is collective."""
        self.stepper.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The group's parameters are trained from the next forward on. `UsageError` where one is not the model's."""
        stepper = getattr(self, "stepper", None)
        given = param_group.get("params")
        if stepper is not None and given is not None:
            listed = [given] if isinstance(given, torch.Tensor) else list(given)
            tensors = [one[1] if isinstance(one, tuple) else one for one in listed]
            position = next((index for index, one in enumerate(tensors) if not stepper.owns(one)), None)
            if position is not None:
                raise UsageError(
                    f"parameter {position} of the group given to add_param_group is not one of the engine's model: give it "
                    "parameters that the model had at offload.initialize, frozen or not. Else close the engine, change the "
                    "model and initialize again."
                )
            param_group = param_group | {"params": listed}
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the param_groups, and under "offload" where the rest is: moments and step counts lie in the tiers.

        Wrappers that call `state_dict` and `load_state_dict` get back what they had. For training to go on from:
        `Engine.save_checkpoint`.
        """
        numbers = itertools.count()
        groups = [group | {"params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        marker = {"step_count": self.stepper.step_count, "state": "in the engine's tiers: engine.save_checkpoint(dir) saves it"}
        state = {number: dict.fromkeys(state_names(self._source), _ELSEWHERE) for number in range(next(numbers))}
        return {"state": state, "param_groups": copy.deepcopy(groups), MARKER: marker}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the numbers of the param_groups to what `state_dict` returned after as many steps as the engine has done."""
        marker = state_dict.get(MARKER)
        if not isinstance(marker, Mapping) or any(set(one.values()) - {_ELSEWHERE} for one in state_dict["state"].values()):
            raise UsageError(
                "optimizer.load_state_dict() cannot reach state that lies in the tiers: load it into the torch optimizer "
                "before offload.initialize (its moments and step counts are taken over), or use engine.load_checkpoint(dir)."
            )
        if marker.get("step_count") != self.stepper.step_count:
            raise UsageError(
                f"optimizer.load_state_dict() was given the numbers of step {marker.get('step_count')}, and the engine has "
                f"done {self.stepper.step_count} steps: moments and step counts are not among them. Call "
                "engine.load_checkpoint(dir) of that step first; it restores the param_groups too."
            )
        groups = copy.deepcopy(state_dict["param_groups"])
        wanted = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != wanted:
            raise UsageError(
                f"optimizer.load_state_dict() was given other groups of parameters: expected groups of {wanted} parameters."
            )
        for ours, given in zip(self.param_groups, groups, strict=True):
            ours.update({name: value for name, value in given.items() if name != "params"})


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, OffloadOptimizer):
        return
    raise UsageError(
        f"{type(optimizer).__name__}.step() was called on the optimizer that was given to offload.initialize, which trains no "
        "more: call engine.optimizer.step(), or engine.step()."
    )
