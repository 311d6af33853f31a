"""How often the norm changed a step lately, and so whether it pays to begin updates before it is known."""

from __future__ import annotations

from dataclasses import dataclass

QUIET_STEPS = 8
"""Steps without a strike after which the next is expected to have none."""


@dataclass(slots=True)
class ClipHistory:
    """A strike is a step whose norm clips or is not finite, and any other for which updates that began early had to be undone.

    Updates begin early after `QUIET_STEPS` steps without one, until the next: so of nine steps at most one begins them in
    vain, whatever the run does. The first steps of a run, and those after a checkpoint was loaded, only look on: nothing is
    known of them, gradients are largest at the beginning, and dynamic loss scaling starts with overflows. Where the norm
    changes no step there is nothing to look at.
    """

    quiet_count: int = 0

    @staticmethod
    def before_the_first(norm_counts: bool) -> ClipHistory:
        """`norm_counts`: whether the norm may change what a step does."""
        return ClipHistory(0 if norm_counts else QUIET_STEPS)

    @property
    def expects_none(self) -> bool:
        """Whether the coming step is expected to have no strike."""
        return self.quiet_count >= QUIET_STEPS

    def record(self, struck: bool) -> None:
        """A step is over."""
        self.quiet_count = 0 if struck else self.quiet_count + 1
