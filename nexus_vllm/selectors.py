"""Selectors: from one weight per live block to the set of blocks that stays.

A selector gives every block a priority and keeps the highest. All are computed in the log domain
and in float64: the weights are about 1/N, and the literal u^(1/w) of the paper is exactly 0 in
float32 for most blocks once N reaches a few hundred, whereas here the smallest positive float32
weight still has a finite priority. The random numbers are counter-based (`rng`), so a kept set
depends on the seed, the event, the row and the blocks, and neither on the batch nor on the order
in which blocks are listed.

`pareto` and `systematic` know how many blocks stay and include each with probability min(1, c w),
which no other selector does: successive sampling includes heavy blocks less often than that.
"""

import math

import torch
from torch import Tensor

from nexus_vllm.rng import uniforms

SELECTORS = ("topk", "reservoir", "gumbel", "pareto", "systematic")

_CERTAIN = torch.finfo(torch.float64).max
_ROW = -1
"""The block id that addresses the one random number of a row; blocks count from 0."""


def inclusion(weights: Tensor, draws: Tensor) -> Tensor:
    """Inclusion probabilities p_j = min(1, c w_j) that sum to `draws`, [L, N] float64.

    weights: [L, N] float64, >= 0. draws: [L] int64. Where fewer weights than `draws` are positive,
    those have probability 1 and the others 0.
    """
    heavy, order = weights.sort(dim=-1, descending=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    # Were the first `rank` certain, the next would get this many times its weight.
    rest = heavy.flip(-1).cumsum(-1).flip(-1)
    left = draws[:, None] - rank
    certain = (left > 0) & (heavy > 0) & (left * heavy >= rest)
    # Once one is not certain, none after it is: c only falls. Rounding could make it look so.
    certain = certain.cummin(-1).values
    count = certain.sum(-1, keepdim=True)
    rest = torch.where(certain, 0.0, heavy).sum(-1, keepdim=True)
    chances = heavy * (draws[:, None] - count).clamp(min=0) / rest
    chances = torch.where(certain, 1.0, chances.nan_to_num(nan=0.0).clamp(max=1))
    return torch.zeros_like(weights).scatter(-1, order, chances)


def priorities(
    kind: str,
    weights: Tensor,
    *,
    seed: int,
    event: int,
    layers: Tensor,
    block_ids: Tensor,
    draws: Tensor,
    n: int = 5,
    temperature: float = 0.2,
) -> Tensor:
    """Priorities [L, N] float64 of blocks with weights [L, N] >= 0; weight 0 ranks lowest.

    topk: the weight itself.
    reservoir: log of Eq. 6, pi_j = (1/n) sum_i u_ij^(1/w_j). n = 1 is Efraimidis-Spirakis sampling,
      successive draws in proportion to w without replacement; n -> infinity ranks by w/(w + 1),
      that is by w (Lemma A.2).
    gumbel: log w_j + T g_j, g Gumbel(0, 1). T = 1 has the law of reservoir n = 1 (with the same
      seed, even the same sets); T = 0 is topk.
    pareto: logit p_j - logit u_j, p of `inclusion` (Rosen 1997): inclusion probabilities are p to
      within a few thousandths, blocks of p = 1 always stay, and noise only decides at the margin.
    systematic: 1 for the blocks into whose stretch of the cumulated p falls one of u, u + 1, ...,
      in order of age (Madow 1949), else p - 1: inclusion probabilities are exactly p, and what
      stays is spread evenly over the text.
    draws: [L] int64, how many of these blocks stay, for pareto and systematic.
    Raises ValueError on an unknown kind, n < 1, or a temperature that is negative or not finite.
    """
    if kind not in SELECTORS:
        raise ValueError(f"selector {kind!r} is unknown, choose one of {', '.join(SELECTORS)}")
    if kind == "reservoir" and n < 1:
        raise ValueError(f"reservoir: n is {n}, must be at least 1")
    if kind == "gumbel" and not 0 <= temperature < math.inf:
        raise ValueError(f"gumbel: temperature is {temperature}, must be finite and at least 0")
    weights = weights.to(torch.float64)
    if kind in ("pareto", "systematic"):  # a sum: one wrong weight would spoil the others'
        weights = weights.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).clamp(min=0)
    if kind == "topk" or (kind == "gumbel" and temperature == 0):
        return weights
    if kind == "systematic":
        start = uniforms(seed, event, layers, torch.full_like(block_ids[:, :1], _ROW), 1)
        return _systematic(inclusion(weights, draws), start[..., 0].to(torch.float64), block_ids)
    count = n if kind == "reservoir" else 1
    u = uniforms(seed, event, layers, block_ids, count).to(torch.float64)
    if kind == "reservoir":
        keys = u.log() / weights[..., None]
        # Next to 1 a mean of powers loses what tells large weights apart; its distance to 1 keeps.
        near = keys.clamp(min=-1).expm1().mean(-1).log1p()
        means = torch.logsumexp(keys, dim=-1) - math.log(n)
        return torch.where(keys.amin(-1) < -1, means, near)
    if kind == "pareto":
        return inclusion(weights, draws).logit().clamp(max=_CERTAIN) - u[..., 0].logit()
    return weights.log() - temperature * (-u[..., 0].log()).log()


def _systematic(chances: Tensor, start: Tensor, block_ids: Tensor) -> Tensor:
    """Priorities [L, N] of systematic sampling; start: [L, 1], where in (0, 1) it begins."""
    age = block_ids.argsort(dim=-1)
    end = chances.gather(-1, age).cumsum(-1)
    passed = (end - start).ceil()  # how many of u, u + 1, ... lie below the end
    taken = passed.diff(dim=-1, prepend=torch.zeros_like(start)) > 0
    ranked = torch.where(taken, 1.0, chances.gather(-1, age) - 1)
    return torch.zeros_like(chances).scatter(-1, age, ranked)


def select(
    kind: str,
    weights: Tensor,
    keep: int | Tensor,
    forced: Tensor,
    *,
    seed: int,
    event: int,
    layers: Tensor,
    block_ids: Tensor,
    n: int = 5,
    temperature: float = 0.2,
    validate: bool = True,
) -> Tensor:
    """Choose which blocks of each row stay.

    kind: one of SELECTORS, see `priorities`; n and temperature are in draws and in Gumbel units.
    weights: [L, N] float32, finite and >= 0; only their ratios count, but for reservoir with
      n > 1.
    keep: blocks to keep, one number for all rows or an int64 [L].
    forced: [L, N] bool, blocks that stay whatever their weight; they count towards `keep`.
    layers: [L] int64, the identity of each row. block_ids: [L, N] int64, distinct within a row.
    Returns [L, N] bool with exactly `keep` True in each row. Equal priorities go to the newer
    (higher) block id. Rows may be listed in any order and so may the blocks of a row.
    Raises ValueError where forced > keep, keep > N, or a weight is negative or not finite. Those
    checks read tensors and so wait for the device; `validate=False` leaves them out. Even then a
    row has exactly `keep` blocks, and the forced ones where they fit; only the ranking of a wrong
    weight is undefined.
    """
    rows, size = weights.shape
    if not forced.shape == block_ids.shape == weights.shape or layers.shape != (rows,):
        raise ValueError(
            f"select: weights {tuple(weights.shape)}, forced {tuple(forced.shape)}, block_ids "
            f"{tuple(block_ids.shape)} and layers {tuple(layers.shape)} "
            "must be [L, N], [L, N], [L, N] and [L]"
        )
    if validate:
        _validate(weights, keep, forced)
    limit = keep[:, None] if isinstance(keep, Tensor) else torch.full_like(layers, keep)[:, None]
    ranking = priorities(
        kind,
        weights.masked_fill(forced, 0),  # they are out of the draw
        draws=limit[:, 0] - forced.sum(-1),
        seed=seed,
        event=event,
        layers=layers,
        block_ids=block_ids,
        n=n,
        temperature=temperature,
    )
    # Only a forced block may hold +inf, so that no weight can push one out, checked or not.
    ranking = ranking.nan_to_num(nan=-math.inf, posinf=_CERTAIN)
    ranking = ranking.masked_fill(forced, math.inf)
    newest_first = block_ids.argsort(dim=-1, descending=True)
    best_first = ranking.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
    order = newest_first.gather(-1, best_first)
    kept = torch.arange(size, device=weights.device).expand(rows, size) < limit
    return torch.zeros_like(forced).scatter(-1, order, kept)


def _validate(weights: Tensor, keep: int | Tensor, forced: Tensor) -> None:
    rows, size = weights.shape
    wanted = keep.tolist() if isinstance(keep, Tensor) else [keep] * rows
    if len(wanted) != rows:
        raise ValueError(f"select: keep names {len(wanted)} rows, weights have {rows}")
    for row, (count, must) in enumerate(zip(wanted, forced.sum(-1).tolist(), strict=True)):
        if not 0 <= count <= size:
            raise ValueError(f"select: cannot keep {count} of {size} blocks (row {row})")
        if must > count:
            raise ValueError(
                f"select: {must} blocks are forced but only {count} may stay (row {row}); "
                "raise the budget or protect fewer blocks"
            )
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError("select: weights must be finite and not negative")
