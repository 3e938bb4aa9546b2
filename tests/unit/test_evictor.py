"""Scoring, selecting and filling must survive whatever numbers a model produces."""

from functools import partial
from typing import Any

import pytest
import torch

from nexus_vllm import allocators
from nexus_vllm.allocators import Allocator
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Policy


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_a_worker_that_lost_count_refuses_to_fill(allocator: str) -> None:
    """Serving wrong KV is worse than stopping, whichever way the budget is dealt out."""
    ring = LayerWindow(1, 16, 1, 2, torch.float32, torch.device("cpu"))
    order = torch.arange(32)[:, None] * 4 + torch.arange(2)
    layers = [Layer(0, torch.zeros(20, 1, 32, 4), UnitLayout.of(order), 1.0, 2, ring)]
    eviction = Eviction("r", "random", allocator, 0, 1, 320, 2, 5, [3, 4, 5], [4, 5], [])
    even, uneven = Evictor(layers, Settings()), UnevenEvictor(layers, Settings())
    dealt = (even.policies["random"], allocators.make(allocator))
    evict = even.evict if allocator == "uniform" else partial(_evict, uneven, dealt)
    with pytest.raises(RuntimeError, match="the scheduler counts 2 released blocks, the worker 0"):
        evict(Sequence(0), eviction)


def _evict(
    uneven: UnevenEvictor,
    dealt: tuple[Policy, Allocator],
    sequence: Sequence,
    eviction: Eviction,
) -> None:
    uneven.evict(sequence, eviction, *dealt)


@pytest.mark.parametrize("allocator", ["uniform", "global", "ada", "cake"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", ["key", "query"])
def test_numbers_that_are_not_finite_do_not_end_the_engine(
    wrong: float, where: str, allocator: str
) -> None:
    """An exception in the worker ends the engine for everybody; stock vLLM spoils one text."""
    settings, cpu = Settings(), torch.device("cpu")
    cache = torch.randn(20, 1, 32, 4)
    window = LayerWindow(1, settings.window, 1, 2, torch.float32, cpu)
    window.ring.normal_()
    (cache[3, 0, 5] if where == "key" else window.ring[3]).fill_(wrong)
    order = torch.arange(32)[:, None] * 4 + torch.arange(2)
    layers = [Layer(0, cache, UnitLayout.of(order), 1.0, 2, window)]
    eviction = Eviction(
        request_id="r",
        policy="nexus",
        allocator=allocator,
        seed=0,
        event=0,
        computed=320,
        released=0,
        target=5,
        pages=list(range(1, 11)),
        kept_pages=list(range(6, 11)),
        tail_pages=[],
    )
    evictor = Evictor(layers, settings)
    if allocator == "uniform":
        _, kept = evictor.evict(Sequence(0), eviction)
    else:
        _, kept = UnevenEvictor(layers, settings).evict(
            Sequence(0), eviction, evictor.policies["nexus"], allocators.make(allocator)
        )
    blocks = set(kept.flatten().tolist())
    assert len(blocks) == 5
    assert {0, 9} <= blocks


VARIANTS = {
    "wide": {"window": 32, "sink_blocks": 0, "recency_blocks": 1, "heads": "mean", "lam": 3},
    "chance": {
        "policy": "snapkv",
        "selector": "reservoir",
        "n": 1,
        "parameters": {"snapkv": {"pool": 1}},
    },
    "slow": {"smoothing": 0.9, "decode_selector": "systematic"},
}


@pytest.mark.parametrize("allocator", ["uniform", "per-head"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_evicted_as_by_an_engine_with_its_settings(name: str, allocator: str) -> None:
    both = Settings(variants=VARIANTS)
    alone = both.of(name)
    numbers = torch.Generator().manual_seed(3)
    cache = torch.randn(2, 60, 2, 32, 8, generator=numbers)
    queries = torch.randn(2, 400 * 32, 4, 4, generator=numbers)

    def kept(settings: Settings, policy: str) -> list[Any]:
        layers = []
        order = torch.arange(32)[:, None] * 8 + torch.arange(4)
        for row, content in enumerate(cache.clone()):
            window = LayerWindow(
                1, settings.widest_window, 4, 4, torch.float32, torch.device("cpu")
            )
            layers.append(Layer(row, content, UnitLayout.of(order), 1.0, 4, window))
        even, uneven = Evictor(layers, settings), UnevenEvictor(layers, settings)
        sequence, found, live = Sequence(0), [], list(range(1, 41))
        for event, target in enumerate((20, 32)):
            full, stay = 40 + 4 * event, live[target - sequence.released :]
            for row, layer in enumerate(layers):
                newest = torch.arange(full * 32 - layer.window.size, full * 32)
                layer.window.ring[newest % layer.window.size] = queries[row, newest]
            eviction = Eviction(
                "r",
                policy,
                allocator,
                5,
                event,
                full * 32,
                sequence.released,
                target,
                live,
                stay,
                [],
                1280,
            )
            dealt = even.policies[policy], allocators.make(allocator)
            if allocator == "uniform":
                even.evict(sequence, eviction)
                found.append(sequence.origin.tolist())
            else:
                _, origin = uneven.evict(sequence, eviction, *dealt)
                found.append(origin.tolist())
            live = stay + list(range(50, 54))
        return found

    assert kept(both, name) == kept(alone, alone.policy) != kept(both, "nexus")


@pytest.mark.parametrize("allocator", ["uniform", "ada", "cake", "global"])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_stays_does_not_depend_on_how_much_is_scored_at_once(
    allocator: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers and heads are scored in groups as memory allows, and then compared with each other."""
    settings, cpu = Settings(selector="topk"), torch.device("cpu")
    layers, heads, size, pages = 3, 2, 4, 60
    draw = torch.Generator().manual_seed(7)
    numbers = torch.randn(layers, pages, heads, 32, 2 * size, generator=draw)
    window = torch.randn(layers, settings.window, 2 * heads, size, generator=draw)
    token, dim = torch.arange(32)[:, None], torch.arange(size)
    order = token + 32 * dim if transposed else 2 * size * token + dim

    def kept(keys: int, logits: int) -> list[list[int]]:
        monkeypatch.setattr("nexus_vllm.engine.evictor.MAX_KEYS", keys)
        monkeypatch.setattr("nexus_vllm.engine.uneven.MAX_KEYS", keys)
        monkeypatch.setattr("nexus_vllm.policies.base.MAX_LOGITS", logits)
        parts = []
        cache = numbers.clone()
        for row in range(layers):
            ring = LayerWindow(1, settings.window, 2 * heads, size, torch.float32, cpu)
            ring.ring.copy_(window[row] * (row + 1))  # layers that look differently widely
            parts.append(Layer(row, cache[row], UnitLayout.of(order), 1.0, size, ring))
        even, uneven = Evictor(parts, settings), UnevenEvictor(parts, settings)
        sequence, found = Sequence(0), []
        first, live = 0, list(range(1, 41))
        for target in (20, 32):  # the second finds heads that hold different numbers
            stay = live[target - first :]
            eviction = Eviction("r", "nexus", allocator, 0, 0, 1280, first, target, live, stay, [])
            if allocator == "uniform":
                _, blocks = even.evict(sequence, eviction)
            else:
                dealt = even.policies["nexus"], allocators.make(allocator)
                _, blocks = uneven.evict(sequence, eviction, *dealt)
            found += [sorted(row) for row in blocks.flatten(0, -2).tolist()]
            first, live = target, stay
        return found

    assert kept(1, 1) == kept(1 << 12, 1 << 12) == kept(1 << 30, 1 << 30)
