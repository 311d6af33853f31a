# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the compiled kernels, and the torch operations in their place, give the CPU kernels' bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from offload.device.arithmetic import compiled_kernels, kernels
from offload.device.arithmetic.optimizer_step import update
from tests.device.kernel_files import no_kernels_loaded
from tests.native import exact
from tests.native.adam_cases import Case, adam

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMEL = 300_017


@pytest.fixture(params=["compiled", "torch operations"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    no_kernels_loaded(monkeypatch)
    device = torch.device("cuda", torch.cuda.current_device())
    if request.param == "compiled":
        compiled_kernels.prepare(device)
        assert compiled_kernels.of(device) is not None, "the kernels did not load"
    yield request.param


@pytest.mark.parametrize("emit", [None, *DTYPES])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(form: str, grad: torch.dtype, emit: torch.dtype | None, decoupled: bool) -> None:
    hyper = adam(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled)
    case = Case(NUMEL, 7, grad=grad, emit=emit, specials=True)
    on_gpu = copy.copy(case)
    for name in ("grad", "master", "exp_avg", "exp_avg_sq", "emit"):
        tensor = getattr(case, name)
        setattr(on_gpu, name, None if tensor is None else tensor.cuda())
    update([case.segment(hyper, 3, 0.3)])
    update([on_gpu.segment(hyper, 3, 0.3)])
    for ours, expected in zip(on_gpu.results(), case.results(), strict=True):
        assert exact.same_bits(ours.cpu(), expected)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("target", [None, *DTYPES])
@pytest.mark.parametrize("source", DTYPES)
def test_ingest(form: str, source: torch.dtype, target: torch.dtype | None, accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    src = exact.rough_values(NUMEL, generator, specials=True).to(source)
    dst = None if target is None else exact.rough_values(NUMEL, generator, specials=True).to(target)
    on_gpu = None if dst is None else dst.cuda()
    add = accumulate and dst is not None
    expected = kernels.ingest_async(dst, src, 4032, add)
    ours = kernels.ingest_async(on_gpu, src.cuda(), 4032, add)
    assert exact.same_bits(ours.cpu(), expected)
    if dst is not None and on_gpu is not None:
        assert exact.same_bits(on_gpu.cpu(), dst)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_convert(form: str, source: torch.dtype, target: torch.dtype) -> None:
    src = exact.rough_values(NUMEL, torch.Generator().manual_seed(3), specials=True).to(source)
    expected, ours = torch.empty(NUMEL, dtype=target), torch.empty(NUMEL, dtype=target, device="cuda")
    kernels.convert(expected, src)
    kernels.convert(ours, src.cuda())
    assert exact.same_bits(ours.cpu(), expected)
