# SPDX-License-Identifier: Apache-2.0
"""What Fabric's and the Trainer's strategies have in common: one process needs no process group, several share the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from offload import Config, Engine


class EngineStrategy:
    """Put it before a DDPStrategy among a class's bases. `config`: as that of `offload.initialize`."""

    engine: Engine | None = None

    def __init__(self, config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._config = config

    @property
    def is_shared(self: Any) -> bool:
        """Whether there are several ranks."""
        return bool(self.num_nodes * self.num_processes > 1)

    def _configure_launcher(self) -> None:
        """Lightning's: it starts the other ranks."""
        if self.is_shared:
            super()._configure_launcher()  # type: ignore[misc]
