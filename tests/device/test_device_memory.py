# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from offload.device.deferred import DeferredAccelerator


def test_memory_is_in_use_until_the_last_tensor_over_it_is_gone() -> None:
    accelerator = DeferredAccelerator(nbytes=1000)
    memory = accelerator.memory(600)
    part = memory[:100]
    del memory
    assert accelerator.free_nbytes() == 400
    with pytest.raises(torch.OutOfMemoryError, match="1000 bytes, 600 are in use, and 500 more"):
        accelerator.memory(500)
    del part
    assert accelerator.free_nbytes() == 1000 and accelerator.peak_nbytes() == 600
