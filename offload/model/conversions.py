# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of the tensors in a folder when it loads a model: other names, experts put together into one tensor,
a fused projection cut into its parts. And what it makes of a model's when it saves it, which is the reverse.

The rules are transformers' own, for every family of models that it has some for, and its own code follows them. Here is only
which tensors are needed for which, so that they can be made when their turn comes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import InitializerError
from offload.model.flat import some_of
from offload.model.peft_names import base_model, base_namer, is_pretrained_model
from offload.model.weight_names import Stored, persistent_tensors

_log = logging.getLogger(__name__)

_LISTED_COUNT = 4


@dataclass(slots=True)
class Conversion:
    """Tensors that others are made of together, by one of transformers' converters: on loading the model's of the files', on
    saving the other way round.

    first    what the converter calls the first of those made
    model    what converters ask for shapes and sizes
    renamed  what is called otherwise after it was made
    taken    (the converter's pattern, its name) of each that is needed, in the order in which they are put together
    """

    first: str
    converter: Any
    model: Any
    renamed: Callable[[str], str] = str
    taken: list[tuple[str, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of what it needs."""
        return [name for _, name in self.taken]

    def made_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By their names. `tensors`: of `names`; on the meta device for shapes and dtypes alone.

        Errors: `InitializerError` which says what could not be made of what.
        """
        converter = deepcopy(self.converter)  # it collects what it is given
        for pattern, name in self.taken:
            converter.add_tensor(self.first, name, pattern, tensors[name])
        try:
            made = converter.convert(self.first, model=self.model, config=self.model.config)
            made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 gives its errors beside it
            return {self.renamed(name): value[0] if isinstance(value, list) else value for name, value in made.items()}
        except Exception as error:  # whatever a conversion meets that it was not written for
            shapes = [f"{name} {list(tensors[name].shape)}" for name in self.names]
            raise InitializerError(
                f"{self.first!r} cannot be made of {len(shapes)} tensors as transformers does it ({error}): "
                f"{some_of(shapes, _LISTED_COUNT)}. Look whether all of the checkpoint's files are there, and whether the "
                "model is of its configuration"
            ) from error


@dataclass(slots=True)
class Conversions:
    """What becomes of tensors that are loaded, or saved.

    renamed      of those that are taken as they are: what they are called before by what they are called after
    joint        those that are made together
    unexpected   of which a model that is loaded has none: what transformers would look for, by the name in the files
    """

    renamed: dict[str, str] = field(default_factory=dict)
    joint: list[Conversion] = field(default_factory=list)
    unexpected: dict[str, str] = field(default_factory=dict)


def conversions(model: nn.Module, names: Iterable[str], origin: str) -> Conversions | None:
    """How `from_pretrained` of this model's class, without adapters, would take tensors of these names.

    None where the model is none of transformers', or that is of a version that converts nothing.

    origin  where the names come from, for errors. Errors: `InitializerError` where two of them are one tensor of the model
    """
    base: Any = base_model(model)
    if not is_pretrained_model(base):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import dot_natural_key, rename_source_key
    except ImportError:
        return None
    namer = base_namer(model)
    tensors = {name: tensor for fqn, tensor in persistent_tensors(model).items() if (name := namer(fqn)) is not None}
    renamings, converters = _by_kind(get_model_conversion_mapping(base))
    joining = _Joining(converters, _Unadapted(base, tensors))
    found = Conversions()
    for name in sorted(names, key=dot_natural_key):  # the order of experts too
        wanted, pattern = rename_source_key(name, renamings, converters, base.base_model_prefix, tensors)
        if wanted not in tensors and name in tensors:
            wanted, pattern = rename_source_key(name, [], [], base.base_model_prefix, tensors)
        if wanted not in tensors:
            found.unexpected[name] = wanted
        elif pattern is not None:
            joining.take(name, wanted, pattern)
        elif wanted in found.renamed:
            raise InitializerError(
                f"{origin} holds both {found.renamed[wanted]!r} and {name!r}, which are the same {wanted} of "
                f"{type(base).__name__}; keep one of them"
            )
        else:
            found.renamed[wanted] = name
    found.joint = joining.found
    return found


def reversions(model: nn.Module, tensors: Mapping[str, Tensor]) -> Conversions | None:
    """How `save_pretrained` of this model would save its tensors, so that its `from_pretrained` finds them.

    None where they stay as they are, which `from_pretrained` takes too: the model is none of transformers', its version
    converts nothing, or the rules cannot be reversed.

    tensors  what is saved, by name, on the meta device
    """
    if not is_pretrained_model(model):
        return None
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    saved: Any = model
    # A prefix that is dropped on loading need not have been there: it was where the model says that it was loaded so.
    prefix_change: Any = getattr(core_model_loading, "PrefixChange", ())
    used = [_patterns(rule) for rule in getattr(model, "_weight_conversions", None) or ()]
    rules = [
        rule
        for rule in get_model_conversion_mapping(saved, add_legacy=False)
        if not isinstance(rule, prefix_change) or _patterns(rule) in used
    ]
    try:
        found = _reversed(rules, tensors, _Unadapted(model, tensors))
        names = [*found.renamed, *(name for one in found.joint for name in one.made_of(tensors))]
        if len(set(names)) < len(names):
            raise ValueError("two of its tensors would have one name")
    except (InitializerError, NotImplementedError, ValueError) as error:
        _log.warning("%s is saved under the names that it has in memory: %s", type(model).__name__, error)
        return None
    return found


def _reversed(rules: Sequence[Any], tensors: Iterable[str], asked: _Unadapted) -> Conversions:
    """By the rules backwards: what was made last is taken apart first, then what it is made of gets its names."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = _by_kind([rule.reverse_transform() for rule in reversed(rules)])

    def renamed(name: str) -> str:
        return str(rename_source_key(name, renamings, [])[0])

    joining, found = _Joining(converters, asked, renamed), Conversions()
    for name in sorted(tensors, key=dot_natural_key):
        first, pattern = rename_source_key(name, [], converters)
        if pattern is not None:
            joining.take(name, first, pattern)
        elif (key := renamed(name)) in found.renamed:
            raise ValueError(f"{name!r} and {found.renamed[key]!r} would be called {key!r}")
        else:
            found.renamed[key] = name
    found.joint = joining.found
    return found


def _by_kind(rules: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those that rename, and those that convert."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    kept = list(rules)
    return (
        [rule for rule in kept if isinstance(rule, WeightRenaming)],
        [rule for rule in kept if isinstance(rule, WeightConverter)],
    )


def _patterns(rule: Any) -> tuple[list[str], list[str], str | None]:
    """What a rule is known by: each model that is looked at has its own copy."""
    return rule.source_patterns, rule.target_patterns, getattr(rule, "scope_prefix", None)


class _Joining:
    """Puts together what is made together."""

    def __init__(self, converters: Iterable[Any], asked: _Unadapted, renamed: Callable[[str], str] = str) -> None:
        self._by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._asked, self._renamed = asked, renamed
        self._by_first: dict[str, Conversion] = {}

    def take(self, name: str, first: str, pattern: str) -> None:
        """A tensor that is one of those of which `first` is made, by the converter of the pattern."""
        conversion = Conversion(first, self._by_pattern[pattern], self._asked, self._renamed)
        self._by_first.setdefault(first, conversion).taken.append((pattern, name))

    @property
    def found(self) -> list[Conversion]:
        """All, each with what it is made of in the order in which that came."""
        return list(self._by_first.values())


class _Unadapted:
    """A model as conversions know it, whatever adapters there are in it: parameters have the names of the base model."""

    def __init__(self, base: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._base, self._tensors = base, tensors

    def get_parameter(self, name: str) -> Tensor:
        return self._tensors[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def outline(stored: Stored) -> Tensor:
    """A tensor without values, to see what a conversion makes of it."""
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def outlined_model(kind: str, config: str) -> nn.Module | None:
    """A model of transformers without values, by the name of its class and its configuration's JSON; None where the class is
    none of the package's, or that is not installed."""
    try:
        import transformers

        found = getattr(transformers, kind, None)
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and config):
            return None
        make: Any = found
        content = json.loads(config)
        if "auto_map" in content:  # a class of the user's own, which may have the name of one
            return None
        with torch.device("meta"):
            model: nn.Module = make(make.config_class.from_dict(content))
            return model
    except ImportError:
        return None
    except Exception as error:  # whatever another version's configuration makes of the model's code
        _log.warning("%s is saved under the names that it has in memory: %s", kind, error)
        return None
