"""`nexus-vllm soak MODEL`: thousands of mixed HTTP requests to one server with a small pool.

Every so many requests all of them end, and then nothing may be held, lost or changed.
"""

import argparse
import http.client
import json
import shlex
import time
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nexus_vllm.server.middleware import RESPONSE_HEADER
from nexus_vllm.server.routes import REQUESTS
from nexus_vllm.tools.bench import gpu, machine, model_folder
from nexus_vllm.tools.bench_report import BLOCK, pool_blocks
from nexus_vllm.tools.bench_servers import Server, device_options, run_command, say
from nexus_vllm.tools.soak_plan import (
    BUDGET_FLOOR,
    COMPLETIONS,
    MODEL_TOKENS,
    POOL_TOKENS,
    Ask,
    Planner,
    canaries,
)
from nexus_vllm.tools.soak_report import (
    COUNTERS,
    IDLE,
    WARM_UP,
    Answer,
    Drain,
    Result,
    canary,
    counters,
    held,
    inconsistencies,
    render,
    verdict,
)

REPLY_TIMEOUT = 300.0
DRAIN_TIMEOUT = 120.0
# oneDNN keeps the last 1,024 kernels it made, one for each shape of a product, and malloc returns
# little of what lay between them: vLLM's worker grows for many thousands of requests, with this
# plugin or without (scripts/onednn_memory.py). Each layer still keeps its own 32.
CPU_VARIABLES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
LAST_EVENTS = ("response.completed", "response.incomplete", "message_stop")


def add_to(commands: Any) -> None:
    """Add this command to the parser's subcommands."""
    parser = commands.add_parser(
        "soak",
        help="thousands of mixed requests to one server: nothing may leak, fail or change",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a model")
    option = parser.add_argument
    option("--out", type=Path, required=True, metavar="DIR", help="soak.md, soak.json, server.log")
    option("--requests", type=int, default=10_000, metavar="N")
    option("--concurrency", type=int, default=16, metavar="N")
    option("--drain-every", type=int, default=1000, metavar="N", help="requests")
    option("--warm-up", type=int, default=WARM_UP, metavar="N", help="before memory is judged")
    option("--seed", type=int, default=1)
    option("--serve-args", type=shlex.split, default=[], metavar="ARGS", help="for the server")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 1 where anything failed."""
    return run_command("soak", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    model, cpu = model_folder(args.model), not gpu()
    args.out.mkdir(parents=True, exist_ok=True)
    told = machine(cpu)
    # Until the next drain, all sequences of the requests since the last one.
    records = 3 * args.drain_every // 2 + 200
    options = [
        *device_options(cpu),
        *("--kv-eviction", "nexus", "--kv-budget", "20%", "--kv-budget-floor", str(BUDGET_FLOOR)),
        *("--kv-eviction-config", json.dumps({"records": records})),
        *("--max-model-len", str(MODEL_TOKENS), "--max-num-seqs", str(args.concurrency)),
        *("--num-gpu-blocks-override", str(pool_blocks(POOL_TOKENS, BLOCK))),
        *args.serve_args,
    ]
    variables = CPU_VARIABLES if cpu else {}
    with Server("ours", model, options, 1, args.out / "server.log", variables) as server:
        server.wait()
        soak = Soak(server, args)
        finished = False
        try:
            soak.run()
            finished = True
        finally:
            text = render(soak.result, args.warm_up, told, finished)
            (args.out / "soak.md").write_text(text)
            told["faults"] = verdict(soak.result, args.warm_up)
            (args.out / "soak.json").write_text(
                json.dumps({**told, **soak.result.data()}, indent=1) + "\n"
            )
            print(text)
    return 1 if verdict(soak.result, args.warm_up) else 0


class Soak:
    """One run against a server that is up."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.server, self.args = server, args
        self.planner = Planner(args.seed)
        given = (
            f"--{key.replace('_', '-')} {getattr(args, key)}"
            for key in ("requests", "concurrency", "drain_every", "seed")
        )
        self.result = Result(f"nexus-vllm soak MODEL {' '.join(given)}", server.command)
        self.begun = time.monotonic()
        self.pokes = 0
        self.healthy: list[tuple[str, list[dict[str, Any]]]] = []
        """What the canaries said first."""
        self.answers: list[Answer] = []
        """Since the last drain."""

    def run(self) -> None:
        page = self.server.get("/metrics")
        lacking = [name for name in (*IDLE, *COUNTERS.values()) if f"\n{name}{{" not in page]
        lacking = [name for name in lacking if f"\n{name} " not in page]
        if lacking:
            raise RuntimeError(f"not on /metrics: {', '.join(lacking)}")
        self.before = counters(page)
        done = 0
        self.drain(done)
        while done < self.args.requests:
            upto = min(self.args.requests, done + self.args.drain_every)
            self.send([self.planner.ask(index) for index in range(done, upto)])
            done = upto
            if self.server.process.poll() is not None:
                tail = self.server.log.read_text(errors="replace")[-3000:]
                self.fault(f"the server ended within {done} requests: {tail}")
                return
            self.drain(done)

    def fault(self, text: str) -> None:
        say(text)
        self.result.faults.append(text)

    def send(self, asks: Sequence[Ask]) -> None:
        """All of them, `--concurrency` at once, until each is answered or given up."""
        pool = ThreadPoolExecutor(self.args.concurrency)
        try:
            for answer in pool.map(self.ask, asks):
                self.result.tally[answer.ask.kind, answer.outcome] += 1
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, asked: Ask) -> Answer:
        answer = exchange(self.server, asked)
        if answer.fault:
            self.fault(f"{asked.kind}, {asked.name}: {answer.fault}")
        self.answers.append(answer)
        return answer

    def drain(self, done: int) -> None:
        """Wait until nothing runs; then nothing may be held, and the canaries say the same."""
        self.settle(done)
        records: dict[str, list[dict[str, Any]]] = {}
        for turn in ("cold", "warm") if not done else (str(done),):
            records |= self.sing(turn)
        page = self.settle(done)
        told = counters(page)
        changes = {key: told[key] - self.before[key] for key in told}
        reached = [a.ask for a in self.answers if a.status != 400 and a.ask.name not in records]
        records |= {asked.name: self.records(asked) for asked in reached}
        for fault in inconsistencies(self.answers, records, changes):
            self.fault(f"after {done} requests: {fault}")
        evicted = sum(r["evicted_blocks"] > 0 for found in records.values() for r in found)
        seconds = time.monotonic() - self.begun
        memory = processes(self.server.process.pid)
        self.result.drains.append(Drain(done, seconds, memory, changes, evicted))
        self.before, self.answers = told, []
        shown = ", ".join(f"{name} {use['rss']:.0f}" for name, use in memory.items())
        say(
            f"{done} of {self.args.requests} requests, {seconds:.0f} s; {evicted} sequences evicted"
            f" since the last drain; RSS in MiB: {shown}; {len(self.result.faults)} faults"
        )

    def settle(self, done: int) -> str:
        """The /metrics page at rest. Gauges move only while something runs, so something does."""
        end = time.monotonic() + DRAIN_TIMEOUT
        while True:
            body = {**COMPLETIONS.body("Hello", 2), "temperature": 0}
            self.ask(Ask("poke", COMPLETIONS, f"poke{self.pokes}", body))
            self.pokes += 1
            page = self.server.get("/metrics")
            left = held(page)
            if not left:
                return page
            if time.monotonic() > end:
                self.fault(f"after {done} requests, {DRAIN_TIMEOUT:.0f} s later: {left}")
                return page
            time.sleep(0.2)

    def sing(self, turn: str) -> dict[str, list[dict[str, Any]]]:
        """Ask every canary, alone; their records by name."""
        answers = [self.ask(asked) for asked in canaries(turn)]
        self.settle(0)
        found = {answer.ask.name: self.records(answer.ask) for answer in answers}
        said = [canary(answer, found[answer.ask.name]) for answer in answers]
        self.healthy = self.healthy or said
        for answer, now, first in zip(answers, said, self.healthy, strict=True):
            self.result.canaries += 1
            if now != first:
                self.result.changed_canaries += 1
                self.fault(f"{answer.ask.name} said {now}, at first {first}")
        return found

    def records(self, asked: Ask) -> list[dict[str, Any]]:
        """Of all sequences of a request; none where it did not reach the engine."""
        try:
            told = json.loads(self.server.get(REQUESTS + asked.engine_id))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return []
        found: list[dict[str, Any]] = told["sequences"]
        return found


def processes(root: int) -> dict[str, dict[str, float]]:
    """MiB of a process and all below it: those of one name are numbered by age."""
    import psutil  # vLLM brings it

    tree = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    told: dict[str, dict[str, float]] = {}
    for process in sorted(tree, key=lambda process: process.create_time()):
        name, use = process.name(), process.memory_full_info()
        alike = sum(known.partition(" ")[0] == name for known in told)
        told[f"{name} {alike + 1}" if alike else name] = {
            "rss": use.rss / 2**20,
            "pss": use.pss / 2**20,
        }
    return told


def exchange(server: Server, asked: Ask) -> Answer:
    """Send a request and judge what comes back."""
    answer, leave = Answer(asked), asked.leave
    patience = (leave and leave.seconds) or REPLY_TIMEOUT
    try:
        with server.open(
            asked.route.path, asked.sent_body(), asked.sent_headers(), patience
        ) as reply:
            answer.status = reply.status
            if reply.headers.get(RESPONSE_HEADER) is None:
                answer.fault = f"no {RESPONSE_HEADER} in the reply"
            _read(reply, answer)
    except urllib.error.HTTPError as error:
        with error:
            answer.status, answer.text = error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        if leave and leave.seconds and _timed_out(error):
            answer.left = True
            return answer
        answer.fault = f"{answer.status or 'no reply'}: {error!r}"
        return answer
    if answer.status != asked.status:
        answer.fault = f"HTTP {answer.status}, not {asked.status}: {answer.text[:300]}"
    elif answer.status == 400 and asked.named not in _message(answer.text):
        answer.fault = f"a refusal that does not name {asked.named!r}: {answer.text[:300]}"
    return answer


def _timed_out(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or isinstance(
        getattr(error, "reason", None), TimeoutError
    )


def _message(text: str) -> str:
    """The message of a refusal, in either format; empty where there is none."""
    try:
        message: str = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return message


def _read(reply: http.client.HTTPResponse, answer: Answer) -> None:
    """The body of a 200, which may be a stream that the client leaves."""
    asked, leave = answer.ask, answer.ask.leave
    if not asked.streamed:
        told = json.load(reply)
        answer.text = said(told)
        answer.told = (told.get("kv_transfer_params") or {}).get("kv_eviction")
        return
    if leave and leave.seconds:
        answer.left = True
        return
    ended = False
    for count, event in enumerate(_events(reply)):
        if leave and count == leave.events:
            answer.left = True
            return
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            answer.fault = f"an error within the stream: {str(event)[:300]}"
        answer.text += said(event)
        ended = ended or event.get("type") in LAST_EVENTS
    if not ended and not answer.fault:
        answer.fault = "the stream has no end"


def _events(reply: http.client.HTTPResponse) -> Any:
    """The events of a stream; its [DONE] as one that ends a message."""
    for line in reply:
        payload = line.removeprefix(b"data: ").strip()
        if payload == b"[DONE]":
            yield {"type": LAST_EVENTS[-1]}
        elif payload.startswith(b"{"):
            yield json.loads(payload)


def said(told: Mapping[str, Any]) -> str:
    """The text in a whole reply or in one event of a stream, of any endpoint."""
    parts: list[str | None] = []
    for choice in told.get("choices") or ():
        message = choice.get("message") or choice.get("delta") or {}
        parts += [choice.get("text"), message.get("content")]
    contents = [item.get("content") or () for item in told.get("output") or ()]
    for content in [*contents, told.get("content") or ()]:
        parts += [part.get("text") for part in content]
    delta = told.get("delta")
    parts.append(delta.get("text") if isinstance(delta, Mapping) else delta)
    return "".join(part or "" for part in parts)
