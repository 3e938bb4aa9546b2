"""CAKE (arXiv 2503.12491): layers whose attention is wide and restless keep more."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.allocators.base import Allocator, Situation, on_host, proportional


@dataclass(frozen=True)
class Cake(Allocator):
    """Above its forced blocks, layer l keeps in proportion to P_l = H_l^(1/tau1) V_l^(1/tau2).

    H_l = -sum A log A over query heads, window queries and blocks: how widely the layer looks.
    V_l = sum over query heads and blocks of the variance of A over the window queries: how much its
    looking shifts. Heads of a layer alike. A is attention to whole blocks (`block_attention`), in
    the paper to tokens; blocks that stay anyway are left out, as the paper leaves out the window.

    tau1, tau2: temperatures; the larger, the less the term counts. The authors tune them by model
      and budget (Llama-3.1-8B, 1,024 tokens: 1.6 and 0.4), 1 and 1 otherwise.
    Raises ValueError on a temperature that is not positive and finite.
    """

    tau1: float = 1.0
    tau2: float = 1.0

    name: ClassVar[str] = "cake"
    needs_preference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("tau1", "tau2"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"cake: {field} is {value}, must be finite and positive")

    def preference(self, maps: Tensor, candidates: Tensor) -> Tensor:
        """P, [L] float64, the largest 1 (all 0 where no layer has any).

        maps: [L, Hq, W, N], block attention of the window, rows summing to 1 or 0.
        candidates: bool [L, N], or [L, Hq, N] where heads hold different blocks; False for blocks
          that stay anyway and for padding.
        """
        return self.combined(spread(maps, candidates))

    def combined(self, terms: Tensor) -> Tensor:
        """P of layers whose heads' terms (`spread`) have been added up, [L, 2]."""
        # In logarithms: V is tiny, and a small tau2 would underflow its power.
        entropy, shift = terms.log().unbind(-1)
        power = entropy / self.tau1 + shift / self.tau2
        highest = power.max()
        return torch.where(highest.isfinite(), (power - highest).exp(), 0.0)

    def counts(self, situation: Situation) -> Tensor:
        if situation.preference is None:
            raise ValueError("cake needs the layers' preference; the situation lacks it")
        preference = on_host(situation.preference)
        return proportional(preference[:, None].expand(situation.floor.shape), situation)


def spread(maps: Tensor, candidates: Tensor) -> Tensor:
    """H and V of each row, [..., 2] float64: sums over heads, so heads may be given as rows.

    maps: [..., Hq, W, N]; candidates: bool [..., N] or [..., Hq, N].
    """
    if candidates.ndim == maps.ndim - 2:
        candidates = candidates[..., None, :]
    maps = (maps * candidates[..., None, :]).to(torch.float64)
    entropy = torch.special.entr(maps).sum((-3, -2, -1)).clamp(min=0)
    shift = maps.var(dim=-2, correction=0).sum((-2, -1))
    return torch.stack([entropy, shift], dim=-1)
