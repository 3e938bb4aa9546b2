"""The query ring holds the newest W queries of every sequence, however its tokens were batched."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nexus_vllm.engine.window import LayerWindow, recording

CPU = torch.device("cpu")


@given(
    window=st.integers(1, 8),
    steps=st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=3), min_size=1, max_size=12),
)
def test_the_ring_holds_the_newest_queries_of_each_sequence(
    window: int, steps: list[list[int]]
) -> None:
    """Three requests, the second one not evictable; each step computes some tokens of each."""
    slots = np.array([1, -1, 0])
    ring = LayerWindow(2, window, 1, 1, torch.float32, CPU)
    lengths = np.zeros(3, dtype=np.int64)
    for step in steps:
        starts = np.concatenate([[0], np.cumsum(step)])
        query = torch.cat(
            [torch.arange(n) + lengths[r] + 1000 * r for r, n in enumerate(step)]
        ).float()
        lengths = lengths + np.array(step)
        what = recording(starts, lengths, slots, window, CPU)
        if what is not None:
            ring.record(query.view(-1, 1, 1), what)
    for row in (0, 2):
        newest = torch.arange(max(0, lengths[row] - window), lengths[row])
        held = ring.queries(int(slots[row]), newest).flatten()
        assert held.tolist() == (newest + 1000 * row).float().tolist()


def test_nothing_is_recorded_for_a_batch_without_evictable_sequences() -> None:
    assert recording(np.array([0, 3, 4]), np.array([3, 9]), np.array([-1, -1]), 4, CPU) is None
