# SPDX-License-Identifier: Apache-2.0
"""How the gradients that this rank computed become those that a step is made of: alone, or averaged over the ranks.

GradientSync   nothing is trained: nothing comes
OwnGradients   one rank: what it computed is what counts
Reduction      several ranks (`offload.step.gradients.reduction`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from offload.device.arithmetic.kernels import exact_sum
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.ranks.next_transfers import MeetingPoint
from offload.step.gradients.chunk_gradients import ChunkGradients


class GradientSync:
    """See the module. Owned by the thread that drives the model, and backward's, never both at once."""

    peak_nbytes = 0
    """Device memory that gradients took at most before they were averaged."""

    def arrive(self, info: ParameterInfo, gradient: Tensor, *, owned: bool, is_part: bool) -> None:
        """Take in a gradient that this rank computed. `owned`: nobody else will write to the tensor, so that it may be kept.
        `is_part`: what is there of this parameter's is of the same backward."""
        raise AssertionError("a gradient came, and nothing is trained")

    def leave(self, unit: Unit) -> None:
        """Backward left the unit: nothing more of it comes in this backward."""

    def end(self) -> None:
        """The end of backward: everything that counts is there when this returns."""

    def newly_present(self) -> Sequence[int]:
        """Indices of the parameters whose gradient counts though this rank had none, as far as known and not named before."""
        return ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived that `drop` would forget, as far as is known at once."""
        return False

    def drop(self, info: ParameterInfo) -> None:
        """Forget what arrived of this parameter."""

    def remembered(self) -> Sequence[ParameterInfo]:
        """The parameters of which it remembers, beside `ChunkGradients`, a gradient of this step: until `drop`, or a step."""
        return ()

    def settle(self) -> None:
        """Nothing that arrived so far changes any gradient after this, though backward did not come to its end."""

    def forget(self, infos: Iterable[ParameterInfo]) -> None:
        """The gradients of these parameters belong to an update: what comes from now on is new."""

    def end_step(self) -> None:
        """Give back what the step's backwards took."""

    def sum(self, point: MeetingPoint, squares: Callable[[], Sequence[Tensor]], argument: int = 0) -> int | None:
        """The exact sum of all squares, on several ranks of all of them, once they are at `point`; in units of 2**-1074, None
        where it is not finite. `squares`: those that this rank keeps. `argument`: see `Meeting.meet`."""
        return exact_sum(squares())


class OwnGradients(GradientSync):
    """One rank's."""

    def __init__(self, gradients: ChunkGradients) -> None:
        self._gradients = gradients

    def arrive(self, info: ParameterInfo, gradient: Tensor, *, owned: bool, is_part: bool) -> None:
        self._gradients.add(info, gradient, owned=owned, is_part=is_part)

    @property
    def is_empty(self) -> bool:
        return self._gradients.is_empty

    def drop(self, info: ParameterInfo) -> None:
        self._gradients.drop(info)
