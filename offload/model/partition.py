# SPDX-License-Identifier: Apache-2.0
"""Which parameters are fetched together: the partition of a model into units.

    block      an outermost module whose class the model names in `_no_split_modules` (Hugging Face), else an element
               of an outermost `nn.ModuleList` or `nn.Sequential`; of an element that is a list itself, and so is never
               called, what lies in that
    big leaf   a module without children outside every block that holds much (an embedding, a head); leaves that share
               a parameter (tied weights) are one unit, which is used wherever one of them is
    root       the model itself, with every parameter that is in no other unit
    joined     small blocks that follow each other in one list, together, up to `JOINED_NUMEL`

A module that the user marked (`offload.unit`) is a unit by itself, in place of the blocks around it and inside it. A marked
list of modules is used by the calls of these, as joined blocks are. Any other parameter that several modules share belongs to
the unit that holds all of them: a block if all lie inside it, else the root.

Joined blocks lie in one flat: one fetch, one update, one hand-over of each kind for all of them. Each one's call is a use of
the unit of its own, whatever the order and the number of calls, and opens the block's own parameters alone. So nothing is asked
of the code that calls them; where it calls few of them, the others were fetched in vain, which the bound keeps small. Each
begins at a block of the sums of squares, so that the bits are the same; where budgets hold no joined ones none are joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from offload.errors import UsageError
from offload.model.recomputation import recomputed_modules
from offload.planning.use_trace import Use

JOINED_NUMEL = 1 << 20
"""Elements: what the host does for a unit takes as long as a drive needs for some of 4 MiB, however small the unit is."""
_MARK = "_offload_unit"
_LISTS = (nn.ModuleList, nn.Sequential)
MayHold = Callable[[Iterable[nn.Parameter]], bool]
"""Whether these may be one unit."""


def unit(module: nn.Module) -> nn.Module:
    """Mark `module` as a unit, before `initialize`: its parameters are fetched, let go and updated together, with no others.
    Returns `module`, so that the call can stand in an assignment.

    Without marks the units are the elements of the model's lists of blocks (small neighbours are joined) and large modules
    without children. A mark takes precedence over blocks inside the module, over marks inside it, and over the block around
    it. The rest of that block is then divided like everything outside of blocks: large modules without children are units, and
    what remains belongs to the root unit, which is in memory during the whole forward and backward. A copy of the module
    (`copy.deepcopy`, `pickle`) is marked too. A marked model is one unit.

    A unit comes for the calls of its module; a list or dict of modules, which is never called, for the calls of those in it.
    Where a module is not called although it could be, its parameters come with whatever reads them; the log says so.

    Sums of squares and narrow moments are taken chunk by chunk, and a chunk lies in one unit: a mark may change the last bit
    of a norm, and with `state_format="bf16"` or `"8bit"` how moments are rounded.

    Raises `UsageError` for anything but an `nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"offload.unit was given {type(module).__name__}: it marks a module (nn.Module) of the model.")
    module.__dict__[_MARK] = True
    return module


def _is_marked(module: nn.Module) -> bool:
    return _MARK in module.__dict__


@dataclass(slots=True, eq=False)
class ModuleUnit:
    """One unit of a model: the modules whose forward uses it, and the parameters, as (fqn, parameter), in model order."""

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    part_lengths: tuple[int, ...] = ()
    """Of one of several that were joined: how many parameters each of them brought."""
    marked: bool = False
    """By the user."""

    @property
    def part_indices(self) -> list[int]:
        """By parameter: which of the joined ones it is of."""
        lengths = self.part_lengths or (len(self.parameters),)
        return [index for index, length in enumerate(lengths) for _ in range(length)]

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)

    @property
    def shares_parameters(self) -> bool:
        """Whether several of its modules use one of them."""
        return share_parameters(self.modules)


def share_parameters(modules: Iterable[nn.Module]) -> bool:
    """Whether one parameter is of several of the modules."""
    counts = Counter(id(parameter) for module in modules for parameter in module.parameters())
    return any(count > 1 for count in counts.values())


def can_be_called(module: nn.Module) -> bool:
    """Whether a call of the module is possible: not of a list of modules or parameters, which has no forward."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _block_class_names(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set)):
            names.update(str(name) for name in declared)
    return names


def _outermost(module: nn.Module, is_meant: Callable[[nn.Module], bool], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules inside that are meant, by name."""
    for name, child in module.named_children():
        if is_meant(child):
            yield f"{prefix}{name}", child
        else:
            yield from _outermost(child, is_meant, f"{prefix}{name}.")


def _called(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """The module, or what is called in place of one that cannot be."""
    return [(path, module)] if can_be_called(module) else list(_outermost(module, can_be_called, f"{path}."))


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Marked modules, and the blocks that neither lie in one nor hold one; each once, by its first name. None of a marked
    model."""
    if _is_marked(model):
        return []
    marked = _unique(_outermost(model, _is_marked))
    inside = {id(module) for _, one in marked for module in one.modules()}
    blocks = (entry for entry in _default_blocks(model) if not any(id(module) in inside for module in entry[1].modules()))
    return [entry for entry in _unique((*marked, *blocks)) if next(entry[1].parameters(), None) is not None]


def _default_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    class_names = _block_class_names(model)
    named = list(_outermost(model, lambda child: type(child).__name__ in class_names))
    if named:
        return named
    lists = [("", model)] if isinstance(model, _LISTS) else _outermost(model, _is_list_of_several)
    return [
        entry
        for path, blocks in lists
        for index, block in enumerate(cast(Iterable[nn.Module], blocks))
        for entry in _called(block, f"{path}.{index}".removeprefix("."))
    ]


def _is_list_of_several(module: nn.Module) -> bool:
    return isinstance(module, _LISTS) and len(module) > 1


def _unique(found: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """One module listed twice (weight sharing between layers) is one unit."""
    unique = {id(module): (name, module) for name, module in reversed(list(found))}
    return list(reversed(unique.values()))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _big_leaves(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inside = {id(module) for _, block in blocks for module in block.modules()}
    # Attention reads this one's weight and never calls it: as a unit it would come with the root's uses, which no plan knows.
    inside.update(id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    big_numel = max(_numel(block) for _, block in blocks) // 4 if blocks else _numel(model) // 8
    return [
        (name, module)
        for name, module in model.named_modules()
        if module is not model
        and id(module) not in inside
        and next(module.children(), None) is None
        and _numel(module) >= max(big_numel, 1)
    ]


def partition(model: nn.Module) -> list[ModuleUnit]:
    """The units of `model`: the root first, the others in the order in which the model holds them.

    Every parameter is in exactly one unit, under the first of its names. Units that end up without parameters of
    their own (all of them shared with others) are left out, except the root.
    """
    blocks = _blocks(model)
    leaves = _big_leaves(model, blocks) if not _is_marked(model) else []
    chosen: dict[int, ModuleUnit] = {}
    for name, module in blocks + leaves:
        called = list(dict.fromkeys(one for _, one in _called(module))) or [module]
        unit = ModuleUnit(name, called, marked=_is_marked(module))
        chosen.update({id(one): unit for one in (module, *called)})
    _join_sharing(chosen, [module for _, module in leaves])
    root = ModuleUnit("", [model])
    order = dict.fromkeys(id(module) for module in model.modules())
    units = list(dict.fromkeys([root, *(chosen[key] for key in order if key in chosen and key != id(model))]))

    owners: dict[int, dict[ModuleUnit, None]] = {}
    for _, module in blocks + leaves:
        for parameter in module.parameters():
            owners.setdefault(id(parameter), {})[chosen[id(module)]] = None
    outside = {id(parameter) for parameter in _parameters_outside(model, set(chosen))}
    for fqn, parameter in model.named_parameters():
        holders = list(owners.get(id(parameter), ()))
        if len(holders) == 1 and id(parameter) not in outside:
            holders[0].parameters.append((fqn, parameter))
        else:
            root.parameters.append((fqn, parameter))
    return [root, *(unit for unit in units[1:] if unit.parameters)]


def _join_sharing(chosen: dict[int, ModuleUnit], leaves: Iterable[nn.Module]) -> None:
    """Of leaves that share a parameter make the unit of the first that of all."""
    first: dict[int, ModuleUnit] = {}
    for leaf in leaves:
        for parameter in leaf.parameters():
            unit, other = first.setdefault(id(parameter), chosen[id(leaf)]), chosen[id(leaf)]
            if unit is not other:
                unit.modules.extend(other.modules)
                for module in other.modules:
                    chosen[id(module)] = unit
                first.update({key: unit for key, value in first.items() if value is other})


def join_neighbours(units: list[ModuleUnit], may_hold: MayHold = lambda _: True) -> list[ModuleUnit]:
    """The same parameters in fewer units, in the same order: small blocks that follow each other in one list are one, of
    `JOINED_NUMEL` elements at most."""
    root, joined = units[0], list[ModuleUnit]()
    for unit in units[1:]:
        before = joined[-1] if joined else root
        if before is not root and _may_join(before, unit, may_hold):
            first = before.name.rpartition("-")[0] if len(before.modules) > 1 else before.name
            joined[-1] = ModuleUnit(
                f"{first}-{unit.name.rpartition('.')[2]}",
                [*before.modules, *unit.modules],
                [*before.parameters, *unit.parameters],
                (*(before.part_lengths or (len(before.parameters),)), len(unit.parameters)),
            )
        else:
            joined.append(unit)
    return [root, *joined]


def _may_join(before: ModuleUnit, unit: ModuleUnit, may_hold: MayHold) -> bool:
    (holder, _, _), (other, _, index) = before.name.rpartition("."), unit.name.rpartition(".")
    may_not = (is_lookup(block) for block in (*before.modules, *unit.modules))
    is_next = holder == other and index.isdigit() and before.name.rpartition("-")[2].rpartition(".")[2].isdigit()
    is_small = before.numel + unit.numel <= JOINED_NUMEL
    are_apart = before.marked or unit.marked or before.shares_parameters or unit.shares_parameters
    if not is_next or not is_small or are_apart or any(may_not):
        return False
    return may_hold(parameter for _, parameter in (*before.parameters, *unit.parameters))


def uses_of(units: list[ModuleUnit]) -> list[Use]:
    """The uses of the units in a forward of the model, as the order of its modules has them."""
    unit_of = {id(module): index for index, unit in enumerate(units) if index for module in unit.modules}
    shared = {index for index, unit in enumerate(units) if unit.shares_parameters}
    model = units[0].modules[0]
    used = [module for module in _outside(model, set(unit_of)) if id(module) in unit_of]
    found, recomputed = [(unit_of[id(module)], module) for module in used], recomputed_modules(model)
    return [
        Use(
            index,
            not is_lookup(module),
            of_a_part=len(units[index].modules) > 1 and index not in shared,
            recomputed=id(module) in recomputed,
        )
        for index, module in found
    ]


def renormalizing(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The lookups, by name, that write to the rows that they look up first: `max_norm` is the largest norm they may have."""
    embeddings = ((name, one) for name, one in model.named_modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)))
    return {name: one for name, one in embeddings if one.max_norm is not None}


def is_lookup(module: nn.Module) -> bool:
    """Whether backward through the module does not read its parameters: it takes rows of them by index."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def _outside(module: nn.Module, chosen: set[int]) -> Iterator[nn.Module]:
    """The modules from `module` on in the model's order, without going into those of a chosen unit."""
    yield module
    if id(module) not in chosen:
        for child in module.children():
            yield from _outside(child, chosen)


def _parameters_outside(module: nn.Module, chosen: set[int]) -> Iterator[nn.Parameter]:
    """Parameters reachable from `module` without passing through a chosen unit's module."""
    for reached in _outside(module, chosen):
        if id(reached) not in chosen:
            yield from reached.parameters(recurse=False)


def fold_for_ranks(units: list[ModuleUnit], least_numel: int) -> list[ModuleUnit]:
    """The same parameters in fewer units, of which each is a message between ranks: what several modules share joins the
    root, so that it travels once for all its uses, and so do units with fewer than `least_numel` elements, as long as these
    are together no more than the largest unit: small messages cost as much as larger ones."""
    room = max(unit.numel for unit in units)
    root, kept = units[0], []
    for unit in units[1:]:
        if unit.shares_parameters:
            root.parameters.extend(unit.parameters)
        elif unit.numel < least_numel and unit.numel <= room:
            room -= unit.numel
            root.parameters.extend(unit.parameters)
        else:
            kept.append(unit)
    return [root, *kept]
