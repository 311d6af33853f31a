"""A machine in numbers: described ones lie in `machines/`, with where each number comes from beside it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are a second: bytes, or floating-point operations. Sizes are bytes that training may use."""

    name: str
    device_nbytes: float
    cpu_nbytes: float
    nvme_nbytes: float
    flops: float
    """Of matrix products in 16 bits, as training reaches them."""
    device_bandwidth: float
    h2d: float
    d2h: float
    memory_bandwidth: float
    nvme_read: float
    nvme_write: float
    nvme_both: float
    """Reads and writes at once, together."""
    launch_seconds: float
    """Of the host's thread, to give the device one operation."""
    call_seconds: float
    """Of the host's thread, for each copy, transfer or pass over memory that the engine asks for."""


NUMBERS = tuple(field.name for field in dataclasses.fields(Machine) if field.name != "name")


def described() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_machine(name: str, **overrides: float | None) -> Machine:
    """The machine of that name, or of that JSON file; `overrides` that are not None take the place of its numbers.

    A file is an object with `name` and, for each other field of `Machine`, a number or an object with `value` and `source`.
    Raises `ConfigError`."""
    path = FOLDER / f"{name}.json" if name in described() else Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no machine {name!r}: expected {', '.join(described())}, or the path of a JSON file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a machine: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} cannot be read as a machine: it is no JSON object.")
    unknown = sorted(set(content) - {"name", "description", *NUMBERS})
    if unknown:
        raise ConfigError(f"{str(path)!r}: a machine has no {unknown[0]!r}; expected {', '.join(NUMBERS)}.")
    numbers = {field: _number(content.get(field), path, field) for field in NUMBERS if overrides.get(field) is None}
    given = {field: value for field, value in overrides.items() if value is not None}
    return Machine(name=str(content.get("name", path.stem)), **{**numbers, **given})


def _number(value: Any, path: Path, field: str) -> float:
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{str(path)!r}: {field} is {value!r}, expected a number above 0.")
    return float(value)
