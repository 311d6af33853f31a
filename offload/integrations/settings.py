# SPDX-License-Identifier: Apache-2.0
"""What a framework knows of a run, told to the engine's config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload import Config
from offload.config import read_json

Settings = Config | Mapping[str, Any] | str | os.PathLike[str] | None


def settings_of(config: Settings, *, precision: str = "no", micro_batches: int = 1) -> Settings:
    """The config with the framework's precision, where it says none, and with the number of micro-batches that the framework
    has in a step. One with DeepSpeed's keys has its own."""
    if isinstance(config, (str, os.PathLike)):
        config = read_json(Path(config))
    if isinstance(config, Mapping) and not config.keys() <= {field.name for field in dataclasses.fields(Config)}:
        return config
    own = Config.of(config).expecting(micro_batches)
    if own.dtype is not None or precision not in ("bf16", "fp16"):
        return own
    return dataclasses.replace(own, dtype=precision)  # type: ignore[arg-type]
