"""The last W queries of every evictable sequence, per layer, written inside the forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """Which query rows of a step go where: `source` in the batch, `target` in the ring."""

    source: Tensor
    target: Tensor


class LayerWindow:
    """One layer's ring buffer: `[slots * window, query heads, head size]`.

    A sequence owns `window` consecutive rows; the query at position p is in row p % window of them.
    """

    def __init__(
        self,
        slots: int,
        window: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size = window
        self.ring = torch.zeros(slots * window, num_heads, head_size, dtype=dtype, device=device)

    def record(self, query: Tensor, recording: Recording) -> None:
        """Store the step's window queries. `query`: [tokens, query heads, head size], rotated."""
        rows = query.view(-1, *self.ring.shape[1:]).index_select(0, recording.source)
        self.ring.index_copy_(0, recording.target, rows)

    def queries(self, slot: int, positions: Tensor) -> Tensor:
        """The queries [len(positions), query heads, head size] at these (recent) positions."""
        return self.ring[slot * self.size + positions % self.size]


def recording(
    starts: np.ndarray, lengths: np.ndarray, slots: np.ndarray, window: int, device: torch.device
) -> Recording | None:
    """Which rows of a batch to record.

    `starts` [requests + 1]: first query row of each request. `lengths` [requests]: tokens of each
    sequence, this step's included. `slots` [requests]: ring slot, or -1. None: nothing to record.
    """
    counts = np.where(slots >= 0, np.minimum(np.diff(starts), window), 0)
    total = int(counts.sum())
    if total == 0:
        return None
    # Rows counted back from each request's last: c-1, ..., 1, 0 for its c newest queries.
    back = np.repeat(counts.cumsum(), counts) - 1 - np.arange(total)
    source = np.repeat(starts[1:], counts) - 1 - back
    position = np.repeat(lengths, counts) - 1 - back
    target = np.repeat(slots, counts) * window + position % window
    return Recording(
        torch.from_numpy(source.astype(np.int64)).to(device),
        torch.from_numpy(target.astype(np.int64)).to(device),
    )
