# SPDX-License-Identifier: Apache-2.0
"""The numbers of an optimizer's parameter groups, to a manifest and back."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from offload.checkpoint.matching import SWITCHES
from offload.errors import UsageError


def group_numbers(groups: Sequence[MutableMapping[str, Any]]) -> list[dict[str, Any]]:
    """Everything in the groups but their parameters, as JSON. Raises `UsageError` for what is not numbers or texts."""
    return [
        {key: _plain(value, f"param_groups[{index}][{key!r}]") for key, value in group.items() if key != "params"}
        for index, group in enumerate(groups)
    ]


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{position}]") for position, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UsageError(
        f"optimizer.{where} is {value!r}: a checkpoint holds finite numbers, texts and lists of them. Keep it out of "
        "param_groups."
    )


def restore_group_numbers(groups: Sequence[MutableMapping[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """Put what `group_numbers` gave back, but for the switches of torch's implementation. Kinds were checked."""
    for group, numbers in zip(groups, saved, strict=True):
        for key, value in numbers.items():
            present = group.get(key)
            if key in SWITCHES:
                continue
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(present, tuple) else value
