"""Speculative decoding by n-grams: drafts come and go, evictions and replies stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import probes
from .conftest import NEXUS
from .harness import Engine, Engines, Mode, Request
from .texts import prose

MODE = Mode("v1", "sync")  # vLLM has n-gram drafts nowhere else
DRAFTS = 3
TOKENS = 80
TOLERANCE = 5e-4
DIRECTIVES: list[dict[str, Any]] = [
    {"kv_budget": 128},
    {"kv_budget": 160, "kv_policy": "streaming-llm"},
    {"kv_budget": 128, "kv_allocator": "global"},
    {"kv_budget": 128, "kv_prefill": "streaming"},
    {"kv_budget": "full"},
]

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def drafting(engines: Engines) -> Engine:
    speculation = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}
    return engines(MODE, nexus=NEXUS, speculative_config=speculation)


def requests(engine: Engine) -> list[Request]:
    """Prompts whose end repeats their beginning: the model goes on repeating, up to a point."""
    asked = []
    for index, directive in enumerate(DIRECTIVES):
        text = prose(engine, 130, start=120 * index)
        params = {"max_tokens": TOKENS, "extra_args": {"kv_seed": index, **directive}}
        asked.append(Request([*text, *text[: 90 + 7 * index]], params, logits=True))
    return asked


def test_drafts_change_neither_replies_nor_kept_sets(drafting: Engine, engines: Engines) -> None:
    plain = engines(MODE, nexus=NEXUS)
    expected = plain.generate(requests(plain))
    kept = [plain.do(probes.trace, result.id) for result in expected]
    for at_once in (True, False):
        drafting.reset_prefix_cache()
        asked = requests(drafting)
        batches = [asked] if at_once else [[request] for request in asked]
        results = [result for batch in batches for result in drafting.generate(batch)]
        for result, wanted, events in zip(results, expected, kept, strict=True):
            assert result.tokens == wanted.tokens
            assert result.logits is not None
            assert wanted.logits is not None
            torch.testing.assert_close(result.logits, wanted.logits, atol=TOLERANCE, rtol=0)
            # Some drafts were accepted, or there would be a step for each token.
            assert len(result.held_blocks) < TOKENS
            again = drafting.do(probes.trace, result.id)
            assert [event.num_computed for event in again] == [e.num_computed for e in events]
            for event, same in zip(again, events, strict=True):
                assert torch.equal(event.kept.sort().values, same.kept.sort().values)
    assert sum(map(bool, kept)) == len(DIRECTIVES) - 1
    state = drafting.run()
    assert state.free_blocks == state.pool_blocks
