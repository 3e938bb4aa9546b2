"""Selectors: from one weight per live block to the set of blocks that stays.

A selector gives every block a priority and keeps the highest. All three are computed in the log
domain and in float64: the weights are about 1/N, and the literal u^(1/w) of the paper is exactly 0
in float32 for most blocks once N reaches a few hundred, whereas here the smallest positive float32
weight still has a finite priority. The random numbers are counter-based (`rng`), so a kept set
depends on the seed, the event, the row and the blocks, and neither on the batch nor on the order
in which blocks are listed.
"""

import math

import torch
from torch import Tensor

from nexus_vllm.rng import uniforms

SELECTORS = ("topk", "reservoir", "gumbel")


def priorities(
    kind: str,
    weights: Tensor,
    *,
    seed: int,
    event: int,
    layers: Tensor,
    block_ids: Tensor,
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
    Raises ValueError on an unknown kind, n < 1, or a temperature that is negative or not finite.
    """
    if kind not in SELECTORS:
        raise ValueError(f"selector {kind!r} is unknown, choose one of {', '.join(SELECTORS)}")
    if kind == "reservoir" and n < 1:
        raise ValueError(f"reservoir: n is {n}, must be at least 1")
    if kind == "gumbel" and not 0 <= temperature < math.inf:
        raise ValueError(f"gumbel: temperature is {temperature}, must be finite and at least 0")
    weights = weights.to(torch.float64)
    if kind == "topk" or (kind == "gumbel" and temperature == 0):
        return weights
    draws = n if kind == "reservoir" else 1
    log_u = uniforms(seed, event, layers, block_ids, draws).to(torch.float64).log()
    if kind == "reservoir":
        return torch.logsumexp(log_u / weights[..., None], dim=-1) - math.log(n)
    return weights.log() - temperature * (-log_u[..., 0]).log()


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
    weights: [L, N] float32, finite and >= 0; only their ratios count for topk, gumbel and
      reservoir with n = 1.
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
    ranking = priorities(
        kind,
        weights,
        seed=seed,
        event=event,
        layers=layers,
        block_ids=block_ids,
        n=n,
        temperature=temperature,
    )
    # Only a forced block may hold +inf, so that no weight can push one out, checked or not.
    ranking = ranking.nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float64).max)
    ranking = ranking.masked_fill(forced, math.inf)
    newest_first = block_ids.argsort(dim=-1, descending=True)
    best_first = ranking.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
    order = newest_first.gather(-1, best_first)
    limit = keep[:, None] if isinstance(keep, Tensor) else keep
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
