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
from nexus_vllm.policies.keydiff import KeyDiff
from nexus_vllm.policies.knorm import KNorm

WalkRows = Literal["newest", "oldest", "spread"]
WalkOver = Literal["all", "candidates"]
WalkState = Literal["fresh", "carried"]
Prior = Literal["none", "knorm", "keydiff"]

_PRIORS = {"knorm": KNorm().by_head, "keydiff": KeyDiff().by_head}


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
    walk_state: "fresh" starts each walk from C = 0, as the paper has it. "carried" starts it from
      the c that the last eviction ended with, averaged over heads, on the blocks that are still
      there and that the walk runs over, scaled to 1: the past counts as one row, with which the
      new ones can agree, and fades with each eviction. It travels with the blocks. The authors'
      notes keep one such C for a layer; the paper has none.
    pool_rows: "max" makes a the largest of the rows in each block, so that one query is enough to
      keep what it looks at. pool_heads: "max" takes the largest a + lam c of all heads instead of
      their mean. Such weights sum to more.
    prior: what a head's keys tell whatever is asked: the weights of another policy, p, on the
      candidates and scaled to 1. With A the candidates' sum of a + lam c, they then weigh
      (1 - prior_weight) (a_j + lam c_j) + prior_weight A p_j. Where the window looks hard at some
      blocks these still come first; where it looks at nothing much, as before a question that is
      yet to come, p decides. "none" is the paper; a server's default is "keydiff" (`Settings`).
    Raises ValueError on a value out of range.
    """

    walk_steps: int = 3
    lam: float = 0.5
    eps_tie: float = 1e-6
    heads: Heads = "per-head"
    walk_rows: WalkRows = "newest"
    walk_over: WalkOver = "candidates"
    walk_state: WalkState = "fresh"
    pool_rows: Pool = "mean"
    pool_heads: Pool = "mean"
    prior: Prior = "none"
    prior_weight: float = 0.5

    name: ClassVar[str] = "nexus"
    needs_window: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field, low in (("walk_steps", 0), ("lam", 0.0), ("eps_tie", 0.0)):
            value = getattr(self, field)
            if not low <= value < float("inf"):
                raise ValueError(f"nexus: {field} is {value}, must be finite and at least {low}")
        if not 0 <= self.prior_weight <= 1:
            raise ValueError(f"nexus: prior_weight is {self.prior_weight}, must be between 0 and 1")
        check_choices(
            self,
            heads=Heads,
            walk_rows=WalkRows,
            walk_over=WalkOver,
            walk_state=WalkState,
            pool_rows=Pool,
            pool_heads=Pool,
            prior=Prior,
        )

    @property
    def state_size(self) -> int:
        return 2 if self.walk_state == "carried" else 0

    def remember(self, obs: Observation) -> Tensor:
        """c averaged over heads, for the next walk, and the weight, which comes with it."""
        score, walk = self._score(obs)
        return torch.stack([walk, score], dim=-1)

    def weights(self, obs: Observation) -> Tensor:
        if self.state_size:
            return obs.remembered()[..., 1]
        return self._score(obs)[0]

    def _score(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Weights, and c averaged over heads and scaled to 1; both [..., N]."""
        score, walk = self._of_heads(obs)
        if self.prior != "none":
            score = self._with_prior(obs, score)
        age = age_rank(obs.block_ids, obs.valid)
        return pool(score, self.pool_heads, -2) + self.eps_tie * age, walk.mean(-2)

    def _of_heads(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """a + lam c of each head, and c scaled to 1; both [..., H', N]."""
        if obs.reader is not None:
            queries, positions = obs.asked()
            return obs.reader.walk(
                queries,
                positions,
                obs.scale,
                self.heads,
                candidates=obs.candidates if self.walk_over == "candidates" else None,
                order=self._row_order(len(positions)),
                lam=self.lam,
                pool_rows=self.pool_rows,
                start=None if obs.state is None or not self.state_size else obs.state[..., 0],
            )
        maps = block_attention(obs, self.heads)  # [..., H', W, N]
        direct = self._direct(maps)
        counted = direct
        if self.walk_over == "candidates":
            inside = obs.candidates[..., None, :]
            counted, maps = direct * inside, _normalise(maps * inside[..., None, :])
        walk = _normalise(self._walk(maps, self._start(obs)))
        return direct + self.lam * counted.sum(-1, keepdim=True) * walk, walk

    def _with_prior(self, obs: Observation, score: Tensor) -> Tensor:
        """score, [..., H', N], and what the keys of each head tell."""
        inside = obs.candidates[..., None, :]
        known = _normalise(_PRIORS[self.prior](obs) * inside)  # [..., Hkv, N]
        if self.heads == "mean":
            known = known.mean(-2, keepdim=True)
        known = known.repeat_interleave(score.shape[-2] // known.shape[-2], dim=-2)
        share = (score * inside).sum(-1, keepdim=True)
        return (1 - self.prior_weight) * score + self.prior_weight * share * known

    def _direct(self, maps: Tensor) -> Tensor:
        """a, [..., H', N]."""
        if self.pool_rows == "max":
            return maps.amax(-2)
        # A query that saw no live block has a row of zeros: leave it out of the mean.
        seen = (maps.sum(-1) > 0).sum(-1, keepdim=True).clamp(min=1)
        return maps.sum(-2) / seen

    def _start(self, obs: Observation) -> Tensor:
        """C before the first row, the same for every head, [..., 1, N]."""
        if self.walk_state == "fresh" or obs.state is None:
            return torch.zeros_like(obs.block_ids, dtype=torch.float32)[..., None, :]
        known = obs.state[..., 0].nan_to_num(nan=0.0)
        if self.walk_over == "candidates":
            known = known * obs.candidates
        return _normalise(known)[..., None, :]

    def _walk(self, maps: Tensor, start: Tensor) -> Tensor:
        """C after the last row, [..., H', N]."""
        state = start.expand(*maps.shape[:-2], -1)
        for index in self._row_order(maps.shape[-2]):
            row = maps[..., index, :]
            state = state + (1 + (row * state).sum(-1, keepdim=True)) * row
        return state

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


def age_rank(block_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Rank of each block by original position, [..., N] float32: oldest 0, newest 1 (N = 1: 0).

    valid: as in `Observation`. Padding comes after all blocks, and how much there is, which is
    other rows' doing, does not count.
    """
    rank = block_ids.argsort(dim=-1).argsort(dim=-1).to(torch.float32)
    if valid is None:
        return rank / max(1, block_ids.shape[-1] - 1)
    return rank / (valid.sum(-1, keepdim=True) - 1).clamp(min=1)
