"""shift: block tables and lengths of the live window, in buffers whose addresses stay."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 256
"""Block numbers that a program writes."""


def reference(
    table: Tensor, lengths: Tensor, released: Tensor, block: int, out: tuple[Tensor, Tensor]
) -> None:
    """Row i of the table without its first `released[i]` blocks, lengths without their tokens.

    table [B, width] int32, lengths [B] int32, released [B] int32, out: buffers of their shapes. A
    row may be padding: length 0, nothing released. What is left of a row is followed by block 0,
    which every kernel may read.
    """
    width = table.shape[1]
    columns = torch.arange(width, device=table.device) + released[:, None].long()
    moved = table.gather(1, columns.clamp(max=width - 1))
    out[0].copy_(moved.masked_fill(columns >= width, 0))
    out[1].copy_(lengths - released * block)


def shift(
    table: Tensor, lengths: Tensor, released: Tensor, block: int, out: tuple[Tensor, Tensor]
) -> None:
    """The same as `reference`, as one launch that allocates nothing."""
    rows, width = table.shape
    grid = (rows, triton.cdiv(width, COLUMNS))
    _shift[grid](
        table,
        table.stride(0),
        lengths,
        released,
        block,
        out[0],
        out[0].stride(0),
        out[1],
        width,
        COLUMNS,
    )


@triton.jit
def _shift(
    table, table_step, lengths, released, block, new_table, new_step, new_lengths, width,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gone = tl.load(released + row)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    source = column + gone
    page = tl.load(table + row * table_step + source, mask=source < width, other=0)
    tl.store(new_table + row * new_step + column, page, mask=column < width)
    if part == 0:
        tl.store(new_lengths + row, tl.load(lengths + row) - gone * block)
