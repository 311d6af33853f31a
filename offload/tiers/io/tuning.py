"""What a drive was measured to want: block size and number of blocks in flight, remembered from run to run.

    $XDG_CACHE_HOME/offload/io.json      (~/.cache/offload/io.json)

    {"version": 1, "devices": {"<device>": {"<backend>": {"block_nbytes": 1048576, "queue_depth": 32}}}}

`python -m offload bench io` writes it, every engine reads it. The file may be deleted at any time; where it is missing,
unreadable or wrong in any part, the backend's defaults take the place of that part. No number in it changes a result.
A device is named by the UUID of its file system, or by what the drive says of itself, so that an entry stays true when
drives change places.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = 1
BLOCK_NBYTES_RANGE = (4096, 64 * 1024 * 1024)
QUEUE_DEPTH_RANGE = (1, 1024)
_FILE_NBYTES_MAX = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IoSettings:
    """How a backend cuts transfers and how many of the pieces it keeps in flight."""

    block_nbytes: int
    queue_depth: int


def settings_path() -> Path | None:
    """Where settings are remembered; None where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):
        return Path(base) / "offload" / "io.json"
    try:
        return Path.home() / ".cache" / "offload" / "io.json"
    except RuntimeError:
        return None


def device_of(path: str | os.PathLike[str]) -> str:
    """A name for the device that `path` lies on, the same in the next run."""
    device = os.stat(path).st_dev
    return _file_system_uuid(device) or _drive_name(device) or f"device {os.major(device)}:{os.minor(device)}"


def remembered(device: str, backend: str) -> IoSettings | None:
    """What was measured for the device with that backend, if that is known and makes sense."""
    entry = _as_mapping(_as_mapping(_read().get("devices")).get(device)).get(backend)
    return _settings_of(entry)


def remember(device: str, backend: str, settings: IoSettings) -> Path:
    """Keep `settings` for later runs; returns the file. Others may read and write at the same time. Raises `OSError`."""
    path = settings_path()
    if path is None:
        raise OSError(2, "there is no home folder to remember settings in: set XDG_CACHE_HOME")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        devices = _as_mapping(_read().get("devices"))
        devices[device] = _as_mapping(devices.get(device)) | {backend: asdict(settings)}
        text = json.dumps({"version": VERSION, "devices": devices}, indent=1, sort_keys=True) + "\n"
        fileno, name = tempfile.mkstemp(dir=path.parent, prefix=".io-", suffix=".json")
        try:
            with open(fileno, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    return path


def _read() -> dict[str, Any]:
    path = settings_path()
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_FILE_NBYTES_MAX))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is ignored: %s; it may be deleted, and `python -m offload bench io` makes it anew", path, error)
        return {}
    content = _as_mapping(content)
    return content if content.get("version") == VERSION else {}


def _as_mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _settings_of(entry: object) -> IoSettings | None:
    fields = _as_mapping(entry)
    block_nbytes, queue_depth = fields.get("block_nbytes"), fields.get("queue_depth")
    if not _is_within(block_nbytes, BLOCK_NBYTES_RANGE) or not _is_within(queue_depth, QUEUE_DEPTH_RANGE):
        return None
    assert isinstance(block_nbytes, int) and isinstance(queue_depth, int)
    return IoSettings(block_nbytes, queue_depth) if block_nbytes % BLOCK_NBYTES_RANGE[0] == 0 else None


def _is_within(value: object, limits: tuple[int, int]) -> bool:
    return type(value) is int and limits[0] <= value <= limits[1]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fileno = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fileno)


def _file_system_uuid(device: int) -> str:
    """From udev's links; "" where there are none (containers) or the file system is on no block device of its own."""
    try:
        entries = sorted(Path("/dev/disk/by-uuid").iterdir())
    except OSError:
        return ""
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.stat().st_rdev == device:
                return f"uuid {entry.name}"
    return ""


def _drive_name(device: int) -> str:
    """What the block device says of itself, and which part of it; "" where it says nothing that tells it from others."""
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    part = _attribute(place / "partition")
    drive = place.resolve().parent if part else place
    for name in ("dm/uuid", "md/uuid", "wwid", "device/wwid", "serial", "device/serial"):
        value = _attribute(drive / name)
        if value:
            return " ".join(filter(None, ("drive", _attribute(drive / "device/model"), value, part)))
    return ""


def _attribute(path: Path) -> str:
    try:
        return " ".join(path.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return ""
