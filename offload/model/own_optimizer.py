# SPDX-License-Identifier: Apache-2.0
"""Optimizers without a kernel here, the user's own or others of torch's: `step` is called on one run of elements at a time.

That is the same as on whole parameters where it computes element by element, and where all it remembers are arrays in the
parameter's shape (at most as many as there are `MOMENTS`, whose places in the record they take) and counts of the steps. Both
are tried before anything is allocated: three steps on a parameter as a whole, and the same ones by parts, each with an
optimizer that knows no more than the record holds.

The bits are those of torch's operations on these runs of elements; torch may round the last few of a run otherwise than the
others, so another size of the chunks can change a last bit, which it cannot with the rules that have a kernel.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from offload.device.arithmetic.rules import MOMENTS
from offload.errors import ConfigError

_SHAPE, _CUT, _STEPS = (48, 1024), 20_000, 3
"""Of what is tried: as large as a layer, since some optimizers treat what is small in another way."""


class _Unfit(Exception):
    """Why it cannot be called on parts, as a clause."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnOptimizer:
    """What was found by trying it.

    names     the optimizer's name of each moment that it keeps
    counters  what counts steps in its state, and one that says of which kind
    """

    kind: type
    attributes: Mapping[str, Any]
    names: dict[str, str]
    counters: dict[str, Any]

    def step_of(self, group: Mapping[str, Any]) -> OwnStep:
        """With the group's numbers as they are now, also where they are tensors or lists that the loop changes in place."""
        options = {name: value for name, value in group.items() if name != "params"}
        return OwnStep(self, {name: _kept(value) if name != "param_names" else value for name, value in options.items()})

    def made(self, options: Mapping[str, Any], parameter: nn.Parameter) -> Any:
        """One which has this one parameter, and has done nothing yet."""
        optimizer: Any = object.__new__(self.kind)
        vars(optimizer).update(self.attributes)
        vars(optimizer).update({name: OrderedDict() for name in self.attributes if name.endswith("_hooks")})
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [dict(options) | {"params": [parameter]}]
        return optimizer


@dataclass(frozen=True, slots=True, eq=False)
class OwnStep:
    """The step of one parameter group, with these numbers. Those of the same numbers are equal."""

    optimizer: OwnOptimizer
    options: Mapping[str, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnStep) or self.optimizer is not other.optimizer:
            return False
        options, others = self.options, other.options
        return options.keys() == others.keys() and all(_are_same(value, others[name]) for name, value in options.items())

    def __hash__(self) -> int:
        return hash(self.optimizer)

    @property
    def moments(self) -> tuple[str, ...]:
        return tuple(self.optimizer.names)

    def __call__(self, p: Tensor, g: Tensor, moments: dict[str, Tensor], step: int) -> Tensor:
        """The new weights of p, with the gradient g, both float32 [numel]; `moments` are replaced. Update `step`, from 1: at
        the first the optimizer makes its state. p and the old moments may be written to. Any thread."""
        own = self.optimizer
        parameter = nn.Parameter(p)
        optimizer = own.made(self.options, parameter)
        if step > 1:
            state: dict[str, Any] = {theirs: moments[ours] for ours, theirs in own.names.items()}
            state |= {name: _count_like(one, step - 1) for name, one in own.counters.items()}
            optimizer.state[parameter] = state
        _step(optimizer, parameter, g)
        for ours, theirs in own.names.items():
            moments[ours] = optimizer.state[parameter][theirs]
        return parameter.data


def _kept(value: Any) -> Any:
    """Of an option what it is now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return list(map(_kept, value))
    return tuple(map(_kept, value)) if type(value) is tuple else value


def _are_same(one: Any, other: Any) -> bool:
    """Of one option two values, as `_kept` returned them."""
    if one is other:
        return True
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        return are_tensors and one.device == other.device and torch.equal(one, other)
    return bool(one == other)


def _step(optimizer: Any, parameter: nn.Parameter, g: Tensor) -> None:
    parameter.grad = g
    with torch.no_grad():
        optimizer.step()


def _count_like(one: Any, count: int) -> Any:
    return torch.full_like(one, count) if isinstance(one, Tensor) else type(one)(count)


_found: WeakKeyDictionary[torch.optim.Optimizer, OwnOptimizer] = WeakKeyDictionary()


def own_optimizer(optimizer: torch.optim.Optimizer) -> OwnOptimizer:
    """Tries an optimizer, once. Raises `ConfigError` with the reason where it cannot be called on parts of parameters."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    if bits != 32:  # bitsandbytes': the trial would refuse it too, without saying what to pass instead
        raise ConfigError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} with states of {bits} bits is not "
            "supported: it computes block by block. Pass torch.optim.AdamW and Config(state_format='8bit')."
        )
    inner = next((name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:  # a trial of the wrapper would be one of what it wraps, and change that
        raise ConfigError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} wraps another, "
            f"{type(getattr(optimizer, inner)).__qualname__} in its attribute {inner!r}: pass that one. Where a library wraps "
            "it (accelerator.prepare, fabric.setup), offload.initialize comes before, and the library gets engine.optimizer."
        )
    if optimizer not in _found:
        apart = ("state", "param_groups", "step")
        attributes = {name: value for name, value in vars(optimizer).items() if name not in apart}
        own = OwnOptimizer(type(optimizer), attributes, {}, {})
        try:
            for group in optimizer.param_groups:
                _try(own, own.step_of(group).options)
        except _Unfit as unfit:
            raise ConfigError(
                f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported: {unfit}. The engine "
                "updates parts of parameters, one after the other. Pass torch.optim.AdamW, Adam, Adagrad, SGD or offload.Lion "
                "(or the Lion of lion-pytorch or timm), or any optimizer that computes element by element."
            ) from unfit.__cause__
        _found[optimizer] = own
    return _found[optimizer]


def _try(own: OwnOptimizer, options: Mapping[str, Any]) -> None:
    """Three steps as a whole, then by parts. `own.names` and `own.counters` grow by what it keeps. Raises `_Unfit`."""
    random = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(_SHAPE, generator=random, dtype=torch.float32, device="cpu"))
    gradients = [torch.randn(_SHAPE, generator=random, dtype=torch.float32, device="cpu") for _ in range(_STEPS)]
    parts = [whole.detach().flatten()[:_CUT].clone(), whole.detach().flatten()[_CUT:].clone()]
    try:
        optimizer = own.made(options, whole)
        for count, gradient in enumerate(gradients, 1):
            _step(optimizer, whole, gradient.clone())
            _sort(optimizer.state[whole], count, own.names, own.counters)
        step = OwnStep(replace(own, names=_used(own.names, optimizer.state[whole])), options)
        arrays: list[dict[str, Tensor]] = [{}, {}]
        for count, gradient in enumerate(gradients, 1):
            pieces = gradient.flatten()[:_CUT].clone(), gradient.flatten()[_CUT:].clone()
            parts = [step(p, g, own, count) for p, g, own in zip(parts, pieces, arrays, strict=True)]
    except _Unfit:
        raise
    except Exception as error:
        raise _Unfit(f"its step fails on a part of a parameter ({type(error).__name__}: {error})") from error
    found = torch.cat([part.flatten() for part in parts])
    if not torch.allclose(found, whole.detach().flatten(), rtol=1e-5, atol=1e-6):
        raise _Unfit(
            "what it computes of an element depends on more than that element's gradient and state, as on the others of its "
            "parameter (LAMB, Muon)"
        )


def _used(names: Mapping[str, str], state: Mapping[str, Any]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in names.items() if theirs in state}


def _sort(state: Mapping[str, Any], count: int, names: dict[str, str], counters: dict[str, Any]) -> None:
    """Tell arrays from counters in the state after step `count`. Raises `_Unfit` for what is neither."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == _SHAPE and value.dtype == torch.float32:
            if name not in names.values():
                free = [one for one in MOMENTS if one not in names]
                if not free:
                    raise _Unfit(f"of a parameter it keeps {', '.join(state)}, more than {len(MOMENTS)} arrays")
                names[name if name in free else free[0]] = name
        elif (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)) and value == count:
            counters.setdefault(name, value)
        elif value is not None:
            raise _Unfit(
                f"its state of a parameter has {name!r}, which is neither an array in the parameter's shape nor a count"
            )
