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
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.ops import ENVIRONMENT, Number
from nexus_vllm.engine.replay_scores import ReplayScores
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction, Piece
from nexus_vllm.policies import Rope

from .fake_gpu import GPU, CopiedFromHost, CopiedToHost, fake_gpu

NOTICED = (
    FakeTensorDeviceMismatchError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    CopiedToHost,
    CopiedFromHost,
)

LAYERS, HEADS, SIZE, BLOCK = 3, 2, 64, 32
TOKEN = torch.arange(BLOCK)[:, None] * 2 * SIZE
KEYS = UnitLayout.of(TOKEN + torch.arange(SIZE))
VALUES = UnitLayout.of(TOKEN + SIZE + torch.arange(SIZE))


@pytest.fixture
def gpu() -> Iterator[None]:
    with fake_gpu():
        yield


def gathers(policy: str) -> bool:
    served = policies.served(policy, Settings())
    return served.gathers and served.reads_keys


def layers(settings: Settings, count: int = LAYERS) -> list[Layer]:
    cache = torch.empty(count, 80, HEADS, BLOCK, 2 * SIZE, device=GPU, dtype=torch.bfloat16)
    rope = Rope(*(torch.empty(4096, SIZE // 2, device=GPU) for _ in range(2)))
    size = settings.widest_window
    windows = LayerWindow.of_layers(count, 4, size, 4, SIZE, cache.dtype, GPU)
    made = []
    for row, window in enumerate(windows):
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


def test_the_rest_of_the_process_sees_no_device() -> None:
    assert not torch.accelerator.is_available()
    with torch.random.fork_rng():
        torch.manual_seed(0)


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
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.ones(3).to(x.device),
        lambda x: x.copy_(torch.ones(3)),
    ],
)
def test_what_would_be_wrong_is_noticed(wrong: Callable[[Tensor], Any]) -> None:
    with pytest.raises(NOTICED):
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
        assert isinstance(moved, Number)
        assert kept.device == GPU
        assert kept.shape == (LAYERS, len(eviction.kept_pages))
        if sequence.state is not None:
            assert sequence.state.device == GPU


class Launches(TorchDispatchMode):
    """Counts what the GPU is told to do: kernels, and operations that are not only views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def launch(self) -> None:
        self.count += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("policy", [name for name in policies.names() if not gathers(name)])
def test_more_layers_are_no_more_launches(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, "triton")
    settings, counts = Settings(policy=policy), []
    for count in (2, 5):
        launches = Launches()
        monkeypatch.setattr(JITFunction, "run", lambda *_, n=launches, **__: n.launch())
        evictor, sequence = Evictor(layers(settings, count), settings), Sequence(0)
        with launches:
            for eviction in evictions(policy, "uniform"):
                evictor.evict(sequence, eviction)
        counts.append(launches.count)
    assert counts[0] == counts[1] > 0


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
