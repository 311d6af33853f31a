# SPDX-License-Identifier: Apache-2.0
"""Values which a constructor asks for while it is being recorded.

`trunc_normal_` draws until no element is out of bounds, and asks after each draw. Replaying all draws at each question
would take quadratic time, so what a large replay computed and the constructor still holds is remembered until the next
large one: for `trunc_normal_` the tensor and its mask.

Thread-safety: used by the thread that records.
"""

from __future__ import annotations

import torch

from offload.deferred_init.recording import Memory, Operation, Registry, Value, touched_memories
from offload.deferred_init.replay import execute, needed_operations

REMEMBERED_NBYTES = 2**20  # replays that make less are repeated


class PresentValues:
    """Computes values, and remembers those of the last large computation."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._remembered: dict[Value, torch.UntypedStorage] = {}

    def compute(self, values: list[Value], remember: bool) -> dict[Memory, torch.UntypedStorage]:
        """Real CPU storages with `values`, by memory; with `remember` they must not be written to.

        Errors: as `offload.deferred_init.replay.replay`.
        """
        if not values:
            return {}
        known = self._remembered
        operations = needed_operations(values, known)
        if not _are_usable(known, operations):
            known, operations = {}, needed_operations(values)
        used = {value.memory for value in values}.union(*map(touched_memories, operations))
        storages = {value.memory: storage for value, storage in known.items() if value.memory in used}
        is_large = sum(operation.nbytes for operation in operations) >= REMEMBERED_NBYTES
        changes_known = any(memory in storages for operation in operations for memory, _ in operation.writes)
        if is_large or changes_known or not remember:
            self._remembered = {}
        current = self._registry.current_values() if is_large and remember else {}
        execute(operations, storages, {value.memory for value in values} | current.keys())
        if current:
            results = [result for operation in operations for result in operation.results()]
            final = {value.memory: value.operation for value in (*known, *results)}
            self._remembered = {
                current[memory]: storage
                for memory, storage in storages.items()
                if memory in current and final[memory] is current[memory].operation
            }
        return storages


def _are_usable(known: dict[Value, torch.UntypedStorage], operations: list[Operation]) -> bool:
    """Whether no operation needs a remembered memory as it was before its remembered value."""
    since = {value.memory: value.operation.index for value in known}
    return all(operation.index > since.get(memory, -1) for operation in operations for memory in touched_memories(operation))
