"""`nexus-vllm soak` against a server that answers as it is told to: every fault fails the run."""

import argparse
import io
import json
import os
import random
import signal
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from nexus_vllm.config import ALLOCATORS, POLICIES, Settings
from nexus_vllm.server.metrics import REJECTIONS
from nexus_vllm.server.middleware import merge
from nexus_vllm.tools import bench_servers, soak
from nexus_vllm.tools.bench_servers import Server
from nexus_vllm.tools.soak_plan import (
    CHAT,
    COMPLETIONS,
    MALFORMED,
    MESSAGES,
    RESPONSES,
    ROUTES,
    TOO_BIG,
    Ask,
    Leave,
    Planner,
    canaries,
)
from nexus_vllm.tools.soak_report import (
    COUNTERS,
    FEWEST_DRAINS,
    GROWTH,
    IDLE,
    Drain,
    Result,
    growth,
    render,
    slope,
    verdict,
)

WHOLE = {
    "/v1/completions": lambda text: {"choices": [{"text": text}]},
    "/v1/chat/completions": lambda text: {"choices": [{"message": {"content": text}}]},
    "/v1/responses": lambda text: {"output": [{"content": [{"text": text}]}], "error": None},
    "/v1/messages": lambda text: {"content": [{"type": "text", "text": text}]},
}
EVENTS: dict[str, Callable[[str], list[Any]]] = {
    "/v1/completions": lambda text: [{"choices": [{"text": text}]}, "[DONE]"],
    "/v1/chat/completions": lambda text: [{"choices": [{"delta": {"content": text}}]}, "[DONE]"],
    "/v1/responses": lambda text: [
        {"type": "response.created", "response": {"error": None}},
        {"type": "response.output_text.delta", "delta": text},
        {"type": "response.incomplete"},
    ],
    "/v1/messages": lambda text: [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}},
        {"type": "message_stop"},
    ],
}
TEXT = "green"


class Reply(io.BytesIO):
    """As urllib gives it."""

    def __init__(self, told: bytes) -> None:
        super().__init__(told)
        self.status, self.headers = 200, {"X-KV-Eviction": "policy=nexus"}


def refusal(status: int, text: str) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("", status, "", Message(), io.BytesIO(text.encode()))


class Healthy(Server):
    """Answers every request of the plan as it should be, in memory. Subclasses go wrong."""

    def __init__(self) -> None:
        self.command = "vllm serve MODEL"
        self.process: Any = SimpleNamespace(poll=lambda: None, pid=os.getpid())
        self.counts: Counter[str] = Counter()
        self.kept: dict[str, list[dict[str, Any]]] = {}
        planner = Planner(ARGS.seed)
        planned = [planner.ask(index) for index in range(ARGS.requests)]
        sung = [ask for turn in ("cold", "warm", "100", "200") for ask in canaries(turn)]
        self.asks = {asked.name: asked for asked in [*planned, *sung]}
        """The plan says what is right."""

    def wait(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def open(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600,
    ) -> Any:
        name = (headers or {})["X-Request-Id"]
        asked = self.asks.get(name) or Ask("poke", COMPLETIONS, name, body)
        if asked.leave and asked.leave.seconds:
            raise TimeoutError
        if asked.status == 400:
            if asked.reason:
                self.counts[f"rejected {asked.reason}"] += 1
            return self.refuse(asked)
        record = {
            "policy": asked.directive.get("kv_policy", "nexus"),
            "budget_tokens": budget(asked),
            "eviction_steps": 1,
            "evicted_blocks": 0 if budget(asked) is None else 3,
        }
        for index in range(asked.sequences):
            self.book(asked, {"request_id": f"{index}_{asked.engine_id}", **record})
        return Reply(self.reply(path, asked, record))

    def refuse(self, asked: Ask) -> Any:
        raise refusal(400, json.dumps({"error": {"message": f"{asked.named} is wrong"}}))

    def book(self, asked: Ask, record: dict[str, Any]) -> None:
        self.kept.setdefault(asked.engine_id, []).append(record)
        self.counts["eviction_steps"] += record["eviction_steps"]
        self.counts["evicted_blocks"] += record["evicted_blocks"]
        self.counts[f"sequences {record['policy']}"] += 1

    def reply(self, path: str, asked: Ask, record: dict[str, Any]) -> bytes:
        if asked.streamed:
            events = [e if isinstance(e, str) else json.dumps(e) for e in self.events(asked)]
            return "".join(f"event: x\ndata: {event}\n\n" for event in events).encode()
        told = {"kv_eviction": record} if asked.tells else None
        whole = WHOLE[path](self.text(asked))
        return json.dumps({**whole, "kv_transfer_params": told}).encode()

    def events(self, asked: Ask) -> list[Any]:
        return EVENTS[asked.route.path](self.text(asked))

    def text(self, asked: Ask) -> str:
        return TEXT

    def get(self, path: str) -> str:
        if path == "/metrics":
            return self.page()
        found = self.kept.get(path.rpartition("/")[2])
        if found is None:
            raise refusal(404, "")
        return json.dumps({"sequences": found})

    def page(self) -> str:
        lines = ["#", *(f'{name}{{engine="0"}} {self.gauge(name)}' for name in IDLE)]
        for key, name in COUNTERS.items():
            label = {"rejected": "reason", "sequences": "policy"}.get(key)
            if not label:
                lines.append(f"{name} {self.counts[key]}")
            lines += [
                f'{name}{{{label}="{labelled.partition(" ")[2]}"}} {count}'
                for labelled, count in {f"{key} none": 0, **self.counts}.items()
                if label and labelled.startswith(f"{key} ")
            ]
        return "\n".join(lines) + "\n"

    def gauge(self, name: str) -> float:
        return 0.0


def budget(asked: Ask) -> int | None:
    """As the server's settings and the request say, but for percentages."""
    kept = asked.directive.get("kv_budget", "20%")
    if asked.directive.get("kv_policy") == "none" or kept == "full":
        return None
    return {"1k": 1024, "20%": 128, "60%": 128}.get(kept) or int(kept)


ARGS = argparse.Namespace(requests=200, drain_every=100, concurrency=1, seed=3)


def command(folder: Path) -> argparse.Namespace:
    """All of the command's arguments."""
    return argparse.Namespace(**vars(ARGS), model=folder, out=folder, warm_up=2000, serve_args=[])


@pytest.fixture(autouse=True)
def _patient_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "DRAIN_TIMEOUT", 0)


def soaked(server: Healthy) -> Result:
    """A run of 200 requests with two drains."""
    run = soak.Soak(server, ARGS)
    run.run()
    return run.result


def test_a_healthy_server_passes() -> None:
    result = soaked(Healthy())
    assert verdict(result, warm_up=0) == []
    planned = [Planner(3).ask(index) for index in range(200)]
    assert {kind for kind, _ in result.tally} == {asked.kind for asked in planned}
    assert sum(result.tally.values()) == 200
    assert result.tally["bad directive", "400"] > 0
    assert result.tally["hung up, whole", "hung up"] > 0
    assert result.canaries == 4 * len(canaries("x"))
    assert [drain.requests for drain in result.drains] == [0, 100, 200]
    assert all(drain.evicted for drain in result.drains)
    assert all(drain.memory for drain in result.drains)


class Failing(Healthy):
    """One request is answered with a 500."""

    def open(self, path: str, body: Any, headers: Any = None, timeout: float = 600) -> Any:
        if headers["X-Request-Id"] == "soak000150":
            raise refusal(500, "EngineCore is dead")
        return super().open(path, body, headers, timeout)


class Gone(Healthy):
    """One connection is closed without a reply."""

    def open(self, path: str, body: Any, headers: Any = None, timeout: float = 600) -> Any:
        if headers["X-Request-Id"] == "soak000150":
            raise ConnectionResetError
        return super().open(path, body, headers, timeout)


class Leaking(Healthy):
    """A page is never given back, once 100 requests have been answered."""

    def __init__(self, leaks: str) -> None:
        super().__init__()
        self.leaks = leaks

    def gauge(self, name: str) -> float:
        return 0.01 if name == self.leaks and len(self.kept) > 100 else 0.0


class Changed(Healthy):
    """A canary says something else in the end."""

    def text(self, asked: Ask) -> str:
        return "red" if asked.name == "canary1-200" else TEXT


class ChangedRecord(Healthy):
    """A canary loses other pages in the end."""

    def book(self, asked: Ask, record: dict[str, Any]) -> None:
        more = int(asked.name == "canary8-200")  # streamed, so that its reply tells nothing
        super().book(asked, {**record, "evicted_blocks": record["evicted_blocks"] + more})


class Accepting(Healthy):
    """What must be refused is answered."""

    def refuse(self, asked: Ask) -> Any:
        return Reply(self.reply(asked.route.path, asked, {}))


class Vague(Healthy):
    """Refusals do not say what is wrong."""

    def refuse(self, asked: Ask) -> Any:
        raise refusal(400, json.dumps({"error": {"message": "no"}}))


class Uncounted(Healthy):
    """Metrics miss an eviction that the records tell of."""

    def page(self) -> str:
        name = COUNTERS["evicted_blocks"]
        more = "1" if len(self.kept) > 100 else ""
        return super().page().replace(f"{name} ", f"{name} {more}")


class Unreported(Healthy):
    """Metrics miss refused requests."""

    def refuse(self, asked: Ask) -> Any:
        self.counts[f"rejected {asked.reason}"] = 0
        return super().refuse(asked)


class Forgetful(Healthy):
    """A record is lost."""

    def get(self, path: str) -> str:
        if path.endswith("soak000020"):
            raise refusal(404, "")
        return super().get(path)


class Deaf(Healthy):
    """Every request is served with the server's own policy."""

    def book(self, asked: Ask, record: dict[str, Any]) -> None:
        super().book(asked, {**record, "policy": "nexus"})


class Greedy(Healthy):
    """Evicts what may stay whole."""

    def book(self, asked: Ask, record: dict[str, Any]) -> None:
        super().book(asked, {**record, "evicted_blocks": 1})


class Endless(Healthy):
    """Streams end in the middle."""

    def events(self, asked: Ask) -> list[Any]:
        return super().events(asked)[:-1]


class BreakingOff(Healthy):
    """Streams have an error in them."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__()
        self.error = error

    def events(self, asked: Ask) -> list[Any]:
        return [self.error, *super().events(asked)]


class Bare(Healthy):
    """The plugin's middleware is not there."""

    def open(self, path: str, body: Any, headers: Any = None, timeout: float = 600) -> Any:
        reply = super().open(path, body, headers, timeout)
        reply.headers = {}
        return reply


FAULTY: list[tuple[Callable[[], Healthy], str]] = [
    (Failing, "HTTP 500, not"),
    (Gone, "no reply: ConnectionResetError"),
    *((lambda name=name: Leaking(name), f"{{'{name}': 0.01}}") for name in IDLE),
    (Changed, "said ('red'"),
    (ChangedRecord, "canary8-200 said"),
    (Accepting, "HTTP 200, not 400"),
    (Vague, "a refusal that does not name"),
    (Uncounted, "evicted_blocks grew by"),
    (Unreported, "rejected budget grew by"),
    (Forgetful, "0 records of"),
    (Deaf, "asked for random, served with nexus"),
    (Greedy, "evicted although it may keep everything"),
    (Endless, "the stream has no end"),
    *(
        (lambda error=error: BreakingOff(error), "an error within the stream")
        for error in ({"error": {"code": 500}}, {"type": "error"}, {"type": "response.failed"})
    ),
    (Bare, "no X-KV-Eviction in the reply"),
]


@pytest.mark.parametrize(("server", "told"), FAULTY)
def test_a_fault_fails_the_run(server: Callable[[], Healthy], told: str) -> None:
    faults = verdict(soaked(server()), warm_up=0)
    assert any(told in fault for fault in faults), faults


def test_sigterm_stops_the_server_and_leaves_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupting(Healthy):
        stopped = False

        def open(self, path: str, body: Any, headers: Any = None, timeout: float = 600) -> Any:
            if headers["X-Request-Id"] == "soak000150":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().open(path, body, headers, timeout)

        def __exit__(self, *_: object) -> None:
            self.stopped = True

    (tmp_path / "config.json").write_text("{}")
    server = Interrupting()
    monkeypatch.setattr(soak, "Server", lambda *_: server)
    handler = signal.getsignal(signal.SIGTERM)
    assert soak.run(command(tmp_path)) == 130
    assert server.stopped
    assert "**stopped early, passed**" in (tmp_path / "soak.md").read_text()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_server_that_ends_fails_the_run(tmp_path: Path) -> None:
    server = Healthy()
    server.log = tmp_path / "log"
    server.log.write_text("out of memory")
    server.process.poll = lambda: -9
    result = soaked(server)
    assert "out of memory" in verdict(result, warm_up=0)[0]
    assert sum(result.tally.values()) == 100


def test_a_metric_that_is_not_there_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Healthy()
    page = server.page().replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    monkeypatch.setattr(server, "page", lambda: page)
    with pytest.raises(RuntimeError, match="not on /metrics: vllm:kv_cache_usage_perc"):
        soaked(server)


def test_a_client_leaves_a_stream_after_its_events() -> None:
    server = Healthy()
    for leave, left, text in ((Leave(events=1), True, TEXT), (Leave(events=3), False, TEXT)):
        body = {**CHAT.body("Hello", 2), "stream": True}
        asked = server.asks["a"] = Ask("x", CHAT, "a", body, leave=leave)
        answer = soak.exchange(server, asked)
        assert (answer.left, answer.text, answer.fault) == (left, text, None)


def test_a_timeout_of_a_client_that_did_not_mean_to_leave_is_a_fault() -> None:
    class Silent(Healthy):
        def open(self, *_: Any, **__: Any) -> Any:
            raise TimeoutError

    asked = Ask("x", CHAT, "a", CHAT.body("Hello", 2))
    assert soak.exchange(Silent(), asked).fault == "no reply: TimeoutError()"


def drains(*rss: float, every: int = 1000) -> list[Drain]:
    return [
        Drain(every * index, 60.0 * index, {"Worker": {"rss": use, "pss": use}}, Counter(), 1)
        for index, use in enumerate(rss)
    ]


def test_the_slope_does_not_hear_single_points() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == 2
    assert slope([(0, 1), (1, 1), (2, 900), (3, 1), (4, 1)]) == 0


@pytest.mark.parametrize(
    ("rss", "fails"),
    [
        ([0, 500, 700, 700, 700, 700, 700, 700], False),  # warms up
        ([0, 500, 700, 703, 699, 702, 698, 701], False),  # noise
        ([0, 500, 700, 700, 730, 700, 700, 700], False),  # a peak
        ([0, 500, 700, 730, 730, 730, 730, 730], False),  # one step
        ([0, 500, 700, 702, 704, 706, 708, 710], True),  # 2 KiB per request
        ([0, 500, 700, 699, 704, 705, 709, 710], True),
        ([0, 500, 700, 700, 706, 706, 712, 712], True),  # in steps
    ],
)
def test_memory_that_grows_after_the_warm_up_fails(rss: list[float], fails: bool) -> None:
    result = Result("soak", "vllm serve", drains=drains(*rss))
    found = verdict(result, warm_up=2000)
    assert bool(found) == fails, found
    assert all(fault.endswith(f"MiB per 1,000 requests, {GROWTH} may be") for fault in found)
    assert "Worker" in render(result, 2000, MACHINE, True)


def test_memory_is_not_judged_on_few_drains() -> None:
    few = drains(*(100.0 * index for index in range(FEWEST_DRAINS + 1)))
    assert growth(few, warm_up=2000) is None
    assert "not judged" in render(Result("soak", "vllm", drains=few), 2000, MACHINE, True)
    assert growth(few, warm_up=1000) == {"Worker": 100.0}


def test_a_process_that_appears_fails() -> None:
    told = drains(1, 1)
    told[1].memory["python3"] = {"rss": 1, "pss": 1}
    (fault,) = verdict(Result("soak", "vllm", drains=told), warm_up=2000)
    assert fault == "processes after 0 requests: Worker; after 1000: Worker, python3"


MACHINE = {"date": "today", "machine": "a CPU", "versions": "vllm 0.32.0"}


def test_the_summary_says_what_happened() -> None:
    result = soaked(Healthy())
    text = render(result, 2000, MACHINE, True)
    assert "**passed**" in text
    assert "**stopped early, passed**" in render(result, 2000, MACHINE, False)
    assert "--requests 200 --concurrency 1 --drain-every 100 --seed 3`" in text
    assert f"Canaries: {result.canaries} asked, 0 changed." in text
    assert f"| bad directive | - | {result.tally['bad directive', '400']} | - |" in text
    result.faults += [f"fault {index}" for index in range(23)]
    text = render(result, 2000, MACHINE, True)
    assert "**failed: 23 faults**" in text
    assert "- fault 19\n- and 3 more, in soak.json" in text
    assert json.loads(json.dumps(result.data()))["tally"]["too big"]["400"] > 0


def test_a_run_that_fails_exits_1_and_writes_its_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    told = Path(tmp_path / "soak.md"), tmp_path / "soak.json"
    for server, code in ((Healthy(), 0), (Failing(), 1)):
        monkeypatch.setattr(soak, "Server", lambda *_, server=server: server)
        assert soak.run(command(tmp_path)) == code
        assert ("passed" if not code else "HTTP 500") in told[0].read_text()
        assert len(json.loads(told[1].read_text())["faults"]) == code


def test_the_server_runs_with_the_variables_of_the_soak_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tell = tmp_path / "vllm"
    tell.write_text('#!/bin/sh\necho "told $NEXUS_A $NEXUS_B"\n')
    tell.chmod(0o755)
    monkeypatch.setattr(bench_servers, "vllm_command", lambda: str(tell))
    monkeypatch.setenv("NEXUS_B", "mine")
    log = tmp_path / "log"
    variables = {"NEXUS_A": "1", "NEXUS_B": "2"}
    with Server("ours", tmp_path, [], 1, log, variables) as server:
        server.process.wait(60)
    assert log.read_text() == "told 1 mine\n"
    assert server.command.startswith("NEXUS_A=1 NEXUS_B=mine vllm serve MODEL ")


def plan(seed: int, count: int) -> Iterator[Ask]:
    planner = Planner(seed)
    return (planner.ask(index) for index in range(count))


def test_a_seed_draws_the_same_requests_in_any_order() -> None:
    asked = list(plan(5, 300))
    assert asked == list(plan(5, 300))
    assert asked != list(plan(6, 300))
    planner, order = Planner(5), list(range(300))
    random.Random(0).shuffle(order)
    assert all(planner.ask(index) == asked[index] for index in order)


@pytest.mark.parametrize(("headers", "more", "named", "reason"), MALFORMED)
def test_what_must_be_refused_is_malformed(
    headers: Mapping[str, str], more: Any, named: str, reason: str
) -> None:
    """A policy's name, say, that was none once."""
    body = json.dumps({"prompt": "x", **more}).encode()
    with pytest.raises(Exception, match=named) as refusal:
        merge(Headers(headers), body, Settings(budget_floor=128), True)
    assert refusal.value.reason == reason


def test_the_plan_has_everything_in_it() -> None:
    asked = list(plan(1, 5000))
    names = {a.name for a in asked}
    assert len(names) == len(asked)
    bodies = [a.body for a in asked if isinstance(a.body, dict)]
    answered = [a for a in asked if a.status == 200 and not a.leave]
    assert {(a.route, a.streamed) for a in answered} == {
        (route, streamed) for route in ROUTES for streamed in (False, True)
    }
    assert {a.sequences for a in answered} == {1, 2, 3}
    assert {(a.route, bool(a.leave.seconds), a.streamed) for a in asked if a.leave} == {
        (route, *how) for route in ROUTES for how in ((True, True), (True, False), (False, True))
    }
    for key in ("seed", "stop", "stop_sequences", "logprobs", "response_format", "text"):
        assert any(key in body for body in bodies), key
    refused = [a for a in asked if a.status == 400]
    assert {a.named for a in refused} >= {case[2] for case in (*MALFORMED, *TOO_BIG)}
    assert {a.reason for a in refused} - {None} <= set(REJECTIONS)
    for key, values in {
        "kv_policy": {*POLICIES, "none"},
        "kv_allocator": {*ALLOCATORS, "auto"},
        "kv_prefill": {"auto", "oneshot", "streaming"},
    }.items():
        assert {a.directive[key] for a in answered if key in a.directive} == values
    budgets = {a.directive.get("kv_budget") for a in answered}
    assert {"full", "20%", "128", None} <= budgets
    assert any(a.headers for a in answered)
    assert any("vllm_xargs" in body for body in bodies)


def test_canaries_differ_in_names_only() -> None:
    first, second = canaries("0"), canaries("1")
    assert {a.name for a in first}.isdisjoint(a.name for a in second)
    assert [(a.route, a.body, a.headers) for a in first] == [
        (a.route, a.body, a.headers) for a in second
    ]
    assert all(isinstance(a.body, dict) and a.body["temperature"] == 0 for a in first)
    assert {a.route for a in first} == {COMPLETIONS, CHAT, RESPONSES, MESSAGES}
