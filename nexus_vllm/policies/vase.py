"""VaSE: a share of the room for values of large range (arXiv 2606.03928)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, token_attention, value_ranges
from nexus_vllm.policies.tokens import check_pool, of_blocks, pooled

_RESERVED = (1e20, 1e34)
"""Added to the weights of reserved blocks, from the smallest range to the largest, evenly in their
logarithms. No other weight is more than 1, so that reserved blocks stay with any selector, and
where a row keeps fewer than there are, those of the largest ranges do; "gumbel" may do otherwise at
temperatures far above 1, where weights hardly count."""


@dataclass(frozen=True)
class VaSE(Policy):
    """SnapKV's score, and on top of all others the blocks whose values have the largest range.

    Range(v) = max - min over a value's dimensions; of a block, its largest token's, averaged over
    heads. Of the blocks that are not forced, round(share * how many of them will stay) with the
    largest range stay in any case; the selector draws the others. Where rows keep different
    numbers, that is of their average, and a row with less room keeps those of the largest range.
    The paper samples the others by A-Res, which is the selector "gumbel" at temperature 1.

    share: of the room, 0 to 1. pool: tokens over which attention is averaged.
    Raises ValueError on a value out of range.
    """

    share: float = 0.25
    pool: int = 5

    name: ClassVar[str] = "vase"
    needs_window: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    needs_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"vase: share is {self.share}, must be between 0 and 1")
        check_pool(self.name, self.pool)

    def weights(self, obs: Observation) -> Tensor:
        return of_blocks(pooled(token_attention(obs), obs.block_ids, self.pool))

    def reserve(self, obs: Observation, weights: Tensor) -> Tensor:
        if obs.keep is None:
            raise ValueError("vase: the observation does not say how many blocks will stay")
        spread = value_ranges(obs).amax(-1).mean(-1).masked_fill(~obs.candidates, -1)
        forced = ~obs.candidates if obs.valid is None else ~obs.candidates & obs.valid
        reserved = ((obs.keep - forced.sum(-1)).clamp(min=0) * self.share).round()
        newest_first = obs.block_ids.argsort(dim=-1, descending=True)
        rank = spread.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
        rank = newest_first.gather(-1, rank).argsort(dim=-1)
        count = reserved[..., None]
        low, high = (math.log10(end) for end in _RESERVED)
        step = (high - low) / count.clamp(min=1)
        return weights + torch.where(rank < count, 10 ** (high - step * rank), 0.0)
