# SPDX-License-Identifier: Apache-2.0
"""Tensors that `torch.load` makes inside `deferred_init`, over memory and over mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offload.deferred_init.deferred_init import deferred_init, is_deferred, materialize

from ..acceptance.runs import assert_same_bits


@pytest.mark.parametrize("how", [{}, {"mmap": True}, {"weights_only": False}, {"legacy": True}], ids=str)
def test_what_is_loaded_has_its_values_and_shares_memory(tmp_path: Path, how: dict[str, Any]) -> None:
    """The older format fills the memory of tensors after it has made them."""
    weight = torch.randn(6, 4)
    given = {"weight": weight, "turned": weight.t(), "cast": weight[2:5].bfloat16(), "number": torch.tensor(3.0)}
    given["none"] = torch.empty(0, 3)
    torch.save(given, tmp_path / "file", _use_new_zipfile_serialization="legacy" not in how)
    with deferred_init():
        found = torch.load(tmp_path / "file", **{name: value for name, value in how.items() if name != "legacy"})
        assert found["weight"].untyped_storage()._cdata == found["turned"].untyped_storage()._cdata
        assert found["number"].item() == 3
        model = nn.Linear(4, 6, bias=False)
        model.load_state_dict({"weight": found["weight"] * 2})
    assert all(is_deferred(tensor) for tensor in found.values())
    assert_same_bits(dict(zip(found, materialize(list(found.values())), strict=True)), given)
    assert torch.equal(materialize([model.weight])[0], weight * 2)


def test_a_mapped_file_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, tmp_path / "file")
    with deferred_init():
        found = torch.load(tmp_path / "file", mmap=True)
    content = (tmp_path / "file").read_bytes()
    status = (tmp_path / "file").stat()
    changed = content.replace(torch.ones(1000).numpy().tobytes(), torch.full((1000,), 2.0).numpy().tobytes())
    (tmp_path / "file").write_bytes(changed)
    os.utime(tmp_path / "file", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert materialize([found["weight"]])[0].unique().tolist() == [2]


def test_a_tensor_that_is_put_over_other_memory() -> None:
    with deferred_init():
        assert torch.empty(0).set_(torch.ones(5)).sum().item() == 5
        assert torch.empty(0).set_(torch.from_numpy(np.ones(4, np.float32))).sum().item() == 4
        assert torch.empty(0).set_(torch.ones(6).untyped_storage(), 1, (2, 2)).sum().item() == 4
