"""ranked: from scores of tokens that only rank to weights of blocks, `policies.tokens.ranked`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm.policies.base import Tokens
from nexus_vllm.policies.tokens import ranked as of_heads

BLOCKS = 64
"""Blocks of a row that a program holds at once."""

HOW: tuple[Tokens, ...] = ("sum", "max", "mean")


def reference(scores: Tensor, candidates: Tensor, tokens: Tokens) -> Tensor:
    """Weights [R, N] float32 of tokens' scores [R, N, b]: e^z, z in standard deviations.

    candidates: [R, N] bool, the blocks among which z is taken. tokens: how a block's tokens count
    together. A score that is not finite spoils the weights of its row, and no other's.
    """
    return of_heads(scores[:, :, None], candidates, tokens)[:, 0]


def ranked(scores: Tensor, candidates: Tensor, tokens: Tokens) -> Tensor:
    """The same as `reference`, one launch: a program for each row. b must be a power of two."""
    rows, size, block = scores.shape
    found = torch.empty(rows, size, device=scores.device)
    if found.numel():
        _ranked[(rows,)](
            scores.contiguous(), candidates.contiguous(), found, size,
            HOW=HOW.index(tokens), BLOCK=block, BLOCKS=BLOCKS,
        )  # fmt: skip
    return found


@triton.jit
def _scores(scores, row, first, size, HOW: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Scores of some blocks, [BLOCKS, BLOCK] by token or [BLOCKS, 1], in 64 bits."""
    block, token = first + tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    place = (row * size + block)[:, None] * BLOCK + token[None, :]
    found = tl.load(scores + place, mask=(block < size)[:, None], other=0.0)
    if HOW == 1:
        found = tl.max(found, 1)[:, None]
    if HOW == 2:
        found = (tl.sum(found, 1) / BLOCK)[:, None]
    return found.to(tl.float64)


@triton.jit(do_not_specialize=["size"])
def _ranked(
    scores, candidates, found, size, HOW: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.float64)
    for first in range(0, size, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = tl.load(candidates + row * size + block, mask=block < size, other=0) != 0
        some = _scores(scores, row, first, size, HOW, BLOCK, BLOCKS)
        total += tl.sum(tl.sum(tl.where(inside[:, None], some, 0.0), 1), 0)
        count += tl.sum(inside.to(tl.float64), 0)
    if HOW == 0:
        count *= BLOCK
    count = tl.maximum(count, 1.0)
    mean = total / count
    square = tl.zeros((), tl.float64)
    for first in range(0, size, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = tl.load(candidates + row * size + block, mask=block < size, other=0) != 0
        apart = _scores(scores, row, first, size, HOW, BLOCK, BLOCKS) - mean
        square += tl.sum(tl.sum(tl.where(inside[:, None], apart * apart, 0.0), 1), 0)
    # Differences in the last bits do not count.
    least = tl.maximum(tl.abs(mean) * 1.52587890625e-05, 1.1754943508222875e-38)
    deviation = tl.sqrt(square / count)
    deviation = tl.where(deviation < least, least, deviation)
    for first in range(0, size, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        z = (_scores(scores, row, first, size, HOW, BLOCK, BLOCKS) - mean) / deviation
        z = tl.where(z < -80.0, -80.0, tl.where(z > 80.0, 80.0, z))  # NaN stays NaN
        weights = tl.sum(tl.exp(z).to(tl.float32), 1)
        tl.store(found + row * size + block, weights, mask=block < size)
