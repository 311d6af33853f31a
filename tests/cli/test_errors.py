# SPDX-License-Identifier: Apache-2.0
"""What cannot be is said in one line, with exit code 2, before anything is made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from offload.checkpoint_import.converting import KINDS
from offload.cli.main import _COMMANDS, main

from .conftest import LLAMA, is_empty, run

NVME = ["--parameters", "nvme", "--optimizer-states", "nvme"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refusal printed."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_process_says_it_in_one_line(text: Path, nvme: Path) -> None:
    done = run("train", "--data", text, "--hidden", 64, *NVME, "--nvme", nvme, "--cpu-memory", "10KiB")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("offload train: error: cpu_memory=10240 cannot hold")
    assert "The smallest cpu_memory that can is" in done.err
    assert is_empty(nvme)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: --data"),
        (["train", "--data", "x", "--steps", "0"], "--steps: 0 is not at least 1"),
        (["train", "--data", "x", "--sequence", "1"], "--sequence: a window needs at least 2 tokens"),
        (["train", "--data", "/nowhere"], "'/nowhere' does not exist"),
        (["train", "--data", "/nowhere", *NVME], "parameters='nvme' needs a folder"),
        (["train", "--data", "/nowhere", "--cpu-memory", "3 parsecs"], "cpu_memory='3 parsecs' is not a size"),
        (["train", "--data", "/nowhere", "--clip", "-1"], "--clip: -1.0 is not above 0"),
        (["train", "--data", "x", "--weight-decay", "-1"], "--weight-decay: -1.0 is below 0"),
        (["--model", "x", "train"], "--model stands before the command: name that first (train, plan)"),
        (["plan", "--tokens", "-3"], "--tokens: -3.0 is not above 0"),
        (["plan", "--nvme-read", "0"], "--nvme-read: 0.0 is not above 0"),
        (["probe", "--nvme", "/etc/hostname"], "'/etc/hostname' is no folder"),
        (["train", "--data", "/nowhere", "--json", "/nowhere/report.json"], "its folder does not exist"),
        (["plan", "--hidden", "100", "--heads", "3"], "--hidden 100 does not divide into --heads 3"),
        (["plan", "--heads", "4", "--kv-heads", "3"], "--heads 4 is not a multiple of --kv-heads 3"),
        (["plan", "--model", "/nowhere"], "--model '/nowhere' does not exist"),
        (["plan", "--beta1", "2"], "the optimizer refuses its flags: Invalid beta parameter"),
        (["plan", "--nvme", ","], "--nvme is empty"),
        (["probe", "--nvme", "/nowhere/at/all"], "'/nowhere/at'"),
        (["bench"], "required: KIND"),
        (["bench", "io"], "required: --nvme"),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in refused(capsys, *arguments)


def test_data(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "picture.bin").write_bytes(b"\x89PNG\0\0" * 100)
    assert "holds no text" in refused(capsys, "train", "--data", tmp_path / "binary")
    assert "one batch of 64 x 4096" in refused(capsys, "train", "--data", text, "--batch", 64, "--sequence", 4096)
    assert "is not a folder" in refused(capsys, "train", "--data", text, "--tokenizer", text)
    assert "is no folder" in refused(capsys, "train", "--data", text, "--nvme", text)
    assert "cannot be read" in refused(capsys, "train", "--data", text, "--tokenizer", tmp_path)


def test_models(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path, model: Path) -> None:
    def said(*arguments: object) -> str:
        return refused(capsys, "train", "--data", text, "--model", *arguments)

    assert "contradict each other" in said(model, "--layers", 4)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no config.json" in said(empty)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "cannot be read as a model's configuration" in said(broken)
    for wrong in ({"hidden_size": "wide"}, {"hidden_size": -64}, {"num_hidden_layers": 0.5}):
        broken.write_text(json.dumps(LLAMA | wrong))
        assert re.search("cannot be (read|built) as a .*(hidden|negative|layers)", said(broken))
    broken.write_text(json.dumps({"model_type": "vit"}))
    assert "cannot be built as a causal language model" in said(broken)
    broken.write_text(json.dumps(LLAMA | {"vocab_size": 100}))
    assert "257 different tokens" in said(broken)
    (empty / "config.json").write_text(json.dumps(LLAMA))
    (empty / "pytract_model.bin").write_bytes(b"x")
    assert "holds weights as pytract_model.bin" in said(empty)
    assert "--vocabulary 10 is too small" in refused(capsys, "train", "--data", text, "--vocabulary", 10)


@pytest.mark.parametrize("command", [("train", "--data"), ("plan", "--machine")])
def test_what_a_model_cannot_do_is_said_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path, command: tuple[str, str]
) -> None:
    name, flag = command
    path = tmp_path / "config.json"
    given = (name, "--model", path, flag, text if name == "train" else "rtx4090")
    for kind, size in (("gpt2", "n_positions"), ("opt", "max_position_embeddings"), ("openai-gpt", "n_positions")):
        width = {"word_embed_proj_dim": 32} if kind == "opt" else {}
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 260}
        path.write_text(json.dumps({"model_type": kind, size: 64, **shape, **width}), encoding="utf-8")
        assert "has learned 64 positions" in refused(capsys, *given, "--sequence", 65)
    checkpointing = ("--gradient-checkpointing",) if name == "train" else ("--checkpointing", "full")
    assert "does not support" in refused(capsys, *given, "--sequence", 64, *checkpointing)


def test_a_forward_that_no_plan_can_be_made_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_local_experts": 2,
    }
    path.write_text(json.dumps({"model_type": "mixtral", "vocab_size": 260, **shape}), encoding="utf-8")
    # PEFT's adapters of experts turn autocast off for the device of their weights, and there is none on the meta device.
    said = refused(capsys, "plan", path, "--machine", "rtx4090", "--sequence", 16, "--lora", 4)
    assert "its forward cannot run on the meta device" in said


def test_a_failure_in_training_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    shape = ["--hidden", "16", "--layers", "1", "--heads", "1", "--sequence", "16"]
    # A learning rate of 1e30 makes the second step's gradients inf or NaN.
    code = main(["train", "--data", str(text), *shape, "--steps", "5", "--lr", "1e30"])
    assert code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("offload train: error: the gradients of ")


MISTAKES: dict[str, list[list[str]]] = {
    "train": [
        ["--data", "D/gone"],
        ["--data", ""],
        ["--data", "D/text", *NVME, "--nvme", "/proc"],
        ["--data", "D/text", "--checkpoints", "D/text"],
        ["--data", "D/text", "--json", "D/gone/lines"],
        ["--data", "D/text", "--profile", "D/empty"],
        ["--data", "D/text", "--profile", "D/trace", "--steps", "3"],
        ["--data", "D/text", "--export", "D/full"],
        ["--data", "D/text", "--export", "/proc/there/is/none"],
        ["--data", "D/text", "--cpu-memory", "1", "--hidden", "16", "--heads", "1", "--layers", "1"],
    ],
    "plan": [["--model", "D/empty"], ["--machine", "D/text"], ["--machine", "rtx4099"], ["--trace", "D/gone/trace"]],
    "explain": [["D/gone"], ["D/empty"], ["D/text"]],
    "probe": [
        ["--nvme", "D/text"],
        ["--nvme", "/proc"],
        ["--machine-file", "D/empty"],
        ["--machine-file", "D/gone/file"],
        ["--size", "-3"],
    ],
    "export": [["D/gone", "D/out"], ["D/empty", "D/out"], ["D/text", "D/out"], ["D/no checkpoint", "D/out"]],
    "import": [
        ["D/gone", "D/out"],
        ["D/empty", "D/out"],
        ["D/text", "D/out"],
        ["D/full", "D/out"],
        *(["D/empty", "D/out", "--kind", kind] for kind in KINDS),
        ["D/empty", "D/full"],
        ["D/empty", "D/text"],
    ],
    "bench": [
        *(["io", "--nvme", path] for path in ("D/text", "/proc")),
        ["io", "--nvme", "D", "--backend", "none"],
        *(["adam", "--numel", number] for number in ("0", "999999999999999")),
    ],
    "info": [["more"]],
}


def test_every_command_is_asked_for_mistakes() -> None:
    assert set(MISTAKES) == set(_COMMANDS)


@pytest.mark.parametrize(("command", "arguments"), [(name, one) for name, all_of in MISTAKES.items() for one in all_of])
def test_a_users_mistake_is_code_2_in_every_command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: Path,
    command: str,
    arguments: list[str],
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    (tmp_path / "empty").mkdir()
    for folder, name in (("full", "something"), ("no checkpoint", "MANIFEST.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{")
    text.rename(tmp_path / "text")
    before = sorted(tmp_path.rglob("*"))
    refused(capsys, command, *(one.replace("D", str(tmp_path), 1) if one.startswith("D") else one for one in arguments))
    assert sorted(tmp_path.rglob("*")) == before, "something was made"


@pytest.mark.parametrize("variable", ["OFFLOAD_ACCELERATOR", "OFFLOAD_SEED", "OFFLOAD_DEVICE_NBYTES", "OFFLOAD_IO"])
def test_an_environment_variable_that_makes_no_sense(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: Path, nvme: Path, variable: str
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    monkeypatch.setenv(variable, "odd")
    said = refused(capsys, "train", "--data", text, "--hidden", 16, "--heads", 1, "--layers", 1, *NVME, "--nvme", nvme)
    assert variable in said and "'odd'" in said and "expected" in said and is_empty(nvme)


def test_a_folder_in_the_way_of_what_is_written_is_a_mistake_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    shape = ["--hidden", 16, "--layers", 1, "--heads", 1, "--sequence", 16, "--steps", 1, "--eval-batches", 0]
    saved = tmp_path / "run" / "step-1"
    train = ["train", "--data", text, *shape, "--checkpoints", saved.parent]
    assert main([str(one) for one in train]) == 0
    capsys.readouterr()
    for form in ("safetensors", "deepspeed-universal"):
        assert "only an empty folder" in refused(capsys, "export", saved, saved, "--format", form)
        assert "exists and is not a folder" in refused(capsys, "export", saved, text, "--format", form)
        assert "cannot be written to" in refused(capsys, "export", saved, "/proc/there/is/none", "--format", form)
    assert "embed_tokens" in refused(capsys, *train, "--vocabulary", 300)  # another model than the run's
