# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from offload.errors import ConfigError, StorageError
from offload.tiers import ScratchFolder
from offload.tiers.scratch import file_system_of, free_nbytes
from offload.tiers.scratch_file import give_back
from tests.file_systems import at_call, free_room, raising, reservations
from tests.warm import WarmProcess

SHARED_MEMORY = Path("/dev/shm")

HOLDER = """
import sys
from offload.tiers import ScratchFolder
scratch = ScratchFolder(sys.argv[1:])
files = scratch.create("states", [65536] * (len(sys.argv) - 1))
print("made", flush=True)
sys.stdin.readline()
"""


def in_child(function: Callable[[], str]) -> str:
    """What `function` returns in a forked child, or the text of what it raised; "" where the child was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = function()
        except BaseException as error:
            result = repr(error)
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        os.set_blocking(reading, False)  # a grandchild may hold the other end
        return (file.read() or b"").decode()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[WarmProcess]:
    """Another process that holds a scratch file in tmp_path."""
    read, written = os.pipe()
    process = WarmProcess(["-c", HOLDER, str(tmp_path)], stdin=read)
    os.close(read)
    assert process.stdout.readline() == "made\n"
    yield process
    process.kill()
    process.communicate()
    os.close(written)


@pytest.fixture(params=["nameless", "unlinked"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as the system has them, and as it makes them where it has none without a name."""
    if request.param == "unlinked":

        def open_with_a_name(path: Path, flags: int, *_: int, **__: int) -> None:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "refused")

        at_call(monkeypatch, "open", before=open_with_a_name)


@pytest.mark.usefixtures("either_way")
def test_files_have_no_name_and_are_reserved_in_full(paths3: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    scratch = ScratchFolder(paths3)
    files = scratch.create("states", [8192, 4096, 0])
    assert [os.listdir(path) for path in paths3] == [[], [], []]
    for path, file, nbytes in zip(paths3, files, (8192, 4096, 0), strict=True):
        status = os.fstat(file.fileno())
        assert file.path.parent == path and not os.get_inheritable(file.fileno())
        assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
        assert status.st_size == nbytes == file.nbytes
        assert status.st_blocks * 512 >= nbytes  # reserved, not only promised
    for file in files:
        file.close()
        file.close()
        with pytest.raises(AssertionError, match="closed"):
            file.fileno()
    files = scratch.create("dropped", [4096, 4096, 4096])
    del files, file
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("either_way")
def test_they_stay_where_their_folder_is_removed(tmp_path: Path) -> None:
    (file,) = ScratchFolder([tmp_path / "run"]).create("states", [8192])
    (tmp_path / "run").rmdir()
    give_back(file, 0, 4096)
    assert os.fstat(file.fileno()).st_size == 8192
    file.close()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "file"
    bad.write_text("mine")
    with pytest.raises(ConfigError, match="is not a folder"):
        ScratchFolder([good, bad])
    assert os.listdir(good) == [] and bad.read_text() == "mine"


@pytest.mark.parametrize("path", ["missing/run", "file/run"])
def test_a_path_that_cannot_be_made(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, StorageError)) as caught:
        ScratchFolder([tmp_path / path])
    assert str(tmp_path / path) in str(caught.value)
    assert "Config(nvme=...)" in str(caught.value)


def test_no_path_at_all() -> None:
    with pytest.raises(ConfigError, match="no path"):
        ScratchFolder([])


def test_a_path_that_may_not_be_written() -> None:
    def attempt() -> str:
        if os.geteuid() == 0:
            os.seteuid(65534)
        with pytest.raises(StorageError) as caught:
            ScratchFolder([path])
        return f"{caught.value.errno} {caught.value}"

    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o555)
        output = in_child(attempt)
    assert output.startswith(f"{errno.EACCES} ") and path in output and "change the permissions" in output


def test_too_large_is_known_before_anything_is_written(paths3: list[Path]) -> None:
    scratch = ScratchFolder(paths3)
    status = os.statvfs(paths3[0])
    free_nbytes = status.f_bavail * status.f_frsize
    # Each would fit alone; they lie on one file system.
    sizes = [free_nbytes // 2 // 4096 * 4096 + 2**26] * 3
    for attempt in (scratch.require_free, lambda sizes: scratch.create("states", sizes)):
        with pytest.raises(ConfigError, match=f"needs {sum(sizes)} bytes .* are free") as caught:
            attempt(sizes)
        assert str(paths3[0]) in str(caught.value)
    scratch.require_free([4096] * 3)


def test_a_reservation_that_the_system_refuses(tmp_path: Path) -> None:
    def attempt() -> str:
        scratch = ScratchFolder([tmp_path])
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(StorageError) as caught:
            scratch.create("states", [2**23])
        return f"{caught.value.errno} {caught.value}"

    output = in_child(attempt)
    assert output.startswith(f"{errno.EFBIG} ") and "reserve 8388608 bytes" in output and "states.swap" in output
    assert os.listdir(tmp_path) == []


def test_full_disk_at_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reservations(monkeypatch, lambda reserves: errno.ENOSPC)
    scratch = ScratchFolder([tmp_path])
    with pytest.raises(StorageError, match=r"reserve 4096 bytes .*ENOSPC.*free space there"):
        scratch.create("states", [4096])


def test_without_fallocate_the_file_has_its_size_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reservations(monkeypatch, lambda reserves: errno.EOPNOTSUPP)
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [1 << 20])
    assert os.fstat(file.fileno()).st_size == 1 << 20 and os.fstat(file.fileno()).st_blocks == 0
    assert "cannot reserve space ahead" in caplog.text
    file.close()


@pytest.mark.parametrize(("code", "warns"), [(errno.EIO, True), (errno.EOPNOTSUPP, False), (errno.ENOSYS, False)])
def test_blocks_that_stay_taken_are_a_warning_where_blocks_can_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, warns: bool
) -> None:
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [8192])
    taken = os.fstat(file.fileno()).st_blocks
    with monkeypatch.context() as patch:
        reservations(patch, lambda reserves: code)
        give_back(file, 4096, 4096)
    assert ("4096 bytes that were reserved stay taken (EIO" in caplog.text) == warns == bool(caplog.text)
    give_back(file, 4096, 4096)
    assert os.fstat(file.fileno()).st_blocks < taken and os.fstat(file.fileno()).st_size == 8192
    file.close()


@pytest.mark.parametrize("refusing", ["open", "write"])
def test_without_direct_io_it_goes_through_the_page_cache_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    if refusing == "write":
        at_call(monkeypatch, "pwrite", before=raising(errno.EINVAL))
    else:
        open_ = os.open

        def open_without_direct(path: str, flags: int, *arguments: int, **keywords: int) -> None:
            if flags & os.O_DIRECT:
                os.close(open_(path, flags & ~os.O_DIRECT, *arguments, **keywords))  # as some kernels leave it
                raise OSError(errno.EINVAL, "refused")

        at_call(monkeypatch, "open", before=open_without_direct)
    with pytest.warns(RuntimeWarning, match="does not support direct I/O") as caught:
        scratch = ScratchFolder([tmp_path])
    assert len(caught) == 1 and str(tmp_path) in str(caught[0].message)
    assert scratch.direct == (False,)
    (file,) = scratch.create("states", [4096])
    assert os.listdir(tmp_path) == []
    file.close()


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK) or file_system_of(SHARED_MEMORY) != "tmpfs", reason="no tmpfs")
def test_tmpfs_works_and_says_that_it_is_memory() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scratch = ScratchFolder([path])
        (file,) = scratch.create("states", [8192])
        assert os.fstat(file.fileno()).st_size == 8192
        file.close()
    assert "counts as host memory" in str(caught[0].message)


def test_two_processes_in_one_folder_do_not_meet_and_a_killed_one_leaves_nothing(tmp_path: Path, holder: WarmProcess) -> None:
    (file,) = ScratchFolder([tmp_path]).create("states", [65536])
    opened = [entry.path for entry in os.scandir(f"/proc/{holder.pid}/fd")]
    theirs = [os.stat(path) for path in opened if str(tmp_path) in os.readlink(path)]
    assert theirs and all(status.st_ino != os.fstat(file.fileno()).st_ino for status in theirs)
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    assert os.listdir(tmp_path) == [] and os.fstat(file.fileno()).st_size == 65536
    file.close()


def test_a_worker_that_outlives_a_killed_run_does_not_keep_its_space(tmp_path: Path) -> None:
    def run() -> str:
        files = ScratchFolder([tmp_path]).create("states", [65536])
        worker = os.fork()
        if worker == 0:
            # As multiprocessing's workers, it has what the run had, and ends when told to, by the test.
            os.close(told_by_test)
            os.read(tell_worker, 1)
            os._exit(len(files))
        os.write(told_by_run, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    (tell_worker, told_by_test), (hear_run, told_by_run) = os.pipe(), os.pipe()
    in_child(run)
    worker = int(os.read(hear_run, 100))
    held = [""]
    for _ in range(3000):  # until what follows a fork ran in the worker
        if not held:
            break
        time.sleep(0.01)
        names = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{worker}/fd")]
        held = [name for name in names if name.startswith(str(tmp_path))]
    assert held == []
    assert Path(f"/proc/{worker}").exists(), "the worker was to outlive the run"
    os.write(told_by_test, b"x")
    for fileno in (tell_worker, told_by_test, hear_run, told_by_run):
        os.close(fileno)


def test_a_forked_child_cannot_use_the_files(tmp_path: Path) -> None:
    (file,) = ScratchFolder([tmp_path]).create("states", [65536])

    def attempt() -> str:
        with pytest.raises(AssertionError) as caught:
            file.fileno()
        return str(caught.value)

    assert "forked from" in in_child(attempt)
    assert os.fstat(file.fileno()).st_size == 65536
    file.close()


def test_a_folder_that_is_not_there_yet_is_on_the_file_system_that_it_would_be_made_on(tmp_path: Path) -> None:
    assert file_system_of(tmp_path / "later" / "deeper") == file_system_of(tmp_path) != ""


def test_free_room_is_what_equal_shares_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two paths on one file system share it; one that is not there yet counts as its folder."""
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    free_room(monkeypatch, free)
    assert free_nbytes([tmp_path / "later" / "deeper"]) == free
    assert free - 2 < free_nbytes([tmp_path, tmp_path / "later"]) <= free
    assert free_nbytes([]) == 0
    at_call(monkeypatch, "statvfs", before=Mock(side_effect=PermissionError))
    assert free_nbytes([tmp_path]) == 0
