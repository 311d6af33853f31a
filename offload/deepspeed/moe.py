# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.moe.layer.MoE`: a layer of experts of which every token is given to k, under DeepSpeed's parameter names.

Every rank computes all experts: what of them does not fit lies in a tier between its uses, as every module's parameters.
`ep_size` makes no difference to what is computed. The gate is that of GShard (Lepikhin et al., 2020) and, for k = 1, of Switch
Transformers (Fedus et al., 2021); all sizes per rank:

    gates       [s, e]     softmax of the gate's logits, fp32, of s tokens over e experts
    capacity    c          max(min_capacity, ceil(k x factor x s / e)) tokens of each expert; without drop_tokens the most
                           that any is given
    combine     [s, e, c]  what of expert e's answer in place c goes to token s
    auxiliary   []         e x sum over experts of (mean gate x share of tokens whose first choice it is)
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload.deepspeed.absent import AskedWrongly, check_keywords
from offload.errors import UsageError

_NOISES = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2


@dataclass(frozen=True, slots=True)
class Routing:
    """What a gate does; DeepSpeed's defaults."""

    k: int = 1
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    noisy_gate_policy: str | None = None
    drop_tokens: bool = True
    use_rts: bool = True
    top2_2nd_expert_sampling: bool = True


class TopKGate(nn.Module):
    """Gives each token to its k best experts, as far as these have room."""

    def __init__(self, model_dim: int, num_experts: int, routing: Routing) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self._routing = routing

    def forward(self, tokens: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [s, m], used [s] -> auxiliary [], combine [s, e, c], tokens given to each expert [e]."""
        routing = self._routing
        given = tokens.float()
        if routing.noisy_gate_policy == "Jitter" and self.training:
            given = given * torch.empty_like(given).uniform_(1 - _JITTER, 1 + _JITTER)
        logits = F.linear(given, self.wg.weight.float())
        gates = logits.softmax(dim=1)
        chosen = self._choose(logits, gates)  # [k, s, e]: 1 where it is the choice
        if used is not None:
            chosen = chosen * used.reshape(-1, 1).to(chosen.dtype)
        counts = chosen.sum(dim=(0, 1)).long()
        experts = gates.shape[1]
        auxiliary = (gates.mean(dim=0) * chosen[0].mean(dim=0)).sum() * experts
        capacity = self._capacity(gates.shape[0], experts) if routing.drop_tokens else max(1, int(counts.max()))
        kept = self._with_room(chosen, gates, capacity)
        # A choice's place in its expert: after the earlier choices of all tokens, in the order of the tokens.
        flat = kept.reshape(-1, experts)
        places = ((flat.cumsum(dim=0) - 1) * flat).sum(dim=1).reshape(kept.shape[:2]).long()
        weights = (gates * kept).sum(dim=2)  # [k, s]
        if routing.k > 1:
            weights = weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).eps)
        at = F.one_hot(places, capacity).to(weights.dtype)
        return auxiliary, torch.einsum("ks,kse,ksc->sec", weights, kept, at), counts

    def _choose(self, logits: Tensor, gates: Tensor) -> Tensor:
        routing, experts = self._routing, logits.shape[1]
        noisy = routing.noisy_gate_policy == "RSample" and self.training
        first = (logits + _gumbel(logits)).argmax(dim=1) if noisy and routing.k == 1 else gates.argmax(dim=1)
        choices, left = [F.one_hot(first, experts)], logits
        for number in range(1, routing.k):
            if number == 1 and routing.k == 2 and routing.top2_2nd_expert_sampling:
                left = left + _gumbel(left)
            left = left.masked_fill(choices[-1].bool(), -math.inf)
            choices.append(F.one_hot(left.argmax(dim=1), experts))
        return torch.stack(choices).to(gates.dtype)

    def _capacity(self, tokens: int, experts: int) -> int:
        routing = self._routing
        factor = routing.capacity_factor if self.training else routing.eval_capacity_factor
        return max(routing.min_capacity, math.ceil(tokens / experts * factor * routing.k))

    def _with_room(self, chosen: Tensor, gates: Tensor, capacity: int) -> Tensor:
        """Of the choices those that find room: the first ones; of k = 1 with `use_rts` random ones, of k > 2 the likeliest."""
        flat = chosen.reshape(-1, chosen.shape[2])
        if not self._routing.drop_tokens or gates.shape[0] <= capacity:
            return chosen
        if self._routing.k > 2:
            best = (gates * chosen.sum(dim=0)).topk(capacity, dim=0).indices
            return chosen * torch.zeros_like(gates).scatter_(0, best, 1.0)
        if self._routing.k == 1 and self._routing.use_rts:
            best = (flat * torch.rand_like(flat)).topk(capacity, dim=0).indices
            return (flat * torch.zeros_like(flat).scatter_(0, best, 1.0)).reshape(chosen.shape)
        return (flat * (flat.cumsum(dim=0) <= capacity)).reshape(chosen.shape)


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


class Experts(nn.Module):
    def __init__(self, expert: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(num_experts)])

    def forward(self, given: Tensor) -> Tensor:
        """[e, c, m] -> [e, c, m]"""
        answers = [expert(part) for expert, part in zip(self.deepspeed_experts, given, strict=True)]
        return torch.stack([answer[0] if isinstance(answer, tuple) else answer for answer in answers])


class MOELayer(nn.Module):
    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.l_aux, combine, self.exp_counts = self.gate(tokens, used_token)
        given = torch.einsum("sec,sm->ecm", (combine != 0).to(tokens.dtype), tokens)
        answers = self.experts(given)
        return torch.einsum("sec,ecm->sm", combine.to(answers.dtype), answers).reshape(hidden_states.shape)


class MoE(nn.Module):
    """A mixture of `num_experts` copies of `expert`, whole on every rank. Returns output, auxiliary loss, tokens by expert.

    hidden_size   of the input and the output
    k             experts of each token
    ep_size       ranks among which DeepSpeed would divide the experts; divides `num_experts`
    use_residual  the output is weighed against that of `expert` itself
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        use_residual: bool = False,
        use_tutel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        known = (field.name for field in fields(Routing))
        check_keywords("MoE", options, (*known, "enable_expert_tensor_parallelism"))
        if num_experts % ep_size:
            raise AskedWrongly(f"MoE: ep_size={ep_size} does not divide num_experts={num_experts}: choose one that does.")
        if options.get("noisy_gate_policy") not in _NOISES:
            raise AskedWrongly(f"MoE: noisy_gate_policy={options['noisy_gate_policy']!r} is none of 'Jitter' and 'RSample'.")
        if options.pop("enable_expert_tensor_parallelism", False) or use_tutel:
            raise UsageError("MoE: every rank computes whole experts, without Tutel: leave the argument out.")
        if not 1 <= k <= num_experts:
            raise AskedWrongly(f"MoE: k={k} is not a number of the {num_experts} experts.")
        self.use_residual, self.ep_size = use_residual, ep_size
        self.num_experts = self.num_local_experts = num_experts
        self.deepspeed_moe = MOELayer(TopKGate(hidden_size, num_experts, Routing(k=k, **options)), Experts(expert, num_experts))
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            plain = self.mlp(hidden_states)
            weights = self.coefficient(hidden_states).softmax(dim=-1)
            output = output * weights[..., :1] + (plain[0] if isinstance(plain, tuple) else plain) * weights[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether there are any, and how many experts the last has."""
    found = [one.num_experts for one in module.modules() if isinstance(one, MoE)]
    return bool(found), found[-1] if found else 0


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The groups as they are: experts are sharded as everything else."""
    del max_group_size
    return list(param_groups) if isinstance(param_groups, (list, tuple)) else [param_groups]
