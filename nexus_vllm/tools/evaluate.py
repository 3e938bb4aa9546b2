"""`nexus-vllm eval MODEL`: what a model still answers after evictions, policy by policy.

A suite's questions go to a real `vllm serve --kv-eviction`, each with its own policy, allocator,
budget and seed in the request. A haystack is prefilled once for each start of the server; all
further requests about it find it in the prefix cache (the report says whether they did).

What is measured: the log-probability that the model gives to each token of the right answer, after
the right ones before it, while it decodes in the cache that the eviction left. A server of ours is
made to say the answer for that (nexus_vllm.tools.forcing). `score` is 1 where each token is the
likeliest, which is where greedy decoding gives the answer. `prompt_logprobs` would not do: they are
computed in the prefill, before an eviction at its end, and so is the first token of a reply, which
therefore is the question's last. Another server (--base-url) decodes greedily, unless it was given
that logits processor: then log-probability is of the tokens up to the first wrong one, and that
one's no lower than the 20th likeliest.

A suite that decodes is said whole, its questions in between (a *stream*): it shows what is left of
what was read long before, after many evictions. It needs the logits processor.

Results go to DIR/results.jsonl as they come; the same command goes on where it stopped.
"""

import argparse
import http.client
import json
import shlex
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path
from typing import Any

import nexus_vllm
from nexus_vllm import policies
from nexus_vllm.config import ALLOCATORS, POLICIES, Settings, nearest
from nexus_vllm.replay import ROOM
from nexus_vllm.server.routes import ROOT
from nexus_vllm.tools import eval_plots, eval_report, eval_streams
from nexus_vllm.tools.bench import gpu, machine, model_folder
from nexus_vllm.tools.bench_report import kv_gib
from nexus_vllm.tools.bench_servers import (
    SERVED,
    Server,
    device_options,
    metric,
    run_command,
    say,
)
from nexus_vllm.tools.eval_options import natural, seeds, settings, words
from nexus_vllm.tools.eval_plan import (
    FULL,
    Job,
    Method,
    Stage,
    blind_share,
    body,
    budget_blocks,
    judge,
    judge_stream,
    misled,
    stages,
)
from nexus_vllm.tools.eval_report import Run
from nexus_vllm.tools.eval_results import (
    Results,
    code_identity,
    key_of,
    model_identity,
    samples_identity,
)
from nexus_vllm.tools.eval_samples import Sample, samples, tokenizing
from nexus_vllm.tools.eval_suite import BLOCK, Suite, load, suites

FORCING = "nexus_vllm.tools.forcing:Forcing"
STREAMS = 8  # at a time, where the suite decodes: a step for several costs little more than for one


def add_to(commands: Any) -> None:
    """Add this command to the parser's subcommands."""
    parser = commands.add_parser(
        "eval",
        help="what a model still answers after evictions, policy by policy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model; or its name at a URL")
    option = parser.add_argument
    option("--out", type=Path, required=True, metavar="DIR", help="eval.md, eval.json and results")
    option("--suite", default="quick", help=f"{', '.join(suites())}, or a YAML file (quick)")
    option("--policies", type=words, metavar="NAME,...", help="default: all")
    option(
        "--allocators",
        type=words,
        metavar="NAME,...",
        help="for each policy; default: uniform, and for nexus auto as well",
    )
    option("--budgets", type=words, metavar="B,...", help="default: the suite's")
    option("--settings", type=settings, metavar="S,...", help="in-window, later, or both")
    option("--seeds", type=seeds, default=[0], metavar="N,...", help="of the requests (0)")
    option("--prompt-tokens", type=int, metavar="N", help="of a haystack; default: the suite's")
    option("--limit", type=natural, metavar="N", help="only the first N questions, or streams")
    option("--baseline", metavar="POLICY[,ALLOCATOR]", help="others minus this (nexus)")
    option("--base-url", metavar="URL", help="of a server that is up, with --kv-eviction")
    option(
        "--concurrency",
        type=natural,
        metavar="N",
        help=f"requests at a time (1; {STREAMS} where the suite decodes)",
    )
    server = parser.add_argument_group("our own server")
    server.add_argument("--kv-eviction-config", metavar="SOURCE", help="as for vllm serve")
    server.add_argument(
        "--serve-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="more options of vllm serve: --serve-args='--max-model-len 4096'",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 1 where something is refused or a request fails, with the reason."""
    return run_command("eval", lambda: _run(args), "stopped; the same command goes on from here")


def _run(args: argparse.Namespace) -> int:
    suite = load(args.suite, prompt_tokens=args.prompt_tokens, settings=args.settings)
    args.concurrency = args.concurrency or (STREAMS if suite.decode else 1)
    host: Own | Remote = Remote(args) if args.base_url else Own(args)
    if suite.decode and not host.cpu:
        raise ValueError(
            f"suite {suite.name} decodes, which takes {FORCING}; that is for model runner V1, and "
            "not for a GPU: use another suite, or a server with it at --base-url"
        )
    made = samples(suite, host.encode, host.first)
    names, decodes = args.budgets or suite.budgets, suite.decode is not None
    methods, own = _methods(args.policies, args.allocators), not args.base_url
    if own:  # another server may have policies that are not installed here
        _check(methods, host.settings)
    if BLOCK % host.settings.block_size:
        raise ValueError(
            f"block_size={host.settings.block_size} is not allowed: budgets here are blocks of "
            f"{BLOCK} tokens; use a divisor of that"
        )
    budgets = {
        name: budget_blocks(name, suite.whole_tokens, host.settings, decodes) for name in names
    }
    for method, name in product(methods, names):  # a variant may need more
        try:
            budget_blocks(name, suite.whole_tokens, host.settings.of(method.policy), decodes)
        except ValueError as error:
            raise ValueError(f"{method.policy}: {error}") from None
    baseline = _baseline(args.baseline, methods)
    plan = stages(made, methods, budgets, suite.modes, args.seeds, args.limit, own)
    identity = {"suite": samples_identity(suite, made), **host.identity()}
    results = Results(args.out, identity)
    planned = {job.key for stage in plan for job in stage.jobs}
    done = sum(key_of(line) in planned for line in results.lines)
    told = machine(host.cpu) | {"model": host.name, "command": _typed(args)}
    told["versions"] = identity["versions"]
    begun = time.monotonic()
    told["seeds"] = ", ".join(map(str, args.seeds)) + f"; of the suite: {suite.seed}"
    evaluation = Evaluation(made, results, args.concurrency, len(planned), done)
    try:
        for stage in plan:
            left = [job for job in stage.jobs if not results.has(job)]
            if not left:
                continue
            with host.serving(stage, made) as server:
                evaluation.run(server, host.served, host.settings_of(stage), left)
    finally:
        evaluation.bar.close()
        lines = [line for line in results.lines if key_of(line) in planned]
        if lines:
            took = f"{time.monotonic() - begun:.0f} s for {len(lines) - done} of them"
            told["results"] = f"{len(lines)} of {len(planned)}; the last run took {took}"
            text = _report(args, suite, baseline, evaluation, lines, told)
            print(text)
    return 1 if evaluation.failures else 0


def _report(
    args: argparse.Namespace,
    suite: Suite,
    baseline: Method,
    evaluation: "Evaluation",
    lines: Sequence[Mapping[str, Any]],
    told: Mapping[str, str],
) -> str:
    """Write eval.md, eval.json and the plots; returns what to print."""
    streams = suite.decode is not None
    report = Run(
        suite=suite,
        lines=eval_streams.askings(lines) if streams else lines,
        texts=eval_streams.passages(lines) if streams else (),
        budgets=args.budgets or suite.budgets,
        baseline=baseline,
        told=told,
        failures=evaluation.failures,
        passes=evaluation.results.passes,
    )
    tell: Any = eval_streams if streams else eval_report
    draw = eval_plots.draw_streams if streams else eval_plots.draw
    (args.out / "eval.json").write_text(tell.as_json(report))
    (args.out / "eval.md").write_text(tell.render(report, draw(report, args.out)))
    return f"{tell.summary(report)}\n\n{args.out / 'eval.md'}"


def _methods(policies: Sequence[str] | None, allocators: Sequence[str] | None) -> list[Method]:
    """All that are asked for, beside the full cache. Equal terms by default, and what the product
    itself would do."""
    asked = [p for p in policies or POLICIES if p != FULL.policy]
    made = [Method(p, a) for p in asked for a in allocators or ("uniform",)]
    if not allocators and "nexus" in asked:
        made.insert(1 + made.index(Method("nexus", "uniform")), Method("nexus", "auto"))
    return list(dict.fromkeys(made))


def _check(methods: Sequence[Method], settings: Settings) -> None:
    """Raise ValueError on a policy or an allocator that a server with these settings lacks."""
    for kind, known in (("policy", settings.choices), ("allocator", ("auto", *ALLOCATORS))):
        for method in methods:
            if (name := getattr(method, kind)) not in known:
                raise ValueError(f"there is no {kind} {name!r}. {nearest(name, known)}")


def _baseline(asked: str | None, methods: Sequence[Method]) -> Method:
    """What the others are compared with: if no allocator is named, at `uniform`, or where that is
    not asked, at the first that is. Raises ValueError where a baseline is named and not asked."""
    policy, _, allocator = (asked or "nexus").partition(",")
    even = Method(policy, allocator or "uniform")
    found = [m for m in methods if m == even or (m.policy == policy and not allocator)]
    if asked and not found:
        known = " or ".join(f"{m.policy},{m.allocator}" for m in methods)
        raise ValueError(f"--baseline {asked} is not among what is asked: use {known}")
    return even if even in found or not found else found[0]


class Own:
    """A server of ours: started for each stage, with the stage's chunk, and ended after it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder, self.cpu = model_folder(Path(args.model)), not gpu()
        self.name, self.served, self.args = self.folder.name, SERVED, args
        self.settings = Settings.from_source(args.kv_eviction_config)
        self.encode, self.first = tokenizing(self.folder)

    def identity(self) -> dict[str, str]:
        return {
            "model": model_identity(self.folder),
            "versions": machine(self.cpu)["versions"],
            "code": code_identity(Path(nexus_vllm.__file__).parent),
            "server": f"{self.settings.model_dump_json()} {shlex.join(self.args.serve_args)}",
        }

    def settings_of(self, stage: Stage) -> Settings:
        if stage.chunk is None:
            return self.settings
        known = self.settings.to_json()
        variants = {
            name: {**changes, "parameters": _blind(changes["parameters"])}
            for name, changes in known["variants"].items()
            if "parameters" in changes  # else it has the server's
        }
        return Settings.from_source(
            known,
            chunk=stage.chunk,
            parameters=_blind(known["parameters"]),
            variants={**known["variants"], **variants},
        )

    def _replays(self) -> bool:
        """Whether a policy or variant that is asked replays prompts."""
        for name in self.args.policies or POLICIES:
            policy = policies.POLICIES.get(self.settings.policy_of(name))
            if policy is not None and policy.needs_replay:
                return True
        return False

    @contextmanager
    def serving(self, stage: Stage, made: Sequence[Sample]) -> Iterator[Server]:
        longest = max(map(_longest, made))
        pool = (self.args.concurrency + 3) * longest
        config = json.loads((self.folder / "config.json").read_text())
        if self._replays():
            twice = 2 * longest + ROOM
            carried = config.get("max_position_embeddings", twice) // BLOCK * BLOCK
            longest = max(longest, min(twice, carried))
        usual = Settings().to_json()
        wanted = self.settings_of(stage).to_json()
        knobs = {key: value for key, value in wanted.items() if value != usual[key]}
        options = [
            *device_options(self.cpu),
            *("--kv-eviction", self.settings.policy),
            *(("--kv-eviction-config", json.dumps(knobs)) if knobs else ()),
            *("--max-model-len", str(-(-longest // BLOCK) * BLOCK)),
            *("--max-num-seqs", str(max(4, self.args.concurrency))),
            # Model runner V2, which GPUs use, has another interface for this.
            *(("--logits-processors", FORCING) if self.cpu else ()),
            *self.args.serve_args,
        ]
        gib = kv_gib(config, pool)
        say("starting a server" + (f" with chunk {stage.chunk}" if stage.chunk else ""))
        log = self.args.out / "server.log"
        with Server("server", self.folder, options, gib, log) as server:
            server.wait()
            yield server


def _blind(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Policies' parameters with which a replay does not see the question before the cut."""
    replaying = {
        name: {**parameters.get(name, {}), "replay": "first-cut"}
        for name, policy in policies.POLICIES.items()
        if policy.needs_replay
    }
    return {**parameters, **replaying}


def _longest(sample: Sample) -> int:
    """Tokens of the longest request about a sample, its reply included."""
    if sample.stream:
        return len(sample.tokens) + len(sample.stream.tokens)
    asked = (len(q.tokens) + 2 * len(q.answer_tokens) + BLOCK for q in sample.questions)
    return len(sample.tokens) + max(asked)


class Remote:
    """A server that is up, at --base-url."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.kv_eviction_config or args.serve_args:
            raise ValueError("--kv-eviction-config and --serve-args are for a server of ours")
        self.cpu, self.server = True, At(args.base_url)
        try:
            told = json.loads(self.server.get(ROOT))
            models = json.loads(self.server.get("/v1/models"))["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"{args.base_url}: HTTP {error.code} from {error.url}; start it with --kv-eviction"
            ) from None
        except OSError as error:
            raise ValueError(
                f"{args.base_url} does not answer: {getattr(error, 'reason', error)}; use the URL "
                "of a server that is up, such as http://localhost:8000"
            ) from None
        found = [m for m in models if str(args.model) in (m["id"], m.get("root"))]
        if not found:
            known = ", ".join(m["id"] for m in models)
            raise ValueError(f"{args.base_url} serves {known}, not {args.model}")
        self.served = found[0]["id"]
        self.name = f"{self.served} at a URL"
        self.settings = Settings.from_source(told["settings"])
        self.versions = ", ".join(f"{name} {v}" for name, v in sorted(told["versions"].items()))
        self.first = self._tokens("", True)[:1]

    def encode(self, text: str) -> list[int]:
        return self._tokens(text, False)

    def _tokens(self, text: str, special: bool) -> list[int]:
        asked = {"model": self.served, "prompt": text, "add_special_tokens": special}
        found: list[int] = self.server.post("/tokenize", asked)["tokens"]
        return found

    def identity(self) -> dict[str, str]:
        told = self.settings.model_dump_json()
        return {"model": self.served, "versions": self.versions, "code": "?", "server": told}

    def settings_of(self, stage: Stage) -> Settings:
        return self.settings

    @contextmanager
    def serving(self, stage: Stage, made: Sequence[Sample]) -> Iterator[Server]:
        yield self.server


class At(Server):
    """One that somebody else started and ends."""

    def __init__(self, url: str) -> None:
        self.name, self.url = "server", url.rstrip("/").removesuffix("/v1")
        self.command = "--base-url URL"


class Evaluation:
    """Jobs sent, replies judged, results written."""

    def __init__(
        self,
        made: Sequence[Sample],
        results: Results,
        concurrency: int,
        planned: int = 0,
        done: int = 0,
    ) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # vLLM brings it

        self.samples, self.results, self.concurrency = made, results, concurrency
        self.failures: list[str] = []
        self.bar = tqdm(total=planned, initial=done, desc="eval", unit="request", mininterval=2)
        self.lock = threading.Lock()

    def run(self, server: Server, model: str, settings: Settings, jobs: Sequence[Job]) -> None:
        """All jobs, sample after sample: the first of each alone, since it computes the haystack.

        Streams of all samples together: a haystack is little beside what is decoded after it.
        Raises RuntimeError where the server is gone or does not do what it is asked.
        """
        if self.samples[jobs[0].sample].stream:
            self._pass(server, model, settings, jobs, "all haystacks", 0)
            return
        for sample, group in groupby(jobs, key=lambda job: job.sample):
            todo, about = list(group), self.samples[sample]
            # The last block may have to be computed again, for the newest queries.
            due = (len(todo) - 1) * (len(about.tokens) - BLOCK)
            self._pass(server, model, settings, todo, about.name, due, alone=1)

    def _pass(
        self,
        server: Server,
        model: str,
        settings: Settings,
        todo: Sequence[Job],
        name: str,
        due: int,
        alone: int = 0,
    ) -> None:
        """These jobs, the first `alone` of them one by one; writes down what became of them.

        due: prompt tokens that are to be found in the prefix cache.
        """
        before, begun = _prefix(server), time.monotonic()
        for job in todo[:alone]:
            self.do(server, model, settings, job)
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            for _ in pool.map(lambda job: self.do(server, model, settings, job), todo[alone:]):
                pass
        finally:
            # Whoever stops need not wait for streams; short requests are done in a moment.
            pool.shutdown(wait=alone > 0, cancel_futures=True)
        asked, found = (b - a for a, b in zip(before, _prefix(server), strict=True))
        seconds = round(time.monotonic() - begun, 1)
        told = {"name": name, "asked": asked, "found": found, "due": due}
        counted = {"requests": len(todo), "seconds": seconds}
        self.results.passed({**told, **counted, "server": server.command})

    def do(self, server: Server, model: str, settings: Settings, job: Job) -> None:
        """One job. A request that fails on the server is told of and left out."""
        asked, begun = body(job, self.samples, model), time.monotonic()
        try:
            # A stream's tokens come all at once, at its end.
            reply = server.post("/v1/completions", asked, timeout=600 + asked["max_tokens"])
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            if error.code < 500:
                raise RuntimeError(f"{job.method.label}: HTTP {error.code}: {text}") from None
            with self.lock:
                where = f"{job.method.label}, {job.budget}"
                self.failures.append(f"{where}: HTTP {error.code}: {text}")
                self.bar.update()
            return
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"the server does not answer: {error!r}") from None
        record = (reply.get("kv_transfer_params") or {}).get("kv_eviction") or {}
        if wrong := misled(job, record):
            raise RuntimeError(f"{job.method.label}, {job.budget}: {wrong}")
        sample = self.samples[job.sample]
        told = {
            "name": sample.name,
            **_judged(job, sample, settings, reply["choices"][0]),
            "served": record.get("allocator"),
            "evicted_blocks": record["evicted_blocks"],
            "seconds": round(time.monotonic() - begun, 3),
        }
        with self.lock:
            self.results.add(job, told)
            self.bar.update()


def _judged(
    job: Job, sample: Sample, settings: Settings, choice: Mapping[str, Any]
) -> dict[str, Any]:
    """What a line of results.jsonl says of the reply itself."""
    if sample.stream:
        return judge_stream(sample, sample.stream, choice)
    question = sample.questions[job.question]
    return {
        "task": question.task,
        "depth": round(question.depth, 4),
        "end": round(question.end, 4),
        "blind": round(blind_share(job, sample, settings), 4),
        **asdict(judge(question, choice)),
        "text": choice["text"],
        "answer": question.answer,
    }


def _prefix(server: Server) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix cache so far, and found."""
    page = server.get("/metrics")
    queries, hits = (
        metric(page, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")
    )
    return queries, hits


def _typed(args: argparse.Namespace) -> str:
    """This command, without the folders of this machine."""
    given = {"--out": "DIR", "--base-url": "URL"}
    shown, before = ["nexus-vllm"], ""
    for item in sys.argv[1:]:
        name, equals, _ = item.partition("=")
        if before in given:
            item = given[before]
        elif equals and name in given:
            item = f"{name}={given[name]}"
        elif item == args.model:
            item = "MODEL"
        shown.append(item)
        before = item
    return shlex.join(shown)
