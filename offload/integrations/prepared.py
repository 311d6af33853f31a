# SPDX-License-Identifier: Apache-2.0
"""What Accelerate looks for: a model that says that it is prepared is neither wrapped nor moved.

An engine's model says so where the one who asks is `Accelerator.prepare`; the accelerator is told of the engine then, so that
its saves and loads are the engine's. Nothing of Accelerate is imported before it asks.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from offload.engine import Engine


def mark_as_prepared(engine: Engine) -> None:
    """Of the scripts that use Accelerate, as far as can be told."""
    if "accelerate" in sys.modules:
        engine.module._is_accelerate_prepared = _Prepared(engine)  # type: ignore[assignment]


class _Prepared:
    """True where `Accelerator.prepare` asks for it, as long as there is the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        engine, asking = self._engine(), sys._getframe(1)
        if engine is None or engine.closed or asking.f_code.co_name != "prepare_model":
            return False
        from offload.integrations.accelerate import meet

        return meet(asking.f_locals.get("self"), engine)

    def __reduce__(self) -> Any:
        """A copy of the model has no engine."""
        return bool, ()
