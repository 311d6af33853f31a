# SPDX-License-Identifier: Apache-2.0
"""Every block of code in the README and on the pages of docs/ runs: Python as one script a page, commands one by one.

A page finds a tiny checkpoint with its tokenizer, a folder of text and a drive, under the names that the pages use.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.cli.main import main
from tests.warm import WarmProcess

from ..acceptance.models import source_text
from ..cli.measured import measured_once
from ..integrations.preferences import byte_tokenizer
from .test_site import module

__all__ = ["measured_once"]

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([\w ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"huggingface.md": {"python"}, "coming-from-deepspeed.md": {"python", "python loop", "json"}}
"""Pages whose blocks in these languages have a test of their own, in tests/integrations."""
DRAWN = {"architecture.md", "checkpoint-format.md"}
"""Pages with blocks that are no code: drawings, and the layout of a file."""
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# A page's shapes and lengths, made small: the last flag counts.
SMALL_MODEL = "--hidden 32 --layers 2 --heads 2 --intermediate 48 --vocabulary 300"
SMALL_BENCH = {"adam": "--numel 1000000 --seconds 0.1", "io": "--size 128MiB --seconds 0.1"}
SMALL_RUN = "--steps 2 --sequence 16 --eval-batches 1 --cpu-memory 64MiB"


class MyTransformer(nn.Module):
    """What the README's loop trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Loss:
        for layer in self.layers:
            x = layer(x)
        return Loss(x.square().mean())


class Loss:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured_once: None) -> Iterator[Path]:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("checkpoint")
    tokenizer.save_pretrained("checkpoint")
    Path("texts").mkdir()
    Path("texts", "some.txt").write_bytes(source_text(1 << 13))
    for name in ("script.py", "train.py"):
        Path(name).write_text("")
    (tmp_path / "mnt").mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_runs(page: Path, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {
        "torch": torch,
        "offload": offload,
        "MyTransformer": MyTransformer,
        "loader": [{"x": torch.randn(2, 16)} for _ in range(2)],
        "block": nn.Linear(4, 4),
        "x": torch.randn(2, 4, requires_grad=True),
        "data": [{"input_ids": list(range(16)), "labels": list(range(16))}] * 4,
    }
    if page.name == "coming-from-deepspeed.md":
        _saved_by_both(given / "ckpt")
    for number, (language, text) in enumerate(blocks(page)):
        text = text.replace("/mnt/nvme0", str(given / "mnt"))
        if language in ELSEWHERE.get(page.name, ()):
            continue
        if language == "python":
            _about_arguments(text, names)
            exec(compile(text, f"{page.name}, block {number}", "exec"), names)
        elif language == "bash":
            for words in commands(text):
                _command(words)
        else:
            assert language == "" and page.name in DRAWN, f"{page.name}: a {language!r} block that nothing runs"
    for name in ("trainer", "engine"):
        made = names.get(name)
        if isinstance(made, offload.Engine):
            made.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_fenced(page: Path) -> None:
    """A block that is only indented, or fenced in another way, would be none of those that run."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert not re.search(r"```|~~~|<pre|<code|^\t", text, re.MULTILINE)
    assert re.findall(r"(?<=\n\n)(?:    .*\n)+", text) == []


BATCH = re.compile(r"\bmodel\((?:input_ids=batch|torch\.randn\()")
WRAPPERS = ("accelerator", "fabric")
"""Put batches where the model computes."""


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda path: path.name)
def test_every_loop_has_its_batches_where_the_model_computes(path: Path) -> None:
    """`initialize` has a model that was built on the CPU compute on the GPU, where there is one: a batch does not follow it."""
    text = path.read_text()
    for one in [text] if path.suffix == ".py" else [block for language, block in blocks(path) if "python" in language]:
        if BATCH.search(one) and not any(wrapper in one for wrapper in WRAPPERS):
            assert re.search(r"device=model\.|device=model\[|\.to\(model\.device\)", one), one
        assert "use_cpu" not in one, "on a GPU batches would stay on the CPU"


def test_every_page_of_the_repository_is_one_of_these() -> None:
    """The changelog has no blocks. The site's other pages are made of these, of docstrings and of the command line's help."""
    assert {path.name for path in ROOT.glob("*.md")} == {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
    assert "```" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_command_of_the_help_runs(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples that `--help` and the site's page of the command line show."""
    _saved_by_both(given / "ckpt")
    shutil.move(given / "ckpt" / "global_step1000", given / "global_step1000_universal")
    for name in ("step-1000", "global_step1000"):
        shutil.copytree(given / "ckpt" / "step-2000", given / "ckpt" / name)
    shutil.copy(given / "checkpoint" / "config.json", given)
    _command(["python", "-m", "offload", "plan", "--machine", "rtx4090", "--trace", "trace.json"])
    page = module(ROOT / "docs" / "site_tools" / "cli_page.py").command_line().replace("/mnt/nvme0", str(given / "mnt"))
    shown = [words for language, text in FENCE.findall(page) if language == "bash" for words in commands(text) if words]
    assert {words[3] for words in shown} >= {"train", "plan", "explain", "export", "import"}
    for words in shown:
        if words[3] == "import":  # what was exported is in its way
            shutil.rmtree(words[-1])
        _command(words)


def _saved_by_both(folder: Path) -> None:
    """A checkpoint of the engine's, and one in a layout of DeepSpeed's."""
    model = nn.Linear(4, 4)
    with offload.initialize(model, torch.optim.AdamW(model.parameters()), {"optimizer_states": "cpu"}) as engine:
        engine.backward(model(torch.ones(1, 4)).sum())
        engine.step()
        engine.save_checkpoint(folder / "step-2000")
    offload.export_universal_checkpoint(folder / "step-2000", folder / "global_step1000")


def _about_arguments(text: str, names: dict[str, object]) -> None:
    if "args=arguments" in text:
        from transformers import TrainingArguments

        names["arguments"] = TrainingArguments("run", max_steps=1, use_cpu=True, report_to=[])


def _command(words: list[str]) -> None:
    """Run one command of a page, or look whether what it names is there."""
    match words:
        case []:
            return
        case ["python", "-m", "offload", command, *rest]:
            rest = [re.sub("step-200$", "step-2", word) for word in (*rest, *_made_small(command, rest))]  # of so many
            if command == "train":  # in a process of its own, as a user's
                done = WarmProcess.run(["-m", "offload", command, *rest], 300)
                assert done.returncode == 0, done.stderr
            else:
                assert main([command, *rest]) == 0, words
        case ["python", "-m", "offload.deepspeed", script, *_]:
            done = WarmProcess.run(words[1:], 300)
            assert done.returncode == 0, done.stderr
        case ["offload-deepspeed", "--num_gpus", _, script, *_]:
            assert "\noffload-deepspeed = " in (ROOT / "pyproject.toml").read_text() and Path(script).exists()
        case ["make", *rest]:
            targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert {word for word in rest if "=" not in word} <= targets, words
        case ["pip", "install", what]:
            extra = re.fullmatch(r"\.\[(\w+)\]", what)
            extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
            assert extra is None or f"\n{extra[1]} = " in extras, words
        case ["torchrun", _, script, *_] | ["python", script, *_]:
            assert (ROOT / script).is_file(), words
        case _:
            raise AssertionError(f"a command that nothing runs: {words}")


def _names_a_model(rest: list[str]) -> bool:
    return "--model" in rest or (bool(rest) and not rest[0].startswith("-"))


def _made_small(command: str, rest: list[str]) -> list[str]:
    if command == "train":
        shape = [] if _names_a_model(rest) else SMALL_MODEL.split()
        return [*shape, *SMALL_RUN.split(), *(["--save-every", "1"] if "--checkpoints" in rest else [])]
    if command == "plan":
        return [] if _names_a_model(rest) else SMALL_MODEL.split()
    if command == "bench":
        return SMALL_BENCH[rest[0]].split()
    return []
