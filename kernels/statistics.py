"""statistics: what keys and values tell by themselves, one number a token.

Norms (knorm), cosines to an anchor (keydiff) and ranges of values (vase); and the anchor.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from nexus_vllm.kernels.rows import Rows
from nexus_vllm.kernels.score import TOKENS, aligned

Kind = Literal["norm", "cosine", "range"]
KINDS = ("norm", "cosine", "range")


def reference(kind: Kind, rows: Rows, anchor: Tensor | None = None) -> Tensor:
    """[R, longest, block] float32: of each key its norm, or its cosine to `anchor` [R, D], whose
    rows have norm 1; of each value its largest number minus its smallest. 0 where there is none.
    """
    index, exists = rows.padded()
    told = rows.gather(index, values=kind == "range").float()
    if kind == "norm":
        found = told.norm(dim=-1)
    elif kind == "range":
        found = told.amax(-1) - told.amin(-1)
    else:
        assert anchor is not None, "cosines are to an anchor"
        found = (functional.normalize(told, dim=-1) * anchor[:, None, None]).sum(-1)
    return found.masked_fill(~exists[..., None], 0)


def anchor_reference(rows: Rows) -> Tensor:
    """The direction of the sum of a row's keys, each scaled to norm 1: [R, D] float32, norm 1."""
    index, exists = rows.padded()
    unit = functional.normalize(rows.gather(index).float(), dim=-1)
    return functional.normalize((unit * exists[..., None, None]).sum(dim=(1, 2)), dim=-1)


def statistics(kind: Kind, rows: Rows, anchor: Tensor | None = None) -> Tensor:
    """The same as `reference`, one launch."""
    found = torch.zeros(
        len(rows), rows.longest, rows.block, dtype=torch.float32, device=rows.cache.device
    )
    _launch(rows, _tokens, found, anchor if anchor is not None else found, KINDS.index(kind))
    return found


def anchor(rows: Rows) -> Tensor:
    """The same as `anchor_reference`: a partial sum of each program, in the order of the blocks."""
    parts = triton.cdiv(rows.longest * rows.block, TOKENS)
    sums = torch.zeros(
        len(rows), parts, rows.head_size, dtype=torch.float32, device=rows.cache.device
    )
    _launch(rows, _sums, sums, sums, 0)
    return functional.normalize(sums.sum(1), dim=-1)


def _launch(rows: Rows, kernel: object, found: Tensor, anchor: Tensor, kind: int) -> None:
    blocks = TOKENS // rows.block
    if rows.longest and len(rows):
        grid = (triton.cdiv(rows.longest, blocks), len(rows))
        kernel[grid](  # type: ignore[index]
            rows.cache, rows.units, rows.starts, rows.token_step, rows.values, found, anchor,
            rows.longest, KIND=kind, DIM=rows.head_size,
            DIMS=triton.next_power_of_2(rows.head_size), BLOCK=rows.block, BLOCKS=blocks,
            ALIGNED=aligned(rows),
        )  # fmt: skip


@triton.jit
def _held(cache, units, starts, token_step, shift, row, part, DIM: tl.constexpr,
          DIMS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers [BLOCKS * BLOCK, DIMS] of a part of a row, float32, and which of its tokens exist."""
    first = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - first).to(tl.int32)
    token, dim = tl.arange(0, BLOCKS * BLOCK), tl.arange(0, DIMS)
    block = part * BLOCKS + token // BLOCK
    exists = block < count
    unit = tl.multiple_of(tl.load(units + first + block, mask=exists, other=0), ALIGNED)
    at = unit + tl.multiple_of(shift, ALIGNED) + (token % BLOCK) * tl.multiple_of(token_step, ALIGNED)
    held = exists[:, None] & (dim < DIM)[None, :]
    numbers = tl.load(cache + at[:, None] + dim[None, :], mask=held, other=0.0).to(tl.float32)
    return numbers, exists


@triton.jit
def _tokens(
    cache, units, starts, token_step, values, found, anchor, longest,
    KIND: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    shift = values if KIND == 2 else 0
    told, exists = _held(
        cache, units, starts, token_step, shift, row, part, DIM, DIMS, BLOCK, BLOCKS, ALIGNED
    )
    dim = tl.arange(0, DIMS)
    if KIND == 2:
        inside = (dim < DIM)[None, :]
        most = tl.max(tl.where(inside, told, -float("inf")), 1)
        result = most - tl.min(tl.where(inside, told, float("inf")), 1)
    else:
        result = tl.sqrt(tl.sum(told * told, 1))
        if KIND == 1:
            to = tl.load(anchor + row * DIM + dim, mask=dim < DIM, other=0.0)
            result = tl.sum(told * to[None, :], 1) / tl.maximum(result, 1e-12)
    place = part * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)
    tl.store(found + row * longest * BLOCK + place, result, mask=exists)


@triton.jit
def _sums(
    cache, units, starts, token_step, values, sums, anchor, longest,
    KIND: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    told, _ = _held(
        cache, units, starts, token_step, 0, row, part, DIM, DIMS, BLOCK, BLOCKS, ALIGNED
    )
    norm = tl.maximum(tl.sqrt(tl.sum(told * told, 1)), 1e-12)
    dim = tl.arange(0, DIMS)
    into = sums + (row * tl.num_programs(0) + part) * DIM + dim
    tl.store(into, tl.sum(told / norm[:, None], 0), mask=dim < DIM)
