# SPDX-License-Identifier: Apache-2.0
"""What stands in `p.grad` for a gradient that the engine took over: a token of the same shape, dtype and device, no memory.

It is also the token of ownership: a gradient counts at `step()` exactly if its token is still there, so `model.zero_grad()`
and `p.grad = None` mean what they mean in PyTorch.

The engine knows the L2 norm of all its gradients, and can multiply all of them by one number. So what
`torch.nn.utils.get_total_norm` and `clip_grad_norm_` do with the gradients of the whole model is done: the norm of a token is
a `_NormOfTaken`, which becomes a number where the norms of all tokens meet. What autograd adds to a token is handed to the
engine, which adds it to the gradient. Any other operation raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from offload.errors import ParameterAccessError

_aten = torch.ops.aten
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)
_ADDITIONS = (_aten.add_.Tensor, _aten.add.Tensor)
_SCALINGS = (_aten.mul_.Tensor, _aten._foreach_mul_.Tensor)


class TakenGradients(Protocol):
    """Of one engine."""

    def total_norm(self, tokens: Sequence[TakenGradient]) -> float:
        """Of the gradients that these tokens stand for, which must be all."""

    def scale(self, tokens: Sequence[TakenGradient], factor: float) -> None:
        """Multiply them, as clipping does: all by the same number before the step."""

    def accumulate(self, token: TakenGradient, gradient: torch.Tensor) -> None:
        """Backward brought another gradient of the parameter."""


class TakenGradient(torch.Tensor):
    """See the module."""

    fqn: str
    parameter_index: int
    step_index: int
    """The step that it is for."""
    factor: float
    """What the gradient is to be multiplied by."""
    gradients: ref[TakenGradients]

    @staticmethod
    def __new__(
        cls, fqn: str, parameter_index: int, parameter: torch.Tensor, step_index: int, gradients: ref[TakenGradients]
    ) -> TakenGradient:
        token = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=False,
        )
        token.fqn, token.parameter_index, token.step_index, token.factor = fqn, parameter_index, step_index, 1.0
        token.gradients = gradients
        return token

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it may stand for a gradient of the parameter as that is now."""
        return self.shape == parameter.shape and self.dtype == parameter.dtype and self.device == parameter.device

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TakenGradient({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return args[0]
        if func in _NORMS:
            tokens = _tokens_of(func, args[0])
            _require_whole_l2(func, tokens[0], args, kwargs or {})
            norms = [_NormOfTaken([token], ()) for token in tokens]
            return norms if isinstance(args[0], (list, tuple)) else norms[0]
        if func in _ADDITIONS and isinstance(args[0], TakenGradient) and _is_accumulation():
            _gradients_of(func, [args[0]]).accumulate(args[0], args[1])
            return args[0]
        if func in _SCALINGS and isinstance(args[1], torch.Tensor) and args[1].dim() == 0:
            tokens = _tokens_of(func, args[0])
            _gradients_of(func, tokens).scale(tokens, float(args[1]))
            return args[0] if func is _aten.mul_.Tensor else None
        _refuse(func, next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, TakenGradient)))


class _NormOfTaken(torch.Tensor):
    """Norms, shape () or [n], of gradients that the engine took over: a number only together with all the others."""

    tokens: list[TakenGradient]

    @staticmethod
    def __new__(cls, tokens: list[TakenGradient], shape: tuple[int, ...]) -> _NormOfTaken:
        norm = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=tokens[0].dtype, device=tokens[0].device)
        norm.tokens = tokens
        return norm

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"the norm of {[token.fqn for token in self.tokens]}, which the engine knows only together with all others"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return args[0]
        norms = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _NormOfTaken)]
        tokens = [token for norm in norms for token in norm.tokens]
        if func is _aten.stack.default and len(norms) == len(args[0]) and all(not norm.dim() for norm in norms):
            return _NormOfTaken(tokens, (len(tokens),))
        if func is _aten.linalg_vector_norm.default:
            _require_whole_l2(func, tokens[0], args, kwargs or {})
            total = _gradients_of(func, tokens).total_norm(tokens)
            return torch.tensor(total, dtype=torch.float64, device=tokens[0].device)
        if func is _aten.stack.default:
            raise ParameterAccessError(
                f"the norm of {tokens[0].fqn!r}, whose gradient the engine took over, was put together with norms of gradients "
                "that it did not: let the step take those that you assigned to p.grad, and call "
                "engine.clip_grad_norm_(max_norm); clip gradients of other models by themselves."
            )
        _refuse(func, tokens[0])


def _is_accumulation() -> bool:
    """Whether autograd is accumulating into a leaf."""
    node = torch._C._current_autograd_node()
    return node is not None and hasattr(node, "variable")


def _tokens_of(func: Any, given: Any) -> list[TakenGradient]:
    tokens: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(token, TakenGradient) for token in tokens):
        _refuse(func, next(token for token in tokens if isinstance(token, TakenGradient)))
    return tokens


def _gradients_of(func: Any, tokens: Sequence[TakenGradient]) -> TakenGradients:
    found = {id(gradients): gradients for token in tokens if (gradients := token.gradients()) is not None}
    if len(found) != 1:
        _refuse(func, tokens[0])
    return next(iter(found.values()))


def _require_whole_l2(func: Any, token: TakenGradient, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keeps_dims = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if float(order) != 2.0:
        raise ParameterAccessError(
            f"a gradient norm of norm_type={order} was asked for ({token.fqn!r} is among its gradients): of gradients that the "
            "engine took over it knows the L2 norm. Use norm_type=2.0, or engine.clip_grad_norm_(max_norm)."
        )
    if keeps_dims or (dims and func is _aten.linalg_vector_norm.default and len(dims) not in (0, args[0].dim())):
        _refuse(func, token)


def _refuse(func: Any, token: TakenGradient) -> NoReturn:
    raise ParameterAccessError(
        f"the gradient of {token.fqn!r} was taken over by the engine when backward computed it, so {func} cannot read or "
        "change it. To clip, set Config(max_grad_norm=...) or call engine.clip_grad_norm_(max_norm); its norm is "
        "engine.grad_norm after the step; loss scaling for fp16 is engine.backward(loss); to drop gradients call "
        "optimizer.zero_grad()."
    )
