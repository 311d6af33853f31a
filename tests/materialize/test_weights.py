# SPDX-License-Identifier: Apache-2.0
"""Local safetensors: found, matched strictly, loaded one at a time."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file, save_model
from torch import nn

from offload.deferred_init.deferred_init import deferred_init
from offload.errors import InitializerError
from offload.model.weights import INDEX_FILE, SINGLE_FILE, open_weights


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))


def _save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{index:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index_file = folder / INDEX_FILE
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index_file


@pytest.mark.parametrize("form", ["file", "folder", "sharded", "index", "linked"])
def test_every_form_gives_the_tensors(form: str, tmp_path: Path) -> None:
    state = _model().state_dict()
    path = tmp_path
    if form in ("sharded", "index"):
        index = _save_sharded(tmp_path, state)
        path = index if form == "index" else tmp_path
    elif form == "linked":
        (tmp_path / "blob").mkdir()
        save_file(state, tmp_path / "blob" / "abc")
        (tmp_path / SINGLE_FILE).symlink_to(tmp_path / "blob" / "abc")
    else:
        save_file(state, tmp_path / SINGLE_FILE)
        path = tmp_path / SINGLE_FILE if form == "file" else tmp_path
    source = open_weights(path)
    assert source.names() == sorted(state)
    for name, tensor in state.items():
        loaded = source.load(name)
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor) and source.shape(name) == tensor.shape
        loaded.zero_()  # the caller's own memory
        assert torch.equal(source.load(name), tensor)


@pytest.mark.parametrize("deferred", [False, True])
def test_match_covers_parameters_and_persistent_buffers(deferred: bool, tmp_path: Path) -> None:
    save_file(_model().state_dict(), tmp_path / SINGLE_FILE)
    if deferred:
        with deferred_init():
            model = _model()
    else:
        model = _model().half()  # another dtype is fine
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    assert open_weights(tmp_path).match(model) == {name: name for name in _model().state_dict()}


def test_match_lists_every_difference(tmp_path: Path) -> None:
    state = _model().state_dict()
    del state["0.bias"], state["1.running_mean"]
    state["2.weight"] = torch.ones(2, 9)
    state.update({f"extra.{index:02}": torch.ones(1) for index in range(13)})
    save_file(state, tmp_path / SINGLE_FILE)
    with pytest.raises(InitializerError) as caught:
        open_weights(tmp_path).match(_model())
    text = str(caught.value)
    assert "2 missing: 0.bias [3], 1.running_mean [3];" in text
    assert "13 unexpected: extra.00 [1]" in text and "extra.09 [1] and 3 more" in text and "extra.10" not in text
    assert "1 of another shape: 2.weight (model: [2, 3], file: [2, 9])" in text
    assert str(tmp_path) in text and "Sequential" in text and "configuration" in text


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_tied_parameters_need_one_name(names: list[str], tmp_path: Path) -> None:
    save_file({name: torch.ones(7, 3) for name in names}, tmp_path / SINGLE_FILE)
    assert open_weights(tmp_path).match(Tied()) == {"embed.weight": names[0]}


def test_tied_parameters_with_two_values_are_refused(tmp_path: Path) -> None:
    different = torch.ones(7, 3)
    different[6, 2] = 2
    save_file({"embed.weight": torch.ones(7, 3), "head.weight": different}, tmp_path / SINGLE_FILE)
    with pytest.raises(InitializerError, match=r"different values for 'embed\.weight' and 'head\.weight'"):
        open_weights(tmp_path).match(Tied())


def test_torch_checkpoint_of_a_tied_model(tmp_path: Path) -> None:
    save_model(Tied(), str(tmp_path / SINGLE_FILE))
    assert list(open_weights(tmp_path).match(Tied())) == ["embed.weight"]


class Base(nn.Module):
    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = (r"masked_bias$",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Headed(nn.Module):
    base_model_prefix = "model"
    _keys_to_ignore_on_load_missing = (r"^head\.",)

    def __init__(self) -> None:
        super().__init__()
        self.model = Base()
        self.head = nn.Linear(2, 2, bias=False)


def test_prefix_is_added_and_taken_away(tmp_path: Path) -> None:
    save_file(Base().state_dict(), tmp_path / "base.safetensors")
    save_file(Headed().model.state_dict(prefix="model."), tmp_path / "headed.safetensors")
    expected = {f"layer.{name}": f"layer.{name}" for name in ("weight", "bias")}
    assert open_weights(tmp_path / "base.safetensors").match(Headed()) == {
        f"model.{fqn}": name for fqn, name in expected.items()
    }
    assert open_weights(tmp_path / "headed.safetensors").match(Base()) == {
        fqn: f"model.{name}" for fqn, name in expected.items()
    }


def test_names_which_the_model_ignores(tmp_path: Path) -> None:
    save_file({**Base().state_dict(), "layer.masked_bias": torch.ones(1)}, tmp_path / SINGLE_FILE)
    assert open_weights(tmp_path).match(Base()) == {"layer.weight": "layer.weight", "layer.bias": "layer.bias"}


def test_one_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    save_file({**Base().state_dict(), **Base().state_dict(prefix="model.")}, tmp_path / SINGLE_FILE)
    with pytest.raises(InitializerError, match=r"holds both .*layer\.(weight|bias)"):
        open_weights(tmp_path).match(Base())


def test_hugging_face_checkpoints(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    saved = transformers.GPT2LMHeadModel(config)
    saved.save_pretrained(tmp_path / "whole", max_shard_size="30KB")
    saved.transformer.save_pretrained(tmp_path / "base")
    assert (tmp_path / "whole" / INDEX_FILE).exists()
    with deferred_init():
        model = transformers.GPT2LMHeadModel(config)
    for folder in ("whole", "base"):
        source = open_weights(tmp_path / folder)
        matched = source.match(model)
        assert list(matched) == [name for name, _ in model.named_parameters()]
        for fqn, name in matched.items():
            assert torch.equal(source.load(name), saved.get_parameter(fqn))


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(InitializerError, match=r"nowhere does not exist"):
        open_weights(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InitializerError, match=rf"neither {SINGLE_FILE} nor {INDEX_FILE}"):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".", "a\\b", "a\0b"])
def test_index_entries_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InitializerError, match="only plain names of files"):
        open_weights(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"])
def test_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(InitializerError, match=INDEX_FILE):
        open_weights(tmp_path)


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "x.safetensors", "v": "x.safetensors"}}))
    with pytest.raises(InitializerError, match=r"'v' is in x\.safetensors, which does not hold it"):
        open_weights(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "y.safetensors"}}))
    with pytest.raises(InitializerError, match=r"y\.safetensors cannot be read"):
        open_weights(tmp_path)


def test_unknown_name(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / SINGLE_FILE)
    with pytest.raises(InitializerError, match=r"holds no tensor 'v'"):
        open_weights(tmp_path).load("v")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupted_headers_name_the_file(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever happens to the header: everything that is named can be read, or the error names the file."""
    file = tmp_path / SINGLE_FILE
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, file)
    content = bytearray(file.read_bytes())
    (header_nbytes,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + header_nbytes - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, 8 + header_nbytes, 9, 5]))])
    try:
        source = open_weights(tmp_path)
        for name in source.names():
            source.load(name)
    except InitializerError as error:
        assert SINGLE_FILE in str(error)


def test_memory_of_loading(tmp_path: Path) -> None:
    save_file({str(index): torch.zeros(8_000_000) for index in range(10)}, tmp_path / SINGLE_FILE)  # 10 x 32 MB
    script = f"""
        import resource, torch
        from offload.model.weights import open_weights
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        source = open_weights({str(tmp_path)!r})
        base = peak()
        for name in source.names():
            source.load(name)
        print(peak() - base)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3 * 32e6  # one tensor, and the mapping from which it is copied
