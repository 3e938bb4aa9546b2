"""KNorm: keys of small norm attract attention (arXiv 2406.11430)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, Tokens, check_choices, key_norms
from nexus_vllm.policies.tokens import weights_of


@dataclass(frozen=True)
class KNorm(Policy):
    """w_j = e^z of -||k||, of a block's tokens together, averaged over heads.

    tokens: how a block's tokens count together (`ranked`); the paper ranks tokens.
    Raises ValueError on a value out of range.
    """

    tokens: Tokens = "sum"

    name: ClassVar[str] = "knorm"
    needs_keys: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self, tokens=Tokens)

    def weights(self, obs: Observation) -> Tensor:
        return self.by_head(obs).mean(-2)

    def by_head(self, obs: Observation) -> Tensor:
        """The weights of each KV head, [..., Hkv, N]."""
        return weights_of(obs, -key_norms(obs), self.tokens)
