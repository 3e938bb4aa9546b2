"""Nexus: window attention plus a walk over the window's rows (arXiv 2606.23961, section 2)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nexus_vllm.policies.base import (
    Heads,
    Observation,
    Policy,
    Pool,
    block_attention,
    check_choices,
    pool,
)

WalkRows = Literal["newest", "oldest", "spread"]
WalkOver = Literal["all", "candidates"]


@dataclass(frozen=True)
class Nexus(Policy):
    """w_j = a_j + lam c_j + eps_tie r_j, computed per head and averaged over heads.

    a is the mean of the rows S_q of the block attention map (`block_attention`), q over the window.
    The walk takes H of the rows one after the other, C <- C + (1 + <S_q, C>) S_q, and c is C scaled
    to the sum of a: a row that agrees with those before counts for more. r is the age rank, oldest
    0 and newest 1. With walk_over "all" the weights sum to 1 + lam + eps_tie N / 2.

    walk_steps: H. Each step wants a fresh row, so at most W are taken; 0 leaves the walk out.
    lam: weight of the walk; the paper calls 0.25 to 0.5 safe.
    eps_tie: weight of the age rank, a tie-break.
    heads: "per-head" computes maps, a and c for every query head. "mean" is the paper's form,
      queries and keys averaged over heads first; it did far worse on the models we measured.
    walk_rows: the rows the walk takes, in order; the paper leaves it open. "newest": the last
      queries first, nearest to what will be asked next. "oldest": the order of the authors' draft.
      "spread": evenly from the newest to the oldest.
    walk_over: "all" as in the paper, where agreement is mostly agreement about the sink.
      "candidates" walks on rows without the forced blocks, renormalised, and scales c to the
      candidates' share of a: lam then keeps its meaning, and a head that looks at little but the
      sink speaks no louder than before.
    pool_rows: "max" makes a the largest of the rows in each block, so that one query is enough to
      keep what it looks at. pool_heads: "max" takes the largest a + lam c of all heads instead of
      their mean. Such weights sum to more.
    Raises ValueError on a value out of range.
    """

    walk_steps: int = 3
    lam: float = 0.5
    eps_tie: float = 1e-6
    heads: Heads = "per-head"
    walk_rows: WalkRows = "newest"
    walk_over: WalkOver = "candidates"
    pool_rows: Pool = "mean"
    pool_heads: Pool = "mean"

    name: ClassVar[str] = "nexus"
    needs_window: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field, low in (("walk_steps", 0), ("lam", 0.0), ("eps_tie", 0.0)):
            value = getattr(self, field)
            if not low <= value < float("inf"):
                raise ValueError(f"nexus: {field} is {value}, must be finite and at least {low}")
        check_choices(
            self,
            heads=Heads,
            walk_rows=WalkRows,
            walk_over=WalkOver,
            pool_rows=Pool,
            pool_heads=Pool,
        )

    def weights(self, obs: Observation) -> Tensor:
        maps = block_attention(obs, self.heads)  # [..., H', W, N]
        direct = self._direct(maps)
        score = direct + self.lam * self._walk(maps, direct, obs.candidates)
        return pool(score, self.pool_heads, -2) + self.eps_tie * age_rank(obs.block_ids)

    def _direct(self, maps: Tensor) -> Tensor:
        """a, [..., H', N]."""
        if self.pool_rows == "max":
            return maps.amax(-2)
        # A query that saw no live block has a row of zeros: leave it out of the mean.
        seen = (maps.sum(-1) > 0).sum(-1, keepdim=True).clamp(min=1)
        return maps.sum(-2) / seen

    def _walk(self, maps: Tensor, direct: Tensor, candidates: Tensor) -> Tensor:
        """c, [..., H', N]."""
        if self.walk_over == "candidates":
            direct = direct * candidates[..., None, :]
            maps = _normalise(maps * candidates[..., None, None, :])
        state = torch.zeros_like(direct)
        for index in self._row_order(maps.shape[-2]):
            row = maps[..., index, :]
            state = state + (1 + (row * state).sum(-1, keepdim=True)) * row
        return direct.sum(-1, keepdim=True) * _normalise(state)

    def _row_order(self, window: int) -> list[int]:
        """Indices of the window rows the walk takes, in order; 0 is the oldest row."""
        steps = min(self.walk_steps, window)
        if self.walk_rows == "oldest":
            return list(range(steps))
        if self.walk_rows == "newest":
            return [window - 1 - step for step in range(steps)]
        return [
            window - 1 - round(step * (window - 1) / max(1, steps - 1)) for step in range(steps)
        ]


def _normalise(x: Tensor) -> Tensor:
    """Rows of x >= 0 divided by their sums; rows of zeros stay zeros."""
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def age_rank(block_ids: Tensor) -> Tensor:
    """Rank of each block by original position, [..., N] float32: oldest 0, newest 1 (N = 1: 0)."""
    rank = block_ids.argsort(dim=-1).argsort(dim=-1)
    return rank.to(torch.float32) / max(1, block_ids.shape[-1] - 1)
