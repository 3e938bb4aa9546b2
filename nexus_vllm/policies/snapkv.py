"""SnapKV: attention of the window, smoothed over neighbouring tokens (arXiv 2404.14469)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, token_attention
from nexus_vllm.policies.tokens import Pooling, check_pool, of_blocks, pooled


@dataclass(frozen=True)
class SnapKV(Policy):
    """w_j = sum over the block of pool_k(A), averaged over KV heads.

    A is softmax attention, averaged over the window's queries and the query heads that share a KV
    head. The authors pool each query head instead, which is the same but for "max".

    pool: k, tokens. pooling: "avg" or "max".
    Raises ValueError on a value out of range.
    """

    pool: int = 5
    pooling: Pooling = "avg"

    name: ClassVar[str] = "snapkv"
    needs_window: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_pool(self.name, self.pool, self.pooling)

    def weights(self, obs: Observation) -> Tensor:
        return of_blocks(pooled(token_attention(obs), obs.block_ids, self.pool, self.pooling))
