# SPDX-License-Identifier: Apache-2.0
"""A machine in numbers: described ones lie in `machines/`, with where each number comes from beside it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from offload.errors import ConfigError

FOLDER = Path(__file__).parent / "machines"

Kind = Literal["gpu", "unified", "cpu"]
"""What computes: a device with memory of its own, a device on host memory, or the cores that everything else runs on."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are a second: bytes, or floating-point operations. Sizes are bytes that training may use."""

    name: str
    kind: Kind
    device_nbytes: float
    """Where the device has no memory of its own, infinite: `cpu_nbytes` bounds it."""
    cpu_nbytes: float
    nvme_nbytes: float
    flops: float
    """Of matrix products in 16 bits, as training reaches them."""
    flops_32: float
    """The same in 32 bits."""
    device_bandwidth: float
    """Of the memory that the model computes on, as its operations reach it."""
    h2d: float
    """Infinite, as `d2h`, where the device computes on host memory."""
    d2h: float
    peer: float
    """What a device sends others of its kind, as much as it receives from them at once; 0 where they have no link of their own,
    so that it goes through host memory. A file may leave it out."""
    memory_bandwidth: float
    """Of host memory: what everything that reads or writes there has together."""
    nvme_read: float
    nvme_write: float
    nvme_both: float
    """Reads and writes at once, together."""
    nvme_core: float
    """What one core hands to the drives and takes from them, checksums included; it counts where the model computes on the
    cores. A file may leave it out: then that takes no time."""
    nvme_drives: float
    """How many drives those rates and `nvme_nbytes` are of."""
    nvme_endurance: float
    """Bytes that may be written to the drives, as their makers rate them."""
    launch_seconds: float
    """Of the host's thread, to give the device one operation."""
    call_seconds: float
    """Of the host's thread, for each copy, transfer or pass over memory that the engine asks for, with what leads to it."""

    @property
    def exchange(self) -> float:
        """Bytes a second that a rank sends the others, as it receives as many: over `peer`, or over its own links and host
        memory."""
        return self.peer or min(self.h2d, self.d2h, self.memory_bandwidth / 2)

    @property
    def is_unified(self) -> bool:
        """Whether the model computes on host memory."""
        return self.kind != "gpu"

    @property
    def model_tier(self) -> Literal["device", "cpu"]:
        """In whose memory the model computes."""
        return "cpu" if self.is_unified else "device"

    def as_json(self, sources: dict[str, str]) -> dict[str, Any]:
        """The object that `read_machine` reads. `sources`: by field, where its number comes from."""
        numbers = {field: value for field in NUMBERS if math.isfinite(value := getattr(self, field)) and value}
        valued = {field: {"value": value, "source": sources.get(field, "")} for field, value in numbers.items()}
        return {"name": self.name, "kind": self.kind, **valued}


NUMBERS = tuple(field.name for field in dataclasses.fields(Machine) if field.name not in ("name", "kind"))
_OF_A_DEVICE = ("device_nbytes", "h2d", "d2h")
"""Infinite where the device computes on host memory."""


def described() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_machine(name: str, **overrides: float | None) -> Machine:
    """The machine of that name, or of that JSON file; `overrides` that are not None take the place of its numbers.

    A file is an object with `name`, `kind` ("gpu" where it is missing) and, for each other field of `Machine`, a number or
    an object with `value` and `source`. Raises `ConfigError`."""
    path = FOLDER / f"{name}.json" if name in described() else Path(name)
    if not path.is_file():
        close = difflib.get_close_matches(name, described(), n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        known = ", ".join(described())
        raise ConfigError(f"there is no machine {name!r}: expected this, {known}, or the path of a JSON file.{meant}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a machine: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} cannot be read as a machine: it is no JSON object.")
    unknown = sorted(set(content) - {"name", "kind", "description", *NUMBERS})
    if unknown:
        raise ConfigError(f"{str(path)!r}: a machine has no {unknown[0]!r}; expected {', '.join(NUMBERS)}.")
    kind = content.get("kind", "gpu")
    if kind not in KINDS:
        raise ConfigError(f"{str(path)!r}: kind is {kind!r}, expected {', '.join(KINDS)}.")
    assumed = {"peer": 0.0, "nvme_core": math.inf, **(dict.fromkeys(_OF_A_DEVICE, math.inf) if kind != "gpu" else {})}
    numbers = {
        field: assumed[field] if field in assumed and field not in content else _number(content.get(field), path, field)
        for field in NUMBERS
    }
    return changed(Machine(name=str(content.get("name", path.stem)), kind=kind, **numbers), **overrides)


def changed(machine: Machine, **overrides: float | None) -> Machine:
    """The same with other numbers, where they are not None."""
    return dataclasses.replace(machine, **{field: value for field, value in overrides.items() if value is not None})  # type: ignore[arg-type]


def share_of(machine: Machine, rank_count: int) -> Machine:
    """What one of so many ranks has of a workstation with as many devices like the machine's: a device and its links for
    itself, an equal part of the rates of what they share. Sizes stay those of all."""
    shared = ["memory_bandwidth", "nvme_read", "nvme_write", "nvme_both"]
    if machine.kind == "cpu":
        shared += ["flops", "flops_32", "device_bandwidth"]
    return changed(machine, **{field: getattr(machine, field) / rank_count for field in shared})


def write_machine(machine: Machine, sources: dict[str, str], path: str | Path) -> None:
    """A file that `read_machine` reads. Raises `ConfigError`."""
    try:
        Path(path).write_text(json.dumps(machine.as_json(sources), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the machine cannot be written to {str(path)!r}: {error.strerror}") from error


def _number(value: Any, path: Path, field: str) -> float:
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{str(path)!r}: {field} is {value!r}, expected a number above 0.")
    return float(value)
