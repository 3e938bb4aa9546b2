"""Units: the memory of uneven budgets.

A unit is one page's slice for one (layer, KV head). Where budgets are uneven, a sequence still
owns whole pages, but their units are dealt out among all its (layer, KV head) pairs: a head that
keeps few blocks lends units to one that keeps many. All units of the pool form one array, so a
head's blocks may lie anywhere in it.

How many units a head holds is known to the host, which units and blocks they are to the device:
nothing here waits for a GPU, and what decides a shape is never read from one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nexus_vllm.engine import ops
from nexus_vllm.engine.ops import sent, use_kernels


@dataclass(frozen=True)
class Copies:
    """Which units are copied where: the first `count` [] of `source`, `target` [C]; no unit is in
    both. The rest, of which there is none on a CPU, would copy unit 0 to itself."""

    source: Tensor
    target: Tensor
    count: Tensor


@dataclass(frozen=True)
class UnitSpace:
    """All units of the pool as one array, and the number of each.

    Unit (layer row, page, head) is `base[row] + page * heads + head` of `flat`, which is
    [units, 1, block, 2 * head size]: a cache with one KV head per page, as attention reads it.
    Unit 0 is of page 0, which is nobody's.
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
        return cls(flat, sent((offsets - start) // unit, first.device), heads)

    @property
    def device(self) -> torch.device:
        """Where the units are, and all that tells of them."""
        return self.flat.device

    def own(self, pages: Tensor) -> Tensor:
        """Each pair's own units in these pages: [layers, heads, len(pages)]."""
        heads = torch.arange(self.heads, device=self.device)
        return self.base[:, None, None] + pages * self.heads + heads[:, None]

    def copy(self, copies: Copies) -> None:
        """Copy whole units."""
        if not use_kernels(self.device):
            self.flat[copies.target] = self.flat[copies.source]
            return
        unit = self.flat[0].numel()
        source, target = copies.source * unit, copies.target * unit
        ops.copy(self.flat.flatten(), source, target, unit, copies.count.view(1))


@dataclass(frozen=True, eq=False)
class Holding:
    """Which unit holds which block, for each (layer, KV head) of one sequence.

    `units`, `blocks` [layers, heads, most]: unit numbers and original block ids, in no particular
    order, the first `counts` [layers, heads] of each row valid, the rest -1. `counts` are on the
    host, whichever device the others are on. Equal only to itself.
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
        width = self.units.shape[2]
        wide = torch.full((layers, heads, width + more), -1, device=space.device)
        units, ids = wide.clone(), wide
        units[..., :width] = self.units
        ids[..., :width] = self.blocks
        place = self.counts_there[..., None] + torch.arange(more, device=space.device)
        units.scatter_(2, place, extra)
        ids.scatter_(2, place, blocks.expand(layers, heads, -1))
        return Holding(units, ids, self.counts + more)

    @property
    def valid(self) -> Tensor:
        """[layers, heads, most] bool: which entries exist."""
        return self.units >= 0

    @cached_property
    def counts_there(self) -> Tensor:
        """`counts` where the units are."""
        return sent(self.counts, self.units.device)

    def packed(
        self, space: UnitSpace, kept: Tensor, counts: Tensor, room: Tensor, moves: int | None = None
    ) -> tuple["Holding", Copies]:
        """Keep the blocks marked in `kept` [layers, heads, most], all within the units `room`.

        `counts` [layers, heads], on the host, is how many each head keeps, and `room` a flat list
        of as many units. Blocks whose unit is in it stay where they are; of the others the i-th
        moves to the i-th unit left over, a pair's own ones first being no concern: a unit is just
        memory. Returns the new holding and the copies, which on a GPU are listed with room for
        `moves`, the most that there can be (None: as many as `room` has units). Raises ValueError
        where counts do not match.
        """
        if int(counts.sum()) != len(room):
            raise ValueError(f"{int(counts.sum())} blocks to keep in {len(room)} units")
        # A mark for every unit of the pool, and a last one for padding, whose unit is -1.
        marks = torch.zeros(len(space.flat) + 1, dtype=torch.uint8, device=space.device)
        marks.index_fill_(0, room, 1)
        staying = kept & (marks[self.units] == 1)
        leaving = kept ^ staying
        marks.index_fill_(0, torch.where(staying, self.units, len(space.flat)).flatten(), 2)
        count = leaving.sum()
        if space.device.type == "cpu":
            moves = int(count)
        bound = len(room) if moves is None else min(moves, len(room))
        source, number = _listed(self.units.flatten(), leaving.flatten(), bound)
        target, _ = _listed(room, marks[room] == 1, bound)
        moved = torch.where(leaving, target[number].view_as(leaving), self.units)
        most = int(counts.max())
        new = Holding(
            _to_the_front(moved, kept, most, -1), _to_the_front(self.blocks, kept, most, -1), counts
        )
        return new, Copies(source[:bound], target[:bound], count)

    def check_integrity(self, room: Tensor) -> None:
        """Raise RuntimeError unless the units of `room` have one owner each and no others have."""
        owned = self.units[self.valid]
        if not torch.equal(owned.sort().values, room.sort().values):
            raise RuntimeError(f"{len(owned)} owned units are not the {len(room)} of its pages")
        if not torch.equal(self.valid.sum(-1), self.counts_there):
            raise RuntimeError("unit counts do not add up")
        for row in self.blocks.flatten(0, 1).tolist():
            live = [block for block in row if block >= 0]
            if len(set(live)) != len(live):
                raise RuntimeError("a head holds a block twice")


def packed_state(state: Tensor, kept: Tensor, most: int) -> Tensor:
    """State [layers, heads, n, S] of a holding's blocks in the order of `Holding.packed`, NaN where
    a head keeps fewer than `most`: [layers, heads, most, S]."""
    return _to_the_front(state, kept[..., None].expand(state.shape), most, torch.nan, dim=2)


def unit_tables(
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
    """Unit numbers [L, H * R, width] int32 and tokens [L, H * R] int32, requests R innermost.

    held: of each request, units [L, H, n] int64 and how many of them are valid, [L, H] int64, or
      None where its heads hold nothing apart from each other. Then come the own units of `tail`
      pages from page `first` of its row on, which all heads hold alike.
    table: [R or more, pages] int32. lengths: [R or more] int32 tokens, those before page `first`
      included. base: [L] int64, where units of a layer begin; a page has `heads` of them. block:
      tokens of a unit. width: no row has more units; what is left of one is followed by unit 0.
    """
    layers, requests = len(base), len(held)
    tables = torch.zeros(layers, heads, requests, width, dtype=torch.int32, device=table.device)
    tokens = torch.empty(layers, heads, requests, dtype=torch.int32, device=table.device)
    own = base.int()[:, None, None] + torch.arange(heads, device=table.device)[:, None]
    for request, dealt in enumerate(held):
        row, begin, more = tables[:, :, request], first[request], tail[request]
        length = lengths[request] - begin * block
        pages = own + table[request, begin : begin + more] * heads
        if dealt is None:
            row[..., :more] = pages
            tokens[:, :, request] = length
            continue
        units, counts = dealt
        row[..., : units.shape[-1]] = units[..., :width].clamp(min=0)
        row.scatter_(2, counts[..., None] + torch.arange(more, device=table.device), pages.int())
        tokens[:, :, request] = counts * block + length
    return tables.flatten(1, 2), tokens.flatten(1, 2)


def _to_the_front(values: Tensor, kept: Tensor, most: int, none: float, dim: int = -1) -> Tensor:
    """The kept values first, in their order, then `none`: `most` of them along the dimension."""
    shape = list(values.shape)
    shape[dim] = most + 1  # the last one takes all that is not kept
    front = torch.full(shape, none, dtype=values.dtype, device=values.device)
    place = torch.where(kept, kept.cumsum(dim) - 1, most)
    return front.scatter_(dim, place, values).narrow(dim, 0, most)


def _listed(values: Tensor, which: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Those of `values` that `which` marks, in their order, and where in that list each is.

    The list has `bound` places, 0 where there are fewer, and one more for the values not marked.
    """
    number = torch.where(which, which.cumsum(0) - 1, bound).clamp_(max=bound)
    return values.new_zeros(bound + 1).scatter_(0, number, values), number
