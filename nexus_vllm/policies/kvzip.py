"""KVzip: what the model needs to repeat its prompt (arXiv 2505.23416)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nexus_vllm.policies.base import Observation, ReplayPolicy, highest_attention


@dataclass(frozen=True)
class KVzip(ReplayPolicy):
    """w_j = the most attention that a token of the block gets while the prompt is repeated.

    After the prompt the model is told to repeat it, and reads it again, piece by piece. The largest
    softmax attention to each token of the prompt, over the queries of the pieces and the query
    heads of a KV head, is averaged over KV heads. It knows nothing of what will be asked.

    What came after the prompt was never replayed: of these blocks it is the largest attention in
    any window that an eviction has seen. That is of the same kind, but of fewer queries.

    The authors' softmax is over the sink, the piece and its repetition; this one is over the whole
    prompt, as the model computes it.
    """

    name: ClassVar[str] = "kvzip"
    needs_window: ClassVar[bool] = True
    state_size: ClassVar[int] = 1

    def remember(self, obs: Observation) -> Tensor:
        highest = highest_attention(obs).amax(-1).mean(-2)
        if obs.state is not None:
            highest = torch.fmax(highest, obs.state[..., 0])
        return highest[..., None]

    def weights(self, obs: Observation) -> Tensor:
        replayed = obs.replayed().mean(-1)
        return torch.where(replayed.isnan(), obs.remembered()[..., 0], replayed)
