# SPDX-License-Identifier: Apache-2.0
"""Trains PyTorch models that do not fit in GPU memory: parameters, gradients and optimizer states in CPU memory or on NVMe."""

from offload.checkpoint_import.values import export_universal_checkpoint, import_checkpoint, read_values
from offload.config import Config
from offload.deferred_init.deferred_init import deferred_init
from offload.engine import Engine
from offload.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    CorruptDataError,
    EngineFailedError,
    InitializerError,
    NonFiniteGradientError,
    OffloadError,
    ParameterAccessError,
    RankError,
    StorageError,
    UsageError,
)
from offload.initialization import initialize, introductions
from offload.integrations.prepared import mark_as_prepared
from offload.model.lion import Lion
from offload.model.partition import unit

introductions.append(mark_as_prepared)

__version__ = "0.2.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptDataError",
    "Engine",
    "EngineFailedError",
    "InitializerError",
    "Lion",
    "NonFiniteGradientError",
    "OffloadError",
    "ParameterAccessError",
    "RankError",
    "StorageError",
    "UsageError",
    "deferred_init",
    "export_universal_checkpoint",
    "import_checkpoint",
    "initialize",
    "read_values",
    "unit",
]
