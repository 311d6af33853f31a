# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.utils`: the logger, what memory is in use, loaders that begin again, and leaf modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import Formatter, Logger, StreamHandler, getLevelName, getLogger
from typing import Any, TypeVar

import psutil
from torch import cuda, nn, profiler  # `torch` and `logging` are modules of DeepSpeed's utils

from offload.deepspeed import comm
from offload.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
LOG_LEVELS = {name: getLevelName(name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def _make_logger() -> Logger:
    made = getLogger("offload.deepspeed")
    if not made.handlers:
        shown = StreamHandler(sys.stdout)
        shown.setFormatter(Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(shown)
        made.setLevel(LOG_LEVELS["info"])
        made.propagate = False
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = LOG_LEVELS["info"]) -> None:
    """Log on these ranks; without ranks, or with -1 among them, on all of them."""
    if not ranks or -1 in ranks or comm.get_rank() in ranks:
        logger.log(level, "[rank %d] %s", comm.get_rank(), message)


def set_log_level_from_string(log_level_str: str, custom_logger: Logger | None = None) -> None:
    if log_level_str.lower() not in LOG_LEVELS:
        raise ConfigError(f"log level {log_level_str!r} is unknown: expected one of {', '.join(LOG_LEVELS)}.")
    (custom_logger or logger).setLevel(LOG_LEVELS[log_level_str.lower()])


def instrument_w_nvtx(func: F) -> F:
    """Put a named range around each call, where a profiler records it."""

    @functools.wraps(func)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        with profiler.record_function(func.__qualname__):
            return func(*args, **keywords)

    return wrapped  # type: ignore[return-value]


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log the memory of the device and the host. As in DeepSpeed, do so only with `force`."""
    if not force or comm.get_rank() not in ranks:
        return
    host = psutil.virtual_memory()
    said = f"{message} | host: {host.used / 2**30:.2f} GiB used ({host.percent:.0f} %)"
    if cuda.is_available():
        now, peak = cuda.memory_allocated() / 2**30, cuda.max_memory_allocated() / 2**30
        said += f" | device: {now:.2f} GiB, at most {peak:.2f}"
    logger.info(said)


class RepeatingLoader:
    """A loader that begins again at its end; its sampler goes on to the next epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.epoch = loader, 0
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.epoch += 1
            sampler: Any = getattr(self.loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether `set_z3_leaf_modules` named the module."""
    return bool(vars(model).get("_z3_leaf", False))


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    del parameter
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remember the modules of these classes, given by class or by name. Nothing else changes: units are fetched whole, and
    ranks may take different ways through a mixture of experts."""
    return _mark_classes(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark_classes(model, list(leaf_module_classes), False, raise_if_not_found)


def _mark_classes(model: nn.Module, classes: list[type | str], flag: bool, raises: bool) -> list[nn.Module]:
    if not classes:
        raise ConfigError("leaf_module_classes is empty: name classes of modules, or their names.")
    found = [module for module in model.modules() if any(_is_of(module, one) for one in classes)]
    _mark(found, flag, classes if raises and not found else [])
    return found


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Remember modules by fully qualified name. Return the modules, then the names that are missing."""
    return _mark_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _mark_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark_names(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    fitting = {one: [module for name, module in model.named_modules() if fits(name, one)] for one in wanted}
    found = list(dict.fromkeys(module for modules in fitting.values() for module in modules))
    missing = [one for one, modules in fitting.items() if not modules]
    _mark(found, flag, missing if raises else [])
    return found, missing


def _mark(modules: Iterable[nn.Module], flag: bool, missing: Sequence[type | str]) -> None:
    for module in modules:
        vars(module)["_z3_leaf"] = flag
    if missing:
        raise ConfigError(f"no module of the model is among {missing!r}.")
