"""What engine tests stand on: four ways to run stock vLLM that agree, and loud failures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest

from . import harness
from .harness import Engine, EngineError, Engines, Mode, Request

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small",
    "The pass key is 36443. Remember it. 36443 is the pass key. What is the pass key? The pass key",
)
TOKENS = 24


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list[list[int]]:
    """Greedy tokens of each prompt alone, on the plainest engine there is."""
    engine = engines(Mode("v1", "sync"))
    return [
        engine.generate([Request(engine.encode(text), {"max_tokens": TOKENS})])[0].tokens
        for text in PROMPTS
    ]


def test_every_mode_is_what_it_says(stock: Engine, mode: Mode) -> None:
    facts = stock.facts
    assert facts.runner.startswith(
        "vllm.v1.worker.cpu.model_runner."
        if mode.runner == "v2"
        else "vllm.v1.worker.cpu_model_runner."
    )
    is_async = mode.scheduling == "async"
    assert facts.scheduler.endswith(".AsyncScheduler" if is_async else ".Scheduler")
    assert facts.step == ("step_with_batch_queue" if is_async else "step")
    stock.generate([Request(stock.encode(PROMPTS[0]))])
    assert stock.most_batches_in_flight() == (2 if is_async else 1)


def test_stock_vllm_gives_the_same_greedy_tokens_in_every_mode(
    stock: Engine, expected: list[list[int]]
) -> None:
    requests = [
        Request(stock.encode(text), {"max_tokens": TOKENS}, at_step=3 * i, logits=True)
        for i, text in enumerate(PROMPTS)
    ]
    results = stock.generate(requests)
    assert [result.tokens for result in results] == expected
    for result in results:
        assert result.finish_reason == "length"
        assert result.logits is not None
        assert result.logits.argmax(-1).tolist() == result.tokens


@pytest.mark.engine
@pytest.mark.v2
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_logits_stay_with_their_tokens_through_chunks_and_preemption(
    engines: Engines, runner: Literal["v1", "v2"]
) -> None:
    mode = Mode(runner, "async")
    ample = engines(mode)
    text = ample.encode(PROMPTS[2] * 4)
    requests = [
        Request(text[i : i + 60], {"max_tokens": 40}, logits=True)  # 2 pages, 4 at the end
        for i in (0, 7, 14)
    ]
    tight = engines(mode, num_gpu_blocks_override=9, max_num_batched_tokens=48, max_model_len=128)
    results = tight.generate(requests)
    assert sum(result.preemptions for result in results) > 0
    assert [r.tokens for r in results] == [r.tokens for r in ample.generate(requests)]
    for result in results:
        assert result.logits is not None
        assert result.logits.argmax(-1).tolist() == result.tokens


def test_steps_can_be_driven_and_a_request_aborted(stock: Engine) -> None:
    idle = stock.state()
    assert idle.free_blocks == idle.pool_blocks
    prompt = stock.encode(PROMPTS[1] * 8)
    first = stock.add(Request(prompt, {"max_tokens": 50}))
    stock.step(2)
    second = stock.add(Request(prompt[:-1], {"max_tokens": 5}))
    state = stock.step(2)
    assert set(state.requests) == {first, second}
    shared = set(state.requests[first].block_ids) & set(state.requests[second].block_ids)
    assert {state.ref_counts[page] for page in shared} == {2}  # a prefix hit
    assert len(shared) == (len(prompt) - 2) // 32
    stock.abort(first)
    state = stock.run()
    assert state.requests == {}
    assert state.batches_in_flight == 0
    assert state.free_blocks == state.pool_blocks
    assert state.hashed_blocks > 0
    aborted, finished = stock.results(first, second)
    assert len(aborted.tokens) < 50
    assert aborted.held_blocks
    assert (len(finished.tokens), finished.finish_reason) == (5, "length")
    assert finished.cached_tokens == 32 * len(shared)


def lose_a_page(host: Any) -> None:
    host.pool.get_new_blocks(1)


def leave(host: Any) -> None:
    print("last words", flush=True)
    os._exit(7)


@pytest.mark.engine
def test_failures_are_loud(model_path: Path) -> None:
    with Engine(Mode("v1", "sync"), model_path) as engine:
        engine.do(lose_a_page)
        engine.add(Request([1, 2, 3]))
        with pytest.raises(EngineError, match="lost: "):
            engine.step()
        with pytest.raises(EngineError, match=r"(?s)exit code 7.*last words"):
            engine.do(leave)
        with pytest.raises(EngineError, match="engine is gone"):
            engine.state()


@pytest.mark.engine
def test_an_engine_that_cannot_start_says_why(model_path: Path) -> None:
    with pytest.raises(EngineError, match="no_such_option"):
        Engine(Mode("v1", "sync"), model_path, no_such_option=1)


@pytest.mark.engine
def test_a_call_that_takes_too_long_is_ended(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "START_TIMEOUT", 0.5)
    with pytest.raises(EngineError, match="`start` took more than 0 s"):
        Engine(Mode("v1", "sync"), model_path)
