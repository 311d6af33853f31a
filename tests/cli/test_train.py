# SPDX-License-Identifier: Apache-2.0
"""`train` in a process of its own, its report held against the same training in plain PyTorch and against the plan."""

from __future__ import annotations

import json
import os
import pty
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.cli.main import main
from offload.cli.plans.outline import Outline
from tests.warm import WarmProcess

from .conftest import LLAMA, TEXT, TIMEOUT_SECONDS, Trainer, command, is_empty, run
from .plain import adamw, held_out_loss, losses, new_model, windows

ON_NVME = ("--parameters", "nvme", "--optimizer-states", "nvme")
BUDGET = 3 << 19  # so little that not one whole record of DEEP is kept in memory
DEEP = LLAMA | {"num_hidden_layers": 12}


def test_a_new_model_trains_as_in_plain_torch(train: Trainer, model: Path, text: Path, nvme: Path) -> None:
    model.write_text(json.dumps(DEEP), encoding="utf-8")
    options = {"steps": 6, "accumulate": 2, "lr": 3e-3, "warmup": 2, "clip": 0.5}
    flags = [value for name, number in options.items() for value in (f"--{name}", number)]
    shape = ("--sequence", 32, "--batch", 2, "--eval-batches", 3)
    budget = ("--cpu-memory", BUDGET, "--nvme", nvme)
    done, report = train("--model", model, "--data", text, *flags, *shape, *ON_NVME, *budget)

    expected_model, data = new_model(model), windows(text, 32, 2)
    expected = losses(expected_model, data, **options)
    assert report["losses"] == pytest.approx(expected, abs=2e-4)
    assert report["losses"][-1] < report["losses"][0] - 0.2
    assert report["held_out"]["loss"] == pytest.approx(held_out_loss(expected_model, data, 3), abs=2e-4)
    assert report["token_count"] == 6 * 2 * 2 * 32
    assert is_empty(nvme)
    _check_table(done.out, report)
    _check_memory(report, model, nvme)
    _check_io(report, model, nvme)
    _check_times(report)


def _outline(model: Path, nvme: Path) -> Outline:
    config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=str(nvme), cpu_memory=BUDGET, max_grad_norm=1.0)
    built = new_model(model)
    return Outline(built, adamw(built, 1e-3), config)


def _check_memory(report: dict[str, Any], model: Path, nvme: Path) -> None:
    with _outline(model, nvme) as outline:
        lines = outline.placement().plan.lines
    assert report["states"] == [{"tier": line.tier, "purpose": line.purpose, "nbytes": line.nbytes} for line in lines]
    host = report["memory"]["cpu"]
    assert host["budget_nbytes"] == BUDGET
    assert host["budget_nbytes"] >= host["planned_nbytes"] >= host["peak_nbytes"] > 0
    process = report["memory"]["process"]
    assert process["peak_nbytes"] >= process["before_nbytes"] > 0
    assert report["placement"] == {"parameters": "nvme", "optimizer_states": "nvme", "gradients": "cpu"}


def _check_io(report: dict[str, Any], model: Path, nvme: Path) -> None:
    with _outline(model, nvme) as outline:
        traffic = outline.traffic(outline.placement(), micro_batches=2)
        parameters_nbytes = 4 * outline.parameter_numel
    io, steps = report["io"], report["step_count"]
    # The last step's updates are finished after the steps.
    assert traffic.written_nbytes >= 2 * parameters_nbytes and traffic.read_nbytes >= 4 * parameters_nbytes
    assert (steps - 1) * traffic.written_nbytes <= io["written_nbytes"] <= steps * traffic.written_nbytes
    # A unit that is still there is not read again: at each turn from forward to backward, and back, of 2 micro-batches.
    at_hand = steps * 2 * 2 * parameters_nbytes // 12
    assert (steps - 1) * traffic.read_nbytes - at_hand <= io["read_nbytes"] <= steps * traffic.read_nbytes
    assert io["initial_written_nbytes"] >= parameters_nbytes
    assert io["read_seconds"] > 0 and io["write_seconds"] > 0


def _check_times(report: dict[str, Any]) -> None:
    seconds = report["seconds"]
    phases = sum(seconds[name] for name in ("data", "forward", "backward", "step"))
    assert 0 < phases <= seconds["training"] <= seconds["total"]
    assert report["waits"] and all(value >= 0 for value in report["waits"].values())


def _check_table(out: str, report: dict[str, Any]) -> None:
    assert f"loss: first {report['losses'][0]:.4f}, last {report['losses'][-1]:.4f}" in out
    for word in (
        "What there is and where it lived",
        "Memory",
        "Time",
        "What was waited for",
        f"NVMe, by {report['io']['backend']}",
    ):
        assert word in out
    assert "1.50 MiB" in out  # the budget
    assert any(line.startswith("step 1/6 | loss ") and "tokens/s" in line and "NVMe read" in line for line in out.splitlines())


def test_a_checkpoint_is_streamed_with_its_tokenizer(
    train: Trainer, model: Path, text: Path, nvme: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "checkpoint"
    saved = new_model(model, seed=7)
    saved.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)

    flags = ("--steps", 1, "--sequence", 16, "--gradient-checkpointing", "--optimizer-states", "cpu", "--parameters", "nvme")
    done, report = train("--model", folder, "--tokenizer", folder, "--data", text, *flags, "--nvme", nvme)
    tokens = [1, *tokenizer.encode(TEXT).ids]
    assert report["data"]["token_count"] == len(tokens)
    assert report["data"]["vocabulary_size"] == tokenizer.get_vocab_size() <= 200
    count = len(tokens) // 16
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0), dtype=torch.int32)[max(1, int(count * 0.05)) :]
    first = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1), dtype=torch.int32)[0].long()].item()
    batch = torch.tensor([tokens[first * 16 : (first + 1) * 16]])
    with torch.no_grad():
        assert report["losses"][0] == pytest.approx(saved(input_ids=batch, labels=batch).loss.item(), abs=1e-5)
    assert str(folder) in done.out
    assert is_empty(nvme)


def test_experts_are_streamed_as_transformers_saves_them_and_exported_as_it_loads_them(
    train: Trainer, text: Path, nvme: Path, tmp_path: Path
) -> None:
    """A rate of learning so small that no weight changes: what comes out is what went in."""
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    saved = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    saved.save_pretrained(tmp_path / "checkpoint", max_shard_size="40KB")
    places = ("--parameters", "nvme", "--optimizer-states", "nvme", "--nvme", nvme, "--sequence", 16, "--eval-batches", 0)
    flags = ("--steps", 2, "--lr", 1e-30, "--checkpoints", tmp_path / "run", "--save-every", 1, *places)
    train("--model", tmp_path / "checkpoint", "--data", text, *flags, "--export", tmp_path / "exported")
    assert main(["export", str(tmp_path / "run" / "step-2"), str(tmp_path / "later")]) == 0
    for folder in ("checkpoint", "exported", "later"):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values())
        found = loaded.state_dict()
        assert all(torch.equal(found[name], value) for name, value in saved.state_dict().items()), folder


def test_bf16_with_updates_in_backward_ends_by_time(train: Trainer, text: Path) -> None:
    shape = ("--hidden", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--intermediate", 48, "--vocabulary", 300)
    flags = ("--accumulate", 2, "--dtype", "bf16", "--update", "backward", "--seconds", 0.5, "--eval-batches", 0)
    _, report = train("--data", text, "--sequence", 16, *shape, *flags)
    assert report["step_count"] >= 1
    assert report["seconds"]["training"] >= 0.5
    assert report["held_out"] == {"loss": None, "token_count": 0}
    assert report["io"]["backend"] is None
    embedding = 2 * 300 * 32
    attention, mlp, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 2 * 32
    assert report["model"]["parameter_numel"] == embedding + 2 * (attention + mlp + norms) + 32


def test_a_terminal_shows_one_line_that_is_refreshed(text: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ("--data", text, "--hidden", 16, "--layers", 1, "--heads", 1, "--sequence", 16, "--steps", 3)
    with WarmProcess(command("train", *arguments), stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # what Linux says when the other side is gone
                break
            if not piece:
                break
            shown += piece
        os.close(ours)
        assert process.wait(TIMEOUT_SECONDS) == 0
    refreshed = [part for part in shown.split(b"\r\x1b[2K") if part.startswith(b"step ")]
    assert refreshed[0].startswith(b"step 1/3 | loss ") and refreshed[-1].startswith(b"step 3/3 | loss ")
    assert all(b"\n" not in part for part in refreshed[:-1])


def test_without_transformers_the_extra_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "transformers.py").write_text("raise ImportError('not installed')\n")
    done = run("train", "--data", text, PYTHONPATH=str(tmp_path / "hidden"))
    assert done.code == 2
    assert "pip install 'offload[hf]'" in done.err
    assert len(done.err.splitlines()) == 1


def test_every_line_of_json_is_json_where_gradients_overflow(tmp_path: Path, model: Path, text: Path) -> None:
    path = tmp_path / "lines.json"
    # A learning rate of 1e4 makes losses NaN; with fp16 such steps are left out.
    wild = ("--dtype", "fp16", "--lr", "1e4", "--clip", "1", "--steps", "3", "--sequence", "16", "--eval-batches", "1")
    done = run("train", "--model", model, "--data", text, *wild, "--json", path)
    assert done.code == 0, done.err

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    *steps, report = [json.loads(line, parse_constant=refused) for line in path.read_text(encoding="utf-8").splitlines()]
    assert report["skipped_step_count"] > 0
    assert [step["loss"] for step in steps] == report["losses"]
    assert None in report["losses"]
