"""`nexus-vllm profile`: the oracle against a naive loop, replay, resuming, the same file again."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nexus_vllm import lukv, policies
from nexus_vllm.profile import Profile
from nexus_vllm.tools import cli, profile, profile_job, profile_prompts
from nexus_vllm.tools.profile_job import Job, Pair, Partial
from nexus_vllm.tools.profile_measure import Watched, block_weights

LAYERS, HEADS, KV_HEADS, SIZE, BLOCK = 2, 4, 2, 8, 4
GROUP = HEADS // KV_HEADS
TINY = Job(
    context_tokens=40, queries=4, answer_tokens=3, chunk=16, block_size=BLOCK, window=4, recency=1
)


class Words:
    """A toy tokenizer: one token per word, its id from the letters, 0 for the end."""

    eos_token_id = 0

    def __init__(self) -> None:
        self.words: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [1 + sum(word.encode()) % 96 for word in text.split()]
        self.words |= dict(zip(ids, text.split(), strict=True))
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(self.words[token] for token in ids)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=HEADS * SIZE,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def watched() -> Watched:
    return Watched(model(), "some/tiny")


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 97, (count,), generator=generator).tolist()


def eager(ids: Sequence[int]) -> tuple[list[Tensor], Any]:
    """Attention maps [Hq, T, T] and the cache of one plain pass over everything."""
    plain = model()
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        out = plain(torch.tensor([list(ids)]), output_attentions=True, use_cache=True)
    return [layer[0] for layer in out.attentions], out.past_key_values


def run(job: Job, out: Path) -> Profile:
    subject = watched()
    partial = Partial(out, job.key(subject))
    pairs = profile_job.measure(job, subject, Words(), partial, lambda _: None)
    made = profile_job.build(job, subject, pairs)
    made.save(out)
    partial.remove()
    return made


@torch.inference_mode()
def test_oracle_importance_is_the_naive_loops() -> None:
    context, question = tokens(24, 1), tokens(5, 2)
    subject = watched()
    subject.read(context, 4)
    peak, answer = subject.answer(question, 6, {0}, 0.0, 0)
    assert 1 <= len(answer) <= 6
    found = subject.oracle(peak, BLOCK)

    maps, cache = eager([*context, *question, *answer])
    steps = range(len(context) + len(question), len(context) + len(question) + len(answer))
    expected = torch.zeros(LAYERS, KV_HEADS, len(context) // BLOCK)
    for layer in range(LAYERS):
        output = subject.model.model.layers[layer].self_attn.o_proj.weight
        values = cache.layers[layer].values[0]
        norm = torch.zeros(HEADS, len(context))
        for head in range(HEADS):
            part = output[:, head * SIZE : (head + 1) * SIZE]
            for j in range(len(context)):
                norm[head, j] = (part @ values[head // GROUP, j]).norm()
        norm /= norm.sum()
        for kv_head in range(KV_HEADS):
            for j in range(len(context)):
                worth = max(
                    float(maps[layer][head, step, j] * norm[head, j])
                    for step in steps
                    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP)
                )
                expected[layer, kv_head, j // BLOCK] += worth
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@torch.inference_mode()
def test_greedy_answers_are_the_models_own_and_leave_the_context_as_it_was() -> None:
    context, question = tokens(24, 3), tokens(5, 4)
    subject = watched()
    subject.read(context, 4)
    before = subject.keys()
    first = subject.answer(question, 4, {0}, 0.0, 0)[1]
    assert torch.equal(subject.keys(), before)
    assert subject.answer(question, 4, {0}, 0.0, 0)[1] == first

    plain, ids = model(), [*context, *question]
    for step, token in enumerate(first):
        logits = plain(torch.tensor([ids])).logits[0, -1]
        if not step:
            logits[0] = -torch.inf  # the first token never ends the answer
        assert int(logits.argmax()) == token
        ids.append(token)


def test_sampled_answers_follow_the_seed() -> None:
    subject = watched()
    subject.read(tokens(24, 3), 4)
    answers = [
        tuple(subject.answer(tokens(5, 4), 8, {0}, 1.0, seed)[1]) for seed in (1, 1, 2, 3, 4)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) > 1


def test_replay_is_the_largest_attention_to_each_block_in_any_chunk() -> None:
    context, prompt, chunk = tokens(24, 5), tokens(3, 6), 16
    subject = watched()
    subject.read(context, 4)
    found = subject.replay(context, prompt, BLOCK, chunk)
    expected = torch.zeros_like(found)
    for replayed in (context[:16], context[8:]):
        maps, _ = eager([*context, *prompt, *replayed])
        for layer in range(LAYERS):
            seen = maps[layer].unflatten(0, (KV_HEADS, GROUP))[:, :, len(context) :, :24]
            blocks = seen.amax((1, 2)).unflatten(-1, (-1, BLOCK)).amax(-1)
            expected[layer] = torch.maximum(expected[layer], blocks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("score", ["nexus", "streaming-llm", "random"])
def test_scores_are_the_policys_over_the_last_context_queries(score: str) -> None:
    job = dataclasses.replace(TINY, score=score, parameters=None)
    context, subject = tokens(40, 7), watched()
    window = subject.read(context, 4)
    policy = policies.make(score, job.parameters)
    found = block_weights(subject, policy, window, BLOCK, job.forced(10), 0)
    assert found.shape == (LAYERS, KV_HEADS, 10)
    if score == "streaming-llm":
        assert torch.equal(found, torch.arange(1.0, 11).expand_as(found))
    if score == "nexus":  # without the walk and ties: mean attention of the window
        plain = policies.make(score, {"lam": 0.0, "eps_tie": 0.0})
        found = block_weights(subject, plain, window, BLOCK, job.forced(10), 0)
        for layer, seen in enumerate(eager(context)[0]):
            mean = seen[:, -4:].unflatten(-1, (-1, BLOCK)).sum(-1).mean(1)
            torch.testing.assert_close(found[layer], mean.unflatten(0, (KV_HEADS, GROUP)).mean(1))


@pytest.mark.parametrize("oracle", ["future", "replay"])
def test_the_same_arguments_make_the_same_file(oracle: str, tmp_path: Path) -> None:
    job = dataclasses.replace(TINY, oracle=oracle)
    made = run(job, tmp_path / "one")
    run(job, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert made.model == watched().facts
    assert made.model.name == "tiny"
    assert made.origin.source == ("oracle" if oracle == "future" else "replay")
    run(dataclasses.replace(job, seed=1), tmp_path / "other")
    assert (tmp_path / "other").read_bytes() != (tmp_path / "one").read_bytes()


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run(TINY, tmp_path / "whole")
    out, subject = tmp_path / "resumed", watched()
    counted: list[int] = []

    def stop(count: int) -> None:
        counted.append(count)
        if sum(counted) == 3:
            raise KeyboardInterrupt

    key = TINY.key(subject)
    with pytest.raises(KeyboardInterrupt):
        profile_job.measure(TINY, subject, Words(), Partial(out, key), stop)
    assert len(Partial(out, key).pairs) == 3
    assert not Partial(out, dataclasses.replace(TINY, seed=9).key(subject)).pairs
    counted.clear()
    pairs = profile_job.measure(TINY, subject, Words(), Partial(out, key), counted.append)
    assert counted == [3] + [1] * (TINY.total - 3)
    profile_job.build(TINY, subject, pairs).save(out)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_profile_is_the_mean_of_each_pairs_best_shares() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.rand(LAYERS, KV_HEADS, 10, generator=generator) for _ in range(4)]
    pairs = [Pair(0, 0, draw[0], draw[1]), Pair(1, 0, draw[2], draw[3])]
    made = profile_job.build(TINY, watched(), pairs)
    each = [
        lukv.solve(pair.importance, pair.scores, TINY.forced(10), lukv.DENSITIES) for pair in pairs
    ]
    torch.testing.assert_close(made.shares, (each[0] + each[1]) / 2)
    replay = profile_job.build(dataclasses.replace(TINY, oracle="replay"), watched(), pairs[:1])
    expected = lukv.replay_shares(draw[1], TINY.forced(10), lukv.DENSITIES)
    torch.testing.assert_close(replay.shares, expected)


def test_report_of_halves_that_agree_and_of_one_that_cannot_be_split() -> None:
    generator = torch.Generator().manual_seed(0)
    importance = torch.rand(LAYERS, KV_HEADS, 10, generator=generator) ** 6
    pairs = [Pair(context, 0, importance, importance) for context in (0, 1)]
    lines = profile_job.report(TINY, watched(), pairs)
    assert "by context" in lines[0]
    assert len(lines) == 4
    assert "rank correlation 1.000" in lines[3]  # the 20 % of lines[2] are all forced
    assert "other half's shares +0.0%" in lines[3]
    lines = profile_job.report(TINY, watched(), pairs[:1])
    assert "cannot be split" in lines[0]


def test_contexts_hold_their_facts_and_questions_differ() -> None:
    text = profile_prompts.synthetic(0, 0, 6000)
    planted = profile_prompts.facts(0, 0)
    places = [text.index(fact.sentence) / len(text) for fact in planted]
    assert min(places) < 0.3
    assert max(places) > 0.6
    assert text == profile_prompts.synthetic(0, 0, 6000) != profile_prompts.synthetic(0, 1, 6000)
    asked = profile_prompts.questions(text, planted, 30, 0, 0)
    assert len(set(asked)) == 30
    assert sum(fact.cue in asked for fact in planted) >= 8
    assert asked == profile_prompts.questions(text, planted, 30, 0, 0)
    with pytest.raises(ValueError, match="lower --queries"):
        profile_prompts.questions("one two", (), 30, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"oracle": "past"}, "choose future or replay"),
        ({"score": "none"}, "unknown"),
        ({"queries": 0}, "queries is 0"),
        ({"synthetic": 0}, "no context"),
        ({"context_tokens": 8}, "at least 12"),
        ({"parameters": {"typo": 1}}, "typo"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(TINY, **wrong)


@pytest.mark.parametrize(
    "settings", [{"layer_types": ["sliding_attention", "full_attention"]}, {"sliding_window": 64}]
)
def test_models_with_sliding_windows_are_refused(settings: dict[str, Any]) -> None:
    subject = model()
    for name, value in settings.items():
        setattr(subject.config, name, value)
    with pytest.raises(ValueError, match="sliding_attention"):
        Watched(subject, "x")


def test_the_command_measures_given_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rain", "so")
    for name in ("a.txt", "b.txt"):
        text = " ".join(words[(i * i + len(name)) % 11] + str(i % 7) for i in range(200))
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(profile, "_load", lambda _: (watched(), Words()))
    out = tmp_path / "out.json"
    options = "--oracle future --context-tokens 160 --queries 3 --answer-tokens 2"
    options += " --score-parameter lam=0.25"
    files = ["--contexts", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert cli.main(["profile", "some/tiny", "--out", str(out), *options.split(), *files]) == 0
    made = Profile.load(out)
    assert made.parameters["lam"] == 0.25
    assert made.block_size == 32
    assert made.origin.contexts == ("a.txt", "b.txt")
    assert "6 measurements" in (shown := capsys.readouterr().out)
    assert "rank correlation" in shown
    assert not list(tmp_path.glob("*.partial"))


def test_refusals_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert cli.main(["profile", "x", "--plot", str(tmp_path / "x.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert cli.main(["profile", "x", "--score-parameter", "lam"]) == 1
    assert "KEY=VALUE" in capsys.readouterr().err
    assert cli.main(["profile", "x", "--out", str(tmp_path / "no" / "x")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert profile._default_out(
        argparse.Namespace(model="a/b/", score="nexus", oracle="replay")
    ) == Path("b-nexus-replay.json")
