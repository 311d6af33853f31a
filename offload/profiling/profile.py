# SPDX-License-Identifier: Apache-2.0
"""`engine.profile`: records steps of an engine, real or virtual, and writes them as a trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

from offload.config import Config
from offload.device.recording import Recording
from offload.errors import ConfigError, UsageError
from offload.profiling.trace_events import Trace, events_of, write_trace
from offload.step.components import Components
from offload.tiers.io.failure import storage_error


class Profile:
    """A recording that goes on: until so many steps are over, until `close`, or, as a context manager, until the block is left.

    Owned by the thread that drives the model.
    """

    def __init__(self, parts: Components, config: Config, path: Path, steps: int | None) -> None:
        """Records from now on. Raises `UsageError` for what cannot be, `ConfigError` where the path cannot be written to."""
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise UsageError(f"profile(steps={steps!r}): expected a whole number from 1 on, or None until it is closed.")
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"profile cannot write {str(path)!r}: give the path of a file, in a folder that exists.")
        self._parts, self._config, self._steps, self._step_count = parts, config, steps, 0
        ranks = parts.ranks
        self.path = path if ranks.world_size == 1 else path.with_name(f"{path.stem}.rank{ranks.index}{path.suffix}")
        """What is written: on several ranks each its own."""
        accelerator = parts.accelerator
        self._recording: Recording | None = accelerator.recorder.start(emits_nvtx=accelerator.device.type == "cuda")

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def step_ended(self) -> None:
        """One more step is over."""
        self._step_count += 1
        if self._step_count == self._steps:
            self.close()

    def close(self) -> None:
        """End, and write the file. Idempotent. Raises `StorageError` where it cannot be written."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._parts.accelerator.recorder.stop()
        ops = recording.finish()
        units = _units_by_place(self._parts)
        events = events_of(ops, recording.start_ns, lambda place: units.get(place, ""))
        facts = self._facts() | {"steps": self._step_count, "duration_ns": recording.end_ns - recording.start_ns}
        try:
            write_trace(Trace(events, facts), self.path)
        except OSError as error:
            raise storage_error("cannot write the profile to", self.path, error.errno or 0) from error

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _facts(self) -> dict[str, Any]:
        parts = self._parts
        placement, accelerator = parts.placement, parts.accelerator
        values = {field.name: getattr(self._config, field.name) for field in dataclasses.fields(self._config)}
        plain = (int, float, type(None))
        settings = {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}
        return {
            "rank": parts.ranks.index,
            "world_size": parts.ranks.world_size,
            "accelerator": accelerator.name,
            "unified": accelerator.unified,
            "computes_on_host": accelerator.device.type == "cpu",
            "settings": settings | {"nvme": list(map(str, self._config.nvme_paths))},
            "placement": {
                "parameters": placement.parameters,
                "optimizer_states": placement.optimizer_states,
                "gradients": placement.gradients,
            },
            "planned": [dataclasses.asdict(line) for line in placement.plan.lines],
            "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in parts.parameters if info.trainable}),
            "parameter_numel": sum(info.numel for info in parts.parameters),
            "trained_numel": sum(info.numel for info in parts.parameters if info.trainable),
        }


def _units_by_place(parts: Components) -> dict[object, str]:
    """The units' names by (store, extent)."""
    found: dict[object, str] = {}
    for unit in parts.units:
        for chunk in unit.chunks:
            for place in (chunk.parameters, chunk.record):
                for extent in (place.extent, place.other):
                    found[place.store, extent] = unit.name
            if chunk.gradient is not None:
                found[chunk.gradient.store, chunk.gradient.extent] = unit.name
                found.update(((chunk.gradient.wide_store, extent), unit.name) for extent in chunk.gradient.wide_extents)
    return found
