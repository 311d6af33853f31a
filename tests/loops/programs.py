# SPDX-License-Identifier: Apache-2.0
"""What a loop is made of: a model, where its states lie, and what the user's script does, one operation after the other.

A program is data. It is printed as the Python that makes it, goes to other processes as JSON, and can be shortened at
any place: an operation that means nothing where it stands (a backward without a forward) does nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any


def _shown(value: Any) -> str:
    """The call that makes a dataclass, without what is as by default."""
    given = [f"{one.name}={getattr(value, one.name)!r}" for one in fields(value) if getattr(value, one.name) != one.default]
    return f"{type(value).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Model:
    """What is trained, and all that decides its numbers.

    blocks         kinds of `tests.loops.models.BLOCKS`, in order
    tie            "leaf": the last layer has the first one's weight; "blocks": the last block has a weight of the first
    reused         the first block is called again at the end
    frozen         numbers of the blocks that are frozen from the start
    checkpointing  of every block's activations: "", "reentrant" or "plain"
    dtype          of Config; None: the parameters' own
    all_in_groups  the optimizer has what is frozen at the start too
    narrow_sums    micro-batches are summed in the parameters' dtype
    """

    width: int = 4
    blocks: tuple[str, ...] = ("mlp",)
    tie: str = ""
    reused: bool = False
    frozen: tuple[int, ...] = ()
    checkpointing: str = ""
    dtype: str | None = None
    state_format: str = "fp32"
    optimizer: str = "adamw"
    groups: int = 1
    all_in_groups: bool = False
    max_grad_norm: float | None = None
    loss_scale: str | None = None
    narrow_sums: bool = False

    __repr__ = _shown


@dataclass(frozen=True, repr=False)
class Setup:
    """Where it lies and how it moves: nothing here may change a number.

    memory      budget on the host, in multiples of the smallest that can hold what must be there; None: not given
    on_device   the same of the device
    seed        of the delays of the deferred accelerator and of a faulty drive
    drive       "": the real one; "slow": short transfers, delays and any order; "failing": one fault, on one of the ranks
    fault       "error": EIO; "full": ENOSPC, of a write; "flip": one bit is another
    strikes     what it strikes (`tests.loops.drives.FILES`), or "sync"
    failing     how many of these it lets pass
    speculates  updates in backward begin before it is known that the norm changes nothing, from the first step on
    joined      so many elements small neighbours are joined to a unit of
    marked      what `offload.unit` was called with: "" nothing, "mixes" the layer that every block has, "second" the second
                block, "outlet" the last layer, "inner" children of blocks that are called. Both engines have the same: chunks
                follow units, and with them the last bit of a norm and the rounding of narrow states
    expects     micro-batches of a step that the script says there will be (`Config.expecting`)
    room        of the deferred accelerator without a budget: how often all parameters fit into its memory beside what is to lie
                there for good; None: it does not say
    """

    parameters: str = "device"
    states: str = "device"
    accelerator: str = "cpu"
    update: str = "step"
    prefetch: int = 1
    memory: float | None = None
    on_device: float | None = None
    seed: int = 0
    drive: str = ""
    fault: str = "error"
    strikes: str = "any"
    failing: int = 0
    speculates: bool = False
    joined: int = 0
    marked: str = ""
    expects: int = 1
    room: float | None = None

    __repr__ = _shown


class Operation:
    """One thing that the script does. `interrupt`: a KeyboardInterrupt comes at that moment of it; 0: none does.

    Moments are numbered by the calls and returns that Python makes on the thread of the loop. Of two ranks the moment says
    whether it comes to the first, to the second or to both.
    """

    def __init__(self, name: str, *, interrupt: int = 0, **values: Any) -> None:
        self.name, self.interrupt, self.values = name, interrupt, values

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self.values.items()]
        given += [f"interrupt={self.interrupt}"] if self.interrupt else []
        return f"op({', '.join([repr(self.name), *given])})"

    def moment(self, rank: int, ranks: int) -> int:
        """When that rank is interrupted; 0: it is not."""
        return self.interrupt if ranks == 1 or self.interrupt % 3 in (rank, 2) else 0


op = Operation


LAST = 3
"""The number of a checkpoint that no drawn operation saves."""


@dataclass(frozen=True, repr=False)
class Program:
    """`setups`: the first is the run's; "anew" and "resume" may go on under another."""

    model: Model
    setups: tuple[Setup, ...]
    operations: tuple[Operation, ...]
    ranks: int = 1

    def __repr__(self) -> str:
        operations = "".join(f"        {one!r},\n" for one in self.operations if one.name != "nothing")
        ranks = "" if self.ranks == 1 else f"    ranks={self.ranks},\n"
        setups = "".join(f"{one!r}, " for one in self.setups)
        return f"Program(\n    {self.model!r},\n    ({setups}),\n    (\n{operations}    ),\n{ranks})".replace(", ),\n", ",),\n")

    @property
    def script(self) -> tuple[Operation, ...]:
        """What is played: the operations, and in the end a look at everything."""
        return *self.operations, op("wait"), op("zero_grad"), op("state_dict"), op("save", number=LAST)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": asdict(self.model),
            "setups": [asdict(one) for one in self.setups],
            "operations": [[one.name, one.interrupt, one.values] for one in self.operations],
            "ranks": self.ranks,
        }

    @staticmethod
    def of_json(content: dict[str, Any]) -> Program:
        model = {name: tuple(value) if isinstance(value, list) else value for name, value in content["model"].items()}
        return Program(
            Model(**model),
            tuple(Setup(**one) for one in content["setups"]),
            tuple(op(name, interrupt=interrupt, **values) for name, interrupt, values in content["operations"]),
            content["ranks"],
        )


def counted(programs: Iterable[Program]) -> dict[str, int]:
    """How often each operation stands in the programs."""
    counts: dict[str, int] = {}
    for program in programs:
        for one in program.operations:
            name = f"{one.name} (interrupted)" if one.interrupt else one.name
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
