"""What must simply work, each line against plain PyTorch with torch.optim, in fp32.

Tolerances are derived beside WEIGHT_ATOL in models.py. "Unchanged" is always to the bit.
"""

from __future__ import annotations

import contextlib
import copy
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
    ADAM_OPTIONS,
    ALL_SETUPS,
    IN_MEMORY,
    ON_CPU,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    STEP_SETUPS,
    Block,
    MasterOptimizer,
    Run,
    Setup,
    Stack,
    adamw,
    assert_close,
    assert_same_bits,
    byte_batches,
    compare,
    gpt2,
    llama,
    run_engine,
    simple_loop,
    stack,
    token_loop,
    two_groups,
    vector_batches,
)

anywhere = pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda s: s.name)
at_step = pytest.mark.parametrize("setup", STEP_SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME), ids=lambda s: s.name)


# --- loops ----------------------------------------------------------------------------------------------------------


@anywhere
def test_plain_loop(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(20), setup, opened)


@anywhere
def test_adam_with_weight_decay(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(20), setup, opened, lambda m: torch.optim.Adam(m.parameters(), **ADAM_OPTIONS))


@few
def test_defaults_of_the_optimizers(opened: Any, setup: Setup) -> None:
    """Every option left out: AdamW's and Adam's defaults differ (weight decay 1e-2 and none)."""
    compare(stack, simple_loop(), setup, opened, lambda m: torch.optim.AdamW(m.parameters()))


@few
def test_defaults_of_adam(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(), setup, opened, lambda m: torch.optim.Adam(m.parameters()))


@anywhere
def test_clipping(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(8, clip=0.05), setup, opened, max_grad_norm=0.05)


@few
def test_clipping_that_does_not_strike(opened: Any, setup: Setup) -> None:
    compare(stack, simple_loop(8, clip=1e3), setup, opened, max_grad_norm=1e3)


@anywhere
def test_several_groups_with_a_scheduler(opened: Any, setup: Setup) -> None:
    batches = vector_batches(10)

    def loop(run: Run) -> list[Any]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, [2e-2, 4e-2], total_steps=10)
        losses = []
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad()
            losses += [loss.item(), *scheduler.get_last_lr()]
        return losses

    # OneCycleLR also cycles beta1, so betas change between steps too.
    compare(stack, loop, setup, opened, two_groups)


@few
def test_a_scheduler_made_before_initialize(opened: Any, setup: Setup) -> None:
    """It holds the user's own optimizer; engine.optimizer has the same param_groups, so it still sets the rate."""
    plain, model = stack(), stack()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (plain_optimizer, optimizer)]
    engine = opened(model, optimizer, setup)
    runs = [Run(plain, plain_optimizer), Run(model, engine.optimizer, engine)]
    for x, y in vector_batches(5):
        for run, scheduler in zip(runs, schedulers, strict=True):
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad()
    assert_close(runs[1].weights(), runs[0].weights())


@few
def test_learning_rate_set_by_hand(opened: Any, setup: Setup) -> None:
    batches = vector_batches(6)

    def loop(run: Run) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(batches):
            for group in run.optimizer.param_groups:
                group["lr"] = 0.0 if step == 3 else 1e-2 / (step + 1)
                group["weight_decay"] = 0.05 * step
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(stack, loop, setup, opened)


@at_step
@pytest.mark.parametrize("with_no_sync", [False, True])
def test_accumulation(opened: Any, setup: Setup, with_no_sync: bool) -> None:
    batches = vector_batches(18)

    def loop(run: Run) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches):
            last = index % 3 == 2
            with contextlib.nullcontext() if last or not with_no_sync else run.no_sync():
                loss = F.mse_loss(run.model(x), y) / 3
                loss.backward()
            losses.append(loss.item())
            if last:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return losses

    compare(stack, loop, setup, opened)


def test_accumulation_with_an_update_in_backward(opened: Any) -> None:
    """no_sync() says that more is to come, so the update begins only in the last backward."""
    batches = vector_batches(12)

    def loop(run: Run) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches):
            with run.no_sync() if index % 2 == 0 else contextlib.nullcontext():
                loss = F.mse_loss(run.model(x), y)
                loss.backward()
            losses.append(loss.item())
            if index % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return losses

    compare(stack, loop, ON_NVME_IN_BACKWARD, opened)


@at_step
def test_every_backward_within_no_sync(opened: Any, setup: Setup) -> None:
    """no_sync() puts work off, it does not drop gradients."""
    batches = vector_batches(8)

    def loop(run: Run) -> None:
        for index, (x, y) in enumerate(batches):
            with run.no_sync():
                F.mse_loss(run.model(x), y).backward()
            if index % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()

    compare(stack, loop, setup, opened)


@few
def test_gradients_are_kept_when_they_are_not_zeroed(opened: Any, setup: Setup) -> None:
    """A loop without zero_grad() accumulates over steps, in torch. Here too, or it is told."""
    batches = vector_batches(4)

    def loop(run: Run) -> None:
        for x, y in batches:
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()

    try:
        compare(stack, loop, setup, opened)
    except offload.OffloadError as error:
        assert "zero_grad" in str(error)


@at_step
def test_two_forwards_then_one_backward(opened: Any, setup: Setup) -> None:
    batches = vector_batches(10)

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), (x2, y2) in zip(batches[::2], batches[1::2], strict=True):
            loss = F.mse_loss(run.model(x), y) + 2 * F.mse_loss(run.model(x2), y2)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(stack, loop, setup, opened)


@at_step
def test_two_forwards_then_two_backwards(opened: Any, setup: Setup) -> None:
    """The second forward runs while the first one's graph waits, and the backwards come in the order of the forwards."""
    batches = vector_batches(10)

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), (x2, y2) in zip(batches[::2], batches[1::2], strict=True):
            first, second = F.mse_loss(run.model(x), y), F.mse_loss(run.model(x2), y2)
            first.backward()
            second.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses += [first.item(), second.item()]
        return losses

    compare(stack, loop, setup, opened)


@at_step
def test_a_forward_without_backward(opened: Any, setup: Setup) -> None:
    """A forward with gradients whose graph is thrown away, as a metric that forgot no_grad."""
    batches = vector_batches(10)

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), (x2, _) in zip(batches[::2], batches[1::2], strict=True):
            wasted = run.model(x2)
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses += [loss.item(), wasted.sum().item()]
        return losses

    compare(stack, loop, setup, opened)


@at_step
def test_retain_graph(opened: Any, setup: Setup) -> None:
    batches = vector_batches(5)

    def loop(run: Run) -> None:
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(stack, loop, setup, opened)


@few
def test_autograd_grad_of_the_input(opened: Any, setup: Setup) -> None:
    """torch.autograd.grad for an input alone: right values, and no parameter's gradient comes of it."""
    batches = vector_batches(5)

    def loop(run: Run) -> list[torch.Tensor]:
        seen = []
        for x, y in batches:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(run.model(x).sum(), x)
            seen.append(slope)
            F.mse_loss(run.model(x), y).backward()
            assert x.grad is not None
            seen.append(x.grad)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return seen

    compare(stack, loop, setup, opened)


@anywhere
def test_evaluation_between_steps(opened: Any, setup: Setup) -> None:
    batches = vector_batches(8)

    def loop(run: Run) -> list[float]:
        seen = []
        for step, (x, y) in enumerate(batches):
            run.model.eval()
            with torch.inference_mode() if step % 2 else torch.no_grad():
                seen.append(run.model(y).sum().item())
            run.model.train()
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            with torch.no_grad():  # between backward and step: still the old weights
                seen.append(run.model(y).sum().item())
            run.optimizer.step()
            with torch.no_grad():  # between step and zero_grad: the new ones
                seen.append(run.model(y).sum().item())
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    # An update that begins in backward is undone from sight until step() only where it is out of place.
    compare(stack, loop, setup, opened, **({"max_grad_norm": 1e6} if setup.update == "backward" else {}))


@few
def test_calling_one_block_alone(opened: Any, setup: Setup) -> None:
    """Users call parts of a model: a block, a leaf, the root again; in another order than training does."""
    batches = vector_batches(5)

    def loop(run: Run) -> list[float]:
        seen = []
        for x, y in batches:
            with torch.no_grad():
                seen.append(run.model.blocks[2](run.model.blocks[0](x)).sum().item())
                seen.append(run.model.outlet(x).sum().item())
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            part = run.model.blocks[1](x).square().mean()  # and trains a part by itself
            part.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen += [loss.item(), part.item()]
        return seen

    compare(stack, loop, setup, opened)


@few
def test_engine_methods_are_the_same_as_the_loops_own(opened: Any, setup: Setup) -> None:
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            if run.engine is None:
                loss.backward()
                run.optimizer.step()
            else:
                run.engine.backward(loss)
                run.engine.step()
            run.optimizer.zero_grad()

    compare(stack, loop, setup, opened)


@few
def test_step_with_a_closure(opened: Any, setup: Setup) -> None:
    batches = vector_batches(5)

    def loop(run: Run) -> list[float]:
        losses = []
        for x, y in batches:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss = F.mse_loss(run.model(x), y)
                loss.backward()
                return loss

            losses.append(float(run.optimizer.step(closure)))
        return losses

    compare(stack, loop, setup, opened)


@few
def test_a_step_without_backward_changes_nothing(opened: Any, setup: Setup) -> None:
    batches = vector_batches(4)

    def loop(run: Run) -> None:
        for x, y in batches:
            run.optimizer.step()
            run.optimizer.zero_grad()
            F.mse_loss(run.model(x), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.optimizer.step()

    compare(stack, loop, setup, opened)


# --- parameters -----------------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """`sometimes` is used when asked, `never` not at all; both lie in one unit with parameters that always are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:
            block.sometimes = nn.Parameter(torch.randn(16))
            block.never = nn.Parameter(torch.randn(7, 3))
        self.alone = nn.ModuleList([Block(), Block()])  # whole units that are sometimes not used

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for block, alone in zip(self.blocks, self.alone, strict=True):
            x = block(x)
            if use:
                x = alone(x * block.sometimes)
        return x


@anywhere
def test_unused_parameters(opened: Any, setup: Setup) -> None:
    """Without a gradient: weight to the bit, moments and the step count stay; no decay; no gradient of an earlier step."""
    batches = vector_batches(9)

    def loop(run: Run) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(batches):
            use = step in (1, 4, 5, 8)
            before = run.weights()
            loss = F.mse_loss(run.model(x, use), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
            after = run.weights()
            for name in before:
                idle = "never" in name or (not use and ("sometimes" in name or "alone" in name))
                assert torch.equal(before[name], after[name]) == idle, f"step {step}: {name}"
        return losses

    start, weights = compare(Sometimes, loop, setup, opened, max_grad_norm=None)
    assert any("never" in name for name in start)


@few
def test_zero_grad_drops_what_a_step_did_not_use(opened: Any, setup: Setup) -> None:
    """The gradient of a backward whose step never came must not turn up later."""
    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for x, y in batches:
            F.mse_loss(run.model(y * 3, True), x).backward()
            run.optimizer.zero_grad()
            F.mse_loss(run.model(x, False), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    start, weights = compare(Sometimes, loop, setup, opened)
    for name in start:
        if "sometimes" in name or "alone" in name:
            assert_same_bits(weights[name], start[name], name)


def _half_frozen() -> nn.Module:
    model = stack()
    for name, p in model.named_parameters():
        p.requires_grad_("up" not in name and "inlet" not in name)
    return model


@anywhere
def test_frozen_parameters(opened: Any, setup: Setup) -> None:
    start, weights = compare(_half_frozen, simple_loop(), setup, opened)
    for name in start:
        same = "up" in name or "inlet" in name
        assert torch.equal(start[name], weights[name]) == same, name


@few
def test_frozen_parameters_that_the_optimizer_also_has(opened: Any, setup: Setup) -> None:
    start, weights = compare(
        _half_frozen, simple_loop(), setup, opened, lambda m: torch.optim.AdamW(m.parameters(), **ADAM_OPTIONS)
    )
    assert_same_bits(weights["inlet.weight"], start["inlet.weight"])


@few
def test_parameters_that_the_optimizer_does_not_have(opened: Any, setup: Setup) -> None:
    """They require a gradient and get one, and no optimizer moves them: legal in torch."""
    start, weights = compare(
        stack, simple_loop(), setup, opened, lambda m: torch.optim.AdamW(m.blocks.parameters(), **ADAM_OPTIONS)
    )
    assert_same_bits(weights["inlet.weight"], start["inlet.weight"])
    assert_same_bits(weights["outlet.bias"], start["outlet.bias"])


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        for one in self.convolutions:
            one.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(24, 16).t())  # [16, 24], strides (1, 16)
        self.sliced = nn.Parameter(torch.randn(24, 32)[:, ::2])  # [24, 16], strides (32, 2)
        self.expanded = nn.Linear(16, 16)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.expanded(x @ self.transposed @ self.sliced * 0.01)
        image = x[:, :, None, None] * torch.ones(2, 2)
        image = image.reshape(x.shape[0], 4, 4, 4)
        for one in self.convolutions:
            image = image + one(image)
        return image.mean(dim=(2, 3)).repeat(1, 4) * self.scalar + self.empty.sum()


@anywhere
def test_parameters_with_strides_without_elements_and_without_dimensions(opened: Any, setup: Setup) -> None:
    compare(Strided, simple_loop(), setup, opened)


class OnlyOnTheRoot(nn.Module):
    """No ModuleList, no submodule: parameters and a buffer on the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.bias = nn.Parameter(torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x @ self.weight + self.bias) * self.hidden


@anywhere
def test_parameters_of_the_root_module(opened: Any, setup: Setup) -> None:
    _, weights = compare(OnlyOnTheRoot, simple_loop(), setup, opened)
    assert weights["calls"].item() == 6 and "hidden" not in weights


@anywhere
def test_a_sequential_without_any_module_list(opened: Any, setup: Setup) -> None:
    compare(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))),
        simple_loop(),
        setup,
        opened,
    )


@few
def test_a_single_linear_as_the_model(opened: Any, setup: Setup) -> None:
    compare(lambda: nn.Linear(16, 16), simple_loop(), setup, opened)


class Tied(nn.Module):
    """Ties of every kind: one Parameter under two names, in two blocks, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.again = self.blocks[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.again(x))


@anywhere
def test_tied_parameters_and_modules(opened: Any, setup: Setup) -> None:
    _, weights = compare(Tied, simple_loop(), setup, opened)
    assert_same_bits(weights["last.weight"], weights["first.weight"])
    assert_same_bits(weights["again.down.weight"], weights["blocks.1.down.weight"])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = block(x)
        return x


@anywhere
def test_a_module_called_twice(opened: Any, setup: Setup) -> None:
    """Its gradient is complete only after the last of its calls went backward: no update before."""
    compare(Twice, simple_loop(), setup, opened)


def test_mixed_dtypes(opened: Any) -> None:
    """Some blocks in bf16 among fp32: each keeps its dtype, all have fp32 masters. Against masters in plain torch."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block().bfloat16(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x.to(block.up.weight.dtype)).float()
            return x

    torch.manual_seed(1)
    plain = Mixed()
    model = copy.deepcopy(plain)
    optimizer = MasterOptimizer(plain)
    expected = simple_loop(8)(Run(plain, optimizer))
    engine = opened(model, adamw(model), ON_NVME)
    losses, weights = run_engine(engine, simple_loop(8))
    # One bf16 rounding that falls to the other side is 2**-8 of a weight and a like part of a gradient; few do.
    assert_close(losses, expected, 1e-4)
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        name: p.dtype for name, p in plain.named_parameters()
    }
    for name, master in optimizer.masters.items():
        assert weights[name].dtype == torch.float32, f"{name}: not the master"
        assert_close(weights[name], master.detach(), 2e-4, name)


@few
def test_bf16_keeps_an_fp32_master(opened: Any, setup: Setup) -> None:
    """A learning rate below bf16's resolution still moves the model: 40 steps of 1e-5 on weights of order 1."""
    torch.manual_seed(1)
    model = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    engine = opened(model, adamw(model, lr=1e-5, weight_decay=0.0), setup, dtype="bf16")
    for _ in range(40):
        model(torch.ones(4, 16, dtype=torch.bfloat16)).float().sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    weight = engine.state_dict()["weight"]
    assert model.weight.dtype == torch.bfloat16 and weight.dtype == torch.float32
    assert_close(weight, torch.full((16, 16), 1.0 - 40e-5), 1e-6)


# --- models ---------------------------------------------------------------------------------------------------------


@anywhere
def test_llama(opened: Any, setup: Setup) -> None:
    compare(llama, token_loop(), setup, opened)


@anywhere
def test_gpt2_with_tied_embeddings(opened: Any, setup: Setup) -> None:
    _, weights = compare(gpt2, token_loop(), setup, opened)
    assert_same_bits(weights["lm_head.weight"], weights["transformer.wte.weight"])


@few
def test_generate(opened: Any, setup: Setup) -> None:
    """Greedy generation, with its key-value cache, between steps."""
    batches = byte_batches(4)

    def loop(run: Run) -> list[Any]:
        seen: list[Any] = []
        for tokens in batches:
            made = run.model.generate(
                tokens[:, :8], attention_mask=torch.ones(2, 8), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
            assert made.shape == (2, 14)
            seen.append(made.tolist())
            loss = run.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(gpt2, loop, setup, opened)


@anywhere
def test_lora(opened: Any, setup: Setup) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(1)
        options = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(llama(), options)

    start, weights = compare(build, token_loop(), setup, opened)
    for name in start:
        assert torch.equal(start[name], weights[name]) == ("lora_" not in name), name


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj.weight itself; out_proj is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :] + torch.arange(3.0)[:, None]
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x.mean(1)


@anywhere
def test_multihead_attention(opened: Any, setup: Setup) -> None:
    compare(Attention, simple_loop(), setup, opened, atol=1e-5)


@anywhere
def test_transformer_encoder_layer(opened: Any, setup: Setup) -> None:
    """In eval its fast path reads every weight of its children without calling any of them."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    batches = vector_batches(6)

    def loop(run: Run) -> list[float]:
        seen = []
        for x, y in batches:
            run.model.eval()
            with torch.no_grad():
                seen.append(run.model(x[None]).sum().item())
            run.model.train()
            loss = F.mse_loss(run.model(x[None]), y[None])
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(build, loop, setup, opened, atol=1e-5)


class ReadsItsChild(nn.Module):
    """The head is the embedding's weight, read by the root; `scale` is read of a block that is not running."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.head = nn.Linear(64, 300)  # never called, only read

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x) + F.linear(x, self.blocks[0].down.weight[:, :64])
        return x @ self.wte.weight.T + F.linear(x, self.head.weight, self.head.bias)


@anywhere
def test_a_parent_that_reads_a_childs_weight(opened: Any, setup: Setup) -> None:
    batches = byte_batches(6)

    def loop(run: Run) -> list[float]:
        losses = []
        for tokens in batches:
            logits = run.model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(ReadsItsChild, loop, setup, opened, atol=5e-6)


class Experts(nn.Module):
    """Top-1 routing by the data, over experts that are sometimes not chosen at all, in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.gate = nn.Linear(16, 6)
            layer.experts = nn.ModuleList(Block() for _ in range(6))
            self.layers.append(layer)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for layer in self.layers:
            share, chosen = layer.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index in order:
                rows = (chosen == index).nonzero()[:, 0]
                if rows.numel():
                    out = out.index_add(0, rows, layer.experts[index](x[rows]) * share[rows, None])
            x = x + out
        return x


@anywhere
def test_mixture_of_experts(opened: Any, setup: Setup) -> None:
    batches = vector_batches(12, rows=4)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(n)).tolist() for n in range(12)]

    def loop(run: Run) -> list[float]:
        losses = []
        for (x, y), order in zip(batches, orders, strict=True):
            loss = F.mse_loss(run.model(x, order), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(Experts, loop, setup, opened)


@few
def test_depth_that_changes_every_step(opened: Any, setup: Setup) -> None:
    """Stochastic depth and a reversed order: the traced order is never the next one."""

    class Skips(Stack):
        def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
            for index in order:
                x = self.blocks[index](x)
            return x

    batches = vector_batches(6)
    orders = [(0, 1, 2), (2, 1, 0), (1,), (0, 0, 2, 2), (), (2, 0)]

    def loop(run: Run) -> None:
        for (x, y), order in zip(batches, orders, strict=True):
            x = x.clone().requires_grad_()
            F.mse_loss(run.model(x, order), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(Skips, loop, setup, opened)


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


# --- what modules take and return -----------------------------------------------------------------------------------


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
    """A module that returns None and leaves its result elsewhere: nothing in its output says when backward enters it."""

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
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(inplace=True))
            for _ in range(3)
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


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@anywhere
def test_buffers_are_kept(opened: Any, setup: Setup) -> None:
    start, weights = compare(Normalized, simple_loop(), setup, opened, atol=5e-6)
    assert weights["blocks.2.1.num_batches_tracked"].item() == 6
    assert not torch.equal(start["blocks.1.1.running_mean"], weights["blocks.1.1.running_mean"])


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


# --- taking over and handing back -----------------------------------------------------------------------------------


@anywhere
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_an_optimizer_that_already_has_state(opened: Any, setup: Setup, kind: type[torch.optim.Optimizer]) -> None:
    """Five steps in plain torch, then the engine takes over moments and step counts and goes on."""

    def warmed(model: nn.Module) -> Any:
        optimizer = two_groups(model, kind)
        plain_steps(Run(model, optimizer))
        return optimizer

    def plain_steps(run: Run) -> None:
        for step, (x, y) in enumerate(vector_batches(5, seed=3)):
            F.mse_loss(run.model(x, step < 2), y).backward()  # step counts differ among parameters
            run.optimizer.step()
            run.optimizer.zero_grad()

    batches = vector_batches(6)

    def loop(run: Run) -> None:
        for step, (x, y) in enumerate(batches):
            F.mse_loss(run.model(x, step % 2 == 0), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(Sometimes, loop, setup, opened, warmed)


@anywhere
def test_state_dict_goes_back_into_the_plain_model(opened: Any, setup: Setup) -> None:
    for build in (gpt2, Normalized, Tied):
        model = build()
        loop = token_loop(2) if build is gpt2 else simple_loop(2)
        engine = opened(model, adamw(model), setup)
        loop(Run(model, engine.optimizer, engine))
        state = engine.state_dict()
        assert all(value.device.type == "cpu" and value.isfinite().all() for value in state.values())
        fresh = build()
        fresh.load_state_dict(state)
        batch = byte_batches(1)[0] if build is gpt2 else vector_batches(1)[0][0]
        model.eval(), fresh.eval()
        with torch.no_grad():
            ours, theirs = model(batch), fresh(batch)
        ours, theirs = (getattr(one, "logits", one) for one in (ours, theirs))
        assert_close(ours, theirs, what=build.__name__)
        state[next(iter(state))].zero_()  # what was handed out is the user's own
        assert not torch.equal(engine.state_dict()[next(iter(state))], state[next(iter(state))])
        engine.close()


@few
def test_state_dict_between_backward_and_step_is_the_old_one(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    before = Run(model, engine.optimizer, engine).weights()
    x, y = vector_batches(1)[0]
    F.mse_loss(model(x), y).backward()
    assert_same_bits(engine.state_dict(), before)
    engine.optimizer.step()
    plain = stack()
    optimizer = adamw(plain)
    F.mse_loss(plain(x), y).backward()
    optimizer.step()
    assert_close(engine.state_dict(), plain.state_dict())


@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda s: s.name)
def test_initialize_changes_no_value(opened: Any, setup: Setup) -> None:
    """Before any step: outputs and state are to the bit those of the model as it was, and it stays that object."""
    model = gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = [(name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()]
    identities = [id(p) for p in model.parameters()]
    tokens = byte_batches(1)[0]
    expected = model(input_ids=tokens).logits.detach()
    kind = type(model)
    engine = opened(model, adamw(model), setup)
    assert engine.module is model and type(model) is kind
    assert identities == [id(p) for p in model.parameters()]
    assert shapes == [(name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert_same_bits(model(input_ids=tokens).logits.detach(), expected)
    assert_same_bits(engine.state_dict(), before)
    assert shapes == [(name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()]


def test_inference_without_an_optimizer(opened: Any) -> None:
    model = gpt2()
    tokens = byte_batches(1)[0]
    expected = model(input_ids=tokens).logits.detach()
    engine = opened(model, None, ON_NVME)
    with torch.no_grad():
        for _ in range(3):
            assert_same_bits(engine.module(input_ids=tokens).logits, expected)


@pytest.mark.parametrize("build", [gpt2, llama, stack])
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda s: s.name)
def test_deferred_init_gives_the_same_bits(opened: Any, setup: Setup, build: Any) -> None:
    """The builders seed the generator themselves, inside deferred_init: initialize replays from that seed."""
    expected = build()
    with offload.deferred_init():
        model = build()
    assert all(p.device.type == "meta" for p in model.parameters())
    engine = opened(model, adamw(model), setup)
    assert_same_bits(engine.state_dict(), expected.state_dict())
    loop = simple_loop(4) if build is stack else token_loop(4)
    losses, weights = run_engine(engine, loop)
    assert_close(losses, loop(Run(expected, adamw(expected))))
