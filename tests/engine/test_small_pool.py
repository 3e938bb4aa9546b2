"""A pool far smaller than `max_model_len`, on real engines."""

from __future__ import annotations

import pytest

from .harness import MODES, Engine, EngineError, Engines, Mode, Request
from .texts import prose

pytestmark = pytest.mark.engine
NEXUS = {
    "budget": "20%",
    "budget_floor": 128,
    "allocator": "uniform",
    "chunk": 128,
    "check_integrity": True,
}
POOL = 20


@pytest.fixture(scope="module", params=[MODES[0], MODES[-1]], ids=str)
def which(request: pytest.FixtureRequest) -> Mode:
    return request.param


def start(engines: Engines, mode: Mode, pages: int = POOL, **knobs: object) -> Engine:
    return engines(
        mode,
        nexus=NEXUS | knobs,
        num_gpu_blocks_override=pages + 1,
        max_model_len=2048,
        max_num_batched_tokens=512,
    )


def test_a_prompt_thrice_the_pool_is_answered_as_with_an_ample_one(
    which: Mode, engines: Engines
) -> None:
    small = start(engines, which)
    prompt = prose(small, 1920)
    with pytest.raises(EngineError, match="1920 tokens needs all of its KV, the pool holds 640"):
        small.generate([Request(prompt, {"extra_args": {"kv_budget": "full"}})])
    streaming = {"max_tokens": 40, "extra_args": {"kv_prefill": "streaming"}}
    (auto, *_), (ample,) = (
        small.generate([Request(prompt, {"max_tokens": 40}), Request(prose(small, 300), {})]),
        start(engines, which, 200).generate([Request(prompt, streaming)]),
    )
    assert auto.tokens == ample.tokens
    assert max(auto.held_blocks) <= POOL
    assert auto.kv_transfer_params is not None
    told = auto.kv_transfer_params["kv_eviction"]
    assert told["prefill"] == "streaming"
    assert told["final_blocks"] <= 1920 // 5 // 32 + 2


def test_under_pressure_a_prompt_longer_than_the_pool_is_answered(
    which: Mode, engines: Engines
) -> None:
    small = start(engines, which, trigger="pressure")
    requests = [Request(prose(small, length), {"max_tokens": 20}) for length in (900, 250)]
    results = small.generate(requests)
    for result in results:
        assert len(result.tokens) == 20
        assert max(result.held_blocks) <= POOL
    assert sum(result.preemptions for result in results) == 0
