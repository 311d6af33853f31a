# SPDX-License-Identifier: Apache-2.0
"""How much host memory there is for this process: the least of what bounds it.

    physical memory   what the system can give without swapping
    control groups    of this process' group and every group above it (v1 and v2) the limit, less what is charged to it;
                      the page cache that is charged goes when memory is short, so it counts as free
    resource limits   RLIMIT_AS and RLIMIT_DATA, less what this process has mapped

Beyond the first the process slows down or is killed by the system, beyond the last its allocations fail. Everything that
asks how much memory there is asks here.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload.device.virtual.current import virtual_machine
from offload.errors import BudgetError

_PROC = Path("/proc")
_UNLIMITED = 1 << 60
"""Bytes. Groups of v1 say a number beyond this where v2 says "max"."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on memory, in bytes: all of it, and what is left."""

    name: str
    total_nbytes: int
    free_nbytes: int
    bounds_addresses: bool = False
    """Whether addresses count that nothing lies at."""


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """What the files of a memory controller are called. `cached`: fields of `stat` with what can be reclaimed, groups below
    included."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_V1 = _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _GroupFiles(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def host_memory_limit(proc: Path = _PROC) -> MemoryLimit:
    """The bound with the least left. `proc`: where the system describes this process."""
    return min(host_memory_limits(proc), key=lambda limit: limit.free_nbytes)


def refused_memory(nbytes: int, purpose: str, error: OSError) -> BudgetError:
    """The user's error where the system refused `nbytes` of host memory, or addresses for them."""
    limit = host_memory_limit()
    remedy = "lower cpu_memory, let more lie on nvme where some does not yet, or close other programs"
    if limit.name.startswith("RLIMIT"):
        remedy = f"raise that limit (ulimit {'-v' if limit.name.endswith('AS') else '-d'}), or {remedy}"
    return BudgetError(
        f"the system has no {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of host memory for {purpose} ({error.strerror}; "
        f"{limit.free_nbytes} bytes are left, by {limit.name}): {remedy}"
    )


def host_memory_limits(proc: Path = _PROC) -> list[MemoryLimit]:
    """Every bound there is, physical memory first."""
    if (machine := virtual_machine()) is not None:
        return [MemoryLimit("the machine's memory", machine.cpu_nbytes, machine.cpu_nbytes)]
    memory = psutil.virtual_memory()
    return [MemoryLimit("physical memory", memory.total, memory.available), *_group_limits(proc), *_resource_limits(proc)]


def _group_limits(proc: Path) -> Iterator[MemoryLimit]:
    for folder, top, files in _groups(proc):
        for group in (folder, *folder.parents):
            limits = [limit for name in files.limits if (limit := _number(group / name)) is not None and limit < _UNLIMITED]
            if limits:
                yield MemoryLimit(f"control group {group}", min(limits), max(min(limits) - _used_nbytes(group, files), 0))
            if group == top or _number(group.parent / "memory.use_hierarchy") == 0:
                break


def _used_nbytes(group: Path, files: _GroupFiles) -> int:
    stat = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines())
    return (_number(group / files.usage) or 0) - sum(int(stat.get(field, 0)) for field in files.cached)


def _groups(proc: Path) -> Iterator[tuple[Path, Path, _GroupFiles]]:
    """Of each memory controller that is mounted: the folder of this process' group, and that of the uppermost one seen."""
    mounts = [_Mount.of(line) for line in _text(proc / "self/mountinfo").splitlines()]
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            if not controllers and mount.kind == "cgroup2":
                yield mount.folder_of(path), mount.point, _V2
            elif "memory" in controllers.split(",") and mount.kind == "cgroup" and "memory" in mount.options:
                yield mount.folder_of(path), mount.point, _V1


@dataclass(frozen=True, slots=True)
class _Mount:
    kind: str
    options: list[str]
    root: str
    point: Path

    @staticmethod
    def of(line: str) -> _Mount:
        """From a line of mountinfo, in which blanks are written in octal."""
        where, _, what = line.partition(" - ")
        fields, (kind, _, options) = where.split(), what.split(maxsplit=2)
        root, point = (field.encode().decode("unicode_escape") for field in fields[3:5])
        return _Mount(kind, options.split(","), root, Path(point))

    def folder_of(self, path: str) -> Path:
        """Where the group `path` is seen. In a container its group may be what is mounted, whatever it is called outside."""
        inside = path.removeprefix(self.root) if self.root != "/" else path
        folder = self.point / inside.lstrip("/")
        return folder if ".." not in folder.parts and folder.is_dir() else self.point


def _resource_limits(proc: Path) -> Iterator[MemoryLimit]:
    status = dict(line.split(":", 1) for line in _text(proc / "self/status").splitlines() if ":" in line)
    for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            mapped_nbytes = 1024 * int(status.get(field, "0 kB").split()[0])
            yield MemoryLimit(name, limit, max(limit - mapped_nbytes, 0), bounds_addresses=name == "RLIMIT_AS")


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """ "" where it cannot be read: not every system has all of these files, nor lets all be seen."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
