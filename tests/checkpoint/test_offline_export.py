# SPDX-License-Identifier: Apache-2.0
"""`python -m offload export`: the bytes that the engine would have exported, from the folder alone."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.checkpoint.export.offline import export_checkpoint
from offload.cli.main import main
from tests.file_systems import at_call, path_of
from tests.warm import WarmProcess

from ..acceptance.models import ON_CPU, ON_NVME, Normalized, adamw, gpt2, llama, stack
from ..acceptance.runs import Run, assert_same_bits, one_step, refused
from .loops import files_of
from .rewriting import content_of, signed, split_over_ranks
from .test_export import trained
from .test_memory import HUGE_PAGE_NBYTES, OVERHEAD_NBYTES, SLAB_NBYTES, least_grown

NO_LIMIT = 1 << 40


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", None])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_same_bytes_as_the_engine(opened: Any, tmp_path: Path, build: Any, dtype: str | None) -> None:
    from transformers import AutoModelForCausalLM

    engine = trained(opened, build, ON_NVME, dtype="bf16")
    engine.save_checkpoint(tmp_path / "saved")
    engine.export(tmp_path / "theirs", dtype, max_shard_size="30KB")
    flags = ["--dtype", dtype] if dtype else []
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "ours"), *flags, "--max-shard-size", "30KB"]) == 0
    assert len(os.listdir(tmp_path / "ours")) > 4
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    if dtype == "fp32":
        assert_same_bits(dict(loaded.state_dict()), engine.state_dict())


def test_other_orders_buffers_and_several_ranks(opened: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Normalized()
    model.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    engine = opened(model, adamw(model), ON_NVME)
    one_step(Run(model, engine.optimizer, engine))
    engine.save_checkpoint(tmp_path / "saved")
    engine.export(tmp_path / "theirs")
    split_over_ranks(tmp_path / "saved", tmp_path / "split")
    for name in ("saved", "split"):
        export_checkpoint(tmp_path / name, tmp_path / f"{name}-out", None, NO_LIMIT)
        assert files_of(tmp_path / f"{name}-out") == files_of(tmp_path / "theirs")


def test_memory(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 MB of weights, 16 MB of them one matrix."""
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False), *(nn.Linear(1024, 1024) for _ in range(3)))
    engine = opened(model, adamw(model), ON_CPU)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    limit = SLAB_NBYTES + (2 << 20) + HUGE_PAGE_NBYTES + OVERHEAD_NBYTES  # the slab's conversion rounds to huge pages too

    def export(attempt: int) -> None:
        export_checkpoint(tmp_path / "saved", tmp_path / f"out-{attempt}", torch.bfloat16, NO_LIMIT)

    assert least_grown(export) <= limit


@pytest.fixture
def saved(opened: Any, tmp_path: Path) -> Path:
    model = stack(blocks=1)
    model.register_buffer("mean", torch.arange(3.0))
    model.outlet.weight = model.inlet.weight
    opened(model, adamw(model), ON_CPU).save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def test_without_a_gpu_and_as_a_command(saved: Path, tmp_path: Path) -> None:
    command = ["-m", "offload", "export", str(saved), str(tmp_path / "out")]
    done = WarmProcess.run(command, 300, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and "tensors in 1 file" in done.stdout, done.stderr
    again = WarmProcess.run(command, 300, CUDA_VISIBLE_DEVICES="")
    assert again.returncode == 2 and "exists" in again.stderr and "Traceback" not in again.stderr


def test_damage_is_found_before_the_export_has_its_name(saved: Path, tmp_path: Path) -> None:
    for path in sorted(saved.glob("*.safetensors")):
        if path.name.startswith("random"):
            continue
        content = bytearray(path.read_bytes())
        place = 9 if path.name.startswith("unit-00001") else opening_place(content_of(saved), path.name)
        content[place] ^= 4
        shutil.copytree(saved, tmp_path / "damaged")
        (tmp_path / "damaged" / path.name).write_bytes(content)
        with refused(offload.CheckpointError, path.name, "checksum"):
            export_checkpoint(tmp_path / "damaged", tmp_path / "out", None, NO_LIMIT)
        assert not [name for name in os.listdir(tmp_path) if name not in ("damaged", "nvme", "saved")]
        shutil.rmtree(tmp_path / "damaged")


def opening_place(content: dict[str, Any], name: str) -> int:
    """A byte of a weight or buffer of the file."""
    values = [piece["value"] for entry in content["parameters"] for piece in entry["pieces"]]
    values += [entry["data"] for entry in content["buffers"]]
    place: int = next(one["offset"] for one in values if one["file"] == name)
    return place


def test_manifests_that_lie(saved: Path, tmp_path: Path) -> None:
    sound = content_of(saved)

    def lie(change: Any, *words: str) -> None:
        content = copy.deepcopy(sound)
        change(content)
        (saved / "MANIFEST.json").write_bytes(signed(content))
        with refused(offload.CheckpointError, "MANIFEST.json", *words):
            export_checkpoint(saved, tmp_path / "out", None, NO_LIMIT)
        assert not [name for name in os.listdir(tmp_path) if name not in ("nvme", "saved")]

    first = sound["parameters"][0]["fqns"][0]
    lie(lambda c: c["parameters"][0].update(shape=[2**40, 2**20], stride=[2**20, 1]), first, "expected")
    lie(lambda c: c["parameters"][0].update(stride=[0] * len(c["parameters"][0]["stride"])), "strides")
    lie(lambda c: c["parameters"][1].update(fqns=c["parameters"][0]["fqns"]), "one name")
    lie(lambda c: c["parameters"][0].update(fqns=["__metadata__"]), "one name")
    lie(lambda c: c["buffers"][0].update(shape=[2**62, 2**62]), "buffer", "mean")
    lie(lambda c: c["model"]["configs"].update(config="[1]"), "configuration")
    lie(lambda c: c["model"]["configs"].update({"../x": "{}"}), "configuration")
    lie(lambda c: c["parameters"][0]["pieces"][0]["value"].update(offset=0), "begins at byte")


def test_values_of_a_manifest_that_lies(saved: Path, tmp_path: Path) -> None:
    """As many numbers as it says could be read, but not these."""
    sound = content_of(saved)
    for change in ({"stride": [0] * len(sound["parameters"][0]["stride"])}, {"shape": [1], "stride": [1]}):
        content = copy.deepcopy(sound)
        content["parameters"][0].update(change)
        (saved / "MANIFEST.json").write_bytes(signed(content))
        with refused(offload.CheckpointError, "MANIFEST.json", sound["parameters"][0]["fqns"][0]):
            offload.read_values(saved)
        with refused(offload.CheckpointError, "MANIFEST.json", sound["parameters"][0]["fqns"][0]):
            offload.export_universal_checkpoint(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_the_weights_are_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counter[tuple[str, int]]()

    def watched(count: int, fileno: int, views: Any, offset: int) -> None:
        read.update((path_of(fileno).name, byte) for byte in range(offset, offset + count))

    at_call(monkeypatch, "preadv", after=watched)
    export_checkpoint(saved, tmp_path / "out", None, NO_LIMIT)
    index = json.loads((saved / "MANIFEST.json").read_bytes())
    pieces = [piece for parameter in index["manifest"]["parameters"] for piece in parameter["pieces"]]
    assert len(pieces) == len(index["manifest"]["parameters"])

    def bytes_of(kind: str) -> list[tuple[str, int]]:
        arrays = [piece[kind] for piece in pieces if piece[kind] is not None]
        return [(one["file"], one["offset"] + byte) for one in arrays for byte in range(one["nbytes"])]

    assert bytes_of("value") and all(read[byte] == 1 for byte in bytes_of("value"))
    assert bytes_of("exp_avg") and not any(read[byte] for kind in ("exp_avg", "exp_avg_sq") for byte in bytes_of(kind))
