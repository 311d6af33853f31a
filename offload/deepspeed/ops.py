# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's optimizers are torch's, or `offload.Lion`, with DeepSpeed's default numbers. The engine brings the kernels."""

from __future__ import annotations

from typing import Any

import torch

import offload
from offload import Lion
from offload.deepspeed.absent import check_keywords
from offload.deepspeed.states import States
from offload.deepspeed_config import Maker, make_optimizer

_ADAM = (
    *("bias_correction", "betas", "eps", "weight_decay", "amsgrad", "set_grad_none", "fp32_optimizer_states"),
    *("adamw_mode", "adam_w_mode"),
)
_ADAGRAD = ("eps", "weight_decay", "amsgrad", "fp32_optimizer_states")
_LION = ("betas", "weight_decay", "set_grad_none", "fp32_optimizer_states")


class _Maker(type):
    """Classes whose calls make an optimizer of another class, of which every instance passes for theirs."""

    kind: str
    keywords: tuple[str, ...]
    lr: float
    classes: tuple[type, ...]

    def __call__(cls, model_params: Any = None, lr: float | None = None, **keywords: Any) -> torch.optim.Optimizer:
        model_params = keywords.pop("params", model_params)
        check_keywords(cls.__name__, keywords, cls.keywords)
        if "adamw_mode" in keywords:
            keywords["adam_w_mode"] = keywords.pop("adamw_mode")
        made = make_optimizer(Maker(cls.kind, {"lr": cls.lr if lr is None else lr} | keywords), model_params)
        wide = vars(made)["fp32_optimizer_states"] = keywords.get("fp32_optimizer_states", True)
        if wide:
            _compute_in_fp32(made)
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        made = getattr(instance, "source_class", type(instance))
        return isinstance(made, type) and issubclass(made, cls.classes)


def _compute_in_fp32(optimizer: torch.optim.Optimizer) -> None:
    """Have its own `step` update 16-bit parameters in fp32, with states in fp32. An engine has kernels that do."""
    narrow: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def widen(stepped: object, *_: Any) -> None:
        if stepped is not optimizer:  # but an engine's
            return
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.dtype in (torch.bfloat16, torch.float16):
                    held, gradient = one.data, one.grad
                    one.data = held.float()
                    one.grad = None
                    one.grad = gradient.float()
                    narrow.append((one, held, gradient))

    def round_again(*_: Any) -> None:
        for one, held, gradient in narrow:
            held.copy_(one.data)
            one.grad = None
            one.data = held
            one.grad = gradient
        narrow.clear()

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(round_again)


class DeepSpeedCPUAdam(metaclass=_Maker):
    """AdamW, or Adam with `adamw_mode=False` (`adam_w_mode`); weight decay is 0 unless `weight_decay` is given."""

    kind, keywords, lr, classes = "Adam", _ADAM, 1e-3, (torch.optim.AdamW, torch.optim.Adam)


class FusedAdam(DeepSpeedCPUAdam):
    """The same optimizer under another name."""


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    kind, keywords, lr, classes = "Adagrad", _ADAGRAD, 1e-2, (torch.optim.Adagrad,)


class DeepSpeedCPULion(metaclass=_Maker):
    kind, keywords, lr, classes = "Lion", _LION, 1e-3, (Lion,)


class FusedLion(DeepSpeedCPULion):
    """The same optimizer under another name."""


class BaseOptimizer:
    """`engine.optimizer.optimizer`: the engine's optimizer, under the class that the script made."""

    def __init__(self, optimizer: Any, engine: offload.Engine) -> None:
        vars(self).update(_optimizer=optimizer, state=States(engine))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return getattr(vars(self)["_optimizer"], "source_class", BaseOptimizer)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled from the gradient."""
        return issubclass(self.__class__, torch.optim.AdamW)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_optimizer"], name, value)


class _Partitioning(type):
    """Of which what `initialize` returns for a run with ZeRO passes for an instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return bool(getattr(instance, "partitions", False))


class ZeROOptimizer(metaclass=_Partitioning):
    """An engine's optimizer from stage 1 on; nothing else is one."""


class _Shown(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "partitions")


class DeepSpeedOptimizer(metaclass=_Shown):
    """An engine's optimizer, of any stage."""


class OpBuilder:
    """Says whether an operator is available. Nothing is compiled at run time: what there is comes with the package."""

    NAME = ""
    is_there = False

    def is_compatible(self, verbose: bool = False) -> bool:
        del verbose
        return self.is_there


_THERE = {
    **{"AsyncIO": "async_io", "CPUAdagrad": "cpu_adagrad", "CPUAdam": "cpu_adam", "CPULion": "cpu_lion"},
    **{"FusedAdam": "fused_adam", "FusedLion": "fused_lion"},
}
_ABSENT = {
    **{"FusedLamb": "fused_lamb", "Transformer": "transformer", "Utils": "utils", "Quantizer": "quantizer"},
    **{"SparseAttn": "sparse_attn", "Inference": "transformer_inference", "FPQuantizer": "fp_quantizer"},
}
BUILDERS: dict[str, type[OpBuilder]] = {
    f"{name}Builder": type(f"{name}Builder", (OpBuilder,), {"NAME": key, "is_there": name in _THERE})
    for name, key in (_THERE | _ABSENT).items()
}
COMPATIBLE = {one.NAME: one.is_there for one in BUILDERS.values()}
"""By DeepSpeed's name of the operator."""
