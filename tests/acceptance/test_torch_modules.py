# SPDX-License-Identifier: Apache-2.0
"""What wraps modules, and what they take and return: against plain PyTorch with torch.optim, in fp32."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

from .models import (
    ALL_SETUPS,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_PLACE,
    STEP_SETUPS,
    Block,
    Normalized,
    Setup,
    Stack,
    adamw,
    llama,
    stack,
    vector_batches,
)
from .runs import Run, assert_close, assert_same_bits, compare, run_engine, run_plain, simple_loop, token_loop

anywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda s: s.name)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


class Checkpointed(Stack):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outlet(x)


@anywhere
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(opened: Any, setup: Setup, reentrant: bool) -> None:
    """Blocks run again inside backward; in the reentrant kind by a backward within the backward."""

    def build() -> nn.Module:
        model = Checkpointed()
        model.reentrant = reentrant
        return model

    compare(build, simple_loop(), setup, opened)


@anywhere
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_over_the_whole_model(opened: Any, setup: Setup, reentrant: bool) -> None:
    """One segment holds all blocks, so all are needed again at once; and one parameter is shared with its outside."""

    class Whole(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(super().forward, self.inlet(x), use_reentrant=reentrant)
            return self.outlet(x)

    compare(Whole, simple_loop(), setup, opened)


@few
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_a_hugging_face_model(opened: Any, setup: Setup, reentrant: bool) -> None:
    def build() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    compare(build, token_loop(), setup, opened)


@few
def test_autocast(opened: Any, setup: Setup) -> None:
    """fp32 weights, bf16 arithmetic by autocast, whose cache of cast weights must not outlive the weights."""
    batches = vector_batches(8)

    def loop(run: Run) -> list[float]:
        losses = []
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    # Both round to bf16 at the same places; where a last bit differs a rounding may fall to the other side.
    compare(stack, loop, setup, opened, atol=1e-3)


@few
def test_autocast_with_two_forwards(opened: Any, setup: Setup) -> None:
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    run.model(y)
                loss = F.mse_loss(run.model(x), y) + F.mse_loss(run.model(y), x)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(stack, loop, setup, opened, atol=1e-3)


@few
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile", "torch.compile"])
def test_compiled_blocks(opened: Any, setup: Setup, backend: str, in_place: bool) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        for index, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend=backend)
            else:
                model.blocks[index] = torch.compile(block, backend=backend)
        return model

    plain = stack()
    expected, expected_weights = simple_loop()(Run(plain, adamw(plain))), plain.state_dict()
    torch._dynamo.reset()
    model = wrap(stack())
    losses, weights = run_engine(opened(model, adamw(model), setup), simple_loop())
    assert_close(losses, expected, what="losses")
    assert_close({name.replace("_orig_mod.", ""): value for name, value in weights.items()}, expected_weights)


@dataclass
class Pair:
    hidden: torch.Tensor
    note: str


class Returns(nn.Module):
    """Blocks that return a dataclass, a dict, a nested tuple with None, a ModelOutput; that take only keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsBlock(kind) for kind in ("dataclass", "dict", "tuple", "output", "list"))

    def forward(self, *, x: torch.Tensor, note: str) -> dict[str, Any]:
        aside = None
        for block in self.blocks:
            out = block(x=x, aside=aside, note=note)
            if block.kind == "dataclass":
                assert out.note == note
                x = out.hidden
            elif block.kind == "dict":
                x, aside = out["x"], out["nested"]["aside"]
            elif block.kind == "tuple":
                assert out[1] is None
                x = out[0][0]
            elif block.kind == "output":
                x = out.last_hidden_state
            else:
                x = out[0]
        return OrderedDict(loss=x.square().mean(), nothing=None)


class ReturnsBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Block()

    def forward(self, *, x: torch.Tensor, aside: torch.Tensor | None, note: str) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        x = self.inner(x) if aside is None else self.inner(x) + aside
        return {
            "dataclass": lambda: Pair(x, note),
            "dict": lambda: {"x": x, "nested": {"aside": x * 0.5}},
            "tuple": lambda: ((x,), None),
            "output": lambda: BaseModelOutput(last_hidden_state=x),
            "list": lambda: [x, 3],
        }[self.kind]()


@anywhere
def test_containers_of_outputs_and_keywords(opened: Any, setup: Setup) -> None:
    batches = vector_batches(6)

    def loop(run: Run) -> list[float]:
        losses = []
        for x, _ in batches:
            out = run.model(x=x, note="kept")
            assert type(out) is OrderedDict and out["nothing"] is None
            out["loss"].backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(out["loss"].item())
        return losses

    compare(Returns, loop, setup, opened)


class NoTensorOut(nn.Module):
    """Modules that return None and leave their result elsewhere: no output says when backward enters them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.keep = nn.ModuleList(LeavesItAside() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        board: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x)
            for keep in self.keep:
                assert keep(x, board) is None
        return x + sum(board)


class LeavesItAside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, board: list[torch.Tensor]) -> None:
        board.append(torch.sigmoid(self.line(x)))


@anywhere
def test_modules_that_return_nothing(opened: Any, setup: Setup) -> None:
    compare(NoTensorOut, simple_loop(), setup, opened)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(inplace=True)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0  # into what the block returned
            x = F.relu_(x)
        return x


@anywhere
def test_in_place_activations(opened: Any, setup: Setup) -> None:
    compare(InPlace, simple_loop(), setup, opened)


@few
def test_blocks_that_read_each_other(opened: Any, setup: Setup) -> None:
    """Each computes with the weight of the next, and the last with that of the first, without calling it."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.others: list[nn.Linear] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.linear.weight + self.others[0].weight, self.linear.bias)

    def build() -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList(offload.unit(Reading()) for _ in range(3))
        for index, block in enumerate(model.blocks):
            block.others.append(model.blocks[(index + 1) % 3].linear)
        return model

    compare(build, simple_loop(), setup, opened)


@anywhere
def test_buffers_are_kept(opened: Any, setup: Setup) -> None:
    start, weights = compare(Normalized, simple_loop(), setup, opened, atol=5e-6)
    assert weights["blocks.2.1.num_batches_tracked"].item() == 6
    assert not torch.equal(start["blocks.1.1.running_mean"], weights["blocks.1.1.running_mean"])


@pytest.mark.parametrize("setup", (*ALL_SETUPS, ON_CPU_IN_PLACE, ON_NVME_IN_PLACE), ids=lambda s: s.name)
@pytest.mark.parametrize("is_switched_off", [True, False])
def test_an_encoder_evaluates_padded_input(opened: Any, setup: Setup, is_switched_off: bool) -> None:
    """`nn.TransformerEncoder` looks whether its first layer's weights are plain tensors before it computes with nested tensors
    (its fast path). Where they are not in memory then, it goes the other way: to the bits of that in plain PyTorch."""

    def build() -> nn.Module:
        torch.manual_seed(4)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 3)

    def evaluated(module: nn.Module) -> torch.Tensor:
        module.eval()
        with torch.no_grad():
            output: torch.Tensor = module(x, src_key_padding_mask=is_padding)
        return output

    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(6))
    is_padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        slow = evaluated(build())
        torch.backends.mha.set_fastpath_enabled(not is_switched_off)
        plain = evaluated(build())
        model = build()
        engine = opened(model, adamw(model), setup)
        found = evaluated(engine.module)
        assert_same_bits(found, plain if setup.parameters == "device" or setup == ON_CPU_IN_PLACE else slow)
        torch.testing.assert_close(found[~is_padding], plain[~is_padding], rtol=0, atol=2e-6)
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


@few
def test_gradients_of_inputs_and_user_hooks(opened: Any, setup: Setup) -> None:
    """The user's own forward and backward hooks run, see whole weights, and may replace outputs."""
    batches = vector_batches(5)

    def loop(run: Run) -> list[Any]:
        seen: list[Any] = []
        block = run.model.blocks[1]
        block.register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.sum().item()))
        block.register_forward_hook(lambda module, args, out: out * 0.5)
        block.register_full_backward_hook(lambda module, into, out: seen.append(out[0].norm().item()))
        for x, y in batches:
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert len(seen) == 2 * len(batches)
        return seen

    compare(stack, loop, setup, opened)


class Looked(nn.Module):
    """Embeddings whose gradients are sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(64, 16, sparse=sparse)
        self.bag = nn.EmbeddingBag(64, 16, sparse=sparse, mode="sum")
        self.outlet = nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.embedding(tokens) + self.bag(tokens)[:, None])


@pytest.mark.parametrize("setup", (*ALL_SETUPS, Setup("device", "nvme")), ids=lambda s: s.name)
def test_sparse_gradients(opened: Any, setup: Setup) -> None:
    """As dense ones: one micro-batch, two, and zeros in their place."""

    def loop(run: Run) -> list[float]:
        losses = []
        for index in range(6):
            tokens = torch.randint(0, 64, (3, 5), generator=torch.Generator().manual_seed(index))
            for part in tokens.split(3 - index % 2):
                loss = run.model(part).square().mean()
                loss.backward()
                losses.append(loss.item())
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=index % 3 != 0)
        return losses

    plain, model = Looked(False), Looked(True)
    expected = run_plain(plain, adamw(plain), loop)
    assert_close(run_engine(opened(model, adamw(model), setup), loop), expected)
