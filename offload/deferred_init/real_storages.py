# SPDX-License-Identifier: Apache-2.0
"""Real storages that are put under deferred tensors, which is how `torch.load` makes what it loads.

Such a tensor stays deferred: its value is what the storage holds when it is asked for. Where the storage is a mapped file's
(`torch.load(..., mmap=True)`, as libraries load `pytorch_model.bin`), that is read from the file then.

Thread-safety: used by the thread that records.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.deferred_init.file_values import MappedFiles
from offload.deferred_init.replay import plain_torch
from offload.deferred_init.tape import Tape


class RealStorages:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._files = MappedFiles()
        self._twins: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """By identity: a storage, which is kept so that it stays that, and what stands for it. Tensors that share one, do."""

    def put_under(self, tensor: Tensor, function: Any, source: Any, *geometry: Any) -> Tensor:
        """`tensor.set_(source, *geometry)`, which `function` is an overload of."""
        if isinstance(source, torch.UntypedStorage) and source.device.type == "cpu":
            source = self._twin(source).untyped_storage()
        elif isinstance(source, Tensor) and not source.is_meta:
            geometry = geometry or (source.storage_offset(), source.size(), source.stride())
            source = self._twin(source.untyped_storage()).untyped_storage()
            function = torch.ops.aten.set_.source_Storage_storage_offset
        with plain_torch():
            function(tensor, source, *geometry)
        return tensor

    def _twin(self, storage: torch.UntypedStorage) -> Tensor:
        known = self._twins.get(storage._cdata)
        if known is None:
            content = self._files.find(storage)
            with plain_torch():
                twin = self._tape.read(content) if content is not None else self._tape.stored(storage)
            known = self._twins[storage._cdata] = storage, twin
        return known[1]
