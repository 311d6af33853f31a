# SPDX-License-Identifier: Apache-2.0
"""File I/O of this package against fio and DeepSpeed's async_io: rates and processor time, in one run on one machine.

    python benchmarks/io.py --nvme /mnt/nvme0 --out docs/performance/io.json

Every contender first gets its own best block size and depth (a short sweep). Then all take turns, a fraction of a second
for each column, in an order that moves on with every round, so that a drive that drifts does so for all of them; the
figures are medians over the rounds. Columns: read alone, write alone, both at once (bytes half and half), on one file
and on two. Processor time is user and system time of the process that asks for the I/O, without its start.

How much memory the transfers are from matters by itself: a few MiB that are used over and over stay in the processor's caches.
A training step moves other memory all the time. So this package and fio's best engines run in both ways.

fio runs io_uring (with registered buffers and files), libaio and psync, each from 4 KiB pages and from huge pages
(--iomem=mmaphuge where enough are reserved, --reserve-huge-pages does that as root and takes it back; else malloc on
transparent huge pages by glibc). DeepSpeed runs in the interpreter given by --deepspeed-python. What is not installed is
left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio_peer import AioPeer
from machine import describe_machine
from own_io import OwnEngine

MIB = 1 << 20
COLUMNS = ("read", "write", "both")
Setting = tuple[int, int]
"""Bytes of a block, blocks in flight."""
GRID: tuple[Setting, ...] = tuple((block, depth) for block in (MIB // 4, MIB, 4 * MIB) for depth in (4, 16, 64))
IN_FLIGHT_MAX = 64 * MIB
STEP_TRANSFERS = 16 * MIB, 6
SMALL_TRANSFERS = 2 * MIB, 4
"""Bytes of one, how many at once."""
STEP_MEMORY_NBYTES = STEP_TRANSFERS[0] * STEP_TRANSFERS[1]
TIE = 0.03


@dataclass(frozen=True)
class Sample:
    """What one turn moved, and what it took."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_seconds / (self.nbytes / 1e9)


class Contender(ABC):
    """One way to do I/O."""

    name: str
    settings: tuple[Setting, ...] = tuple(one for one in GRID if one[0] * one[1] <= IN_FLIGHT_MAX)

    @abstractmethod
    def turn(self, column: str, files: list[Path], setting: Setting, seconds: float) -> Sample:
        """Do it for so long."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds."""


class Fio(Contender):
    """fio as a process for each turn, `huge` or not; `step`: from as much memory as a step's transfers are from."""

    def __init__(self, engine: str, huge: bool, step: bool = False) -> None:
        memory = f"{STEP_MEMORY_NBYTES // MIB} MiB of huge" if step else "huge" if huge else "4 KiB"
        self.name = f"fio {engine}, {memory} pages"
        self._engine, self._huge = engine, huge
        if step:
            self.settings = tuple((block * MIB, STEP_MEMORY_NBYTES // (block * MIB)) for block in (1, 4, 16))

    def turn(self, column: str, files: list[Path], setting: Setting, seconds: float) -> Sample:
        block, depth = setting
        size = files[0].stat().st_size * len(files)
        command = ["fio", "--name=turn", "--direct=1", "--time_based", f"--runtime={max(int(seconds * 1000), 1)}ms"]
        command += [f"--ioengine={self._engine}", f"--bs={block}", "--filename=" + ":".join(map(str, files))]
        command += ["--output-format=json", "--group_reporting", "--thread", f"--rw={'rw' if column == 'both' else column}"]
        command += ["--scramble_buffers=0", "--gtod_reduce=1", "--allow_file_create=0"]  # what costs it processor time
        jobs = depth if self._engine == "psync" else 1
        if jobs > 1:
            part = size // len(files) // jobs // block * block
            command += [f"--numjobs={jobs}", f"--offset_increment={part}", f"--size={part}"]
        else:
            command += [f"--iodepth={depth}", f"--size={size}", "--file_service_type=roundrobin"]
        if self._engine == "io_uring":
            command += ["--fixedbufs", "--registerfiles"]
        environment = dict(os.environ)
        if self._huge and free_huge_pages() * 2 * MIB >= 2 * block * depth:
            command.append("--iomem=mmaphuge")
        elif self._huge:
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()} {done.stdout.strip()[-500:]}")
        report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        nbytes = report["read"]["io_bytes"] + report["write"]["io_bytes"]
        wall = max(report["read"]["runtime"], report["write"]["runtime"]) / 1000
        cpu = (report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1000
        return Sample(nbytes, wall, cpu)


class Own(Contender):
    """This package's engine, in this process; `step`: with a step's transfers, else with smaller ones from less memory."""

    def __init__(self, step: bool) -> None:
        transfer_nbytes, count = STEP_TRANSFERS if step else SMALL_TRANSFERS
        self.name = f"offload, {transfer_nbytes * count // MIB} MiB of huge pages"
        self._engine = OwnEngine(transfer_nbytes, count)

    def turn(self, column: str, files: list[Path], setting: Setting, seconds: float) -> Sample:
        return Sample(*self._engine.turn(column, files, setting, seconds))


class DeepSpeed(Contender):
    """DeepSpeed's async_io in a process of another interpreter."""

    name = "DeepSpeed async_io"

    def __init__(self, python: str) -> None:
        self._peer = AioPeer(python)

    def turn(self, column: str, files: list[Path], setting: Setting, seconds: float) -> Sample:
        return Sample(*self._peer.turn(column, files, setting, seconds))

    def close(self) -> None:
        self._peer.close()


def free_huge_pages() -> int:
    """2 MiB pages that are reserved and not in use."""
    text = Path("/proc/meminfo").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("HugePages_Free")))


@contextmanager
def reserved_huge_pages(wanted: bool) -> Iterator[None]:
    """Reserve what fio needs, as root, and take that back."""
    place = Path("/proc/sys/vm/nr_hugepages")
    before = place.read_text()
    if wanted:
        place.write_text(str(int(before) + 4 * max(IN_FLIGHT_MAX, STEP_MEMORY_NBYTES) // (2 * MIB)))
    try:
        yield
    finally:
        if wanted:
            place.write_text(before)


def contenders(deepspeed_python: str | None) -> list[Contender]:
    """Those that are installed."""
    found: list[Contender] = [Own(step=True), Own(step=False)]
    if shutil.which("fio"):
        built = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=True).stdout.split()
        for engine in ("io_uring", "libaio", "psync"):
            if engine in built:
                found += [Fio(engine, huge=False), Fio(engine, huge=True)]
            if engine in built and engine != "psync":
                found.append(Fio(engine, huge=True, step=True))
    if deepspeed_python:
        found.append(DeepSpeed(deepspeed_python))
    return found


def best_settings(contender: Contender, files: list[Path], seconds: float) -> dict[str, Setting]:
    """For each column the setting with the highest rate; of those within `TIE` of it the one with the least processor time."""
    best: dict[str, Setting] = {}
    for column in COLUMNS:
        samples = {setting: contender.turn(column, files, setting, seconds) for setting in contender.settings}
        highest = max(sample.rate for sample in samples.values())
        good = [setting for setting, sample in samples.items() if sample.rate >= (1 - TIE) * highest]
        best[column] = min(good, key=lambda setting: samples[setting].cpu_per_gb)
    return best


def measure(rivals: list[Contender], files: list[Path], rounds: int, seconds: float, sweep: float) -> list[dict[str, Any]]:
    """A row for each contender, number of files and column."""
    settings = {rival.name: best_settings(rival, files[:1], sweep) for rival in rivals}
    samples: dict[tuple[str, int, str], list[Sample]] = {}
    for index in range(rounds):
        for count in range(1, len(files) + 1):
            for column in COLUMNS:
                start = index % len(rivals)
                for rival in rivals[start:] + rivals[:start]:
                    sample = rival.turn(column, files[:count], settings[rival.name][column], seconds)
                    samples.setdefault((rival.name, count, column), []).append(sample)
    rows = []
    for (name, count, column), taken in samples.items():
        block, depth = settings[name][column]
        rows.append(
            {
                "contender": name,
                "files": count,
                "column": column,
                "bytes_per_second": statistics.median(sample.rate for sample in taken),
                "cpu_seconds_per_gb": statistics.median(sample.cpu_per_gb for sample in taken),
                "block_nbytes": block,
                "depth": depth,
                "samples": [[sample.nbytes, sample.seconds, sample.cpu_seconds] for sample in taken],
            }
        )
    return rows


def prepare(folder: Path, size: int) -> list[Path]:
    """Two files of that size, written to the end, so that reads come from the drive."""
    files = [folder / "one", folder / "two"]
    data = os.urandom(MIB) * 8
    for path in files:
        with path.open("wb") as file:
            for _ in range(size // len(data)):
                file.write(data)
            os.fsync(file.fileno())
    os.sync()
    return files


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text: GB/s (share of the best), processor seconds for each GB."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {(row["contender"], row["files"], row["column"]): row for row in rows}
    columns = sorted({(row["files"], row["column"]) for row in rows}, key=lambda key: (key[0], COLUMNS.index(key[1])))
    best = {key: max(cells[(name, *key)]["bytes_per_second"] for name in names) for key in columns}
    lines = ["".join([f"{'':28}", *(f"{column + ' x' + str(count):>24}" for count, column in columns)])]
    for name in names:
        parts = [f"{name:28}"]
        for key in columns:
            row = cells[(name, *key)]
            rate = row["bytes_per_second"]
            parts.append(f"{rate / 1e9:8.2f} {100 * rate / best[key]:4.0f} % {row['cpu_seconds_per_gb']:8.4f}")
        lines.append("".join(parts))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--nvme", default=".", help="folder on the drive to use; default: the current one")
    parser.add_argument("--size", type=int, default=1024, help="MiB of each of the two files (default 1024)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each turn (default 0.8)")
    parser.add_argument("--sweep", type=float, default=0.3, help="seconds for each setting of each contender (default 0.3)")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed with async_io")
    parser.add_argument("--reserve-huge-pages", action="store_true", help="for fio, as root; taken back at the end")
    options = parser.parse_args()
    start = time.perf_counter()
    with (
        reserved_huge_pages(options.reserve_huge_pages),
        tempfile.TemporaryDirectory(dir=options.nvme, prefix="bench-") as folder,
    ):
        files = prepare(Path(folder), options.size * MIB // (8 * MIB) * 8 * MIB)
        rivals = contenders(options.deepspeed_python)
        try:
            rows = measure(rivals, files, options.rounds, options.seconds, options.sweep)
        finally:
            for rival in rivals:
                rival.close()
        iomem = "mmaphuge" if free_huge_pages() else "malloc on transparent huge pages"
    print(table(rows))
    print(f"{time.perf_counter() - start:.0f} s; huge pages of fio: {iomem}")
    report = {
        "machine": describe_machine(),
        "size_mib": options.size,
        "rounds": options.rounds,
        "fio_huge": iomem,
        "rows": rows,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
