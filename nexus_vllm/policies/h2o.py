"""H2O: all the attention that a block has ever had (arXiv 2306.14048)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy, summed_attention


@dataclass(frozen=True)
class H2O(Policy):
    """w_j = attention to the block, summed over queries and averaged over heads.

    The queries are those of the windows that were seen: each eviction adds the ones that have come
    since the last, W of them at most, to what the block brought with it.
    """

    name: ClassVar[str] = "h2o"
    needs_window: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    state_size: ClassVar[int] = 1

    def remember(self, obs: Observation) -> Tensor:
        window = len(obs.asked()[1])
        new = window if obs.new_queries is None else min(window, obs.new_queries)
        mass = summed_attention(obs, new).mean(-2)
        known = 0.0 if obs.state is None else obs.state[..., 0].nan_to_num(nan=0.0)
        return (known + mass)[..., None]

    def weights(self, obs: Observation) -> Tensor:
        return obs.remembered()[..., 0]
