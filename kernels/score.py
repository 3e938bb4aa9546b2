"""score: what each block gets of each query of the window, in one pass over the keys.

For a query and a block, `lse` is log(sum of exp(logit)) over the tokens of the block that the query
may see. It needs nothing of other blocks, so programs share no state and the whole W x T of logits
is never held; the softmax over blocks of `lse` is Eq. 1's map S (arXiv 2606.23961).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm.kernels.rows import Rows

TOKENS = 128
"""Keys that a program holds at once."""


def reference(
    rows: Rows, queries: Tensor, positions: Tensor, scale: float, cache_scale: float = 1.0
) -> Tensor:
    """queries [R, Q, D], Q of them for each row, in any order; positions [R, Q] int64.

    scale: what logits are multiplied by. cache_scale: what stored keys are multiplied by (fp8).
    Returns lse [R, Q, longest] float32: -inf where a query sees nothing of a block, or there is no
    block.
    """
    index, exists = rows.padded()
    keys = rows.gather(index).float()  # [R, N, b, D]
    logits = torch.einsum("rqd,rnbd->rqnb", queries.float(), keys) * (scale * cache_scale)
    token = rows.blocks[index][..., None] * rows.block + torch.arange(
        rows.block, device=keys.device
    )
    seen = (token[:, None] <= positions[:, :, None, None]) & exists[:, None, :, None]
    return logits.masked_fill(~seen, -torch.inf).logsumexp(-1)


def score(
    rows: Rows, queries: Tensor, positions: Tensor, scale: float, cache_scale: float = 1.0
) -> Tensor:
    """The same as `reference`, one launch. Raises ValueError on a block of no power of two."""
    if rows.block & (rows.block - 1) or rows.block > TOKENS:
        raise ValueError(f"score: blocks of {rows.block} tokens, must be a power of two <= {TOKENS}")
    count, wide, dim = queries.shape
    lse = queries.new_empty(count, wide, rows.longest, dtype=torch.float32)
    blocks = TOKENS // rows.block
    if lse.numel():
        grid = (triton.cdiv(rows.longest, blocks), count)
        _score[grid](
            rows.cache, rows.units, rows.blocks, rows.starts, rows.token_step,
            queries, positions, scale * cache_scale, lse, wide, rows.longest,
            DIM=dim, DIMS=triton.next_power_of_2(dim), WIDE=max(16, triton.next_power_of_2(wide)),
            BLOCK=rows.block, BLOCKS=blocks,
            # The interpreter cannot multiply matrices of bfloat16.
            EXACT=queries.dtype == torch.float32 or triton.knobs.runtime.interpret,
            ALIGNED=aligned(rows),
        )  # fmt: skip
    return lse


def aligned(rows: Rows) -> int:
    """The largest power of two, up to 16 bytes' worth, that all offsets in units divide by."""
    most = 16 // rows.cache.element_size()
    whole = rows.token_step | rows.head_size | rows.values | (rows.block * 2 * rows.head_size)
    return min(most, whole & -whole)


@triton.jit
def _score(
    cache, units, blocks, starts, token_step,
    queries, positions, scale, lse, wide, longest,
    DIM: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - first).to(tl.int32)
    query, dim = tl.arange(0, WIDE), tl.arange(0, DIMS)
    asked = query < wide

    # Keys of BLOCKS blocks, token by token: [BLOCKS * BLOCK, DIMS]
    token = tl.arange(0, BLOCKS * BLOCK)
    block = part * BLOCKS + token // BLOCK
    exists = block < count
    unit = tl.multiple_of(tl.load(units + first + block, mask=exists, other=0), ALIGNED)
    at = unit + (token % BLOCK) * tl.multiple_of(token_step, ALIGNED)
    held = exists[:, None] & (dim < DIM)[None, :]
    keys = tl.load(cache + at[:, None] + dim[None, :], mask=held, other=0.0)

    told = queries + (row * wide + query[:, None]) * DIM + dim[None, :]
    q = tl.load(told, mask=asked[:, None] & (dim < DIM)[None, :], other=0.0)
    if EXACT:
        q, keys = q.to(tl.float32), keys.to(tl.float32)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        logits = tl.dot(q, tl.trans(keys.to(q.dtype)))
    # To the base 2, which is what the hardware has.
    logits = logits * (scale * 1.4426950408889634)

    place = tl.load(blocks + first + block, mask=exists, other=0) * BLOCK + token % BLOCK
    last = tl.load(positions + row * wide + query, mask=asked, other=-1)
    seen = exists[None, :] & (place[None, :] <= last[:, None])
    logits = tl.where(seen, logits, -float("inf"))
    logits = tl.reshape(logits, (WIDE, BLOCKS, BLOCK))
    highest = tl.max(logits, 2)
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    mass = tl.sum(tl.exp2(logits - safe[:, :, None]), 2)
    found = tl.where(mass > 0, (safe + tl.log2(mass)) * 0.6931471805599453, -float("inf"))

    column = part * BLOCKS + tl.arange(0, BLOCKS)
    into = lse + (row * wide + query[:, None]) * longest + column[None, :]
    tl.store(into, found, mask=asked[:, None] & (column < longest)[None, :])
