"""Two servers side by side, under the same load in turn: parts a, c and d of the benchmark."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from nexus_vllm.tools.bench_report import (
    BLOCK,
    Part,
    Table,
    median,
    percentile,
    pool_blocks,
    ratios,
)

START_TIMEOUT = 900.0
SERVED = "bench"
# What the load is told by, in the order of the table: key, heading.
NUMBERS = {
    "requests_per_s": "requests/s",
    "output_per_s": "output tokens/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p95_ms": "TTFT p95, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p95_ms": "ITL p95, ms",
    "most_running": "most running",
    "mean_running": "mean running",
    "preemptions": "preemptions",
    "peak_usage": "peak KV usage",
}


def environment(stock: bool, kv_gib: int) -> dict[str, str]:
    """What every vLLM of the benchmark runs in; stock loads no plugin at all."""
    added = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        # Threads of an idle server that spin would steal the other's time.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    left = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    return {**left, **added, **({"VLLM_PLUGINS": ""} if stock else {})}


def device_options(cpu: bool) -> list[str]:
    """Options of every server: scripts/serve.sh's on a CPU, none elsewhere."""
    return ["--enforce-eager", "--dtype", "float32"] if cpu else []


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that `with` blocks end the children."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_command(name: str, work: Callable[[], int], stopped: str = "stopped") -> int:
    """The exit status of a subcommand: `work`'s, 1 with the reason where it raises, 130 where it is
    interrupted; SIGTERM interrupts, too. `stopped`: what is said then."""
    try:
        with sigterm_as_interrupt():
            return work()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"nexus-vllm {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nnexus-vllm {name}: {stopped}", file=sys.stderr)
        return 130


def vllm_command() -> str:
    """The `vllm` of this Python."""
    return str(Path(sys.executable).parent / "vllm")


def as_typed(arguments: Sequence[str], model: Path) -> str:
    """A `vllm` command as one would type it, with MODEL for the folder."""
    return shlex.join("MODEL" if item == str(model) else item for item in ["vllm", *arguments])


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def metric(text: str, name: str) -> float:
    """The sum over labels of one metric of a /metrics page; 0 where there is none."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
    return sum(map(float, found))


class Server:
    """A `vllm serve` in a process group of its own, ended with the `with` block.

    `variables` are set in its environment, unless ours has them already. Raises RuntimeError, with
    the end of its log, where it does not start.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        options: Sequence[str],
        kv_gib: int,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        chosen = {key: os.environ.get(key, value) for key, value in (variables or {}).items()}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        port = self.url.rsplit(":", 1)[1]
        shown = ["serve", str(model), *options, "--served-model-name", SERVED]
        typed = [f"{key}={value} " for key, value in chosen.items()]
        typed += ["VLLM_PLUGINS= "] if name == "stock" else []
        self.command = "".join(typed) + as_typed(shown, model)
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [vllm_command(), *shown, "--port", port, "--disable-uvicorn-access-log"],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**environment(name == "stock", kv_gib), **chosen},
                start_new_session=True,
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        for which, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            try:
                os.killpg(self.process.pid, which)
            except ProcessLookupError:
                break
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def wait(self) -> None:
        """Until it answers."""
        began = time.monotonic()
        while time.monotonic() < began + START_TIMEOUT:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                say(f"{self.name}: up after {time.monotonic() - began:.0f} s")
                return
            except OSError:
                time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"{self.name} did not start; the end of {self.log}:\n{tail}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            told: bytes = reply.read()
        return told.decode()

    def complete(self, prompt: str | list[int], tokens: int) -> tuple[str, int]:
        """The greedy text after a prompt, and the prompt's tokens."""
        told = self.reply(prompt, tokens)
        return told["choices"][0]["text"], told["usage"]["prompt_tokens"]

    def reply(self, prompt: str | list[int], tokens: int) -> dict[str, Any]:
        """The whole reply, greedy."""
        body = {"model": SERVED, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return self.post("/v1/completions", body)

    def post(self, path: str, body: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        """A JSON reply to a JSON body."""
        with self.open(path, body, timeout=timeout) as reply:
            told: dict[str, Any] = json.load(reply)
        return told

    def open(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600,
    ) -> HTTPResponse:
        """The reply to a body, not read yet. Raises HTTPError, or TimeoutError after silence."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, sent, {"Content-Type": "application/json", **(headers or {})}
        )
        reply: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        return reply

    def cache(self) -> tuple[int, int]:
        """Pages of the pool, and tokens of each."""
        info = re.search(r"^vllm:cache_config_info\{(.*)\}", self.get("/metrics"), re.M)
        if info is None:
            raise RuntimeError(f"{self.name} does not tell its block size on /metrics")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', info[1]))
        blocks = labels.get("num_gpu_blocks_override", "None")
        return int(labels["num_gpu_blocks"] if blocks == "None" else blocks), int(
            labels["block_size"]
        )


class Sampler:
    """Reads a server's gauges while a load runs."""

    def __init__(self, server: Server, every: float = 1.0) -> None:
        self.server, self.every = server, every
        self.timeline: list[tuple[float, float, float, float]] = []
        """Seconds, running and waiting requests, share of the pool in use; while any runs."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        begin = time.perf_counter()
        while not self._stop.wait(self.every):
            try:
                page = self.server.get("/metrics")
            except OSError:
                continue
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            running, waiting, usage = (metric(page, f"vllm:{name}") for name in names)
            if running:  # not before and after the load
                self.timeline.append((time.perf_counter() - begin, running, waiting, usage))

    def __enter__(self) -> "Sampler":
        self.before = self.server.get("/metrics")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = self.server.get("/metrics")

    def change(self, name: str) -> float:
        return metric(self.after, name) - metric(self.before, name)


@dataclass(frozen=True)
class Load:
    """Requests of vLLM's own client: random prompts, all there at once, `concurrency` in flight."""

    prompt: int
    output: int
    requests: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt}+{self.output}, {self.concurrency} at once"

    @classmethod
    def of(cls, text: str) -> "Load":
        """From PROMPT+OUTPUTxREQUESTS, all at once, or with @CONCURRENCY. Raises ValueError."""
        found = re.fullmatch(r"(\d+)\+(\d+)x(\d+)(?:@(\d+))?", text)
        if not found:
            raise ValueError(f"{text!r} is not PROMPT+OUTPUTxREQUESTS, as in 512+96x8@4")
        prompt, output, requests, concurrency = found.groups()
        return cls(int(prompt), int(output), int(requests), int(concurrency or requests))

    def command(self, model: Path, url: str, seed: int, result: Path) -> list[str]:
        """Arguments of `vllm`."""
        options = {
            "backend": "openai",
            "base-url": url,
            "endpoint": "/v1/completions",
            "model": SERVED,
            "tokenizer": str(model),
            "dataset-name": "random",
            "random-input-len": self.prompt,
            "random-output-len": self.output,
            "num-prompts": self.requests,
            "request-rate": "inf",
            "max-concurrency": self.concurrency,
            "seed": seed,
            "temperature": 0,
            "percentile-metrics": "ttft,tpot,itl",
            "metric-percentiles": "50,95",
        }
        given = [item for key, value in options.items() for item in (f"--{key}", str(value))]
        flags = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
        kept = ["--result-dir", str(result.parent), "--result-filename", result.name]
        return ["bench", "serve", *given, *flags, *kept]


def numbers(result: Mapping[str, Any], sampler: Sampler) -> dict[str, float]:
    """What a load's result file and the gauges beside it say."""
    ttfts = [1e3 * value for value in result["ttfts"]]
    itls = [1e3 * value for values in result["itls"] for value in values]
    running = [entry[1] for entry in sampler.timeline]
    return {
        "requests_per_s": result["request_throughput"],
        "output_per_s": result["output_throughput"],
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p95_ms": percentile(ttfts, 95),
        "itl_p50_ms": percentile(itls, 50),
        "itl_p95_ms": percentile(itls, 95),
        "most_running": max(running, default=0.0),
        "mean_running": sum(running) / max(1, len(running)),
        "preemptions": sampler.change("vllm:num_preemptions_total"),
        "peak_usage": max((entry[3] for entry in sampler.timeline), default=0.0),
        "evicted_blocks": sampler.change("nexus:evicted_blocks_total"),
        "completed": result["completed"],
        "failed": result.get("failed", 0),
        "seconds": result["duration"],
    }


def run_load(
    server: Server, load: Load, model: Path, seed: int, out: Path
) -> tuple[dict[str, float], str, Sampler]:
    """One load on one server: its numbers, the command as one would type it, the gauges."""
    result = out / f"load-{server.name}-{seed}.json"
    result.unlink(missing_ok=True)
    command = load.command(model, server.url, seed, result)
    with Sampler(server) as sampler:
        client = subprocess.Popen(
            [vllm_command(), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(True, 1),
            start_new_session=True,
            text=True,
        )
        try:
            told, _ = client.communicate()
        finally:
            if client.poll() is None:
                os.killpg(client.pid, signal.SIGKILL)
                client.wait()
    if client.returncode or not result.exists():
        raise RuntimeError(f"vllm bench serve failed on {server.name}:\n{told[-3000:]}")
    found = numbers(json.loads(result.read_text()), sampler)
    result.unlink()
    if found["completed"] != load.requests:
        say(f"{server.name}: only {found['completed']:.0f} of {load.requests} requests completed")
    return found, as_typed(command[: command.index("--result-dir")], model), sampler


@dataclass
class Pair:
    """How the two servers of a part differ and what they share."""

    model: Path
    shared: list[str]  # options of both
    stock: list[str]
    ours: list[str]
    pool_tokens: int
    max_model_len: int
    stock_block: int
    kv_gib: int
    out: Path
    servers: dict[str, Server] = field(default_factory=dict)

    def start(self, stack: ExitStack) -> None:
        """Start both, at once; stock again where its block size turns out to be another.

        A pool is given in pages, so equal memory needs both block sizes.
        """
        begun = {name: self.begin(stack, name, self.stock_block) for name in ("stock", "ours")}
        for name, server in begun.items():
            server.wait()
            size = self.stock_block if name == "stock" else BLOCK
            found = server.cache()
            if found != (pool_blocks(self.pool_tokens, size), size):
                if name == "ours":
                    raise RuntimeError(f"ours has a pool of {found[0]} blocks of {found[1]} tokens")
                say(f"stock has blocks of {found[1]} tokens, starting it again")
                server.__exit__()
                server = self.begin(stack, name, found[1])
                server.wait()
                self.stock_block = server.cache()[1]
            self.servers[name] = server

    def begin(self, stack: ExitStack, name: str, block: int) -> Server:
        """One of the two servers, not yet up; `block`: stock's block size."""
        size, own = (block, self.stock) if name == "stock" else (BLOCK, self.ours)
        pool = pool_blocks(self.pool_tokens, size)
        options = [
            *self.shared,
            *("--max-model-len", str(self.max_model_len)),
            *("--num-gpu-blocks-override", str(pool)),
            *own,
        ]
        log = self.out / f"server-{name}.log"
        return stack.enter_context(Server(name, self.model, options, self.kv_gib, log))


Check = Callable[[Server, Server, Part], None]


def compare(
    part: Part,
    pair: Pair,
    loads: Sequence[Load],
    rounds: int,
    seed: int,
    check: Check | None = None,
    starts: int = 1,
) -> Part:
    """Fill a part: `rounds` of each load on each server in turn, the other one idle.

    All of that `starts` times on new servers: where a process's memory comes to lie makes the same
    code a few percent faster or slower for as long as it runs.
    """
    told = [_Told() for _ in loads]
    for start in range(starts):
        with ExitStack() as stack:
            say(f"part {part.letter}: starting both servers, {start + 1}/{starts}")
            pair.start(stack)
            warm = prose(1, 1000)[0]
            for server in pair.servers.values():
                server.complete(warm, 4)
            if not start:
                part.data["stock_block_size"] = pair.stock_block
                part.commands += [server.command for server in pair.servers.values()]
                if check:
                    check(pair.servers["stock"], pair.servers["ours"], part)
            for load, found in zip(loads, told, strict=True):
                found.run(part, pair, load, rounds, seed)
    part.data["starts"] = starts
    part.data["loads"] = [found.book(part, load) for load, found in zip(loads, told, strict=True)]
    part.data["timelines"] = told[0].timelines
    return part


class _Told:
    """What the rounds of one load have told so far."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[dict[str, float]]] = {"stock": [], "ours": []}
        self.timelines: dict[str, list[tuple[float, float, float, float]]] = {}
        self.alone: list[float] = []  # seconds of computing one prompt, stock

    def run(self, part: Part, pair: Pair, load: Load, rounds: int, seed: int) -> None:
        """`rounds` more on these servers."""
        text = prose(1, 4 * load.prompt)[0]
        begin = time.perf_counter()
        _, length = pair.servers["stock"].complete(f"{load.requests} {load.output} {text}", 1)
        self.alone.append((time.perf_counter() - begin) * load.prompt / length)
        done = len(self.rounds["stock"])
        for turn in range(done, done + rounds):
            for name in ("stock", "ours")[:: -1 if turn % 2 else 1]:
                # A seed of its own for each round: a prompt met twice would come from the cache.
                server = pair.servers[name]
                found, command, sampler = run_load(server, load, pair.model, seed + turn, pair.out)
                self.rounds[name].append(found)
                say(
                    f"part {part.letter}: {load}: round {turn + 1} {name}: "
                    f"{found['requests_per_s']:.3f} requests/s, "
                    f"most running {found['most_running']:.0f}"
                )
                if not turn:
                    part.commands.append(command)
                    self.timelines[name] = sampler.timeline[:: 1 + len(sampler.timeline) // 200]

    def book(self, part: Part, load: Load) -> dict[str, Any]:
        """Tell the part of all rounds; returns what belongs in its data."""
        ours, stock = self.rounds["ours"], self.rounds["stock"]
        alone = median(self.alone)
        part.tables.append(load_table(self.rounds))
        medians = {key: median(ratios(ours, stock, key)) for key in NUMBERS}
        each = ", ".join(f"{r:.3f}" for r in ratios(ours, stock, "requests_per_s"))
        part.summary += [
            f"{load}: requests/s, ours / stock: {medians['requests_per_s']:.3f} (rounds: {each}); "
            f"running {medians['most_running']:.2f} at most, {medians['mean_running']:.2f} on "
            f"average; TTFT p95 {medians['ttft_p95_ms']:.2f}, ITL p50 {medians['itl_p50_ms']:.2f}, "
            f"p95 {medians['itl_p95_ms']:.2f}",
            f"{load}: computing one prompt takes stock {alone:.2f} s, so that prompts alone allow "
            f"{1 / alone:.3f} requests/s",
        ]
        return {
            "load": vars(load),
            "prompt_seconds": alone,
            "rounds": self.rounds,
            "ratios": medians,
            "timelines": self.timelines,
        }


def longer_than_memory(part: Part, pair: Pair, prompt: int, tokens: int) -> Part:
    """Part g: one prompt that the pool cannot hold; stock is started to hear what it says."""
    with ExitStack() as stack:
        server = pair.begin(stack, "stock", pair.stock_block)
        try:
            server.wait()
        except RuntimeError:
            said = re.findall(r"(ValueError: .*)", server.log.read_text()) or ["see its log"]
            part.summary.append(f"stock does not start on this pool: `{said[0].strip()}`")
        else:
            part.summary.append("stock starts on this pool: it is not smaller than one sequence")
        part.commands.append(server.command)
    with ExitStack() as stack:
        server = pair.begin(stack, "ours", pair.stock_block)
        server.wait()
        part.commands.append(server.command)
        ids = server.post("/tokenize", {"model": SERVED, "prompt": prose(1, 8 * prompt)[0]})
        begun = time.perf_counter()
        told = server.reply(ids["tokens"][:prompt], tokens)
        seconds = time.perf_counter() - begun
    record = told["kv_transfer_params"]["kv_eviction"]
    pages = pool_blocks(pair.pool_tokens, BLOCK) - 1
    part.data |= {"record": record, "usage": told["usage"], "seconds_of_reply": seconds}
    part.summary.append(
        f"ours answers {told['usage']['prompt_tokens']} tokens with "
        f"{told['usage']['completion_tokens']} in {seconds:.0f} s on {pages} pages "
        f"({pair.pool_tokens} tokens): at most {record['peak_blocks']} held, "
        f"{record['final_blocks']} at the end, {record['eviction_steps']} evictions, "
        f"prefill {record['prefill']}"
    )
    return part


def load_table(told: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Every round of both, and the medians of what ours is to stock."""
    table = Table(["round", "server", *NUMBERS.values()])
    for turn in range(len(told["stock"])):
        for name in ("stock", "ours"):
            found = told[name][turn]
            table.rows.append([str(turn + 1), name, *(found[key] for key in NUMBERS)])
    middle = [median(ratios(told["ours"], told["stock"], key)) for key in NUMBERS]
    table.rows.append(["median", "ours / stock", *middle])
    return table


def prose(count: int, characters: int = 9000) -> list[str]:
    """English texts that every Python brings."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    return [text[i * characters : (i + 1) * characters] for i in range(count)]


def same_text(prompts: int, tokens: int, characters: int) -> Check:
    """A check that greedy text is the same on both servers, one request at a time."""

    def check(stock: Server, ours: Server, part: Part) -> None:
        texts = [
            (stock.complete(text, tokens)[0], ours.complete(text, tokens)[0])
            for text in prose(prompts, characters)
        ]
        same = sum(a == b for a, b in texts)
        say(f"part {part.letter}: {same} of {prompts} greedy texts are the same")
        part.summary.append(f"greedy text of {tokens} tokens: {same} of {prompts} the same")
        part.data["texts"] = [{"stock": a, "ours": b, "same": a == b} for a, b in texts]

    return check
