"""Which parameters are fetched together: the partition of a model into units.

    block      an outermost module whose class the model names in `_no_split_modules` (Hugging Face), else an element
               of an outermost `nn.ModuleList` or `nn.Sequential`
    big leaf   a module without children outside every block that holds much (an embedding, a head)
    root       the model itself, with every parameter that is in no other unit

A parameter that several modules share belongs to the unit that holds all of them: a block if they all lie inside it,
else the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True)
class ModuleUnit:
    """One unit of a model: the module whose forward uses it, and the parameters, as (fqn, parameter), in model order."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)


def _block_class_names(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set)):
            names.update(str(name) for name in declared)
    return names


def _outermost(module: nn.Module, prefix: str, class_names: set[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child).__name__ in class_names:
            yield path, child
        else:
            yield from _outermost(child, f"{path}.", class_names)


def _elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield from ((f"{path}.{index}", element) for index, element in enumerate(child))
        else:
            yield from _elements(child, f"{path}.")


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    named = list(_outermost(model, "", _block_class_names(model)))
    if not named and isinstance(model, (nn.ModuleList, nn.Sequential)):
        named = [(str(index), element) for index, element in enumerate(model)]
    found = named or list(_elements(model, ""))
    # One module listed twice (weight sharing between layers) is one unit.
    unique = {id(module): (name, module) for name, module in reversed(found)}
    return [entry for entry in reversed(unique.values()) if next(entry[1].parameters(), None) is not None]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _big_leaves(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inside = {id(module) for _, block in blocks for module in block.modules()}
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
    chosen = {id(module): ModuleUnit(name, module) for name, module in blocks + _big_leaves(model, blocks)}
    root = ModuleUnit("", model)
    order = dict.fromkeys(id(module) for module in model.modules())
    units = [root, *(chosen[key] for key in order if key in chosen and key != id(model))]

    owners: dict[int, set[int]] = {}
    for unit in units[1:]:
        for parameter in unit.module.parameters():
            owners.setdefault(id(parameter), set()).add(id(unit.module))
    outside = {id(parameter) for parameter in _parameters_outside(model, set(chosen))}
    for fqn, parameter in model.named_parameters():
        holders = owners.get(id(parameter), set())
        if len(holders) == 1 and id(parameter) not in outside:
            chosen[next(iter(holders))].parameters.append((fqn, parameter))
        else:
            root.parameters.append((fqn, parameter))
    return [root, *(unit for unit in units[1:] if unit.parameters)]


def _parameters_outside(module: nn.Module, chosen: set[int]) -> Iterator[nn.Parameter]:
    """Parameters reachable from `module` without passing through a chosen unit's module."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if id(child) not in chosen:
            yield from _parameters_outside(child, chosen)


def fold_small(units: list[ModuleUnit], least_numel: int) -> list[ModuleUnit]:
    """The same parameters in fewer units: those with fewer than `least_numel` elements join the root, as long as they are
    together no more than the largest unit. For ranks: a unit is a message, and small messages cost as much as larger ones."""
    room = max(unit.numel for unit in units)
    root, kept = units[0], []
    for unit in units[1:]:
        if unit.numel < least_numel and unit.numel <= room:
            room -= unit.numel
            root.parameters.extend(unit.parameters)
        else:
            kept.append(unit)
    return [root, *kept]
