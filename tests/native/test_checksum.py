# SPDX-License-Identifier: Apache-2.0
"""The checksum has one value, whatever the instruction set and wherever the memory begins."""

from __future__ import annotations

import pytest
import torch

from offload import _native
from tests.native.paths import simd_levels


@pytest.mark.parametrize("level", simd_levels())
def test_every_level_gives_the_same(level: str) -> None:
    memory = torch.randint(0, 256, (5 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    places = [
        (start, nbytes)
        for start in (0, 1, 8, 63)
        for nbytes in (0, 7, 63, 64, 65, 255, 256, 264, 512, 4096, 3 * 4096 + 71, 4 * 4096 + 3 * 256)
    ]

    def sums() -> list[int]:
        return [_native.checksum(memory.data_ptr() + start, nbytes) for start, nbytes in places]

    _native.set_simd_level("scalar")
    expected = sums()
    assert len(set(expected)) >= len(places) - 3  # of nothing there is one
    _native.set_simd_level(level)
    assert sums() == expected
