"""Ada-KV (arXiv 2407.11550): the heads of a layer compete for its blocks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from nexus_vllm.allocators.base import (
    Allocator,
    Situation,
    apportion,
    heads_best_first,
    on_host,
    place_in_group,
    tally,
)


@dataclass(frozen=True)
class Ada(Allocator):
    """Equal layers; within one, a joint top-k over its heads, each head's best blocks protected.

    A layer has B*H blocks, or as near to it as its heads' bounds allow. Protected are a head's
    first floor(alpha B) blocks, forced ones and then by weight, B being its layer's mean; they go
    before all others of the layer, and if even they do not fit, by weight among themselves.

    alpha: safeguard, 0 to 1 (equal heads, as far as they hold enough). The authors advise less,
      about 0.05, for small budgets.
    Raises ValueError on another alpha.
    """

    alpha: float = 0.2

    name: ClassVar[str] = "ada"
    needs_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"ada: alpha is {self.alpha}, must be from 0 to 1")

    def counts(self, situation: Situation) -> Tensor:
        floor, capacity = situation.floor, situation.capacity
        layers, heads = floor.shape
        least, most = floor.sum(1), capacity.sum(1)
        ones = torch.ones_like(least, dtype=torch.float64)
        totals = apportion(
            lambda level: level * ones, float(most.max()), situation.total, least, most
        )

        safe = (self.alpha * totals.to(torch.float64) / heads).floor()
        protected = safe.repeat_interleave(heads) - floor.flatten()
        # One head and one layer more: of what is no candidate.
        head, size = heads_best_first(situation), layers * heads
        protected = functional.pad(protected, (0, 1)).to(head.device, non_blocking=True)
        free = functional.pad(totals - least, (0, 1)).to(head.device, non_blocking=True)
        unprotected = place_in_group(head, size + 1) >= protected[head]
        head = head[unprotected.to(torch.int8).argsort(stable=True)]
        layer = head // heads
        kept = place_in_group(layer, layers + 1) < free[layer]
        return floor + on_host(tally(head, size + 1, kept)[:-1]).view(layers, heads)
