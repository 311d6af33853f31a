# SPDX-License-Identifier: Apache-2.0
"""Matching the names in a checkpoint with the parameters and buffers of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.errors import InitializerError
from offload.model.file_dtypes import converts
from offload.model.flat import some_of
from offload.model.peft_names import base_namer

_LISTED_COUNT = 10
# Buffers which models used to save, and which old checkpoints therefore hold; models today compute them.
_FORMER_BUFFERS = (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$"))


@dataclass(slots=True)
class Differences:
    """What does not fit, one line each."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    of_other_kinds: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen or self.of_other_kinds)

    def __str__(self) -> str:
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.misshapen),
            ("of a dtype that does not become the model's unasked (floating point does)", self.of_other_kinds),
        )
        return "; ".join(f"{len(lines)} {kind}: {some_of(lines, _LISTED_COUNT)}" for kind, lines in kinds if lines)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file says of one tensor. `dtype`: None where it is one that torch, or this package, has not. `loaded_as`: under
    which name the model's library would look for it, where that is not its name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str
    loaded_as: str = ""


def match_names(model: nn.Module, stored: Mapping[str, Stored], origin: str) -> dict[str, tuple[str, ...]]:
    """{first fqn of a parameter or persistent buffer: the names in `stored` which hold it, its first fqn's first}.

    `origin` is where `stored` comes from, for errors. Errors: `InitializerError` with all differences.
    """
    tensors = persistent_tensors(model)
    namer = base_namer(model)
    base_names = {fqn: namer(fqn) for fqn in tensors}
    first_fqn: dict[int, str] = {}
    for fqn in sorted(tensors, key=lambda fqn: base_names[fqn] is None):
        first_fqn.setdefault(id(tensors[fqn]), fqn)
    by_fqn, unexpected = _names_by_fqn(model, stored, {name: fqn for fqn, name in base_names.items() if name}, origin)
    found: dict[str, tuple[str, ...]] = {}
    for fqn, tensor in tensors.items():
        if fqn in by_fqn:
            first = first_fqn[id(tensor)]
            found[first] = (*found.get(first, ()), by_fqn[fqn])
    ignorable = _ignorer(model, "_keys_to_ignore_on_load_missing", ())
    former = [pattern for suffix, pattern in _FORMER_BUFFERS if _has_buffer(model, suffix)]
    left_over = _ignorer(model, "_keys_to_ignore_on_load_unexpected", former)
    differences = Differences()
    for fqn in dict.fromkeys(first_fqn.values()):
        shape = tuple(tensors[fqn].shape)
        if fqn not in found:
            name = base_names[fqn]
            if name is not None and not ignorable(name):
                differences.missing.append(f"{fqn} {list(shape)}")
            continue
        differences.misshapen += [
            f"{name} (model: {list(shape)}, file: {list(stored[name].shape)})"
            for name in found[fqn]
            if stored[name].shape != shape
        ]
        differences.of_other_kinds += [
            f"{name} (model: {tensors[fqn].dtype}, file: {stored[name].dtype_name})"
            for name in found[fqn]
            if (dtype := stored[name].dtype) is None or not converts(dtype, tensors[fqn].dtype)
        ]
    differences.unexpected = [
        f"{name} {list(stored[name].shape)}"
        for name in unexpected
        if not left_over(name) and not left_over(stored[name].loaded_as or name)
    ]
    if differences:
        raise InitializerError(
            f"the weights in {origin} do not fit {type(model).__name__}: {differences}. Build the model from the "
            "configuration with which the weights were saved, or give the checkpoint of this very model"
        )
    return found


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `model` by fqn; a tied one under each of its fqns."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(persistent_buffers(model))}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every persistent buffer of `model` by fqn; one that several modules hold under each of its fqns."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def set_buffer(buffer: Tensor, value: Tensor) -> None:
    """Give a buffer other values in its own memory. Of an expanded one many elements are the same in memory, which have one
    value there: the first. Another that is to have several gets memory of its own."""
    held, first = buffer.detach(), value
    for dim, size in enumerate(buffer.shape if buffer.layout == torch.strided else ()):
        if size > 1 and buffer.stride(dim) == 0:
            held, first = held.narrow(dim, 0, 1), first.narrow(dim, 0, 1)
    if held.shape != buffer.shape and not torch.equal(first.expand(value.shape), value):
        buffer.data = value.to(buffer.device, buffer.dtype, copy=True)
        return
    held.copy_(first)


def _names_by_fqn(
    model: nn.Module, names: Iterable[str], fqns: Mapping[str, str], origin: str
) -> tuple[dict[str, str], list[str]]:
    """({fqn: name}, names for which there is no fqn), with the model's prefix added or taken away where that helps.

    `fqns`: by what is looked for."""
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if isinstance(prefix, str) and prefix else ""
    by_fqn: dict[str, str] = {}
    unexpected: list[str] = []
    for name in names:
        candidates = (name, prefix + name, name.removeprefix(prefix))
        fqn = next((fqns[candidate] for candidate in candidates if candidate in fqns), None)
        if fqn is None:
            unexpected.append(name)
        elif fqn in by_fqn:
            raise InitializerError(
                f"{origin} holds both {by_fqn[fqn]!r} and {name!r}, which are the same {fqn} of {type(model).__name__}"
                "; keep one of them"
            )
        else:
            by_fqn[fqn] = name
    return by_fqn, unexpected


def _has_buffer(model: nn.Module, suffix: str) -> bool:
    return any(name.endswith(suffix) for name, _ in model.named_buffers())


def _ignorer(model: nn.Module, attribute: str, more: Iterable[str]) -> Callable[[str], bool]:
    patterns = [re.compile(pattern) for pattern in (*(getattr(model, attribute, None) or ()), *more)]
    return lambda name: any(pattern.search(name) for pattern in patterns)
