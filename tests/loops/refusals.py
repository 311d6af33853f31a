# SPDX-License-Identifier: Apache-2.0
"""The closed table of refusals: which error is a right answer to which operation, and when.

Whatever an engine raises that no line here allows fails the loop. Below it stands what loops leave out, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch.utils.checkpoint

import offload

from .playing import Facts, Graph
from .programs import Operation, Program

_FORWARDS = ("forward", "backward", "partial_backward", "backward_of_some", "penalty", "slope", "closure", "train")
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

    def __init__(
        self, program: Program, facts: Facts, graphs: list[Graph], operation: Operation, trained: set[str], wanted: set[str]
    ) -> None:
        """`trained`, `wanted`: the names of what is trained now, and of what requires gradients."""
        self.program, self.operation = program, operation
        self.live, self.taken, self.synced = facts.live, facts.taken, facts.synced
        self.update, self.setup = facts.setup.update, facts.setup
        # A backward runs a forward of its own where there is none.
        self.newly_trained = not trained <= facts.trained and (operation.name != "backward" or not graphs)
        self.accumulates = operation.values.get("micro", 1) > 1 or operation.values.get("sync") is False
        self.has_budget = facts.setup.memory is not None or facts.setup.on_device is not None
        self.is_saved = facts.sure == set(facts.saved)
        which = operation.values.get("which", -1)
        self.stale = operation.name == "backward" and bool(graphs) and graphs[which].version != facts.version
        # Also by a forward that raised: what is newly trained got its states when that began.
        known = facts.trained | trained
        graph = graphs[which] if operation.name == "backward" and graphs else None
        self.refrozen = graph is not None and graph.wanted != wanted
        self.grown = graph is not None and (graph.trained_count < len(known) or facts.added != graph.added)

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
        "before parameters were unfrozen or added to the optimizer.*: run the forward again",
        lambda now: now.grown,
        "what was recorded before knows nothing of what is trained since",
        drops_gradients=True,
    ),
    Refusal(
        ("backward",),
        offload.UsageError,
        "through a forward that ran before optimizer.step|or before the last step: run the forward again",
        lambda now: now.stale,
        "weights have changed since the forward; PyTorch raises too",
        drops_gradients=True,
    ),
    *(
        Refusal(
            operations,
            offload.UsageError,
            "were those of the last step",
            lambda now: now.taken,
            "the step has consumed the gradients that PyTorch would apply again (docs/guarantees.md)",
            drops_gradients=drops,
        )
        for operations, drops in ((("step", "clip"), False), (("closure", "train"), True))
    ),
    Refusal(
        ("backward",),
        torch.utils.checkpoint.CheckpointError,
        "",
        lambda now: bool(now.program.model.checkpointing) and now.refrozen,
        "what was frozen or unfrozen since the forward is recorded otherwise when it is computed again, in PyTorch too",
        drops_gradients=True,
    ),
    Refusal(
        ("save", "load_state_dict"),
        offload.UsageError,
        "while gradients wait for a step",
        lambda now: now.live,
        "a checkpoint holds no gradients",
    ),
    Refusal(
        _BACKWARDS,
        offload.BudgetError,
        "a second micro-batch needs",
        lambda now: now.has_budget and (now.live or now.accumulates),
        "sums of micro-batches take room that the budget may not have (docs/guarantees.md)",
        drops_gradients=True,
    ),
    Refusal(
        ("load",),
        offload.CheckpointError,
        "cannot be opened as a checkpoint",
        lambda now: not now.is_saved,
        "the only save there was interrupted, or failed",
    ),
    Refusal(
        _FORWARDS,
        offload.UsageError,
        "do that between optimizer.step\\(\\) and the next forward",
        lambda now: now.newly_trained and now.live,
        "what is newly trained gets states between two steps (docs/guarantees.md)",
    ),
    *(
        Refusal(
            operations,
            offload.UsageError,
            "so that it has no states yet: do that between",
            lambda now: now.newly_trained,
            "what is newly trained gets states at the next forward",
            drops_gradients=drops,
        )
        for operations, drops in ((("step", "clip"), False), (("closure", "train"), True))
    ),
    Refusal(
        _FORWARDS,
        offload.BudgetError,
        "",
        lambda now: now.newly_trained and now.has_budget,
        "states of what is newly trained take room that the budget may not have (docs/guarantees.md)",
    ),
)


@dataclass(frozen=True)
class Exclusion:
    """`when`: the operation is left out there."""

    why: str
    when: Callable[[Circumstances], bool]


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "an interrupt inside a forward may leave running statistics half done, in PyTorch too",
        lambda now: bool(now.operation.interrupt) and "normed" in now.program.model.blocks,
    ),
    Exclusion(
        "a backward that is refused may have computed some blocks again, and their running statistics, in PyTorch too",
        lambda now: (
            "normed" in now.program.model.blocks
            and bool(now.program.model.checkpointing)
            and now.operation.name in _BACKWARDS
            and (now.taken or now.stale or (now.has_budget and (now.live or now.accumulates)))
        ),
    ),
)


def excluded(now: Circumstances) -> str | None:
    """Why the operation is left out here, if it is."""
    return next((one.why for one in EXCLUSIONS if one.when(now)), None)
