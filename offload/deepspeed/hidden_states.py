# SPDX-License-Identifier: Apache-2.0
"""`runtime.activation_checkpointing.offload_activations`: what checkpoints of Transformers' layers keep lies in CPU memory.

Inside a `CheckpointHiddenStatesOffload` the first input of every layer that is checkpointed is marked, and autograd saves a
marked tensor as a copy in CPU memory, which comes back when backward asks for it; the last `keep_last_count` of them stay. What
is on the CPU already stays where it is.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(slots=True)
class CheckpointActivationOffloadStats:
    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class SavedTensor:
    """What autograd keeps of a marked tensor: the tensor itself, or its copy in CPU memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._device, self._strides = tensor.device, tensor.stride()
        self._copy: Tensor | None = None
        self._ready: Any = None

    def leave(self, *, pinned: bool, stream: Any) -> int:
        """Make the copy and let the tensor go; returns the bytes."""
        tensor = self.tensor
        assert tensor is not None
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned, device="cpu")
        if stream is None:
            self._copy.copy_(tensor.detach())
        else:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._copy.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(stream)
                self._ready = stream.record_event()
        self.tensor = None
        return tensor.nbytes

    def back(self) -> tuple[Tensor, int]:
        """The tensor where it was, and how many bytes came over."""
        if self.tensor is not None:
            return self.tensor, 0
        assert self._copy is not None
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)
        found = torch.empty_strided(self._copy.shape, self._strides, dtype=self._copy.dtype, device=self._device)
        found.copy_(self._copy, non_blocking=True)
        self.tensor, self._copy = found, None  # asked for again where the graph is retained
        return found, found.nbytes


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """A block, inside of which what checkpointed layers keep goes to CPU memory; see the module. One object serves one block
    at a time, and many after each other.

    use_pin_memory     copies lie in pinned memory, which makes them faster
    use_streams        copies run on a stream of their own, beside compute
    min_offload_bytes  smaller tensors stay
    keep_last_count    so many stay on the device: backward asks for them first
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        del max_fwd_stash_count, max_cpu_buffer_pool_count  # PyTorch's caching host allocator keeps buffers
        if keep_last_count < 0:
            raise ValueError(f"keep_last_count={keep_last_count} is negative: expected 0, 1, ...")
        super().__init__(self._pack, self._unpack)
        self._pins, self._streams = use_pin_memory and torch.cuda.is_available(), use_streams and torch.cuda.is_available()
        self._least_nbytes, self._keep_last_count = min_offload_bytes, keep_last_count
        self._stream: Any = None
        self._marks: Counter[int] = Counter()
        self._staying: dict[int, SavedTensor] = {}
        self.reset()

    def __enter__(self) -> CheckpointHiddenStatesOffload:  # type: ignore[override]
        if self in _entered.stack:
            raise RuntimeError("a CheckpointHiddenStatesOffload is not re-entrant: make another for a block in its block.")
        self.reset()
        _layers.begin()
        _entered.stack.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _entered.stack.remove(self)
        _layers.end()
        self._marks.clear()
        self._staying.clear()

    def reset(self) -> None:
        """Forget what was counted and marked."""
        self.stats = CheckpointActivationOffloadStats()
        self._marks.clear()
        self._staying.clear()

    def mark(self, tensor: Tensor) -> None:
        """The next time that autograd saves the tensor, it goes to CPU memory."""
        self._marks[id(tensor)] += 1
        self.stats.marked_tensors += 1

    def unmark(self, tensor: Tensor) -> bool:
        """Take one mark back; whether there was one."""
        count = self._marks.pop(id(tensor), 0)
        if count > 1:
            self._marks[id(tensor)] = count - 1
        return count > 0

    def _pack(self, tensor: Tensor) -> Any:
        self.stats.saved_tensors_seen += 1
        if not self.unmark(tensor):
            return tensor
        if tensor.device.type == "cpu" or tensor.nbytes < self._least_nbytes or 0 in tensor.stride():
            self.stats.skipped_marked_tensors += 1
            return tensor
        saved = SavedTensor(tensor)
        self._staying[id(saved)] = saved
        while len(self._staying) > self._keep_last_count:
            oldest = self._staying.pop(next(iter(self._staying)))
            if self._streams and self._stream is None:
                self._stream = torch.cuda.Stream(tensor.device)
            self.stats.offloaded_bytes += oldest.leave(pinned=self._pins, stream=self._stream)
            self.stats.offloaded_tensors += 1
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, SavedTensor):
            return saved  # type: ignore[no-any-return]
        kept = self._staying.pop(id(saved), None)
        tensor, nbytes = saved.back()
        self.stats.kept_last_tensors += kept is not None
        self.stats.restored_tensors += nbytes > 0
        self.stats.restored_bytes += nbytes
        return tensor


get_checkpoint_hidden_states_offloading_ctx_manager = CheckpointHiddenStatesOffload
"""The same by DeepSpeed's other name."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[CheckpointHiddenStatesOffload] = []
        """The blocks that this thread is in."""


_entered = _Entered()


class _Layers:
    """Transformers' layers that can be checkpointed, whose calls mark their first input while any block is entered."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._kind: Any = None
        self._own: Any = None

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1 and importlib.util.find_spec("transformers") is not None:
                self._watch()

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count or self._kind is None:
                return
            if self._own is None:
                del self._kind.__call__
            else:
                self._kind.__call__ = self._own
            self._kind = self._own = None

    def _watch(self) -> None:
        import transformers

        kind = getattr(transformers, "GradientCheckpointingLayer", None)
        if kind is None:
            return
        self._kind, self._own, call = kind, vars(kind).get("__call__"), kind.__call__

        def marking(layer: Any, *given: Any, **keywords: Any) -> Any:
            stack = _entered.stack
            first = given[0] if given else None
            is_kept = layer.training and torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)
            if not stack or not is_kept or not isinstance(first, Tensor):
                return call(layer, *given, **keywords)
            stack[-1].mark(first)
            try:
                return call(layer, *given, **keywords)
            finally:
                stack[-1].unmark(first)  # what nobody saved: another tensor may get its number

        kind.__call__ = marking


_layers = _Layers()
