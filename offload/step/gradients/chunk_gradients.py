# SPDX-License-Identifier: Apache-2.0
"""Which gradients count for the coming step, and who may read them. (The way of one: the docstring of this room.)

An update that may have to be undone (`offload.step.speculation`) does not consume what it reads: `hold` keeps it, until
`drop_held` drops it or `take_back` makes it an ordinary gradient again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from offload.device.arithmetic import kernels
from offload.device.arithmetic.checksums import SummedMemory
from offload.layout import Piece
from offload.model.chunk import Chunk, ChunkGradient
from offload.model.flat import ParameterInfo
from offload.model.taken_gradient import TakenGradient
from offload.model.unit import Unit
from offload.step.gradients.addition import Addition
from offload.step.gradients.arrival import GradientArrival
from offload.step.gradients.extents import GradientExtents, gradient_of
from offload.step.gradients.filling import Filling, fill_chunks
from offload.step.gradients.sums_on_device import SumsOnDevice

_GRADIENT_OF, _INDEX_OF = attrgetter("parameter.grad"), attrgetter("index")
_TAKEN = {TakenGradient}


class ChunkGradients:
    """See the module. `add` runs in whichever thread backward runs; `open` and `release` in the update's; both lock."""

    def __init__(self, chunks: Iterable[Chunk], extents: GradientExtents, arrival: GradientArrival) -> None:
        self._chunks, self._extents, self._arrival = tuple(chunks), extents, arrival
        self._lock, self._buffers = self._arrival.lock, self._arrival.buffers
        self.spills = self._arrival.spills
        """Whether gradients may leave for a store when buffers run out."""
        self.brings = any(chunk.route.brings_gradients for chunk in self._chunks)
        """Whether updates copy gradients over from the device."""
        self._live: dict[int, ParameterInfo] = {}
        """By index: the parameters whose gradient counts for the coming step."""

    # ---- arrival -------------------------------------------------------------------------------------------------

    def add(self, info: ParameterInfo, gradient: torch.Tensor, *, owned: bool, is_part: bool = False) -> None:
        """Take over `gradient` of parameter `info`; add it to what is there (`is_live` was asked before).

        `owned`: nobody else will write to the tensor, so that it may be kept. `is_part`: what is there is of this backward.
        """
        addition = Addition.FIRST
        if info.index in self._live:
            addition = Addition.PART if is_part else Addition.SUM
        self._live[info.index] = info
        self._arrival.arrive(info, gradient, addition, owned=owned)

    def adopts(self, info: ParameterInfo) -> bool:
        """Whether autograd's own tensor is kept as the parameter's first gradient of a step."""
        return all(self._arrival.adopts(chunk) for chunk, _ in info.pieces)

    def take(self, found: Iterable[tuple[ParameterInfo, torch.Tensor]]) -> None:
        """`add` of several parameters' gradients, one rank's: the first of a step, which nobody else will write to. What was
        there of these parameters before is dropped."""
        taken = list(found)
        with self._lock:
            for info, _ in taken:
                if info.index in self._live:
                    self.drop(info)
                self._live[info.index] = info
        self._arrival.arrive_together(taken)

    def filling(self, infos: Sequence[ParameterInfo]) -> Filling | None:
        """Of parameters of one unit, computed on a device, whose first gradients fill whole chunks; None of others."""
        return Filling(infos) if self._arrival.may_fill(infos) and fill_chunks(infos) else None

    def fill(self, filling: Filling, gradients: list[torch.Tensor]) -> bool:
        """`take` of all parameters of the filling, in its order. False where they go another way: nothing was taken then."""
        with self._lock:
            for index in self._live.keys() & filling.by_index.keys():
                self.drop(self._live[index])
        if not self._arrival.fill(filling, gradients):
            return False
        self._live.update(filling.by_index)
        return True

    def add_reduced(self, chunk: Chunk, values: torch.Tensor, present: set[int]) -> None:
        """Take in averages over the ranks: fp32 [chunk.numel], host. `present`: parameters that have any.

        Adds to what an earlier backward left. Runs in the communication thread; `expect` then makes the gradient count.
        """
        self._arrival.add_reduced(chunk, values, present)

    def take_room_for_sums(self) -> None:
        """Before the first sum of several micro-batches: make the store that fp32 sums lie in. Idempotent."""
        self._extents.take_room_for_sums()

    @property
    def sums_on_device(self) -> SumsOnDevice | None:
        """Sums of micro-batches that stay on the device as long as it has room; None where none may."""
        return self._arrival.sums_on_device

    def expect(self, info: ParameterInfo) -> None:
        """A gradient of `info` counts for the coming step, wherever it was computed and whether this rank's shard has any."""
        self._live[info.index] = info

    def counts(self, info: ParameterInfo) -> bool:
        """Whether a gradient was taken over that counts, unless the user took its token away since."""
        return info.index in self._live

    def is_live(self, info: ParameterInfo) -> bool:
        """Whether a gradient taken over earlier still counts: its token is still in `p.grad`."""
        if info.index not in self._live:
            return False
        if isinstance(info.parameter.grad, TakenGradient):
            return True
        # One that an early update has is dropped when that is undone (`Speculation.undo_if_changed`), not under its hands.
        if not any(gradient_of(chunk).held for chunk, _ in info.pieces):
            self.drop(info)
        return False

    def live_parameters(self) -> list[ParameterInfo]:
        """The parameters whose gradients count for the coming step, in model order."""
        live = self._live
        if not set(map(type, map(_GRADIENT_OF, live.values()))) <= _TAKEN:
            return [info for _, info in sorted(live.items()) if self.is_live(info)]
        return list(map(live.__getitem__, sorted(live)))

    @property
    def is_empty(self) -> bool:
        """Whether no gradient counts."""
        return not self._live

    def is_complete(self, chunk: Chunk) -> bool:
        """Whether every parameter of the chunk has a gradient."""
        return gradient_of(chunk).is_complete

    def drop(self, info: ParameterInfo) -> None:
        """Forget the gradient of one parameter, unless an update has it; buffers that hold nothing else are given back."""
        if self._live.pop(info.index, None) is None:
            return
        self._arrival.forget(info)
        with self._lock:
            for chunk, _ in info.pieces:
                state = gradient_of(chunk)
                if info.index in state.live:
                    self._arrival.keep_off(chunk, info.index)
                    state.settle()  # what is still on its way must not land on what comes next
                    state.live.discard(info.index)
                    state.adopted.pop(info.index, None)
                    if not state.live:
                        self._buffers.give_back(state)
                    else:
                        self._buffers.expect(state)
                state.squares.pop(info.index, None)

    # ---- norm ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient taken over has arrived in its buffer."""
        self._arrival.settle(self._live)

    def squares(self) -> list[torch.Tensor]:
        """Sums of squares, block by block, of all live gradients: float64. Call after `settle`."""
        return [squares for chunk in self._chunks for squares in self._arrival.squares_in(chunk, self._live)]

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient has an inf or NaN."""
        live = sorted(self._live.items())
        return [info.fqn for _, info in live if kernels.exact_sum(self._arrival.squares_of(info)) is None]

    # ---- consumption ---------------------------------------------------------------------------------------------

    def consume(self, infos: Sequence[ParameterInfo]) -> None:
        """The gradients of these parameters belong to updates now: later ones start anew."""
        indices = set(map(_INDEX_OF, infos))
        if self._live.keys() <= indices:
            self._live.clear()
        for index in indices & self._live.keys():
            del self._live[index]
        for chunk in self._chunks:
            squares = gradient_of(chunk).squares
            if chunk.indices <= indices:
                squares.clear()
            elif squares:
                for index in chunk.indices & indices:
                    squares.pop(index, None)

    def prefetch(self, chunk: Chunk) -> bool:
        """Start reading a spilled chunk back, if a buffer is free for it. False if none is.

        The last free buffer is left for `open`, where it finds one for a chunk that was not prefetched.
        """
        with self._lock:
            return self._buffers.prefetch(gradient_of(chunk))

    def is_here(self, chunk: Chunk) -> bool:
        """Whether all that was on its way to the chunk's buffer is there."""
        jobs = gradient_of(chunk).jobs
        return not jobs or all(job.done() for job in jobs)

    def open(self, chunk: Chunk, *, sums: bool = False) -> SummedMemory | None:
        """Have the gradients of the chunk where the update's kernel can address them, until `release`. `sums`: the update can
        take checksums, of what this gives back."""
        state = gradient_of(chunk)
        state.settle()
        with self._lock:
            state.opened = True
            self._buffers.bring(state)
            transfer, state.transfer = state.transfer, None
        if transfer is None:
            return None
        if sums and state.lease is not None:
            return SummedMemory(self._buffers.read_back(state), transfer)
        transfer.wait()
        return None

    def opened(self, chunk: Chunk, pieces: Iterable[Piece]) -> list[torch.Tensor]:
        """Those of some pieces of an open chunk, [piece.numel] each."""
        state = gradient_of(chunk)
        return [self._piece(state, piece) for piece in pieces]

    def opened_whole(self, chunk: Chunk) -> torch.Tensor | None:
        """The buffer of an open chunk, [chunk.numel], where all its gradients lie in there."""
        state = gradient_of(chunk)
        return state.buffer if not state.adopted else None

    def open_all(self, chunks: Iterable[Chunk]) -> list[torch.Tensor]:
        """`open` of all pieces of several chunks, which lie in host memory."""
        found = []
        with self._lock:
            for chunk in chunks:
                state = gradient_of(chunk)
                state.settle()
                state.opened = True
                adopted = state.adopted
                found += [
                    adopted[info.index] if info.index in adopted else self._piece(state, piece) for info, piece in chunk.pieces
                ]
        return found

    def release_all(self, chunks: Iterable[Chunk]) -> None:
        """`release` of all of them."""
        with self._lock:
            for chunk in chunks:
                self.release(chunk)

    def read(self, chunk: Chunk, parameter_index: int, piece: Piece) -> torch.Tensor | None:
        """One piece as it lies in its buffer, which may be read back for it; None where there is none. After `settle`."""
        state = gradient_of(chunk)
        if parameter_index not in state.live:
            return None
        with self._lock:
            self._arrival.leave_device(chunk)
        self.open(chunk)
        found = self._piece(state, piece).clone()
        with self._lock:
            state.opened = False
            self._buffers.put_back(state)
        return found

    def _piece(self, state: ChunkGradient, piece: Piece) -> torch.Tensor:
        adopted = state.adopted.get(piece.slot.parameter_index)
        if adopted is not None:
            return adopted
        assert state.buffer is not None, "an update was asked for on a chunk that has no gradient"
        return state.buffer[state.chunk.part(piece)]

    def release(self, chunk: Chunk) -> None:
        """The update has read the chunk's gradient: it is consumed or, where it is held, kept."""
        state = gradient_of(chunk)
        with self._lock:
            state.opened = False
            if state.held:
                state.applied = True
                self._buffers.expect(state)
                self._buffers.put_back(state)
            else:
                self._forget(state)

    def _forget(self, state: ChunkGradient) -> None:
        state.live.clear()
        state.adopted.clear()
        self._buffers.give_back(state)

    # ---- updates on the device of units whose route has them on the host -----------------------------------------

    @property
    def _staying(self) -> SumsOnDevice:
        sums = self.sums_on_device
        assert sums is not None, "what leaves the device may stay there"
        return sums

    def staying_nbytes(self, units: Iterable[Unit]) -> int:
        """Of device memory that gradients take there if those of these units stay for their update: with the sums of all other
        units, where several micro-batches are expected."""
        sums = self._staying
        chunks = self._chunks if sums.expects_several else [chunk for unit in units for chunk in unit.trained_chunks]
        return sum(map(sums.nbytes_of, chunks))

    def may_stay(self, chunks: Iterable[Chunk]) -> bool:
        """Whether all that has come of these chunks for the coming step is on the device."""
        states = map(gradient_of, chunks)
        return all(not state.live or self._staying.has(state.chunk, state.live) for state in states)

    def keep_on_device(self, chunks: Iterable[Chunk]) -> None:
        """From now on what comes of these chunks stays there until their update, if there is room."""
        self._staying.kept.update(chunks)

    def leave_device(self, chunks: Iterable[Chunk]) -> None:
        """What stayed leaves, as what comes does."""
        with self._lock:
            for chunk in chunks:
                self._staying.kept.discard(chunk)
                self._staying.leave(chunk)

    def hand_over(self, chunks: Sequence[Chunk]) -> bool:
        """Have the updates of these chunks read what stayed on the device, until `release`. False where not all of it is there:
        then nothing was done."""
        sums = self._staying
        with self._lock:
            states = [gradient_of(chunk) for chunk in chunks]
            if not all(sums.has(state.chunk, state.live) and state.buffer is None for state in states):
                return False
            for state in states:
                state.buffer = sums.take_out(state.chunk)
        return True

    # ---- updates that may be undone ------------------------------------------------------------------------------

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """An update that may be undone will read these chunks, which are complete: `release` is to keep them."""
        for chunk in chunks:
            with self._lock:
                self._arrival.leave_device(chunk)
                gradient_of(chunk).held = True
                self._buffers.hold(gradient_of(chunk))

    def drop_held(self, chunks: Iterable[Chunk]) -> None:
        """Those updates stay: drop what they have read. What they are yet to read they consume."""
        for chunk in chunks:
            state = gradient_of(chunk)
            with self._lock:
                applied, state.held, state.applied = state.applied, False, False
                if applied:
                    self._forget(state)
                else:
                    self._buffers.expect(state)

    def take_back(self, chunks: Iterable[Chunk]) -> None:
        """Those updates were undone, or will never run: what was held counts as before."""
        for chunk in chunks:
            state = gradient_of(chunk)
            with self._lock:
                state.held = state.applied = False
                self._buffers.expect(state)
                self._buffers.put_back(state)

    def close(self) -> None:
        """Stop the lane. The store is closed by whoever made it."""
        self._arrival.close()
