"""I7: what the engine computes after evictions is attention over the kept positions, and no more.

Also I2 and I5, on the way. The same requests run side by side in one batch, in every mode.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from nexus_vllm import policies

from . import probes
from .harness import Engine, Request, Result
from .reference import Llama, visibility
from .texts import prose

PROMPT = 295
DECODED = 72  # with 2 or 3 evictions after the prompt's, at an interval of 32 tokens
TOLERANCE = 5e-4  # measured with V2 and async scheduling: 1e-4 at most
BLOCK = 32


@pytest.fixture(scope="module")
def llama(model_path: Path) -> Llama:
    return Llama.load(model_path)


def ask(engine: Engine, budget: int, policy: str, prefill: str = "oneshot") -> Request:
    directive = {"kv_budget": budget, "kv_policy": policy, "kv_prefill": prefill, "kv_seed": 3}
    return Request(
        prose(engine, PROMPT, start=budget),
        {"max_tokens": DECODED, "extra_args": directive},
        logits=True,
    )


def check_against_reference(engine: Engine, llama: Llama, request: Request, result: Result) -> None:
    """Compare the logits that every generated token was sampled from."""
    assert len(result.tokens) == DECODED
    assert result.logits is not None
    trace = engine.do(probes.trace, result.id)
    assert len(trace) >= 3
    ids = [*request.prompt, *result.tokens]
    rows = slice(len(request.prompt) - 1, len(ids) - 1)
    expected = llama.logits(ids, visibility(len(ids), trace), rows)
    torch.testing.assert_close(result.logits, expected, atol=TOLERANCE, rtol=0)
    budget = request.params["extra_args"]["kv_budget"] // BLOCK
    for event in trace:
        assert event.kept.shape == (llama.num_layers, budget)  # I2, and I5 with visibility()
        for forced in (0, event.full_blocks - 1):
            assert (event.kept == forced).any(1).all()  # I5: the sink and the newest block


def test_logits_equal_masked_full_attention(nexus: Engine, llama: Llama) -> None:
    requests = [
        ask(nexus, budget, policy)
        for budget, policy in zip(itertools.cycle((128, 160, 224)), policies.names(), strict=False)
    ]
    for request, result in zip(requests, nexus.generate(requests), strict=True):
        check_against_reference(nexus, llama, request, result)
        # I2: after the prompt's eviction never more than the budget, one interval and the tail.
        budget = request.params["extra_args"]["kv_budget"] // BLOCK
        assert max(result.held_blocks[2:-1]) <= budget + 2


def test_logits_equal_masked_attention_after_a_streamed_prompt(nexus: Engine, llama: Llama) -> None:
    request = ask(nexus, 128, "nexus", prefill="streaming")
    (result,) = nexus.generate([request])
    check_against_reference(nexus, llama, request, result)
    # The comparison can tell: were nothing forgotten, the logits would be far from these.
    ids = [*request.prompt, *result.tokens]
    full = llama.logits(ids, rows=slice(len(request.prompt) - 1, len(ids) - 1))
    assert result.logits is not None
    assert (full - result.logits).abs().amax(-1).median() > 400 * TOLERANCE


def test_logits_equal_masked_attention_where_walks_go_on(nexus: Engine, llama: Llama) -> None:
    """What each block brings along decides from the second eviction on; the same oracle holds."""
    requests = [ask(nexus, 128, policy) for policy in ("nexus", "nexus-carried")]
    traces = []
    for request, result in zip(requests, nexus.generate(requests), strict=True):
        check_against_reference(nexus, llama, request, result)
        traces.append(nexus.do(probes.trace, result.id))
    first, *later = zip(*traces, strict=True)
    assert torch.equal(first[0].kept, first[1].kept)
    assert not all(torch.equal(fresh.kept, carried.kept) for fresh, carried in later)
