# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operations, each seen as it is done: for devices that count what operations make, or take."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SeenOperations(TorchDispatchMode):
    """Every operation but views goes through `seen`. For the calling thread, and the one that backward runs in on the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled inside; the wrapper that would keep dynamo out costs more than what is counted.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = kwargs or {}
        return function(*args, **given) if only_views(function) else self.seen(function, args, given)

    def seen(self, function: Any, args: Any, given: Mapping[str, Any]) -> Any:
        """The operation's result."""
        raise NotImplementedError


@functools.cache
def only_views(function: Any) -> bool:
    """Whether it makes no memory and writes none: what it returns are parts of what it is given."""
    returns = function._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Those among the arguments or results of an operation, which lie in lists at most."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(one for one in value if isinstance(one, Tensor))
    return found


def with_new_storage(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Those outputs that have memory of their own."""
    known = {one.untyped_storage()._cdata for one in inputs}
    found: dict[int, Tensor] = {}
    for one in outputs:
        identity = one.untyped_storage()._cdata
        if identity not in known:
            found.setdefault(identity, one)
    return list(found.values())
