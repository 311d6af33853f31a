# SPDX-License-Identifier: Apache-2.0
"""The format of docs/checkpoint-format.md, byte for byte: what is written, and that what was written once is read for good."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import offload
from offload.checkpoint.format.manifest import encode
from offload.checkpoint.format.manifest_decoding import decode

from ..acceptance.models import IN_MEMORY, ON_CPU, ON_NVME, Setup
from ..acceptance.runs import assert_same_bits

RANDOM = bytes(range(256)) * 2


class Tiny(nn.Module):
    """A trained matrix, a frozen 16-bit vector tied to a second name, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 0.0]]))
        self.scale = nn.Parameter(torch.tensor([1.0, 3.0, -1.0], dtype=torch.bfloat16), requires_grad=False)
        self.again = self.scale
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


# Written by hand from the page. 1.0, -2.0, 0.5, 0.0; no step was taken, so moments are zero.
UNIT_HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"exp_avg/weight":{"dtype":"F32","shape":[2,2],"data_offsets":[16,32]},'
    b'"exp_avg_sq/weight":{"dtype":"F32","shape":[2,2],"data_offsets":[32,48]},'
    b'"scale":{"dtype":"BF16","shape":[3],"data_offsets":[48,54]}}'
)
WEIGHT = b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x00\x00\x00\x3f\x00\x00\x00\x00"
ZEROS = bytes(16)
SCALE = b"\x80\x3f\x40\x40\x80\xbf"
BUFFER_HEADER = b'{"__metadata__":{"format":"pt"},"count":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}'
COUNT = b"\x07\x00\x00\x00\x00\x00\x00\x00"
RANDOM_HEADER = b'{"__metadata__":{"format":"pt"},"cpu":{"dtype":"U8","shape":[512],"data_offsets":[0,512]}}'


def file_bytes(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", 4088) + header.ljust(4088) + data


FILES = {
    "unit-00000-rank-00000.safetensors": file_bytes(UNIT_HEADER, WEIGHT + ZEROS + ZEROS + SCALE),
    "buffers-rank-00000.safetensors": file_bytes(BUFFER_HEADER, COUNT),
    "random-rank-00000.safetensors": file_bytes(RANDOM_HEADER, RANDOM),
}
BODY = (
    '"manifest":{"world_size":1,"step_count":0,'
    '"loss_scale":{"value":1.0,"dynamic":false,"good_step_count":0,"skipped_step_count":0},'
    '"optimizer":{"kind":"AdamW","param_groups":[{"lr":0.001,"betas":[0.9,0.999],"eps":1e-08,"weight_decay":0.01}]},'
    '"model":{"kind":"Tiny","configs":{},"kept_fqns":["scale"]},'
    '"parameters":[{"fqns":["weight"],"shape":[2,2],"stride":[2,1],"dtype":"F32","group":0,"step":0,"pieces":['
    '{"start":0,"stop":4,'
    '"value":{"file":"unit-00000-rank-00000.safetensors","dtype":"F32","offset":4096,"nbytes":16,"crc32":3564613810},'
    '"exp_avg":{"file":"unit-00000-rank-00000.safetensors","dtype":"F32","offset":4112,"nbytes":16,"crc32":3971697493},'
    '"exp_avg_sq":{"file":"unit-00000-rank-00000.safetensors","dtype":"F32","offset":4128,"nbytes":16,"crc32":3971697493}}]},'
    '{"fqns":["scale","again"],"shape":[3],"stride":[1],"dtype":"BF16","group":null,"step":0,"pieces":['
    '{"start":0,"stop":3,'
    '"value":{"file":"unit-00000-rank-00000.safetensors","dtype":"BF16","offset":4144,"nbytes":6,"crc32":131103111},'
    '"exp_avg":null,"exp_avg_sq":null}]}],'
    '"buffers":[{"fqn":"count","shape":[],'
    '"data":{"file":"buffers-rank-00000.safetensors","dtype":"I64","offset":4096,"nbytes":8,"crc32":1877464688}}],'
    '"random":[{"rank":0,'
    '"cpu":{"file":"random-rank-00000.safetensors","dtype":"U8","offset":4096,"nbytes":512,"crc32":476132726},"device":null}],'
    '"files":[{"name":"unit-00000-rank-00000.safetensors","nbytes":4150,"header_nbytes":4096,"header_crc32":2489964856},'
    '{"name":"buffers-rank-00000.safetensors","nbytes":4104,"header_nbytes":4096,"header_crc32":3771917744},'
    '{"name":"random-rank-00000.safetensors","nbytes":4608,"header_nbytes":4096,"header_crc32":836068764}],'
    '"client_state":{"epoch":2}}}\n'
)
HEAD = '{"format":"offload-checkpoint","version":1,"crc32":415851186,\n'

# Version 3: the same state, every array filled up to a chunk of 4096 elements.
PADDED_HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"padding/0":{"dtype":"F32","shape":[4092],"data_offsets":[16,16384]},'
    b'"exp_avg/weight":{"dtype":"F32","shape":[2,2],"data_offsets":[16384,16400]},'
    b'"padding/1":{"dtype":"F32","shape":[4092],"data_offsets":[16400,32768]},'
    b'"exp_avg_sq/weight":{"dtype":"F32","shape":[2,2],"data_offsets":[32768,32784]},'
    b'"padding/2":{"dtype":"F32","shape":[4092],"data_offsets":[32784,49152]},'
    b'"scale":{"dtype":"BF16","shape":[3],"data_offsets":[49152,49158]},'
    b'"padding/3":{"dtype":"BF16","shape":[4093],"data_offsets":[49158,57344]}}'
)
PADDED_FILES = FILES | {
    "unit-00000-rank-00000.safetensors": file_bytes(
        PADDED_HEADER, WEIGHT.ljust(16384, b"\0") + bytes(2 * 16384) + SCALE.ljust(8192, b"\0")
    )
}
UNIT = '{"file":"unit-00000-rank-00000.safetensors",'
PADDED_BODY = (
    BODY.replace('"offset":4112,', '"offset":20480,')
    .replace('"offset":4128,', '"offset":36864,')
    .replace('"offset":4144,', '"offset":53248,')
    .replace('"nbytes":4150,', '"nbytes":61440,')
    .replace("2489964856", "2763043978")
    .replace(
        '"client_state":{"epoch":2}}',
        '"client_state":{"epoch":2},"padding":['
        f'{UNIT}"dtype":"F32","offset":4112,"nbytes":16368,"crc32":1186386249}},'
        f'{UNIT}"dtype":"F32","offset":20496,"nbytes":16368,"crc32":1186386249}},'
        f'{UNIT}"dtype":"F32","offset":36880,"nbytes":16368,"crc32":1186386249}},'
        f'{UNIT}"dtype":"BF16","offset":53254,"nbytes":8186,"crc32":3438706911}}]}}',
    )
)
PADDED_HEAD = '{"format":"offload-checkpoint","version":3,"crc32":2260086538,\n'

# Version 4: the same without the frozen vector.
PARTIAL_HEADER = PADDED_HEADER.split(b',"scale"')[0] + b"}"
PARTIAL_FILES = FILES | {
    "unit-00000-rank-00000.safetensors": file_bytes(PARTIAL_HEADER, WEIGHT.ljust(16384, b"\0") + bytes(2 * 16384))
}
_SCALE_PIECE = (
    f'{{"start":0,"stop":3,"value":{UNIT}"dtype":"BF16","offset":53248,"nbytes":6,"crc32":131103111}},'
    '"exp_avg":null,"exp_avg_sq":null}'
)
PARTIAL_BODY = (
    PADDED_BODY.replace(_SCALE_PIECE, "")
    .replace(f',{UNIT}"dtype":"BF16","offset":53254,"nbytes":8186,"crc32":3438706911}}]', '],"without_frozen":true')
    .replace('"nbytes":61440,', '"nbytes":53248,')
    .replace("2763043978", "857578408")
)
PARTIAL_HEAD = '{"format":"offload-checkpoint","version":4,"crc32":2685115210,\n'
WRITTEN = {1: (HEAD, BODY, FILES), 3: (PADDED_HEAD, PADDED_BODY, PADDED_FILES), 4: (PARTIAL_HEAD, PARTIAL_BODY, PARTIAL_FILES)}


def engine_of(opened: Any, setup: Setup) -> Any:
    torch.manual_seed(1)
    model = Tiny()
    engine = opened(model, torch.optim.AdamW([model.weight]), setup)
    group = engine.optimizer.param_groups[0]
    for key in set(group) - {"params", "lr", "betas", "eps", "weight_decay"}:
        del group[key]  # what torch puts there differs from release to release
    engine.optimizer.param_groups[0] = {
        "params": group["params"], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01
    }  # fmt: skip
    return engine


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_what_is_written(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, version: int) -> None:
    state = torch.frombuffer(bytearray(RANDOM), dtype=torch.uint8)
    monkeypatch.setattr(torch, "get_rng_state", lambda: state)
    engine = engine_of(opened, setup)
    engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 2}, without_frozen=version == 4)
    found = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    manifest = found.pop("MANIFEST.json").decode()
    head, body, files = WRITTEN[version]
    assert found == files
    assert manifest == head + body


@pytest.mark.parametrize("version", WRITTEN)
def test_the_lowest_version_that_can_say_it(version: int) -> None:
    content = "".join(WRITTEN[version][:2]).encode()
    assert encode(decode(content, "x")) == content


@pytest.mark.parametrize("version", WRITTEN)
def test_the_checksums_are_those_of_the_page(version: int) -> None:
    head, body, files = WRITTEN[version][0].encode(), WRITTEN[version][1].encode(), WRITTEN[version][2]
    assert json.loads(head + body)["crc32"] == zlib.crc32(body)
    content = json.loads(head + body)["manifest"]
    for file in content["files"]:
        data = files[file["name"]]
        assert file["nbytes"] == len(data)
        assert file["header_crc32"] == zlib.crc32(data[: file["header_nbytes"]])
    ranges = [
        *(piece[kind] for entry in content["parameters"] for piece in entry["pieces"] for kind in KINDS if piece[kind]),
        *(entry["data"] for entry in content["buffers"]),
        *(entry["cpu"] for entry in content["random"]),
        *content.get("padding", ()),
    ]
    assert len(ranges) == {1: 6, 3: 10, 4: 8}[version]
    for one in ranges:
        data = files[one["file"]][one["offset"] : one["offset"] + one["nbytes"]]
        assert len(data) == one["nbytes"] and one["crc32"] == zlib.crc32(data)


KINDS = ("value", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("version", WRITTEN)
@pytest.mark.parametrize("setup", [IN_MEMORY, ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_versions_of_runs_are_read(opened: Any, tmp_path: Path, setup: Setup, version: int) -> None:
    """From the literal bytes, with this torch's random state in the place of the literal one."""
    folder = tmp_path / "saved"
    folder.mkdir()
    state = bytes(torch.get_rng_state().numpy())
    _, body, files = WRITTEN[version]
    for name, content in files.items():
        if name.startswith("random"):
            header = RANDOM_HEADER.replace(b"512", str(len(state)).encode())
            content = file_bytes(header, state)
            old = json.loads(HEAD + BODY)["manifest"]
            body = body.replace(
                f'"nbytes":512,"crc32":{old["random"][0]["cpu"]["crc32"]}', f'"nbytes":{len(state)},"crc32":{zlib.crc32(state)}'
            )
            body = body.replace(
                f'"nbytes":4608,"header_nbytes":4096,"header_crc32":{old["files"][2]["header_crc32"]}',
                f'"nbytes":{len(content)},"header_nbytes":4096,"header_crc32":{zlib.crc32(content[:4096])}',
            )
        (folder / name).write_bytes(content)
    head = f'{{"format":"offload-checkpoint","version":{version},"crc32":{zlib.crc32(body.encode())},\n'
    (folder / "MANIFEST.json").write_text(head + body)
    engine = engine_of(opened, setup)
    with engine.gathered(list(engine.module.parameters())), torch.no_grad():
        engine.module.weight.fill_(9.0)
        engine.module.scale.fill_(9.0)
    engine.module.count.fill_(0)
    assert engine.load_checkpoint(folder) == {"epoch": 2}
    own = {name: torch.full((3,), 9.0, dtype=torch.bfloat16) for name in ("scale", "again")} if version == 4 else {}
    assert_same_bits(engine.state_dict(), Tiny().state_dict() | own)


def test_other_tools_read_the_files(opened: Any, tmp_path: Path) -> None:
    engine = engine_of(opened, ON_NVME)
    engine.module(torch.ones(1, 2)).sum().backward()
    engine.step()
    engine.zero_grad()
    engine.save_checkpoint(tmp_path / "saved")
    path = tmp_path / "saved" / "unit-00000-rank-00000.safetensors"
    held = load_file(path)
    assert_same_bits({name: held[name] for name in ("weight", "scale")}, {
        name: engine.state_dict()[name] for name in ("weight", "scale")
    })  # fmt: skip
    torch.testing.assert_close(held["exp_avg/weight"], torch.full((2, 2), 0.1))
    with safe_open(path, "pt") as opened_file:
        assert opened_file.metadata() == {"format": "pt"}


def test_the_page_names_every_key() -> None:
    page = (Path(offload.__file__).parent.parent / "docs" / "checkpoint-format.md").read_text()

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for item in value.values() for key in keys(item)}
        return {key for item in value for key in keys(item)} if isinstance(value, list) else set()

    content = json.loads(PARTIAL_HEAD + PARTIAL_BODY)
    del content["manifest"]["optimizer"]["param_groups"], content["manifest"]["client_state"]
    assert [key for key in keys(content) - {"manifest"} if f"`{key}`" not in page] == []


IMPORTED_HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"exp_avg/weight":{"dtype":"F32","shape":[2,2],"data_offsets":[16,32]},'
    b'"exp_avg_sq/weight":{"dtype":"F32","shape":[2,2],"data_offsets":[32,48]},'
    b'"again":{"dtype":"BF16","shape":[3],"data_offsets":[48,54]}}'
)
IMPORTED_FILE = file_bytes(IMPORTED_HEADER, WEIGHT + ZEROS + ZEROS + SCALE)


def imported_body() -> str:
    """By hand as well, but for the checksum of a header that differs in one name."""
    place = '"file":"part-00000.safetensors","dtype":"F32"'
    return (
        '"manifest":{"world_size":1,"step_count":9,'
        '"loss_scale":{"value":1.0,"dynamic":false,"good_step_count":0,"skipped_step_count":0},'
        '"optimizer":null,"model":{"kind":"","configs":{},"kept_fqns":[]},'
        '"parameters":[{"fqns":["weight"],"shape":[2,2],"stride":[2,1],"dtype":"F32","group":0,"step":9,"pieces":['
        '{"start":0,"stop":4,'
        f'"value":{{{place},"offset":4096,"nbytes":16,"crc32":3564613810}},'
        f'"exp_avg":{{{place},"offset":4112,"nbytes":16,"crc32":3971697493}},'
        f'"exp_avg_sq":{{{place},"offset":4128,"nbytes":16,"crc32":3971697493}}}}]}},'
        '{"fqns":["again"],"shape":[3],"stride":[1],"dtype":"BF16","group":null,"step":0,"pieces":[{"start":0,"stop":3,'
        '"value":{"file":"part-00000.safetensors","dtype":"BF16","offset":4144,"nbytes":6,"crc32":131103111},'
        '"exp_avg":null,"exp_avg_sq":null}]}],'
        '"buffers":[],"random":[],'
        '"files":[{"name":"part-00000.safetensors","nbytes":4150,"header_nbytes":4096,'
        f'"header_crc32":{zlib.crc32(IMPORTED_FILE[:4096])}}}],'
        '"client_state":{},"imported":"torch-dcp"}}\n'
    )


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_version_2_is_read_and_written(opened: Any, tmp_path: Path, setup: Setup) -> None:
    body = imported_body()
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "part-00000.safetensors").write_bytes(IMPORTED_FILE)
    content = f'{{"format":"offload-checkpoint","version":2,"crc32":{zlib.crc32(body.encode())},\n{body}'.encode()
    (folder / "MANIFEST.json").write_bytes(content)
    assert encode(decode(content, "x")) == content
    engine = engine_of(opened, setup)
    with engine.gathered(list(engine.module.parameters())), torch.no_grad():
        engine.module.weight.fill_(9.0)
        engine.module.scale.fill_(9.0)
    engine.module.count.fill_(5)
    draw = torch.get_rng_state()
    assert engine.load_checkpoint(folder) == {}
    assert_same_bits(engine.state_dict(), Tiny().state_dict() | {"count": torch.tensor(5)})
    assert torch.equal(torch.get_rng_state(), draw)
    assert engine.stats()["steps"] == 9 and engine.optimizer.param_groups[0]["lr"] == 1e-3
