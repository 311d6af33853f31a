# SPDX-License-Identifier: Apache-2.0
"""What torch.nn and ordinary user code build: the same bits as without deferral."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from offload.deferred_init.deferred_init import deferred_init, is_deferred, materialize
from offload.errors import InitializerError
from tests.materialize.ordinary import assert_like_ordinary, bits_equal, built_deferred

ZOO: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(65, 33),
    "linear_bf16": lambda: nn.Linear(65, 33, dtype=torch.bfloat16),
    "linear_double": lambda: nn.Linear(5, 3, dtype=torch.float64),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "conv1d": lambda: nn.Conv1d(3, 8, 5, bias=False),
    "conv2d": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "conv_transpose": lambda: nn.ConvTranspose2d(4, 8, 3),
    "embedding": lambda: nn.Embedding(50, 16),
    "embedding_padding": lambda: nn.Embedding(50, 16, padding_idx=3),
    "embedding_bag": lambda: nn.EmbeddingBag(10, 3, padding_idx=-1),
    "embedding_pretrained": lambda: nn.Embedding.from_pretrained(torch.randn(7, 3), freeze=True),
    "layer_norm": lambda: nn.LayerNorm(16),
    "batch_norm": lambda: nn.BatchNorm2d(7),
    "prelu": lambda: nn.PReLU(3),
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
    "attention_kdim": lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=12),
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True, proj_size=3),
    "gru": lambda: nn.GRU(5, 7),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(16, 4, 32),
    "transformer": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(9, 5)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(9, 5)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(9, 5)),
    "cast": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16),
    "cast_twice": lambda: nn.Linear(6, 6).half().float(),
    "to_cpu": lambda: nn.Linear(6, 6).to("cpu").to(torch.device("cpu"), torch.float64).cpu(),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
}


@pytest.mark.parametrize("name", ZOO)
def test_torch_nn(name: str) -> None:
    assert_like_ordinary(ZOO[name], seed=len(name))


class Parameters(nn.Module):
    """A module with one parameter per initialiser."""

    def __init__(self, *made: Tensor) -> None:
        super().__init__()
        for index, tensor in enumerate(made):
            self.register_parameter(f"p{index}", nn.Parameter(tensor))


def _in_place(write: Callable[[Tensor], object], *shape: int) -> nn.Module:
    module = Parameters(torch.empty(*shape))
    with torch.no_grad():
        write(module.p0)
    return module


def _generator_given() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    return Parameters(torch.randn(5, generator=generator), torch.empty(40).normal_(generator=generator), torch.randn(3))


def _scheduled() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    assert not torch.ones(2).is_meta and torch.ones(2).device == torch.device("cpu") and torch.ones(2).is_cpu
    return Parameters(*(torch.full((3,), rate) for rate in rates), torch.tensor(torch.arange(3.0).tolist()))


def _branching() -> nn.Module:
    weight = torch.randn(20)
    while (weight.abs() > 1.5).any():
        weight = torch.where(weight.abs() > 1.5, torch.randn(20), weight)
    return Parameters(weight, torch.ones(2) if torch.equal(weight, weight.clone()) else torch.zeros(2))


def _default_bf16() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(8, 8), Parameters(torch.randn(9) * 0.02, torch.arange(4) / 3))
    finally:
        torch.set_default_dtype(torch.float32)


def _skip_init() -> nn.Module:
    """Made on the meta device, and given memory that nobody has set yet."""
    module = nn.Sequential(skip_init(nn.Linear, 5, 3), skip_init(nn.BatchNorm1d, 3), nn.Linear(3, 2))
    for child in module[:2]:
        nn.init.normal_(child.weight)
        nn.init.constant_(child.bias, 0.5)
    module[1].reset_running_stats()
    return module


def _set_data() -> nn.Module:
    module = Parameters(torch.empty(3), torch.empty(3), torch.randn(4))
    module.p0.data = torch.randn(3)
    module.p1.data = torch.from_numpy(np.arange(3, dtype=np.float32))
    module.p2.data = module.p2.data.double()
    return module


CUSTOM: dict[str, Callable[[], nn.Module]] = {
    "scaled_randn": lambda: Parameters(torch.randn(13, 7) * 0.02, torch.rand(5) - 0.5, torch.randn(16).half()),
    "constants": lambda: Parameters(torch.zeros(3), torch.ones(2, 2), torch.full((4,), 0.3), torch.eye(3)),
    "literals": lambda: Parameters(torch.tensor([1.5, 2.5]), torch.Tensor([3.0, 4.0]), torch.tensor(0.7)),
    "legacy_constructor": lambda: _in_place(lambda p: p.uniform_(-1, 1), 3, 4),
    "data_normal": lambda: _in_place(lambda p: p.data.normal_(0, 0.02), 33),
    "view_fill": lambda: _in_place(lambda p: (p.normal_(), p[2].fill_(0), p[:, 1].mul_(3)), 5, 4),
    "index_list": lambda: _in_place(lambda p: (p.zero_(), p.__setitem__([0, 2], torch.tensor([[1.0], [2.0]]))), 4, 3),
    "index_mask": lambda: _in_place(lambda p: (p.normal_(), p.__setitem__(p > 0.5, 0.5)), 9, 9),
    "index_scalar": lambda: _in_place(lambda p: (p.zero_(), p.__setitem__((1, 2), 5.0)), 4, 3),
    "index_numpy": lambda: _in_place(lambda p: (p.zero_(), p.__setitem__(np.array([1, 3]), 2.0)), 4, 3),
    "masked": lambda: Parameters(torch.randn(50)[torch.randn(50) > 0], torch.randn(9).masked_select(torch.ones(9) > 0)),
    "copy_from": lambda: _in_place(lambda p: p.copy_(torch.randn(6, 4).t()), 4, 6),
    "copy_constant": lambda: _in_place(lambda p: p.copy_(torch.from_numpy(np.eye(4))), 4, 4),
    "copy_large_constant": lambda: _in_place(lambda p: p.copy_(torch.from_numpy(np.arange(40000.0))), 40000),
    "copy_self": lambda: _in_place(lambda p: (p.normal_(), p.copy_(p.flip(0))), 6),
    "partly_normal": lambda: _in_place(lambda p: (p.zero_(), p[:, :17].normal_(), p[3].uniform_()), 8, 32),
    "trunc_normal": lambda: _in_place(lambda p: nn.init.trunc_normal_(p, std=1.0), 40, 30),
    "trunc_normal_tail": lambda: _in_place(lambda p: nn.init.trunc_normal_(p, mean=3.0, std=1.0, a=-1, b=1), 40, 30),
    "orthogonal": lambda: _in_place(lambda p: nn.init.orthogonal_(p, gain=2), 9, 5),
    "orthogonal_wide": lambda: _in_place(lambda p: nn.init.orthogonal_(p), 5, 9),
    "xavier": lambda: _in_place(lambda p: nn.init.xavier_normal_(p), 9, 5),
    "kaiming": lambda: _in_place(lambda p: nn.init.kaiming_normal_(p, mode="fan_out"), 9, 5),
    "sparse": lambda: _in_place(lambda p: nn.init.sparse_(p, 0.3), 20, 10),
    "eye": lambda: _in_place(lambda p: nn.init.eye_(p), 4, 6),
    "dirac": lambda: _in_place(lambda p: nn.init.dirac_(p), 4, 4, 3),
    "bernoulli": lambda: _in_place(lambda p: p.bernoulli_(0.3), 70),
    "bernoulli_tensor": lambda: _in_place(lambda p: p.bernoulli_(torch.rand(70)), 70),
    "other_distributions": lambda: _in_place(lambda p: (p.exponential_(), p.mul_(torch.empty(90).log_normal_())), 90),
    "permutation": lambda: Parameters(torch.randperm(9) / 9, torch.randint(9, (4,)) / 2, torch.rand_like(torch.eye(3))),
    "multinomial": lambda: Parameters(torch.multinomial(torch.rand(20), 5).float(), torch.poisson(torch.rand(4))),
    "dropout": lambda: Parameters(nn.functional.dropout(torch.ones(50), 0.5), torch.randn(3)),
    "chunked": lambda: Parameters(*torch.randn(9, 4).chunk(3)),
    "transposed": lambda: Parameters(torch.randn(5, 3).t(), torch.randn(4, 4, 4).permute(2, 0, 1)),
    "empty_sizes": lambda: Parameters(torch.randn(0, 3), torch.randn(())),
    "products": lambda: Parameters(torch.einsum("ij,jk", torch.rand(4, 5), torch.rand(5, 3)), torch.randn(9).cumsum(0)),
    "complex": lambda: Parameters(torch.view_as_real(torch.polar(torch.rand(4), torch.rand(4)))),
    "foreach": lambda: _in_place(lambda p: (p.normal_(), torch._foreach_mul_([p, p.data], 2.0)), 5),
    "generator": _generator_given,
    "item": _scheduled,
    "branch_on_values": _branching,
    "default_dtype": _default_bf16,
    "set_data": _set_data,
    "skip_init": _skip_init,
}  # fmt: skip


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_initialiser(name: str) -> None:
    assert_like_ordinary(CUSTOM[name], seed=len(name))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.scale = torch.ones(1) * 0.5
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)), persistent=False)
        self.tables = [torch.arange(3), "text"]


class Model(nn.Module):
    """Tied, deep-copied, initialised with apply, as many code bases do."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width, padding_idx=0)
        self.blocks = nn.ModuleList([copy.deepcopy(Block(width)) for _ in range(3)])
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("inv_freq", frequencies)
        self.register_buffer("inv_freq_again", self.inv_freq)
        self.apply(self._initialise)
        for block in self.blocks:
            nn.init.normal_(block.mix.weight, std=0.02 / math.sqrt(6))

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)
            module.weight.data[module.padding_idx].zero_()


def test_model_with_tied_copied_and_held_tensors() -> None:
    model = assert_like_ordinary(Model, seed=3)
    assert model.head.weight is model.embed.weight
    assert model.inv_freq is model.inv_freq_again
    for block in model.blocks:
        assert torch.equal(block.scale, torch.tensor([0.5])) and torch.equal(block.tables[0], torch.arange(3))
        assert block.tables[1] == "text"


def test_the_generator_after_the_block_continues_as_after_ordinary_construction() -> None:
    torch.manual_seed(5)
    Model()
    expected = torch.randn(4)
    built_deferred(Model, 5)
    assert torch.equal(torch.randn(4), expected)


def test_two_blocks_build_one_model() -> None:
    def initialise(model: nn.Module) -> None:
        for parameter in model.parameters():
            nn.init.uniform_(parameter)

    torch.manual_seed(0)
    ordinary = Model()
    initialise(ordinary)
    deferred = built_deferred(Model, 0)
    with deferred_init():
        initialise(deferred)
    for value, expected in zip(materialize(list(deferred.parameters())), ordinary.parameters(), strict=True):
        assert bits_equal(value, expected)


def test_a_cast_after_the_block_is_applied() -> None:
    torch.manual_seed(0)
    ordinary = Model().to(torch.bfloat16)
    deferred = built_deferred(Model, 0).to(torch.bfloat16)
    for value, expected in zip(materialize(list(deferred.parameters())), ordinary.parameters(), strict=True):
        assert value.dtype == torch.bfloat16 and bits_equal(value, expected)


def test_a_cast_after_the_block_then_another_block() -> None:
    torch.manual_seed(0)
    ordinary = nn.Linear(4, 4).to(torch.bfloat16)
    nn.init.zeros_(ordinary.weight[1])
    deferred = built_deferred(lambda: nn.Linear(4, 4), 0).to(torch.bfloat16)
    with deferred_init():
        deferred.weight.data[1].zero_()
    (value,) = materialize([deferred.weight])
    assert bits_equal(value, ordinary.weight)


def test_parameters_of_foreign_memory_stay_real() -> None:
    array = np.ones(3, dtype=np.float32)
    with deferred_init():
        module = Parameters(torch.from_numpy(array))
        module.p0.data.mul_(2)
    assert not module.p0.is_meta and not is_deferred(module.p0)
    assert array.tolist() == [2, 2, 2]
    (value,) = materialize([module.p0])
    assert value.data_ptr() == module.p0.data_ptr()


def test_what_the_caller_puts_on_meta_stays_undefined_and_draws_nothing() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with deferred_init():
        with torch.device("meta"):
            inner = nn.Linear(3, 3)
        outer = nn.Linear(3, 3, device="meta")
    assert torch.equal(torch.get_rng_state(), state)
    assert inner.weight.is_meta and not is_deferred(inner.weight) and not is_deferred(outer.weight)


@torch.library.custom_op("offload_tests::jitter", mutates_args=())
def _jitter(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@torch.library.custom_op("offload_tests::fill_random", mutates_args=("x",))
def _fill_random(x: Tensor) -> None:
    x.normal_()


def test_custom_operators_without_shape_functions() -> None:
    def build() -> nn.Module:
        module = Parameters(_jitter(torch.ones(5)), torch.zeros(6))
        with torch.no_grad():
            _fill_random(module.p1)
            _fill_random(module.p1[:2])
        return module

    model = assert_like_ordinary(build)
    nn.init.zeros_(model.p0)
    with pytest.raises(InitializerError, match="'p0' was changed"):
        materialize([model.p0])


class Packed(nn.Parameter):
    """Moves what unpacks it along, as those of bitsandbytes do."""

    table: Tensor

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        moved = Tensor._make_subclass(Packed, super().to(*args, **kwargs).data)
        moved.table = self.table.to(device)
        self.table = moved.table
        return moved


def test_what_a_parameter_moves_along_keeps_its_value() -> None:
    table = torch.arange(4.0)
    with deferred_init():
        module = nn.Module()
        weight = Packed(torch.ones(4))
        weight.table = table
        module.register_parameter("weight", weight.to("cpu"))
    assert module.weight.is_meta and not weight.table.is_meta
    assert torch.equal(weight.table, table)
    assert torch.equal(materialize([module.weight])[0], torch.ones(4))
