"""Uniform: every head the same, the baseline."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.allocators.base import Allocator, Situation, apportion


@dataclass(frozen=True)
class Uniform(Allocator):
    """Every head keeps B blocks, or as near to it as its forced and its held blocks allow."""

    name: ClassVar[str] = "uniform"

    def counts(self, situation: Situation) -> Tensor:
        floor, capacity = situation.floor, situation.capacity
        ones = torch.ones_like(floor, dtype=torch.float64)
        high = float(capacity.max())
        return apportion(lambda level: level * ones, high, situation.total, floor, capacity)


@dataclass(frozen=True)
class PerHead(Uniform):
    """The same numbers, but each head chooses its own blocks, where `uniform` has the heads of a
    layer keep the same ones."""

    name: ClassVar[str] = "per-head"
