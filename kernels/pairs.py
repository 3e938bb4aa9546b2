"""pairs: which blocks move where, see `nexus_vllm.pairing`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm.pairing import Pairs
from nexus_vllm.pairing import pair as reference

__all__ = ["Pairs", "pairs", "reference"]

PART = 1024
"""Blocks, or places, of a row that a program looks at at once."""

LONG = 1 << 15
"""Rows of more blocks than this are left to torch's scans, which use more than one program."""


def pairs(kept: Tensor, slots: Tensor, places: int, most: int) -> Pairs:
    """The same as `reference`: one launch, a program for each row."""
    rows, size = kept.shape
    if size > LONG or not rows:
        return reference(kept, slots, places, most)
    device = kept.device
    slots = slots.expand(rows, size)
    found = Pairs(
        torch.full((rows, places), -1, device=device),
        torch.zeros(rows, most, dtype=torch.int64, device=device),
        torch.zeros(rows, most, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    _pairs[(rows,)](
        kept.contiguous(), slots, slots.stride(0), slots.stride(1), *found, size, places, most, PART
    )
    return found


@triton.jit(do_not_specialize=["size", "places", "most"])
def _pairs(
    kept, slots, slot_row, slot_step, taken, source, target, counts, size, places, most,
    PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    taken += row * places
    source += row * most
    target += row * most
    leaving = tl.zeros((), tl.int32)
    for first in range(0, size, PART):
        block = first + tl.arange(0, PART)
        stays = tl.load(kept + row * size + block, mask=block < size, other=0) != 0
        slot = tl.load(slots + row * slot_row + block * slot_step, mask=stays, other=-1)
        tl.store(taken + slot, block.to(tl.int64), mask=stays & (slot >= 0))
        leaves = (stays & (slot < 0)).to(tl.int32)
        nth = leaving + tl.cumsum(leaves, 0) - 1
        tl.store(source + nth, block.to(tl.int64), mask=(leaves != 0) & (nth < most))
        leaving += tl.sum(leaves, 0)

    # Places are looked at once all blocks that stay have written theirs.
    tl.debug_barrier()
    free = tl.zeros((), tl.int32)
    for first in range(0, places, PART):
        place = first + tl.arange(0, PART)
        is_open = (tl.load(taken + place, mask=place < places, other=0) < 0).to(tl.int32)
        nth = free + tl.cumsum(is_open, 0) - 1
        moves = (is_open != 0) & (nth < leaving) & (nth < most)
        tl.store(target + nth, place.to(tl.int64), mask=moves)
        tl.store(taken + place, tl.load(source + nth, mask=moves, other=0), mask=moves)
        free += tl.sum(is_open, 0)
    tl.store(counts + row, tl.minimum(tl.minimum(leaving, free), most).to(tl.int64))
