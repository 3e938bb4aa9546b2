"""I7 with uneven head budgets: the oracle with a mask per KV head, three allocators, many cuts.

The pages are those of equal budgets: only what they hold differs (`nexus_vllm.engine.units`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from . import probes
from .harness import Engine, Request
from .reference import Eviction, Llama, causal
from .texts import prose

PROMPT = 295
DECODED = 72
TOLERANCE = 5e-4
BLOCK = 32
ALLOCATORS = ("lu", "global", "ada")


@pytest.fixture(scope="module")
def llama(model_path: Path) -> Llama:
    return Llama.load(model_path)


def visibility(tokens: int, trace: Sequence[Eviction], group: int) -> Callable[[int], Tensor]:
    """Layer -> [query heads, T, T]; `kept` of an event is [layers, KV heads, most], -1 for none."""

    def visible(layer: int) -> Tensor:
        heads = trace[0].kept.shape[1]
        mask = causal(tokens).repeat(heads, 1, 1)
        for event in trace:
            for head, blocks in enumerate(event.kept[layer].tolist()):
                keys = torch.zeros(tokens, dtype=torch.bool)
                keys[event.full_blocks * BLOCK :] = True
                for block in blocks:
                    if block >= 0:
                        keys[block * BLOCK : (block + 1) * BLOCK] = True
                rows = slice(event.num_computed, None)
                mask[head, rows] = causal(tokens)[rows] & keys
        return mask.repeat_interleave(group, dim=0)

    return visible


def ask(engine: Engine, allocator: str, budget: int = 160, prefill: str = "oneshot") -> Request:
    directive = {"kv_budget": budget, "kv_prefill": prefill, "kv_seed": 3}
    return Request(
        prose(engine, PROMPT, start=50),
        {"max_tokens": DECODED, "extra_args": {**directive, "kv_allocator": allocator}},
        logits=True,
    )


def test_logits_equal_masked_attention_and_pages_equal_the_uniform_case(
    nexus: Engine, llama: Llama
) -> None:
    """One batch of uneven sequences, one of them streamed, an even one and a full one."""
    requests = [ask(nexus, allocator) for allocator in ALLOCATORS]
    requests.append(ask(nexus, "global", 128, "streaming"))
    requests.append(ask(nexus, "uniform"))
    full = Request(prose(nexus, 100), {"max_tokens": DECODED}, logits=True)
    *results, uniform, untouched = nexus.generate([*requests, full])
    for request, result in zip(requests, results, strict=False):
        trace = nexus.do(probes.trace, result.id)
        assert len(trace) >= 3
        ids = [*request.prompt, *result.tokens]
        rows = slice(len(request.prompt) - 1, len(ids) - 1)
        group = llama.num_heads // llama.num_kv_heads
        expected = llama.logits(ids, visibility(len(ids), trace, group), rows)
        assert result.logits is not None
        torch.testing.assert_close(result.logits, expected, atol=TOLERANCE, rtol=0)
        budget = request.params["extra_args"]["kv_budget"] // BLOCK
        for event in trace:
            counts = (event.kept >= 0).sum(-1)
            assert int(counts.sum()) == budget * counts.numel(), "B*L*H units, no more, no less"
            assert int(counts.max()) > budget > int(counts.min()), "budgets are uneven"
            for forced in (0, event.full_blocks - 1):
                assert (event.kept == forced).any(-1).all()
    for result in results[: len(ALLOCATORS)]:
        assert result.held_blocks == uniform.held_blocks
        for key in ("evicted_blocks", "final_blocks", "peak_blocks", "eviction_steps"):
            assert result.kv_transfer_params is not None
            assert uniform.kv_transfer_params is not None
            told = result.kv_transfer_params["kv_eviction"]
            assert told[key] == uniform.kv_transfer_params["kv_eviction"][key]
    assert untouched.logits is not None
    ids = [*full.prompt, *untouched.tokens]
    expected = llama.logits(ids, rows=slice(len(full.prompt) - 1, len(ids) - 1))
    torch.testing.assert_close(untouched.logits, expected, atol=TOLERANCE, rtol=0)
