# SPDX-License-Identifier: Apache-2.0
"""Measure this machine, in less than 30 seconds: memory bandwidth, the drive at --nvme with direct I/O, and the links to
a device where there is one; and say which I/O backend would be used, and why not a better one.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

import torch

from offload import _native
from offload.cli.arguments import add_drive_arguments, check_file, check_is_folder, paths_of, positive_number
from offload.cli.info import section
from offload.cli.machine import Row, accelerator_rows, backend_rows, native_rows, system_rows
from offload.cli.plans.rates import Direction, Drive, link_rates, stream_bytes_per_second
from offload.cli.plans.this_machine import measure_machine
from offload.cli.text import format_rate, json_text
from offload.config import parse_nbytes
from offload.device.virtual.description import write_machine
from offload.tiers.io import open_backend

_DIRECTIONS: tuple[Direction, ...] = ("write", "read", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme", metavar="PATH[,PATH...]", help="folders on the drives to measure")
    add_drive_arguments(parser)
    parser.add_argument("--machine-file", type=Path, metavar="FILE", help="write what was measured, for plan --machine FILE")
    parser.add_argument("--json", action="store_true", help="print what was measured as one JSON object, and nothing else")
    parser.add_argument("--seconds", type=positive_number, default=2.0, metavar="S", help="seconds for each rate (default 2)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0."""
    paths, nbytes = paths_of(args.nvme) or [], parse_nbytes(args.size, "--size")
    for path in paths:
        check_is_folder(path, "--nvme")
    check_file(args.machine_file, "--machine-file")
    if args.json or args.machine_file is not None:
        measured = measure_machine(paths, args.seconds / 4)
        if args.machine_file is not None:
            write_machine(measured.machine, measured.sources, args.machine_file)
        if args.json:
            print(json_text(measured.machine.as_json(measured.sources)))
            return 0
    print(section("Machine", system_rows()) + "\n\n" + section("Native library", native_rows()))
    how = "native stream, 4 arrays read and 3 written" if _native.available() else "torch.add: the native library is missing"
    memory: list[Row] = [(how, format_rate(stream_bytes_per_second(args.seconds), 1.0))]
    print("\n" + section("Memory bandwidth", memory))
    print("\n" + section("File I/O, best first", backend_rows()))
    for path in paths:
        print("\n" + section(f"Drive at {path}", _drive_rows(path, nbytes, args.seconds / len(paths))))
    if not paths:
        print("\nDrive: not measured (name a folder on it with --nvme)")
    print("\n" + section("Devices", _device_rows(args.seconds)))
    return 0


def _drive_rows(path: str, nbytes: int, seconds: float) -> list[Row]:
    pages = {True: "huge pages", False: "4 KiB pages (huge ones were not granted)", None: "pages of unknown size"}
    with Drive(path, nbytes) as drive, closing(open_backend(paths=[path])) as backend:
        rates = [(direction, drive.bytes_per_second(backend, direction, seconds)) for direction in _DIRECTIONS]
        registered_nbytes = backend.stats().registered_nbytes
    return [
        ("backend", backend.name),
        ("file", "direct I/O" if drive.direct else "through the page cache: no direct I/O on this file system"),
        ("buffers", pages[drive.huge] + (", registered with the kernel" if registered_nbytes else ", not registered")),
        *((kind if kind != "both" else "both at once", format_rate(rate, 1.0)) for kind, rate in rates),
    ]


def _device_rows(seconds: float) -> list[Row]:
    rows = accelerator_rows()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            rates = link_rates(torch.device("cuda", index), seconds / 2)
            rows.append((f"cuda:{index} H2D", format_rate(rates.to_device, 1.0)))
            rows.append((f"cuda:{index} D2H", format_rate(rates.from_device, 1.0)))
    return rows
