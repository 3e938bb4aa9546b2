"""Which blocks move where in an eviction, without sorting and without a number from the device.

The i-th block that stays but whose place goes moves to the i-th place that is left over.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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


def pair(kept: Tensor, slots: Tensor, places: int, most: int) -> Pairs:
    """Pair blocks that move with the places they move to.

    kept: [R, N] bool, the blocks that stay. slots: [N] or [R, N] int64, the place in which each
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
