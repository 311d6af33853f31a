# SPDX-License-Identifier: Apache-2.0
"""What others wrote may be anything: an import takes it, or refuses it by an error of this package before it takes memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import offload
from offload.checkpoint_import.converting import import_checkpoint
from offload.model.weights import open_weights

from ..acceptance.models import ON_CPU, adamw, stack
from ..acceptance.runs import assert_same_bits, refused
from .test_import import Trained, save_dcp, save_universal, trained

__all__ = ["trained"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 5, 2**31, 2**62, -(2**70), 1e300, float("nan"), "", "../x", "__metadata__", "\0", b"x"),
    *([], [[]], {}, {"w": 5}, [-2, -3], (2**40, 2**40), {"param": None}, ["a", ["b"]], (-1,)),
    *(torch.zeros(1).expand(2**34), torch.zeros(0), torch.tensor(float("inf")), torch.tensor([1 + 2j]), torch.tensor([True])),
    *(torch.tensor(-3), torch.eye(3).to_sparse(), torch.empty(2, device="meta"), torch.ones(4).as_strided((2**20,), (0,))),
)


def universal(folder: Path, content: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A universal checkpoint of one parameter "w" [2, 3], with some of it replaced."""
    (folder / "zero" / "w").mkdir(parents=True)
    states = {"param_shapes": [{"w": torch.Size([2, 3])}], "buffer_names": [], "module": {}, "global_steps": 3} | (
        content or {}
    )
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    whole = {"fp32": torch.ones(6), "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)} | tensors
    for name, tensor in whole.items():
        torch.save(tensor, folder / "zero" / "w" / f"{name}.pt")
    return folder


@pytest.mark.parametrize(
    ("content", "tensors", "words"),
    [
        ({"param_shapes": {"w": 5}}, {}, ("'w'", "5")),
        ({"param_shapes": [{"w": 5}]}, {}, ("'w'", "5")),
        ({"param_shapes": [{"w": [-2, -3]}]}, {}, ("'w'", "-2")),
        ({"buffer_names": [["a"]]}, {}, ("buffer_names",)),
        ({"global_steps": -3}, {}, ("global_steps", "-3")),
        ({"global_steps": 3, "skipped_steps": 5}, {}, ("skipped",)),
        ({}, {"step": torch.tensor(-1.0)}, ("step.pt", "-1")),
        ({}, {"fp32": torch.zeros(1).expand(2**34)}, ("fp32.pt", "17179869184")),
        ({"param_shapes": [{"w": [2**34]}]}, {"fp32": torch.zeros(1).expand(2**34)}, ("fp32.pt", "17179869184")),
        ({}, {"exp_avg": torch.ones(2, 3, dtype=torch.int32)}, ("exp_avg.pt",)),
        ({}, {"exp_avg": torch.eye(3).to_sparse()}, ("exp_avg.pt", "sparse")),
        ({"module": {"b": torch.zeros(1).expand(2**34)}, "buffer_names": ["b"]}, {}, ("17179869184",)),
    ],
    ids=lambda one: "-".join(one) or "sound" if isinstance(one, dict) else "",
)
def test_universal_checkpoints_that_lie(tmp_path: Path, content: Any, tensors: Any, words: Any) -> None:
    universal(tmp_path / "theirs", content, **tensors)
    with refused(offload.CheckpointError, "cannot be imported", *words):
        import_checkpoint(tmp_path / "theirs", tmp_path / "out")
    universal(tmp_path / "sound")
    import_checkpoint(tmp_path / "sound", tmp_path / "good")


class Unsafe:
    def __reduce__(self) -> Any:
        return os.getpid, ()


def test_torchs_advice_is_not_passed_on(trained: Trained, tmp_path: Path) -> None:
    for name, content in (("class", Unsafe()), ("nothing", b"\x80\x02}."), ("zip", b"PK\3\4")):
        universal(tmp_path / name)
        path = tmp_path / name / "zero" / "w" / "fp32.pt"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(offload.CheckpointError, match=r"fp32\.pt") as caught:
            import_checkpoint(tmp_path / name, tmp_path / "out")
        assert "weights_only" not in str(caught.value) and "add_safe_globals" not in str(caught.value)
        assert name != "class" or "getpid" in str(caught.value)


def test_dcp_that_lies(trained: Trained, tmp_path: Path) -> None:
    save_dcp(trained, tmp_path / "dcp")
    sound = (tmp_path / "dcp" / ".metadata").read_bytes()
    entry = "model.inlet.weight"
    place = MetadataIndex(entry, torch.Size([0, 0]))

    def huge(metadata: Any) -> None:
        """Shards of which each lies inside a file, and which together are 2**50 elements."""
        one, size = metadata.state_dict_metadata[entry], 2**25
        one.size, one.chunks[0].sizes = torch.Size([size, size]), torch.Size([size, size])

    def step(metadata: Any) -> None:
        metadata.state_dict_metadata["optim.state.inlet.weight.step"] = metadata.state_dict_metadata["model.inlet.bias"]

    for change, words in (
        (huge, ("33554432", "bytes")),
        (step, ("step",)),
        (lambda m: setattr(m.state_dict_metadata[entry], "size", (-16, -16)), ("-16",)),
        (lambda m: m.planner_data.update({entry: [["model"], "x"]}), ("keys",)),
        (lambda m: setattr(m.storage_data[place], "relative_path", "a\0b"), ("read",)),
    ):
        metadata = pickle.loads(sound)
        change(metadata)
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
        with refused(offload.CheckpointError, "cannot be imported", *words):
            import_checkpoint(tmp_path / "dcp", tmp_path / "out")


def test_large_shards_are_read_in_several_calls(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads 2,147,479,552 bytes at most at once; here 100."""
    save_dcp(trained, tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "expected")
    at_once = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fileno, views, *rest: at_once(fileno, [views[0][:100]], *rest))
    monkeypatch.setattr(os, "pread", lambda fileno, nbytes, offset: b"" if nbytes > 10**6 else b"short")
    import_checkpoint(tmp_path / "dcp", tmp_path / "ours")
    monkeypatch.undo()
    for path in (tmp_path / "expected").iterdir():
        assert path.read_bytes() == (tmp_path / "ours" / path.name).read_bytes(), path.name


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_integers_do_not_become_weights(opened: Any, tmp_path: Path) -> None:
    model = nn.Module()
    model.weight, model.counts = (
        nn.Parameter(torch.zeros(4)),
        nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False),
    )
    model.register_buffer("mask", torch.zeros(4, dtype=torch.bool))

    def given(**state: torch.Tensor) -> Any:
        save_file(
            {"weight": torch.ones(4), "counts": torch.ones(4, dtype=torch.int64), "mask": torch.ones(4) > 0} | state, path
        )
        return open_weights(path).match(model)

    path = tmp_path / "model.safetensors"
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert given(weight=torch.ones(4, dtype=dtype))
    assert given(counts=torch.ones(4, dtype=torch.int32))
    for name, dtype in (("weight", torch.int32), ("weight", torch.bool), ("weight", torch.complex64), ("mask", torch.uint8)):
        with refused(offload.InitializerError, name, str(dtype), "unasked"):
            given(**{name: torch.ones(4, dtype=dtype)})
    with refused(offload.InitializerError, "counts", "torch.float32"):
        given(counts=torch.ones(4))

    model = stack(blocks=1)
    engine = opened(model, adamw(model), ON_CPU)
    state = engine.state_dict()
    with refused(offload.UsageError, "inlet.bias", "torch.int32"):
        engine.load_state_dict(state | {"inlet.bias": torch.ones(16, dtype=torch.int32)})
    assert_same_bits(engine.state_dict(), state)


def _irregular(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(path.parent / "gone")
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link", "device"])
def test_what_is_no_file_is_refused_at_once(trained: Trained, tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for, a device read for ever."""
    model = stack(blocks=1)
    for name in ("model.safetensors", "model.safetensors.index.json", "x.safetensors"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        _irregular(folder / name, kind)
        for path in (folder / name,) if name.startswith("x") else (folder / name, folder):
            if (path.suffix, kind) != (".safetensors", "folder") or path == folder:
                with refused(offload.InitializerError, str(folder)):
                    offload.initialize(model, adamw(model), weights=path)
    index = tmp_path / "index" / "model.safetensors.index.json"
    index.parent.mkdir()
    _irregular(index.parent / "part", kind)
    index.write_text(json.dumps({"weight_map": {"w": "part"}}))
    with refused(offload.InitializerError, "part"):
        offload.initialize(model, adamw(model), weights=index)
    for name in ("mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/w/step.pt", "zero/w/fp32.pt", ".metadata"):
        folder = universal(tmp_path / name.replace("/", "-"))
        (folder / name).unlink(missing_ok=True)
        _irregular(folder / name, kind)
        for importer in ("deepspeed-universal", "torch-dcp"):
            _takes_or_refuses(lambda: import_checkpoint(folder, tmp_path / "out", importer))  # noqa: B023


# ---- random changes --------------------------------------------------------------------------------------------------


def _takes_or_refuses(attempt: Callable[[], Any]) -> bool:
    """Any other exception fails the test."""
    try:
        attempt()
        return True
    except offload.OffloadError:
        return False


def _changed(value: Any, draw: random.Random) -> Any:
    """A copy of nested plain values and objects with one of them replaced, dropped or doubled."""
    inside = _children(value)
    if not inside or draw.random() < 0.15:
        return draw.choice(HOSTILE)
    key = draw.choice(list(inside))
    child = _changed(inside[key], draw) if draw.random() < 0.8 else draw.choice(HOSTILE)
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name is not key or draw.random() < 0.8}
        return kept | {key: child}
    if isinstance(value, (list, tuple)):
        items = [child if index == key else one for index, one in enumerate(value)]
        return items if draw.random() < 0.5 else tuple(items)
    copied = pickle.loads(pickle.dumps(value))
    object.__setattr__(copied, key, child)
    return copied


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return dict(vars(value)) if type(value).__module__.startswith("torch.distributed") and hasattr(value, "__dict__") else {}


def test_random_changes_to_universal_checkpoints(trained: Trained, tmp_path: Path) -> None:
    draw = random.Random(1)
    taken = 0
    for stage in (2, 3):
        save_universal(trained, folder := tmp_path / f"stage-{stage}", stage)
        files = sorted(folder.rglob("*.pt"))
        contents = {path: torch.load(path, weights_only=True) for path in files}
        states = [path for path in files if "model_states" in path.name]
        for number in range(100):
            path = draw.choice(states if draw.random() < 0.6 else files)
            sound = path.read_bytes()
            if draw.random() < 0.8:
                torch.save(_changed(contents[path], draw), path)
            else:
                path.write_bytes(_bent(sound, draw))
            taken += _takes_or_refuses(lambda: import_checkpoint(folder, tmp_path / f"out-{stage}-{number}"))  # noqa: B023
            path.write_bytes(sound)
    assert 20 < taken < 180


def test_random_changes_to_dcp(trained: Trained, tmp_path: Path) -> None:
    draw = random.Random(2)
    save_dcp(trained, folder := tmp_path / "dcp")
    taken = 0
    for number in range(200):
        path = folder / (".metadata" if draw.random() < 0.8 else "__0_0.distcp")
        sound = path.read_bytes()
        if path.name == ".metadata" and draw.random() < 0.8:
            path.write_bytes(pickle.dumps(_changed(pickle.loads(sound), draw)))
        else:
            path.write_bytes(_bent(sound, draw))
        taken += _takes_or_refuses(lambda: import_checkpoint(folder, tmp_path / f"out-{number}"))  # noqa: B023
        path.write_bytes(sound)
    assert 5 < taken < 190


def test_random_changes_to_weights(tmp_path: Path) -> None:
    draw = random.Random(3)
    model = stack(blocks=1)
    names = sorted(state := dict(model.state_dict()))
    for part in (0, 1):
        save_file({name: state[name] for name in names[part::2]}, tmp_path / f"part-{part}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"part-{position % 2}.safetensors" for position, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = [one for one in HOSTILE if isinstance(one, (int, float, str, list, dict, tuple, type(None)))]
    taken = 0
    for _ in range(200):
        path = draw.choice(sorted(tmp_path.iterdir()))
        sound = path.read_bytes()
        if path.suffix == ".json":
            path.write_text(json.dumps(_changed(index, draw) if draw.random() < 0.5 else draw.choice(plain), default=str))
        elif draw.random() < 0.7:
            nbytes = struct.unpack("<Q", sound[:8])[0]
            header = json.dumps(_changed(json.loads(sound[8 : 8 + nbytes]), draw), default=str).encode()
            path.write_bytes(struct.pack("<Q", len(header)) + header + sound[8 + nbytes :])
        else:
            path.write_bytes(_bent(sound, draw))

        def attempt() -> None:
            source = open_weights(tmp_path)
            for name in source.match(model).values():
                source.load(name)

        taken += _takes_or_refuses(attempt)
        path.write_bytes(sound)
    assert 5 < taken < 190


def _bent(content: bytes, draw: random.Random) -> bytes:
    """Cut short, or with some bytes changed."""
    if draw.random() < 0.3:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 64))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)
