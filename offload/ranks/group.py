# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of the ranks that train one model, be they several or one; which of the two is decided by `join_ranks`.

    Group    who they are, and what they tell one another     Ranks (`offload.ranks.transport`) or Alone
    Meeting  where they pass points of the program together   Rendezvous (`offload.ranks.rendezvous`) or NoMeeting

Alone, every agreement is the identity: what one rank says is all that is said, and it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from offload.ranks.next_transfers import MeetingPoint

T = TypeVar("T")


class Group(Protocol):
    """Members are named by their index. `shards`: those that share one set of shards; `replicas`: those that hold the shard of
    this one. Everything but the fields and `statistics` is collective."""

    index: int
    world_size: int
    local_world_size: int
    shard_index: int
    shard_count: int
    shards: tuple[int, ...]
    replicas: tuple[int, ...]

    def exchange(self, payload: Tensor) -> list[Tensor]:
        """Everybody's payload, by member: same shape and dtype on all, CPU."""

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by member; lengths may differ."""

    def gather(self, own: Tensor, into: Tensor | None, wanters: frozenset[int], whole_nbytes: int) -> None:
        """All-gather of one flat over the ranks of `shards`, to those members that want it: `own`, uint8 [n] on the host, and
        `into`, uint8 [n * shard_count], where this one does."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """`tensor` (host, contiguous) of member `source` into that of all others."""

    def use_devices(self, device: torch.device) -> None:
        """Talk between the devices where that is possible."""

    def renewed(self) -> Group:
        """The same members with connections of their own, for parts that are made anew: what closes an engine's parts gives
        back its group too."""

    def statistics(self) -> dict[str, dict[str, int]]:
        """By verb: how often, and the bytes of the whole buffers that it was about."""


class Meeting(Protocol):
    """Owned by the thread that drives the model, but for `watch` and `abandon`, which any thread may call."""

    waits_for_others: bool
    """Whether a call may last until another rank makes its own: an interrupt is not held then."""

    @property
    def failure(self) -> BaseException | None:
        """Why the ranks can meet no more, if they cannot."""

    def meet(self, point: MeetingPoint, action: Callable[[], Any] | None = None, *, argument: int = 0) -> Any:
        """Wait until every rank is here; then `action` runs on all of them. Returns its result."""

    def alongside(self, point: MeetingPoint, act: Callable[[], T]) -> T:
        """`act`, which waits for the other ranks in a way of its own, while it is seen when one of them is gone."""

    def watch(self, on: bool) -> None:
        """From now on it is seen when a rank is gone, though nothing is asked of it; or no longer."""

    def abandon(self, reason: str) -> None:
        """This rank stops here. Never raises."""


class Alone:
    """The group of one rank."""

    index, world_size, local_world_size = 0, 1, 1
    shard_index, shard_count = 0, 1
    shards: tuple[int, ...] = (0,)
    replicas: tuple[int, ...] = (0,)

    def exchange(self, payload: Tensor) -> list[Tensor]:
        return [payload]

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def gather(self, own: Tensor, into: Tensor | None, wanters: frozenset[int], whole_nbytes: int) -> None:
        if into is not None and into.data_ptr() != own.data_ptr():
            into.copy_(own)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def use_devices(self, device: torch.device) -> None:
        pass

    def renewed(self) -> Alone:
        return self

    def statistics(self) -> dict[str, dict[str, int]]:
        return {}


class NoMeeting:
    """Every point is passed at once."""

    waits_for_others = False
    failure: BaseException | None = None

    def meet(self, point: MeetingPoint, action: Callable[[], Any] | None = None, *, argument: int = 0) -> Any:
        return action() if action is not None else None

    def alongside(self, point: MeetingPoint, act: Callable[[], T]) -> T:
        return act()

    def watch(self, on: bool) -> None:
        pass

    def abandon(self, reason: str) -> None:
        pass
