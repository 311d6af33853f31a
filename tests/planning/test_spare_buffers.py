# SPDX-License-Identifier: Apache-2.0
"""Gradient buffers that are kept free for the gradient that comes next."""

from __future__ import annotations

from offload.planning.budget import SPARE_BUFFERS, spare_count, spilled_nbytes


def test_a_gradient_that_comes_all_at_once_finds_free_buffers() -> None:
    assert spare_count(14, 500) == 7  # the step of a GPT-2 of 1 B parameters at the smallest budget
    assert spare_count(300, 500) == SPARE_BUFFERS
    assert spare_count(2, 3) == 1
    for chunk_count in (1, 5, 40):
        for buffer_count in range(chunk_count):
            # Whatever is kept free, gradients of two parameters can arrive side by side in the others.
            assert buffer_count - spare_count(buffer_count, chunk_count) >= buffer_count // 2
        assert spare_count(chunk_count, chunk_count) == 0


def test_what_is_kept_free_counts_as_spilled() -> None:
    chunks = [8] * 20 + [4] * 5
    assert spilled_nbytes(chunks, 25) == 0
    assert spilled_nbytes(chunks, 24) == 8 * (1 + SPARE_BUFFERS)
    assert spilled_nbytes(chunks, 0) == sum(chunks)
