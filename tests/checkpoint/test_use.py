# SPDX-License-Identifier: Apache-2.0
"""What a user sees of checkpoints: what is refused and how, what comes back, numbered folders, and failures on the way."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from tests.file_systems import at_call, path_of

from ..acceptance.models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack, two_groups, vector_batches
from ..acceptance.runs import Run, assert_same_bits, one_step, refused

X, Y = vector_batches(1)[0]


def make(opened: Any, setup: Any = ON_CPU, model: nn.Module | None = None, **fields: Any) -> Any:
    model = stack(blocks=1) if model is None else model
    return opened(model, adamw(model), setup, **fields)


def step(engine: Any, seed: int = 0) -> None:
    one_step(Run(engine.module, engine.optimizer, engine), seed)


# ---- client_state ----------------------------------------------------------------------------------------------------


def test_client_state_comes_back(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    given = {
        "epoch": 3,
        "crc32": 5,
        "loss": 0.1 + 0.2,
        "large": 2**200,
        "names": ["ä", "\ud800", None, True],
        "pair": (1, 2.5),
        "nested": {"": {}},
    }
    engine.save_checkpoint(tmp_path / "saved", client_state=given)
    assert engine.load_checkpoint(tmp_path / "saved") == given | {"pair": [1, 2.5]}
    engine.save_checkpoint(tmp_path / "saved")
    assert engine.load_checkpoint(tmp_path / "saved") == {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "list"),
        ({1: 2}, "key 1"),
        ({"a": [torch.ones(1)]}, "client_state['a'][0]"),
        ({"a": math.nan}, "nan"),
        ({"a": {"b": {1, 2}}}, "client_state['a']['b']"),
        ({"a": b"x"}, "bytes"),
        ({"a": 10**5000}, "bits"),
    ],
)
def test_client_state_that_is_not_json(opened: Any, tmp_path: Path, value: Any, words: str) -> None:
    engine = make(opened)
    with refused(offload.UsageError, words, "client_state", "JSON"):
        engine.save_checkpoint(tmp_path / "saved", client_state=value)
    assert not os.listdir(tmp_path / "saved") if (tmp_path / "saved").exists() else True
    step(engine)


def test_client_state_that_holds_itself(opened: Any, tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with refused(offload.UsageError, "holds itself"):
        make(opened).save_checkpoint(tmp_path / "saved", client_state=loop)


# ---- param_groups ----------------------------------------------------------------------------------------------------


def test_numbers_of_param_groups(opened: Any, tmp_path: Path) -> None:
    def groups(seed: int) -> Any:
        model = stack(blocks=1)
        return opened(model, two_groups(model), ON_CPU)

    first, second = groups(1), groups(2)
    first.optimizer.param_groups[0].update(lr=0.123, betas=(0.5, 0.6), initial_lr=7.0)
    first.optimizer.param_groups[1].update(eps=1e-3, name="rest")
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    for before, after in zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True):
        assert {key: value for key, value in before.items() if key != "params"} == {
            key: value for key, value in after.items() if key != "params"
        }
    step(first)
    step(second)
    assert_same_bits(second.state_dict(), first.state_dict())


def test_what_is_no_number_in_param_groups(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    for value in (print, float("inf"), torch.tensor(float("nan"))):
        engine.optimizer.param_groups[0]["hook"] = value
        with refused(offload.UsageError, "param_groups[0]['hook']"):
            engine.save_checkpoint(tmp_path / "saved")


# ---- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME_IN_BACKWARD], ids=lambda setup: setup.name)
def test_saving_between_backward_and_step(opened: Any, tmp_path: Path, setup: Any) -> None:
    engine = make(opened, setup)
    F.mse_loss(engine.module(X), Y).backward()
    with refused(offload.UsageError, "save_checkpoint", "after optimizer.step()"):
        engine.save_checkpoint(tmp_path / "saved")
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    engine.zero_grad()
    engine.load_checkpoint(tmp_path / "saved")


def test_saving_with_a_gradient_that_the_user_gave(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    weight = engine.module.inlet.weight
    weight.grad = torch.ones(weight.shape)
    with refused(offload.UsageError, "gradients wait"):
        engine.save_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME_IN_BACKWARD], ids=lambda setup: setup.name)
def test_loading_between_backward_and_step_drops_the_gradients(opened: Any, tmp_path: Path, setup: Any) -> None:
    engine = make(opened, setup)
    step(engine)
    engine.save_checkpoint(tmp_path / "saved")
    step(engine, seed=1)
    expected = engine.state_dict()
    engine.load_checkpoint(tmp_path / "saved")
    F.mse_loss(engine.module(X), Y).backward()
    engine.load_checkpoint(tmp_path / "saved")
    assert engine.module.inlet.weight.grad is None
    step(engine, seed=1)
    assert_same_bits(engine.state_dict(), expected)


def test_loading_before_an_abandoned_backward(opened: Any, tmp_path: Path) -> None:
    engine = make(opened, ON_NVME)
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.state_dict()
    step(engine)
    loss = F.mse_loss(engine.module(X), Y)
    engine.load_checkpoint(tmp_path / "saved")
    del loss
    assert_same_bits(engine.state_dict(), expected)
    step(engine)


def test_inside_gathered_and_inside_a_forward(opened: Any, tmp_path: Path) -> None:
    engine = make(opened, ON_NVME)
    engine.save_checkpoint(tmp_path / "saved")
    calls = (engine.save_checkpoint, engine.load_checkpoint, engine.resume_or_start, engine.export)
    with engine.gathered(engine.module.inlet.weight):
        for call in calls:
            with refused(offload.UsageError, "gathered"):
                call(tmp_path / "saved")

    def inside(*_: Any) -> None:
        for call in calls:
            with refused(offload.UsageError, "forward"):
                call(tmp_path / "saved")

    engine.module.blocks[0].register_forward_hook(inside)
    step(engine)


def test_after_close(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.resume_or_start, engine.export):
        with refused(offload.UsageError, "closed"):
            call(tmp_path / "saved")


# ---- what does not fit -----------------------------------------------------------------------------------------------


def misfit(opened: Any, path: Path, model: nn.Module, optimizer: Any, *words: str) -> None:
    engine = opened(model, optimizer, ON_CPU)
    before = engine.state_dict()
    with refused(offload.CheckpointError, "does not fit", *words):
        engine.load_checkpoint(path)
    assert_same_bits(engine.state_dict(), before)
    step(engine)


def test_another_model_or_optimizer(opened: Any, tmp_path: Path) -> None:
    make(opened).save_checkpoint(tmp_path / "saved")
    saved = tmp_path / "saved"
    wider, longer, frozen, other, grouped, buffered = (stack(blocks=1) for _ in range(6))
    wider.blocks[0].up = nn.Linear(16, 40)
    wider.blocks[0].down = nn.Linear(40, 16)
    misfit(opened, saved, wider, adamw(wider), "blocks.0.up.weight", "[40, 16]", "[48, 16]")
    longer.more = nn.Linear(2, 2)
    misfit(opened, saved, longer, adamw(longer), "missing", "more.weight")
    frozen.outlet.bias.requires_grad_(False)
    misfit(opened, saved, frozen, adamw(frozen), "outlet.bias", "trained", "not trained now")
    misfit(opened, saved, other, torch.optim.Adam(other.parameters()), "AdamW", "Adam")
    misfit(opened, saved, grouped, two_groups(grouped), "group")
    buffered.register_buffer("mean", torch.zeros(3))
    misfit(opened, saved, buffered, adamw(buffered), "buffer", "mean")


def test_untied(opened: Any, tmp_path: Path) -> None:
    tied, untied = stack(blocks=1), stack(blocks=1)
    tied.outlet.weight = tied.inlet.weight
    opened(tied, adamw(tied), ON_CPU).save_checkpoint(tmp_path / "saved")
    misfit(opened, tmp_path / "saved", untied, adamw(untied), "inlet.weight = outlet.weight")


def test_no_checkpoint(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with refused(offload.CheckpointError, "nothing", "save_checkpoint"):
        engine.load_checkpoint(tmp_path / "nothing")
    with refused(offload.CheckpointError, "file"):
        engine.load_checkpoint(tmp_path / "file")
    with refused(offload.CheckpointError, "MANIFEST.json"):
        engine.load_checkpoint(tmp_path / "empty")
    step(engine)


# ---- failures on the way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["load_checkpoint", "resume_or_start"])
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_NVME], ids=lambda setup: setup.name)
def test_a_load_that_fails_half_way(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, call: str
) -> None:
    """It leaves an engine that says so whatever it is asked for, until a load comes to its end. None of an older checkpoint is
    begun on top of it."""
    engine, folder = make(opened, setup), tmp_path / "saves"
    load, path = getattr(engine, call), folder / "step-2" if call == "load_checkpoint" else folder
    for number in (1, 2):
        step(engine, number)
        engine.save_checkpoint(folder / f"step-{number}")
    saved = engine.state_dict()
    step(engine, 3)
    after = engine.state_dict()
    read: list[Path] = []

    def last_fails(fileno: int, *_: Any) -> None:
        read.append(path_of(fileno))
        if len(read) == 2 * count:
            raise OSError(errno.EIO, "the drive is gone")

    count = 0
    at_call(monkeypatch, "preadv", before=last_fails)
    load(path)
    count = len(read)
    with refused(offload.CheckpointError, str(read[-1]), "drive is gone"):
        load(path)
    assert read[count:] == read[:count]
    for ask in (lambda: engine.module(X), engine.state_dict, lambda: engine.save_checkpoint(tmp_path / "next")):
        with refused(offload.EngineFailedError, "drive is gone", "last checkpoint"):
            ask()
    assert not (tmp_path / "next").exists()
    load(path)
    assert_same_bits(engine.state_dict(), saved)
    step(engine, 3)
    assert_same_bits(engine.state_dict(), after)


@pytest.mark.parametrize("operation", ["pwrite", "fsync", "rename", "mkdir"])
def test_a_save_that_fails_leaves_everything_as_it_was(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """At each call of the operation in turn: the error says so, the last checkpoint is whole, and training goes on."""
    engine = make(opened, ON_NVME)
    folder = tmp_path / "saves"
    folder.mkdir()
    engine.save_checkpoint(folder / "saved", client_state={"n": 0})
    failures = 0
    for fail_at in range(100):
        step(engine, fail_at)
        calls = iter(range(1000))

        def failing(*_: Any, calls: Any = calls, fail_at: int = fail_at, **__: Any) -> None:
            if next(calls) == fail_at:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            at_call(patch, operation, before=failing)
            try:
                engine.save_checkpoint(folder / "saved", client_state={"n": fail_at + 1})
                break
            except offload.StorageError as error:
                failures += 1
                assert error.errno == 28 and "free space" in str(error) and str(folder) in str(error)
        # Where it is not known whether the new one is durable the old one is kept beside it until the next save.
        assert [name for name in os.listdir(folder) if not name.startswith(".offload-aside-")] == ["saved"]
        weights = engine.state_dict()
        newest = engine.load_checkpoint(folder / "saved")["n"]
        assert newest in (0, fail_at + 1)
        if newest == 0:
            continue
        assert_same_bits(engine.state_dict(), weights)
        engine.save_checkpoint(folder / "saved", client_state={"n": 0})
    assert failures >= 1


def test_what_is_in_the_way(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("file", "folder", "link"):
        with refused(offload.CheckpointError, name, "remove it"):
            engine.save_checkpoint(tmp_path / name)
    engine.save_checkpoint(tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    with refused(offload.CheckpointError, "notes.txt"):
        engine.save_checkpoint(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    engine.save_checkpoint(tmp_path / "empty")
    engine.load_checkpoint(tmp_path / "empty")
    engine.save_checkpoint(tmp_path / "made" / "on" / "the way")
    engine.load_checkpoint(tmp_path / "made" / "on" / "the way")
    (tmp_path / "latest").symlink_to(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "latest")


def test_a_relative_path_and_the_working_folder(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(opened)
    monkeypatch.chdir(tmp_path)
    engine.save_checkpoint("step-1", keep_last=2)
    engine.load_checkpoint("step-1")
    assert engine.resume_or_start(".") == {}


def test_the_home_folder(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = make(opened)
    engine.save_checkpoint("~/runs/step-1", keep_last=1)
    engine.load_checkpoint("~/runs/step-1")
    assert engine.resume_or_start("~/runs") == {}
    engine.export("~/weights")
    assert sorted(os.listdir(tmp_path)) == ["nvme", "runs", "weights"]
    torch.manual_seed(2)
    model = stack(blocks=1)
    with offload.initialize(model, config=offload.Config(), weights="~/weights") as other:
        assert_same_bits(other.state_dict(), engine.state_dict())


def test_a_path_that_cannot_be(opened: Any, tmp_path: Path) -> None:
    """In words that are right for it, and for a save."""
    engine = make(opened)
    (tmp_path / "file").write_text("")
    for name, words in (("file/step-1", "not a folder: correct the path"), ("n" * 300 + "/step-1", "longer than")):
        with refused(offload.StorageError, words) as caught:
            engine.save_checkpoint(tmp_path / name)
        assert "dmesg" not in str(caught.value) and "nvme=" not in str(caught.value)


# ---- numbered folders ------------------------------------------------------------------------------------------------


def test_keep_last_and_resume_or_start(opened: Any, tmp_path: Path) -> None:
    engine = make(opened, ON_NVME)
    folder = tmp_path / "run"
    assert engine.resume_or_start(folder) is None
    (folder / "step-7.notes").mkdir(parents=True)
    for n in (9, 10, 11, 100):
        step(engine, n)
        engine.save_checkpoint(folder / f"step-{n}", client_state={"n": n}, keep_last=2)
    assert sorted(os.listdir(folder)) == ["step-100", "step-11", "step-7.notes"]
    expected = engine.state_dict()
    step(engine)
    assert engine.resume_or_start(folder) == {"n": 100}
    assert_same_bits(engine.state_dict(), expected)


def test_keep_last_keeps_what_was_saved_and_what_is_not_ours(opened: Any, tmp_path: Path) -> None:
    engine = make(opened)
    for n in (5, 6, 7):
        engine.save_checkpoint(tmp_path / f"step-{n}")
    (tmp_path / "step-5" / "notes.txt").write_text("mine")
    engine.save_checkpoint(tmp_path / "step-1", keep_last=1)
    assert {name for name in os.listdir(tmp_path) if name.startswith("step")} == {"step-1", "step-5"}


def numbers_in(folder: Path) -> set[int]:
    return {int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-")}


@pytest.mark.parametrize("ahead_seconds", [0, 3600])
def test_an_older_runs_higher_numbers(opened: Any, tmp_path: Path, ahead_seconds: int) -> None:
    """What was written last is kept and resumed, also where the older run's clock was ahead."""
    older = make(opened)
    for n in (100, 200, 300):
        older.save_checkpoint(tmp_path / f"step-{n}", client_state={"n": n})
        for file in (tmp_path / f"step-{n}").iterdir():
            written_ns = file.stat().st_mtime_ns + ahead_seconds * 10**9
            os.utime(file, ns=(written_ns, written_ns))
    newer = make(opened)
    for n in (5, 6, 7, 8):
        newer.save_checkpoint(tmp_path / f"step-{n}", client_state={"n": n}, keep_last=3, wait=n % 2 == 0).wait()
        assert numbers_in(tmp_path) == {5: {5, 300, 200}, 6: {6, 5, 300}, 7: {7, 6, 5}, 8: {8, 7, 6}}[n]
        assert make(opened).resume_or_start(tmp_path) == {"n": n}


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "runs"])
def test_an_old_file_in_the_newest_makes_it_no_older(opened: Any, tmp_path: Path, name: str) -> None:
    """Copied there with its times, as `shutil.copy2` and `cp -a` do."""
    engine, folder = make(opened), tmp_path / "saves"
    old = tmp_path / name
    old.mkdir() if name == "runs" else old.write_text("{}")
    os.utime(old, (1e9, 1e9))
    for n in (100, 200):
        engine.save_checkpoint(folder / f"step-{n}", client_state={"n": n}, keep_last=2)
    (shutil.copytree if old.is_dir() else shutil.copy2)(old, folder / "step-200" / name)
    assert engine.resume_or_start(folder) == {"n": 200}
    engine.save_checkpoint(folder / "step-300", client_state={"n": 300}, keep_last=2)
    assert numbers_in(folder) == {300, 200}


def flip_a_byte(folder: Path) -> None:
    file = next(folder.glob("unit-*"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES: dict[str, Any] = {
    "a byte": flip_a_byte,
    "the manifest": lambda folder: (folder / "MANIFEST.json").write_bytes(b"{}"),
    "no manifest": lambda folder: (folder / "MANIFEST.json").unlink(),
    "a file is missing": lambda folder: next(folder.glob("unit-*")).unlink(),
    "a file is short": lambda folder: os.truncate(next(folder.glob("unit-*")), 5000),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("same_process", [True, False])
def test_damaged_ones_and_links_do_not_count(
    opened: Any, tmp_path: Path, damage: str, same_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(opened)
    for n in (1, 2, 3, 4):
        engine.save_checkpoint(tmp_path / f"step-{n}", client_state={"n": n})
    DAMAGES[damage](tmp_path / "step-4")
    (tmp_path / "step-900").symlink_to(tmp_path / "step-3")
    again = engine if same_process else make(opened)
    again.save_checkpoint(tmp_path / "step-5", client_state={"n": 5}, keep_last=3)
    assert numbers_in(tmp_path) == {900, 5, 4, 3, 2}
    assert "step-4 does not count" in caplog.text and caplog.text.count("does not count") == 1
    again.save_checkpoint(tmp_path / "step-6", client_state={"n": 6}, keep_last=1)
    assert numbers_in(tmp_path) == {900, 6, 4}
    DAMAGES[damage](tmp_path / "step-6")
    with refused(offload.CheckpointError, "step-"):
        again.resume_or_start(tmp_path)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_keep_last_that_is_no_count(opened: Any, tmp_path: Path, value: Any) -> None:
    with refused(offload.UsageError, "keep_last", repr(value)):
        make(opened).save_checkpoint(tmp_path / "step-1", keep_last=value)
    with refused(offload.UsageError, "step-<n>"):
        make(opened).save_checkpoint(tmp_path / "last", keep_last=1)


def test_resume_passes_over_what_is_damaged(opened: Any, tmp_path: Path) -> None:
    engine = make(opened, ON_NVME)
    folder = tmp_path / "run"
    weights = {}
    for n in (1, 2, 3):
        step(engine, n)
        engine.save_checkpoint(folder / f"step-{n}", client_state={"n": n})
        weights[n] = engine.state_dict()
    _flip(next((folder / "step-3").glob("unit*")), -5)
    with pytest.warns(RuntimeWarning, match=r"(?s)step-3.*checksum"):
        assert engine.resume_or_start(folder) == {"n": 2}
    assert_same_bits(engine.state_dict(), weights[2])
    for n in (1, 2):
        os.truncate(folder / f"step-{n}" / "MANIFEST.json", 100)
    with refused(offload.CheckpointError, "none of the 3", "step-3"):
        engine.resume_or_start(folder)
    assert_same_bits(engine.state_dict(), weights[2])
    step(engine)


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_ranks(opened: Any, tmp_path: Path) -> None:
    """Each parameter's bytes in two pieces in two files, cut inside: put together on one rank."""
    from .rewriting import split_over_ranks

    first, second = make(opened, ON_NVME), make(opened, ON_CPU, stack(blocks=1).requires_grad_(True))
    step(first)
    first.save_checkpoint(tmp_path / "saved")
    split_over_ranks(tmp_path / "saved", tmp_path / "two")
    assert json.loads((tmp_path / "two" / "MANIFEST.json").read_text())["manifest"]["world_size"] == 2
    second.load_checkpoint(tmp_path / "two")
    for engine in (first, second):
        step(engine, 1)
    assert_same_bits(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("value", ["", None, 5, b"saves", "a\0b"])
@pytest.mark.parametrize("call", ["load_checkpoint", "resume_or_start", "export"])
def test_a_folder_that_is_none(opened: Any, call: str, value: Any) -> None:
    with refused(offload.UsageError, call, repr(value)):
        getattr(make(opened), call)(value)


def test_only_plain_digits_are_numbers(opened: Any, tmp_path: Path) -> None:
    with refused(offload.UsageError, "step-<n>"):
        make(opened).save_checkpoint(tmp_path / "step-٣", keep_last=1)
