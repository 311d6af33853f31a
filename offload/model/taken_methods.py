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
    """What stands in the model's attributes before methods of its class, from `take` until `give_back`. Nothing is kept alive
    by it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._taken: dict[str, _Method] = {}

    def take(self, model: nn.Module, replacements: Mapping[str, Replacement]) -> None:
        """Of those that the model has; one that was set on the model itself stays."""
        for name, replacement in replacements.items():
            before = vars(model).get(name)  # an engine's that is gone may have left its own
            if (before is None or isinstance(before, _Method)) and callable(getattr(type(model), name, None)):
                self._taken[name] = _Method(model, name, replacement)  # first: an interrupt may come between the two
                vars(model)[name] = self._taken[name]

    def give_back(self) -> None:
        model = self._model()
        for name, method in self._taken.items():
            if model is not None and vars(model).get(name) is method:
                del vars(model)[name]
        self._taken.clear()


class _Method:
    """A copy of the model has a plain method in its place."""

    def __init__(self, model: nn.Module, name: str, replacement: Replacement) -> None:
        self._model, self.__name__, self._replacement = weakref.ref(model), name, weakref.WeakMethod(replacement)
        self.__doc__, self.__wrapped__ = getattr(type(model), name).__doc__, getattr(type(model), name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        model, replacement = self._model(), self._replacement()
        own = getattr(type(model), self.__name__).__get__(model)
        return own(*args, **keywords) if replacement is None else replacement(own, *args, **keywords)

    def __reduce__(self) -> Any:
        return getattr, (self._model(), self.__name__)
