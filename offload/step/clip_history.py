# SPDX-License-Identifier: Apache-2.0
"""How often updates that begin before the step were in vain lately, or would have been: whether it pays to begin them."""

from __future__ import annotations

from dataclasses import dataclass

from offload.device.virtual.current import virtual_machine

QUIET_STEPS = 8
"""Steps without a strike after which the next is expected to have none."""
_PATIENCE = 16
"""What they are multiplied by at most."""


@dataclass(slots=True)
class ClipHistory:
    """A strike is a step whose norm clips or is not finite, and any other for which updates that began early had to be undone.

    Updates begin early after `QUIET_STEPS` steps without one, until the next: so of nine steps at most one begins them in
    vain, whatever the run does. Where it was the first of them it takes twice as many steps the next time, and so on. The first
    steps of a run, and those after a checkpoint was loaded, only look on: nothing is
    known of them, gradients are largest at the beginning, and dynamic loss scaling starts with overflows. Where the norm
    changes no step there is nothing to look at.

    patience  what `QUIET_STEPS` are multiplied by
    """

    quiet_count: int = 0
    patience: int = 1

    @staticmethod
    def before_the_first(norm_counts: bool) -> ClipHistory:
        """`norm_counts`: whether the norm may change what a step does. In virtual time a run's later steps are of interest."""
        return ClipHistory(0 if norm_counts and virtual_machine() is None else QUIET_STEPS)

    @property
    def expects_none(self) -> bool:
        """Whether the coming step is expected to have no strike."""
        return self.quiet_count >= self.patience * QUIET_STEPS

    def record(self, struck: bool) -> None:
        """A step is over, or has to be begun anew."""
        if not struck:
            self.quiet_count += 1
            return
        awaited = self.patience * QUIET_STEPS
        if self.quiet_count >= awaited:
            self.patience = min(2 * self.patience, _PATIENCE) if self.quiet_count == awaited else 1
        self.quiet_count = 0
