"""KeyDiff: keys unlike the others (arXiv 2504.15364)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from nexus_vllm.policies.base import Observation, Policy, check_choices
from nexus_vllm.policies.tokens import Tokens, ranked


@dataclass(frozen=True)
class KeyDiff(Policy):
    """w_j = e^z of -cos(k, mean of unit keys), of a block's tokens together, averaged over heads.

    tokens: how a block's tokens count together (`ranked`); the paper ranks tokens. The method looks
    at no queries, and so knows nothing of what is asked.
    Raises ValueError on a value out of range.
    """

    tokens: Tokens = "max"

    name: ClassVar[str] = "keydiff"
    needs_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choices(self, tokens=Tokens)

    def weights(self, obs: Observation) -> Tensor:
        return self.by_head(obs).mean(-2)

    def by_head(self, obs: Observation) -> Tensor:
        """The weights of each KV head, [..., Hkv, N]."""
        unit = functional.normalize(obs.all_keys().float(), dim=-1)  # [..., N, Hkv, b, D]
        counted = unit
        if obs.valid is not None:
            counted = unit * obs.valid[..., None, None, None]
        anchor = functional.normalize(counted.sum(dim=(-4, -2), keepdim=True), dim=-1)
        return ranked(-(unit * anchor).sum(-1), obs.candidates, self.tokens)
