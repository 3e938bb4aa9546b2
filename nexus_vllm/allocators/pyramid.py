"""PyramidKV (arXiv 2406.02069): early layers keep more, along a straight line."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.allocators.base import Allocator, Situation, proportional


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Above its forced blocks, layer l of L keeps in proportion to a line in l, mean 1.

    share_l = hi - l (hi - lo) / (L - 1), with lo = 1/beta and hi = 2 - lo; heads of a layer alike.
    The paper's implementations fall back to equal layers where the last one would not hold the
    window; here the forced blocks come first and only what is left is sloped, so none needs to.
    L are the layers of the situation: under pipeline parallelism each stage has its own line.

    beta: steepness, at least 1 (equal layers).
    Raises ValueError on another beta.
    """

    beta: float = 20.0

    name: ClassVar[str] = "pyramid"

    def __post_init__(self) -> None:
        if not 1 <= self.beta < math.inf:
            raise ValueError(f"pyramid: beta is {self.beta}, must be finite and at least 1")

    def counts(self, situation: Situation) -> Tensor:
        layers = len(situation.floor)
        low = 1 / self.beta
        line = torch.linspace(2 - low, low, layers, dtype=torch.float64)
        line = line.to(situation.floor.device)
        return proportional(line[:, None].expand(situation.floor.shape), situation)
