# SPDX-License-Identifier: Apache-2.0
"""Methods of the user's model that are called in another way while an engine has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Replacement = Callable[..., Any]
"""Called with the model's own method first, then with what it was given."""


class TakenMethods:
    """What stands in the model's attributes before its methods, from `take` until `give_back`. Of the model it keeps alive
    what had been set there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._taken: dict[str, _Method] = {}

    def take(self, model: nn.Module, replacements: Mapping[str, Replacement], *, set_too: bool = False) -> None:
        """Of those that the model's class has. `set_too`: also one that was set on the model itself, which else stays."""
        for name, replacement in replacements.items():
            before = vars(model).get(name)
            if isinstance(before, _Method):  # an engine's that is gone may have left its own
                before = before.was_set
            if (before is None or (set_too and callable(before))) and callable(getattr(type(model), name, None)):
                # First: an interrupt may come between the two.
                self._taken[name] = _Method(model, name, replacement, before)
                vars(model)[name] = self._taken[name]

    def give_back(self) -> None:
        model = self._model()
        for name, method in self._taken.items():
            if model is not None and vars(model).get(name) is method:
                if method.was_set is None:
                    del vars(model)[name]
                else:
                    vars(model)[name] = method.was_set
        self._taken.clear()


class _Method:
    """A copy of the model has a plain method in its place. `was_set`: what had been set on the model itself."""

    def __init__(self, model: nn.Module, name: str, replacement: Replacement, was_set: Callable[..., Any] | None) -> None:
        self._model, self.__name__, self._replacement = weakref.ref(model), name, weakref.WeakMethod(replacement)
        self.was_set = was_set
        self.__wrapped__ = getattr(type(model), name) if was_set is None else was_set
        self.__doc__ = self.__wrapped__.__doc__

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        model, replacement = self._model(), self._replacement()
        own = getattr(type(model), self.__name__).__get__(model) if self.was_set is None else self.was_set
        return own(*args, **keywords) if replacement is None else replacement(own, *args, **keywords)

    def __reduce__(self) -> Any:
        return (getattr, (self._model(), self.__name__)) if self.was_set is None else (_same, (self.was_set,))


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
