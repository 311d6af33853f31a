# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.utils.clip_grad_norm_` and `get_total_norm` over all the gradients that the engine took over.

The tokens in `p.grad` (`offload.model.taken_gradient`) ask here for the norm, and say here what they are multiplied by. The
step then clips as it does after `Engine.clip_grad_norm_`, to the bit.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat

from torch import Tensor

from offload.errors import ParameterAccessError, UsageError
from offload.model.flat import ParameterInfo, some_of
from offload.model.set_each import set_each
from offload.model.taken_gradient import TakenGradient, TakenGradients
from offload.step.gradients.filling import Filling

_NAMED = 5
_OWN_REFERENCES = 3
"""To a token that nobody else has, while it is asked for the number: the table's, the variable's and the question's."""
_LISTED_REFERENCES = max(map(sys.getrefcount, [object()]))
"""The same of one in a list that is gone through."""
_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class TokenClipping:
    """Owned by the thread that drives the model."""

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        live_parameters: Callable[[], list[ParameterInfo]],
        measure: Callable[[], float],
        accumulate: Callable[[TakenGradient, Tensor], None],
    ) -> None:
        """`live_parameters`: whose gradients count for the coming step; `measure`: their norm; `accumulate`: takes what
        autograd adds to a token."""
        self._parameters, self._live_parameters, self._measure = parameters, live_parameters, measure
        self._accumulate, self._norm = accumulate, math.nan
        self._tokens: dict[int, TakenGradient] = {}
        """The last one of each parameter, by index."""
        self._any_scaled = self._ever_scaled = False
        """Whether a token was multiplied since the last step, or ever."""

    def token(self, info: ParameterInfo, step_index: int) -> TakenGradient:
        """For `p.grad`, which keeps no engine alive."""
        token = self._tokens.get(info.index)
        if token is None or sys.getrefcount(token) > _OWN_REFERENCES or not token.is_of(info.parameter):
            token = self._tokens[info.index] = TakenGradient(
                info.fqn, info.index, info.parameter, step_index, weakref.ref(self)
            )
        token.step_index, token.factor = step_index, 1.0
        return token

    def put_tokens(self, filling: Filling, step_index: int) -> None:
        """`token` of all its parameters, into their `grad`."""
        tokens = filling.tokens
        if not tokens or max(map(sys.getrefcount, tokens)) > _LISTED_REFERENCES:
            reference: weakref.ref[TakenGradients] = weakref.ref(self)
            made = [TakenGradient(info.fqn, info.index, info.parameter, step_index, reference) for info in filling.infos]
            tokens = filling.tokens = made
        else:
            set_each(tokens, "step_index", repeat(step_index))
            if self._ever_scaled:
                set_each(tokens, "factor", repeat(1.0))
        set_each(filling.parameters, "grad", tokens)

    def accumulate(self, token: TakenGradient, gradient: Tensor) -> None:
        """See `taken_gradient.TakenGradients`."""
        self._accumulate(token, gradient)

    def total_norm(self, tokens: Sequence[TakenGradient]) -> float:
        """See `taken_gradient.TakenGradients`. Collective on several ranks."""
        live = {id(info.parameter.grad) for info in self._live_parameters()}
        old = [token.fqn for token in tokens if id(token) not in live]
        if old:
            raise ParameterAccessError(
                f"the norm was asked for of gradients that a step consumed ({some_of(old, _NAMED)}): it is engine.grad_norm."
            )
        given = {id(token) for token in tokens}
        trained = [info for info in self._parameters if info.trainable and info.parameter.grad is not None]
        others = [info.fqn for info in trained if id(info.parameter.grad) not in given]
        if others or len(given) != len(tokens):
            what = f"without that of {some_of(others, _NAMED)}" if others else "some of them twice"
            raise ParameterAccessError(
                f"the norm of {len(tokens)} gradients was asked for, {what}: the engine knows that of all gradients. Give "
                "clip_grad_norm_ (or get_total_norm) all of model.parameters(), call engine.clip_grad_norm_(max_norm), or set "
                "Config(max_grad_norm=...)."
            )
        self._norm = self._measure()
        return self._norm * self.factor()

    def scale(self, tokens: Sequence[TakenGradient], factor: float) -> None:
        """See `taken_gradient.TakenGradients`."""
        if math.isfinite(self._norm) and not 0.0 <= factor <= 1.0:
            raise ParameterAccessError(
                f"the gradient of {tokens[0].fqn!r} was multiplied by {factor:g}: gradients that the engine took over "
                "can only be clipped, all together. Scale the loss instead, or clip by engine.clip_grad_norm_(max_norm)."
            )
        self._any_scaled = self._ever_scaled = True
        for token in tokens:
            token.factor *= factor

    def factor(self) -> float:
        """What the gradients at hand are multiplied by. Raises `UsageError` where it is not one number for all."""
        if not self._any_scaled:
            return 1.0
        factors: dict[float, str] = {}
        for info in self._live_parameters():
            assert isinstance(info.parameter.grad, TakenGradient)
            factors.setdefault(info.parameter.grad.factor, info.fqn)
        if len(factors) > 1:
            told = ", ".join(f"{fqn!r} by {factor:g}" for factor, fqn in list(factors.items())[:_NAMED])
            raise UsageError(
                f"gradients that the engine took over were multiplied by different numbers ({told}): they can only "
                "be clipped all together. Call engine.clip_grad_norm_(max_norm), or optimizer.zero_grad() and backward again."
            )
        return next(iter(factors), 1.0)

    def end_step(self) -> None:
        """The gradients belong to a step now, or are dropped."""
        self._any_scaled = False

    def max_norm(self, norm: float, max_norm: float | None) -> float | None:
        """What the step is to clip a norm of `norm` to, where it would clip to `max_norm`."""
        factor = self.factor()
        if not factor < 1.0:
            return max_norm
        return min(factor * (norm + _EPSILON), math.inf if max_norm is None else max_norm)
