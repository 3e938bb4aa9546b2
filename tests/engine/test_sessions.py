"""Streaming-input sessions: several turns of one sequence, which is evicted in between.

With asynchronous scheduling, where a token may be under way behind the end of a turn.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import harness, tiny
from .conftest import NEXUS
from .harness import Completion, Mode
from .reference import Eviction, Llama
from .sessions import Told, Turn
from .test_architectures import by_head
from .test_uneven import visibility

pytestmark = pytest.mark.engine
TOLERANCE = 1e-3
STOPS = list(range(3, 11))


def turns(seed: int, **directive: str | int) -> list[Turn]:
    """Five, of which the third ends at whatever comes first of some tokens.

    What later ones say about eviction is not read.
    """
    lengths, answers = (150, 70, 200, 1, 90), (60, 40, 80, 45, 20)
    params = [
        {"max_tokens": count, "ignore_eos": True, "logprobs": 4, "extra_args": directive}
        for count in answers
    ]
    params[2] |= {"stop_token_ids": STOPS}
    params[3] |= {"extra_args": {"kv_budget": "full"}}
    params[4] |= {"extra_args": {"kv_budget": "full"}}
    return [Turn(tiny.tokens(length, 10 * seed + i), params[i]) for i, length in enumerate(lengths)]


SESSIONS = {
    "uniform": turns(1, kv_budget=128, kv_seed=1, kv_allocator="uniform"),
    "global": turns(2, kv_budget=160, kv_seed=2, kv_allocator="global"),
    "streamed": turns(3, kv_budget=128, kv_prefill="streaming", kv_policy="random"),
    "full": turns(4, kv_budget="full"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("sessions") / "model")


@pytest.fixture(scope="module", params=["v1", "v2"])
def told(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Told:
    """What the sessions said, all at once on one engine."""
    mode = Mode(request.param, "async")
    folder = tmp_path_factory.mktemp("told")
    options = {"skip_tokenizer_init": True, "max_model_len": 1024, "num_gpu_blocks_override": 120}
    given = folder / "given"
    given.write_bytes(pickle.dumps((model, options, NEXUS, SESSIONS)))
    environment = harness.child_environment(mode)
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # so that the worker may be asked
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker in the engine's process
    code = f"from {__package__}.sessions import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, given, folder / "told"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told: Told = pickle.loads((folder / "told").read_bytes())
    assert told.scheduler.endswith(".AsyncEvictionScheduler")
    assert (".v1.worker.cpu." in told.runner) == (mode.runner == "v2")
    return told


@pytest.mark.parametrize("name", SESSIONS)
def test_every_turn_is_answered_by_masked_attention(told: Told, model: Path, name: str) -> None:
    llama, answers = Llama.load(model), told.answers[name]
    assert len(answers) == len(SESSIONS[name])
    # What a turn said last was never computed: it is no part of what comes after.
    ids: list[int] = []
    rows: list[int] = []
    ends: list[int] = []
    for turn, answer in zip(SESSIONS[name], answers, strict=True):
        ids += turn.prompt
        rows += range(len(ids) - 1, len(ids) + len(answer.tokens) - 1)
        ids += answer.tokens[:-1]
        ends.append(len(ids))
    trace = [Eviction(**e | {"kept": torch.tensor(e["kept"])}) for e in told.traces.get(name, [])]
    visible = None
    if name == "full":
        assert not trace
    else:
        check_evictions(trace, ends)
        visible = visibility(len(ids), by_head(trace), llama.num_heads // llama.num_kv_heads)
    expected = llama.logits(ids, visible)[rows].log_softmax(-1)
    check_answers(answers, expected)
    if visible is not None:  # the comparison can tell what was forgotten from what was not
        full = llama.logits(ids)[rows].log_softmax(-1)
        difference = (full - expected)[60:].abs().amax(-1)
        assert difference.median() > 100 * TOLERANCE


def check_evictions(trace: list[Eviction], ends: list[int]) -> None:
    """Some at the ends of prompts, some within answers, in each turn but those too short."""
    at = [event.num_computed for event in trace]
    assert at == sorted(set(at))
    for start, end in ((0, ends[0]), (ends[1], ends[2]), (ends[3], ends[4])):
        assert [position for position in at if start < position < end], (at, ends)


def check_answers(answers: list[Completion], expected: torch.Tensor) -> None:
    for number, answer in enumerate(answers):
        stopped = number == 2
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert answer.tokens[-1] in STOPS or not stopped
        assert answer.logprobs is not None
        here, expected = expected[: len(answer.tokens)], expected[len(answer.tokens) :]
        for token, row, logprobs in zip(answer.tokens, answer.logprobs, here, strict=True):
            assert token == int(logprobs.argmax())
            told = torch.tensor(list(row.values()))
            assert set(row) == set(logprobs.topk(4).indices.tolist())
            torch.testing.assert_close(told, logprobs[list(row)], atol=TOLERANCE, rtol=0)


def test_a_session_that_ends_gives_its_pages_back(told: Told) -> None:
    assert told.held == [True] * len(SESSIONS)
    assert told.freed
