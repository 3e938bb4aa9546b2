"""walk: from block log-sum-exps to what each query head says of each block.

`score.block_lse` leaves a map of W rows for each query head, of which softmax over its N blocks is
S of Eq. 1 (arXiv 2606.23961). Nexus adds to their mean a walk over some of them,
C <- C + (1 + <S_q, C>) S_q, which needs no more of the map than the products of the rows walked:
C is a sum of them, and the factors follow from the products. So three passes over a map, in pieces
of a few blocks, are enough, and it is never held. `policies.nexus` is the formula in full.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Rows = Literal["mean", "max", "sum"]

TILE = 4096
"""Numbers of a map that a program holds at once."""
_TINY = torch.finfo(torch.float32).tiny


def reference(
    lse: Tensor,
    candidates: Tensor | None,
    order: tuple[int, ...],
    lam: float,
    pool_rows: Rows = "mean",
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Nexus' score of each block for each query head, before heads are pooled, and its walk c.

    lse: [R, G, W, N] float32, as `score.block_lse` gives it: G query heads share a row.
    candidates: [R, N] bool, the blocks that the walk runs over and whose weight it adds to; None:
      all of them. Rows of the map are then normalised over these.
    order: which of the W rows the walk takes, first to last; 0 is the oldest query. At most W.
    lam: how much of the candidates' weight the walk adds.
    pool_rows: the mean of a map's rows, without those that see nothing, or the largest of them.
    start: [R, N] float32 of numbers >= 0, C before the first row, once restricted to the candidates
      and scaled to 1; NaN where a block has none. None: 0.
    Returns score = a + lam * sum(a of candidates) * c and c, which sums to 1 or is 0: both
    [R, G, N] float32.
    """
    direct = pooled_reference(lse, pool_rows)
    counted = direct
    if candidates is not None:
        lse = lse.masked_fill(~candidates[:, None, None], -torch.inf)
        counted = direct * candidates[:, None]
    state = torch.zeros_like(direct)
    if start is not None:
        known = start.nan_to_num(nan=0.0)
        known = known if candidates is None else known * candidates
        state = state + _normalise(known)[:, None]
    maps = _maps(lse)
    for index in order:
        row = maps[:, :, index]
        state = state + (1 + (row * state).sum(-1, keepdim=True)) * row
    found = _normalise(state)
    return direct + lam * counted.sum(-1, keepdim=True) * found, found


def pooled_reference(lse: Tensor, pool_rows: Rows) -> Tensor:
    """The rows of each map pooled: [R, G, N] float32 of `lse` [R, G, W, N].

    pool_rows: "mean" leaves out rows that see no block; "max", "sum".
    """
    maps = _maps(lse)
    if pool_rows == "max":
        return maps.amax(-2)
    summed = maps.sum(-2)
    if pool_rows == "sum":
        return summed
    return summed / lse.isfinite().any(-1).sum(-1, keepdim=True).clamp(min=1)


def _maps(lse: Tensor) -> Tensor:
    """S: softmax over blocks; a row of zeros where a query sees none."""
    return lse.softmax(-1).nan_to_num(nan=0.0)


def _normalise(x: Tensor) -> Tensor:
    """Rows of x >= 0 divided by their sums; rows of zeros stay zeros."""
    return x / x.sum(-1, keepdim=True).clamp(min=_TINY)


def walk(
    lse: Tensor,
    candidates: Tensor | None,
    order: tuple[int, ...],
    lam: float,
    pool_rows: Rows = "mean",
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `reference`, one launch: a program for each query head."""
    rows, group, window, size = lse.shape
    score, found = (torch.empty(rows, group, size, device=lse.device) for _ in range(2))
    if score.numel():
        _walk[(rows * group,)](
            lse.contiguous(),
            lse if candidates is None else candidates.contiguous(),
            lse if start is None else start.contiguous(),
            lam, score, found, group, window, size,
            ORDER=order, STEPS=max(16, triton.next_power_of_2(len(order))),
            HOW=pool_rows, CHOSEN=candidates is not None, STARTED=start is not None,
            **_shape(window),
        )  # fmt: skip
    return score, found


def pooled(lse: Tensor, pool_rows: Rows) -> Tensor:
    """The same as `pooled_reference`, one launch: a program for each query head."""
    rows, group, window, size = lse.shape
    found = torch.empty(rows, group, size, device=lse.device)
    if found.numel():
        told = _shape(window)
        _pooled[(rows * group,)](lse.contiguous(), found, window, size, HOW=pool_rows, **told)
    return found


def _shape(window: int) -> dict[str, int]:
    """Of the pieces that a program holds."""
    rows = triton.next_power_of_2(window)
    return {"WINDOW": rows, "COLUMNS": min(256, max(16, TILE // rows))}


@triton.jit
def _piece(lse, index, held, column, size):
    """Rows `index` of a map at some columns: -inf where there is nothing."""
    place = lse + index[:, None] * size + column[None, :]
    return tl.load(place, mask=held[:, None] & (column < size)[None, :], other=-float("inf"))


@triton.jit
def _added(highest, mass, logits):
    """The running maximum of rows, and their sum of exponentials relative to it."""
    new = tl.maximum(highest, tl.max(logits, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, mass * tl.exp(highest - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)


@triton.jit
def _shares(logits, highest, mass):
    """Softmax, from what `_added` found in all of the row."""
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    return tl.exp(logits - safe[:, None]) * (1.0 / tl.where(mass > 0, mass, 1.0))[:, None]


@triton.jit
def _of_rows(shares, seen, HOW: tl.constexpr):
    """Rows pooled, [COLUMNS]."""
    if HOW == "max":
        return tl.max(shares, 0)
    elif HOW == "sum":
        return tl.sum(shares, 0)
    else:
        return tl.sum(shares, 0) / seen


@triton.jit(do_not_specialize=["size"])
def _pooled(
    lse, found, window, size, HOW: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    lse += head * window * size
    index = tl.arange(0, WINDOW)
    held = index < window
    highest = tl.full((WINDOW,), -float("inf"), tl.float32)
    mass = tl.zeros((WINDOW,), tl.float32)
    for first in range(0, size, COLUMNS):
        piece = _piece(lse, index, held, first + tl.arange(0, COLUMNS), size)
        highest, mass = _added(highest, mass, piece)
    seen = tl.maximum(tl.sum((mass > 0).to(tl.float32), 0), 1.0)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        shares = _shares(_piece(lse, index, held, column, size), highest, mass)
        tl.store(found + head * size + column, _of_rows(shares, seen, HOW), mask=column < size)


@triton.jit
def _inside(candidates, row, column, size, CHOSEN: tl.constexpr):
    """Which columns the walk runs over."""
    inside = column < size
    if CHOSEN:
        inside = inside & (tl.load(candidates + row * size + column, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _begun(start, row, column, inside, size, STARTED: tl.constexpr, COLUMNS: tl.constexpr):
    """C before the first row, not yet scaled."""
    if STARTED:
        known = tl.load(start + row * size + column, mask=inside, other=0.0)
        return tl.where(known == known, known, 0.0)
    else:
        return tl.zeros((COLUMNS,), tl.float32)


@triton.jit(do_not_specialize=["size"])
def _walk(
    lse, candidates, start, lam, score, found, group, window, size,
    ORDER: tl.constexpr, STEPS: tl.constexpr, HOW: tl.constexpr, CHOSEN: tl.constexpr,
    STARTED: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = head // group
    lse += head * window * size
    index, step = tl.arange(0, WINDOW), tl.arange(0, STEPS)
    held, taken = index < window, step < len(ORDER)
    walked = tl.zeros((STEPS,), tl.int32)
    for place in tl.static_range(len(ORDER)):
        walked = tl.where(step == place, ORDER[place], walked)

    # How far the rows reach: all of a map over all blocks, those walked over the candidates.
    highest = tl.full((WINDOW,), -float("inf"), tl.float32)
    mass = tl.zeros((WINDOW,), tl.float32)
    highest_walked = tl.full((STEPS,), -float("inf"), tl.float32)
    mass_walked = tl.zeros((STEPS,), tl.float32)
    before = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = _inside(candidates, row, column, size, CHOSEN)
        highest, mass = _added(highest, mass, _piece(lse, index, held, column, size))
        logits = _piece(lse, walked, taken, column, size)
        logits = tl.where(inside[None, :], logits, -float("inf"))
        highest_walked, mass_walked = _added(highest_walked, mass_walked, logits)
        before += _begun(start, row, column, inside, size, STARTED, COLUMNS)
    seen = tl.maximum(tl.sum((mass > 0).to(tl.float32), 0), 1.0)
    begun = tl.sum(before, 0)
    scale = 1.0 / tl.maximum(begun, 1.1754943508222875e-38)

    # The products of the rows walked, with each other and with C before them.
    products = tl.zeros((STEPS, STEPS), tl.float32)
    with_start = tl.zeros((STEPS,), tl.float32)
    weight = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = _inside(candidates, row, column, size, CHOSEN)
        shares = _shares(_piece(lse, index, held, column, size), highest, mass)
        weight += tl.where(inside, _of_rows(shares, seen, HOW), 0.0)
        logits = _piece(lse, walked, taken, column, size)
        logits = tl.where(inside[None, :], logits, -float("inf"))
        steps = _shares(logits, highest_walked, mass_walked)
        products += tl.dot(steps, tl.trans(steps), input_precision="ieee")
        if STARTED:
            known = _begun(start, row, column, inside, size, STARTED, COLUMNS) * scale
            with_start += tl.sum(steps * known[None, :], 1)

    # C = C before + sum of factor * row.
    factor = tl.zeros((STEPS,), tl.float32)
    for place in tl.static_range(len(ORDER)):
        mine = step == place
        agreed = tl.sum(tl.where(mine[:, None], products, 0.0), 0)
        agreed = tl.sum(agreed * factor, 0) + tl.sum(tl.where(mine, with_start, 0.0), 0)
        factor = tl.where(mine, 1.0 + agreed, factor)
    summed = begun * scale + tl.sum(tl.where(mass_walked > 0, factor, 0.0), 0)
    per_sum = 1.0 / tl.maximum(summed, 1.1754943508222875e-38)
    added = lam * tl.sum(weight, 0)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = _inside(candidates, row, column, size, CHOSEN)
        logits = _piece(lse, walked, taken, column, size)
        logits = tl.where(inside[None, :], logits, -float("inf"))
        steps = _shares(logits, highest_walked, mass_walked)
        state = tl.sum(steps * factor[:, None], 0)
        state += _begun(start, row, column, inside, size, STARTED, COLUMNS) * scale
        state *= per_sum
        shares = _shares(_piece(lse, index, held, column, size), highest, mass)
        direct = _of_rows(shares, seen, HOW)
        tl.store(found + head * size + column, state, mask=column < size)
        tl.store(score + head * size + column, direct + added * state, mask=column < size)
