# SPDX-License-Identifier: Apache-2.0
"""Which gradient buffer is needed last: asked for each one that is taken while they run out, so nobody goes through all."""

from __future__ import annotations

from offload.model.chunk import ChunkGradient

_Queue = dict[ChunkGradient, None]


class SpillOrder:
    """Chunks with a leased buffer, by what is expected of them, the one added to longest ago first; see
    `offload.step.gradients.buffers` for the order between these.

    applied   an update that may have to be undone has read it
    complete  every parameter has its gradient
    held      such an update is about to read it
    filling   gradients are to come
    """

    def __init__(self) -> None:
        self._applied: _Queue = {}
        self._complete: _Queue = {}
        self._held: _Queue = {}
        self._filling: _Queue = {}
        self._queue_of: dict[ChunkGradient, _Queue] = {}

    def __contains__(self, state: ChunkGradient) -> bool:
        return state in self._queue_of

    def put(self, state: ChunkGradient) -> None:
        """It was added to, or something else is expected of it now."""
        self.remove(state)
        if state.applied:
            queue = self._applied
        elif state.held:
            queue = self._held
        else:
            queue = self._complete if state.is_complete else self._filling
        queue[state] = None
        self._queue_of[state] = queue

    def remove(self, state: ChunkGradient) -> None:
        """Its buffer is not to be taken away, if it was."""
        queue = self._queue_of.pop(state, None)
        if queue is not None:
            del queue[state]

    def needed_last(self, besides: ChunkGradient, *, at_leisure: bool) -> ChunkGradient | None:
        """`at_leisure`: nothing that an update is about to read. What is complete goes also while updates wait for their turn:
        of the buffers they take until then some are still as it left them."""

        def first(queue: _Queue, *, last: bool = False) -> ChunkGradient | None:
            in_turn = reversed(queue) if last else iter(queue)
            return next((state for state in in_turn if state is not besides and not state.opened), None)

        found = first(self._applied) or first(self._complete)
        if found is not None or at_leisure:
            return found
        return first(self._held, last=True) or first(self._filling)
