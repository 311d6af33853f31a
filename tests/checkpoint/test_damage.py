# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged or made to do harm: an error that names the file, and an engine that is as it was."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import offload

from ..acceptance.models import adamw, stack
from ..acceptance.runs import assert_same_bits, refused
from .rewriting import content_of, signed

MANY = settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Target:
    """One engine, one sound checkpoint, and a copy of it that a test damages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sound, self.damaged = root / "sound", root / "damaged"
        torch.manual_seed(1)
        model = stack(width=4, blocks=1)
        model.register_buffer("mean", torch.arange(3.0))
        self.engine = offload.initialize(model, adamw(model), offload.Config(parameters="cpu", optimizer_states="cpu"))
        one_step_of(self.engine)
        self.engine.save_checkpoint(self.sound, client_state={"n": 1})
        one_step_of(self.engine)
        self.weights = self.engine.state_dict()
        self.random = torch.get_rng_state()
        shutil.copytree(self.sound, self.damaged)
        self.names = sorted(os.listdir(self.sound))
        self.content = content_of(self.sound)

    def restore(self, name: str) -> None:
        (self.damaged / name).unlink(missing_ok=True)
        shutil.copy(self.sound / name, self.damaged / name)

    def load(self) -> str | None:
        """The refusal's message, or None where the checkpoint was loaded; anything else fails the test."""
        before = sorted(str(path) for path in self.root.rglob("*"))
        torch.set_rng_state(self.random)
        try:
            self.engine.load_checkpoint(self.damaged)
        except offload.CheckpointError as error:
            assert str(self.damaged) in str(error)
            assert torch.equal(torch.get_rng_state(), self.random)
            assert_same_bits(self.engine.state_dict(), self.weights)
            return str(error)
        finally:
            assert sorted(str(path) for path in self.root.rglob("*")) == before
        self.engine.load_checkpoint(self.sound)
        one_step_of(self.engine)
        assert_same_bits(self.engine.state_dict(), self.weights)
        return None


def one_step_of(engine: Any) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    engine.module(x).square().mean().backward()
    engine.step()
    engine.zero_grad()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        made = Target(tmp_path_factory.mktemp("damage"))
        yield made
        made.engine.close()


@MANY
@given(data=st.data())
def test_changed_bytes(target: Target, data: st.DataObject) -> None:
    """Any flipped bits, cut, longer, emptied or exchanged file is found out."""
    name = data.draw(st.sampled_from(target.names))
    content = bytearray((target.sound / name).read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "zero", "insert", "delete"]))
    position = data.draw(st.integers(0, len(content) - 1))
    before = bytes(content)
    if kind == "flip":
        content[position] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[position:]
    elif kind == "grow":
        content += bytes(data.draw(st.integers(1, 9)))
    elif kind == "zero":
        stop = data.draw(st.integers(position + 1, len(content)))
        content[position:stop] = bytes(stop - position)
    elif kind == "insert":
        content.insert(position, data.draw(st.integers(0, 255)))
    else:
        del content[position]
    (target.damaged / name).write_bytes(content)
    try:
        message = target.load()
    finally:
        target.restore(name)
    if bytes(content) == before:
        assert message is None
    else:
        assert message is not None and name in message


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(item, (*path, key))


STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.just(2**63), st.just(2**64 - 1), st.just(10**30), st.floats(),
    st.sampled_from(["", "..", "../sound/MANIFEST.json", "/etc/passwd", "a/b.safetensors", "MANIFEST.json", "F64", "x" * 300]),
    st.just([]), st.just({}), st.lists(st.integers(-1, 5), max_size=3),
)  # fmt: skip


@MANY
@given(data=st.data())
def test_signed_manifests_that_say_something_else(target: Target, data: st.DataObject) -> None:
    """With a right checksum: either it is refused, or what it says can be done; nothing else ever happens."""
    content = copy.deepcopy(target.content)
    places = [place for place in places_in(content) if place[0] not in ("client_state", "model")]
    for _ in range(data.draw(st.integers(1, 2))):
        *way, last = data.draw(st.sampled_from(places))
        holder: Any = content
        try:
            for key in way:
                holder = holder[key]
            action = data.draw(st.sampled_from(["set", "delete", "double"]))
            if action == "set":
                holder[last] = data.draw(STRANGE)
            elif action == "delete":
                del holder[last]
            elif isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            else:
                holder[f"{last}s"] = copy.deepcopy(holder[last])
        except (KeyError, IndexError, TypeError):
            continue  # the first change took this place away
    (target.damaged / "MANIFEST.json").write_bytes(signed(content))
    groups = [dict(group) for group in target.engine.optimizer.param_groups]
    try:
        target.load()
    finally:
        target.restore("MANIFEST.json")
        for group, before in zip(target.engine.optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


@MANY
@given(text=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode), st.just(b"[" * 100_000)))
def test_anything_for_a_manifest(target: Target, text: bytes) -> None:
    (target.damaged / "MANIFEST.json").write_bytes(text)
    try:
        assert target.load() is not None
    finally:
        target.restore("MANIFEST.json")


ANYTHING = {"text": st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "drawn"),
    [(test_changed_bytes, {"data": st.data()}), (test_signed_manifests_that_say_something_else, {"data": st.data()}),
     (test_anything_for_a_manifest, ANYTHING)],
    ids=["bytes", "signed", "anything"],
)  # fmt: skip
def test_ten_thousand_mutations(target: Target, test: Any, drawn: dict[str, Any]) -> None:
    """The tests above, 3,400 times each, from another seed at every run."""
    often = settings(max_examples=3400, derandomize=False, database=None, suppress_health_check=list(HealthCheck))
    often(given(**drawn)(lambda **values: test.hypothesis.inner_test(target, **values)))()


@pytest.mark.parametrize(
    "before, after", [(b"{", b"\t{"), (b'":', b'": '), (b"\n", b" \n"), (b"\n", b"\r\n"), (b'"crc32"', b'"crc\\u0033\\u0032"')]
)
def test_a_first_line_that_says_the_same_in_other_bytes(target: Target, before: bytes, after: bytes) -> None:
    path = target.damaged / "MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(before, after, 1))
    assert "first line" in (target.load() or "")
    target.restore("MANIFEST.json")


@pytest.mark.parametrize("version", [0, 5, "1", None, True, 1.5, [1]])
def test_other_versions(target: Target, version: Any) -> None:
    (target.damaged / "MANIFEST.json").write_bytes(signed(target.content, version))
    message = target.load()
    target.restore("MANIFEST.json")
    assert message is not None and "version" in message and "reads 1, 2, 3" in message


def test_versions_that_are_not_what_they_say(target: Target) -> None:
    plain = {key: value for key, value in target.content.items() if key != "padding"}
    cases = (
        (2, plain, "imported"),
        (1, plain | {"imported": "x"}, "imported"),
        (3, plain, "padding"),
        (1, target.content, "padding"),
    )
    for version, content, key in cases:
        (target.damaged / "MANIFEST.json").write_bytes(signed(content, version))
        message = target.load()
        target.restore("MANIFEST.json")
        assert message is not None and f"'{key}'" in message


@pytest.mark.parametrize("kind", ["missing", "link", "fifo", "folder", "unreadable link"])
@pytest.mark.parametrize("which", ["MANIFEST.json", "unit-00000-rank-00000.safetensors"])
def test_what_is_no_regular_file(target: Target, kind: str, which: str) -> None:
    path = target.damaged / which
    path.unlink()
    if kind == "link":
        path.symlink_to(target.sound / which)
    elif kind == "unreadable link":
        path.symlink_to(target.root / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    message = target.load()
    if kind == "folder":
        path.rmdir()
    target.restore(which)
    assert message is not None and which in message


def test_names_that_lead_elsewhere(target: Target) -> None:
    (target.root / "outside.safetensors").write_bytes((target.sound / "unit-00000-rank-00000.safetensors").read_bytes())
    for name in ("../outside.safetensors", f"{target.root}/outside.safetensors", "./x.safetensors", "..", "a\0b.safetensors"):
        text = json.dumps(target.content).replace("unit-00000-rank-00000.safetensors", json.dumps(name)[1:-1])
        (target.damaged / "MANIFEST.json").write_bytes(signed(json.loads(text)))
        message = target.load()
        target.restore("MANIFEST.json")
        assert message is not None and "file name" in message


def test_files_of_two_checkpoints_are_not_mixed(target: Target) -> None:
    """Same names, same sizes, other contents: the manifest's checksums tell."""
    target.engine.save_checkpoint(target.root / "other")
    name = "unit-00000-rank-00000.safetensors"
    shutil.copy(target.root / "other" / name, target.damaged / name)
    message = target.load()
    target.restore(name)
    shutil.rmtree(target.root / "other")
    assert message is not None and name in message and "checksum" in message


def test_a_large_parameter_in_the_manifest_allocates_nothing(target: Target) -> None:
    content = copy.deepcopy(target.content)
    content["parameters"][0]["shape"] = [2**40, 2**20]
    (target.damaged / "MANIFEST.json").write_bytes(signed(content))
    message = target.load()
    target.restore("MANIFEST.json")
    assert message is not None and "shape" in message


def test_the_damaged_copy_is_sound_again(target: Target) -> None:
    """The restores above do restore: else every refusal could be one of an earlier test's damage."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target.load() is None
    with refused(offload.CheckpointError, "nowhere"):
        target.engine.load_checkpoint(target.root / "nowhere")
