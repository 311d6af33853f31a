# SPDX-License-Identifier: Apache-2.0
"""What an update is about: the state formats' names and dtypes, and one run of elements with its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from offload.device.arithmetic.encoding import CODES
from offload.device.arithmetic.rules import Hyper

MASTER, REMAINDER = "master", "remainder"


class StateFormat(Enum):
    """What a record consists of: see `offload.device.arithmetic.records`. The values are those of `Config.state_format`."""

    FP32 = "fp32"
    SPLIT = "split"
    BF16 = "bf16"
    EIGHT_BIT = "8bit"

    @property
    def is_split(self) -> bool:
        """Whether the parameters are bf16 and a part of their own master."""
        return self is not StateFormat.FP32

    def moment_dtype(self, name: str) -> torch.dtype:
        if self is StateFormat.EIGHT_BIT:
            return CODES[name].dtype
        return torch.bfloat16 if self is StateFormat.BF16 else torch.float32


def scale_name(moment: str) -> str:
    """The array of a moment's scale bytes."""
    return f"{moment}_scale"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One run of elements of one parameter, with one set of hyperparameters. Tensors are 1-D, [numel], on one device.

    grad           float32, bfloat16 or float16; read
    arrays         of the record, by name (`offload.device.arithmetic.records`); updated in place
    values         fp32: None, or the parameters in any dtype, which receive the new weights; fp32 parameters that are
                   their own master are `arrays["master"]`. Other formats: the bf16 parameters, read and written.
    step           of this update, counted from 1
    grad_factor    multiplies the gradient as it is read (un-scaling and clipping), rounded to float32 first
    rounding_seed  names the parameter for stochastic rounding
    first_index    of the run's first element in the parameter
    """

    grad: Tensor
    arrays: Mapping[str, Tensor]
    values: Tensor | None
    hyper: Hyper
    step: int
    grad_factor: float = 1.0
    state_format: StateFormat = StateFormat.FP32
    rounding_seed: int = 0
    first_index: int = 0

    @property
    def master(self) -> Tensor:
        """The fp32 master, or its remainder."""
        return self.arrays[REMAINDER if self.state_format.is_split else MASTER]

    @property
    def signed_factor(self) -> float:
        """What the gradient is multiplied by: negative to maximize."""
        return -self.grad_factor if self.hyper.maximize else self.grad_factor
