"""KeyDiff: keys unlike the others (arXiv 2504.15364)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from nexus_vllm.policies.base import Observation, Policy
from nexus_vllm.policies.tokens import spread_out


@dataclass(frozen=True)
class KeyDiff(Policy):
    """w_j = e^z of -cos(k, mean of all unit keys), averaged over the block's tokens and over heads.

    z: `spread_out`. The method keeps the highest. It looks at no queries, and so knows nothing of
    what is asked.
    """

    name: ClassVar[str] = "keydiff"
    needs_keys: ClassVar[bool] = True

    def weights(self, obs: Observation) -> Tensor:
        unit = functional.normalize(obs.all_keys().float(), dim=-1)  # [..., N, Hkv, b, D]
        counted = unit
        if obs.valid is not None:
            counted = unit * obs.valid[..., None, None, None]
        anchor = functional.normalize(counted.sum(dim=(-4, -2), keepdim=True), dim=-1)
        return spread_out(-(unit * anchor).sum(-1).mean(dim=(-2, -1)), obs.candidates)
