# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie that are there for good, and whether they still do: looked at before every step.

Whoever gives such a parameter to another process through torch.multiprocessing has its storage exchanged for shared memory,
in place. Updates go on in the former memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.errors import UsageError
from offload.model.flat import ParameterInfo


class StayingPlaces:
    """See the module."""

    def __init__(self, parameters: Sequence[ParameterInfo]) -> None:
        self._parameters = [info for info in parameters if info.flat.memory.stays]
        self._look_anew()

    def _look_anew(self) -> None:
        self._views = [info.view for info in self._parameters]
        self._addresses = list(map(torch.Tensor.data_ptr, self._views))

    def check(self) -> None:
        """Raise once where some lie elsewhere; then they lie in their places again."""
        found = list(map(torch.Tensor.data_ptr, self._views))
        if found == self._addresses:
            return
        moved = [info for info, now, before in zip(self._parameters, found, self._addresses, strict=True) if now != before]
        for info in moved:
            info.flat.lay_back(info)
        self._look_anew()
        raise UsageError(
            f"parameter {moved[0].fqn!r} was moved to shared memory, where no update would reach it: it was given to another "
            "process (torch.multiprocessing: a queue, a process's arguments). Give that engine.state_dict() instead. The other "
            "process has the values as they were; here the parameter is back in its place, and the step can be called again."
        )
