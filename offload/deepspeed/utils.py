"""`deepspeed.utils`: the logger."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from offload.deepspeed import comm
from offload.deepspeed.absent import absent


def _make_logger() -> logging.Logger:
    made = logging.getLogger("offload.deepspeed")
    if not made.handlers:
        shown = logging.StreamHandler(sys.stdout)
        shown.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(shown)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks: none given, or -1 among them, is all."""
    if not ranks or -1 in ranks or comm.get_rank() in ranks:
        logger.log(level, "[rank %d] %s", comm.get_rank(), message)


def __getattr__(name: str) -> Any:
    instead = {
        "safe_get_full_fp32_param": "engine.offload_engine.state_dict() holds the fp32 values",
        "safe_get_full_grad": "engine.get_global_grad_norm() is what there is of gradients after the backward",
        "safe_set_full_fp32_param": "write inside deepspeed.zero.GatheredParameters",
    }
    raise absent("deepspeed.utils", name, ("log_dist", "logger"), instead)
