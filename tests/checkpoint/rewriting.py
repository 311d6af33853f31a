# SPDX-License-Identifier: Apache-2.0
"""Checkpoints changed and signed anew, as a hostile or a differently laid out writer would make them."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any


def content_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "MANIFEST.json").read_text())["manifest"]


def signed(content: Any, version: Any = ...) -> bytes:
    """A manifest with the right checksum, whatever is in it. `version`: else the one that its keys are of."""
    version = (3 if "padding" in content else 1) if version is ... else version
    body = b'"manifest":' + json.dumps(content).encode() + b"}\n"
    return f'{{"format":"offload-checkpoint","version":{json.dumps(version)},"crc32":{zlib.crc32(body)},\n'.encode() + body


def split_over_ranks(source: Path, target: Path) -> None:
    """Cut every parameter in two, the second part into files of rank 1, without padding: version 1."""
    shutil.copytree(source, target)
    content = content_of(target)
    del content["padding"]
    second: dict[str, bytearray] = {}
    for parameter in content["parameters"]:
        (piece,) = parameter["pieces"]
        middle = piece["stop"] // 3
        parts = [piece | {"stop": middle}, piece | {"start": middle}]
        for kind in ("value", "exp_avg", "exp_avg_sq"):
            entry = piece[kind]
            data = (source / entry["file"]).read_bytes()[entry["offset"] : entry["offset"] + entry["nbytes"]]
            cut = 4 * middle
            name = entry["file"].replace("rank-00000", "rank-00001")
            into = second.setdefault(name, bytearray(b"HEAD"))
            parts[1][kind] = entry | {
                "file": name, "offset": len(into), "nbytes": len(data) - cut, "crc32": zlib.crc32(data[cut:])
            }  # fmt: skip
            into += data[cut:]
            parts[0][kind] = entry | {"nbytes": cut, "crc32": zlib.crc32(data[:cut])}
        parameter["pieces"] = parts
    _close_gaps(target, content)
    for name, data in second.items():
        (target / name).write_bytes(data)
        header = {"header_nbytes": 4, "header_crc32": zlib.crc32(b"HEAD")}
        content["files"].append({"name": name, "nbytes": len(data)} | header)
    content["world_size"] = 2
    content["random"].append(content["random"][0] | {"rank": 1, "cpu": _again(target, content)})
    (target / "MANIFEST.json").write_bytes(signed(content))


def _close_gaps(target: Path, content: dict[str, Any]) -> None:
    """Write the files of rank 0 anew with what is left in them."""
    entries = [
        parameter["pieces"][0][kind] for parameter in content["parameters"] for kind in ("value", "exp_avg", "exp_avg_sq")
    ]
    for file in content["files"]:
        if not file["name"].startswith("unit"):
            continue
        data = (target / file["name"]).read_bytes()
        kept = bytearray(data[: file["header_nbytes"]])
        for entry in entries:
            if entry["file"] == file["name"]:
                part = data[entry["offset"] : entry["offset"] + entry["nbytes"]]
                entry["offset"] = len(kept)
                kept += part
        file["nbytes"] = len(kept)
        (target / file["name"]).write_bytes(kept)


def _again(target: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The random state of rank 0 in a file of rank 1."""
    entry = content["random"][0]["cpu"]
    name = entry["file"].replace("rank-00000", "rank-00001")
    shutil.copy(target / entry["file"], target / name)
    (file,) = [file for file in content["files"] if file["name"] == entry["file"]]
    content["files"].append(file | {"name": name})
    return entry | {"file": name}
