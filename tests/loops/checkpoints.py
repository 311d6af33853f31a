# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, read by the format's page alone (docs/checkpoint-format.md)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def _manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "MANIFEST.json").read_text())["manifest"]
    return content


def position_of(folder: Path) -> int:
    """Where in its program the checkpoint was saved."""
    position: int = _manifest(folder)["client_state"]["position"]
    return position


def contents_of(folder: Path) -> dict[str, str]:
    """By name of a thing, its value: digests of weights, moments, buffers and random states, and the plain numbers."""
    manifest = _manifest(folder)
    files: dict[str, bytes] = {}

    def bytes_of(entry: dict[str, Any]) -> bytes:
        if entry["file"] not in files:
            files[entry["file"]] = (folder / entry["file"]).read_bytes()
        return files[entry["file"]][entry["offset"] : entry["offset"] + entry["nbytes"]]

    found = {"steps": repr(manifest["step_count"]), "optimizer": json.dumps(manifest["optimizer"], sort_keys=True)}
    found["loss scale"] = json.dumps(manifest["loss_scale"], sort_keys=True)
    for parameter in manifest["parameters"]:
        name = parameter["fqns"][0]
        found[f"{name}: updates"] = repr(parameter["step"] or 0)
        # An interrupted forward may have given states to what is newly trained: before the first update they say nothing.
        for array in ("value", "exp_avg", "exp_avg_sq") if parameter["step"] else ("value",):
            pieces = sorted(parameter["pieces"], key=lambda piece: int(piece["start"]))
            held = b"".join(bytes_of(piece[array]) for piece in pieces if piece[array] is not None)
            found[f"{name}: {array}"] = hashlib.sha256(held).hexdigest()
    for buffer in manifest["buffers"]:
        found[f"{buffer['fqn']}: buffer"] = hashlib.sha256(bytes_of(buffer["data"])).hexdigest()
    for random in manifest["random"]:
        found[f"random {random['rank']}"] = hashlib.sha256(bytes_of(random["cpu"])).hexdigest()
    return found
