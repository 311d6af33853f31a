# SPDX-License-Identifier: Apache-2.0
"""The ranks that train one model together (`offload.ranks.arrangement`), and the only place that talks to them:
torch.distributed, point to point.

Transfers over the host go point to point through a gloo group of the engine's own: each shard is sent from where it lies
straight into its place at the receiver, nothing is staged or copied out, and a peer that fails is known by its rank.
(gloo's own all-gather and reduce-scatter copy, and move twice the bytes.) Between GPUs of their own, NCCL gathers straight into
the units' memory and exchanges gradients straight out of the flat buffers, on the accelerator's stream for it. Every method
belongs to the one thread that the engine lets communicate; those over the host block; tags keep the streams apart.
"""

from __future__ import annotations

import itertools
import os
import struct
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import RankError
from offload.ranks.arrangement import Arrangement
from offload.ranks.threads import Threads

_EXCHANGE, _BYTES, _PREFIX, DATA = range(7000, 7004)
"""Tags, in a range that user code on the same ranks does not meet: the group is the engine's own in any case."""


@dataclass(slots=True)
class Posted:
    """Transfers under way, by the member at their other end."""

    works: list[tuple[int, Any]] = field(default_factory=list)


class Ranks:
    """See the module, and `offload.ranks.group.Group`. Made by `offload.ranks.joining`, where there are several ranks."""

    threads = Threads()
    _numbers = itertools.count(1)
    """Of those that a process makes: the same on all ranks, so that each has a part of the store of its own."""
    has_devices = False
    """Whether `gather_on_device`, `exchange_on_device` and `add_replicas_on_device` work."""

    def __init__(self, arrangement: Arrangement, timeout: timedelta) -> None:
        self._arrangement, self._timeout, number = arrangement, timeout, next(self._numbers)
        self.world_size = len(arrangement.members)
        self.index = arrangement.members.index(dist.get_rank())
        self.shards, self.replicas = arrangement.shards, arrangement.replicas
        self.shard_count = len(arrangement.shards)
        self.shard_index = arrangement.shards.index(self.index)
        self.phase = "initialize"
        self._traffic: dict[str, dict[str, int]] = {}
        self.local_world_size = 1
        self._groups: list[Any] = []
        self.close = weakref.finalize(self, _destroy, self._groups)
        """Give back the groups of all ranks, with their threads and connections. Nothing may be under way. Idempotent."""
        self.close.atexit = False
        everybody = range(self.world_size)
        self._group: Any = self._make_group(everybody, "gloo")
        self._replica_group = self._make_group(self.replicas, "gloo") if len(self.replicas) > 1 else None
        self._device_group: Any = None
        self._device_replica_group: Any = None
        self._device_backend = "nccl"
        self.order_digest = 0
        """Of the order of transfers between GPUs, the engine's and the user's; equal on all ranks, see `_note_order`."""
        self._store = dist.distributed_c10d.PrefixStore(f"offload/{number}", dist.distributed_c10d._get_default_store())
        self._said_failed = self._said_order = False

    def renewed(self) -> Ranks:
        """See `Group`. Collective."""
        ranks = Ranks(self._arrangement, self._timeout)
        ranks.local_world_size, ranks.phase = self.local_world_size, self.phase
        return ranks

    def _make_group(self, indices: Sequence[int], backend: str) -> Any:
        members = [self._arrangement.members[index] for index in indices]
        # Ranks outside of the members know nothing of them. PyTorch then names the group by its members, and a second one
        # of that name would find the addresses of the first, so that such a group cannot be given back.
        is_local = len(members) < dist.get_world_size()
        try:
            group = dist.new_group(members, backend=backend, timeout=self._timeout, use_local_synchronization=is_local)
        except RuntimeError as error:
            raise RankError(
                f"rank {dist.get_rank()} could not connect to the ranks {members} within {self._timeout} ({error}): one of "
                "them failed, hangs or is gone. Start all of them again from the last checkpoint."
            ) from error
        if not is_local:
            self._groups.append(group)
        return group

    def leave(self) -> None:
        """Close the connections to the others, who see at once that this rank meets them no more. By the thread that makes its
        transfers, while none is under way."""
        leaving = [group for group in self._groups if group in (self._group, self._replica_group)]
        for group in leaving:
            self._groups.remove(group)
        self._group = self._replica_group = None  # they close with the last reference
        _destroy(leaving)

    # ---- point to point ------------------------------------------------------------------------------------------

    def send(self, posted: Posted, tensor: Tensor, to: int, tag: int) -> None:
        """Begin to send a contiguous host tensor to a member."""
        self._post(posted, to, lambda rank: dist.isend(tensor, dst=rank, group=self._group, tag=tag))

    def receive(self, posted: Posted, tensor: Tensor, source: int, tag: int) -> None:
        """Begin to receive into a contiguous host tensor."""
        self._post(posted, source, lambda rank: dist.irecv(tensor, src=rank, group=self._group, tag=tag))

    def posted(self) -> Posted:
        return Posted()

    def settle(self, posted: Posted) -> None:
        """Wait for all that was begun; the first peer that failed is named."""
        works, posted.works = posted.works, []
        for peer, work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._error(peer, error) from error

    def _post(self, posted: Posted, peer: int, begin: Callable[[int], Any]) -> None:
        if self._group is None:
            raise RankError("this rank failed, and has left the others: start all of them again from the last checkpoint.")
        try:
            posted.works.append((peer, begin(self._arrangement.members[peer])))
        except RuntimeError as error:
            raise self._error(peer, error) from error

    # ---- small messages ------------------------------------------------------------------------------------------

    def exchange(self, payload: Tensor) -> list[Tensor]:
        """Everybody's payload, by member: same shape and dtype on all, CPU."""
        received = [payload if index == self.index else torch.empty_like(payload) for index in range(self.world_size)]
        posted = self.posted()
        for index in self._others():
            self.receive(posted, received[index], index, _EXCHANGE)
        for index in self._others():
            self.send(posted, payload, index, _EXCHANGE)
        self.settle(posted)
        return received

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by member; lengths may differ."""
        lengths = self.exchange(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        received = [
            own if index == self.index else torch.empty(int(lengths[index]), dtype=torch.uint8, device="cpu")
            for index in range(self.world_size)
        ]
        posted = self.posted()
        for index in self._others():
            if len(received[index]):
                self.receive(posted, received[index], index, _BYTES)
            if len(data):
                self.send(posted, own, index, _BYTES)
        self.settle(posted)
        return [bytes(tensor.numpy()) for tensor in received]

    def _others(self) -> list[int]:
        # Each starts with the next after itself, so that not all of them talk to the first at once.
        return [(self.index + step) % self.world_size for step in range(1, self.world_size)]

    # ---- shards --------------------------------------------------------------------------------------------------

    def gather(self, own: Tensor, into: Tensor | None, wanters: frozenset[int], whole_nbytes: int) -> None:
        """All-gather of one flat over the ranks of `shards`, to those members that want it.

        `own`: this rank's shard, uint8 [n], host. `into`: uint8 [n * shard_count], host, where every shard lands in its place
        (this rank's own included); None where this rank does not want it.
        """
        posted = self.posted()
        nbytes = own.numel()
        if into is not None:
            target = into[self.shard_index * nbytes : (self.shard_index + 1) * nbytes]
            for position, index in enumerate(self.shards):
                if index != self.index:
                    self.receive(posted, into[position * nbytes : (position + 1) * nbytes], index, DATA)
            if target.data_ptr() != own.data_ptr():
                target.copy_(own)
        for index in self._others():
            if index in self.shards and index in wanters:
                self.send(posted, own, index, DATA)
        self.settle(posted)
        self.count("gather", whole_nbytes)

    def prefixes(self, own: Tensor | None, contributors: Sequence[int], nbytes: int) -> dict[int, Tensor]:
        """What each contributor says before its data, uint8 [nbytes], by member; `own` where this rank is one."""
        received: dict[int, Tensor] = {}
        posted = self.posted()
        for index in contributors:
            if index == self.index:
                assert own is not None
                received[index] = own
            else:
                received[index] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                self.receive(posted, received[index], index, _PREFIX)
        if own is not None:
            for index in self._others():
                self.send(posted, own, index, _PREFIX)
        self.settle(posted)
        return received

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """`tensor` (host, contiguous) of member `source` into that of all others."""
        posted = self.posted()
        if self.index == source:
            for index in self._others():
                self.send(posted, tensor, index, DATA)
        else:
            self.receive(posted, tensor, source, DATA)
        self.settle(posted)
        self.count("broadcast", tensor.nbytes)

    def add_replicas(self, values: Tensor) -> None:
        """Sum `values` (fp32, host) over the ranks that replicate this one's shard, in place; the same bits on all of them."""
        if self._replica_group is not None:
            try:
                dist.all_reduce(values, group=self._replica_group)
            except RuntimeError as error:
                raise self._error(self.replicas[0], error) from error
            self.count("all_reduce", values.nbytes)

    def count(self, verb: str, nbytes: int) -> None:
        """Note a transfer, also one that was put together from the methods above."""
        moved = self._traffic.setdefault(verb, {"count": 0, "nbytes": 0})
        moved["count"] += 1
        moved["nbytes"] += nbytes

    def statistics(self) -> dict[str, dict[str, int]]:
        """By verb: how often, and the bytes of the whole buffers that it was about."""
        return {verb: dict(moved) for verb, moved in list(self._traffic.items())}  # a list: more may come meanwhile

    # ---- between GPUs --------------------------------------------------------------------------------------------

    def use_devices(self, device: torch.device) -> None:
        """Use NCCL if every rank has a GPU of its own that can run transfers of several communicators at once. Collective."""
        identity = b""
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and device.type == "cuda":
            warnings.warn(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 makes the GPU begin all work in one order, in which transfers of several NCCL "
                "communicators can wait for each other for ever: offload's ranks talk over the host, slowly. Unset it.",
                RuntimeWarning,
                stacklevel=2,
            )
        elif device.type == "cuda" and dist.is_nccl_available():
            identity = f"{os.uname().nodename}/{torch.cuda.get_device_properties(device).uuid}".encode()
        said = self.exchange_bytes(identity)
        if all(said) and len(set(said)) == len(said):
            self._make_device_groups()
        elif identity and (sharing := [index for index, other in enumerate(said) if other == identity])[1:]:
            warnings.warn(
                f"ranks {', '.join(map(str, sharing))} share one GPU: each takes memory of it for itself, and all ranks talk "
                "over the host, slowly. Where there is one for each, call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) "
                "before anything is put on a GPU.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_device_groups(self) -> None:
        self._device_group = self._make_group(self.shards, self._device_backend)
        self.has_devices = True
        if len(self.replicas) > 1:
            self._device_replica_group = self._make_group(self.replicas, self._device_backend)

    def _note_order(self) -> None:
        """Before each transfer between GPUs: after how many of the user's own it comes.

        NCCL wants transfers of several communicators begun in one order on all ranks, and the engine's are begun by a thread
        that the user's know nothing of. The rendezvous has the ranks tell each other whether the orders differed.
        """
        count = 0
        for group in list(dist.distributed_c10d._world.pg_map):
            is_own = group in (self._group, self._replica_group, self._device_group, self._device_replica_group)
            if not is_own and set(self._arrangement.members) <= set(dist.get_process_group_ranks(group)):
                count += _collective_count(group, self._device_backend)
        self.order_digest = zlib.crc32(struct.pack("<qq", self.order_digest, count))

    def compare_orders(self, digests: Sequence[int]) -> None:
        """`digests`: everybody's, after the same transfers. Where they differ that is said, once on each rank."""
        if len(set(digests)) > 1 and not self._said_order:
            self._said_order = True
            warnings.warn(
                "the ranks began collectives of yours between GPUs, and the engine's, in different orders. NCCL allows that "
                "never, and can hang. Make yours inside `with engine.gathered(()):`, where the engine begins none on any rank, "
                "or on CPU tensors, over gloo.",
                RuntimeWarning,
                stacklevel=2,
            )

    def gather_on_device(self, whole: Tensor, own: Tensor) -> None:
        """All-gather, in the order of the current stream. `own` is this rank's part of `whole`, in its place. Bytes."""
        self._note_order()
        dist.all_gather_into_tensor(whole, own, group=self._device_group)
        self.count("gather", whole.nbytes)

    def exchange_on_device(self, into: Tensor, whole: Tensor) -> None:
        """Everybody's part for this rank, part after part into `into`. Same shape as `whole`."""
        self._note_order()
        dist.all_to_all_single(into, whole, group=self._device_group)
        self.count("reduce", whole.nbytes)

    def add_replicas_on_device(self, values: Tensor) -> None:
        """Sum over the ranks that replicate this one's shard, in place."""
        if self._device_replica_group is not None:
            self._note_order()
            dist.all_reduce(values, group=self._device_replica_group)
            self.count("all_reduce", values.nbytes)

    # ---- failures ------------------------------------------------------------------------------------------------

    def say_failed(self, reason: str) -> None:
        """Leave word for the others of why this rank stops, before its connections close. Never raises: it is the last word."""
        if self._said_failed:
            return
        self._said_failed = True
        try:
            self._store.compare_set("failed", "", f"{self.index}\n{self.phase}\n{reason}")
        except RuntimeError:
            return  # the store went with the rank that hosted it; the others see the connection close

    def _error(self, peer: int, cause: RuntimeError) -> RankError:
        """Who failed first, by what the ranks left word of; else the peer whose connection broke."""
        phase, reason = self.phase, f"its connection failed or timed out after {self._timeout}: {cause}"
        try:
            word = self._store.compare_set("failed", "", f"{peer}\n{phase}\n{reason}")
            first, said_phase, said = word.decode(errors="replace").split("\n", 2)
            peer, phase, reason = int(first), said_phase, said
        except (RuntimeError, ValueError):
            reason += " (the rank that hosts the store is gone, too)"
        self._said_failed = True
        rank = self._arrangement.members[peer]
        return RankError(
            f"rank {rank} failed, hangs or is gone in the phase {phase!r} (seen by rank {dist.get_rank()} in {self.phase!r}): "
            f"{reason}. No rank can go on: start all of them again from the last checkpoint."
        )


def _destroy(groups: list[Any]) -> None:
    while groups:
        group = groups.pop()
        if group in dist.distributed_c10d._world.pg_map:  # else the user's destroy_process_group() has taken all
            dist.destroy_process_group(group)


def _collective_count(group: dist.ProcessGroup, backend_name: str) -> int:
    """How many collectives of the group were given to a backend of that name; 0 where it has none."""
    for device_type in ("cuda", "cpu"):
        try:
            backend: Any = group._get_backend(torch.device(device_type))
        except RuntimeError:  # none for this type of device
            continue
        if backend.name() == backend_name:
            return int(backend._get_sequence_number_for_group())
    return 0
