"""Whole evictions: with kernels the same blocks stay, and the same bytes lie in the same pages."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nexus_vllm import allocators, policies
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.ops import ENVIRONMENT
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Rope

LAYERS, HEADS, GROUP, SIZE, PAGES, BLOCK = 3, 2, 2, 16, 60, 32
TARGETS = (14, 20)
"""Blocks given up after each eviction; the second finds heads that hold different numbers."""


@dataclass
class World:
    """One sequence in a small pool, before and after evictions."""

    cache: Tensor
    layers: list[Layer]
    sequence: Sequence
    origins: list[Tensor]
    moved: list[int]
    by_kernels: bool


def world(policy: str, allocator: str, transposed: bool, settings: Settings) -> World:
    """What two evictions leave; the sequence fills four more pages before each."""
    draw = torch.Generator().manual_seed(3)
    cache = torch.randn(LAYERS, PAGES, HEADS, BLOCK, 2 * SIZE, generator=draw)
    queries = torch.randn(LAYERS, 40 * BLOCK, GROUP * HEADS, SIZE, generator=draw)
    angles = torch.rand(40 * BLOCK, SIZE // 2, generator=draw)
    replay = torch.rand(LAYERS, HEADS, 28, generator=draw)
    token, dim = torch.arange(BLOCK)[:, None], torch.arange(SIZE)
    keys = token + BLOCK * dim if transposed else 2 * SIZE * token + dim
    values = keys + BLOCK * SIZE if transposed else keys + SIZE
    layers = []
    for row in range(LAYERS):
        ring = LayerWindow(
            1, settings.widest_window, GROUP * HEADS, SIZE, torch.float32, torch.device("cpu")
        )
        layout, rope = UnitLayout.of(keys), Rope(angles.cos(), angles.sin())
        layers.append(
            Layer(row, cache[row], layout, SIZE**-0.5, SIZE, ring, UnitLayout.of(values), rope)
        )
    even, uneven = Evictor(layers, settings), UnevenEvictor(layers, settings)
    sequence = Sequence(0, replay=replay)
    by_kernels = even.memory is not None and uneven.memory is not None
    found = World(cache, layers, sequence, [], [], by_kernels)
    live, released = list(range(1, 25)), 0
    for event, target in enumerate(TARGETS):
        full = 24 + 4 * event
        for row, layer in enumerate(layers):
            newest = torch.arange(full * BLOCK - layer.window.size, full * BLOCK)
            layer.window.ring[newest % layer.window.size] = queries[row, newest]
        stay = live[target - released :]
        eviction = Eviction(
            "r",
            policy,
            allocator,
            5,
            event,
            full * BLOCK,
            released,
            target,
            live,
            stay,
            [],
            28 * 32,
        )
        if allocator == "uniform":
            moved, kept = even.evict(sequence, eviction)
        else:
            dealt = even.policies[policy], allocators.make(allocator)
            moved, kept = uneven.evict(sequence, eviction, *dealt)
        found.origins.append(kept)
        found.moved.append(moved)
        live, released = stay + list(range(30 + 4 * event, 34 + 4 * event)), target
    return found


def check_same(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    allocator: str,
    transposed: bool,
    settings: Settings,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "torch")
    expected = world(policy, allocator, transposed, settings)
    monkeypatch.setenv(ENVIRONMENT, "triton")
    found = world(policy, allocator, transposed, settings)
    assert found.by_kernels
    assert not expected.by_kernels
    assert all(torch.equal(*pair) for pair in zip(found.origins, expected.origins, strict=True))
    assert torch.equal(found.cache, expected.cache)
    assert found.moved == expected.moved
    assert sum(found.moved) > 0
    if expected.sequence.state is not None:
        assert found.sequence.state is not None
        assert torch.allclose(
            found.sequence.state, expected.sequence.state, rtol=1e-4, atol=1e-7, equal_nan=True
        )


@pytest.mark.parametrize(("allocator", "transposed"), [("uniform", False), ("per-head", True)])
@pytest.mark.parametrize("policy", policies.names())
def test_every_policy(
    monkeypatch: pytest.MonkeyPatch, policy: str, allocator: str, transposed: bool
) -> None:
    check_same(monkeypatch, policy, allocator, transposed, Settings(policy=policy))


@pytest.mark.parametrize("allocator", ["ada", "cake", "global"])
def test_allocators_that_read_weights(monkeypatch: pytest.MonkeyPatch, allocator: str) -> None:
    check_same(monkeypatch, "nexus", allocator, False, Settings())


FORMS = {
    "the paper's": {"heads": "mean", "walk_over": "all", "prior": "none"},
    "the largest": {"pool_rows": "max", "pool_heads": "max", "walk_rows": "spread"},
    "carried": {"walk_state": "carried", "prior": "knorm"},
}


@pytest.mark.parametrize("allocator", ["uniform", "per-head"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_nexus(monkeypatch: pytest.MonkeyPatch, form: str, allocator: str) -> None:
    settings = Settings(variants={"form": {"policy": "nexus", **FORMS[form]}})
    check_same(monkeypatch, "form", allocator, False, settings)


@pytest.mark.parametrize("selector", ["topk", "reservoir", "gumbel", "pareto", "systematic"])
def test_selectors(monkeypatch: pytest.MonkeyPatch, selector: str) -> None:
    check_same(monkeypatch, "nexus", "uniform", False, Settings(selector=selector))


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_what_stays_does_not_depend_on_how_much_is_scored_at_once(
    monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "triton")
    whole = world("nexus", allocator, False, Settings())
    for module in ("evictor", "uneven"):
        monkeypatch.setattr(f"nexus_vllm.engine.{module}.MAX_MAPS", 1)
    piecewise = world("nexus", allocator, False, Settings())
    assert all(torch.equal(*pair) for pair in zip(whole.origins, piecewise.origins, strict=True))
