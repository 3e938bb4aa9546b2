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
    evictable=st.booleans(),
)
def test_the_ring_holds_the_newest_queries_of_each_sequence(
    window: int, steps: list[list[int]], evictable: bool
) -> None:
    """Three requests, the second one evictable or not; each step computes some tokens of each."""
    slots = np.array([1, 2 if evictable else -1, 0])
    ring = LayerWindow(3, window, 1, 1, torch.float32, CPU)
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
    for row in (0, 1, 2) if evictable else (0, 2):
        newest = torch.arange(max(0, lengths[row] - window), lengths[row])
        held = ring.queries(int(slots[row]), newest).flatten()
        assert held.tolist() == (newest + 1000 * row).float().tolist()


def test_a_step_that_records_every_row_selects_none() -> None:
    """Most decode steps are so, and the selection would cost an operator in each layer."""
    what = recording(np.arange(4), np.array([7, 8, 9]), np.array([1, 0, 2]), 4, CPU)
    assert what is not None
    assert what.source is None
    assert what.target.tolist() == [1 * 4 + 6 % 4, 0 * 4 + 7 % 4, 2 * 4 + 8 % 4]


def test_nothing_is_recorded_for_a_batch_without_evictable_sequences() -> None:
    assert recording(np.array([0, 3, 4]), np.array([3, 9]), np.array([-1, -1]), 4, CPU) is None
