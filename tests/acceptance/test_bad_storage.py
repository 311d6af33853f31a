# SPDX-License-Identifier: Apache-2.0
"""Paths that are missing, not writable, too small, or without O_DIRECT."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.file_systems import free_room, reservations

from . import worker
from .models import IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD, Setup, adamw, stack
from .runs import BITWISE_STEPS, CLIP, allocated_nbytes, files_under, refused

few = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME), ids=lambda s: s.name)
also_in_backward = pytest.mark.parametrize("setup", (IN_MEMORY, ON_CPU, ON_NVME, ON_NVME_IN_BACKWARD), ids=lambda s: s.name)


def test_a_path_that_is_missing(tmp_path: Path) -> None:
    """A mistyped mount point must not be made as a folder on the root disk."""
    model = stack()
    absent = tmp_path / "not-mounted" / "run1"
    with refused(offload.OffloadError, "not-mounted", "nvme"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(absent)))
    assert not absent.parent.exists()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    model = stack()
    file = tmp_path / "a-file"
    file.write_text("mine")
    with refused(offload.OffloadError, "a-file", "nvme"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(file)))
    assert file.read_text() == "mine"


def test_one_of_two_paths_is_missing(tmp_path: Path) -> None:
    model = stack()
    here = tmp_path / "here"
    here.mkdir()
    with refused(offload.OffloadError, "absent"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields([here, tmp_path / "absent" / "x"])))
    assert allocated_nbytes(here) == 0


def test_a_path_that_is_not_writable(tmp_path: Path) -> None:
    """Root may write everywhere but where the kernel itself makes the files."""
    if os.geteuid() == 0:
        path = Path("/proc/self")
    else:
        path = tmp_path / "locked"
        path.mkdir(mode=0o500)
    model = stack()
    with refused(offload.OffloadError, str(path.name), "nvme"):
        offload.initialize(model, adamw(model), offload.Config(**ON_NVME.fields(path)))


# Makes open(O_DIRECT) fail as on a file system that lacks it, and statvfs tell of a small disk; by environment.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

static int denied(int flags, const char *path) {
    const char *under = getenv("SHIM_NO_DIRECT");
    return under && (flags & O_DIRECT) && path && strstr(path, under) != 0;
}
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); \
    mode = va_arg(a, mode_t); va_end(a); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE(flags) \
    if (denied(flags, path)) { errno = EINVAL; return -1; } \
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { MODE(flags) \
    if (denied(flags, getenv("SHIM_NO_DIRECT"))) { errno = EINVAL; return -1; } \
    return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); }
#define FCNTL(name) int name(int fd, int command, ...) { va_list a; va_start(a, command); \
    void *argument = va_arg(a, void *); va_end(a); \
    if (command == F_SETFL && getenv("SHIM_NO_DIRECT") && ((long)argument & O_DIRECT)) { errno = EINVAL; return -1; } \
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, #name))(fd, command, argument); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FCNTL(fcntl) FCNTL(fcntl64)

#define SPACE(name, type) int name(const char *path, struct type *out) { \
    int rc = ((int (*)(const char *, struct type *))dlsym(RTLD_NEXT, #name))(path, out); SMALL }
#define FSPACE(name, type) int name(int fd, struct type *out) { \
    int rc = ((int (*)(int, struct type *))dlsym(RTLD_NEXT, #name))(fd, out); SMALL }
#define SMALL if (rc == 0 && getenv("SHIM_FREE")) { \
    unsigned long long blocks = strtoull(getenv("SHIM_FREE"), 0, 10) / (out->f_bsize ? out->f_bsize : 4096); \
    out->f_bfree = out->f_bavail = blocks; } return rc;
SPACE(statvfs, statvfs) SPACE(statvfs64, statvfs64) FSPACE(fstatvfs, statvfs) FSPACE(fstatvfs64, statvfs64)
SPACE(statfs, statfs) SPACE(statfs64, statfs64) FSPACE(fstatfs, statfs) FSPACE(fstatfs64, statfs64)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C compiler to build the file-system shim with")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = str(folder / "shim.so")
    language = ["-x", "c"] if compiler.endswith("c++") else []
    subprocess.run([compiler, *language, "-shared", "-fPIC", "-O1", "-o", library, str(folder / "shim.c"), "-ldl"], check=True)
    return library


def _worker(directory: Path, setup: Setup) -> dict[str, Any]:
    fields = setup.fields(directory, dtype="fp32", max_grad_norm=CLIP)
    return {"fields": fields, "steps": BITWISE_STEPS // 4, "width": 32, "announce": False, "seed": 5}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        return worker.train_bytes(**_worker(Path("."), IN_MEMORY))


@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles"])
def test_a_file_system_without_o_direct(nvme: Path, shim: str, plain: dict[str, Any], backend: str) -> None:
    """Falls back to buffered I/O, says so in one warning, and computes the same."""
    variables = {"LD_PRELOAD": shim, "SHIM_NO_DIRECT": str(nvme), "OFFLOAD_IO": backend}
    process = worker.start(_worker(nvme, ON_NVME), **variables)
    out, err = process.communicate(timeout=120)
    if process.returncode != 0 and backend == "io_uring" and "io_uring" in err:
        pytest.skip("io_uring cannot be had here")
    assert process.returncode == 0, err
    result = json.loads(out.strip().splitlines()[-1])
    assert result["losses"] == plain["losses"] and result["weights"] == plain["weights"]
    said = [one for one in result["warnings"] if "O_DIRECT" in one]
    assert len(said) == 1 and str(nvme) in said[0], result["warnings"]


def test_all_files_together_are_asked_for_before_the_first(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that holds the parameters and not the states besides is refused before a file is made."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    config = offload.Config(parameters="nvme", optimizer_states="nvme", nvme=str(nvme))
    free_room(monkeypatch, 2 * 256 * 256 * 4 + 65536)
    reservations(monkeypatch, lambda reserves: pytest.fail("room was reserved for a file"))
    with pytest.raises(offload.ConfigError, match="is too small: the run needs"):
        offload.initialize(model, optimizer, config)


def test_a_disk_that_is_too_small(nvme: Path, shim: str) -> None:
    """Free space is checked against the computed need, before anything is written."""
    variables = {"LD_PRELOAD": shim, "SHIM_FREE": "100000"}
    process = worker.start(_worker(nvme, ON_NVME), **variables)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0, "the disk is too small and nobody noticed"
    assert "offload.errors." in err, err
    assert str(nvme) in err and re.search(r"free|space|room", err), err
    assert files_under(nvme) == []


def test_a_disk_that_is_large_enough(nvme: Path, shim: str) -> None:
    """The states are half a megabyte: the check must not refuse a disk with room for that many times over."""
    variables = {"LD_PRELOAD": shim, "SHIM_FREE": str(32 << 20)}
    assert worker.run(_worker(nvme, ON_NVME), **variables)["losses"]
