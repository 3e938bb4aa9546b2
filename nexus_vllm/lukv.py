"""LU-KV's solver (arXiv 2602.08585): from what blocks turn out to be worth to shares of heads.

importance, scores -> loss of each head by budget -> convex hull -> one greedy order over all heads.

importance[l, h, j] is the oracle's: what the future made of block j (how it is measured is the
profiler's business). scores[l, h, j] is what the policy thought of it when it had to choose, and
only orders the blocks of a head. The block axis is chronological.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

DENSITIES = tuple(
    percent / 100 for percent in (*range(1, 10), *range(10, 50, 2), *range(50, 101, 5))
)
"""Default grid, finer where budgets are used; linear in between (a 4k context has 0.8% blocks)."""


def rank_blocks(scores: Tensor, forced: Tensor) -> Tensor:
    """Block indices [L, H, N] in the order they would be kept: forced, then by score, then newer.

    scores: [L, H, N]. forced: bool [L, H, N] or what broadcasts to it.
    Raises ValueError when shapes do not fit, or on a nan.
    """
    if scores.ndim != 3 or bool(scores.isnan().any()):
        raise ValueError(f"scores {tuple(scores.shape)} must be [L, H, N] without nan")
    newest_first = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    order = scores.shape[-1] - 1 - newest_first
    free = ~forced.expand(scores.shape).gather(-1, order)
    return order.gather(-1, free.to(torch.int8).argsort(dim=-1, stable=True))


def loss_curves(importance: Tensor, scores: Tensor, forced: Tensor) -> Tensor:
    """L(b) = importance outside the b blocks kept first, [L, H, N + 1] float64; not increasing.

    importance: [L, H, N], finite and >= 0. scores, forced: as in `rank_blocks`.
    Raises ValueError otherwise.
    """
    return _curves(_ranked(importance, scores, forced))


def convex_curves(importance: Tensor, scores: Tensor, forced: Tensor) -> Tensor:
    """Lower convex hulls of the loss curves over [forced, N] blocks, [L, H, N + 1] float64.

    Below the forced blocks, where no budget goes, as in `loss_curves`.
    """
    gains = _ranked(importance, scores, forced)
    return _curves(_decreasing(gains, _floor(forced, gains)))


def solve(importance: Tensor, scores: Tensor, forced: Tensor, densities: Sequence[float]) -> Tensor:
    """Shares of least total convexified loss, [K, L, H] float64 at K densities in (0, 1].

    Each block goes to the head that it helps most: with convex losses that is optimal at every
    budget (test: dynamic program). The mean share is exactly the density: the last block is dealt
    in parts. Below the forced blocks' density, heads share in proportion to what is forced.
    importance, scores, forced: as in `loss_curves`. Raises ValueError likewise.
    """
    gains = _ranked(importance, scores, forced)
    floor = _floor(forced, gains)
    return _deal(_decreasing(gains, floor), floor, densities)


def replay_shares(scores: Tensor, forced: Tensor, densities: Sequence[float]) -> Tensor:
    """Shares when all blocks of all heads compete by score, [K, L, H]; no oracle needed.

    scores: [L, H, N], comparable between heads, such as the largest attention during a replay of
    the context (KVzip). Otherwise as `solve`.
    """
    ranked = scores.gather(-1, rank_blocks(scores, forced)).to(torch.float64)
    return _deal(ranked, _floor(forced, ranked), densities)


def total_loss(curves: Tensor, shares: Tensor) -> Tensor:
    """Loss summed over heads at shares [..., L, H], linear between whole blocks; [...] float64."""
    blocks = curves.shape[-1] - 1
    kept = shares.to(torch.float64) * blocks
    below = kept.floor().clamp(0, max(0, blocks - 1)).to(torch.int64)
    table = curves.expand(*shares.shape[:-2], *curves.shape)
    low = table.gather(-1, below[..., None])[..., 0]
    high = table.gather(-1, below[..., None] + 1)[..., 0]
    return torch.lerp(low, high, kept - below).sum((-2, -1))


def _ranked(importance: Tensor, scores: Tensor, forced: Tensor) -> Tensor:
    """Importance [L, H, N] float64 in the order blocks would be kept: what one more block saves."""
    if importance.shape != scores.shape:
        raise ValueError(
            f"importance {tuple(importance.shape)} and scores {tuple(scores.shape)} must be "
            "[L, H, N] both"
        )
    if not bool((importance.isfinite() & (importance >= 0)).all()):
        raise ValueError("importance must be finite and not negative")
    return importance.gather(-1, rank_blocks(scores, forced)).to(torch.float64)


def _floor(forced: Tensor, gains: Tensor) -> Tensor:
    return forced.expand(gains.shape).sum(-1)


def _curves(gains: Tensor) -> Tensor:
    """[..., N] savings to [..., N + 1] losses, added up from the end where they are small."""
    tail = gains.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([tail, torch.zeros_like(tail[..., :1])], dim=-1)


def _decreasing(gains: Tensor, floor: Tensor) -> Tensor:
    """Nearest non-increasing savings beyond the floor: the slopes of the loss's convex hull.

    Pool adjacent violators: a run that saves more per block than the run before joins it.
    """
    rows = gains.flatten(0, -2).tolist()
    for row, first in zip(rows, floor.flatten().tolist(), strict=True):
        runs: list[tuple[float, int]] = []  # (sum, length), means strictly decreasing
        for gain in row[first:]:
            total, length = gain, 1
            while runs and runs[-1][0] * length <= total * runs[-1][1]:
                before, more = runs.pop()
                total, length = total + before, length + more
            runs.append((total, length))
        row[first:] = [total / length for total, length in runs for _ in range(length)]
    return torch.tensor(rows, dtype=torch.float64, device=gains.device).view(gains.shape)


def _deal(gains: Tensor, floor: Tensor, densities: Sequence[float]) -> Tensor:
    """Shares [K, L, H]: the floor, then blocks in order of gains [L, H, N], the last one in part.

    Gains do not increase beyond the floor, so a head's blocks come in its own order. Equal gains go
    to the head that has fewer blocks so far, then to the lower one.
    """
    layers, heads, blocks = gains.shape
    size = layers * heads
    if wrong := [density for density in densities if not 0 < density <= 1]:
        raise ValueError(f"densities must lie in (0, 1], not {wrong}")
    by_rank = gains.flatten(0, 1).T.flatten()  # [N * L * H], a head's blocks in its order
    head = torch.arange(size, device=gains.device).repeat(blocks)
    rank = torch.arange(blocks, device=gains.device).repeat_interleave(size)
    beyond = rank >= floor.flatten()[head]
    head, by_rank = head[beyond], by_rank[beyond]
    head = head[by_rank.argsort(descending=True, stable=True)]
    base = floor.flatten().to(torch.float64)
    forced = float(base.sum())
    shares = []
    for density in densities:
        budget = density * size * blocks
        if budget < forced:
            shares.append(base * (budget / forced))
            continue
        whole = min(int(budget - forced), len(head))
        counts = base + head[:whole].bincount(minlength=size)
        if whole < len(head):
            counts[head[whole]] += budget - forced - whole
        shares.append(counts)
    return torch.stack(shares).view(-1, layers, heads) / blocks
