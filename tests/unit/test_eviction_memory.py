"""A GPU keeps room for what an eviction holds at once."""

import pytest
import torch

from nexus_vllm.engine import worker
from nexus_vllm.engine.evictor import EVICTION_BYTES, MAX_MAPS


@pytest.mark.parametrize(("device", "less"), [("cpu", 0), ("cuda:0", EVICTION_BYTES)])
def test_room_is_left_on_a_gpu(device: str, less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = worker.EvictionWorker.__base__
    monkeypatch.setattr(base, "determine_available_memory", lambda self: 1 << 30)
    one = worker.EvictionWorker.__new__(worker.EvictionWorker)
    one.device = torch.device(device)
    assert one.determine_available_memory() == (1 << 30) - less
    assert EVICTION_BYTES >= 2 * 4 * MAX_MAPS
