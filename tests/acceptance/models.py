"""The models, data and loops that the acceptance tests share.

Everything is tiny and seeded. A loop is written once, as a user would write it, against `Run`; it is then run by
plain PyTorch and by an engine, so that both are fed the same batches in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PLACES = ("device", "cpu", "nvme")
PLACEMENTS = tuple((parameters, states) for parameters in PLACES for states in PLACES)


# --- setups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Where the states lie, on which accelerator, and when updates run."""

    parameters: str = "device"
    optimizer_states: str = "device"
    accelerator: str = "cpu"
    update: str = "step"

    @property
    def name(self) -> str:
        return f"{self.parameters}+{self.optimizer_states}-{self.accelerator}-{self.update}"

    def fields(self, directory: Path | list[Path], **more: Any) -> dict[str, Any]:
        """The fields of a Config; the nvme path is given only where something lies there."""
        fields: dict[str, Any] = {
            "parameters": self.parameters,
            "optimizer_states": self.optimizer_states,
            "update": self.update,
        }
        if "nvme" in (self.parameters, self.optimizer_states):
            fields["nvme"] = [str(one) for one in directory] if isinstance(directory, list) else str(directory)
        return fields | more


IN_MEMORY = Setup()
ON_CPU = Setup("cpu", "cpu", "deferred")
ON_CPU_IN_PLACE = Setup("cpu", "cpu", "cpu")
ON_NVME = Setup("nvme", "nvme", "deferred")
ON_NVME_IN_BACKWARD = Setup("nvme", "nvme", "deferred", "backward")

STEP_SETUPS = (IN_MEMORY, ON_CPU, ON_CPU_IN_PLACE, ON_NVME)
ALL_SETUPS = (*STEP_SETUPS, ON_NVME_IN_BACKWARD)


# --- data -----------------------------------------------------------------------------------------------------------


def source_text(nbytes: int = 1 << 16) -> bytes:
    """Real text: the first bytes of the standard library's own sources."""
    parts, held = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        held += len(parts[-1])
        if held >= nbytes:
            break
    return b"".join(parts)[:nbytes]


def byte_batches(count: int, batch: int = 2, length: int = 24, seed: int = 0) -> list[torch.Tensor]:
    """`count` tensors [batch, length] int64 of bytes of text, all different."""
    text = torch.frombuffer(bytearray(source_text()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length, (count, batch), generator=draw)
    return [torch.stack([text[s : s + length] for s in row.tolist()]) for row in starts]


def vector_batches(
    count: int, width: int = 16, rows: int = 6, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, width, generator=draw), torch.randn(rows, width, generator=draw)) for _ in range(count)]


# --- models ---------------------------------------------------------------------------------------------------------


def llama(layers: int = 4, width: int = 32, vocabulary: int = 256) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def gpt2(layers: int = 3, width: int = 32) -> nn.Module:
    """Tied input and output embeddings; transposed (Conv1D) weights; no dropout, so that runs are repeatable."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=64,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """The plain case: a list of blocks between two linear layers."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.outlet = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def stack(width: int = 16, blocks: int = 3) -> Stack:
    torch.manual_seed(1)
    return Stack(width, blocks)


# --- optimizers -----------------------------------------------------------------------------------------------------

# eps is large on purpose. It makes a wrong *scale* of a gradient visible (Adam alone forgives a factor), and it keeps
# gradients that are mathematically zero, and numerically noise, from moving weights by a whole learning rate.
ADAM_OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "foreach": False}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, **(ADAM_OPTIONS | options))


def two_groups(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """Matrices decay, the rest does not and learns faster: two groups that differ in every option that may differ."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return kind(
        [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-2, "betas": (0.7, 0.9)},
        ],
        **(ADAM_OPTIONS | options),
    )


class MasterOptimizer:
    """Plain PyTorch's mixed precision: fp32 masters under torch's own AdamW, low-precision weights copied from them."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.low = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: p.detach().float().clone().requires_grad_() for name, p in self.low.items()}
        self.inner = torch.optim.AdamW(list(self.masters.values()), **(ADAM_OPTIONS | options))

    def step(self) -> None:
        for name, p in self.low.items():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for name, p in self.low.items():
            with torch.no_grad():
                p.copy_(self.masters[name])

    def zero_grad(self) -> None:
        for p in self.low.values():
            p.grad = None


# --- running a loop twice -------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a loop sees: the same names whether plain PyTorch or an engine is behind them."""

    model: nn.Module
    optimizer: Any
    engine: Any = None

    def no_sync(self) -> Any:
        return contextlib.nullcontext() if self.engine is None else self.engine.no_sync()

    def gathered(self, parameters: Iterable[nn.Parameter]) -> Any:
        return contextlib.nullcontext() if self.engine is None else self.engine.gathered(parameters)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and buffers, by fqn."""
        state = self.model.state_dict() if self.engine is None else self.engine.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}


Loop = Callable[[Run], Any]


def run_plain(model: nn.Module, optimizer: Any, loop: Loop) -> tuple[Any, dict[str, torch.Tensor]]:
    run = Run(model, optimizer)
    return loop(run), run.weights()


def run_engine(engine: Any, loop: Loop) -> tuple[Any, dict[str, torch.Tensor]]:
    run = Run(engine.module, engine.optimizer, engine)
    return loop(run), run.weights()


# Against plain torch: our Adam differs from torch's only in the last bit of a square root, so a step differs by about
# lr * 2**-23 = 1.2e-9 and, over the 20 or fewer steps of these tests, weights by some 1e-8 before the loop feeds the
# difference back through the gradients; 2e-6 leaves two orders of magnitude for that. The smallest fault we look for
# (one missing weight decay: lr * wd * |w|, about 1e-4) is fifty times larger.
WEIGHT_ATOL = 2e-6
LOSS_RTOL = 1e-5


def assert_close(ours: Any, plain: Any, atol: float = WEIGHT_ATOL, what: str = "") -> None:
    """Nested lists and dicts of numbers and tensors are close; shapes, keys, lengths and finiteness count."""
    if isinstance(plain, dict):
        assert set(ours) == set(plain), f"{what}: keys differ: {set(ours) ^ set(plain)}"
        for key in plain:
            assert_close(ours[key], plain[key], atol, f"{what}.{key}")
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), what
        for index, (one, other) in enumerate(zip(ours, plain, strict=True)):
            assert_close(one, other, atol, f"{what}[{index}]")
    elif isinstance(plain, torch.Tensor):
        assert plain.is_floating_point() is False or plain.isfinite().all(), f"{what}: the reference is not finite"
        torch.testing.assert_close(ours, plain, atol=atol, rtol=LOSS_RTOL, msg=lambda m: f"{what}: {m}")
    elif isinstance(plain, float):
        assert abs(ours - plain) <= atol + LOSS_RTOL * abs(plain), f"{what}: {ours} is not {plain}"
    else:
        assert ours == plain, f"{what}: {ours} is not {plain}"


def assert_same_bits(ours: Any, other: Any, what: str = "") -> None:
    """As assert_close, to the bit; NaN never passes."""
    if isinstance(other, dict):
        assert set(ours) == set(other), f"{what}: keys differ: {set(ours) ^ set(other)}"
        for key in other:
            assert_same_bits(ours[key], other[key], f"{what}.{key}")
    elif isinstance(other, (list, tuple)):
        assert len(ours) == len(other), what
        for index, (one, two) in enumerate(zip(ours, other, strict=True)):
            assert_same_bits(one, two, f"{what}[{index}]")
    elif isinstance(other, torch.Tensor):
        assert ours.dtype == other.dtype and ours.shape == other.shape, f"{what}: {ours.dtype} {ours.shape}"
        assert torch.equal(ours, other), f"{what}: {int((ours != other).sum())} of {other.numel()} elements differ"
    else:
        assert ours == other, f"{what}: {ours!r} is not {other!r}"


def compare(
    build: Callable[[], nn.Module],
    loop: Loop,
    setup: Setup,
    opened: Any,
    optimizer: Callable[[nn.Module], Any] = adamw,
    atol: float = WEIGHT_ATOL,
    **fields: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run `loop` by plain PyTorch and by an engine; losses and all weights and buffers are close, and they moved.

    Returns the engine's weights at the start and at the end.
    """
    torch.manual_seed(1)
    plain = build()
    model = copy.deepcopy(plain)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    torch.manual_seed(2)
    expected, expected_weights = run_plain(plain, optimizer(plain), loop)
    assert any(not torch.equal(start[name], expected_weights[name]) for name in start), "the reference did not train"
    torch.manual_seed(2)
    results, weights = run_engine(opened(model, optimizer(model), setup, **fields), loop)
    assert_close(results, expected, max(atol, WEIGHT_ATOL), "losses")
    assert_close(weights, expected_weights, atol, "weights")
    return start, weights


def simple_loop(steps: int = 6, width: int = 16, clip: float | None = None) -> Loop:
    """Regression on random vectors, one backward a step. `clip`: for plain torch only; engines clip by their config."""
    batches = vector_batches(steps, width)

    def loop(run: Run) -> list[float]:
        losses = []
        for x, y in batches:
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            if clip is not None and run.engine is None:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


def token_loop(steps: int = 6) -> Loop:
    """Language modelling on bytes of text with a Hugging Face model."""
    batches = byte_batches(steps)

    def loop(run: Run) -> list[float]:
        losses = []
        for tokens in batches:
            loss = run.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


# --- the run whose bits are compared --------------------------------------------------------------------------------

BITWISE_STEPS = 20
CLIP = 0.5  # the gradient norm of these runs is 1 to 3: the clipping strikes at nearly every step


def bitwise_loop(run: Run, steps: int = BITWISE_STEPS, overflow_step: int | None = None) -> list[float]:
    """Two micro-batches a step, a schedule of learning rates, backward by the engine; returns every micro-batch's loss.

    At `overflow_step` the loss is multiplied so that 16-bit gradients overflow.
    """
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1.0 + 0.2 * step))
    batches = byte_batches(2 * steps)
    losses = []
    for step in range(steps):
        for micro in range(2):
            tokens = batches[2 * step + micro]
            with run.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = run.model(input_ids=tokens, labels=tokens).loss / 2
                run.engine.backward(loss * 1e8 if step == overflow_step else loss)
            losses.append(loss.item())
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()
    return losses


def digest(weights: dict[str, torch.Tensor]) -> str:
    """One SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        total.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# --- what lies on disk ----------------------------------------------------------------------------------------------


def allocated_nbytes(directory: Path) -> int:
    """Bytes that this process holds under `directory`: files by name, and open files whose name is already gone."""
    held: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(os.path.join(root, name))
                held[found.st_dev, found.st_ino] = found.st_blocks * 512
    for link in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{link}").startswith(str(directory)):
                found = os.stat(f"/proc/self/fd/{link}")
                held[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(held.values())


def files_under(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
