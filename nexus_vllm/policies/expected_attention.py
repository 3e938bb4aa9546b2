"""Expected attention: what queries to come will look at, as far as past ones tell.

arXiv 2510.00636. Where the paper takes all queries of the prompt, this takes those of the window;
and the softmax runs over all live tokens, where the authors' code leaves the first four out.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy
from nexus_vllm.policies.tokens import of_blocks


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """w_j = sum over the block of (softmax(z) + eps) ||v||, averaged over heads.

    Queries before rotation are taken to be normal with the window's mean mu and covariance Sigma,
    and to be rotated by the average R over the next `future` positions. For a key k then
    z = scale k R mu + scale^2 k R Sigma R' k / 2, the logarithm of the expected exponential logit.

    future: positions; those beyond what `rope` knows count as its last.
    eps: added to each token's attention before its value's norm counts.
    Raises ValueError on a value out of range.
    """

    future: int = 512
    eps: float = 0.0

    name: ClassVar[str] = "expected-attention"
    needs_window: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.future < 1:
            raise ValueError(f"expected-attention: future is {self.future}, must be at least 1")
        if not 0 <= self.eps < inf:
            raise ValueError(
                f"expected-attention: eps is {self.eps}, must be finite and at least 0"
            )

    def weights(self, obs: Observation) -> Tensor:
        queries, positions, keys = obs.window()
        values = obs.all_values()
        directions = self._rotated(obs, queries.float(), positions)
        lead, size = obs.block_ids.shape[:-1], obs.block_ids.shape[-1]
        kv_heads, block, dim = keys.shape[-3:]
        rows = [
            self._row(d, k, obs.scale)
            for d, k in zip(
                directions.reshape(-1, *directions.shape[-3:]).unflatten(2, (kv_heads, -1)),
                keys.reshape(-1, size, kv_heads, block, dim),
                strict=True,
            )
        ]
        z = torch.stack(rows)  # [R, Hkv, g, N, b]
        if obs.valid is not None:
            z = z.masked_fill(~obs.valid.reshape(-1, 1, 1, size, 1), -torch.inf)
        share = z.flatten(-2).softmax(-1).view_as(z).mean(2)
        norms = values.float().norm(dim=-1).transpose(-3, -2)  # [..., Hkv, N, b]
        return of_blocks((share.reshape(*lead, kv_heads, size, block) + self.eps) * norms)

    def _rotated(self, obs: Observation, queries: Tensor, positions: Tensor) -> Tensor:
        """R mu, then R (q - mu) of each query, [..., 1 + W, Hq, D]."""
        if obs.rope is None:
            raise ValueError("expected-attention: the observation has no rope")
        rope = obs.rope
        cos, sin = (of[positions].float()[:, None] for of in (rope.cos, rope.sin))  # [W, 1, R / 2]
        length = cos.square() + sin.square()  # not 1 where the embedding stretches, as YaRN's
        plain = rope.turned(queries, cos / length, -sin / length)
        mean = plain.mean(-3, keepdim=True)
        first = int(positions[-1]) + 1
        ahead = torch.arange(first, first + self.future).clamp(max=len(rope.cos) - 1)
        turn = rope.cos[ahead].float().mean(0), rope.sin[ahead].float().mean(0)
        return rope.turned(torch.cat([mean, plain - mean], dim=-3), *turn)

    @staticmethod
    def _row(directions: Tensor, keys: Tensor, scale: float) -> Tensor:
        """z [Hkv, g, N, b] of one row: directions [1 + W, Hkv, g, D], keys [N, Hkv, b, D]."""
        logits = scale * torch.einsum("whgd,nhbd->hgwnb", directions, keys.float())
        return logits[:, :, 0] + logits[:, :, 1:].square().mean(2) / 2
