"""Bad input, each one clear error as early as it can be known; and what goes on after an error.

A message must name the thing (the key, the parameter, the path), and hold what leads on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

from . import worker
from .models import (
    BITWISE_STEPS,
    CLIP,
    IN_MEMORY,
    ON_CPU,
    ON_NVME,
    ON_NVME_IN_BACKWARD,
    Run,
    Setup,
    adamw,
    allocated_nbytes,
    assert_close,
    assert_same_bits,
    files_under,
    run_engine,
    simple_loop,
    stack,
    vector_batches,
)

few = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME), ids=lambda s: s.name)
also_in_backward = pytest.mark.parametrize(
    "setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name
)


def refused(kind: type[Exception], *words: str) -> Any:
    """pytest.raises, and the message holds each of the words (in any case)."""
    return pytest.raises(kind, match="(?is)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


def one_step(run: Run, seed: int = 0) -> None:
    x, y = vector_batches(1, seed=seed)[0]
    F.mse_loss(run.model(x), y).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


# --- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"paramaters": "cpu"}, ["paramaters", "parameters"]),
        ({"optimizer_state": "cpu"}, ["optimizer_state", "optimizer_states"]),
        ({"max_grad_nrom": 1.0}, ["max_grad_nrom", "max_grad_norm"]),
        ({"prefetch_depth": 1}, ["prefetch_depth", "prefetch"]),
        ({"parameters": "gpu"}, ["parameters", "gpu", "device"]),
        ({"parameters": "nvmee", "nvme": "/tmp"}, ["parameters", "nvmee", "nvme"]),
        ({"optimizer_states": "disk"}, ["optimizer_states", "disk", "nvme"]),
        ({"parameters": "nvme"}, ["parameters", "nvme"]),
        ({"optimizer_states": "nvme"}, ["optimizer_states", "nvme"]),
        ({"parameters": "nvme", "nvme": []}, ["nvme"]),
        ({"stage": 4}, ["stage", "4"]),
        ({"stage": "3x"}, ["stage", "3x"]),
        ({"dtype": "bfloat15"}, ["dtype", "bfloat15", "bf16"]),
        ({"update": "later"}, ["update", "later", "backward"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm", "-1"]),
        ({"max_grad_norm": 0.0}, ["max_grad_norm"]),
        ({"max_grad_norm": float("nan")}, ["max_grad_norm"]),
        ({"max_grad_norm": "tight"}, ["max_grad_norm", "tight"]),
        ({"prefetch": -1}, ["prefetch", "-1"]),
        ({"prefetch": 1.5}, ["prefetch", "1.5"]),
        ({"loss_scale": "dynamical"}, ["loss_scale", "dynamical", "dynamic"]),
        ({"loss_scale": 0.0}, ["loss_scale"]),
        ({"loss_scale": -8.0}, ["loss_scale", "-8"]),
        ({"cpu_memory": "16GiBs"}, ["cpu_memory", "16GiBs"]),
        ({"cpu_memory": "lots"}, ["cpu_memory", "lots", "GiB"]),
        ({"cpu_memory": -5}, ["cpu_memory", "-5"]),
        ({"cpu_memory": 0}, ["cpu_memory"]),
        ({"device_memory": "1.2.3GiB"}, ["device_memory", "1.2.3GiB"]),
        ({"state_format": "fp23"}, ["state_format", "fp23", "fp32"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_config(fields: dict[str, Any], words: list[str]) -> None:
    """As a mapping and, where Python lets the key through, as a Config: before anything is allocated."""
    model = stack()
    optimizer = adamw(model)
    with refused(offload.ConfigError, *words):
        offload.initialize(model, optimizer, fields)
    if not any(key in ("paramaters", "optimizer_state", "max_grad_nrom", "prefetch_depth") for key in fields):
        with refused(offload.ConfigError, *words):
            offload.initialize(model, optimizer, offload.Config(**fields))
    one_step(Run(model, optimizer))  # the refusal left the model and its optimizer as they were


def test_config_file(tmp_path: Path) -> None:
    model = stack()
    with refused(offload.OffloadError, "absent.json"):
        offload.initialize(model, adamw(model), tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"parameters": "cpu",}')
    with refused(offload.ConfigError, "broken.json"):
        offload.initialize(model, adamw(model), str(broken))
    broken.write_text('{"paramaters": "cpu"}')
    with refused(offload.ConfigError, "paramaters", "parameters"):
        offload.initialize(model, adamw(model), str(broken))
    good = tmp_path / "good.json"
    good.write_text('{"parameters": "cpu", "optimizer_states": "cpu", "max_grad_norm": 1.0}')
    with offload.initialize(model, adamw(model), str(good)) as engine:
        one_step(Run(model, engine.optimizer, engine))


def test_config_is_frozen_and_of_at_most_a_dozen_fields() -> None:
    config = offload.Config(parameters="cpu")
    with pytest.raises(AttributeError):
        config.parameters = "nvme"
    assert {"stage", "parameters", "optimizer_states", "nvme", "device_memory", "cpu_memory", "dtype"} <= set(
        config.__dataclass_fields__
    )
    assert len(config.__dataclass_fields__) <= 12


# --- model and optimizer --------------------------------------------------------------------------------------------


class MyAdamW(torch.optim.AdamW):
    """A subclass may compute anything; taking it for its base class would be silent."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), ["SGD", "AdamW"]),
        (lambda p: torch.optim.LBFGS(p), ["LBFGS", "AdamW"]),
        (lambda p: torch.optim.Adagrad(p), ["Adagrad", "AdamW"]),
        (lambda p: torch.optim.NAdam(p), ["NAdam", "AdamW"]),
        (lambda p: torch.optim.RAdam(p), ["RAdam", "AdamW"]),
        (lambda p: MyAdamW(p), ["MyAdamW", "AdamW"]),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ["amsgrad"]),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ["amsgrad"]),
        (lambda p: torch.optim.AdamW(p, maximize=True), ["maximize"]),
        (lambda p: torch.optim.AdamW(p, differentiable=True), ["differentiable"]),
        (lambda p: torch.optim.AdamW([{"params": list(p), "amsgrad": True}]), ["amsgrad"]),
        (lambda p: "adamw", ["str", "optimizer"]),
        (lambda p: torch.optim.AdamW, ["optimizer"]),
    ],
)
def test_optimizer(nvme: Path, make: Callable[[Any], Any], words: list[str]) -> None:
    model = stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refused(offload.ConfigError, *words):
        offload.initialize(model, make(model.parameters()), offload.Config(**ON_NVME.fields(nvme)))
    assert allocated_nbytes(nvme) == 0, "something was written before the check"
    assert_same_bits(dict(model.state_dict()), before)


@few
def test_an_optimizer_of_another_model(opened: Any, setup: Setup) -> None:
    model, other = stack(), stack()
    with refused(offload.ConfigError, "optimizer"):
        opened(model, torch.optim.AdamW([*model.parameters(), other.inlet.weight]), setup)
    with refused(offload.ConfigError, "optimizer"):
        opened(model, adamw(other), setup)


def test_a_model_that_is_none(nvme: Path) -> None:
    for model in (None, "gpt2", [stack()]):
        with refused(offload.ConfigError, "model"):
            offload.initialize(model, None, offload.Config())
    with refused(offload.ConfigError, "meta"):
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        offload.initialize(empty, adamw(empty), offload.Config())


@few
def test_initialize_twice(opened: Any, setup: Setup) -> None:
    model, plain = stack(), stack()
    optimizer = adamw(model)
    engine = opened(model, optimizer, setup)
    with refused(offload.OffloadError, "initialize"):
        opened(model, optimizer, setup)
    with refused(offload.OffloadError, "initialize"):
        opened(model, adamw(model), setup)
    with refused(offload.OffloadError, "initialize"):
        opened(nn.Sequential(model, nn.Linear(16, 16)), adamw(model), setup)  # a part of it is in an engine
    losses, weights = run_engine(engine, simple_loop(3))  # the first one was not harmed
    assert_close(losses, simple_loop(3)(Run(plain, adamw(plain))))
    assert_close(weights, plain.state_dict())


# --- the nvme path --------------------------------------------------------------------------------------------------


def test_a_path_that_is_missing(tmp_path: Path) -> None:
    """A mistyped mount point must not be made as a folder on the root disk."""
    model = stack()
    absent = tmp_path / "not-mounted" / "run1"
    with refused(offload.OffloadError, "not-mounted", "nvme"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(absent)))
    assert not absent.parent.exists()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    model = stack()
    file = tmp_path / "a-file"
    file.write_text("mine")
    with refused(offload.OffloadError, "a-file", "nvme"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(file)))
    assert file.read_text() == "mine"


def test_one_of_two_paths_is_missing(tmp_path: Path) -> None:
    model = stack()
    here = tmp_path / "here"
    here.mkdir()
    with refused(offload.OffloadError, "absent"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields([here, tmp_path / "absent" / "x"])))
    assert allocated_nbytes(here) == 0


def test_a_path_that_is_not_writable(tmp_path: Path) -> None:
    """Root may write everywhere but where the kernel itself makes the files."""
    if os.geteuid() == 0:
        path = Path("/proc/self")
    else:
        path = tmp_path / "locked"
        path.mkdir(mode=0o500)
    model = stack()
    with refused(offload.OffloadError, str(path.name), "nvme"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(path)))


# Makes open(O_DIRECT) fail as on a file system that lacks it, and statvfs tell of a small disk; by environment.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

static int denied(int flags, const char *path) {
    const char *under = getenv("SHIM_NO_DIRECT");
    return under && (flags & O_DIRECT) && path && strstr(path, under) != 0;
}
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); \
    mode = va_arg(a, mode_t); va_end(a); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE(flags) \
    if (denied(flags, path)) { errno = EINVAL; return -1; } \
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { MODE(flags) \
    if (denied(flags, getenv("SHIM_NO_DIRECT"))) { errno = EINVAL; return -1; } \
    return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); }
#define FCNTL(name) int name(int fd, int command, ...) { va_list a; va_start(a, command); \
    void *argument = va_arg(a, void *); va_end(a); \
    if (command == F_SETFL && getenv("SHIM_NO_DIRECT") && ((long)argument & O_DIRECT)) { errno = EINVAL; return -1; } \
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, #name))(fd, command, argument); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FCNTL(fcntl) FCNTL(fcntl64)

#define SPACE(name, type) int name(const char *path, struct type *out) { \
    int rc = ((int (*)(const char *, struct type *))dlsym(RTLD_NEXT, #name))(path, out); SMALL }
#define FSPACE(name, type) int name(int fd, struct type *out) { \
    int rc = ((int (*)(int, struct type *))dlsym(RTLD_NEXT, #name))(fd, out); SMALL }
#define SMALL if (rc == 0 && getenv("SHIM_FREE")) { \
    unsigned long long blocks = strtoull(getenv("SHIM_FREE"), 0, 10) / (out->f_bsize ? out->f_bsize : 4096); \
    out->f_bfree = out->f_bavail = blocks; } return rc;
SPACE(statvfs, statvfs) SPACE(statvfs64, statvfs64) FSPACE(fstatvfs, statvfs) FSPACE(fstatvfs64, statvfs64)
SPACE(statfs, statfs) SPACE(statfs64, statfs64) FSPACE(fstatfs, statfs) FSPACE(fstatfs64, statfs64)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C compiler to build the file-system shim with")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = str(folder / "shim.so")
    language = ["-x", "c"] if compiler.endswith("c++") else []
    subprocess.run(
        [compiler, *language, "-shared", "-fPIC", "-O1", "-o", library, str(folder / "shim.c"), "-ldl"], check=True
    )
    return library


def _worker(directory: Path, setup: Setup) -> dict[str, Any]:
    fields = setup.fields(directory, dtype="fp32", max_grad_norm=CLIP)
    return {"fields": fields, "steps": BITWISE_STEPS // 4, "width": 32, "announce": False, "seed": 5}


@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles"])
def test_a_file_system_without_o_direct(nvme: Path, shim: str, backend: str) -> None:
    """Falls back to buffered I/O, says so in one warning, and computes the same."""
    plain = worker.run(_worker(nvme, IN_MEMORY), OFFLOAD_ACCELERATOR="cpu")
    variables = {"LD_PRELOAD": shim, "SHIM_NO_DIRECT": str(nvme), "OFFLOAD_ACCELERATOR": "cpu", "OFFLOAD_IO": backend}
    process = worker.start(_worker(nvme, ON_NVME), **variables)
    out, err = process.communicate(timeout=120)
    if process.returncode != 0 and backend == "io_uring" and "io_uring" in err:
        pytest.skip("io_uring cannot be had here")
    assert process.returncode == 0, err
    result = __import__("json").loads(out.strip().splitlines()[-1])
    assert result["losses"] == plain["losses"] and result["weights"] == plain["weights"]
    said = [one for one in result["warnings"] if "O_DIRECT" in one]
    assert len(said) == 1 and str(nvme) in said[0], result["warnings"]


@pytest.mark.parametrize("free_nbytes", [0, 100_000])
def test_a_disk_that_is_too_small(nvme: Path, shim: str, free_nbytes: int) -> None:
    """Free space is checked against the computed need, before anything is written."""
    variables = {"LD_PRELOAD": shim, "SHIM_FREE": str(free_nbytes), "OFFLOAD_ACCELERATOR": "cpu"}
    process = worker.start(_worker(nvme, ON_NVME), **variables)
    _, err = process.communicate(timeout=120)
    last = err.strip().splitlines()[-1] if err.strip() else ""
    assert process.returncode != 0, "the disk is too small and nobody noticed"
    assert "offload.errors." in last or "offload.errors." in err, err
    assert str(nvme) in err and re.search(r"free|space|room", err), err
    assert files_under(nvme) == []


def test_a_disk_that_is_just_large_enough(nvme: Path, shim: str) -> None:
    """The need that the message names is enough: states of 12 bytes per parameter, and not twice that."""
    variables = {"LD_PRELOAD": shim, "SHIM_FREE": str(32 << 20), "OFFLOAD_ACCELERATOR": "cpu"}
    assert worker.run(_worker(nvme, ON_NVME), **variables)["losses"]


# --- budgets --------------------------------------------------------------------------------------------------------

SIZE = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s*(bytes|[KMGT]i?B|B)\b")
FACTOR = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
FACTOR |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def smallest_in(message: str) -> int:
    """The size that the message calls the smallest that works."""
    said = re.search(r"(?i)(smallest|at least|minimum)", message)
    assert said, f"does not say the smallest budget that works: {message}"
    found = SIZE.search(message, said.end()) or SIZE.search(message)
    assert found, f"no size in: {message}"
    number = float(found[1].replace(",", "").replace("_", ""))
    return int(number * FACTOR[found[2]] + 0.999)


def wide() -> nn.Module:
    """Units of unequal size; the largest, 1.3 M parameters, decides."""
    model = stack(64, 3)
    model.large = nn.Linear(64, 64)
    model.blocks.append(nn.Sequential(nn.Linear(64, 10000), nn.Linear(10000, 64)))
    return model


@pytest.mark.parametrize(
    ("field", "setup"),
    [
        ("cpu_memory", Setup("nvme", "nvme", "cpu")),
        ("cpu_memory", Setup("nvme", "nvme", "deferred")),
        ("cpu_memory", Setup("cpu", "nvme", "deferred")),
        ("cpu_memory", Setup("cpu", "cpu", "deferred")),
        ("device_memory", Setup("nvme", "nvme", "deferred")),
        ("device_memory", Setup("cpu", "cpu", "deferred")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_budget_that_is_too_small(opened: Any, nvme: Path, field: str, setup: Setup) -> None:
    """The message says the smallest budget; with it training works, to the bit; a little below it does not."""
    model = wide()
    with refused(offload.BudgetError, field, "smallest") as caught:
        opened(model, adamw(model), setup, **{field: "64KiB"})
    assert re.search(r"blocks\.3|unit", str(caught.value)), "does not name the unit"
    assert allocated_nbytes(nvme) == 0, "allocated before the check"
    smallest = smallest_in(str(caught.value))
    assert 64 << 10 < smallest < 512 << 20
    with refused(offload.BudgetError, field):
        opened(model, adamw(model), setup, **{field: smallest - smallest // 16})
    engine = opened(model, adamw(model), setup, **{field: smallest})
    losses, weights = run_engine(engine, simple_loop(4, width=64))
    plain = wide()
    reference = opened(plain, adamw(plain), IN_MEMORY)
    expected, expected_weights = run_engine(reference, simple_loop(4, width=64))
    assert_same_bits(losses, expected)
    assert_same_bits(weights, expected_weights)


def test_a_generous_budget_changes_nothing(opened: Any) -> None:
    results = []
    for memory in ("64MiB", "1GiB"):
        model = wide()
        engine = opened(model, adamw(model), ON_NVME, cpu_memory=memory, device_memory=memory)
        results.append(list(run_engine(engine, simple_loop(4, width=64))))
        engine.close()
    assert_same_bits(results[0], results[1])


# --- non-finite gradients -------------------------------------------------------------------------------------------


def _poisoned_loss(run: Run, value: float) -> torch.Tensor:
    """A finite loss whose gradient of one parameter in the middle is not finite."""
    x, y = vector_batches(1)[0]
    hook = run.model.blocks[1].register_forward_hook(lambda module, args, out: _Poison.apply(out, value))
    loss = F.mse_loss(run.model(x.to(run.model.inlet.weight.dtype)).float(), y)
    hook.remove()
    return loss


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        grad[0, 0] = ctx.value
        return grad, None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
@few
def test_non_finite_gradients_raise(
    opened: Any, setup: Setup, dtype: str | None, clip: float | None, value: float
) -> None:
    """Raised with a parameter's name; nothing has moved, and after zero_grad() training goes on as if it never was."""
    runs = []
    for poisoned in (True, False):
        model = stack()
        engine = opened(model, adamw(model), setup, dtype=dtype, max_grad_norm=clip)
        run = Run(model, engine.optimizer, engine)
        for step in range(6):
            if poisoned and step == 3:
                before = run.weights()
                with refused(offload.NonFiniteGradientError, "loss_scale", "skip") as caught:
                    _poisoned_loss(run, value).backward()
                    run.optimizer.step()
                assert re.search(r"(blocks\.[01]|inlet)\.", str(caught.value)), "names no parameter"
                run.optimizer.zero_grad()
                assert_same_bits(run.weights(), before)
            x, y = vector_batches(6)[step]
            F.mse_loss(model(x.to(model.inlet.weight.dtype)).float(), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run.weights())
        engine.close()
    assert_same_bits(runs[0], runs[1])


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
@few
def test_non_finite_gradients_are_skipped_where_asked(
    opened: Any, setup: Setup, dtype: str | None, clip: float | None
) -> None:
    runs = []
    for poisoned in (True, False):
        model = stack()
        engine = opened(model, adamw(model), setup, dtype=dtype, max_grad_norm=clip, loss_scale="skip")
        run = Run(model, engine.optimizer, engine)
        for step in range(6):
            if poisoned and step in (0, 3):
                before = run.weights()
                _poisoned_loss(run, float("inf")).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                assert_same_bits(run.weights(), before)
            x, y = vector_batches(6)[step]
            F.mse_loss(model(x.to(model.inlet.weight.dtype)).float(), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run.weights())
        engine.close()
    assert_same_bits(runs[0], runs[1])


@pytest.mark.parametrize("accumulated", ["first", "last"])
@few
def test_a_non_finite_micro_batch_spoils_its_step(opened: Any, setup: Setup, accumulated: str) -> None:
    """An inf in one of two micro-batches is not lost in the sum."""
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    before = run.weights()
    x, y = vector_batches(1)[0]
    with pytest.raises(offload.NonFiniteGradientError):
        for kind in ("first", "last"):
            (_poisoned_loss(run, float("inf")) if kind == accumulated else F.mse_loss(model(x), y)).backward()
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert_same_bits(run.weights(), before)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_non_finite_gradients_of_an_update_in_backward(opened: Any, clip: float | None) -> None:
    """With clipping the update is undone; without, what cannot be undone must not be trained on in silence."""
    model = stack()
    engine = opened(model, adamw(model), ON_NVME_IN_BACKWARD, max_grad_norm=clip)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    before = run.weights()
    with pytest.raises(offload.NonFiniteGradientError):
        _poisoned_loss(run, float("nan")).backward()
        run.optimizer.step()
    try:
        run.optimizer.zero_grad()
        after = run.weights()
    except offload.OffloadError:
        assert clip is None, "clipping makes the update undoable"
        return
    assert_same_bits(after, before)
    one_step(run, 1)


@few
def test_fp16_overflow_is_skipped(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup, dtype="fp16")
    run = Run(model, engine.optimizer, engine)
    scales: list[float] = []
    for value in (None, float("inf"), None, float("nan"), None):
        before = run.weights()
        if value is None:
            x, y = vector_batches(1)[0]
            loss = F.mse_loss(model(x.half()).float(), y) * 1e-3
        else:
            loss = _poisoned_loss(run, value)
        loss.register_hook(lambda grad: scales.append(grad.item()))
        engine.backward(loss)
        engine.step()
        engine.optimizer.zero_grad()
        if value is not None:
            assert_same_bits(run.weights(), before)
    assert scales[2] == scales[1] / 2 and scales[4] == scales[3] / 2, scales


# --- a model changed after initialize -------------------------------------------------------------------------------


def _add_parameter(model: nn.Module, optimizer: Any) -> None:
    model.blocks[1].extra = nn.Parameter(torch.zeros(16))


def _add_block(model: nn.Module, optimizer: Any) -> None:
    model.blocks.append(type(model.blocks[0])(16))


def _remove_parameter(model: nn.Module, optimizer: Any) -> None:
    del model.blocks[1].norm.bias
    model.blocks[1].norm.register_parameter("bias", None)


def _remove_block(model: nn.Module, optimizer: Any) -> None:
    del model.blocks[2]


def _replace_parameter(model: nn.Module, optimizer: Any) -> None:
    model.outlet.weight = nn.Parameter(torch.eye(16))


def _freeze(model: nn.Module, optimizer: Any) -> None:
    model.inlet.weight.requires_grad_(False)


def _freeze_all(model: nn.Module, optimizer: Any) -> None:
    model.blocks.requires_grad_(False)


def _unfreeze(model: nn.Module, optimizer: Any) -> None:
    model.blocks[0].up.weight.requires_grad_(True)


def _add_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def _move_to_another_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_add_parameter, "blocks.1.extra"),
        (_add_block, "blocks.3."),
        (_remove_parameter, "blocks.1.norm.bias"),
        (_remove_block, "blocks.2."),
        (_replace_parameter, "outlet.weight"),
        (_freeze, "inlet.weight"),
        (_freeze_all, "blocks."),
        (_unfreeze, "blocks.0.up.weight"),
        (_add_group, "param_group"),
        (_move_to_another_group, "outlet.bias"),
    ],
)
@also_in_backward
def test_a_model_changed_after_initialize(opened: Any, setup: Setup, change: Any, word: str) -> None:
    """Told, with the name, by the change itself or within the next step; never trained on in silence."""
    model = stack()
    if change is _unfreeze:
        model.blocks[0].up.weight.requires_grad_(False)
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    with refused(offload.OffloadError, word):
        change(model, engine.optimizer)
        one_step(run)


# --- calls in an order that cannot be right -------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.1])
def test_backward_twice_into_an_update_that_has_begun(opened: Any, clip: float | None) -> None:
    model = stack()
    engine = opened(model, adamw(model), ON_NVME_IN_BACKWARD, max_grad_norm=clip)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    x, y = vector_batches(1)[0]
    with refused(offload.UsageError, "no_sync", "step"):
        F.mse_loss(model(x), y).backward()
        F.mse_loss(model(x), y).backward()
    engine.close()


@few
def test_a_non_scalar_loss(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    with pytest.raises((offload.OffloadError, RuntimeError), match="scalar"):
        engine.backward(model(vector_batches(1)[0][0]))


@pytest.mark.parametrize(
    "setup", (IN_MEMORY, ON_CPU, Setup("cpu", "cpu"), Setup("nvme", "nvme"), ON_NVME), ids=lambda s: s.name
)
def test_use_after_close(opened: Any, nvme: Path, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    expected = run.weights()
    x, y = vector_batches(1)[0]
    plain = stack()
    plain.load_state_dict(expected)
    loss = F.mse_loss(model(x), y)
    engine.close()
    engine.close()
    uses: dict[str, Callable[[], Any]] = {
        "step": lambda: engine.step(),
        "optimizer.step": lambda: engine.optimizer.step(),
        "backward": lambda: engine.backward(loss),
        "state_dict": lambda: engine.state_dict(),
        "clip_grad_norm_": lambda: engine.clip_grad_norm_(1.0),
        "no_sync": lambda: engine.no_sync().__enter__(),
        "gathered": lambda: engine.gathered(list(model.parameters())).__enter__(),
    }
    for name, use in uses.items():
        with refused(offload.OffloadError, "close"):
            use()
            pytest.fail(f"{name} passed after close()")
    # The model itself: its last weights, or told. Never garbage.
    for read, wanted in (
        (lambda: model(x).detach().clone(), plain(x).detach()),
        (lambda: model.inlet.weight.detach().clone(), expected["inlet.weight"]),
    ):
        try:
            got = read()
        except (offload.OffloadError, RuntimeError) as error:
            assert re.search("close|gathered|state_dict", str(error)), error
        else:
            assert_close(got, wanted)
    assert files_under(nvme) == []


@few
def test_the_context_manager_closes(opened: Any, nvme: Path, setup: Setup) -> None:
    model = stack()
    with opened(model, adamw(model), setup) as engine:
        one_step(Run(model, engine.optimizer, engine))
    with refused(offload.OffloadError, "close"):
        engine.step()


# --- what goes on after an error ------------------------------------------------------------------------------------


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("in forward")


def _interrupted_loop(run: Run, where: str) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(vector_batches(7)):
        if step in (2, 4):
            block = run.model.blocks[1]
            hook = (
                block.register_forward_pre_hook(_raise)
                if where == "forward"
                else block.register_forward_hook(lambda module, args, out: _Breaks.apply(out))
            )
            with pytest.raises(ZeroDivisionError, match=where):
                F.mse_loss(run.model(x), y).backward()
            hook.remove()
            run.optimizer.zero_grad()
        loss = F.mse_loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("where", ["forward", "backward"])
@few
def test_an_exception_of_the_users_then_going_on(opened: Any, setup: Setup, where: str) -> None:
    model, plain = stack(), stack()
    expected = _interrupted_loop(Run(plain, adamw(plain)), where)
    losses, weights = run_engine(opened(model, adamw(model), setup), lambda run: _interrupted_loop(run, where))
    assert_close(losses, expected)
    assert_close(weights, plain.state_dict())


@pytest.mark.parametrize("clip", [None, 1e6])
def test_an_exception_in_the_backward_of_an_update_in_backward(opened: Any, clip: float | None) -> None:
    """Blocks behind the exception may have been updated already: undone, or refused, never half a step in silence."""
    model, plain = stack(), stack()
    expected = _interrupted_loop(Run(plain, adamw(plain)), "backward")
    engine = opened(model, adamw(model), ON_NVME_IN_BACKWARD, max_grad_norm=clip)
    try:
        losses, weights = run_engine(engine, lambda run: _interrupted_loop(run, "backward"))
    except offload.OffloadError as error:
        assert re.search("backward|step", str(error)), error
        return
    assert_close(losses, expected)
    assert_close(weights, plain.state_dict())


class Interrupt(BaseException):
    """As KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
@pytest.mark.parametrize("setup", (ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)
def test_an_interrupt_leaves_an_engine_that_closes(opened: Any, nvme: Path, setup: Setup, where: str) -> None:
    """It comes out as it is; close() ends, gives everything back, and the path serves the next engine."""

    def strike(*_: Any) -> None:
        raise Interrupt

    model = stack()
    with pytest.raises(Interrupt):
        with opened(model, adamw(model), setup) as engine:
            run = Run(model, engine.optimizer, engine)
            one_step(run)
            if where == "forward":
                model.blocks[1].register_forward_pre_hook(strike)
            if where == "backward":
                model.blocks[1].register_full_backward_hook(strike)
            x, y = vector_batches(1)[0]
            F.mse_loss(model(x), y).backward()
            strike()
    with refused(offload.OffloadError, "close"):
        engine.step()
    assert allocated_nbytes(nvme) == 0
    fresh, plain = stack(), stack()
    losses, _ = run_engine(opened(fresh, adamw(fresh), setup), simple_loop(3))
    assert_close(losses, simple_loop(3)(Run(plain, adamw(plain))))


@few
def test_nothing_is_said_when_all_is_well(opened: Any, setup: Setup) -> None:
    """No warning of ours or of torch's through an ordinary run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = stack()
        engine = opened(model, adamw(model), setup, max_grad_norm=1.0)
        run_engine(engine, simple_loop(3))
        engine.close()


@few
def test_no_attribute_is_set_on_parameters(opened: Any, setup: Setup) -> None:
    model = stack()
    engine = opened(model, adamw(model), setup)
    one_step(Run(model, engine.optimizer, engine))
    assert all(vars(p) == {} for p in model.parameters())
