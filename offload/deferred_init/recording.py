# SPDX-License-Identifier: Apache-2.0
"""What is remembered of the operations which initialise a model: a graph of values, held from its newest end.

- *Memory* stands for the storage of a deferred tensor, for all tensors which view it.
- *Value* is what a memory holds between two writes. It knows the operation that produced it.
- *Operation* is one call of a torch operator: its arguments, and the values which it reads.
- *View* is a tensor argument: a geometry over a memory. View operations are therefore not recorded at all.

    registry -> current Value -> Operation -> values it reads -> ...

References lead backwards only, so what no current value needs any more is freed by reference counting, generator
states included: a `kaiming_uniform_` which a `normal_` overwrote wholly is gone the moment it is overwritten.

The registry finds the current value of a tensor by the identity of its storage. It holds no reference to a tensor and
sets no attribute, so `torch.utils.swap_tensors` stays possible. Storages are held weakly, which keeps their identity
from being given to another storage; entries of dead ones are swept now and then.

Thread-safety: `Registry` locks itself. Operations and values never change once made.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.errors import InitializerError

# A real tensor up to this size which enters a recording is copied, so that later writes to it cannot matter. A larger
# one is referenced, and its version counter is compared at replay.
SNAPSHOT_NBYTES = 64 * 1024


class Memory:
    """The identity of one deferred storage. Holds nothing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What `memory` (`nbytes` bytes long) holds after `operation`."""

    memory: Memory
    operation: Operation
    nbytes: int


@dataclass(frozen=True, slots=True)
class View:
    """A strided tensor over a memory. `offset` and `stride` count elements of `dtype`."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view over a real storage."""
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def within(self, storages: Mapping[Memory, torch.UntypedStorage]) -> Tensor:
        """The same view over the memory's own; with undefined content where it has none, for operators which do not read it."""
        storage = storages.get(self.memory)
        return self.of(storage) if storage is not None else torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Constant:
    """A real tensor which a recorded operation reads."""

    tensor: Tensor
    version: int | None  # None: a private copy, which nobody else can write to

    @staticmethod
    def capture(tensor: Tensor) -> Constant:
        if tensor.is_inference() or tensor.numel() * tensor.element_size() <= SNAPSHOT_NBYTES:
            return Constant(tensor.detach().clone(), None)
        return Constant(tensor, tensor._version)  # itself, since a view made below autograd would count for itself

    def checked(self) -> Tensor:
        """The tensor; raises `InitializerError` if it was written to since."""
        if self.version is not None and self.tensor._version != self.version:
            raise InitializerError(
                f"a tensor of shape {tuple(self.tensor.shape)} from which it is initialised was written to after it "
                "was read inside deferred_init(); read from a clone() of it instead"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The place of a random generator among an operation's arguments, and the state from which it starts (bytes)."""

    state: Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """A new memory made by an operation: the `position`-th tensor which it returns."""

    position: int
    view: View
    nbytes: int

    @staticmethod
    def under(tensor: Tensor, position: int = 0) -> Output:
        """That of the meta tensor `tensor`, whose storage is new."""
        return Output(position, view_over(Memory(), tensor), tensor.untyped_storage().nbytes())


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operator call.

    `reads` are the values which must be there before it runs; `writes` the memories which it changes in place, with
    their sizes in bytes, for the case that nothing older of them is needed; `index` orders all operations.
    """

    function: Any  # torch._ops.OpOverload, or FileBytes
    args: Any
    kwargs: Any
    outputs: tuple[Output, ...]
    reads: tuple[Value, ...] = ()
    writes: tuple[tuple[Memory, int], ...] = ()
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    index: int = field(default_factory=itertools.count().__next__)

    def results(self) -> list[Value]:
        """What it leaves in the memories which it changes, then in those which it makes."""
        made = [(output.view.memory, output.nbytes) for output in self.outputs]
        return [Value(memory, self, nbytes) for memory, nbytes in (*self.writes, *made)]

    @property
    def nbytes(self) -> int:
        """The bytes of the memories which it makes, or changes as a whole."""
        return sum(value.nbytes for value in self.results())


def touched_memories(operation: Operation) -> set[Memory]:
    """The memories which an operation reads, changes or makes."""
    return {value.memory for value in (*operation.reads, *operation.results())}


def map_leaves(tree: Any, transform: Callable[[Any], Any]) -> Any:
    """`tree` with each leaf of its nested lists, tuples and dicts replaced by `transform(leaf)`."""
    if isinstance(tree, list):
        return [map_leaves(item, transform) for item in tree]
    if type(tree) is tuple:
        return tuple(map_leaves(item, transform) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(item, transform) for key, item in tree.items()}
    return transform(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of `tree`, in order."""
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


def tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def storage_identity(tensor: Tensor) -> int:
    """Equal for tensors which share a storage; not reused while the registry knows the storage.

    Reads no value, so that it may be asked of a parameter whose values lie elsewhere, or whose engine is gone."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def is_trackable(tensor: Tensor) -> bool:
    """Whether `tensor` is on the meta device and has a storage of its own kind (not sparse, not a subclass)."""
    return tensor.is_meta and tensor.layout == torch.strided


@dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    value: Value


class Registry:
    """The current value of every deferred storage that is alive."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._sweep_count = 256
        self._lock = threading.RLock()

    def value(self, tensor: Tensor) -> Value | None:
        """The current value of the storage under `tensor`; None if it is not deferred."""
        if not is_trackable(tensor):
            return None
        with self._lock:
            entry = self._entries.get(storage_identity(tensor))
            return None if entry is None or entry.storage.expired() else entry.value

    def current_values(self) -> dict[Memory, Value]:
        """The current value of each memory of which the storage is alive."""
        with self._lock:
            return {entry.value.memory: entry.value for entry in self._entries.values() if not entry.storage.expired()}

    def assign(self, tensor: Tensor, value: Value) -> None:
        """From now on the storage under the meta tensor `tensor` holds `value`."""
        with self._lock:
            self._entries[storage_identity(tensor)] = _Entry(StorageWeakRef(tensor.untyped_storage()), value)
            if len(self._entries) > self._sweep_count:
                self.sweep()

    def sweep(self) -> None:
        """Forget the storages that are gone."""
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if not entry.storage.expired()}
            self._sweep_count = 2 * len(self._entries) + 256

    def view(self, tensor: Tensor) -> View:
        """How a deferred `tensor` lies over its memory."""
        value = self.value(tensor)
        assert value is not None
        return view_over(value.memory, tensor)


def view_over(memory: Memory, tensor: Tensor) -> View:
    return View(memory, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def covers_storage(tensor: Tensor) -> bool:
    """Whether writing every element of `tensor` writes every byte of its storage, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
