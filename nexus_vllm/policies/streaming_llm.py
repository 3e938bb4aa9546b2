"""StreamingLLM: sinks and recency, the baseline that looks at nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.policies.base import Observation, Policy


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the newest blocks: w_j = block_id_j + 1. The sink is a forced block, as ever.

    Keys keep their original rotation; the paper's re-rotation to cache positions is not done.
    """

    name: ClassVar[str] = "streaming-llm"
    needs_window: ClassVar[bool] = False
    selector: ClassVar[str | None] = "topk"

    def weights(self, obs: Observation) -> Tensor:
        return (obs.block_ids + 1).to(torch.float32)
