# SPDX-License-Identifier: Apache-2.0
"""What a newcomer meets first: the list of commands, what was probably meant, the environment, and a run's own words."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.cli.bench import adam_rows
from offload.cli.info import run as run_info
from offload.cli.machine import ENVIRONMENT
from offload.cli.main import build_parser, main
from tests.file_systems import free_room
from tests.warm import WarmProcess

from .conftest import LLAMA, Trainer
from .plain import new_model

ROOT = Path(__file__).parents[2]
SMALL = ("--hidden", 16, "--layers", 2, "--heads", 2, "--sequence", 16)


def test_alone_it_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for name in ("train", "plan", "probe", "bench", "export", "import", "info"):
        assert re.search(rf"^  {name} +\S", said, re.MULTILINE)
    assert all(len(line) < 128 for line in said.splitlines())
    assert main(["help"]) == 0 and capsys.readouterr().out == said


@pytest.mark.parametrize("about", [["train"], ["bench", "io"]])
def test_help_says_what_a_command_takes(capsys: pytest.CaptureFixture[str], about: list[str]) -> None:
    said = []
    for arguments in (["help", *about], [*about, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and " ".join(about) in said[0]


def test_every_flag_says_what_it_is() -> None:
    """In words, not by its default alone; and the examples of a command stand on lines of their own."""
    parser = build_parser()
    found = [parser, *_below(parser)]
    assert len(found) > 10
    for command in found:
        help_text = command.format_help()
        assert all(line.count("python -m offload") == 1 for line in help_text.splitlines() if "python -m offload" in line)
        for action in command._actions:
            if not isinstance(action, argparse._SubParsersAction):
                assert re.match(r"\w", action.help or ""), f"{command.prog}: {action.option_strings or action.dest}"


def _below(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    nested = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return [found for one in nested for child in one.choices.values() for found in (child, *_below(child))]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian"], "train"),
        (["hlep"], "help"),
        (["help", "trian"], "train"),
        (["train", "--data", "x", "--parametrs", "nvme"], "--parameters"),
        (["train", "--data", "x", "--seqence=16"], "--sequence"),
        (["train", "--data", "x", "--parameters", "nvem"], "nvme"),
        (["plan", "--layer", "3", "--mashine", "x"], "--machine"),
        (["bench", "adm"], "adam"),
        (["bench", "adam", "--secnds", "1"], "--seconds"),
    ],
)
def test_what_was_probably_meant(capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"did you mean {meant}?" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora", "x"], "argument --lora: 'x' is not a whole number"),
        (["--warmup", "-1"], "argument --warmup: -1 is not at least 0"),
        (["--lr", "abc"], "argument --lr: 'abc' is not a number"),
        (["--lr", "inf"], "argument --lr: inf is not finite"),
        (["--weight-decay", "nan"], "argument --weight-decay: nan is not finite"),
        (["--seed", str(2**63)], "argument --seed: 9223372036854775808 is not below 2^63"),
    ],
)
def test_a_number_that_is_none_is_said_so(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", "stdlib", *flags])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.fixture
def no_text(tmp_path: Path) -> Path:
    """Too short to train on, which is told once it is read."""
    path = tmp_path / "short.txt"
    path.write_text("x", encoding="utf-8")
    return path


def test_a_text_that_is_too_short_is_refused_once_it_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_text: Path
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    assert main(["train", "--data", str(no_text), *map(str, SMALL)]) == 2
    assert "the data holds 2 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--nvme", "is no folder that can be written to"),
        ("--checkpoints", "is not a folder"),
        ("--json", "is a folder: name a file"),
    ],
)
def test_a_path_of_another_kind_is_refused_before_the_text_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_text: Path, tmp_path: Path, flag: str, said: str
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    flags = ["train", "--data", str(no_text), *map(str, SMALL), "--optimizer-states", "nvme" if flag == "--nvme" else "cpu"]
    assert main([*flags, flag, str(tmp_path if flag == "--json" else no_text)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "import"])
def test_what_is_no_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    assert main([command, str(tmp_path / "gone"), str(tmp_path / "out")]) == 2
    assert f"'{tmp_path}/gone' is no " in capsys.readouterr().err
    assert main([command, str(tmp_path), str(tmp_path / "out")]) != 0
    assert f"'{tmp_path}' is no checkpoint" in capsys.readouterr().err


def test_output_that_nobody_reads_to_its_end_is_no_traceback() -> None:
    code = "import sys; from offload.cli.main import main; sys.exit(main(['info']))"
    with WarmProcess(["-c", code], torn_down=True) as running:
        running.stdout.close()
        assert (running.stderr.read(), running.wait()) == ("", 1)


def test_a_size_that_is_none_is_refused_without_a_drive_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--size", "abc"]) == 2
    assert "--size='abc' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--checkpoints", "--export"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_text_is_read(
    capsys: pytest.CaptureFixture[str], no_text: Path, flag: str
) -> None:
    assert main(["train", "--data", str(no_text), *map(str, SMALL), flag, "/proc/there/is/none"]) == 2
    assert f"{flag} '/proc/there/is/none' cannot be written to: '/proc' says" in capsys.readouterr().err


def test_nothing_is_guessed_where_nothing_is_close(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--data", "x", "--zzzzzz"])
    with pytest.raises(SystemExit):
        main(["train", "--data", "x", "--", "--steps", "1"])
    assert "did you mean" not in capsys.readouterr().err


def test_info_lists_every_variable_that_the_package_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = set[str]()
    for path in (ROOT / "offload").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read.update(re.findall(r'"(OFFLOAD_[A-Z_]+)"', text) if "environ" in text else [])
    assert read <= {name for name, _ in ENVIRONMENT}, read
    monkeypatch.setenv("OFFLOAD_VERIFY", "0")
    import argparse

    assert run_info(argparse.Namespace()) == 0
    said = capsys.readouterr().out
    for name, _ in ENVIRONMENT:
        assert re.search(rf"^  {name} +{re.escape(repr('0')) if name == 'OFFLOAD_VERIFY' else ''}", said, re.MULTILINE)


def test_no_row_of_the_benchmark_is_above_what_the_machine_can_do() -> None:
    rows = adam_rows([("stream", 280, 1.0), ("ours", 280, 0.9), ("torch", 280, 2.0)], 10)
    assert [row[-1] for row in rows] == ["90 %", "100 %", "45 %"]


def test_measuring_a_drive_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "io", "--nvme", str(tmp_path / "new"), "--size", "1MiB", "--seconds", "0.01"]) == 0
    assert main(["bench", "io", "--nvme", str(tmp_path), "--size", "1MiB", "--seconds", "0.01"]) == 0
    assert "read" in capsys.readouterr().out and tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_each_step_is_a_line_of_json_and_of_text(train: Trainer, text: Path, tmp_path: Path) -> None:
    done, report = train(
        "--data", text, *SMALL, "--steps", 5, "--eval-every", 2, "--eval-batches", 2, "--lr", 1e-3, "--clip", 1.0
    )
    lines = [json.loads(line) for line in (tmp_path / "report.json").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "step", "evaluation", "step", "step", "evaluation", "step", "report"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5] and [line["loss"] for line in steps] == report["losses"]
    assert all(line["grad_norm"] > 0 and line["seconds"] > 0 for line in steps)
    expected = [1e-4 + 9e-4 * (1 + torch.cos(torch.tensor(step / 5 * torch.pi)).item()) / 2 for step in range(5)]
    assert [line["lr"] for line in steps] == pytest.approx(expected)
    assert "held-out loss after step 2: " in done.out
    first = next(line for line in done.out.splitlines() if line.startswith("step 1/5"))
    assert " | lr 1.00e-03 | grad norm " in first and " left | " in first


def test_without_batches_to_evaluate_there_is_no_evaluation(train: Trainer, text: Path, tmp_path: Path) -> None:
    done, report = train("--data", text, *SMALL, "--steps", 3, "--eval-every", 1, "--eval-batches", 0)
    lines = [json.loads(line) for line in (tmp_path / "report.json").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step"] * 3 + ["report"] and "held-out loss after" not in done.out
    assert report["held_out"] == {"loss": None, "token_count": 0}


def test_adapters_are_trained_by_the_checkpoints_own_tokenizer_and_exported(
    train: Trainer, model: Path, text: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder, out, merged = tmp_path / "checkpoint", tmp_path / "adapter", tmp_path / "merged"
    base = new_model(model, seed=5)
    base.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1} | {str(number): number + 2 for number in range(10)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)

    flags = ("--model", folder, "--data", text, "--lora", 4, "--steps", 2, "--sequence", 16, "--lr", 1e-2, "--eval-batches", 0)
    done, report = train(*flags, "--export", out)
    assert done.err == "", "what libraries say to developers is no user's matter"
    assert " of them trained), weights of " in done.out
    assert report["data"]["vocabulary_size"] == len(words)
    _, again = train(*flags, "--export", merged, "--merged")
    assert again["losses"] == report["losses"]

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out)
    whole = AutoModelForCausalLM.from_pretrained(merged)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected, found = adapted(tokens).logits, whole(tokens).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not torch.equal(found, base(tokens).logits), "the adapter did nothing"
    written = load_file(out / "adapter_model.safetensors")
    assert all(".lora_" in name for name in written) and len(written) == 2 * 7 * LLAMA["num_hidden_layers"]


def test_steps_of_a_run_become_a_trace_and_the_end_says_what_reads_it(
    train: Trainer, capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    flags = ("--data", text, *SMALL, "--steps", 5, "--eval-batches", 0)
    _, plain = train(*flags)
    done, profiled = train(*flags, "--profile", trace)
    assert profiled["losses"] == plain["losses"]
    assert done.out.splitlines()[-1].endswith(f"python -m offload explain {trace}")
    assert main(["explain", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2 and 0 < found["step_seconds"] * 2 < profiled["seconds"]["training"]
    done, _ = train("--data", text, *SMALL, "--seconds", 1e-6, "--eval-batches", 0, "--profile", tmp_path / "none.json")
    assert "the run ended before step 3" in done.out and not (tmp_path / "none.json").exists()


def test_what_cannot_lie_there_is_said_before_the_text_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, no_text: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    flags = ["train", "--model", str(model), "--data", str(no_text), "--parameters", "nvme", "--optimizer-states", "nvme"]
    assert main([*flags, "--nvme", str(tmp_path), "--cpu-memory", "1000"]) == 2
    assert "cpu_memory" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        free_room(patch, 1000)
        assert main([*flags, "--nvme", str(tmp_path / "new")]) == 2
    assert "are to lie there and 1000 B are free" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    flags = [*flags, "--nvme", str(tmp_path)]
    assert main([*flags, "--export", str(tmp_path / "full")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*flags, "--merged"]) == 2
    assert "--merged says how an adapter is exported" in capsys.readouterr().err
