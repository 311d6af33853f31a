# SPDX-License-Identifier: Apache-2.0
"""The tensors which modules hold besides their parameters: buffers, and tensors in plain attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Slot = tuple[dict[str, Any], str, Any]
"""What a module holds under a name: `slots[name] = content`."""


def held_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers of `modules`, and the tensors other than Parameters which are attributes of theirs or items of a
    list, tuple or dict which is one; each once, not looking into submodules."""
    held: dict[int, Tensor] = {}
    for module in modules:
        for slots in (module._buffers, module.__dict__):
            for content in slots.values():
                held.update((id(tensor), tensor) for tensor in _tensors(content))
    return list(held.values())


def replacing_held_tensors(modules: Iterable[nn.Module], replacements: Mapping[int, Tensor]) -> list[Slot]:
    """What must be set so that `replacements[id(tensor)]` takes the place of each held `tensor` of which the id is a key."""
    return [
        (slots, name, _mapped(content, lambda leaf: replacements.get(id(leaf), leaf)))
        for module in (modules if replacements else ())
        for slots in (module._buffers, module.__dict__)
        for name, content in slots.items()
        if any(id(tensor) in replacements for tensor in _tensors(content))
    ]


def kept_by_libraries() -> list[Slot]:
    """Tensors that a library computes once and keeps for the process: the tables of bitsandbytes' codes."""
    tables: dict[str, Any] = getattr(sys.modules.get("bitsandbytes.functional"), "name2qmap", {})
    return [(tables, name, table) for name, table in tables.items()]


def _tensors(content: Any) -> list[Tensor]:
    if type(content) in (list, tuple):
        items = list(content)
    elif type(content) is dict:
        items = list(content.values())
    else:
        items = [content]
    return [item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter)]


def _mapped(content: Any, transform: Callable[[Any], Any]) -> Any:
    if type(content) in (list, tuple):
        return type(content)(transform(item) for item in content)
    if type(content) is dict:
        return {key: transform(item) for key, item in content.items()}
    return transform(content)
