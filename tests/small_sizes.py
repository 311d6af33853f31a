# SPDX-License-Identifier: Apache-2.0
"""The numbers from which on something pays or is done at all, and how tests make them so small that it happens in a tiny model.

The one place that knows where they lie: `small(monkeypatch, chunk_numel=4096, quiet_steps=0)` until the test ends,
`small_for_good(...)` in a process that a test started."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_PLACES = {
    "chunk_numels": ("offload.build.assembly.CHUNK_NUMELS",),
    "many_chunks": ("offload.layout.MANY_CHUNKS",),  # from so many on, chunks are larger
    "joined_numel": ("offload.model.partition.JOINED_NUMEL",),  # neighbours are one unit up to it
    "least_unit_numel": ("offload.build.assembly.LEAST_UNIT_NUMEL",),  # of several ranks
    "gradients_together_nbytes": ("offload.step.waiting_gradients._TOGETHER_NBYTES",),
    "quiet_steps": ("offload.step.clip_history.QUIET_STEPS",),  # before updates begin early
    "quiet_seconds": ("offload.checkpoint.saving.idleness.QUIET_SECONDS",),  # before a save makes updates
    "patience_seconds": ("offload.step.thread_safety.taking_turns.PATIENCE_SECONDS",),
    "all_cores_numel": ("offload._native._HANDED_OUT_NUMEL",),
    "remembered_nbytes": ("offload.deferred_init.present_values.REMEMBERED_NBYTES",),
    "values_said_every_nbytes": ("offload.build.materialize._SAID_EVERY_NBYTES",),
    "pages_said_from_nbytes": ("offload.device.host_memory.host_pages._SAID_NBYTES",),
    "page_slice_nbytes": ("offload.device.host_memory.host_pages._SLICE_NBYTES",),
}


def small(patch: pytest.MonkeyPatch, *, chunk_numel: int | None = None, **sizes: Any) -> None:
    """Each of `sizes` as given. `chunk_numel`: the one size of chunks."""
    if chunk_numel is not None:
        sizes["chunk_numels"] = (chunk_numel,)
    for module, name, size in _places(sizes):
        patch.setattr(module, name, size)


def small_for_good(**sizes: Any) -> None:
    """Imports nothing but what it sets: memory is measured in such processes."""
    for module, name, size in _places(sizes):
        setattr(module, name, size)


def _places(sizes: dict[str, Any]) -> Iterator[tuple[ModuleType, str, Any]]:
    for name, size in sizes.items():
        for place in _PLACES[name]:
            module, _, attribute = place.rpartition(".")
            yield importlib.import_module(module), attribute, size
