from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from offload.errors import ConfigError, StorageError
from offload.tiers import ScratchFolder, scratch_file
from offload.tiers.scratch import file_system_of, free_nbytes
from offload.tiers.scratch_file import give_back

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")

HOLDER = """
import sys
from offload.tiers import ScratchFolder
scratch = ScratchFolder(sys.argv[1:])
files = scratch.create("states", [65536] * (len(sys.argv) - 1))
print(scratch.folders[0], flush=True)
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
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that holds a run's folder in tmp_path, and that folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def run_folders(path: Path) -> list[Path]:
    return sorted(path.glob("offload-*"))


def test_folder_and_files_are_the_runs_own(paths3: list[Path]) -> None:
    scratch = ScratchFolder(paths3)
    files = scratch.create("states", [8192, 4096, 0])
    for path, folder, file in zip(paths3, scratch.folders, files, strict=True):
        assert folder.parent == path and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert file.path == folder / "states.swap" and stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
        assert not os.get_inheritable(file.fileno())
    for file, nbytes in zip(files, (8192, 4096, 0), strict=True):
        status = file.path.stat()
        assert status.st_size == nbytes == file.nbytes
        assert status.st_blocks * 512 >= nbytes  # reserved, not only promised
    scratch.close()
    scratch.close()
    assert [run_folders(path) for path in paths3] == [[], [], []]
    with pytest.raises(AssertionError, match="after close"):
        scratch.create("more", [1, 1, 1])
    for file in files:
        file.close()
        with pytest.raises(AssertionError, match="closed"):
            file.fileno()


def test_dropping_it_removes_it_and_closes_its_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    scratch = ScratchFolder([tmp_path])
    files = scratch.create("states", [4096])
    assert len(run_folders(tmp_path)) == 1
    del scratch, files
    assert run_folders(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_half_made_is_taken_back(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "file"
    bad.write_text("mine")
    with pytest.raises(ConfigError, match="is not a folder"):
        ScratchFolder([good, bad])
    assert run_folders(good) == [] and bad.read_text() == "mine"


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
    assert [list(folder.glob("*.swap")) for folder in scratch.folders] == [[], [], []]
    scratch.require_free([4096] * 3)
    scratch.close()


def test_a_reservation_that_the_system_refuses(tmp_path: Path) -> None:
    def attempt() -> str:
        scratch = ScratchFolder([tmp_path])
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(StorageError) as caught:
            scratch.create("states", [2**23])
        scratch.close()
        return f"{caught.value.errno} {caught.value}"

    output = in_child(attempt)
    assert output.startswith(f"{errno.EFBIG} ") and "reserve 8388608 bytes" in output and "states.swap" in output
    assert run_folders(tmp_path) == []


def test_full_disk_at_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "_fallocate", lambda *_: errno.ENOSPC)
    scratch = ScratchFolder([tmp_path])
    with pytest.raises(StorageError, match=r"reserve 4096 bytes .*ENOSPC.*free space there"):
        scratch.create("states", [4096])
    scratch.close()


def test_without_fallocate_the_file_has_its_size_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scratch_file, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [1 << 20])
    assert file.path.stat().st_size == 1 << 20 and file.path.stat().st_blocks == 0
    assert "cannot reserve space ahead" in caplog.text
    file.close()
    scratch.close()


@pytest.mark.parametrize(("code", "warns"), [(errno.EIO, True), (errno.EOPNOTSUPP, False), (errno.ENOSYS, False)])
def test_blocks_that_stay_taken_are_a_warning_where_blocks_can_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, warns: bool
) -> None:
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [8192])
    taken = file.path.stat().st_blocks
    with monkeypatch.context() as patch:
        patch.setattr(scratch_file, "_fallocate", lambda *_: code)
        give_back(file, 4096, 4096)
    assert ("4096 bytes that were reserved stay taken (EIO" in caplog.text) == warns == bool(caplog.text)
    give_back(file, 4096, 4096)
    assert file.path.stat().st_blocks < taken and file.path.stat().st_size == 8192
    file.close()
    scratch.close()


@pytest.mark.parametrize("refusing", ["open", "write"])
def test_without_direct_io_it_goes_through_the_page_cache_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    def refuse(*arguments: object, **keywords: object) -> int:
        raise OSError(errno.EINVAL, "refused")

    if refusing == "write":
        monkeypatch.setattr(os, "pwrite", refuse)
    else:
        open_ = os.open

        def open_without_direct(path: str, flags: int, *arguments: int, **keywords: int) -> int:
            if flags & os.O_DIRECT:
                os.close(open_(path, flags & ~os.O_DIRECT, *arguments, **keywords))  # as some kernels leave it
                refuse()
            return open_(path, flags, *arguments, **keywords)

        monkeypatch.setattr(os, "open", open_without_direct)
    with pytest.warns(RuntimeWarning, match="does not support direct I/O") as caught:
        scratch = ScratchFolder([tmp_path])
    assert len(caught) == 1 and str(tmp_path) in str(caught[0].message)
    assert scratch.direct == (False,)
    (file,) = scratch.create("states", [4096])
    assert os.listdir(scratch.folders[0]).count("probe.swap") == 0
    file.close()
    scratch.close()


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK) or file_system_of(SHARED_MEMORY) != "tmpfs", reason="no tmpfs")
def test_tmpfs_works_and_says_that_it_is_memory() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scratch = ScratchFolder([path])
        (file,) = scratch.create("states", [8192])
        assert os.fstat(file.fileno()).st_size == 8192
        file.close()
        scratch.close()
    assert "counts as host memory" in str(caught[0].message)


def test_two_processes_never_share(tmp_path: Path, holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, theirs = holder
    theirs_before = (theirs / "states.swap").stat()
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [65536])
    assert scratch.folders[0] != theirs and theirs.exists()
    assert file.path.stat().st_ino != theirs_before.st_ino
    scratch.close()
    assert (theirs / "states.swap").stat() == theirs_before
    assert process.stdin is not None
    process.communicate("go\n", timeout=60)  # ends by itself: cleans up at exit, without close()
    assert process.returncode == 0 and run_folders(tmp_path) == []
    file.close()


def test_a_killed_process_stops_nobody_and_is_cleaned_up(tmp_path: Path, holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, theirs = holder
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert (theirs / "states.swap").exists()
    scratch = ScratchFolder([tmp_path])
    assert run_folders(tmp_path) == list(scratch.folders)
    scratch.close()


def test_a_worker_that_outlives_a_killed_run_does_not_keep_its_folder(tmp_path: Path) -> None:
    def run() -> str:
        scratch = ScratchFolder([tmp_path])
        files = scratch.create("states", [65536])
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
    for _ in range(3000):  # until the clean-up of the fork ran in the worker
        if not held:
            break
        time.sleep(0.01)
        names = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{worker}/fd")]
        held = [name for name in names if name.startswith(str(tmp_path))]
    assert held == []
    assert len(run_folders(tmp_path)) == 1
    ScratchFolder([tmp_path]).close()
    assert run_folders(tmp_path) == []
    assert Path(f"/proc/{worker}").exists(), "the worker was to outlive the run"
    os.write(told_by_test, b"x")
    for fileno in (tell_worker, told_by_test, hear_run, told_by_run):
        os.close(fileno)


def test_a_forked_child_removes_nothing_and_cannot_use_the_files(tmp_path: Path) -> None:
    scratch = ScratchFolder([tmp_path])
    (file,) = scratch.create("states", [65536])

    def attempt() -> str:
        with pytest.raises(AssertionError) as caught:
            file.fileno()
        scratch.close()
        return str(caught.value)

    assert "forked from" in in_child(attempt)
    assert file.path.exists() and os.fstat(file.fileno()).st_size == 65536
    scratch.close()
    assert run_folders(tmp_path) == []


def abandoned(path: Path, name: str = "offload-1-00000000000000aa") -> Path:
    folder = path / name
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(0o600)
    (folder / "states.swap").write_bytes(b"old")
    return folder


def test_only_what_runs_of_ours_left_is_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lock").touch()
    (outside / "states.swap").write_text("precious")
    path = tmp_path / "path"
    path.mkdir()
    left = abandoned(path)
    with_others = abandoned(path, "offload-2-00000000000000bb")
    (with_others / "notes.txt").write_text("precious")
    (with_others / "link.swap").symlink_to(outside / "states.swap")
    link = path / "offload-3-00000000000000cc"
    link.symlink_to(outside, target_is_directory=True)
    being_made = path / "offload-4-00000000000000dd"
    being_made.mkdir()
    old_without_lock = path / "offload-5-00000000000000ee"
    old_without_lock.mkdir()
    os.utime(old_without_lock, (0, 0))
    plain = path / "offload-6-00000000000000ff"
    plain.write_text("precious")
    other_name = abandoned(path, "offload-mine")
    ScratchFolder([path]).close()
    assert not left.exists() and not old_without_lock.exists()
    assert (with_others / "notes.txt").exists() and (outside / "states.swap").read_text() == "precious"
    assert link.is_symlink() and being_made.exists() and plain.exists() and (other_name / "states.swap").exists()


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    scratch = ScratchFolder([tmp_path / "path"])
    (scratch.folders[0] / "states.swap").symlink_to(outside)
    with pytest.raises(StorageError, match=r"states\.swap.*EEXIST.*remove it"):
        scratch.create("states", [4096])
    (scratch.folders[0] / "states.swap").unlink()
    (scratch.folders[0] / "states.swap").symlink_to(tmp_path / "dangling")
    with pytest.raises(StorageError):
        scratch.create("states", [4096])
    assert outside.read_text() == "precious" and not (tmp_path / "dangling").exists()
    (scratch.folders[0] / "states.swap").unlink()
    scratch.close()


def test_many_at_once_in_one_path(tmp_path: Path) -> None:
    """Starts race with each other's search for abandoned folders."""

    def work() -> str:
        for _ in range(60):
            scratch = ScratchFolder([tmp_path])
            (file,) = scratch.create("states", [4096])
            assert file.path.exists()
            file.close()
            scratch.close()
        return "done"

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: in_child(work), range(3))) == ["done"] * 3
    assert run_folders(tmp_path) == []


def test_removal_where_a_descriptor_lists_what_was_there_when_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on btrfs since Linux 6.5; rewinding the descriptor is what makes it look again."""
    rewound: set[int] = set()
    lseek, listdir = os.lseek, os.listdir
    monkeypatch.setattr(os, "lseek", lambda fileno, *where: (rewound.add(fileno), lseek(fileno, *where))[1])
    monkeypatch.setattr(os, "listdir", lambda at: listdir(at) if at in rewound or not isinstance(at, int) else [])
    scratch = ScratchFolder([tmp_path])
    for file in scratch.create("states", [4096]):
        file.close()
    scratch.close()
    assert listdir(tmp_path) == []


def test_free_room_is_what_equal_shares_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two paths on one file system share it; one that is not there yet counts as its folder."""
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    assert free_nbytes([tmp_path / "later" / "deeper"]) == free
    assert free - 2 < free_nbytes([tmp_path, tmp_path / "later"]) <= free
    assert free_nbytes([]) == 0
    monkeypatch.setattr(os, "statvfs", Mock(side_effect=PermissionError))
    assert free_nbytes([tmp_path]) == 0
