# SPDX-License-Identifier: Apache-2.0
"""What is read, and when: of files of weights, of a model's own files, and of an engine's stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint.state_reading import StateReader
from offload.deferred_init.file_values import FileBytes
from offload.model.unit import Unit
from offload.model.weights import WeightSource


def before_each_weight(patch: pytest.MonkeyPatch, before: Callable[[str, Path], object]) -> None:
    """Of `initialize(weights=...)`: with the tensor's name and its file."""
    load = WeightSource.load

    def watched(source: WeightSource, name: str) -> Any:
        before(name, source._entries[name].file)
        return load(source, name)

    patch.setattr(WeightSource, "load", watched)


def before_each_unit(patch: pytest.MonkeyPatch, before: Callable[[Unit], object]) -> None:
    """Of a unit's states, for a checkpoint or an export."""
    pieces = StateReader.pieces

    def watched(reader: StateReader, unit: Unit) -> Any:
        before(unit)
        return pieces(reader, unit)

    patch.setattr(StateReader, "pieces", watched)


def file_bytes(patch: pytest.MonkeyPatch) -> list[int]:
    """How many, at each read of a file that a deferred model's values come from."""
    call, read = FileBytes.__call__, list[int]()

    def watched(value: FileBytes) -> Any:
        read.append(value.nbytes)
        return call(value)

    patch.setattr(FileBytes, "__call__", watched)
    return read
