"""CUDA: compute on the caller's current stream, copies on two streams of the accelerator's own, waits by events.

No call here synchronises the host. Memory: a flat is allocated and freed in the order of the compute stream, so the
caching allocator may reuse it for later compute at once; the fetch stream waits for an event recorded at the
allocation before it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.device.accelerator import Accelerator, ResizedMemory, UnitMemory
from offload.device.lane import HostLane, ThreadLane
from offload.device.pending import Pending
from offload.errors import ConfigError


class _EventPending(Pending):
    """Settles with a CUDA event; keeps the tensors of the copy alive until then."""

    def __init__(self, event: torch.cuda.Event, *kept: torch.Tensor) -> None:
        self.event = event
        self._kept: tuple[torch.Tensor, ...] = kept

    def wait(self) -> None:
        self.event.synchronize()
        self._kept = ()

    def done(self) -> bool:
        return bool(self.event.query())


class _StreamOrderedMemory(ResizedMemory):
    def __init__(self, nbytes: int, device: torch.device, fetch: torch.cuda.Stream) -> None:
        super().__init__(nbytes, device)
        self._fetch = fetch

    def _gain(self) -> None:
        super()._gain()
        # The allocator handed out memory that earlier compute may still be using.
        self._fetch.wait_event(torch.cuda.current_stream(self.flat.device).record_event())


class CudaAccelerator(Accelerator):
    """One GPU, the current CUDA device at construction."""

    name = "cuda"
    unified = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("accelerator 'cuda' was asked for, but torch finds no CUDA device: use 'cpu'.")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._fetch = torch.cuda.Stream(self.device)
        self._drain = torch.cuda.Stream(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def unit_memory(self, nbytes: int) -> UnitMemory:
        memory = _StreamOrderedMemory(nbytes, self.device, self._fetch)
        self._fetch.wait_event(torch.cuda.current_stream(self.device).record_event())
        return memory

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        with torch.cuda.stream(self._fetch):
            destination.copy_(source, non_blocking=True)
            return _EventPending(self._fetch.record_event(), source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        self._drain.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._drain):
            destination.copy_(source, non_blocking=True)
            source.record_stream(self._drain)
            return _EventPending(self._drain.record_event(), destination)

    def copy_in_after_compute(self) -> None:
        self._fetch.wait_stream(torch.cuda.current_stream(self.device))

    def join(self, pending: Pending) -> None:
        if isinstance(pending, _EventPending):
            torch.cuda.current_stream(self.device).wait_event(pending.event)
        else:
            pending.wait()

    def host_lane(self, name: str, *, waits_for_io: bool) -> HostLane:
        del waits_for_io
        return ThreadLane(name)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(address, nbytes, 0))
        if status != 0:
            raise ConfigError(
                f"cudaHostRegister of {nbytes} bytes failed with CUDA error {status}: the system does not let this "
                "process "
                "lock that much memory. Raise the memlock limit (ulimit -l), or lower cpu_memory."
            )

        def unpin() -> None:
            status = int(cudart.cudaHostUnregister(address))
            if status != 0:
                raise AssertionError(f"cudaHostUnregister failed with CUDA error {status}")

        return unpin

    def free_nbytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def peak_nbytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.device))

    def close(self) -> None:
        self._fetch.synchronize()
        self._drain.synchronize()
