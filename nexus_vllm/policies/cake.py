"""CAKE's token score: attention of the window, and how much it changes (arXiv 2503.12491)."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, attention, normalised
from nexus_vllm.policies.tokens import check_pool, of_blocks, pooled


@dataclass(frozen=True)
class CakeScore(Policy):
    """w_j = sum over the block of avgpool_k(mean_q A + gamma Var_q A), averaged over heads.

    Mean and variance run over the window's queries, for each query head; the variance is the
    unbiased one, as in the authors' code, and 0 for a single query. The method's budgets are an
    allocator of the same name.
    gamma: weight of the variance. pool: k, tokens.
    Raises ValueError on a value out of range.
    """

    gamma: float = 200.0
    pool: int = 5

    name: ClassVar[str] = "cake"
    needs_window: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < inf:
            raise ValueError(f"cake: gamma is {self.gamma}, must be finite and at least 0")
        check_pool(self.name, self.pool)

    def weights(self, obs: Observation) -> Tensor:
        def score(mass: Tensor) -> Tensor:
            shares = normalised(mass)  # [r, h, W, g, N, b]
            mean = shares.mean(2)
            # Tensor.var takes several times as long over a dimension that is not the last.
            variance = shares.sub_(mean[:, :, None]).square_().sum(2) / max(1, shares.shape[2] - 1)
            return (mean + self.gamma * variance).mean(2)

        found = attention(obs, score)
        found = found.reshape(*obs.block_ids.shape[:-1], *found.shape[1:])
        return of_blocks(pooled(found, obs.block_ids, self.pool))
