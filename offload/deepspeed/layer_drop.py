# SPDX-License-Identifier: Apache-2.0
"""Progressive layer dropping: what the model's forward is told of it. The model decides which layers it leaves out."""

from __future__ import annotations

from typing import Any

import numpy as np


class ProgressiveLayerDrop:
    """theta(step) = (1 - theta) exp(-gamma step) + theta: the share of layers that is kept (Zhang and He 2020)."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """Return the keywords for the model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        self.current_theta = float((1.0 - self.theta) * np.exp(-self.gamma * global_step) + self.theta)
