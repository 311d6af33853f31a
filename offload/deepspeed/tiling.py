# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.zero.TiledLinear`: a linear layer in tiles. This engine does not need tiles, as a chunk may split a parameter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from offload.deepspeed.absent import AskedWrongly


def _bounds(features: int, splits: int, name: str) -> list[int]:
    if not 1 <= splits <= features:
        raise AskedWrongly(f"TiledLinear({name}={splits}): expected 1 to {features}, one feature for each tile.")
    sizes = [features // splits + (tile < features % splits) for tile in range(splits)]
    return [sum(sizes[:tile]) for tile in range(splits + 1)]


class TiledLinear(nn.Module):
    """y = x W^T + b, of `linears[row][column]`: rows are tiles of the outputs, columns of the inputs; the last has the bias.

    input_is_already_split  x is a list, one tensor for each column
    combine_out_splits      False: y is a list, one tensor for each row
    linear_cls              what makes a tile of (in, out, bias=..., **keywords)
    init_linear             whose weights the tiles begin with
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_parts = _bounds(in_features, in_splits, "in_splits")
        self.out_parts = _bounds(out_features, out_splits, "out_splits")
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        columns, rows = (list(pairwise(one)) for one in (self.in_parts, self.out_parts))
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(right - left, below - above, bias=bias and right == in_features, **keywords)
                for left, right in columns
            )
            for above, below in rows
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take over the weights of an untiled layer."""
        rows: Any = self.linears
        for row, tiles in enumerate(rows):
            outputs = slice(self.out_parts[row], self.out_parts[row + 1])
            for column, tile in enumerate(tiles):
                tile.weight.copy_(other.weight[outputs, self.in_parts[column] : self.in_parts[column + 1]])
            if self.use_bias:
                tile.bias.copy_(other.bias[outputs])

    def forward(self, inputs: Any) -> Any:
        parts = inputs
        if not self.input_is_already_split:
            sizes = [after - before for before, after in pairwise(self.in_parts)]
            parts = torch.split(inputs, sizes, dim=-1)
        rows: Any = self.linears
        outputs: list[Any] = [sum(tile(part) for tile, part in zip(tiles, parts, strict=True)) for tiles in rows]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs
