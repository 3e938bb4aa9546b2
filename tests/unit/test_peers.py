"""scripts/peers.py and scripts/peers_kvpress.py, without kvpress and its environment."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nexus_vllm.config import Settings
from nexus_vllm.plan import EvictionPlan
from nexus_vllm.tools.eval_plan import FULL, Job, Judged, Method, body, judge
from nexus_vllm.tools.eval_samples import Question, Sample

from .scripts import script

BUDGETS = {"20%": 12, "10%": 6}


@pytest.fixture(scope="module")
def peers() -> Any:
    return script("peers")


@pytest.fixture(scope="module")
def kvpress() -> Any:
    return script("peers_kvpress")


def question(items: tuple[str, ...] = (), length: int = 21) -> Question:
    tokens = tuple(range(10, 10 + length))
    return Question("fact", "\n\nQ", " A B", items, 0.2, 0.3, tokens, (7, 8))


def sample(*questions: Question) -> Sample:
    return Sample("noise", tuple(range(100, 100 + 2048)), questions or (question(),))


def test_a_press_keeps_exactly_the_tokens_that_were_asked_for(kvpress: Any) -> None:
    for total in (256, 2048, 2068, 4097, 131072):
        for kept in {1, 2, total // 10, total // 3, total - 31, total - 1}:
            assert int(total * (1 - kvpress.ratio(kept, total))) == kept
            assert round(total * (1 - kvpress.ratio(kept, total))) == kept
            pairs = 30 * 3 * total
            dropped = int(pairs * kvpress.ratio(kept, total, drops=True))
            assert dropped == 30 * 3 * (total - kept)


@pytest.mark.parametrize("kept", [0, 64, 65])
def test_a_press_that_would_keep_nothing_or_all_is_refused(kvpress: Any, kept: int) -> None:
    with pytest.raises(ValueError, match=f"{kept} of 64 tokens"):
        kvpress.ratio(kept, 64)


@pytest.mark.parametrize("length", [1, 12, 21, 32, 33, 40])
@pytest.mark.parametrize("setting", ["in-window", "later"])
@pytest.mark.parametrize("items", [(), ("A", "B")])
def test_as_many_tokens_stay_as_after_a_cut_of_ours(
    peers: Any, length: int, setting: str, items: tuple[str, ...]
) -> None:
    asked = sample(question(items, length))
    job = Job(0, 0, setting, Method("kvpress:snapkv", "uniform"), "10%", 6, 0)
    prompt = len(body(job, [asked], "m")["prompt"])
    chunk = Settings().interval_blocks(6)
    plan = EvictionPlan(prompt, 6, chunk, (2048 - 6 * 32) // 32, 32, setting == "later")
    at = plan.next_eviction(0)
    assert at == (2048 if setting == "later" and prompt > 2048 else prompt)
    assert peers.kept_tokens(job, asked) == at - 32 * plan.target(at)


def test_the_full_cache_keeps_all(peers: Any) -> None:
    assert peers.kept_tokens(Job(0, 0, "-", FULL, "full", None, 0), sample()) is None


def test_no_two_presses_have_the_same_name_in_the_report(kvpress: Any) -> None:
    names = [(press.policy, press.allocator) for press in kvpress.PRESSES.values()]
    assert len(set(names)) == len(names)


def test_each_press_is_asked_each_question_and_only_one_that_draws_with_all_seeds(
    peers: Any,
) -> None:
    chosen = peers.plan(
        [sample(question(), question())],
        ["snapkv", "random", "kvzip"],
        BUDGETS,
        ("in-window", "later"),
        [3, 4],
        None,
    )
    count: dict[str, int] = {}
    for job in chosen.jobs:
        name = chosen.press_of.get(job.method, "full")
        count[name] = count.get(name, 0) + 1
    cells = 2 * len(BUDGETS)  # questions, budgets
    assert count == {"full": 2, "snapkv": cells * 2, "random": cells * 2 * 2, "kvzip": cells}
    assert {job.setting for job in chosen.jobs if job.method.policy == "kvpress:kvzip"} == {"later"}
    assert {job.seed for job in chosen.jobs if job.method.policy == "kvpress:snapkv"} == {3}


@pytest.mark.parametrize("items", [(), ("A", "B")])
def test_kvpress_is_given_the_tokens_that_a_server_is_given(
    peers: Any, items: tuple[str, ...]
) -> None:
    made = [sample(question(items))]
    job = Job(0, 0, "in-window", Method("kvpress:snapkv", "uniform"), "10%", 6, 5)
    told = json.loads(json.dumps(peers.work(Path("m"), made, [job], {job.method: "snapkv"})))
    sent = body(job, made, "m")
    (asked,) = told["samples"][0]["questions"]
    assert told["samples"][0]["tokens"] + asked["asked"] == sent["prompt"]
    if items:
        assert asked["reply_tokens"] == sent["max_tokens"]
    else:
        forced = [asked["lead"], *asked["answer_tokens"]]
        assert forced == sent["vllm_xargs"]["force_tokens"]
    (planned,) = told["jobs"]
    assert (planned["press"], planned["line"]["seed"]) == ("snapkv", 5)
    assert planned["kept"] == peers.kept_tokens(job, made[0])


@pytest.mark.parametrize("likeliest", [(7, 8), (7, 3), (2, 8), (2, 3)])
def test_answers_are_judged_as_those_of_a_server(kvpress: Any, likeliest: tuple[int, int]) -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(1))
    for row, token in zip(logits, likeliest, strict=True):
        row[token] = 5.0
    told = torch.log_softmax(logits.double(), dim=-1)
    top = [{f"token_id:{i}": float(v) for i, v in enumerate(row)} for row in told]
    reply = {
        "logprobs": {
            "tokens": ["token_id:30", "token_id:7", "token_id:8"],
            "token_logprobs": [-1.0, float(told[0, 7]), float(told[1, 8])],
            "top_logprobs": [{}, *top],
        }
    }
    wanted = judge(question(), reply)
    found = Judged(**kvpress.judged(logits, [7, 8]))
    assert math.isclose(found.logprob or 0, wanted.logprob or 0, rel_tol=1e-9)
    assert (found.score, found.right, found.tokens) == (wanted.score, wanted.right, wanted.tokens)
    assert (found.whole, wanted.whole) == (True, True)


@pytest.mark.parametrize("text", ["A and B", "B", "none"])
def test_lists_are_judged_as_those_of_a_server(kvpress: Any, text: str) -> None:
    wanted = judge(question(("A", "B")), {"text": text})
    assert Judged(**kvpress.listed(text, ("A", "B"))) == wanted


@pytest.mark.parametrize(
    ("press", "found", "fine"),
    [
        ("snapkv", [[6, 6], [6, 6]], True),
        ("snapkv", [[6, 6], [6, 7]], False),
        ("pyramidkv", [[9, 9], [3, 3]], True),
        ("pyramidkv", [[9, 3], [9, 3]], False),
        ("pyramidkv", [[9, 9], [5, 5]], False),
        ("ada-snapkv", [[9, 3], [2, 10]], True),
        ("ada-snapkv", [[9, 3], [2, 11]], False),
    ],
)
def test_what_a_press_left_is_counted(
    kvpress: Any, press: str, found: list[list[int]], fine: bool
) -> None:
    if fine:
        kvpress.check_kept(kvpress.PRESSES[press], found, 6)
    else:
        with pytest.raises(RuntimeError, match=r"on average; 6 were asked for"):
            kvpress.check_kept(kvpress.PRESSES[press], found, 6)


def line(policy: str, question: int = 0, **more: Any) -> dict[str, Any]:
    full = policy == "none"
    cell = {"setting": "-", "budget": "full"} if full else {"setting": "later", "budget": "20%"}
    worth = {"score": 1.0, "tokens": 2, "logprob": -1.0, "whole": True}
    who = {"policy": policy, "allocator": "-" if full else "uniform", "seed": 0}
    return {"sample": 0, "question": question, **who, **cell, **worth, **more}


def test_lines_of_both_are_merged_with_one_full_cache(peers: Any) -> None:
    ours = [
        line("none"),
        line("none", 1),
        line("nexus"),
        line("nexus", budget="50%"),
        line("nexus", setting="in-window"),
        line("nexus", 1),
    ]
    theirs = [line("none", logprob=-1.0001), line("kvpress:snapkv")]
    found, told = peers.merged(ours, theirs, ["later"], ["20%"])
    assert [(x["policy"], x["question"]) for x in found] == [
        ("none", 0),
        ("nexus", 0),
        ("kvpress:snapkv", 0),
    ]
    assert found[0]["logprob"] == -1.0
    assert told == ("same scores on 1 questions, log-probabilities per answer token within 5.0e-05")


@pytest.mark.parametrize("other", [{"score": 0.0}, {"logprob": -1.01}])
def test_full_caches_that_disagree_are_not_merged(peers: Any, other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the full caches give"):
        peers.merged([line("none")], [line("none", **other)], ["later"], ["20%"])


def test_results_without_a_common_question_are_not_merged(peers: Any) -> None:
    with pytest.raises(ValueError, match="no question"):
        peers.merged([line("none")], [line("none", 1)], ["later"], ["20%"])


def test_results_of_another_suite_are_not_compared(peers: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run\.json"):
        peers._other(tmp_path, {})
    (tmp_path / "run.json").write_text(json.dumps({"suite": "quick a", "model": "m"}))
    (tmp_path / "results.jsonl").write_text(json.dumps(line("none")) + '\n{"cut')
    with pytest.raises(ValueError, match="is of suite quick a, not quick b"):
        peers._other(tmp_path, {"suite": "quick b", "model": "m"})
    before = (tmp_path / "results.jsonl").read_text()
    lines, _ = peers._other(tmp_path, {"suite": "quick a", "model": "m"})
    assert lines == [line("none")]
    assert (tmp_path / "results.jsonl").read_text() == before


@pytest.mark.parametrize("name", ["long-decode", "long-text"])
def test_a_suite_that_decodes_is_refused(peers: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' decodes a text"):
        peers.of_questions(name)
    assert peers.of_questions("quick", prompt_tokens=1024).prompt_tokens == 1024


@pytest.mark.parametrize(
    "bad",
    [["--limit", "-1"], ["--settings", "never"], ["--seeds", "x"], ["--presses", "snapkv,"]],
)
def test_bad_options_are_refused(peers: Any, monkeypatch: pytest.MonkeyPatch, bad: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "MODEL", "--out", "DIR", *bad])
    with pytest.raises(SystemExit):
        peers.main()


def test_what_cannot_be_asked_is_refused_before_an_environment_is_made(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(peers, "environment", lambda: made.append("environment"))
    for given, told in (
        (["MODEL", "--out", "DIR", "--presses", "snapvk"], "no press 'snapvk'"),
        (["MODEL"], "MODEL and --out are needed"),
    ):
        monkeypatch.setattr(sys, "argv", ["peers.py", *given])
        assert peers.main() == 1
        assert told in capsys.readouterr().err
    assert made == []


def test_the_lock_holds_what_kvpress_needs(peers: Any) -> None:
    pins = dict(
        row.split("==") for row in peers.LOCK.read_text().splitlines() if not row.startswith("#")
    )
    assert pins["kvpress"] == "0.5.5"
    assert tuple(map(int, pins["transformers"].split("."))) < (5, 3)
    assert "torch" not in pins
    assert peers._pinned_torch().count(".") == 2
