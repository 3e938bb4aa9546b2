"""Eviction among the rest of vLLM: nothing to do, shared prefixes, mixed batches, preemption."""

from __future__ import annotations

from typing import Any

import torch

from . import probes
from .conftest import NEXUS
from .harness import Engine, Engines, Mode, Request, Result
from .texts import prose

BLOCK = 32


def statistics(result: Result) -> dict[str, Any]:
    assert result.kv_transfer_params is not None
    return dict(result.kv_transfer_params["kv_eviction"])


def test_i1_a_sufficient_budget_changes_no_bit(nexus: Engine, stock: Engine) -> None:
    prompt = prose(stock, 300)
    plain = Request(prompt, {"max_tokens": 40}, logits=True)
    (expected,) = stock.generate([plain])
    ample: list[dict[str, Any]] = [
        {},
        {"kv_budget": "full"},
        {"kv_budget": 352},
        {"kv_policy": "none"},
    ]
    for directive in ample:
        nexus.reset_prefix_cache()
        params = {**plain.params, "extra_args": directive}
        (result,) = nexus.generate([Request(prompt, params, logits=True)])
        assert result.tokens == expected.tokens
        assert result.logits is not None
        assert expected.logits is not None
        assert torch.equal(result.logits, expected.logits)
        assert result.held_blocks == expected.held_blocks
        assert nexus.do(probes.trace, result.id) == []


def test_i1_a_prompt_shorter_than_sink_and_recency_is_left_alone(
    nexus: Engine, stock: Engine
) -> None:
    """Two blocks are always kept, and the smallest budget is three."""
    plain = Request(prose(stock, 20), {"max_tokens": 16}, logits=True)
    (expected,) = stock.generate([plain])
    params = {**plain.params, "extra_args": {"kv_budget": 96}}
    (result,) = nexus.generate([Request(plain.prompt, params, logits=True)])
    assert result.tokens == expected.tokens
    assert result.logits is not None
    assert expected.logits is not None
    assert torch.equal(result.logits, expected.logits)
    assert result.held_blocks == expected.held_blocks
    assert nexus.do(probes.trace, result.id) == []
    assert statistics(result)["budget_tokens"] == 96
    assert statistics(result)["evicted_blocks"] == 0


def shared_prefix_requests(engine: Engine) -> list[Request]:
    """Ten prompts with 200 tokens in common; every second one is evicted."""
    requests = []
    for i in range(10):
        budget = (128, 160, 192)[i % 3] if i % 2 else "full"
        policy = ("nexus", "random", "streaming-llm")[i // 2 % 3]
        directive = {"kv_budget": budget, "kv_policy": policy, "kv_seed": i}
        prompt = prose(engine, 200) + prose(engine, 60 + 7 * i, start=300 + 50 * i)
        params = {"max_tokens": 40, "extra_args": directive}
        requests.append(Request(prompt, params, at_step=i))
    return requests


def test_i8_company_changes_neither_texts_nor_kept_sets(nexus: Engine) -> None:
    requests = shared_prefix_requests(nexus)
    together = nexus.generate(requests)
    assert sum(result.cached_tokens or 0 for result in together) >= 9 * 160
    # Six of the ten are enough: every policy, and full budgets in between.
    for request, result in list(zip(requests, together, strict=True))[:6]:
        (alone,) = nexus.generate([request])
        assert alone.tokens == result.tokens
        kept, kept_alone = (nexus.do(probes.trace, r.id) for r in (result, alone))
        assert bool(kept) == (request.params["extra_args"]["kv_budget"] != "full")
        assert len(kept) == len(kept_alone)
        for event, other in zip(kept, kept_alone, strict=True):
            assert event.num_computed == other.num_computed
            # As sets: which page a block lies in depends on which pages were free or shared.
            assert torch.equal(event.kept.sort().values, other.kept.sort().values)


def test_i6_a_prompt_hits_the_prefix_cache_again_but_what_followed_does_not(
    nexus: Engine,
) -> None:
    prompt = prose(nexus, 320)
    params = {"max_tokens": 70, "extra_args": {"kv_budget": 128, "kv_seed": 1}}
    (first,) = nexus.generate([Request(prompt, params)])
    (again,) = nexus.generate([Request(prompt, params)])
    assert again.tokens == first.tokens
    # Not all of it: the last 16 tokens are computed, their queries are the window.
    assert again.cached_tokens == 288
    (continued,) = nexus.generate([Request([*prompt, *first.tokens], {"max_tokens": 1})])
    assert continued.cached_tokens == 320


def test_i4_pages_return_when_requests_are_aborted_between_evictions(nexus: Engine) -> None:
    requests = [
        Request(r.prompt, {**r.params, "max_tokens": 200}) for r in shared_prefix_requests(nexus)
    ]
    names = [nexus.add(request) for request in requests]
    for name in names:
        nexus.step(9)
        nexus.abort(name)
    state = nexus.run()
    assert state.free_blocks == state.pool_blocks
    assert state.requests == {}


def test_i8_preemption_and_chunked_prefill_change_no_token(
    nexus: Engine, engines: Engines, mode: Mode
) -> None:
    evicted = {"kv_budget": 128, "kv_seed": 1}
    requests = [
        Request(prose(nexus, 150, 90 * i), {"max_tokens": 110, "extra_args": directive})
        for i, directive in enumerate([{"kv_budget": "full"}, evicted])
    ]
    expected = nexus.generate(requests)
    kept = nexus.do(probes.trace, expected[1].id)
    # 12 pages hold both prompts, 5 pages each, but not 9 pages and an evicted sequence's 6.
    tight = engines(
        mode,
        nexus=NEXUS,
        num_gpu_blocks_override=13,
        max_num_batched_tokens=96,
        max_model_len=320,
    )
    results = tight.generate(requests)
    assert results[1].preemptions > 0
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    # Both times round, the first one perhaps cut short.
    again = tight.do(probes.trace, results[1].id)
    assert len(again) >= len(kept)
    for event in again:
        (same,) = [e for e in kept if e.num_computed == event.num_computed]
        assert torch.equal(event.kept.sort().values, same.kept.sort().values)
