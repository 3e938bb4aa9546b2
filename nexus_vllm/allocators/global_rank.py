"""Global: all blocks of all layers and heads compete, as KVzip's do (arXiv 2505.23416)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.allocators.base import Allocator, Situation, heads_best_first, on_host, tally


@dataclass(frozen=True)
class GlobalRank(Allocator):
    """One ranking over layers and heads: a head keeps as many blocks as it has among the best.

    The best B*L*H blocks, forced ones first. Weights must mean the same in every
    head: attention, say, and not similarities centred head by head.
    """

    name: ClassVar[str] = "global"
    needs_weights: ClassVar[bool] = True

    def counts(self, situation: Situation) -> Tensor:
        floor = situation.floor
        free = situation.total - int(floor.sum())
        head = heads_best_first(situation)[:free]
        return floor + on_host(tally(head, floor.numel() + 1)[:-1]).view(floor.shape)
