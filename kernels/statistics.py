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
from nexus_vllm.kernels.score import TOKENS, part_of_row

Kind = Literal["norm", "cosine", "range"]
KINDS = ("norm", "cosine", "range")


def reference(kind: Kind, rows: Rows, anchor: Tensor | None = None) -> Tensor:
    """[R, N, block] float32: of each key its norm, or its cosine to `anchor` [R, D], whose
    rows have norm 1; of each value its largest number minus its smallest. 0 where there is none.
    """
    told = rows.gather(values=kind == "range").float()
    if kind == "norm":
        found = told.norm(dim=-1)
    elif kind == "range":
        found = told.amax(-1) - told.amin(-1)
    else:
        assert anchor is not None, "cosines are to an anchor"
        found = (functional.normalize(told, dim=-1) * anchor[:, None, None]).sum(-1)
    return found.masked_fill(~rows.exists[..., None], 0)


def anchor_reference(rows: Rows) -> Tensor:
    """The direction of the sum of a row's keys, each scaled to norm 1: [R, D] float32, norm 1."""
    unit = functional.normalize(rows.gather().float(), dim=-1)
    return functional.normalize(unit.sum(dim=(1, 2)), dim=-1)


def statistics(kind: Kind, rows: Rows, anchor: Tensor | None = None) -> Tensor:
    """The same as `reference`, one launch."""
    found = torch.zeros(*rows.shape, rows.block, dtype=torch.float32, device=rows.cache.device)
    _launch(rows, _tokens, found, anchor if anchor is not None else found, KINDS.index(kind))
    return found


def anchor(rows: Rows) -> Tensor:
    """The same as `anchor_reference`: a partial sum of each program, in the order of the blocks."""
    count, size = rows.shape
    parts = triton.cdiv(size * rows.block, TOKENS)
    sums = torch.zeros(count, parts, rows.head_size, dtype=torch.float32, device=rows.cache.device)
    _launch(rows, _sums, sums, sums, 0)
    return functional.normalize(sums.sum(1), dim=-1)


def _launch(rows: Rows, kernel: object, found: Tensor, anchor: Tensor, kind: int) -> None:
    blocks = TOKENS // rows.block
    count, size = rows.shape
    if count and size:
        grid = (count, triton.cdiv(size, blocks))
        values = kind == KINDS.index("range")
        first = rows.values if values else rows.keys
        scales = None if rows.scales is None else rows.scales[int(values)]
        kernel[grid](  # type: ignore[index]
            rows.cache, rows.units, rows.counts, first, rows.token_step, rows.dim_step,
            anchor if scales is None else scales, found, anchor, size, KIND=kind,
            DIM=rows.head_size, DIMS=triton.next_power_of_2(rows.head_size), BLOCK=rows.block,
            BLOCKS=blocks, ALIGNED=rows.alignment, SCALED=scales is not None,
        )  # fmt: skip


@triton.jit
def _held(
    cache, units, counts, first, token_step, dim_step, scales, row, part, size,
    DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCKS * BLOCK, DIMS] of a part of a row, float32; 0 where there are none."""
    told = part_of_row(
        cache, units, counts, first, token_step, dim_step, 0, size, row, part,
        1, DIM, DIMS, BLOCK, BLOCKS, ALIGNED,
    ).to(tl.float32)  # fmt: skip
    return told * tl.load(scales + row) if SCALED else told


@triton.jit(do_not_specialize=["size"])
def _tokens(
    cache, units, counts, first, token_step, dim_step, scales, found, anchor, size,
    KIND: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    told = _held(
        cache, units, counts, first, token_step, dim_step, scales, row, part, size, DIM, DIMS,
        BLOCK, BLOCKS, ALIGNED, SCALED,
    )  # fmt: skip
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
    tl.store(found + row * size * BLOCK + place, result, mask=place < size * BLOCK)


@triton.jit(do_not_specialize=["size"])
def _sums(
    cache, units, counts, first, token_step, dim_step, scales, sums, anchor, size,
    KIND: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    told = _held(
        cache, units, counts, first, token_step, dim_step, scales, row, part, size, DIM, DIMS,
        BLOCK, BLOCKS, ALIGNED, SCALED,
    )  # fmt: skip
    norm = tl.maximum(tl.sqrt(tl.sum(told * told, 1)), 1e-12)
    dim = tl.arange(0, DIMS)
    into = sums + (row * tl.num_programs(1) + part) * DIM + dim
    tl.store(into, tl.sum(told / norm[:, None], 0), mask=dim < DIM)
