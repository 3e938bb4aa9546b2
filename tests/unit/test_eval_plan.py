"""What `nexus-vllm eval` sends and how it judges replies, against values worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from nexus_vllm.config import Settings
from nexus_vllm.tools.eval_plan import (
    FORCED,
    FULL,
    Job,
    Judged,
    Method,
    blind_share,
    body,
    budget_blocks,
    judge,
    judge_stream,
    misled,
    stages,
)
from nexus_vllm.tools.eval_samples import Asking, Question, Sample, Stream

NEXUS, RANDOM = Method("nexus", "uniform"), Method("random", "uniform")


def question(answer: tuple[int, ...] = (7, 8), items: tuple[str, ...] = ()) -> Question:
    return Question("fact", "\n\nQ", " A B", items, 0.2, 0.3, (4, 5, 6), answer)


def sample(count: int = 1, tokens: int = 2048) -> Sample:
    return Sample("noise", tuple(range(100, 100 + tokens)), (question(),) * count)


def job(setting: str = "in-window", blocks: int | None = 12, **more: Any) -> Job:
    given = {"sample": 0, "question": 0, "method": NEXUS, "budget": "20%", "seed": 3}
    return Job(**given | {"setting": setting, "blocks": blocks} | more)


WHOLE = job("-", None, method=FULL, budget="full", seed=0)


def test_budgets_are_whole_blocks_of_the_haystack() -> None:
    found = [budget_blocks(b, 2048, Settings()) for b in ("50%", "20%", "10%", "512", "1k")]
    assert found == [32, 12, 6, 16, 32]


@pytest.mark.parametrize("budget", ["4%", "100%", "95", "4k"])
def test_a_budget_that_cannot_be_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match=rf"{budget} of 2048 tokens is \d+ blocks .*: use 3 to 63"):
        budget_blocks(budget, 2048, Settings())


def test_the_full_budget_need_not_be_named() -> None:
    with pytest.raises(ValueError, match="always measured"):
        budget_blocks("full", 2048, Settings())


BUDGETS = {"50%": 32, "10%": 6}


def test_a_server_is_started_for_each_budget_and_cuts_at_the_haystacks_end() -> None:
    plan = stages([sample(), sample(2)], [NEXUS, RANDOM], BUDGETS, ("in-window", "later"), (0, 1))
    assert [stage.chunk for stage in plan] == [1024, 1856]
    once = 3 * 2 * 2  # questions, methods, seeds
    assert [len(stage.jobs) for stage in plan] == [3 + 2 * once + once, once]
    asked = [{(j.setting, j.budget) for j in stage.jobs} for stage in plan]
    window = {("in-window", "50%"), ("in-window", "10%")}
    assert asked == [{("-", "full"), ("later", "50%")} | window, {("later", "10%")}]
    for stage in plan:
        settings = Settings(chunk=stage.chunk)
        for j in stage.jobs:
            assert blind_share(j, sample(2), settings) == (1 if j.setting == "later" else 0)
    keys = [j.key for stage in plan for j in stage.jobs]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("settings", [("in-window",), ("later",), ("in-window", "later")])
def test_what_is_cut_is_replayed_once_for_each_start(settings: tuple[str, ...]) -> None:
    """By whoever keeps two replays: of the haystack, and of it with the question being asked."""
    about = [
        Sample(
            "noise", (index,) * 2048, tuple(replace(question(), tokens=(q, 5)) for q in range(9))
        )
        for index in range(40)
    ]
    methods = [Method("kvzip", "uniform"), RANDOM, Method("kvzip", "global")]
    replays = []
    for stage in stages(about, methods, BUDGETS, settings, (0, 1)):
        kept: list[tuple[int, ...]] = []
        replayed = []
        for j in stage.jobs:
            if j.method.policy == "kvzip":
                cut = 2048 if j.setting == "later" else None
                prompt = tuple(body(j, about, "m")["prompt"][:cut])
                if prompt not in kept:
                    replayed.append(prompt)
                kept = [*(one for one in kept if one != prompt), prompt][-2:]
        assert len(replayed) == len(set(replayed)) >= 40
        replays += replayed
    starts = len(BUDGETS) if "later" in settings else 0
    assert len(replays) == 40 * starts + (360 if "in-window" in settings else 0)


def test_all_about_a_haystack_comes_in_a_row_and_the_full_cache_first() -> None:
    (stage,) = stages([sample(), sample(2)], [NEXUS], BUDGETS, ("in-window",), (0,))
    assert stage.chunk is None
    assert [j.sample for j in stage.jobs] == [0] * 3 + [1] * 6
    whole = [index for index, j in enumerate(stage.jobs) if j.method == FULL]
    assert whole == [0, 3, 4]


def test_a_server_of_somebody_else_is_not_started_again() -> None:
    (stage,) = stages([sample()], [NEXUS], BUDGETS, ("later",), (0,), own=False)
    assert (stage.chunk, len(stage.jobs)) == (None, 3)


def test_the_limit_counts_questions_from_the_first_haystack_on() -> None:
    (stage,) = stages([sample(2), sample(2)], [NEXUS], BUDGETS, ("in-window",), (0,), limit=3)
    assert {(j.sample, j.question) for j in stage.jobs} == {(0, 0), (0, 1), (1, 0)}


def test_the_last_cut_before_the_question_follows_from_the_chunk() -> None:
    # 12 blocks and a chunk of 16: cut at 28, 44 and 60 of 64 blocks.
    assert blind_share(job("later"), sample(), Settings(chunk=512)) == 60 / 64
    assert blind_share(job("later"), sample(), Settings(chunk=4096)) == 0
    varied = Settings(chunk=4096, variants={"often": {"chunk": 512}})
    often = replace(job("later"), method=Method("often", "uniform"))
    assert blind_share(often, sample(), varied) == 60 / 64
    assert blind_share(job(), sample(), Settings(chunk=512)) == 0


def test_a_request_says_everything_that_decides_it() -> None:
    asked = body(job(), [sample()], "m")
    # The last token of the question is said, so that the answer comes after the cut.
    assert asked["prompt"] == [*range(100, 2148), 4, 5]
    assert (asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (3, 0, True)
    assert asked["vllm_xargs"] == {
        "kv_policy": "nexus",
        "kv_budget": "384",
        "kv_allocator": "uniform",
        "kv_seed": "3",
        "kv_prefill": "oneshot",
        FORCED: [6, 7, 8],
    }
    assert body(job("later"), [sample()], "m")["vllm_xargs"]["kv_prefill"] == "streaming"
    assert body(WHOLE, [sample()], "m")["vllm_xargs"] == {"kv_policy": "none", FORCED: [6, 7, 8]}


def test_a_list_is_answered_freely() -> None:
    listed = replace(sample(), questions=(question(tuple(range(10)), ("a", "b")),))
    asked = body(job(), [listed], "m")
    assert FORCED not in asked["vllm_xargs"]
    assert asked["prompt"] == [*range(100, 2148), 4, 5, 6]
    assert asked["max_tokens"] == 24


def choice(*steps: tuple[int, dict[int, float]]) -> dict[str, Any]:
    """A reply's choice after the lead: what was said, and log-probabilities by token."""
    steps = ((6, {1: -0.1, 6: -5.0}), *steps)
    return {
        "text": "",
        "logprobs": {
            "tokens": [f"token_id:{said}" for said, _ in steps],
            "token_logprobs": [told[said] for said, told in steps],
            "top_logprobs": [{f"token_id:{t}": p for t, p in told.items()} for _, told in steps],
        },
    }


def test_a_forced_answer_is_right_where_each_token_is_the_likeliest() -> None:
    right = choice((7, {7: -0.1, 1: -3.0}), (8, {8: -0.5, 1: -1.0}))
    assert judge(question(), right) == Judged(1.0, 2, 2, pytest.approx(-0.6))
    half = choice((7, {7: -2.0, 1: -0.2}), (8, {8: -0.5, 1: -1.0}))
    assert judge(question(), half) == Judged(0.0, 1, 2, pytest.approx(-2.5))


def test_an_answer_that_was_not_forced_ends_at_the_first_wrong_token() -> None:
    said = choice((7, {7: -0.1, 1: -3.0}), (1, {1: -0.2, 8: -1.5}))
    assert judge(question(), said) == Judged(0.0, 1, 2, pytest.approx(-1.6), whole=False)
    unlisted = choice((1, {1: -0.2, 2: -4.0}), (8, {8: 0.0}))
    assert judge(question(), unlisted) == Judged(0.0, 0, 2, -4.0, whole=False)
    right = choice((7, {7: -0.1}), (8, {8: -0.5}))
    assert judge(question(), right).whole
    right["logprobs"]["tokens"][0] = "token_id:1"  # not the lead: nothing can be told
    assert judge(question(), right) == Judged(0.0, 0, 2, None, whole=False)


def test_a_list_is_scored_by_the_items_in_the_reply() -> None:
    listed = question(items=("ABCDE", "FGHIJ", "KLMNO", "PQRST"))
    assert judge(listed, {"text": " PQRST and ABCDE, XXXXX"}) == Judged(0.5)


def test_a_reply_that_is_too_short_is_no_reply() -> None:
    with pytest.raises(ValueError, match="a reply of 2 tokens, not 3"):
        judge(question(), choice((7, {7: -0.1})))


STREAM = Stream((20, 4, 5, 6, 7, 8, 21, 22), ((0, 1), (6, 8)), (Asking(0, 4, 500, 0),))


def streaming() -> Sample:
    """A stream that says a token of text, asks the question, and two tokens of text."""
    return replace(sample(3, 512), stream=STREAM)


def test_a_stream_is_one_request_and_the_limit_counts_streams() -> None:
    many = [streaming()] * 3
    (stage,) = stages(many, [NEXUS, RANDOM], {"128": 4}, ("decode",), (0,), limit=2)
    assert stage.chunk is None
    assert [(j.sample, j.question) for j in stage.jobs] == [(0, 0)] * 3 + [(1, 0)] * 3
    assert [j.setting for j in stage.jobs[:3]] == ["-", "decode", "decode"]


def test_a_stream_is_said_whole_after_its_haystack() -> None:
    asked = body(job("decode", 4), [streaming()], "m")
    assert asked["prompt"] == list(range(100, 612))
    assert asked["vllm_xargs"][FORCED] == list(STREAM.tokens)
    assert asked["vllm_xargs"]["kv_prefill"] == "oneshot"
    assert (asked["max_tokens"], asked["logprobs"]) == (8, 1)


def test_a_budget_of_a_stream_is_of_all_of_it_and_must_be_exceeded() -> None:
    assert budget_blocks("20%", 3072, Settings(), decodes=True) == 19
    assert budget_blocks("3008", 3072, Settings(interval=32), decodes=True) == 94
    with pytest.raises(ValueError, match=r"use 3 to 93 blocks \(96 to 2976 tokens\)"):
        budget_blocks("3008", 3072, Settings(interval=64), decodes=True)


def spoken(*likeliest: int) -> dict[str, Any]:
    """A reply that says the stream; these tokens were the likeliest."""
    steps = [{s: -1.0, top: -0.5} for s, top in zip(STREAM.tokens, likeliest, strict=True)]
    names = [{f"token_id:{t}": p for t, p in step.items()} for step in steps]
    told = [step[said] for step, said in zip(steps, STREAM.tokens, strict=True)]
    tokens = [f"token_id:{said}" for said in STREAM.tokens]
    return {"logprobs": {"tokens": tokens, "token_logprobs": told, "top_logprobs": names}}


def test_a_stream_is_judged_question_by_question_and_passage_by_passage() -> None:
    judged = judge_stream(streaming(), STREAM, spoken(20, 0, 0, 0, 7, 3, 21, 2))
    (asked,) = judged["asked"]
    assert asked == {
        **{"question": 0, "step": 4, "since": 500, "uses": 0, "task": "fact"},
        **{"score": 0.0, "right": 1, "tokens": 2, "logprob": -1.5, "whole": True},
    }
    assert judged["passages"] == [
        {"step": 0, "logprob": -0.5, "likeliest": [20]},
        {"step": 6, "logprob": -1.5, "likeliest": [21, 2]},
    ]
    right = judge_stream(streaming(), STREAM, spoken(20, 0, 0, 0, 7, 8, 21, 22))
    assert right["asked"][0]["score"] == 1


def test_a_reply_that_is_not_the_stream_is_refused() -> None:
    reply = spoken(*STREAM.tokens)
    reply["logprobs"]["tokens"][3] = "token_id:0"
    with pytest.raises(ValueError, match=r"does not say the 8 tokens .* --logits-processors"):
        judge_stream(streaming(), STREAM, reply)


def record(**changed: Any) -> dict[str, Any]:
    told = {"policy": "nexus", "allocator": "uniform", "budget_tokens": 384, "evicted_blocks": 52}
    return told | changed


def test_a_server_that_does_something_else_is_found_out() -> None:
    assert misled(job(), record()) is None
    whole = record(policy="none", budget_tokens=None, evicted_blocks=0)
    assert misled(WHOLE, whole) is None
    assert misled(job(method=Method("nexus", "auto")), record(allocator="lu")) is None
    for changed, told in (
        ({"policy": "random"}, "asked for policy nexus, served with random"),
        ({"budget_tokens": 512}, "asked for 384 tokens, served with 512"),
        ({"evicted_blocks": 0}, "0 blocks evicted with a budget of 384"),
        ({"allocator": "lu"}, "asked for uniform, served with lu"),
    ):
        assert told in (misled(job(), record(**changed)) or "")
    assert "evicted" in (misled(WHOLE, whole | {"evicted_blocks": 3}) or "")
    assert misled(job(), {}) is not None


def test_the_logits_processor_forces_its_tokens_and_no_more() -> None:
    from vllm import SamplingParams

    from nexus_vllm.tools.forcing import Forcing

    forcing = Forcing(None, torch.device("cpu"), False)
    assert forcing.new_req_logits_processor(SamplingParams()) is None
    assert not forcing.is_argmax_invariant()
    force: Any = forcing.new_req_logits_processor(SamplingParams(extra_args={FORCED: [2, 0]}))
    logits = torch.tensor([0.5, 3.0, -7.0])
    first = force([], logits.clone())
    assert first.tolist() == [-math.inf, -math.inf, -7.0]
    assert force([2], logits.clone()).argmax() == 0
    assert force([2, 0], logits.clone()).tolist() == logits.tolist()


def test_vllm_tells_log_probabilities_as_they_were_before_forcing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    from nexus_vllm.tools.forcing import Forcing

    forcing, said = Forcing(None, torch.device("cpu"), False), [2]
    params = SamplingParams(extra_args={FORCED: [2, 0]})
    forcing.update_state(BatchUpdate(1, removed=(), added=[(0, params, [1], said)], moved=()))
    none = torch.empty(0)
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=1,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[said],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([forcing]),
    )
    told: list[torch.Tensor] = []
    monkeypatch.setattr(Sampler, "gather_logprobs", lambda self, raw, *_, **__: told.append(raw))
    logits = torch.tensor([[0.5, 3.0, -7.0]])
    sampled = Sampler()(logits.clone(), metadata).sampled_token_ids
    assert sampled.tolist() == [[0]]
    torch.testing.assert_close(told[0], logits.log_softmax(-1))
