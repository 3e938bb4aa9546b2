"""KNorm: keys of small norm attract attention (arXiv 2406.11430)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy
from nexus_vllm.policies.tokens import spread_out


@dataclass(frozen=True)
class KNorm(Policy):
    """w_j = e^z of -||k||, averaged over the block's tokens and over heads; z: `spread_out`."""

    name: ClassVar[str] = "knorm"
    needs_keys: ClassVar[bool] = True

    def weights(self, obs: Observation) -> Tensor:
        norms = obs.all_keys().float().norm(dim=-1).mean(dim=(-2, -1))
        return spread_out(-norms, obs.candidates)
