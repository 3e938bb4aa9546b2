"""KNorm: keys of small norm attract attention (arXiv 2406.11430)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy


@dataclass(frozen=True)
class KNorm(Policy):
    """w_j = 1 / (mean of ||k|| over the block's tokens and heads)."""

    name: ClassVar[str] = "knorm"
    needs_keys: ClassVar[bool] = True

    def weights(self, obs: Observation) -> Tensor:
        norms = obs.all_keys().float().norm(dim=-1).mean(dim=(-2, -1))
        return 1 / norms.clamp(min=1e-20)
