# SPDX-License-Identifier: Apache-2.0
"""CUDA: compute on the caller's current stream, copies on two streams of the accelerator's own, waits by events.

    stream    work on it                                          waits for
    compute   forward, backward, gradient packing, device Adam    fetch, where `join` says so
    fetch     H2D of parameters                                   compute, at `fill`, `copy_in_after...`
    drain     D2H of gradients, norms, parameters                 compute, at every `copy_out`; fetch, beside compute
    ranks     collectives of several GPUs                         a mark of compute, given with each

Why each hazard cannot happen (tests/device/test_stream_order.py holds the code to it without a GPU):

- *Compute reads a parameter before its H2D.* `finish` of a fetch joins each copy's event to the compute stream.
- *H2D into memory that earlier compute still uses.* A flat's memory comes from the caching allocator's pool of the
  compute stream, which reuses it in the order of that stream alone. `fill` makes fetch wait for an event recorded on
  compute right after the allocation, so for everything that had the block before.
- *A shard that lies on the device is copied into its unit before compute has updated it.* The update leaves a mark on compute,
  for which `copy_in_after` makes fetch wait.
- *A flat is freed while its H2D runs.* A unit is emptied only after its fetch was finished, so after compute waits for
  the copies; the block goes back to the compute stream's pool, behind that wait.
- *H2D over parameters that live on the device, while compute reads them.* `copy_in_after_compute` at the step.
- *D2H of parameters and gradients that stay on the device, before they are written.* What wrote them was given to compute
  before the step, or to fetch: fetch waits for compute at the step, and `copy_out_beside_compute` makes drain wait for fetch.
  To wait for compute itself would put each update behind the forward that it runs under.
- *D2H of a gradient that is not computed yet, or whose memory is reused.* `copy_out` makes drain wait for compute first
  and records the source on drain (`record_stream`), for who frees it early; gradients are copied from buffers that stay.
- *The host writes pinned memory that an H2D still reads*, or reads what a D2H still writes. Whoever touches the host side
  waits for the copy's `Pending` first: leases are released after it, `ParameterStore.settle_copies` covers stores.
- *Unregistering memory under a copy.* `unpin` waits for all streams of its own.
- *Another stream uses what `initialize` made on its own*, or a stream reuses what the last one freed at `close`. Both wait for
  the whole device.

Threads. The current stream and the current device belong to a thread. The hooks of backward run in autograd's thread, under
the stream of the forward; the lanes are threads of ours, whose current stream is the default one. So a lane never asks
for the current stream: `copy_in` needs none, and work that belongs to compute runs inside `on_compute`, with the stream
that was compute where it was handed over. Lanes set the device when they start; `torch.cuda.stream` sets it too.

Waits. Nothing here blocks the host but `Pending.wait`, by an event that lets the processor go (`blocking=True`; the
default spins, on a core that Adam needs). What the engine waits for within a step is listed in docs/gpu.md.

Copies with registered memory are asynchronous: `Tensor.copy_(non_blocking=True)` is a cudaMemcpyAsync on the current
stream, and the driver knows registered memory by its address (torch's own bookkeeping of pinned blocks passes over
addresses that its host allocator did not hand out). With memory that could not be registered the same call is right,
and slow: the driver copies through a buffer of its own and holds the calling thread.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload import _native
from offload.device.accelerator import Accelerator, ResizedMemory, UnitMemory
from offload.device.arithmetic import compiled_kernels
from offload.device.device_memory import MemoryUse
from offload.device.host_memory.host_pages import populate
from offload.device.lane import HostLane, Job, LaneRow, ThreadLane
from offload.device.pending import Pending
from offload.device.recording import COLLECTIVES, D2H, H2D, Stamp
from offload.errors import ConfigError

_log = logging.getLogger(__name__)
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered: our own fault, never the system's


class _EventPending(Pending):
    """Settles with a CUDA event; keeps the tensors of the copy alive until then."""

    def __init__(self, stream: torch.cuda.Stream, *kept: torch.Tensor) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)
        self._kept: tuple[torch.Tensor, ...] = kept

    def wait(self) -> None:
        self.event.synchronize()
        self._kept = ()

    def done(self) -> bool:
        return bool(self.event.query())


class _Copied:
    """The times of a copy, by events around it on its stream."""

    def __init__(self, began: Stamp, ended: Stamp) -> None:
        self._began, self._ended = began, ended

    def keep_times(self) -> None:
        """They are kept."""

    def times_ns(self) -> tuple[int, int] | None:
        return self._began(), self._ended()


class _StreamOrderedMemory(ResizedMemory):
    def __init__(self, nbytes: int, device: torch.device, fetch: torch.cuda.Stream) -> None:
        super().__init__(nbytes, device)
        self._fetch = fetch
        self._after_compute()

    def _gain(self) -> None:
        super()._gain()
        self._after_compute()

    def _after_compute(self) -> None:
        # The allocator handed out memory that earlier compute may still be using.
        self._fetch.wait_stream(torch.cuda.current_stream(self.flat.device))


def _take_own_device() -> None:
    """Of several processes on a machine each takes a GPU of its own, by the number that the launcher gave it, where the process
    has not begun to use one: as `init_device_mesh` does."""
    number = os.environ.get("LOCAL_RANK", "")
    if number.isdecimal() and not torch.cuda.is_initialized() and int(number) < torch.cuda.device_count():
        torch.cuda.set_device(int(number))


class CudaAccelerator(Accelerator):
    """One GPU, the current CUDA device at construction; what that is where nobody said: `_take_own_device`."""

    name = "cuda"
    unified = False
    copies_beside = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("accelerator 'cuda' was asked for, but torch finds no CUDA device: use 'cpu'.")
        super().__init__()
        _take_own_device()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._fetch = torch.cuda.Stream(self.device)
        self._drain = torch.cuda.Stream(self.device)
        self._ranks = torch.cuda.Stream(self.device)
        self._total_nbytes = self._former_peak_nbytes = 0
        self._reference: tuple[torch.cuda.Event, int]
        compiled_kernels.prepare(self.device)
        _native.device_computes()

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _StreamOrderedMemory(nbytes, self.device, self._fetch)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._copy(H2D, self._fetch, destination, source)
        return _EventPending(self._fetch, source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copy_out_after(torch.cuda.current_stream(self.device), destination, source)

    def copy_out_beside_compute(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        return self._copy_out_after(self._fetch, destination, source)

    def _copy_out_after(self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._drain.wait_stream(stream)
        self._copy(D2H, self._drain, destination, source)
        source.record_stream(self._drain)
        return _EventPending(self._drain, destination)

    def _copy(self, row: str, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        recording = self.recorder.to
        with torch.cuda.stream(stream):
            if recording is None:
                destination.copy_(source, non_blocking=True)
                return
            began = self._stamp_on(stream)
            destination.copy_(source, non_blocking=True)
            recording.transfer(row, "copy", source.nbytes, _Copied(began, self._stamp_on(stream)))

    def copy_in_after_compute(self) -> None:
        self._fetch.wait_stream(torch.cuda.current_stream(self.device))

    def copy_in_after(self, pending: Pending) -> None:
        if isinstance(pending, _EventPending):
            self._fetch.wait_event(pending.event)
        else:
            pending.wait()

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self.device)

    def join(self, pending: Pending) -> None:
        if isinstance(pending, _EventPending):
            torch.cuda.current_stream(self.device).wait_event(pending.event)
        else:
            pending.wait()

    def joins_at_once(self, pending: Pending) -> bool:
        return isinstance(pending, _EventPending) or pending.done()

    def on_compute(self, job: Job) -> Job:
        compute = torch.cuda.current_stream(self.device)

        def run() -> None:
            with torch.cuda.stream(compute):
                job()

        return run

    def mark(self) -> Pending:
        return _EventPending(torch.cuda.current_stream(self.device))

    @contextmanager
    def communicating(self, what: str, about: object, nbytes: int, after: Pending | None = None) -> Iterator[None]:
        recording = self.recorder.to
        with torch.cuda.stream(self._ranks):
            if isinstance(after, _EventPending):
                self._ranks.wait_event(after.event)
            elif after is not None:
                after.wait()
            if recording is None:
                yield
                return
            began = self._stamp_on(self._ranks)
            yield
            recording.transfer(COLLECTIVES, what, nbytes, _Copied(began, self._stamp_on(self._ranks)), about=about)

    def begin_stamps(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        event.synchronize()
        self._reference = event, self.clock_ns()

    def stamp(self) -> Stamp:
        return self._stamp_on(torch.cuda.current_stream(self.device))

    def _stamp_on(self, stream: torch.cuda.Stream) -> Stamp:
        (reference, reference_ns), event = self._reference, torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return lambda: reference_ns + round(reference.elapsed_time(event) * 1e6)

    def settle_stamps(self) -> None:
        self.wait_for_all()

    def host_lane(self, name: str, *, waits_for_io: bool, waits_for_ranks: bool = False) -> HostLane:
        del waits_for_io, waits_for_ranks
        return ThreadLane(name, begin=lambda: torch.cuda.set_device(self.device), told=LaneRow(name, self.recorder))

    def pin(self, address: int, nbytes: int, *, is_written: bool = False) -> Callable[[], None] | None:
        cudart: Any = torch.cuda.cudart()
        if not is_written:
            populate(address, nbytes)
        with torch.cuda.device(self.device):
            status = int(cudart.cudaHostRegister(address, nbytes, 0))
        if status == _ALREADY_REGISTERED:
            raise AssertionError(f"{nbytes} bytes of host memory were registered twice")
        if status != 0:
            reason = self._last_error()
            if is_written:  # it moves once: no more than slower
                _log.info("%d bytes of host memory are copied unregistered (error %d, %s)", nbytes, status, reason)
            else:
                self._unregistered(nbytes, status, reason)
            return None

        def unpin() -> None:
            for stream in (self._fetch, self._drain, self._ranks):
                stream.synchronize()
            with torch.cuda.device(self.device):
                status = int(cudart.cudaHostUnregister(address))
            if status != 0:
                raise AssertionError(f"cudaHostUnregister failed with CUDA error {status}")

        return unpin

    def free_nbytes(self) -> int | None:
        counts = self._counts()
        in_tensors = counts["allocated_bytes"]["all"]["current"] if counts is not None else 0
        return self._free_to_allocator(counts) - int(in_tensors)

    def memory_use(self) -> MemoryUse | None:
        # Of blocks, not of tensors: what another stream still uses cannot be had yet.
        counts = self._counts()
        if counts is None:
            return None
        active = counts["active_bytes"]["all"]
        if not self._total_nbytes:
            self._total_nbytes = self._free_to_allocator(counts)
        return MemoryUse(self._total_nbytes, active["current"], active["peak"])

    def begin_peak(self) -> None:
        self._former_peak_nbytes = self.peak_nbytes() or 0
        torch.cuda.reset_peak_memory_stats(self.device)
        self._total_nbytes = self._free_to_allocator(self._counts())

    def _counts(self) -> dict[str, Any] | None:
        """What the allocator counts, by kind; None of one that does not count."""
        try:
            counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.device)
        except RuntimeError:  # one that somebody else plugged in (torch.cuda.memory.change_current_allocator)
            return None
        return counts if "active_bytes" in counts else None

    def _free_to_allocator(self, counts: dict[str, Any] | None) -> int:
        """What the allocator has, in tensors or kept for the next, and what the driver would give it: libraries and other
        processes have the rest. No more than the process may have (`torch.cuda.set_per_process_memory_fraction`)."""
        kept = counts["reserved_bytes"]["all"]["current"] if counts is not None else 0
        free_nbytes, all_nbytes = torch.cuda.mem_get_info(self.device)
        share_of = getattr(torch._C, "_cuda_getMemoryFraction", None)  # a torch before 2.8 does not say it
        allowed_nbytes = all_nbytes if share_of is None else int(share_of(self.device.index) * all_nbytes)
        return min(int(free_nbytes) + int(kept), int(allowed_nbytes))

    def peak_nbytes(self) -> int | None:
        counts = self._counts()
        if counts is None:
            return None
        return max(self._former_peak_nbytes, int(counts["allocated_bytes"]["all"]["peak"]))

    def close(self) -> None:
        # What is freed after this goes back to the stream that it was allocated on, and another may have used it last.
        self.wait_for_all()

    def _last_error(self) -> str:
        # The CUDA runtime hands its last error to whoever launches next: take it out of the user's way. The launch
        # itself does happen, so that nothing else can be hidden.
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "no text"

    def _unregistered(self, nbytes: int, status: int, reason: str) -> None:
        if self.copies_beside:  # it is the first time
            self.copies_beside = False
            warnings.warn(
                f"the system does not let {nbytes} bytes of host memory be registered with the GPU (cudaHostRegister: error "
                f"{status}, {reason}): training is right and slow, since every copy goes through a buffer of the driver's. "
                "Lower cpu_memory, or give the process (its container) the right to lock memory.",
                RuntimeWarning,
                stacklevel=2,
            )
