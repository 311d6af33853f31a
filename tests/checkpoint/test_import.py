# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed and torch.distributed, converted, loaded and trained on: the same as going on by hand."""

from __future__ import annotations

import collections
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict

import offload
from offload.checkpoint.format.manifest_decoding import decode
from offload.checkpoint_import.converting import import_checkpoint
from offload.cli.main import main

from ..acceptance.models import ADAM_OPTIONS, ON_CPU, ON_NVME, adamw, stack
from ..acceptance.runs import assert_close, assert_same_bits, refused
from .rewriting import content_of, signed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Trained, frozen, tied, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outlet = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.inlet.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.norm(torch.tanh(self.inlet(x)))) + self.tied(x) * self.frozen[0]


def steps(model: nn.Module, optimizer: Any, count: int, first: int = 0) -> list[float]:
    losses = []
    for n in range(first, first + count):
        loss = model(torch.randn(6, 16, generator=torch.Generator().manual_seed(n))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Trained:
    """Three steps of plain PyTorch, and what three more would have given."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = adamw(self.model)
        steps(self.model, self.optimizer, 3)

    def go_on(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        return steps(self.model, self.optimizer, 3, first=3), self.model.state_dict()


@pytest.fixture
def trained() -> Trained:
    return Trained()


def save_universal(trained: Trained, folder: Path, stage: int) -> None:
    """The files that DeepSpeed 0.19 and its ds_to_universal write, with what is in them, on one rank."""
    zero = folder / "zero"
    model, state = trained.model, trained.optimizer.state
    names = {id(p): name for name, p in model.named_parameters()}
    shapes = collections.OrderedDict((names[id(p)], p.shape) for p in state)
    for parameter, values in state.items():
        path = zero / names[id(parameter)]
        path.mkdir(parents=True)
        for kind, value in (("fp32", parameter), ("exp_avg", values["exp_avg"]), ("exp_avg_sq", values["exp_avg_sq"])):
            value = value.detach().clone()
            torch.save(value.flatten() if stage == 3 else {"param": value}, path / f"{kind}.pt")
        if stage < 3:
            torch.save(values["step"], path / "step.pt")
    module = collections.OrderedDict(model.state_dict())
    if stage < 3:
        for name in ("frozen", "tied.weight", *(name for name, _ in model.named_buffers())):
            (zero / name).mkdir()
            torch.save({"param": module[name].float()}, zero / name / "fp32.pt")
    frozen = collections.OrderedDict(frozen=model.frozen.detach())
    model_states = {
        "module": module,
        "buffer_names": [name for name, _ in model.named_buffers()],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": collections.OrderedDict(frozen=model.frozen.shape),
        "shared_params": {"tied.weight": "inlet.weight"},
        "frozen_param_fragments": frozen,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "ds_version": "0.19.8",
    }
    if stage < 3:
        torch.save(model_states, folder / "mp_rank_00_model_states.pt")
        return
    halves = torch.cat([model.frozen.detach(), torch.zeros(1)]).split(4)
    for rank in range(2):
        fragments = collections.OrderedDict(frozen=halves[rank].clone())
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save(model_states | {"frozen_param_fragments": fragments}, path)


def save_dcp(trained: Trained, folder: Path) -> None:
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": model, "optim": optimizer, "epoch": 3}, checkpoint_id=folder, no_dist=True)


SOURCES: dict[str, Callable[[Trained, Path], None]] = {
    "universal, stage 2": lambda trained, folder: save_universal(trained, folder, 2),
    "universal, stage 3": lambda trained, folder: save_universal(trained, folder, 3),
    "torch-dcp": save_dcp,
}


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)
@pytest.mark.parametrize("source", SOURCES)
def test_training_goes_on(trained: Trained, opened: Any, tmp_path: Path, source: str, setup: Any) -> None:
    """Values, moments, step counts and buffers are the source's to the bit; going on is as plain PyTorch goes on."""
    SOURCES[source](trained, tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "saved")]) == 0
    saved = {name: value.clone() for name, value in trained.model.state_dict().items()}
    torch.manual_seed(5)
    model = Net()
    engine = opened(model, adamw(model), setup)
    draw = torch.get_rng_state()
    state = engine.load_checkpoint(tmp_path / "saved")
    counts = {"global_steps": 3, "global_samples": 0, "skipped_steps": 0, "lr_scheduler": None, "client_state": {}}
    assert state == (counts if source.startswith("universal") else {})
    assert torch.equal(torch.get_rng_state(), draw)
    assert_same_bits(engine.state_dict(), saved)
    losses, weights = trained.go_on()
    assert_close(steps(model, engine.optimizer, 3, first=3), losses)
    assert_close(engine.state_dict(), weights)
    engine.save_checkpoint(tmp_path / "ours")
    entries = {entry["fqns"][0]: entry for entry in content_of(tmp_path / "ours")["parameters"]}
    assert entries["inlet.weight"]["step"] == 6 and content_of(tmp_path / "ours")["step_count"] == 6
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0


def test_what_a_script_of_deepspeeds_kept_comes_back_as_it_was(trained: Trained, opened: Any, tmp_path: Path) -> None:
    """To an engine of this package: tuples, keys that are no text, numbers that JSON has no words for, tensors."""
    save_universal(trained, tmp_path / "theirs", 2)
    file = tmp_path / "theirs" / "mp_rank_00_model_states.pt"
    kept: dict[str, Any] = {"seen": {3: (0.5, 1)}, "best": float("inf"), "marked": {"__tuple__": [1]}, "__items__": "x"}
    numbers = {"random": torch.arange(4)}
    torch.save(torch.load(file, weights_only=False) | kept | numbers | {"lr_scheduler": {"rates": (0.25,)}}, file)
    import_checkpoint(tmp_path / "theirs", tmp_path / "saved")
    model = Net()
    engine = opened(model, adamw(model), ON_CPU)
    for load in (engine.load_checkpoint, engine.load_values):
        state = load(tmp_path / "saved")
        assert torch.equal(state["client_state"].pop("random"), numbers["random"])
        assert state["client_state"] == kept and state["lr_scheduler"] == {"rates": (0.25,)}


HOSTILE_MARKS: tuple[Any, ...] = (
    *({"__items__": 5}, {"__items__": [5]}, {"__items__": [[[], 1]]}, {"__float__": "x"}, {"__float__": []}, {"__tuple__": 5}),
    *({"__tensor__": 5}, {"__tensor__": ["nn", []]}, {"__tensor__": ["float32", ["x"]]}, {"__tensor__": ["int8", [2**70]]}),
    *({"__tensor__": ["float32", [[1], []]]}, {"__tensor__": [[], 1]}, {"__tensor__": []}),
    *({"__tensor__": ["int8", [], [2**70]]}, {"__tensor__": ["int8", [1], "x"]}, {"__tensor__": ["int8", [], [0], [0]]}),
)


@pytest.mark.parametrize("mark", HOSTILE_MARKS, ids=str)
def test_marks_that_stand_for_nothing(trained: Trained, opened: Any, tmp_path: Path, mark: Any) -> None:
    """They are found before anything of the engine changes."""
    save_dcp(trained, tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "saved")
    content = content_of(tmp_path / "saved") | {"client_state": {"a": [mark]}}
    (tmp_path / "saved" / "MANIFEST.json").write_bytes(signed(content, version=2))
    model = Net()
    engine = opened(model, adamw(model), ON_CPU)
    before = engine.state_dict()
    with refused(offload.CheckpointError, "MANIFEST.json", "client_state"):
        engine.load_checkpoint(tmp_path / "saved")
    assert_same_bits(engine.state_dict(), before)


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_written_is_version_2_and_bitwise_the_source(trained: Trained, tmp_path: Path, source: str) -> None:
    from safetensors.torch import load_file

    SOURCES[source](trained, tmp_path / "theirs")
    found = import_checkpoint(tmp_path / "theirs", tmp_path / "saved")
    content = (tmp_path / "saved" / "MANIFEST.json").read_bytes()
    manifest = decode(content, "x")
    assert content.startswith(b'{"format":"offload-checkpoint","version":2,')
    assert manifest.imported == found.kind and not manifest.random and manifest.optimizer is None
    held = load_file(tmp_path / "saved" / "part-00000.safetensors")
    names = {id(p): name for name, p in trained.model.named_parameters()}
    for parameter, state in trained.optimizer.state.items():
        name = names[id(parameter)]
        assert_same_bits(held[name], parameter.detach())
        assert_same_bits(held[f"exp_avg/{name}"], state["exp_avg"])
        assert_same_bits(held[f"exp_avg_sq/{name}"], state["exp_avg_sq"])


def shard_in_files(folder: Path, tensors: dict[str, tuple[torch.Tensor, list[tuple[slice, ...]]]]) -> None:
    """A DCP folder by hand, each tensor cut into the given boxes, boxes alternating between two files."""
    folder.mkdir()
    metadata, places, contents = {}, {}, {"__0_0.distcp": bytearray(), "__1_0.distcp": bytearray()}
    for name, (tensor, boxes) in tensors.items():
        chunks = []
        for index, box in enumerate(boxes):
            part = tensor[box].clone()
            start = torch.Size([piece.indices(size)[0] for piece, size in zip(box, tensor.shape, strict=True)])
            file = f"__{index % 2}_0.distcp"
            path = folder / "part"
            torch.save(part, path)
            written = path.read_bytes()
            path.unlink()
            places[MetadataIndex(name, start)] = _StorageInfo(file, len(contents[file]), len(written))
            contents[file] += written
            chunks.append(ChunkStorageMetadata(start, part.shape))
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(metadata, planner_data=None, storage_data=places)))


def test_shards_of_several_ranks_and_16_bit_weights(opened: Any, tmp_path: Path) -> None:
    model = stack(blocks=1)
    values = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
    grid = [(slice(a, a + 8), slice(b, b + 8)) for a in (8, 0) for b in (0, 8)]
    rows = [(slice(10, 16),), (slice(0, 10),)]
    tensors = {
        name: (value, grid if value.shape == (16, 16) else rows if value.shape == (16,) else [(slice(None),) * value.dim()])
        for name, value in values.items()
    }
    shard_in_files(tmp_path / "theirs", tensors)
    import_checkpoint(tmp_path / "theirs", tmp_path / "saved")
    other = stack(width=16, blocks=1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    engine = opened(other, adamw(other), ON_NVME)
    engine.load_checkpoint(tmp_path / "saved")
    assert_same_bits(engine.state_dict(), {name: value.float() for name, value in values.items()})
    steps(other, engine.optimizer, 1)  # with moments of zero, as at the start
    plain = stack(blocks=1)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
    steps(plain, adamw(plain), 1)
    assert_close(engine.state_dict(), dict(plain.state_dict()))


class Runs:
    """What a pickle would do where it was trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_source_is_run(trained: Trained, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    save_dcp(trained, tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.planner_data["x"] = Runs(trap)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(offload.CheckpointError, ".metadata", "mkdir"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "out")
    save_universal(trained, tmp_path / "universal", 2)
    for name in ("fp32.pt", "exp_avg.pt", "step.pt"):
        path = tmp_path / "universal" / "zero" / "inlet.bias" / name
        content = path.read_bytes()
        torch.save({"param": Runs(trap)}, path)
        with refused(offload.CheckpointError, name, "safely"):
            import_checkpoint(tmp_path / "universal", tmp_path / "out")
        path.write_bytes(content)
    torch.save({"module": Runs(trap)}, tmp_path / "universal" / "mp_rank_00_model_states.pt")
    found = import_checkpoint(tmp_path / "universal", tmp_path / "out")
    assert any("tied" in clause and "model_states" in clause for clause in found.missing)
    assert not trap.exists()


def test_metadata_that_leads_elsewhere_or_lies(trained: Trained, tmp_path: Path) -> None:
    save_dcp(trained, tmp_path / "dcp")
    sound = (tmp_path / "dcp" / ".metadata").read_bytes()

    def lie(change: Callable[[Any], Any], *words: str) -> None:
        metadata = pickle.loads(sound)
        change(metadata)
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
        with refused(offload.CheckpointError, "cannot be imported", *words):
            import_checkpoint(tmp_path / "dcp", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    (tmp_path / "outside").write_bytes((tmp_path / "dcp" / "__0_0.distcp").read_bytes())
    os.symlink(tmp_path / "outside", tmp_path / "dcp" / "link.distcp")
    place = MetadataIndex("model.inlet.weight", torch.Size([0, 0]))
    for name in ("../outside", str(tmp_path / "outside"), ".."):
        lie(lambda m, name=name: setattr(m.storage_data[place], "relative_path", name), "plain name")
    lie(lambda m: setattr(m.storage_data[place], "relative_path", "link.distcp"), "link.distcp")
    lie(lambda m: setattr(m.storage_data[place], "length", 1 << 60), "no file of at least")
    lie(lambda m: setattr(m.storage_data[place], "offset", -5), "no file")
    lie(lambda m: setattr(m.storage_data[place], "offset", 7), "shard of")
    entry = "model.inlet.weight"
    lie(lambda m: setattr(m.state_dict_metadata[entry], "size", torch.Size([2**40, 2**20])), "do not make up")
    lie(lambda m: m.state_dict_metadata[entry].chunks.clear(), "do not make up")
    lie(lambda m: m.state_dict_metadata[entry].chunks.append(m.state_dict_metadata[entry].chunks[0]), "do not make up")
    lie(lambda m: m.storage_data.clear(), "fit together")
    lie(lambda m: setattr(m, "state_dict_metadata", 7), "fit together")
    lie(lambda m: m.state_dict_metadata.pop("optim.state.inlet.weight.step"), "steps")
    lie(lambda m: m.state_dict_metadata.pop("optim.state.inlet.weight.exp_avg"), "without the other")
    lie(lambda m: m.state_dict_metadata.pop("model.inlet.weight"), "mappings")


def test_ties_must_hold_the_same_values(trained: Trained, opened: Any, tmp_path: Path) -> None:
    save_dcp(trained, tmp_path / "theirs")
    state = {f"model.{name}": torch.empty_like(value) for name, value in trained.model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    values = {name.removeprefix("model."): value.clone() for name, value in state.items()}
    values["tied.weight"] += 1
    dcp.save(values, checkpoint_id=tmp_path / "untied", no_dist=True)
    import_checkpoint(tmp_path / "untied", tmp_path / "saved")
    model = Net()
    engine = opened(model, adamw(model), ON_CPU)
    with refused(offload.CheckpointError, "inlet.weight", "tied.weight", "one parameter"):
        engine.load_checkpoint(tmp_path / "saved")


def test_what_cannot_be_imported(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refused(offload.CheckpointError, "empty", "model_states.pt", "'zero'", ".metadata"):
        import_checkpoint(tmp_path / "empty", tmp_path / "out")
    assert main(["import", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    (tmp_path / "empty" / "zero").mkdir()
    with refused(offload.CheckpointError, "fp32.pt"):
        import_checkpoint(tmp_path / "empty", tmp_path / "out")
    save_universal(trained, tmp_path / "stage3", 3)
    for path in (tmp_path / "stage3").glob("*model_states.pt"):
        path.unlink()
    with refused(offload.CheckpointError, "stage 3", "shape"):
        import_checkpoint(tmp_path / "stage3", tmp_path / "out")
    save_universal(trained, tmp_path / "steps", 2)
    torch.save(2.5, tmp_path / "steps" / "zero" / "inlet.bias" / "step.pt")
    with refused(offload.CheckpointError, "step.pt", "2.5"):
        import_checkpoint(tmp_path / "steps", tmp_path / "out")
    (tmp_path / "steps" / "zero" / "inlet.bias" / "fp32.pt").write_bytes(b"PK\3\4 no archive")
    with refused(offload.CheckpointError, "fp32.pt"):
        import_checkpoint(tmp_path / "steps", tmp_path / "out")
    assert not (tmp_path / "out").exists()


RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from tests.acceptance.models import adamw, stack
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = stack(width=17, blocks=1)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = adamw(model)
model(torch.ones(2, 17)).square().mean().backward()
optimizer.step()
state, states = get_state_dict(model, optimizer)
dcp.save({"model": state, "optim": states}, checkpoint_id=f"{folder}/theirs")
dist.barrier()
"""


@pytest.mark.slow
def test_fsdp_on_two_ranks(opened: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RANKS]
    root = Path(__file__).resolve().parents[2]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=root) for rank in range(2)]
    assert [process.wait(240) for process in ranks] == [0, 0]
    import_checkpoint(tmp_path / "theirs", tmp_path / "saved")
    plain = stack(width=17, blocks=1)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM_OPTIONS)
    plain(torch.ones(2, 17)).square().mean().backward()
    optimizer.step()
    model = stack(width=17, blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    engine.load_checkpoint(tmp_path / "saved")
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    entries = {entry["fqns"][0]: entry for entry in content_of(tmp_path / "saved")["parameters"]}
    assert all(entry["step"] == 1 for entry in entries.values()) and len(entries) == len(list(plain.parameters()))


DEEPSPEED = """
import argparse, os, sys
import torch
stage, folder = int(sys.argv[1]), sys.argv[2]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.checkpoint import ds_to_universal
from tests.acceptance.models import adamw
from tests.checkpoint.test_import import Net
store = torch.distributed.FileStore(f"{folder}/store", 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(1)
model = Net()
config = {"train_batch_size": 6, "zero_optimization": {"stage": stage}}
config |= {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
for n in range(3):
    engine.backward(engine(torch.randn(6, 16, generator=torch.Generator().manual_seed(n))).square().mean())
    engine.step()
engine.save_checkpoint(folder, tag="theirs")
ds_to_universal.main(argparse.Namespace(
    input_folder=f"{folder}/theirs", output_folder=f"{folder}/universal", num_extract_workers=1, num_merge_workers=1,
    keep_temp_folder=False, strict=True, inject_missing_state=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_itself(trained: Trained, opened: Any, tmp_path: Path, stage: int) -> None:
    """Where it is installed: what it trained, saved and converted is what plain PyTorch trained."""
    pytest.importorskip("deepspeed")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEED, str(stage), str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import_checkpoint(tmp_path / "universal", tmp_path / "saved")
    torch.manual_seed(5)
    model = Net()
    engine = opened(model, adamw(model), ON_NVME)
    engine.load_checkpoint(tmp_path / "saved")
    assert_close(engine.state_dict(), dict(trained.model.state_dict()))
    losses, weights = trained.go_on()
    assert_close(steps(model, engine.optimizer, 3, first=3), losses)
    assert_close(engine.state_dict(), weights)
