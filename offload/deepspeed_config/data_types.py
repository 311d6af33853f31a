# SPDX-License-Identifier: Apache-2.0
"""The section "data_types": what gradients are summed in, and what buffers are cast to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import ConfigError

_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DataTypes:
    """`grad_accum`, `param` and `buffer` as given, None where they are not; `sums_are_narrow`: see `Config`."""

    grad_accum: str | None
    param: str | None
    buffer: str | None
    sums_are_narrow: bool
    refusal: str | None
    """Why there is nothing that sums so, which DeepSpeed says by NotImplementedError."""

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        return _DTYPES[self.buffer] if self.buffer is not None else None


def read(section: Mapping[str, Any], dtype: str | None, stage: int) -> DataTypes:
    """`dtype`: what the model computes in by "fp16" or "bf16", None by neither."""
    own = dtype or "fp32"
    names = ("grad_accum_dtype", "param_dtype", "buffer_dtype")
    grad_accum, param, buffer = (_name(name, section.get(name)) for name in names)
    if param not in (None, own):
        raise ConfigError(
            f"data_types.param_dtype={param!r} is not what the model computes in, {own}: set fp16.enabled or "
            "bf16.enabled, and leave it out."
        )
    refusal = None
    if stage == 0 and grad_accum not in (None, "fp32", own):
        refusal = (
            f"data_types.grad_accum_dtype={grad_accum!r} of a model in {own}, at stage 0: gradients are summed in {own} or in "
            "fp32: choose one of these, or leave it out."
        )
    return DataTypes(grad_accum, param, buffer, dtype is not None and grad_accum in (None, dtype), refusal)


def _name(key: str, value: Any) -> str | None:
    if value is None or value == "auto":
        return None
    if str(value) not in _NAMES:
        raise ConfigError(f"data_types.{key}={value!r} is unknown: expected 'fp32', 'fp16' or 'bf16'.")
    return _NAMES[str(value)]
