# SPDX-License-Identifier: Apache-2.0
"""Starting scripts: in this process (`python -m offload.deepspeed`), or one for each device (the command `deepspeed`)."""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from offload.errors import UsageError

STAND_IN = Path(__file__).with_name("stand_in")
"""A folder with a package `deepspeed` and its metadata, which is the drop-in: for the processes that a script starts."""
_WITHOUT_EFFECT = (
    "--bind_cores_to_rank",
    "--enable_each_rank_log",
    "--force_multi",
    "--no_ssh",
    "--no_ssh_check",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """See `python -m offload.deepspeed --help`."""
    parser = argparse.ArgumentParser(
        prog="python -m offload.deepspeed",
        description="Run a script written for DeepSpeed; its `import deepspeed` is offload's.",
    )
    parser.add_argument("--pass_local_rank", action="store_true", help="the script's first argument is --local_rank=LOCAL_RANK")
    _add_script(parser)
    given = _parsed(parser, arguments)
    rank = [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"] if given.pass_local_rank else []
    run(given.script, [*rank, *given.arguments], as_module=given.module)


def launch(arguments: Sequence[str] | None = None) -> None:
    """Run a script on every device of this machine through torchrun, as the command `deepspeed` does."""
    parser = argparse.ArgumentParser(prog="deepspeed", description="Run a script written for DeepSpeed on each device.")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="processes; all devices if left out")
    parser.add_argument("--num_nodes", type=int, default=1, help="machines")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("-i", "--include", default="", help="devices of this machine: localhost:0,2")
    parser.add_argument("-e", "--exclude", default="", help="devices of this machine to leave out: localhost:1")
    parser.add_argument("-H", "--hostfile", default=None, help="not read: start the command on every machine with --node_rank")
    parser.add_argument("--no_local_rank", action="store_true", help="the script takes no --local_rank, which it is given else")
    for flag in _WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help="without effect")
    _add_script(parser)
    given = _parsed(parser, arguments)
    try:
        chosen = _devices(given.include, given.exclude)
    except UsageError as error:
        parser.error(str(error))
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chosen))} if chosen is not None else {}
    count = len(chosen) if chosen is not None else given.num_gpus if given.num_gpus > 0 else _device_count()
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(given.num_nodes), "--node-rank", str(given.node_rank), "--nproc-per-node", str(count)]
    command += ["--master-addr", given.master_addr, "--master-port", str(given.master_port), "-m", "offload.deepspeed"]
    command += ["--pass_local_rank"] * (not given.no_local_rank) + ["--module"] * given.module
    command += [given.script, *given.arguments]
    raise SystemExit(subprocess.run(command, env=os.environ | seen, check=False).returncode)


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="its path")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    given = parser.parse_args(arguments)
    if not given.module and not os.path.exists(given.script):
        parser.error(f"there is no script {given.script!r}: give its path, or --module with a module's name")
    return given


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _device_count() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _devices(include: str, exclude: str) -> list[int] | None:
    if include and exclude:
        raise UsageError("--include and --exclude were both given: leave one out.")
    if not include and not exclude:
        return None
    host, _, numbers = (include or exclude).partition(":")
    if "@" in host or host not in ("localhost", os.uname().nodename):
        raise UsageError(f"{include or exclude!r} names another machine: start the command there, with --node_rank.")
    try:
        named = [int(one) for one in numbers.split(",") if one]
    except ValueError:
        raise UsageError(f"{include or exclude!r} names no devices: expected numbers, as in localhost:0,2.") from None
    every = range(_device_count())
    if include:
        return named or list(every)
    left = [one for one in every if named and one not in named]
    if not left:
        raise UsageError(f"--exclude {exclude} leaves no device of the {len(every)} of this machine.")
    return left


def run(script: str, arguments: Sequence[str], *, as_module: bool = False) -> None:
    """Run the script in this process, as `python script arguments` would. Without a launcher it is the only rank."""
    from offload.deepspeed import install

    install()
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([inherited] if inherited else []), str(STAND_IN)])
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    sys.argv = [script, *arguments]
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
