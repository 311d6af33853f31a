# SPDX-License-Identifier: Apache-2.0
"""Versions, what was built, which backends work here and why others do not, and the environment variables."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

import torch

import offload
from offload.cli.machine import ENVIRONMENT, Row, accelerator_rows, backend_rows, chosen_backend, native_rows
from offload.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0."""
    del args
    versions: list[Row] = [
        ("offload", offload.__version__),
        ("torch", str(torch.__version__)),
        ("transformers", _version("transformers")),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"),
    ]
    environment: list[Row] = [
        (name, f"{os.environ[name]!r} ({text})" if name in os.environ else f"not set ({text})") for name, text in ENVIRONMENT
    ]
    try:
        backends = [*backend_rows(), ("used", chosen_backend())]
    except ConfigError as error:
        backends = [*backend_rows(), ("used", f"none: {error}")]
    sections = {
        "Versions": versions,
        "Native library": native_rows(),
        "File I/O, best first": backends,
        "Accelerators": accelerator_rows(),
        "Environment variables": environment,
    }
    print("\n\n".join(section(title, rows) for title, rows in sections.items()))
    return 0


def section(title: str, rows: list[Row]) -> str:
    """A title over its rows, values aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join((title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (pip install 'offload[hf]')"
