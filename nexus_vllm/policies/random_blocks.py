"""Random blocks: the floor that a score has to beat."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy
from nexus_vllm.rng import uniforms


@dataclass(frozen=True)
class RandomBlocks(Policy):
    """w_j uniform in (0, 1): top-k is a uniformly random subset, fresh at every eviction."""

    name: ClassVar[str] = "random"
    needs_window: ClassVar[bool] = False
    selector: ClassVar[str | None] = "topk"

    def weights(self, obs: Observation) -> Tensor:
        blocks = obs.block_ids.reshape(-1, obs.block_ids.shape[-1])
        drawn = uniforms(obs.seed, obs.event, obs.layers.reshape(-1), blocks, 1)
        return drawn.reshape(obs.block_ids.shape)


@dataclass(frozen=True)
class RandomGenerated(RandomBlocks):
    """The same, but every block of the prompt stays before any generated one does."""

    name: ClassVar[str] = "random-generated"

    def weights(self, obs: Observation) -> Tensor:
        return super().weights(obs) + (obs.block_ids < obs.prompt_blocks)
