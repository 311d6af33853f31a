# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin under which DeepSpeed's own tests run on `offload.deepspeed`, each item within a time.

Their ranks are forked here, killed when one of them fails or the time is up, and the first failure is the item's. A name of
DeepSpeed's that the drop-in lacks can be imported, and raises `Lacking` when it is used, so that one such name does not hide
the rest of a file. Every item's outcome becomes a line of JSON in the file that SUITE_OUTCOMES names.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import offload.deepspeed

ITEM_SECONDS = float(os.environ.get("SUITE_ITEM_SECONDS", "60"))
_outcomes = Path(os.environ["SUITE_OUTCOMES"])
_known: dict[str, str] = {}


class Lacking(NameError):
    """A name of DeepSpeed's that the drop-in does not have."""


class _Placeholder(type):
    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        raise Lacking(f"lacks {cls.__qualname__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Lacking(f"lacks {cls.__qualname__}.{name}")


def _placeholder(name: str) -> Any:
    return _Placeholder(name, (), {"__qualname__": name})


def _lenient(module: ModuleType) -> None:
    name, own = module.__name__, vars(module).get("__getattr__")

    def lacking(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        try:
            if own is not None:
                return own(attribute)
        except AttributeError:
            pass
        made = _placeholder(f"{name}.{attribute}".replace("offload.deepspeed", "deepspeed"))
        setattr(module, attribute, made)
        return made

    vars(module)["__getattr__"] = lacking


class _LackingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("deepspeed."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _lenient(module)


def _answer_as_deepspeed() -> None:
    offload.deepspeed.install(shadow=True)
    for name, module in list(sys.modules.items()):
        if name == "deepspeed" or name.startswith("deepspeed."):
            _lenient(module)
    sys.meta_path.insert(0, _LackingModules())


if not os.environ.get("SUITE_REAL"):  # else the real DeepSpeed answers: what it cannot do on this machine needs another
    _answer_as_deepspeed()
torch.set_num_threads(1)


def _rank(test: Any, rank: int, world_size: int, port: str, init_method: str, answers: Any) -> None:
    import deepspeed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "RANK": str(rank)}
    os.environ |= {"LOCAL_SIZE": str(world_size), "WORLD_SIZE": str(world_size)}
    try:
        if test.init_distributed:
            deepspeed.init_distributed(dist_backend="gloo", init_method=init_method, rank=rank, world_size=world_size)
            deepspeed.comm.barrier()  # a rank that skips at once must not be gone before the others have connected
        test.run(**test._fixture_kwargs)
    except pytest.skip.Exception as skipped:
        answers.put((rank, "skipped", str(skipped.msg)))
    except BaseException as error:
        answers.put((rank, "failed", f"{''.join(traceback.format_exception(error))[-6000:]}\n{type(error).__name__}: {error}"))
    else:
        answers.put((rank, "passed", ""))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _launch(test: Any, world_size: int, init_method: str) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = str(20000 + os.getpid() % 20000)
    processes = [
        context.Process(target=_rank, args=(test, rank, world_size, port, init_method, answers)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        said = _wait(processes, answers)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = next((text for _, word, text in said if word == "failed"), None)
    if failed is not None:
        pytest.fail(failed, pytrace=False)
    if len(said) < world_size:
        missing = "HUNG" if any(process.exitcode == -9 for process in processes) else "ENDED"
        pytest.fail(f"{missing}: {len(said)} of {world_size} ranks answered within {ITEM_SECONDS:g} s", pytrace=False)
    skipped = next((text for _, word, text in said if word == "skipped"), None)
    if skipped is not None:
        pytest.skip(skipped)


def _wait(processes: Any, answers: Any) -> list[tuple[int, str, str]]:
    said: list[tuple[int, str, str]] = []
    limit = time.monotonic() + ITEM_SECONDS
    while len(said) < len(processes) and time.monotonic() < limit:
        if not answers.empty():
            said.append(answers.get())
            if said[-1][1] == "failed":  # the first failure is the item's
                break
        elif not any(process.is_alive() for process in processes):
            time.sleep(0.2)
            while not answers.empty():
                said.append(answers.get())
            break
        else:
            time.sleep(0.01)
    return said


def _let_run_on_cpu() -> None:
    """What the tests say for GPUs alone, though a CPU can do it: a DDP with device_ids to compare with, the number of the
    device as a device, bf16, a GradScaler that scales, and a gathering of numbers, which gloo wants as one-dimensional
    tensors."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    from unit import util  # of DeepSpeed's tests

    make = DDP.__init__

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **keywords: Any) -> None:
        on_cpu = all(one.device.type == "cpu" for one in module.parameters())
        make(self, module, None if on_cpu else device_ids, None if on_cpu else output_device, *args, **keywords)

    gather = torch.distributed.all_gather_into_tensor
    torch.distributed.all_gather_into_tensor = lambda output, input, *args, **keywords: gather(
        output, input.reshape(1) if input.dim() == 0 else input, *args, **keywords
    )
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = lambda device="cpu", *args, **keywords: scaler("cpu", *args, **keywords)
    DDP.__init__ = init
    type(offload.deepspeed.get_accelerator()).current_device = lambda accelerator: accelerator.current_device_name()
    util.bf16_required_version_check = lambda accelerator_check=True: True


def pytest_configure(config: pytest.Config) -> None:
    from unit import common  # of DeepSpeed's tests

    # They wrap it to see that it is not called where no optimizer state is asked for; nothing here calls it.
    offload.deepspeed.DeepSpeedEngine._get_optimizer_ckpt_name = lambda *_, **__: ""

    if not torch.cuda.is_available():
        _let_run_on_cpu()

    common.DistributedExec._launch_procs = lambda test, count, init_method: _launch(test, count, init_method)
    common.DistributedExec._close_pool = lambda *_, **__: None
    common.time.sleep = lambda seconds: None if seconds == 0.5 else time_sleep(seconds)


time_sleep = time.sleep


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule() -> Any:
    """Their classes that are fixtures, as functions: pytest knows no other ones since 8.4."""
    from unit.common import DistributedFixture

    module = yield
    with contextlib.suppress(Exception, pytest.skip.Exception):  # what fails here fails again when it is collected
        for name, kind in list(vars(module.obj).items()):
            if isinstance(kind, type) and issubclass(kind, DistributedFixture) and kind is not DistributedFixture:
                setattr(module.obj, name, pytest.fixture(_calling(kind), name=name))
    return module


def _calling(kind: type) -> Any:
    def fixture(request: Any) -> Any:
        return kind()(request)

    return fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _outcomes.exists():
        for line in _outcomes.read_text().splitlines():
            one = json.loads(line)
            _known[one["item"]] = one["outcome"]
    from unit.common import DistributedExec  # of DeepSpeed's tests

    for kind in {one.cls for one in items if isinstance(one, pytest.Function) and one.cls is not None}:
        if "_launch_procs" in vars(kind):  # which would start ranks that know nothing of this plugin
            kind._launch_procs = DistributedExec._launch_procs
    only = os.environ.get("SUITE_ONLY")
    wanted = set(json.loads(Path(only).read_text())) if only else None
    items[:] = [one for one in items if one.nodeid not in _known and (wanted is None or one.nodeid in wanted)]


def _record(item: str, outcome: str, why: str) -> None:
    with _outcomes.open("a") as file:
        file.write(json.dumps({"item": item, "outcome": outcome, "why": why}) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(report.nodeid, "not collected", str(report.longrepr)[-3000:])
    elif report.skipped:
        _record(report.nodeid, "skipped", str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    (_outcomes.parent / "current").write_text(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """What hangs in this process, and not in the ranks that `_launch` watches."""

    def end(number: int, frame: Any) -> None:
        pytest.fail(f"HUNG: it took {2 * ITEM_SECONDS:g} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 2 * ITEM_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        _record(report.nodeid, outcome, str(why)[-4000:])
