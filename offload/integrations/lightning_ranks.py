# SPDX-License-Identifier: Apache-2.0
"""What Fabric's and the Trainer's strategies have in common: one process needs no process group, several share the model."""

from __future__ import annotations

from typing import Any

from offload import Engine, UsageError
from offload.integrations.settings import Settings


class EngineStrategy:
    """Put it before a DDPStrategy among a class's bases. `config`: as that of `offload.initialize`."""

    engine: Engine | None = None

    def __init__(self, config: Settings = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._config = config

    @property
    def is_shared(self: Any) -> bool:
        """Whether there are several ranks."""
        return bool(self.num_nodes * self.num_processes > 1)

    def _check_precision(self, precision: Any) -> None:
        """Before there is an engine. Raises `UsageError` where gradients would be scaled by another."""
        if getattr(precision, "scaler", None) is not None:
            raise UsageError(
                f"precision={precision.precision!r} scales gradients, which are the engine's: leave it out and set "
                "dtype='fp16' in the strategy's config; or 'bf16-mixed', which scales none."
            )

    def _configure_launcher(self) -> None:
        """Lightning's: it starts the other ranks."""
        if self.is_shared:
            super()._configure_launcher()  # type: ignore[misc]
