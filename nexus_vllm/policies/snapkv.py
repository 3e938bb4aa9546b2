"""SnapKV: attention of the window, smoothed over neighbouring tokens (arXiv 2404.14469)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, Pool, check_choices, token_attention
from nexus_vllm.policies.tokens import Pooling, check_pool, of_blocks, pooled


@dataclass(frozen=True)
class SnapKV(Policy):
    """w_j = sum over the block of pool_k(A), averaged over KV heads.

    A is softmax attention, averaged over the window's queries and the query heads that share a KV
    head. The authors pool each query head instead, which is the same but for "max".

    pool: k, tokens. pooling: "avg" or "max".
    pool_rows: "max" takes each token's largest A of all queries instead of the mean. pool_heads:
      "max" takes the largest of the query heads that share a KV head, and then of KV heads.
    Raises ValueError on a value out of range.
    """

    pool: int = 5
    pooling: Pooling = "avg"
    pool_rows: Pool = "mean"
    pool_heads: Pool = "mean"

    name: ClassVar[str] = "snapkv"
    needs_window: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_pool(self.name, self.pool, self.pooling)
        check_choices(self, pool_rows=Pool, pool_heads=Pool)

    def weights(self, obs: Observation) -> Tensor:
        tokens = token_attention(obs, self.pool_rows, self.pool_heads)
        return of_blocks(pooled(tokens, obs.block_ids, self.pool, self.pooling), self.pool_heads)
