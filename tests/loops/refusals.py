"""The closed table of refusals: which error is a right answer to which operation, and when.

Whatever an engine raises that no line here allows fails the loop. Below it stands what loops leave out, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import offload

from .playing import Facts, Graph
from .programs import Operation, Program

_BACKWARDS = ("backward", "partial_backward", "backward_of_some", "penalty", "closure", "train")


@dataclass(frozen=True)
class Refusal:
    """`says`: a pattern of the message. `drops_gradients`: backward had begun, so the script drops what there is."""

    operations: tuple[str, ...]
    error: type[Exception]
    says: str
    when: Callable[[Circumstances], bool]
    why: str
    drops_gradients: bool = False


class Circumstances:
    """Where the script stood before the operation."""

    def __init__(self, program: Program, facts: Facts, graphs: list[Graph], operation: Operation) -> None:
        self.program, self.operation = program, operation
        self.live, self.taken, self.synced = facts.live, facts.taken, facts.synced
        self.update, self.setup = facts.setup.update, facts.setup
        which = operation.values.get("which", -1)
        self.stale = operation.name == "backward" and bool(graphs) and graphs[which].version != facts.version

    def legitimate(self, error: BaseException) -> Refusal | None:
        """The line of the table that allows the error."""
        for refusal in REFUSALS:
            if (
                self.operation.name in refusal.operations
                and type(error) is refusal.error
                and re.search(refusal.says, str(error))
                and refusal.when(self)
            ):
                return refusal
        return None


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        ("backward",),
        offload.UsageError,
        "through a forward that ran before optimizer.step",
        lambda now: now.stale,
        "weights have changed since the forward; PyTorch raises too",
        drops_gradients=True,
    ),
    Refusal(
        _BACKWARDS,
        offload.UsageError,
        "while the gradient of the last step was still in place",
        lambda now: now.taken,
        "the step has consumed the gradient to which PyTorch would add (docs/guarantees.md)",
        drops_gradients=True,
    ),
    Refusal(
        ("step", "closure", "train", "clip"),
        offload.UsageError,
        "were those of the last step",
        lambda now: now.taken,
        "the step has consumed the gradients that PyTorch would apply again (docs/guarantees.md)",
    ),
    Refusal(
        ("save", "load_state_dict"),
        offload.UsageError,
        "while gradients wait for a step",
        lambda now: now.live,
        "a checkpoint holds no gradients",
    ),
    Refusal(
        ("add_group",),
        offload.UsageError,
        "a param_group was added after initialize",
        lambda now: True,
        "the layout is fixed by initialize; the message says to make all groups first",
    ),
)


@dataclass(frozen=True)
class Exclusion:
    """`when(program, facts, operation)`: the operation is left out there."""

    why: str
    when: Callable[[Program, Facts, Operation], bool]


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "an interrupt of one rank alone ends the others with a RankError: tests/ranks/test_failures.py",
        lambda program, facts, operation: program.ranks > 1 and bool(operation.interrupt),
    ),
    Exclusion(
        "two groups of processes would be needed; `anew` loads on the same ranks, tests/ranks/test_checkpoints.py on others",
        lambda program, facts, operation: program.ranks > 1 and operation.name == "resume",
    ),
    Exclusion(
        "an interrupt inside a forward may leave running statistics half done, in PyTorch too",
        lambda program, facts, operation: bool(operation.interrupt) and "normed" in program.model.blocks,
    ),
)


WAITING: tuple[Exclusion, ...] = (
    Exclusion("interrupts", lambda program, facts, operation: bool(operation.interrupt)),
    Exclusion(
        "an interrupt of the user's forward or backward",
        lambda program, facts, operation: operation.values.get("error") == "KeyboardInterrupt",
    ),
    Exclusion("freezing", lambda program, facts, operation: operation.name == "freeze"),
)
"""Faults that are known and being mended."""


def excluded(program: Program, facts: Facts, operation: Operation) -> str | None:
    """Why the operation is left out here, if it is."""
    for one in (*EXCLUSIONS, *WAITING):
        if one.when(program, facts, operation):
            return one.why
    return None
