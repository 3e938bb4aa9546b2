"""units: the tables of a batch over units, one row for each (layer, KV head, request)."""

from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm.engine.ops import sent
from nexus_vllm.engine.units import unit_tables as reference

__all__ = ["reference", "tables"]

COLUMNS = 256
"""Unit numbers that a program writes."""


def tables(
    held: Sequence[tuple[Tensor, Tensor] | None],
    first: Sequence[int],
    tail: Sequence[int],
    table: Tensor,
    lengths: Tensor,
    base: Tensor,
    heads: int,
    block: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The same as `reference`, one launch for all layers; units are read where they are."""
    layers, requests, device = len(base), len(held), table.device
    pairs = heads * requests
    new = torch.empty(layers, pairs, width, dtype=torch.int32, device=device)
    tokens = torch.empty(layers, pairs, dtype=torch.int32, device=device)
    told = [
        (0, 0, 0) if dealt is None else (dealt[0].data_ptr(), dealt[1].data_ptr(), _step(dealt[0]))
        for dealt in held
    ]
    address = sent([*chain(*zip(*told, strict=True)), *first, *tail], device)
    grid = (layers * pairs, max(1, triton.cdiv(width, COLUMNS)))
    _tables[grid](
        address, table, table.stride(0), lengths, base, new, tokens,
        requests, heads, block, width, COLUMNS,
    )  # fmt: skip
    return new, tokens


def _step(units: Tensor) -> int:
    """From one row of units to the next. Raises ValueError unless that is one number."""
    _, heads, size = units.shape
    step = units.stride(1) if heads > 1 else units.stride(0)
    if (size > 1 and units.stride(2) != 1) or units.stride(0) != heads * step:
        raise ValueError(f"units: strides {units.stride()} of {tuple(units.shape)} are no rows")
    return step


@triton.jit(do_not_specialize=["requests", "width"])
def _tables(
    address, table, table_step, lengths, base, new, tokens, requests, heads, block, width,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    out, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, pair = out % requests, out // requests
    layer, head = pair // heads, pair % heads
    units = tl.load(address + request)
    counts = tl.load(address + requests + request)
    step = tl.load(address + 2 * requests + request)
    first = tl.load(address + 3 * requests + request)
    tail = tl.load(address + 4 * requests + request)
    units = tl.cast(units, tl.pointer_type(tl.int64))
    counts = tl.cast(counts, tl.pointer_type(tl.int64))
    count = tl.load(counts + pair, mask=step > 0, other=0)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    dealt = tl.load(units + pair * step + column, mask=column < count, other=0)
    place = column - count
    shared = (place >= 0) & (place < tail)
    page = tl.load(table + request * table_step + first + place, mask=shared, other=0)
    own = tl.load(base + layer) + page.to(tl.int64) * heads + head
    unit = tl.where(shared, own, dealt)
    tl.store(new + out * width + column, unit.to(tl.int32), mask=column < width)
    if part == 0:
        length = tl.load(lengths + request) + (count - first) * block
        tl.store(tokens + out, length.to(tl.int32))
