# SPDX-License-Identifier: Apache-2.0
"""How much memory there is: physical memory, control groups of both versions, resource limits; and that "auto" goes by it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.device.host_memory.memory_limits import MemoryLimit, host_memory_limit, host_memory_limits

MIB = 1 << 20


class System:
    """A /proc and a tree of control groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.top = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mounts: list[str] = ["22 1 0:21 / /proc rw,relatime - proc proc rw"]

    def mount(self, kind: str, name: str = "", root: str = "/") -> Path:
        """One hierarchy: "cgroup2", or "cgroup" with the memory controller."""
        point = self.top / name
        point.mkdir(parents=True, exist_ok=True)
        options = "rw" if kind == "cgroup2" else "rw,memory"
        self.mounts.append(f"31 23 0:28 {root} {point} rw,nosuid shared:9 - {kind} {kind} {options}")
        return point

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("\n".join(lines) + "\n")
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")

    def bounds(self) -> list[MemoryLimit]:
        """All but physical memory."""
        return host_memory_limits(self.proc)[1:]


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def group(folder: Path, stat: dict[str, int] | None = None, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in (stat or {}).items()))
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_without_limits_it_is_physical_memory(system: System) -> None:
    top = system.mount("cgroup2")
    group(top / "user", max="max", high="max", current=5 * MIB)
    system.belongs_to("0::/user")
    assert system.bounds() == []
    room = host_memory_limit(system.proc)
    assert room.name == "physical memory" and 0 < room.free_nbytes <= room.total_nbytes


def test_the_page_cache_of_a_group_is_free(system: System) -> None:
    top = system.mount("cgroup2")
    cached = {"anon": 100 * MIB, "file": 70 * MIB, "active_file": 20 * MIB, "inactive_file": 30 * MIB, "slab_reclaimable": MIB}
    group(top / "job", cached, max=800 * MIB, high="max", current=160 * MIB)
    system.belongs_to("0::/job")
    assert host_memory_limit(system.proc) == MemoryLimit(f"control group {top / 'job'}", 800 * MIB, (800 - 160 + 51) * MIB)


def test_high_bounds_as_max_does(system: System) -> None:
    top = system.mount("cgroup2")
    group(top / "job", max=800 * MIB, high=600 * MIB, current=100 * MIB)
    system.belongs_to("0::/job")
    assert [(room.total_nbytes, room.free_nbytes) for room in system.bounds()] == [(600 * MIB, 500 * MIB)]


def test_every_group_above_bounds_too(system: System) -> None:
    """What counts is what is left: of a larger limit that others use up it may be less."""
    top = system.mount("cgroup2")
    group(top / "all/mine/job", max=500 * MIB, current=100 * MIB)
    group(top / "all/mine", max="max", current=900 * MIB)
    group(top / "all", max=1000 * MIB, current=1100 * MIB)
    system.belongs_to("0::/all/mine/job")
    assert [room.free_nbytes for room in system.bounds()] == [400 * MIB, 0]
    assert host_memory_limit(system.proc).name == f"control group {top / 'all'}"


def test_version_1(system: System) -> None:
    """Beside it lies the hierarchy of version 2 without controllers, as systemd mounts them."""
    system.mount("cgroup2", "unified")
    top = system.mount("cgroup", "memory")
    stat = {"active_file": 1, "total_active_file": 40 * MIB, "total_inactive_file": 10 * MIB}
    group(top / "docker/abc", stat, limit_in_bytes=800 * MIB, usage_in_bytes=300 * MIB)
    group(top / "docker", limit_in_bytes=9223372036854771712, usage_in_bytes=300 * MIB, use_hierarchy=1)
    group(top, limit_in_bytes=700 * MIB, usage_in_bytes=350 * MIB, use_hierarchy=1)
    system.belongs_to("5:cpu,memory:/docker/abc", "1:name=systemd:/docker/abc", "0::/")
    assert [(room.total_nbytes, room.free_nbytes) for room in system.bounds()] == [
        (800 * MIB, 550 * MIB),
        (700 * MIB, 350 * MIB),
    ]


def test_version_1_without_hierarchy(system: System) -> None:
    """What is above does not bound what is below there."""
    top = system.mount("cgroup", "memory")
    group(top / "job", limit_in_bytes=800 * MIB, usage_in_bytes=0)
    group(top, limit_in_bytes=100 * MIB, usage_in_bytes=0, use_hierarchy=0)
    system.belongs_to("5:memory:/job")
    assert [room.total_nbytes for room in system.bounds()] == [800 * MIB]


@pytest.mark.parametrize(
    ("root", "path"),
    [("/", "/"), ("/docker/abc", "/docker/abc"), ("/", "/docker/abc"), ("/docker/abc", "/../.."), ("/..", "/../other")],
)
def test_in_a_container_its_own_group_is_what_is_mounted(system: System, root: str, path: str) -> None:
    top = system.mount("cgroup2", root=root)
    group(top, max=300 * MIB, current=100 * MIB)
    system.belongs_to(f"0::{path}")
    assert host_memory_limit(system.proc) == MemoryLimit(f"control group {top}", 300 * MIB, 200 * MIB)


def test_a_system_that_shows_nothing(tmp_path: Path) -> None:
    assert host_memory_limit(tmp_path / "none").name == "physical memory"


@pytest.mark.parametrize(("which", "field"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_resource_limits(which: str, field: str) -> None:
    """Set for a moment, far from where anything would fail."""
    status = Path("/proc/self/status").read_text().splitlines()
    mapped = 1024 * int(next(line.split()[1] for line in status if line.startswith(field + ":")))
    kind, limit = getattr(resource, which), mapped + 4096 * MIB
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        (room,) = (room for room in host_memory_limits() if room.name == which)
    finally:
        resource.setrlimit(kind, before)
    assert room.total_nbytes == limit and abs(room.free_nbytes - 4096 * MIB) < 256 * MIB


# ---- "auto" under real limits --------------------------------------------------------------------------------------------

MODEL_MIB, ROOM_MIB = 72, 320
SCRIPT = """
import os, resource, sys
import torch, offload
from torch import nn
from offload.device.host_memory.memory_limits import host_memory_limit

torch.set_num_threads(1)

def train(layers, config):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    with offload.initialize(model, torch.optim.AdamW(model.parameters()), config) as engine:
        for _ in range(2):
            model(torch.ones(2, 1024)).square().mean().backward()
            engine.step()
            engine.zero_grad()
        stats = engine.stats()
        planned = sum(line["nbytes"] for line in stats["planned"] if line["tier"] != "nvme")
    places = stats["placement"]
    print("nvme" if "nvme" in places.values() else places["optimizer_states"], planned >> 20, host_memory_limit().name)

train(1, {})  # whatever the libraries map at their first use is there then
nvme, room, layers = sys.argv[1], int(sys.argv[2]) << 20, int(sys.argv[3]) // 4
LIMIT
try:
    train(layers, {"nvme": nvme})
    train(2 * layers, {})
except offload.BudgetError as error:
    print("refused:", error)
"""
IN_ADDRESS_SPACE = """
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
"""
IN_GROUP = """
open("GROUP/cgroup.procs", "w").write(str(os.getpid()))
hog = torch.ones((host_memory_limit().free_nbytes - room) // 4)
"""


def check_that_auto_is_within(tmp_path: Path, limit: str, name: str) -> None:
    """In memory everything would take four times the model: too much, so a part goes to NVMe, and without it nowhere."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("LIMIT", limit))
    environment = os.environ | {"OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(ROOM_MIB), str(MODEL_MIB)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (MIB, resource.RLIM_INFINITY)),  # of each thread
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    free, limited, refused = done.stdout.splitlines()
    assert free.split()[0] != "nvme"
    placed, planned, where = limited.split(maxsplit=2)
    assert placed == "nvme" and int(planned) <= 0.8 * ROOM_MIB < 4 * MODEL_MIB and name in where
    assert refused.startswith("refused:") and name in refused and "nvme=" in refused


def test_auto_plans_within_a_resource_limit(tmp_path: Path) -> None:
    check_that_auto_is_within(tmp_path, IN_ADDRESS_SPACE, "RLIMIT_AS")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group below that of this process, with 900 MiB; skips where none can be made."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in groups if "memory" in controllers.split(",")), None)
    if own is None:
        pytest.skip("no hierarchy of version 1: version 2 lets none be made below a group with processes")
    folder = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"offload-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(900 * MIB))
        yield folder
    finally:
        folder.rmdir()


def test_auto_plans_within_a_control_group(tmp_path: Path, small_group: Path) -> None:
    check_that_auto_is_within(tmp_path, IN_GROUP.replace("GROUP", str(small_group)), str(small_group))
