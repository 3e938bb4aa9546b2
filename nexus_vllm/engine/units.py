"""Units: the memory of uneven budgets.

A unit is one page's slice for one (layer, KV head). Where budgets are uneven, a sequence still
owns whole pages, but their units are dealt out among all its (layer, KV head) pairs: a head that
keeps few blocks lends units to one that keeps many. All units of the pool form one array, so a
head's blocks may lie anywhere in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitSpace:
    """All units of the pool as one array, and the number of each.

    Unit (layer row, page, head) is `base[row] + page * heads + head` of `flat`, which is
    [units, 1, block, 2 * head size]: a cache with one KV head per page, as attention reads it.
    """

    flat: Tensor
    base: Tensor
    heads: int

    @classmethod
    def of(cls, caches: list[Tensor]) -> "UnitSpace":
        """From every layer's [pages, heads, block, 2D] view of vLLM's one allocation.

        Raises ValueError where layers do not share it, differ, or are not head-contiguous.
        """
        first = caches[0]
        pages, heads, block, content = first.shape
        unit = block * content
        storage = first.untyped_storage().data_ptr()
        for cache in caches:
            if (
                cache.shape != first.shape
                or cache.untyped_storage().data_ptr() != storage
                or cache.stride() != (heads * unit, unit, content, 1)
            ):
                raise ValueError(
                    "uneven budgets need a KV cache with all layers in one allocation and each "
                    f"page's heads contiguous (LBHNC); found shape {tuple(cache.shape)}, strides "
                    f"{cache.stride()}"
                )
        offsets = torch.tensor([cache.storage_offset() for cache in caches])
        start = int(offsets.min())
        if ((offsets - start) % unit).any():
            raise ValueError(f"layers do not start at multiples of a unit of {unit} numbers")
        count = int(offsets.max() - start) // unit + pages * heads
        flat = torch.as_strided(first, (count, 1, block, content), (unit, unit, content, 1), start)
        return cls(flat, (offsets - start) // unit, heads)

    def own(self, pages: Tensor) -> Tensor:
        """Each pair's own units in these pages: [layers, heads, len(pages)]."""
        heads = torch.arange(self.heads)
        return self.base[:, None, None] + pages * self.heads + heads[:, None]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole units; no unit may be in both."""
        self.flat[target] = self.flat[source]


@dataclass(frozen=True, eq=False)
class Holding:
    """Which unit holds which block, for each (layer, KV head) of one sequence.

    `units`, `blocks` [layers, heads, most]: unit numbers and original block ids, in no particular
    order, the first `counts` [layers, heads] of each row valid, the rest -1. Equal only to itself.
    """

    units: Tensor
    blocks: Tensor
    counts: Tensor

    @classmethod
    def even(cls, space: UnitSpace, pages: Tensor, blocks: Tensor) -> "Holding":
        """Every pair holds its own unit of every page. `blocks` [layers, len(pages)]."""
        units = space.own(pages)
        heads = units.shape[1]
        return cls(
            units,
            blocks[:, None].expand(-1, heads, -1),
            torch.full(units.shape[:2], units.shape[2]),
        )

    def grown(self, space: UnitSpace, pages: Tensor, blocks: Tensor) -> "Holding":
        """With further pages, filled since, of which every pair holds its own unit."""
        extra = space.own(pages)
        layers, heads, more = extra.shape
        wide = torch.full((layers, heads, self.units.shape[2] + more), -1)
        units, ids = wide.clone(), wide
        units[..., : self.units.shape[2]] = self.units
        ids[..., : self.units.shape[2]] = self.blocks
        place = self.counts[..., None] + torch.arange(more)
        units.scatter_(2, place, extra)
        ids.scatter_(2, place, blocks.expand(layers, heads, -1))
        return Holding(units, ids, self.counts + more)

    @property
    def valid(self) -> Tensor:
        """[layers, heads, most] bool: which entries exist."""
        return self.units >= 0

    def packed(self, kept: Tensor, room: Tensor) -> tuple["Holding", Tensor, Tensor]:
        """Keep the blocks marked in `kept` [layers, heads, most], all within the units `room`.

        `room` is a flat list of units, as many as are kept. Blocks whose unit is in it stay where
        they are; the others move to units that are left over, a pair's own ones first being no
        concern: a unit is just memory. Returns the new holding and the copies (source, target).
        Raises ValueError where counts do not match.
        """
        if int(kept.sum()) != len(room):
            raise ValueError(f"{int(kept.sum())} blocks to keep in {len(room)} units")
        units = self.units.masked_fill(~kept, -1)
        staying = torch.isin(units, room) & kept
        leaving = kept & ~staying
        left = room[~torch.isin(room, units[staying])]
        source = units[leaving]
        moved = units.masked_scatter(leaving, left)
        order, gone = _to_the_front(kept)
        new = Holding(
            moved.gather(-1, order).masked_fill(gone, -1),
            self.blocks.gather(-1, order).masked_fill(gone, -1),
            kept.sum(-1),
        )
        return new, source, left

    def check_integrity(self, room: Tensor) -> None:
        """Raise RuntimeError unless the units of `room` have one owner each and no others have."""
        owned = self.units[self.valid]
        if not torch.equal(owned.sort().values, room.sort().values):
            raise RuntimeError(f"{len(owned)} owned units are not the {len(room)} of its pages")
        if not torch.equal(self.valid.sum(-1), self.counts):
            raise RuntimeError("unit counts do not add up")
        for row in self.blocks.flatten(0, 1).tolist():
            live = [block for block in row if block >= 0]
            if len(set(live)) != len(live):
                raise RuntimeError("a head holds a block twice")


def packed_state(state: Tensor, kept: Tensor) -> Tensor:
    """State [layers, heads, most, S] of a holding's blocks in the order of `Holding.packed`, NaN
    where a head keeps fewer than another."""
    order, gone = _to_the_front(kept)
    order = order[..., None].expand(*order.shape, state.shape[-1])
    return state.gather(2, order).masked_fill(gone[..., None], torch.nan)


def _to_the_front(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Where to take each entry from so that kept ones come first, in their order, and which of
    these are none: both [layers, heads, the most that one keeps]."""
    counts = kept.sum(-1)
    most = int(counts.max())
    order = (~kept).long().argsort(dim=-1, stable=True)[..., :most]
    return order, torch.arange(most) >= counts[..., None]
