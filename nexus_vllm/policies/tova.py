"""TOVA: attention of the newest query alone (arXiv 2401.06104)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, block_attention


@dataclass(frozen=True)
class TOVA(Policy):
    """w_j = the newest query's attention to the block, averaged over heads."""

    name: ClassVar[str] = "tova"
    needs_window: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def weights(self, obs: Observation) -> Tensor:
        queries, positions = obs.asked()
        newest = replace(
            obs, queries=queries[..., -1:, :, :], query_positions=positions[-1:], new_queries=None
        )
        return block_attention(newest)[..., 0, :].mean(-2)
