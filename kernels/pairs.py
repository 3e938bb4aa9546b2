"""pairs: which blocks move where, without sorting and without asking the device for a number.

The i-th block that stays but whose place goes moves to the i-th place that is left over.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 1024
"""Blocks, or places, of a row that a program looks at at once."""

LONG = 1 << 15
"""Rows of more blocks than this are left to torch's scans, which use more than one program."""


class Pairs(NamedTuple):
    """What an eviction moves. All on the device.

    taken: [R, S] int64, which block is in each place afterwards; -1: none.
    source: [R, C] int64, the blocks that move; target: [R, C] int64, the places they move to: of
      each row the first `counts` [R] int64. What follows is of no use, but may index.
    """

    taken: Tensor
    source: Tensor
    target: Tensor
    counts: Tensor

    def moved(self, state: Tensor) -> Tensor:
        """What is known of each block, [R, N, ...], as the places have it: [R, S, ...].

        Origins and per-block state move by this gather: 12 bytes a block for Nexus, a
        thousandth of what its keys and values are, so they have no kernel.
        """
        extra = state.shape[2:]
        place = self.taken.clamp(min=0).view(*self.taken.shape, *(1 for _ in extra))
        return state.gather(1, place.expand(*self.taken.shape, *extra))


def reference(kept: Tensor, slots: Tensor, places: int, most: int) -> Pairs:
    """kept: [R, N] bool, the blocks that stay. slots: [N] or [R, N] int64, the place in which each
    block is, -1 if it goes. places: S, how many stay; a place holds at most one block.
    most: C, at least the number of blocks of a row that move. Its least bound is the number of
    places that go, or of those that stay.

    A row that keeps more blocks than it has places, or moves more than `most`, moves the first.
    """
    rows, size = kept.shape
    device = kept.device
    slots = slots.expand(rows, size)
    block = torch.arange(size, device=device).expand(rows, -1)
    place = torch.arange(places, device=device).expand(rows, -1)

    stays, leaves = kept & (slots >= 0), kept & (slots < 0)
    taken = torch.full((rows, places + 1), -1, device=device)  # the last one takes what is none
    taken = taken.scatter(1, slots.where(stays, places), block)[:, :-1]
    is_open = taken < 0
    nth_leaving, nth_open = leaves.cumsum(1) - 1, is_open.cumsum(1) - 1
    counts = torch.minimum(leaves.sum(1), is_open.sum(1)).clamp(max=most)

    def listed(which: Tensor, nth: Tensor, entries: Tensor) -> Tensor:
        empty = torch.zeros(rows, most + 1, dtype=torch.int64, device=device)
        return empty.scatter(1, nth.where(which & (nth < most), most), entries)

    source, target = listed(leaves, nth_leaving, block), listed(is_open, nth_open, place)
    moves = is_open & (nth_open < counts[:, None])
    taken = source.gather(1, nth_open.clamp(0, most)).where(moves, taken)
    return Pairs(taken, source[:, :most], target[:, :most], counts)


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
