# SPDX-License-Identifier: Apache-2.0
"""Backward through a backward (`create_graph=True`): what it computes with is fetched for each of its functions.

A backward that records a graph makes functions which compute with parameters and lie in no forward. So, while it goes through
a unit's call, each function of that call gets a hook before it runs, which has the unit fetched, and one after it, which gives
the same to the functions that it made. Another backward, through all of these in whatever order, then finds each unit when it
needs it, and needs no more of them at once than a first one. A third order follows by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload.model.unit import Unit
from offload.step.uses import Uses

_MOST_NODES = 1024
"""Functions made by one function's backward: more is none that this looks for."""

Reach = Callable[[int, int | None], None]
"""Tells that backward is about to use a unit: (index, version of the values that it must find)."""


def levels_of(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """The tensor, and in a transform of torch.func what it is to the transforms around that one: each has its own graph."""
    while tensor is not None:
        yield tensor
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        tensor = torch._C._functorch.get_unwrapped(tensor) if is_wrapped else None


class SecondOrder:
    """See the module. Runs in the thread of backward."""

    def __init__(
        self,
        units: Sequence[Unit],
        uses: Uses,
        reach: Reach,
        failures: Callable[[], AbstractContextManager[None]],
    ) -> None:
        # The hooks of functions know units by index: what they refer to lives as long as a graph, out of the collector's sight.
        self._units, self._uses, self._reach, self._failures = units, uses, reach, failures
        self._held: dict[int, int] = {}
        """By unit that is held for them: the number of the last function that needs it."""
        self._last = 0

    def follow(self, node: Any, unit_index: int, version: int | None, first_number: int) -> None:
        """A backward that records a graph goes through a call of the unit, from `node`; forward numbered the call's functions
        from `first_number`."""
        self._adopt([node], lambda one: one._sequence_nr() < first_number, unit_index, version)

    def _adopt(self, nodes: Iterable[Any], is_outside: Callable[[Any], bool], unit_index: int, version: int | None) -> None:
        coming, key = list(nodes), ("offload", id(self), unit_index)
        for _ in range(_MOST_NODES):
            if not coming:
                return
            node = coming.pop()
            if node is None or hasattr(node, "variable") or key in node.metadata or is_outside(node):
                continue
            node.metadata[key] = version
            self._hook(node, unit_index, version)
            coming.extend(following for following, _ in node.next_functions)

    def _hook(self, node: Any, unit_index: int, version: int | None) -> None:
        reference, number = weakref.ref(self), node._sequence_nr()
        first_number = 0

        def before(_: Any) -> None:
            nonlocal first_number
            held = reference()
            if held is not None:
                first_number = torch._C._autograd._get_sequence_nr()
                with held._failures():
                    held._need(unit_index, version, number)

        def after(made: tuple[torch.Tensor | None, ...], given: tuple[torch.Tensor | None, ...]) -> None:
            held = reference()
            if held is None or not torch.is_grad_enabled():
                return
            this = torch._C._current_autograd_node()
            known = {one.grad_fn for tensor in given for one in levels_of(tensor)}
            known |= {this, *(following for following, _ in this.next_functions)}
            starts = [one.grad_fn for tensor in made for one in levels_of(tensor)]
            held._adopt(starts, lambda one: one in known or one._sequence_nr() < first_number, unit_index, version)

        node.register_prehook(before)
        node.register_hook(after)

    def _need(self, unit_index: int, version: int | None, number: int) -> None:
        self._reach(unit_index, version)
        if unit_index not in self._held and not self._units[unit_index].uses.count:
            self.let_go(besides={number})
            self._uses.start(self._units[unit_index], recorded=True)
            self._held[unit_index] = number
        elif unit_index in self._held:
            self._held[unit_index] = number
        self.let_go(besides={number, self._last})
        self._last = number

    def let_go(self, besides: Iterable[int] = ()) -> None:
        """What functions needed that are done; `besides`: numbers of those that are not, or whose units the next may need."""
        for unit_index in [index for index, number in self._held.items() if number not in besides]:
            del self._held[unit_index]
            self._uses.end(self._units[unit_index], recorded=True)

    def abandon(self) -> None:
        """It was cut short, and every use of a unit with it."""
        self._held.clear()
