"""A GPU keeps room for what an eviction holds at once."""

from types import SimpleNamespace

import pytest
import torch

from nexus_vllm.engine import worker
from nexus_vllm.engine.evictor import EVICTION_BYTES, MAX_MAPS

# Keys and values of one layer: 2 x 8 heads x 128 numbers of 2 bytes, 1,000 tokens of them.
LESS = EVICTION_BYTES + 1000 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(("device", "less"), [("cpu", 0), ("cuda:0", LESS)])
def test_room_is_left_on_a_gpu(device: str, less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = worker.EvictionWorker.__base__
    monkeypatch.setattr(base, "determine_available_memory", lambda self: 1 << 30)
    one = worker.EvictionWorker.__new__(worker.EvictionWorker)
    one.device = torch.device(device)
    one.model_config = SimpleNamespace(dtype=torch.bfloat16, max_model_len=1000)
    layer = SimpleNamespace(num_kv_heads=8, head_size=128)
    monkeypatch.setattr(one, "_attention_layers", lambda: {"0": layer}, raising=False)
    assert one.determine_available_memory() == (1 << 30) - less
    assert EVICTION_BYTES >= 2 * 4 * MAX_MAPS
