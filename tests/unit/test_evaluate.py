"""`nexus-vllm eval` against a server that answers in memory: resuming, refusals, faults."""

import argparse
import io
import itertools
import json
import os
import re
import signal
import threading
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from nexus_vllm import policies
from nexus_vllm.config import POLICIES, Settings
from nexus_vllm.policies import ReplayPolicy
from nexus_vllm.replay import ROOM
from nexus_vllm.tools import cli, evaluate
from nexus_vllm.tools.bench_servers import Server
from nexus_vllm.tools.eval_plan import FORCED, Method, Stage
from nexus_vllm.tools.eval_samples import Question, Sample

SUITE = {
    "name": "mine",
    "about": "small",
    "prompt_tokens": 512,
    "budgets": ["50%", "25%"],
    "groups": [
        {
            "haystacks": [{"source": "noise", "count": 2}],
            "tasks": [{"task": "passkey"}, {"task": "variables", "hops": 1}],
        }
    ],
}
PER_STAGE = 4 * 2 * 2  # questions, settings, methods


class Answering(Server):
    """Right where nothing is evicted and for nexus, wrong for the others; one haystack is cached.

    Subclasses go wrong.
    """

    forced = True

    def __init__(self) -> None:
        self.name, self.url, self.command = "server", "http://x", "vllm serve MODEL"
        self.asked: list[dict[str, Any]] = []
        self.cached: tuple[int, ...] = ()
        self.queries = self.hits = 0
        self.lock = threading.Lock()
        self.settings = Settings(chunk=256).to_json()

    def get(self, path: str) -> str:
        if path == "/metrics":
            return (
                f'vllm:prefix_cache_queries_total{{engine="0"}} {self.queries}\n'
                f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}\n'
            )
        if path == "/kv_eviction":
            return json.dumps({"settings": self.settings, "versions": {"vllm": "0.32"}})
        assert path == "/v1/models"
        return json.dumps({"data": [{"id": "small", "root": "folder/small"}]})

    def post(self, path: str, body: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        if path == "/tokenize":
            begin = [1] if body["add_special_tokens"] else []
            return {"tokens": begin + encode(body["prompt"])}
        with self.lock:
            self.asked.append(body)
            self.look_up(tuple(body["prompt"][:512]), len(body["prompt"]))
        return self.reply(body, body["vllm_xargs"])

    def look_up(self, haystack: tuple[int, ...], tokens: int) -> None:
        self.queries += tokens
        self.hits += 480 if self.cached == haystack else 0
        self.cached = haystack

    def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
        right = xargs["kv_policy"] in ("none", "nexus")
        ids = xargs.get(FORCED, [3] * body["max_tokens"])
        steps = [{f"token_id:{i}": -0.1 if right else -4.0, "token_id:0": -2.0} for i in ids]
        said = [i if right or self.forced or not n else 0 for n, i in enumerate(ids)]
        told = [step[f"token_id:{i}"] for i, step in zip(said, steps, strict=True)]
        names = [f"token_id:{i}" for i in said]
        logprobs = {"tokens": names, "token_logprobs": told, "top_logprobs": steps}
        choice = {"text": " nothing", "logprobs": logprobs}
        return {"choices": [choice], "kv_transfer_params": {"kv_eviction": self.record(xargs)}}

    def record(self, xargs: dict[str, Any]) -> dict[str, Any]:
        budget = xargs.get("kv_budget")
        return {
            "policy": xargs["kv_policy"],
            "allocator": xargs.get("kv_allocator", "uniform"),
            "budget_tokens": budget and int(budget),
            "evicted_blocks": 8 if budget else 0,
        }


def encode(text: str) -> list[int]:
    """A token for each character: short texts do."""
    return [2 + ord(character) % 90 for character in text]


class Ours:
    """As evaluate.Own, without a model."""

    served, cpu, name, settings = "m", True, "small", Settings()
    first = (1,)
    encode = staticmethod(encode)

    def __init__(self, server: Server) -> None:
        self.server, self.told = server, {"model": "small 1", "versions": "vllm 0.32"}
        self.chunks: list[int | None] = []

    def identity(self) -> dict[str, str]:
        return self.told

    def settings_of(self, stage: Any) -> Settings:
        return Settings(chunk=stage.chunk) if stage.chunk else self.settings

    @contextmanager
    def serving(self, stage: Any, made: Any) -> Iterator[Server]:
        self.chunks.append(stage.chunk)
        yield self.server


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs the command with a server of ours: exit code, output, and that server's host."""

    def run(server: Server, *more: str, told: Any = SUITE, **identity: str) -> tuple[int, Ours]:
        host = Ours(server)
        host.told = host.told | identity
        monkeypatch.setattr(evaluate, "Own", lambda args: host)
        suite = tmp_path / "mine.yaml"
        suite.write_text(yaml.safe_dump(told))
        given = ["--suite", str(suite), "--out", str(tmp_path / "out")]
        argv = ["eval", "MODEL", *given, "--policies", "nexus,random", *more]
        if "--allocators" not in more:
            argv += ["--allocators", "uniform"]
        return cli.main(argv), host

    monkeypatch.setattr(evaluate, "Own", Ours)
    return run


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "out" / "results.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_asks_everything_once_and_writes_a_report(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Answering()
    code, host = command(server)
    assert code == 0
    assert host.chunks == [256, 384]
    found = lines(tmp_path)
    assert len(found) == len(server.asked) == 4 + 2 * PER_STAGE
    assert all(line["blind"] == (line["setting"] == "later") for line in found)
    by_policy = {p: [x for x in found if x["policy"] == p] for p in ("none", "nexus", "random")}
    keys = [x for x in by_policy["nexus"] if x["task"] == "passkey"]
    assert {x["score"] for x in keys} == {1.0}
    assert keys[0]["logprob"] == pytest.approx(-0.1 * keys[0]["tokens"])
    assert {x["score"] for x in by_policy["random"]} == {0.0}
    assert {x["score"] for x in found if x["task"] == "variables"} == {0.0}
    report = (tmp_path / "out" / "eval.md").read_text()
    assert f"results: {len(found)} of {len(found)}; the last run took" in report
    assert "computed more than once" not in report
    assert "- server: vllm serve MODEL" in report
    told = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert [p["due"] for p in told["passes"]] == [480 * 13] * 2 + [480 * 3] * 2
    assert "| nexus, uniform |" in capsys.readouterr().out


def test_all_requests_about_a_haystack_come_in_a_row(command: Any) -> None:
    server = Answering()
    command(server, "--concurrency", "3")
    prompts = [tuple(body["prompt"][:512]) for body in server.asked]
    changes = sum(a != b for a, b in itertools.pairwise(prompts))
    assert changes == 3  # two haystacks, two starts
    assert server.hits == 480 * (len(prompts) - 4)


def test_a_stopped_run_goes_on_where_it_stopped(command: Any, tmp_path: Path) -> None:
    class Stopping(Answering):
        def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
            if len(self.asked) == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().reply(body, xargs)

    assert command(Stopping())[0] == 130
    assert 9 <= len(lines(tmp_path)) < 4 + 2 * PER_STAGE  # what was under way may still end
    assert "results: " in (tmp_path / "out" / "eval.md").read_text()
    # The last line may have been cut off.
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(path.read_text()[:-20])
    kept = len(path.read_text().splitlines()) - 1
    server = Answering()
    assert command(server)[0] == 0
    assert len(server.asked) == 4 + 2 * PER_STAGE - kept
    assert len({tuple(x[f] for f in FIELDS) for x in lines(tmp_path)}) == 4 + 2 * PER_STAGE
    again = Answering()
    code, host = command(again)
    assert (code, again.asked, host.chunks) == (0, [], [])
    report = (tmp_path / "out" / "eval.md").read_text()
    assert f"{4 + 2 * PER_STAGE - kept} requests in" in report  # a pass cut off is not told of
    assert "- server: vllm serve MODEL" in report


FIELDS = ("sample", "question", "setting", "policy", "allocator", "budget", "seed")


def test_more_can_be_asked_later_and_the_report_is_of_what_is_asked(
    command: Any, tmp_path: Path
) -> None:
    command(Answering(), "--settings", "in-window", "--limit", "1")
    assert len(lines(tmp_path)) == 1 + 4
    server = Answering()
    command(server, "--settings", "in-window", "--limit", "2", "--seeds", "0,1")
    assert len(server.asked) == 1 + 4 + 8
    command(Answering(), "--settings", "in-window", "--limit", "1")
    assert "results: 5 of 5" in (tmp_path / "out" / "eval.md").read_text()


@pytest.mark.parametrize(
    ("more", "identity", "told"),
    [
        (["--prompt-tokens", "544"], {}, "suite was mine"),
        ([], {"model": "other 2"}, "model was small 1, now other 2"),
        ([], {"versions": "vllm 0.33"}, "versions was vllm 0.32, now vllm 0.33"),
    ],
)
def test_results_of_something_else_are_not_mixed_in(
    command: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    more: list[str],
    identity: dict[str, str],
    told: str,
) -> None:
    command(Answering(), "--limit", "1")
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    server = Answering()
    assert command(server, "--limit", "1", *more, **identity)[0] == 1
    assert told in capsys.readouterr().err
    assert server.asked == []
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def refusal(status: int, text: str) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("", status, "", Message(), io.BytesIO(text.encode()))


class Failing(Answering):
    def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
        if xargs["kv_policy"] == "random":
            raise refusal(500, "policy random: division by zero")
        return super().reply(body, xargs)


def test_a_policy_that_fails_is_told_of_and_the_others_go_on(command: Any, tmp_path: Path) -> None:
    assert command(Failing())[0] == 1
    assert {line["policy"] for line in lines(tmp_path)} == {"none", "nexus"}
    report = (tmp_path / "out" / "eval.md").read_text()
    assert "**16 requests failed**" in report
    assert "random, uniform, 50%: HTTP 500: policy random: division by zero" in report
    server = Answering()
    assert command(server)[0] == 0
    assert {body["vllm_xargs"]["kv_policy"] for body in server.asked} == {"random"}


class Refusing(Answering):
    def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
        raise refusal(400, "kv_allocator='lu' is not allowed")


class Gone(Answering):
    def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionResetError


class Keeping(Answering):
    """Evicts nothing, whatever it is asked."""

    def record(self, xargs: dict[str, Any]) -> dict[str, Any]:
        return {**super().record(xargs), "evicted_blocks": 0}


class Stock(Answering):
    """Knows nothing of evictions."""

    def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
        return {**super().reply(body, xargs), "kv_transfer_params": None}


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (Refusing, "HTTP 400: kv_allocator='lu' is not allowed"),
        (Gone, "the server does not answer: ConnectionResetError()"),
        (Keeping, "0 blocks evicted with a budget of 256 tokens"),
        (Stock, "asked for policy none, served with None"),
    ],
)
def test_a_server_that_does_not_do_as_asked_stops_the_run(
    command: Any, capsys: pytest.CaptureFixture[str], server: type[Answering], told: str
) -> None:
    assert command(server())[0] == 1
    assert told in capsys.readouterr().err


def test_a_cache_that_does_not_hold_is_told_of(command: Any, tmp_path: Path) -> None:
    class Forgetting(Answering):
        def look_up(self, haystack: tuple[int, ...], tokens: int) -> None:
            super().look_up(haystack, tokens)
            self.cached = ()

    command(Forgetting())
    assert "computed more than once: 1 noise" in (tmp_path / "out" / "eval.md").read_text()


def test_a_server_that_forces_nothing_is_measured_up_to_the_first_wrong_token(
    command: Any, tmp_path: Path
) -> None:
    class Free(Answering):
        forced = False

    command(Free())
    wrong = [x for x in lines(tmp_path) if x["policy"] == "random" and x["task"] == "passkey"]
    assert {(x["score"], x["whole"], x["logprob"]) for x in wrong} == {(0.0, False, -4.0)}
    assert "16 answers were not forced" not in (tmp_path / "out" / "eval.md").read_text()
    assert f"{len(wrong)} answers were not forced" in (tmp_path / "out" / "eval.md").read_text()


STREAMS = {
    **{key: SUITE[key] for key in ("name", "about", "prompt_tokens")},
    "budgets": ["25%"],
    "decode": {"tokens": 512, "every": 256},
    "groups": [
        {
            "haystacks": [{"source": "noise", "count": 2}],
            "tasks": [{"task": "needle", "label": "key", "keys": 2, "questions": 2}],
        }
    ],
}
STREAMS["groups"][0]["tasks"][0] |= {"sentence": "{key} is {value}.", "ask": " {key} is"}
STREAMS["words"] = {"nouns": ["oak", "elm", "ash"]}


def test_streams_are_asked_several_at_a_time_and_told_of_by_step(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Answering()
    assert command(server, told=STREAMS)[0] == 0
    found = lines(tmp_path)
    assert len(found) == len(server.asked) == 2 * 3
    assert {len(body["vllm_xargs"][FORCED]) for body in server.asked} == {512}
    for line in found:
        assert [asked["score"] for asked in line["asked"]] == [line["policy"] != "random"] * 2
        assert [asked["uses"] for asked in line["asked"]] == [0, 0]
    report = (tmp_path / "out" / "eval.md").read_text()
    assert "- streams: 2, each a haystack of 512 tokens and 512 that are decoded" in report
    assert "| nexus, uniform | 25% | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] |" in report
    assert "computed more than once" not in report
    assert "steps 1-256 | steps 257-512" in capsys.readouterr().out
    again = Answering()
    assert command(again, told=STREAMS)[0] == 0
    assert again.asked == []


def test_who_stops_a_run_does_not_wait_for_its_streams(command: Any, tmp_path: Path) -> None:
    class Slow(Answering):
        let_go, gone = threading.Event(), False

        def reply(self, body: dict[str, Any], xargs: dict[str, Any]) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGTERM)
            self.let_go.wait(60)
            self.gone = True
            return super().reply(body, xargs)

    server = Slow()
    assert command(server, "--concurrency", "1", told=STREAMS)[0] == 130
    assert not server.gone
    server.let_go.set()
    assert len(server.asked) == 1


def test_streams_are_for_a_server_that_says_them(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free(Answering):
        forced = False

    assert command(Free(), told=STREAMS)[0] == 1
    assert "start it with --logits-processors" in capsys.readouterr().err
    monkeypatch.setattr(Ours, "cpu", False)
    server = Answering()
    assert command(server, told=STREAMS)[0] == 1
    assert "not for a GPU" in capsys.readouterr().err
    assert server.asked == []


def test_by_default_every_policy_is_asked_on_equal_terms_and_nexus_as_it_is_served() -> None:
    found = evaluate._methods(None, None)
    asked = [m.policy for m in found if m.allocator == "uniform"]
    assert asked == list(POLICIES)
    assert [m for m in found if m.allocator != "uniform"] == [Method("nexus", "auto")]
    assert evaluate._methods(["none", "random"], ["lu", "ada"]) == [
        Method("random", "lu"),
        Method("random", "ada"),
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--policies", "nexus,randon"], "no policy 'randon'. Did you mean 'random'?"),
        (["--allocators", "unifrom"], "no allocator 'unifrom'. Did you mean 'uniform'?"),
        (["--baseline", "snapkv"], "--baseline snapkv is not among what is asked: use nexus,"),
        (["--baseline", "nexus,lu"], "use nexus,uniform or random,uniform"),
    ],
)
def test_names_that_no_answer_can_have_are_refused_before_a_server_starts(
    command: Any, capsys: pytest.CaptureFixture[str], more: list[str], told: str
) -> None:
    code, host = command(Answering(), *more)
    assert (code, host.chunks) == (1, [])
    assert told in capsys.readouterr().err


def test_others_are_compared_with_the_baseline_as_it_is_asked() -> None:
    nexus = [Method("nexus", a) for a in ("lu", "uniform", "auto")]
    assert evaluate._baseline(None, nexus) == nexus[1]
    assert evaluate._baseline(None, [nexus[0], nexus[2]]) == nexus[0]
    assert evaluate._baseline("nexus,auto", nexus) == nexus[2]
    other = Method("random", "lu")
    assert evaluate._baseline(None, [other]) not in [other]
    assert evaluate._baseline("random", [*nexus, other]) == other


VARIANTS = {
    "parameters": {"kvzip": {"piece": 512}, "snapkv": {"pool": 3}},
    "variants": {
        "coarse": {"policy": "kvzip", "parameters": {"kvzip": {"piece": 256}}},
        "asking": {"policy": "kvzip", "parameters": {"kvzip": {"replay": "prompt"}}},
        "plain": {"policy": "kvzip", "window": 32},
        "other": {"policy": "snapkv", "parameters": {"snapkv": {"pool": 5}}},
    },
}


def own(names: list[str] | None, settings: dict[str, Any], folder: Path) -> evaluate.Own:
    """Without a model."""
    made = evaluate.Own.__new__(evaluate.Own)
    made.args = argparse.Namespace(policies=names, concurrency=1, serve_args=[], out=folder)
    made.settings, made.folder, made.cpu = Settings.from_source(settings), folder, True
    return made


def test_no_replay_sees_a_question_that_comes_after_the_cut(tmp_path: Path) -> None:
    """Neither a policy's nor a variant's, whatever it has of its own."""
    host = own(None, VARIANTS, tmp_path)
    later = host.settings_of(Stage(1024, []))
    assert later.chunk == 1024
    pieces = {"kvzip": 512, "coarse": 256, "asking": 2048, "plain": 512}
    for name, piece in pieces.items():
        policy = policies.served(name, later)
        assert isinstance(policy, ReplayPolicy)
        assert (policy.replay, policy.piece) == ("first-cut", piece)
    assert later.of("plain").window == 32
    for name, pool in (("snapkv", 3), ("other", 5)):
        assert policies.served(name, later) == policies.make("snapkv", {"pool": pool})
    assert host.settings_of(Stage(None, [])) == host.settings


@pytest.mark.parametrize(
    ("names", "carried", "length"),
    [
        (None, 8192, 2 * 2096 + ROOM),
        (["none", "plain"], 8192, 2 * 2096 + ROOM),
        (["kvzip"], None, 2 * 2096 + ROOM),
        (["kvzip"], 4000, 4000),  # more than the model has no server takes
        (["kvzip"], 2048, 2096),
        (["nexus", "other", "none"], 8192, 2096),
    ],
)
def test_a_server_has_room_for_the_replays_that_are_asked(
    names: list[str] | None,
    carried: int | None,
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample's longest request: 2,048 tokens, a question of 10, answers twice 3, and a block."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    limit = {} if carried is None else {"max_position_embeddings": carried}
    (tmp_path / "config.json").write_text(json.dumps({**heads, **limit}))
    question = Question("fact", "Q", "A", (), 0.2, 0.3, (4,) * 10, (5,) * 3)
    started: list[list[str]] = []

    @contextmanager
    def server(name: str, folder: Path, options: list[str], *rest: Any) -> Iterator[Any]:
        started.append(options)
        yield argparse.Namespace(wait=lambda: None)

    monkeypatch.setattr(evaluate, "Server", server)
    sample = Sample("noise", (1,) * 2048, (question,))
    with own(names, VARIANTS, tmp_path).serving(Stage(1024, []), [sample]):
        pass
    (options,) = started
    told = int(options[options.index("--max-model-len") + 1])
    assert told == -(-length // 32) * 32


def remote(monkeypatch: pytest.MonkeyPatch, server: Answering) -> Callable[[str], Any]:
    monkeypatch.setattr(evaluate, "At", lambda url: server)

    def made(model: str) -> evaluate.Remote:
        args = {"base_url": "http://x/v1", "kv_eviction_config": None, "serve_args": []}
        return evaluate.Remote(argparse.Namespace(model=model, **args))

    return made


def test_a_server_at_a_url_is_asked_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any
) -> None:
    server = Answering()
    made = remote(monkeypatch, server)
    for model in ("small", "folder/small"):
        host = made(model)
        assert (host.served, host.settings.chunk) == ("small", 256)
        assert host.first == [1]
        assert host.encode("ab") == encode("ab")
    with pytest.raises(ValueError, match="serves small, not large"):
        made("large")
    suite = tmp_path / "mine.yaml"
    suite.write_text(yaml.safe_dump(SUITE))
    argv = ["eval", "small", "--suite", str(suite), "--out", str(tmp_path / "out")]
    argv += ["--base-url", "http://x", "--policies", "nexus", "--settings", "later"]
    assert cli.main(argv) == 0
    # 50 %: one cut at 8 + 8 of 16 blocks; 25 %: at 4 + 8.
    blind = {x["budget"]: x["blind"] for x in lines(tmp_path) if x["allocator"] == "uniform"}
    assert blind == {"50%": 1.0, "25%": 0.75}
    assert "- versions: vllm 0.32\n" in (tmp_path / "out" / "eval.md").read_text()


def test_a_server_without_eviction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Answering):
        def get(self, path: str) -> str:
            raise refusal(404, "")

    with pytest.raises(ValueError, match=r"HTTP 404 .* start it with --kv-eviction"):
        remote(monkeypatch, Plain())("small")


def test_a_url_where_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Down(Answering):
        def get(self, path: str) -> str:
            raise urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))

    with pytest.raises(ValueError, match=r"http://x/v1 does not answer: .*refused; use the URL"):
        remote(monkeypatch, Down())("small")


def test_options_of_our_server_do_not_go_with_a_url(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["eval", "m", "--out", str(tmp_path), "--base-url", "http://x", "--serve-args=--x"]
    assert cli.main(argv) == 1
    assert "are for a server of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad",
    [
        ["--settings", "never"],
        ["--limit", "0"],
        ["--seeds", "x"],
        ["--seeds=-1"],
        ["--seeds", str(2**63)],
        ["--seeds", ""],
        ["--policies", "nexus,"],
        ["--budgets", ""],
    ],
)
def test_bad_options_are_refused(tmp_path: Path, bad: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "m", "--out", str(tmp_path), *bad])


@pytest.mark.parametrize(
    ("more", "server", "told"),
    [
        (["--policies", "nexus,far"], {}, "far: budget 25% .*: use 8 to 15 blocks"),
        ([], {"block_size": 64, "force_block_size": True}, "block_size=64 is not allowed"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_server_starts(
    command: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    server: dict[str, Any],
    told: str,
) -> None:
    variants = {"far": {"recency_blocks": 6}}
    monkeypatch.setattr(Ours, "settings", Settings(variants=variants, **server))
    status, host = command(Answering(), *more)
    assert (status, host.chunks) == (1, [])
    assert re.search(told, capsys.readouterr().err)


def test_what_is_named_twice_is_asked_once(command: Any, tmp_path: Path) -> None:
    twice = ["--settings", "later, later", "--budgets", "25%, 25%", "--seeds", "0,0"]
    server = Answering()
    assert command(server, *twice, "--policies", "nexus, nexus", "--limit", "1")[0] == 0
    assert len(server.asked) == len(lines(tmp_path)) == 2
    assert "results: 2 of 2" in (tmp_path / "out" / "eval.md").read_text()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.jsonl", "1\n"),
        ("results.jsonl", '{"a": 1}\n'),
        ("results.jsonl", "what\n"),
        ("run.json", '{"suite": "mi'),
        ("run.json", "[]"),
    ],
)
def test_files_of_something_else_are_named_and_left(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: str
) -> None:
    command(Answering(), "--limit", "1")
    path = tmp_path / "out" / name
    path.write_text(content)
    server = Answering()
    assert command(server, "--limit", "1")[0] == 1
    assert f"{path} is not of nexus-vllm eval" in capsys.readouterr().err
    assert path.read_text() == content
    assert server.asked == []
