"""What an allocator sees and returns, and the two ways to hand out blocks that they share.

An allocator maps one sequence's budget of B blocks to a number of blocks for each (layer, KV head).
The numbers add up to B*L*H, so the sequence owns B whole pages whatever the allocator: heads that
keep fewer blocks lend their units to heads that keep more (design.md, section 5). *Which* blocks a
head keeps is the policy's and the selector's business.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_HALVINGS = 64
_TIE = 2.0**-20
"""Blocks. Remainders closer than this are equal, so that float noise decides nothing."""


@dataclass(frozen=True)
class Situation:
    """One sequence at one eviction, as this rank sees it: L layers, H KV heads, all in blocks.

    capacity and floor are on the host, where the arithmetic is scalar now and then; the others may
    be on a GPU, and are then not checked, which would have to wait for it.

    budget: B, what each (layer, KV head) keeps on average.
    seen: N, full blocks the sequence has ever had.
    capacity: [L, H] int64, blocks each head still holds; a count never exceeds it.
    floor: [L, H] int64, those of them that are forced (sink, recency); a count never falls below.
    weights: [L, H, M] float, the policy's weight of each held block (or the selector's priority,
      which then counts what it will keep), comparable between heads; anything but nan orders them.
      None for an allocator that does not need them.
    candidates: [L, H, M] bool, False for forced blocks and for the padding of heads that hold fewer
      than M; so each head has capacity - floor candidates. Comes with weights.
    block_ids: [L, H, M] int64, original logical block indices, distinct within a head, in any
      order. Equal weights go to the newer (higher) id, as in the selectors. Comes with weights.
    preference: [L] float >= 0, for an allocator that needs it; only ratios count.
    Raises ValueError when shapes do not fit, bounds contradict each other, or B*L*H blocks are less
    than what is forced or more than what is held.
    """

    budget: int
    seen: int
    capacity: Tensor
    floor: Tensor
    weights: Tensor | None = None
    candidates: Tensor | None = None
    block_ids: Tensor | None = None
    preference: Tensor | None = None

    def __post_init__(self) -> None:
        if self.capacity.ndim != 2 or self.floor.shape != self.capacity.shape:
            raise ValueError(
                f"Situation: capacity {tuple(self.capacity.shape)} and floor "
                f"{tuple(self.floor.shape)} must both be [layers, KV heads]"
            )
        if bool((self.floor < 0).any()) or bool((self.floor > self.capacity).any()):
            raise ValueError("Situation: floor must lie between 0 and capacity in every head")
        if int(self.capacity.max()) > self.seen:
            raise ValueError(
                f"Situation: a head holds {int(self.capacity.max())} blocks, "
                f"the sequence has had only {self.seen}"
            )
        forced, held = int(self.floor.sum()), int(self.capacity.sum())
        layers, heads = self.capacity.shape
        budget = f"{self.budget} blocks x {layers} layers x {heads} KV heads = {self.total}"
        if self.total < forced:
            raise ValueError(
                f"Situation: {forced} blocks are forced but only {budget} may stay; "
                "raise the budget or protect fewer blocks"
            )
        if self.total > held:
            raise ValueError(
                f"Situation: {held} blocks are held, fewer than {budget}; there is nothing to evict"
            )
        self._check_inputs(layers, heads)

    def _check_inputs(self, layers: int, heads: int) -> None:
        if self.preference is not None:
            if self.preference.shape != (layers,):
                raise ValueError(
                    f"Situation: preference {tuple(self.preference.shape)} must be [{layers}]"
                )
            wrong = ~(self.preference.isfinite() & (self.preference >= 0))
            if self.preference.device.type == "cpu" and bool(wrong.any()):
                raise ValueError("Situation: preference must be finite and not negative")
        if self.weights is None:
            return
        weights, candidates, ids = self.ranked()
        fits = weights.ndim == 3 and weights.shape[:2] == self.floor.shape
        if not (fits and weights.shape == candidates.shape == ids.shape):
            raise ValueError(
                f"Situation: weights {tuple(weights.shape)}, candidates {tuple(candidates.shape)} "
                f"and block_ids {tuple(ids.shape)} must be [{layers}, {heads}, blocks]"
            )
        if weights.device.type != "cpu":
            return
        if bool((candidates.sum(-1) != self.capacity - self.floor).any()):
            raise ValueError("Situation: a head must have capacity - floor candidates")
        if bool(weights[candidates].isnan().any()):
            raise ValueError("Situation: the weight of a candidate is nan")

    @property
    def total(self) -> int:
        """B*L*H, the number of blocks to hand out."""
        return self.budget * int(self.capacity.numel())

    def ranked(self) -> tuple[Tensor, Tensor, Tensor]:
        """(weights, candidates, block_ids). Raises ValueError if one of them was left out."""
        if self.weights is None or self.candidates is None or self.block_ids is None:
            raise ValueError(
                "this allocator needs weights, candidates and block_ids; the situation lacks them"
            )
        return self.weights, self.candidates, self.block_ids


class Allocator(ABC):
    """Hands out a sequence's blocks. Frozen dataclass: its fields are the method's parameters."""

    name: ClassVar[str]
    needs_weights: ClassVar[bool] = False
    """Situation.weights must be there: per-head weights are computed before the allocation."""
    needs_preference: ClassVar[bool] = False
    """Situation.preference must be there: the layers' attention maps are wanted (`Cake`)."""
    needs_profile: ClassVar[bool] = False
    """Made from a `Profile`."""

    @abstractmethod
    def counts(self, situation: Situation) -> Tensor:
        """Blocks each head keeps, [L, H] int64 on the host; the sum is exactly `situation.total`.

        Each lies within [floor, capacity]. The same situation gives the same counts, however the
        blocks of a head are listed.
        """


def on_host(numbers: Tensor) -> Tensor:
    """A few numbers, at most [L, H], where the host can read them.

    From a GPU this is the one copy of an eviction that waits for what runs there. Counts that
    depend on weights take it, since the host decides by them how wide tables are; where they do
    not depend on weights (`uniform`, `per-head`, `pyramid`, `lu`) nothing waits.
    """
    return numbers.cpu()


def apportion(
    path: Callable[[float], Tensor], high: float, total: int, floor: Tensor, capacity: Tensor
) -> Tensor:
    """Whole numbers that follow `path` as far as `floor` and `capacity` let them.

    path: a level in [0, high] to wanted numbers, shaped like floor; continuous, at level 0 nowhere
      above floor and at level high nowhere below capacity. What bounds take from one entry, the
      level gives to or takes from all the others.
    The level is the one at which clamp(path(level), floor, capacity) adds up to `total`; those
    numbers are rounded by largest remainder, ties to the lower index. Returns int64, shaped like
    floor, each less than 1 from its wanted number, with the exact sum. The caller has made sure
    that sum(floor) <= total <= sum(capacity).
    """
    lowest, highest = floor.to(torch.float64), capacity.to(torch.float64)
    low = 0.0
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        if float(path(level).clamp(lowest, highest).sum()) <= total:
            low = level
        else:
            high = level
    wanted = path(low).clamp(lowest, highest)
    counts = wanted.floor().to(torch.int64)
    # Once round, unless the path is so steep that 64 halvings leave whole blocks over.
    while missing := total - int(counts.sum()):
        room = counts < capacity
        remainder = ((wanted - counts) / _TIE).round().masked_fill(~room, -math.inf)
        best = remainder.flatten().argsort(descending=True, stable=True)
        counts.view(-1)[best[: min(missing, int(room.sum()))]] += 1
    return counts


def proportional(share: Tensor, situation: Situation) -> Tensor:
    """Counts [L, H]: the floor, and what is left over in proportion to `share`, [L, H] >= 0.

    Capacity bounds them; what it cuts off goes to the others in the same proportion. A share of
    nothing counts as a millionth of the average, so it is served last, and shares of nothing
    everywhere are equal shares.
    """
    share = share.to(torch.float64)
    share = (share / share.mean().clamp(min=torch.finfo(share.dtype).tiny)).clamp(min=1e-6)
    floor, capacity = situation.floor, situation.capacity
    high = float(((capacity - floor) / share).max())
    return apportion(lambda level: floor + level * share, high, situation.total, floor, capacity)


def heads_best_first(situation: Situation) -> Tensor:
    """The head l*H + h of every candidate block, best block first, then L*H for what is none: int64
    [L*H*M], where the weights are.

    By weight; equal weights newer block first, then lower layer and head.
    """
    weights, candidates, ids = (tensor.flatten() for tensor in situation.ranked())
    heads, each = situation.floor.numel(), len(weights) // situation.floor.numel()
    # Not the lowest weight only, which a candidate may have, but the oldest block as well.
    order = ids.masked_fill(~candidates, -1).argsort(descending=True, stable=True)
    ranking = weights.masked_fill(~candidates, -math.inf)[order]
    order = order[ranking.argsort(descending=True, stable=True)]
    return torch.where(candidates, _places(candidates) // each, heads)[order]


def _places(entries: Tensor) -> Tensor:
    return torch.arange(len(entries), device=entries.device)


def tally(groups: Tensor, size: int, counted: Tensor | None = None) -> Tensor:
    """How many entries [E] each of `size` groups has, those only that are `counted`; [size] int64.
    `bincount`, which on a GPU would wait to see how many groups there are."""
    ones = torch.ones_like(groups) if counted is None else counted.to(groups.dtype)
    return groups.new_zeros(size).scatter_add_(0, groups, ones)


def place_in_group(groups: Tensor, size: int) -> Tensor:
    """For each entry of `groups` [E] int64 < size, how many earlier entries are of its group."""
    order = groups.argsort(stable=True)
    sizes = tally(groups, size)
    starts = sizes.cumsum(0) - sizes
    place = _places(groups) - starts[groups[order]]
    return torch.empty_like(place).scatter(0, order, place)
