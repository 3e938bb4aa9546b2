"""Expected attention: what queries to come will look at, as far as past ones tell.

arXiv 2510.00636. Where the paper takes all queries of the prompt, this takes those of the window.
The softmax runs over the tokens of blocks that may leave: a sink would take nearly all of it, more
in some heads than in others, and heads would count in the average by how little they look at it.
The authors' code leaves out the first four tokens to the same end.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.policies import base
from nexus_vllm.policies.base import Observation, Policy
from nexus_vllm.policies.tokens import of_blocks


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """w_j = sum over the block of (softmax(z) + eps) ||v||, averaged over heads.

    Queries before rotation are taken to be normal with the window's mean mu and covariance Sigma,
    and to be rotated by the average R over the next `future` positions. For a key k then
    z = scale k R mu + scale^2 k R Sigma R' k / 2, the logarithm of the expected exponential logit.
    The softmax is over candidates alone; other blocks have eps ||v||.

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
        lead, size = obs.block_ids.shape[:-1], obs.block_ids.shape[-1]
        kv_heads, block, dim = keys.shape[-3:]
        directions = self._rotated(obs, queries.float(), positions)
        directions = directions.unflatten(-2, (kv_heads, -1))
        rows = zip(
            directions.reshape(-1, *directions.shape[-4:]),  # [R, 1 + W, Hkv, g, D]
            keys.reshape(-1, size, kv_heads, block, dim),
            values.reshape(-1, size, kv_heads, block, values.shape[-1]),
            obs.candidates.reshape(-1, size),
            strict=True,
        )
        return torch.stack([self._row(*row, obs.scale) for row in rows]).view(*lead, size)

    def _rotated(self, obs: Observation, queries: Tensor, positions: Tensor) -> Tensor:
        """R mu, then R (q - mu) of each query, [..., 1 + W, Hq, D]."""
        if obs.rope is None:
            raise ValueError("expected-attention: the observation has no rope")
        rope = obs.rope
        cos, sin = (of[positions].float()[:, None] for of in (rope.cos, rope.sin))  # [W, 1, R / 2]
        length = cos.square() + sin.square()  # not 1 where the embedding stretches, as YaRN's
        plain = rope.turned(queries, cos / length, -sin / length)
        mean = plain.mean(-3, keepdim=True)
        ahead = positions[-1] + 1 + torch.arange(self.future, device=positions.device)
        ahead = ahead.clamp(max=len(rope.cos) - 1)
        turn = rope.cos[ahead].float().mean(0), rope.sin[ahead].float().mean(0)
        return rope.turned(torch.cat([mean, plain - mean], dim=-3), *turn)

    def _row(
        self, directions: Tensor, keys: Tensor, values: Tensor, candidates: Tensor, scale: float
    ) -> Tensor:
        """Weights [N] of one row: directions [1 + W, Hkv, g, D], keys and values [N, Hkv, b, D].

        Holds about MAX_LOGITS logits at a time, as attention maps do.
        """
        size, kv_heads, block = keys.shape[:3]
        step = max(1, base.MAX_LOGITS // (len(directions) * directions.shape[2] * size * block))
        found = []
        for first in range(0, kv_heads, step):
            some = slice(first, first + step)
            logits = torch.einsum("whgd,nhbd->whgnb", directions[:, some], keys[:, some].float())
            logits *= scale
            z = logits[0] + logits[1:].square_().mean(0) / 2  # [h, g, N, b]
            z.masked_fill_(~candidates[:, None], -torch.inf)
            # No candidate at all: no share.
            share = z.flatten(-2).softmax(-1).nan_to_num_(nan=0.0).view_as(z).mean(1)
            norms = values[:, some].float().norm(dim=-1).transpose(0, 1)  # [h, N, b]
            found.append((share + self.eps) * norms)
        return of_blocks(torch.cat(found))
