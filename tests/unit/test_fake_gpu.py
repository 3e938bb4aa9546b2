"""Evictions on a GPU that is not there: nothing mixes devices, and nothing waits for it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)
from triton.runtime.jit import JITFunction

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.ops import ENVIRONMENT
from nexus_vllm.engine.replay_scores import ReplayScores
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction, Piece
from nexus_vllm.policies import Rope

from .fake_gpu import GPU, CopiedToHost, fake_gpu

NOTICED = (
    FakeTensorDeviceMismatchError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    CopiedToHost,
)

LAYERS, HEADS, SIZE, BLOCK = 3, 2, 64, 32
TOKEN = torch.arange(BLOCK)[:, None] * 2 * SIZE
KEYS = UnitLayout.of(TOKEN + torch.arange(SIZE))
VALUES = UnitLayout.of(TOKEN + SIZE + torch.arange(SIZE))


@pytest.fixture
def gpu() -> Iterator[None]:
    with fake_gpu():
        yield


def layers(settings: Settings) -> list[Layer]:
    cache = torch.empty(LAYERS, 80, HEADS, BLOCK, 2 * SIZE, device=GPU, dtype=torch.bfloat16)
    rope = Rope(*(torch.empty(4096, SIZE // 2, device=GPU) for _ in range(2)))
    made = []
    for row in range(LAYERS):
        window = LayerWindow(4, settings.widest_window, 4, SIZE, cache.dtype, GPU)
        made.append(Layer(row, cache[row], KEYS, 0.1, SIZE, window, VALUES, rope))
    return made


def evictions(policy: str, allocator: str) -> Iterator[Eviction]:
    live, released = list(range(1, 25)), 0
    for event, target in enumerate((14, 20)):
        full = 24 + 4 * event
        stay = live[target - released :]
        yield Eviction(
            "r", policy, allocator, 5, event, full * BLOCK, released, target, live, stay, [], 700
        )
        live, released = stay + list(range(30 + 4 * event, 34 + 4 * event)), target


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + torch.ones(3),
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.empty(3).copy_(x),
        lambda x: x.tolist(),
    ],
)
def test_what_would_be_wrong_is_noticed(wrong: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        (
            FakeTensorDeviceMismatchError,
            DataDependentOutputException,
            DynamicOutputShapeException,
            CopiedToHost,
        )
    ):
        wrong(torch.empty(3, device=GPU))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("policy", policies.names())
def test_evicting(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """All of it but the kernels, whose launches do nothing."""
    monkeypatch.setenv(ENVIRONMENT, "triton")
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    settings = Settings(policy=policy)
    evictor = Evictor(layers(settings), settings)
    sequence = Sequence(0, replay=torch.empty(LAYERS, HEADS, 22, device=GPU))
    for eviction in evictions(policy, "uniform"):
        moved, kept = evictor.evict(sequence, eviction)
        assert isinstance(moved, Tensor)
        assert kept.device == GPU
        assert kept.shape == (LAYERS, len(eviction.kept_pages))
        if sequence.state is not None:
            assert sequence.state.device == GPU


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("policy", policies.names())
def test_choosing_with_references(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, "torch")
    settings = Settings(policy=policy)
    evictor = Evictor(layers(settings), settings)
    sequence = Sequence(0, replay=torch.empty(LAYERS, HEADS, 22, device=GPU))
    for eviction in evictions(policy, "uniform"):
        blocks = sequence.live_blocks(LAYERS, eviction.full, GPU)
        kept, state = evictor._choose(sequence, eviction, blocks)
        assert kept.device == GPU
        count = len(eviction.kept_pages)
        sequence.origin, sequence.released = blocks[:, :count], eviction.target
        sequence.seen = eviction.computed
        if state is not None:
            assert state.device == GPU
            sequence.state = state[:, :count]


@pytest.mark.usefixtures("gpu")
def test_reading_a_replay() -> None:
    made = layers(Settings())
    runner: Any = SimpleNamespace(batch_request_ids=lambda batch: ["a"])
    replays = ReplayScores(runner, made, BLOCK)
    replays.start(Piece("a", "r", 100, 120, 150))
    batch: Any = SimpleNamespace(
        seq_lens_cpu_upper_bound=np.array([140]),
        query_start_loc_cpu=np.array([0, 140]),
        block_table_tensor=torch.empty(1, 10, dtype=torch.int32, device=GPU),
    )
    readings = replays.readings(batch)
    assert [reading.rows for reading in readings] == [slice(120, 140)]
    query = torch.empty(140, 4, SIZE, device=GPU, dtype=torch.bfloat16)
    for row in range(LAYERS):
        replays.read(row, query, readings)
    assert replays.scores["r"].device == GPU
