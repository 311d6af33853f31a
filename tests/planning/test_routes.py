# SPDX-License-Identifier: Apache-2.0
"""What a route may say: what nothing executes is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest

from offload.planning.route import FetchPath, Memory, Route, ValuePath

GOOD: dict[str, Any] = {
    "parameters": "cpu", "gradients": "device", "records": "device", "model_in": Memory.DEVICE, "update_in": Memory.DEVICE,
    "fetch_path": FetchPath.COPIED, "value_path": ValuePath.COPY_OUT,
}  # fmt: skip
ON_HOST = {"parameters": "cpu", "gradients": "cpu", "records": "cpu", "update_in": Memory.HOST, "value_path": ValuePath.STORE}


def test_where_records_lie_and_where_they_are_updated_are_two_things() -> None:
    assert (Route(**GOOD).records_in, Route(**GOOD).update_in) == (Memory.DEVICE, Memory.DEVICE)
    assert Route(**{**GOOD, **ON_HOST}).records_in is Memory.HOST
    assert Route(**{**GOOD, **ON_HOST, "records": "nvme"}).records_in is Memory.HOST


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_in": Memory.HOST}, "no device memory beside the host's"),
        ({"update_in": Memory.HOST, "value_path": ValuePath.STORE}, "the host cannot address records"),
        ({"gradients": "cpu"}, "with gradients that it has"),
        ({**ON_HOST, "fetch_path": FetchPath.STAYS, "parameters": "device"}, "no store to be read from"),
        ({**ON_HOST, "value_path": ValuePath.COPY_IN}, "cross to the other memory"),
        ({"records": "nvme"}, "by way of host memory"),
    ],
)
def test_what_nothing_executes_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        Route(**{**GOOD, **fields})
