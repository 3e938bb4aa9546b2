"""score: what blocks and tokens get of the window's queries, in one pass over the keys each.

For a query and a block, `lse` is log(sum of exp(logit)) over the tokens of the block that the query
may see. It needs nothing of other blocks, so programs share no state and the W x T logits are never
held; its softmax over blocks is Eq. 1's map S (arXiv 2606.23961). Policies that rank tokens need a
second pass, which knows each query's total.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm.kernels.rows import Rows
from nexus_vllm.policies.base import Pool

TOKENS = 128
"""Keys that a program holds at once. Products of float32 take more registers: a fourth of them."""

QUERIES = 1 << 15
"""Bytes of queries that a program holds at once."""

_INTERPRETED = triton.knobs.runtime.interpret
"""Triton's interpreter cannot multiply matrices of bfloat16."""


def block_lse_reference(rows: Rows, queries: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Block by block log-sum-exp of the logits.

    queries: [R, G, W, D], those of the G query heads that share a row's keys; with `rows.heads` > 1
      of one averaged head, and keys are averaged over so many heads.
    positions: [R, W] int64, original token positions; a query sees keys up to its own.
    scale: what logits are multiplied by, usually D ** -0.5.
    Returns [R, G, W, N] float32: -inf where a query sees nothing of a block, or there is no block.
    """
    return _logits(rows, queries, positions, scale).logsumexp(-1)


def token_attention_reference(
    rows: Rows,
    queries: Tensor,
    positions: Tensor,
    totals: Tensor,
    scale: float,
    pool_rows: Pool = "mean",
    pool_heads: Pool = "mean",
) -> Tensor:
    """Softmax attention of each token, pooled over queries, then heads: [R, N, b] float32.

    totals: [R, G, W], `block_lse` added up in its log domain; -inf for a query that sees nothing.
    """
    logits = _logits(rows, queries, positions, scale)
    shares = (logits - totals[..., None, None]).nan_to_num(nan=-torch.inf).exp()
    shares = shares.mean(2) if pool_rows == "mean" else shares.amax(2)
    return shares.mean(1) if pool_heads == "mean" else shares.amax(1)


def _logits(rows: Rows, queries: Tensor, positions: Tensor, scale: float) -> Tensor:
    """[R, G, W, N, b] float32, -inf where a query does not see a key."""
    logits = torch.einsum("rgwd,rnbd->rgwnb", queries.float(), rows.gather().float()) * scale
    offsets = torch.arange(rows.block, device=logits.device)
    token = rows.blocks[..., None] * rows.block + offsets
    seen = (token[:, None] <= positions[:, :, None, None]) & rows.exists[:, None, :, None]
    return logits.masked_fill(~seen[:, None], -torch.inf)


def block_lse(rows: Rows, queries: Tensor, positions: Tensor, scale: float) -> Tensor:
    """The same as `block_lse_reference`, one launch."""
    *lead, _ = queries.shape
    lse = torch.empty(*lead, rows.shape[1], dtype=torch.float32, device=queries.device)
    _launch(_block_lse, rows, queries, positions, scale, lse, lse, 0)
    return lse


def token_attention(
    rows: Rows,
    queries: Tensor,
    positions: Tensor,
    totals: Tensor,
    scale: float,
    pool_rows: Pool = "mean",
    pool_heads: Pool = "mean",
) -> Tensor:
    """The same as `token_attention_reference`, one launch."""
    found = torch.zeros(*rows.shape, rows.block, dtype=torch.float32, device=queries.device)
    pools = 2 * (pool_rows == "max") + (pool_heads == "max")
    _launch(_token_attention, rows, queries, positions, scale, totals, found, pools)
    return found


def _launch(
    kernel: object,
    rows: Rows,
    queries: Tensor,
    positions: Tensor,
    scale: float,
    totals: Tensor,
    into: Tensor,
    pools: int,
) -> None:
    """Raises ValueError on blocks whose size is no power of two, or more than a program holds."""
    if rows.block & (rows.block - 1) or rows.block > TOKENS:
        raise ValueError(
            f"score: blocks of {rows.block} tokens, must be a power of two up to {TOKENS}"
        )
    count, group, window, dim = queries.shape
    size = rows.shape[1]
    if not count * group * window * size:
        return
    exact = queries.dtype == torch.float32 or rows.heads > 1
    shape = _shape(rows.block, group, window, dim, 4 if exact else 2)
    kernel[(count, triton.cdiv(size, shape["BLOCKS"]))](  # type: ignore[index]
        rows.cache, rows.units, rows.blocks, rows.counts, rows.keys, rows.token_step, rows.dim_step,
        rows.head_step, positions if rows.scales is None else rows.scales, queries.contiguous(),
        positions, scale, totals, into, group, window, size,
        HEADS=rows.heads, DIM=dim, POOLS=pools, EXACT=exact or _INTERPRETED,
        ALIGNED=rows.alignment, SCALED=rows.scales is not None, **shape,
    )  # fmt: skip


def _shape(block: int, group: int, window: int, dim: int, number: int) -> dict[str, int]:
    """What a program holds at once: queries [GROUP * WINDOW, DIMS], PIECES times, and keys
    [BLOCKS * BLOCK, DIMS], of numbers of so many bytes."""
    heads, dims = triton.next_power_of_2(group), triton.next_power_of_2(dim)
    tokens = max(block, TOKENS if number < 4 else TOKENS // 4)
    most = max(1, QUERIES // (dims * number) // heads)
    wide = max(min(most, triton.next_power_of_2(window)), 16 // heads)
    return {
        "DIMS": dims, "GROUP": heads, "WINDOW": wide, "PIECES": triton.cdiv(window, wide),
        "BLOCK": block, "BLOCKS": tokens // block, "num_warps": 4 if heads * wide <= 64 else 8,
    }  # fmt: skip


@triton.jit
def part_of_row(
    cache, units, counts, first, token_step, dim_step, head_step, size, row, part,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Keys, or values, [BLOCKS * BLOCK, DIMS] of a part of a row; 0 where there are none. first:
    from the start of a unit to its first one."""
    token, dim = tl.arange(0, BLOCKS * BLOCK), tl.arange(0, DIMS)
    block = part * BLOCKS + token // BLOCK
    exists = block < tl.load(counts + row).to(tl.int32)
    unit = tl.multiple_of(tl.load(units + row * size + block, mask=exists, other=0), ALIGNED)
    at = (
        unit
        + tl.multiple_of(first, ALIGNED)
        + (token % BLOCK) * tl.multiple_of(token_step, ALIGNED)
    )
    held = exists[:, None] & (dim < DIM)[None, :]
    place = cache + at[:, None] + dim[None, :] * dim_step
    keys = tl.load(place, mask=held, other=0.0)
    if HEADS > 1:
        total = keys.to(tl.float32)
        for other in range(1, HEADS):
            more = place + other * tl.multiple_of(head_step, ALIGNED)
            total += tl.load(more, mask=held, other=0.0).to(tl.float32)
        keys = total / HEADS
    return keys


@triton.jit
def _query(piece, group, window, GROUP: tl.constexpr, WINDOW: tl.constexpr):
    """Head and place in the window of each of a piece's queries, and which of them there are."""
    query = tl.arange(0, GROUP * WINDOW)
    head, back = query // WINDOW, piece * WINDOW + query % WINDOW
    return head, back, (head < group) & (back < window)


@triton.jit
def _seen_logits(
    keys, blocks, counts, queries, positions, scale, scales, group, window, size, row, part, piece,
    DIM: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """[GROUP * WINDOW, BLOCKS * BLOCK] to the base 2, which is what the hardware has."""
    head, back, asked = _query(piece, group, window, GROUP, WINDOW)
    dim = tl.arange(0, DIMS)
    told = queries + ((row * group + head) * window + back)[:, None] * DIM + dim[None, :]
    q = tl.load(told, mask=asked[:, None] & (dim < DIM)[None, :], other=0.0)
    if EXACT:
        # Three products of the tensor cores' 19-bit numbers: what float32 has but for a bit or two.
        q, keys = q.to(tl.float32), keys.to(tl.float32)
        logits = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
    else:
        logits = tl.dot(q, tl.trans(keys.to(q.dtype)))
    if SCALED:
        scale *= tl.load(scales + row)
    logits = logits * (scale * 1.4426950408889634)
    token = tl.arange(0, BLOCKS * BLOCK)
    block = part * BLOCKS + token // BLOCK
    exists = block < tl.load(counts + row).to(tl.int32)
    place = tl.load(blocks + row * size + block, mask=exists, other=0) * BLOCK + token % BLOCK
    last = tl.load(positions + row * window + back, mask=asked, other=-1)
    seen = exists[None, :] & (place[None, :] <= last[:, None])
    return tl.where(seen, logits, -float("inf"))


@triton.jit(do_not_specialize=["size"])
def _block_lse(
    cache, units, blocks, counts, first, token_step, dim_step, head_step, scales, queries,
    positions, scale, totals, lse, group, window, size,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    POOLS: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = part_of_row(
        cache, units, counts, first, token_step, dim_step, head_step, size, row, part,
        HEADS, DIM, DIMS, BLOCK, BLOCKS, ALIGNED,
    )  # fmt: skip
    column = part * BLOCKS + tl.arange(0, BLOCKS)
    for piece in tl.range(0, PIECES, num_stages=1):
        logits = _seen_logits(
            keys, blocks, counts, queries, positions, scale, scales, group, window, size, row,
            part, piece, DIM, DIMS, GROUP, WINDOW, BLOCK, BLOCKS, EXACT, SCALED,
        )  # fmt: skip
        logits = tl.reshape(logits, (GROUP * WINDOW, BLOCKS, BLOCK))
        highest = tl.max(logits, 2)
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        mass = tl.sum(tl.exp2(logits - safe[:, :, None]), 2)
        found = tl.where(mass > 0, (safe + tl.log2(mass)) * 0.6931471805599453, -float("inf"))
        head, back, asked = _query(piece, group, window, GROUP, WINDOW)
        into = lse + ((row * group + head) * window + back)[:, None] * size + column[None, :]
        tl.store(into, found, mask=asked[:, None] & (column < size)[None, :])


@triton.jit(do_not_specialize=["size"])
def _token_attention(
    cache, units, blocks, counts, first, token_step, dim_step, head_step, scales, queries,
    positions, scale, totals, found, group, window, size,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    POOLS: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = part_of_row(
        cache, units, counts, first, token_step, dim_step, head_step, size, row, part,
        HEADS, DIM, DIMS, BLOCK, BLOCKS, ALIGNED,
    )  # fmt: skip
    of_heads = tl.zeros((GROUP, BLOCKS * BLOCK), tl.float32)
    for piece in tl.range(0, PIECES, num_stages=1):
        logits = _seen_logits(
            keys, blocks, counts, queries, positions, scale, scales, group, window, size, row,
            part, piece, DIM, DIMS, GROUP, WINDOW, BLOCK, BLOCKS, EXACT, SCALED,
        )  # fmt: skip
        head, back, asked = _query(piece, group, window, GROUP, WINDOW)
        total = totals + (row * group + head) * window + back
        total = tl.load(total, mask=asked, other=-float("inf"))
        none = total == -float("inf")
        shares = tl.exp2(logits - tl.where(none, 0.0, total * 1.4426950408889634)[:, None])
        shares = tl.where(none[:, None], 0.0, shares)
        shares = tl.reshape(shares, (GROUP, WINDOW, BLOCKS * BLOCK))
        if POOLS >= 2:
            of_heads = tl.maximum(of_heads, tl.max(shares, 1))
        else:
            of_heads += tl.sum(shares, 1) / window
    pooled = tl.max(of_heads, 0) if POOLS % 2 == 1 else tl.sum(of_heads, 0) / group
    token = part * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)
    tl.store(found + row * size * BLOCK + token, pooled, mask=token < size * BLOCK)
