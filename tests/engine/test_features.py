"""Everything at once: vLLM's features side by side in a pool too small for all, with eviction.

Whatever a request asks for, its reply is the one it gets alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from . import probes, tiny
from .conftest import NEXUS
from .harness import Completion, Engine, Engines, Mode, Request, Result, State
from .reference import Llama
from .test_architectures import by_head
from .test_uneven import visibility

CONTEXT = 512
EOS = 2
TOLERANCE = 1e-3
COLOURS = ["crimson", "turquoise", "ultramarine", "vermilion"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colours": {
            "type": "array",
            "items": {"enum": COLOURS},
            "minItems": 6,
            "maxItems": 6,
        },
        "dry": {"type": "boolean"},
    },
    "required": ["colours", "dry"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny_llama(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    return tiny.save(folder, vocab_size=49152, tokenizer_of=model_path)


@pytest.fixture
def tight(mode: Mode, engines: Engines, tiny_llama: Path) -> Engine:
    """36 pages of 32 tokens, for requests that would hold 10 to 16 each without eviction."""
    return engines(
        mode,
        nexus=NEXUS,
        model=tiny_llama,
        num_gpu_blocks_override=37,
        max_model_len=CONTEXT,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )


def ask(prompt: list[int], budget: int | str = 128, logits: bool = False, **params: Any) -> Request:
    """With `kv_...` among the parameters for the directive.

    Not "auto", which would stream a prompt whenever the others leave too few pages for it.
    """
    directive = {key: params.pop(key) for key in list(params) if key.startswith("kv_")}
    directive = {"kv_budget": budget, "kv_prefill": "oneshot", "kv_seed": 5, **directive}
    return Request(prompt, {"max_tokens": 44, **params, "extra_args": directive}, logits=logits)


def prompt_of(length: int, seed: int) -> list[int]:
    """100 tokens that all prompts share, then their own."""
    return tiny.tokens(100, 0, 49152) + tiny.tokens(length - 100, seed, 49152)


def requests_of(stop: str) -> dict[str, Request]:
    sampled: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 11}
    grammar: dict[str, Any] = {
        "structured_outputs": {"json": json.dumps(SCHEMA)},
        "ignore_eos": False,
        "detokenize": True,
        "max_tokens": 120,
    }
    # End-of-text is the likeliest token, allowed from the 41st on.
    eager: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "min_tokens": 40}
    return {
        "sampled": ask(prompt_of(230, 1), **sampled),
        "grammar": ask(prompt_of(240, 2), kv_allocator="global", **grammar),
        "stopped": ask(prompt_of(250, 3), stop=[stop], detokenize=True),
        "logprobs": ask(prompt_of(220, 4), kv_allocator="ada", logprobs=3, logits=True),
        "min-tokens": ask(prompt_of(210, 5), 160, **eager),
        "to-the-end": ask(prompt_of(470, 6), 192, max_tokens=None),
        "to-the-end-uneven": ask(prompt_of(440, 7), kv_allocator="global", max_tokens=None),
        "full": ask(prompt_of(150, 8), "full"),
        "streamed": ask(prompt_of(300, 9), kv_prefill="streaming", kv_policy="random"),
        "recent": ask(prompt_of(260, 10), kv_policy="streaming-llm"),
    }


ABORTED = {
    "queued": ask(prompt_of(200, 20)),
    "mid-prefill": ask(prompt_of(500, 21), kv_prefill="streaming"),
    "amid-eviction": ask(prompt_of(230, 22), max_tokens=200),
    "amid-eviction-uneven": ask(prompt_of(230, 23), max_tokens=200, kv_allocator="global"),
    "mid-decode": ask(prompt_of(200, 24), max_tokens=200),
    "parent": ask(prompt_of(200, 25), n=3, temperature=1.0, max_tokens=200),
}


def due(name: str, state: State) -> bool:
    """Is it time to abort this request, by what the scheduler holds?"""
    held = [r for n, r in state.requests.items() if n.split("/")[0] == name]
    if name == "queued":
        return held[0].status == "WAITING" and held[0].num_computed_tokens == 0
    if name == "mid-prefill":
        return 200 <= held[0].num_computed_tokens < 450
    # After the prompt's eviction and another one.
    return any(r.num_computed_tokens > 270 for r in held)


def run_with_aborts(engine: Engine, requests: Mapping[str, Request]) -> dict[str, Result]:
    """The results of all, by name; those in ABORTED are aborted at their moments."""
    waiting = {"queued", "mid-prefill", "mid-decode", "parent"}
    # The sampled ones first, which are then not preempted: async scheduling may drop a token of
    # a preempted one, and vLLM does not give its generator the numbers back.
    order = ["sampled", "amid-eviction", "mid-prefill", "parent", "grammar", "stopped"]
    order += [name for name in [*requests, *ABORTED] if name not in order]
    ids = {name: engine.add({**requests, **ABORTED}[name]) for name in order}
    names = {each: name for name, each in ids.items()}
    amid = [ids[name] for name in ABORTED if name.startswith("amid-eviction")]
    engine.do(probes.abort_amid_eviction, amid)
    state = engine.step()
    while state.requests or state.batches_in_flight:
        state.requests = {
            "/".join([names[key.split("/")[0]], *key.split("/")[1:]]): value
            for key, value in state.requests.items()
        }
        for name in sorted(waiting):
            if due(name, state):
                engine.abort(ids[name])
                waiting.discard(name)
        state = engine.step()
    assert not waiting, "aborted before they were done"
    state = engine.run()
    assert state.free_blocks == state.pool_blocks
    assert state.ref_counts == {}
    return dict(zip(ids, engine.results(*ids.values()), strict=True))


def assert_same(engine: Engine, together: Result, alone: Result) -> None:
    assert len(together.completions) == len(alone.completions)
    for i, (one, other) in enumerate(zip(together.completions, alone.completions, strict=True)):
        assert one.tokens == other.tokens
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.stop_reason == other.stop_reason
        if other.logprobs is not None:
            torch.testing.assert_close(sampled(one), sampled(other), atol=TOLERANCE, rtol=0)
        suffix = f"/{i}" if len(alone.completions) > 1 else ""
        kept = {
            event.num_computed: event.kept.sort(-1).values
            for event in engine.do(probes.trace, alone.id + suffix)
        }
        events = engine.do(probes.trace, together.id + suffix)
        assert {event.num_computed for event in events} >= kept.keys()
        for event in events:
            # A preempted one evicts twice at some lengths, and the same both times.
            assert torch.equal(event.kept.sort(-1).values, kept[event.num_computed])


def sampled(completion: Completion) -> Tensor:
    """The log-probabilities of the tokens that were sampled."""
    assert completion.logprobs is not None
    pairs = zip(completion.tokens, completion.logprobs, strict=True)
    return torch.tensor([row[token] for token, row in pairs])


def stop_within(text: str) -> str:
    """Three characters of the text's second half that are nowhere before."""
    places = range(len(text) // 2, len(text) - 3)
    found = (text[i : i + 3] for i in places if text.find(text[i : i + 3]) == i)
    return next(part for part in found if part.isascii() and part.isprintable())


def test_every_reply_is_the_one_given_alone(tight: Engine) -> None:
    stopped = ask(prompt_of(250, 3), detokenize=True)
    (unstopped,) = tight.generate([stopped])
    requests = requests_of(stop_within(unstopped.completions[0].text))
    tight.reset_prefix_cache()
    results = run_with_aborts(tight, requests)

    for name in ABORTED:
        for completion in results[name].completions:
            assert completion.finish_reason in (None, "abort"), name
    for name, request in requests.items():
        tight.reset_prefix_cache()
        (alone,) = tight.generate([request])
        assert_same(tight, results[name], alone)
    check_what_was_asked_for(requests, results)
    # The pool was too small: some waited, some lost their pages and began again.
    assert sum(result.preemptions for result in results.values()) > 0

    # One of n is the single request with its seed.
    tight.reset_prefix_cache()
    for i, completion in enumerate(results["sampled"].completions[:2]):
        params = {**requests["sampled"].params, "n": 1, "seed": 11 + i}
        (single,) = tight.generate([Request(requests["sampled"].prompt, params)])
        assert single.tokens == completion.tokens


def check_what_was_asked_for(
    requests: Mapping[str, Request], results: Mapping[str, Result]
) -> None:
    assert len({tuple(c.tokens) for c in results["sampled"].completions}) == 4
    said = json.loads(results["grammar"].completions[0].text)
    assert set(said) == {"colours", "dry"}
    assert len(said["colours"]) == 6
    assert set(said["colours"]) <= set(COLOURS)

    (stopped,) = results["stopped"].completions
    (stop,) = requests["stopped"].params["stop"]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert 10 < len(stopped.tokens) < 44

    logits = results["logprobs"].logits
    assert logits is not None
    (told,) = results["logprobs"].completions
    assert told.logprobs is not None
    for row, expected in zip(told.logprobs, logits.log_softmax(-1), strict=True):
        assert len(row) == 3  # greedy: the sampled token is the first of them
        top = expected.topk(3)
        assert sorted(row) == sorted(top.indices.tolist())
        torch.testing.assert_close(
            torch.tensor(sorted(row.values(), reverse=True)), top.values, atol=TOLERANCE, rtol=0
        )

    assert results["min-tokens"].finish_reason == "stop"
    assert len(results["min-tokens"].tokens) == 41
    for name in ("to-the-end", "to-the-end-uneven"):
        assert results[name].finish_reason == "length"
        assert len(results[name].tokens) == CONTEXT - len(requests[name].prompt)


def interruptible() -> list[Request]:
    """Few enough to run without preemption; the last one's prompt takes several steps."""
    return [
        ask(prompt_of(230, 30), max_tokens=90),
        ask(prompt_of(240, 31), max_tokens=90, kv_allocator="global"),
        ask(prompt_of(120, 32), "full"),
        ask(prompt_of(430, 33), kv_prefill="streaming", kv_policy="random"),
    ]


def start_and_evict(engine: Engine) -> list[str]:
    """All four under way: evicted but the full one, the last still within its prompt."""
    *first, last = interruptible()
    ids = [engine.add(request) for request in first]
    step_until_evicted(engine, ids[:2])
    ids.append(engine.add(last))
    step_until_evicted(engine, ids[3:])
    assert engine.state().requests[ids[3]].num_computed_tokens < len(last.prompt)
    return ids


def step_until_evicted(engine: Engine, ids: list[str], times: int = 1) -> None:
    while min(len(engine.do(probes.trace, each)) for each in ids) < times:
        assert engine.step().requests.keys() >= set(ids)


def interrupt(engine: Engine, ids: list[str], how: str) -> None:
    if how == "reset":
        engine.do(probes.reset_running)
    else:
        engine.do(probes.sleep, "keep")
        engine.step(2)  # what was in flight comes back, nothing new is begun
        asleep = engine.results(*ids)
        engine.step(3)
        assert engine.results(*ids) == asleep
        engine.do(probes.wake_up)
    state = engine.state()
    assert state.hashed_blocks == 0
    assert all(not request.block_ids for request in state.requests.values())


@pytest.mark.parametrize("how", ["reset", "sleep"])
def test_requests_that_lose_all_their_pages_go_on_as_if_nothing_had_been(
    tight: Engine, how: str
) -> None:
    expected = tight.generate(interruptible())
    assert sum(result.preemptions for result in expected) == 0
    tight.reset_prefix_cache()
    ids = start_and_evict(tight)
    interrupt(tight, ids, how)
    step_until_evicted(tight, ids[:2], 3)
    interrupt(tight, ids, how)
    state = tight.run()
    assert state.free_blocks == state.pool_blocks
    for result, undisturbed in zip(tight.results(*ids), expected, strict=True):
        assert result.preemptions >= 1
        assert_same(tight, result, undisturbed)


def test_a_seed_does_not_notice_that_its_prompt_was_computed_in_chunks(tight: Engine) -> None:
    """vLLM samples a token after each chunk and drops it."""
    for budget in ("full", 128):
        seeded = ask(prompt_of(400, 30), budget, temperature=1.0, seed=3)
        tight.reset_prefix_cache()
        (alone,) = tight.generate([seeded])
        tight.reset_prefix_cache()
        # What the first one leaves of a step is less than the second one's prompt.
        _, together = tight.generate([ask(prompt_of(300, 31), "full"), seeded])
        assert together.completions[0].tokens == alone.completions[0].tokens


def test_sleep_that_aborts_returns_all_pages(tight: Engine) -> None:
    expected = tight.generate(interruptible())
    tight.reset_prefix_cache()
    ids = start_and_evict(tight)
    tight.do(probes.sleep, "abort")
    state = tight.step(2)
    assert (state.free_blocks, state.requests) == (state.pool_blocks, {})
    assert state.hashed_blocks == 0
    tight.abort(*ids)  # vLLM's front end learns nothing of it in one process
    tight.do(probes.wake_up)
    again = tight.generate(interruptible())
    for result, before in zip(again, expected, strict=True):
        assert_same(tight, result, before)


def test_logits_equal_masked_attention_after_a_prefix_hit_and_evictions(
    tight: Engine, tiny_llama: Path
) -> None:
    """I7 where a sequence begins with pages of another one, which itself was evicted."""
    first = prompt_of(300, 40)
    tight.generate([ask(first)])
    allocators = ("uniform", "global")
    requests = [
        ask([*first[:260], *prompt_of(160, seed)[100:]], logits=True, max_tokens=80, **directive)
        for seed, directive in enumerate({"kv_allocator": each} for each in allocators)
    ]
    llama = Llama.load(tiny_llama)
    group = llama.num_heads // llama.num_kv_heads
    for request, result in zip(requests, tight.generate(requests), strict=True):
        assert result.cached_tokens == 256
        trace = tight.do(probes.trace, result.id)
        assert len(trace) >= 3
        ids = [*request.prompt, *result.tokens]
        rows = slice(len(request.prompt) - 1, len(ids) - 1)
        expected = llama.logits(ids, visibility(len(ids), by_head(trace), group), rows)
        assert result.logits is not None
        torch.testing.assert_close(result.logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_turns_of_a_chat_are_answered_as_if_nothing_had_been_cached(
    tight: Engine, allocator: str
) -> None:
    """Each prompt holds the one before, its answer, most of it evicted by then, and new text."""
    prompt, turns, results = prompt_of(230, 50), [], []
    for seed in range(3):
        turns.append(ask(prompt, kv_allocator=allocator))
        results += tight.generate(turns[-1:])
        prompt = [*prompt, *results[-1].tokens, *tiny.tokens(50, 51 + seed, 49152)]
    # The pages of the prompt before were published, those of its answer never.
    assert [result.cached_tokens for result in results] == [0, 224, 320]
    for turn, result in zip(turns, results, strict=True):
        assert len(tight.do(probes.trace, result.id)) >= 2
        tight.reset_prefix_cache()
        (fresh,) = tight.generate([turn])
        assert fresh.cached_tokens == 0
        assert_same(tight, result, fresh)


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_a_sequence_preempted_after_evictions_goes_on_as_if_nothing_had_been(
    tight: Engine, allocator: str
) -> None:
    request = ask(prompt_of(230, 60), max_tokens=240, kv_allocator=allocator)
    (undisturbed,) = tight.generate([request])
    tight.reset_prefix_cache()
    # At their ends these two hold 32 pages of the 36.
    prompts = [tiny.tokens(300, seed, 49152) for seed in (61, 62)]
    others = [tight.add(ask(each, "full", max_tokens=None)) for each in prompts]
    while min(tight.step().requests[each].num_computed_tokens for each in others) < 300:
        pass
    name = tight.add(request)
    while tight.step().requests[name].status != "PREEMPTED":
        evictions = len(tight.do(probes.trace, name))
    assert evictions >= 3
    tight.run()
    (result,) = tight.results(name)
    assert result.preemptions >= 1
    assert_same(tight, result, undisturbed)
