# SPDX-License-Identifier: Apache-2.0
"""Processes that start at once: forked from one that has imported everything and done nothing.

Importing torch and transformers takes longer than most of what tests do with a process of their own. `WarmProcess(argv)` is
what `subprocess.Popen([sys.executable, *argv])` is, as far as tests use it: its own memory, signals, exit code and streams. At
its end threads are waited for and `atexit` is called, as always; torch's modules are taken down only where `torn_down` asks for
it, which takes longer than most scripts here. For another environment than `ENVIRONMENT`, which libraries read when they are
loaded, take a new process; but for LD_PRELOAD, of which each value has a process that forks.

`python -m tests.warm` is the process that forks, one for all of pytest's workers (`share`): a request is one message of (argv,
folder, environment) with the descriptors of stdin, stdout, stderr and a pipe, into which goes the process's id and, at its end,
its exit code. It ends where its standard input does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"OFFLOAD_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
READ_WHEN_LOADED = {"OFFLOAD_NATIVE", "PYTHONPATH"}
"""With these in its environment what a test runs takes a new process. Of others nothing is read before it runs."""
_IMPORTED = (
    *("torch._dynamo", "torch.distributed", "torch.utils.checkpoint", "transformers", "offload.cli.main"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("pytest", "tests.ranks.jobs", "tests.loops.jobs", "tests.integrations.deepspeed_jobs"),
    "tests.frozen",
)
_IMPORTED_PRELOADED = ("offload", "tests.acceptance.models", "tests.acceptance.runs", "tests.frozen")
"""Where something is loaded before: what runs there is a worker of the acceptance tests."""
_REQUEST_NBYTES = 2**18
_SHARED = "TESTS_WARM"
"""In the environment: the name of the socket at which the workers' one listens, which is nowhere in the file system."""


class WarmProcess:
    """See the module. `argv`: "-m" and a module, "-c" and code, or a script's path, and its arguments. `stdout` and `stderr`:
    descriptors, else pipes that are read as text by `stdout` and `communicate`; `stdin`: a descriptor, else there is none."""

    def __init__(
        self,
        argv: list[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        torn_down: bool = False,
        **environment: str,
    ) -> None:
        self.args = argv
        self.returncode: int | None = None
        ours: list[IO[str]] = []
        given: list[int] = []
        for place in (stdout, stderr):
            if place is None:
                read, place = os.pipe()
                ours.append(open(read, encoding="utf-8"))  # noqa: SIM115
                given.append(place)
            else:
                ours.append(open(os.devnull))  # noqa: SIM115
        self.stdout, self.stderr = ours
        self._status, told = os.pipe()
        plain = {name: value for name, value in os.environ.items() if not name.startswith("OFFLOAD_")}
        request = json.dumps([argv, torn_down, os.getcwd(), plain | ENVIRONMENT | environment]).encode()
        assert len(request) < _REQUEST_NBYTES
        with open(os.devnull) as nothing:
            out = stdout if stdout is not None else given[0]
            err = stderr if stderr is not None else given[-1]
            given_in = stdin if stdin is not None else nothing.fileno()
            socket.send_fds(_server(environment.get("LD_PRELOAD", "")), [request], [given_in, out, err, told])
        for place in (*given, told):
            os.close(place)
        self.pid = int(self._told(None) or 0)
        assert self.pid, "the process that forks has ended"

    def _told(self, seconds: float | None) -> str | None:
        """The next line from the process that forks; None where there is none in time."""
        if not select.select([self._status], [], [], seconds)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self._status, 1)
            if not piece:
                return ""
            line += piece
        return line.decode()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, as `subprocess` has it; None while it runs."""
        if self.returncode is None:
            told = self._told(0.0)
            self.returncode = int(told) if told else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            told = self._told(timeout)
            if not told:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(told)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until its end, to the pipes."""
        end = None if timeout is None else time.monotonic() + timeout
        texts = {stream: bytearray() for stream in (self.stdout, self.stderr) if not stream.closed}
        left = list(texts)
        while left:
            ready = select.select(left, [], [], None if end is None else max(0.0, end - time.monotonic()))[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for stream in ready:
                piece = os.read(stream.fileno(), 2**16)
                texts[stream] += piece
                if not piece:
                    left.remove(stream)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        out, err = (bytes(texts.get(stream, b"")).decode() for stream in (self.stdout, self.stderr))
        self._close()
        return out, err

    @classmethod
    def run(
        cls, argv: list[str], timeout: float, *, torn_down: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` with its output captured."""
        with cls(argv, torn_down=torn_down, **environment) as process:
            try:
                out, err = process.communicate(timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(argv, process.wait(), out, err)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _close(self) -> None:
        self.stdout.close()
        self.stderr.close()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.wait()
        self._close()


def share() -> None:
    """Begin one for all processes that begin after this, and end it with this one."""
    name = f"offload-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen()
        _begin(listener, "")
    os.environ[_SHARED] = name


@functools.cache
def _server(preload: str) -> socket.socket:
    if not preload and _SHARED in os.environ:
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.connect("\0" + os.environ[_SHARED])
        return ours
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        _begin(theirs, preload)
    return ours


def _begin(theirs: socket.socket, preload: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | ({"LD_PRELOAD": preload} if preload else {}),
        stdin=subprocess.PIPE,
    )
    atexit.register(process.communicate)


# ---- the process that forks -----------------------------------------------------------------------------------------


def _serve(first: socket.socket) -> tuple[list[str], bool]:
    """Returns in each process that was forked, with its argv, and whether it is torn down at its end."""
    listens = bool(first.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    askers = {first}
    running: dict[int, tuple[int, int]] = {}
    """By a descriptor that can be read when it has ended: the process's id, and the pipe to tell."""
    while True:
        ready = select.select([0, *askers, *running], [], [])[0]
        if 0 in ready:
            sys.exit()
        for asker in askers & {*ready}:
            if listens and asker is first:
                askers.add(first.accept()[0])
                continue
            request, descriptors, _, _ = socket.recv_fds(asker, _REQUEST_NBYTES, 4)
            if not request:
                askers.remove(asker)
                asker.close()
                continue
            argv, torn_down, folder, environment = json.loads(request)
            pid = os.fork()
            if not pid:
                for one in askers:
                    one.close()
                for ended, (_, status) in running.items():
                    os.close(ended)
                    os.close(status)
                _become(descriptors, folder, environment)
                return list(argv), bool(torn_down)
            for place in descriptors[:3]:
                os.close(place)
            running[os.pidfd_open(pid)] = pid, descriptors[3]
            os.write(descriptors[3], b"%d\n" % pid)
        for ended in {*ready} & {*running}:
            pid, status = running.pop(ended)
            os.close(ended)
            _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _tell(place: int, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test does not wait for it
        os.write(place, b"%d\n" % code)
    os.close(place)


def _become(descriptors: list[int], folder: str, environment: dict[str, str]) -> None:
    for number, place in enumerate(descriptors[:3]):
        os.dup2(place, number)
    for place in descriptors:
        os.close(place)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=_buffering()), open(2, "w", buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _buffering() -> int:
    return 1 if os.environ.get("PYTHONUNBUFFERED") or os.isatty(1) else -1


def _run(argv: list[str]) -> None:
    import runpy

    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] != "-c":
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.argv = ["-c", *argv[2:]]
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(argv[1], "<string>", "exec"), names)


def _end(code: object) -> None:
    """What the interpreter does at its end before it takes modules down."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    import gc
    import importlib

    gc.disable()  # until everything is imported
    for _name in _IMPORTED_PRELOADED if os.environ.get("LD_PRELOAD") else _IMPORTED:
        with contextlib.suppress(ImportError):  # a script that needs it says so
            importlib.import_module(_name)
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _argv, _torn_down = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run(_argv)
    except SystemExit as _ended:
        if _torn_down:
            raise
        _end(_ended.code)
    if not _torn_down:
        _end(0)
