"""Engines stepped in child processes: parts b, e and f of the benchmark."""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nexus_vllm.config import Settings
from nexus_vllm.tools.bench_report import (
    BLOCK,
    ELEMENT,
    Part,
    Table,
    ideal_seconds,
    kv_bytes_per_token,
    kv_gib,
    median,
    percentile,
    quarters,
    ratio,
    scoring_flop,
    weight_elements,
)
from nexus_vllm.tools.bench_servers import environment, say

WARM_UP = 3  # turns left out
FLOOR = {"budget_floor": 128}


class Stepped:
    """A `bench_engine` child, in a process group of its own, ended with the `with` block."""

    def __init__(
        self,
        name: str,
        model: Path,
        options: dict[str, Any],
        nexus: dict[str, Any] | None,
        kv_gib: int,
        log: Path,
    ) -> None:
        self.name, self.log = name, log
        variables = environment(nexus is None, kv_gib) | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nexus_vllm.tools.bench_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=variables,
                cwd=log.parent,  # not a folder whose folders would shadow packages
                start_new_session=True,
                text=True,
            )
        self._send("open", {"model": str(model), "options": options, "nexus": nexus})

    def __enter__(self) -> "Stepped":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ready(self) -> dict[str, Any]:
        """Wait for the engine: what it says of itself."""
        facts: dict[str, Any] = self._receive()
        return facts

    def __call__(self, command: str, **arguments: Any) -> Any:
        self._send(command, arguments)
        return self._receive()

    def _send(self, command: str, arguments: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        told = json.loads(line) if line else {"error": "the engine is gone"}
        if "error" in told:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"{self.name}: {told['error']}; the end of {self.log}:\n{tail}")
        return told["value"]


def engine_options(cpu: bool, max_model_len: int, sequences: int, blocks: int) -> dict[str, Any]:
    """Keywords of `vllm.LLM`, the same for both."""
    return {
        "dtype": "float32",
        **({"enforce_eager": True} if cpu else {}),
        "max_model_len": max_model_len,
        "max_num_seqs": sequences,
        "num_gpu_blocks_override": blocks,
    }


def eviction_cost(
    part: Part,
    model: Path,
    out: Path,
    cpu: bool,
    live: Sequence[int],
    density: float,
    allocators: Sequence[str],
    evictions: int,
) -> Part:
    """Part f: one sequence per size and allocator, decoding through `evictions` evictions."""
    config = json.loads((model / "config.json").read_text())
    every = {tokens: BLOCK * Settings().interval_blocks(tokens // BLOCK) for tokens in live}
    longest = int(max(live) / density) + (evictions + 4) * max(every.values()) + 2 * BLOCK
    blocks = 2 * -(-longest // BLOCK) + 64
    options = engine_options(cpu, longest, 4, blocks) | {"enable_prefix_caching": True}
    table = Table(
        [
            "allocator",
            "live blocks",
            "eviction, ms",
            "p95, ms",
            "decode step, ms",
            "eviction / decode step",
            "every, tokens",
            "share of decode time",
            "eviction at the prompt's end: blocks",
            "ms",
        ]
    )
    spent = Table(
        [
            "allocator",
            "live tokens",
            "products, ms",
            "gathering and moving, ms",
            "other operators, ms",
            "between operators, ms",
            "profiled eviction, ms",
            "products, GFLOP/s",
        ]
    )
    rows: list[dict[str, Any]] = []
    with Stepped(
        "ours",
        model,
        options,
        FLOOR,
        kv_gib(config, blocks * BLOCK),
        out / "engine-f.log",
    ) as engine:
        say("part f: starting an engine")
        part.data["engine"] = engine.ready()
        for tokens in live:
            prompt, interval = int(tokens / density), every[tokens]
            for allocator in allocators:
                name = f"{allocator}-{tokens}"
                extra = {"kv_budget": str(tokens), "kv_allocator": allocator}
                length = {"length": prompt, "tokens": WARM_UP + (evictions + 3) * interval + 8}
                told = engine("start", name=name, count=1, extra=extra, **length)
                took = sum(step["seconds"] for step in told)
                say(f"part f: {name}: prompt of {prompt} tokens took {took:.0f} s")
                # The first step after the prompt evicts what is over the budget.
                first = engine("turn", name=name, count=WARM_UP)
                steps = engine("turn", name=name, count=(evictions + 1) * interval)
                if cpu:
                    times = engine("eviction_breakdown", name=name, steps=2 * interval)
                    flop = scoring_flop(config, Settings().window, tokens + interval)
                    speed = flop / 1e6 / times["products"]
                    spent.rows.append([allocator, tokens, *times.values(), speed])
                    part.data.setdefault("breakdown", []).append(
                        {"allocator": allocator, "live_tokens": tokens, **times, "flop": flop}
                    )
                engine("close", name=name)
                cost = [s["eviction_seconds"] / s["evictions"] for s in steps if s["evictions"]]
                pure = [s["seconds"] for s in steps if not s["evictions"]]
                inside = sum(s["eviction_seconds"] for s in steps)
                whole = sum(s["seconds"] for s in steps)
                big = [s["eviction_seconds"] for s in first if s["evictions"]]
                row: dict[str, Any] = {
                    "allocator": allocator,
                    "live_blocks": tokens // BLOCK + interval // BLOCK,
                    "evictions": len(cost),
                    "eviction_ms": 1e3 * median(cost),
                    "eviction_p95_ms": 1e3 * percentile(cost, 95),
                    "decode_step_ms": 1e3 * median(pure),
                    "ratio": ratio(median(cost), median(pure)),
                    "interval": interval,
                    "share": ratio(inside, whole),
                    "prompt_blocks": prompt // BLOCK,
                    "prompt_eviction_ms": 1e3 * median(big),
                }
                rows.append(row)
                keys = [key for key in row if key != "evictions"]
                table.rows.append([row[key] for key in keys])
                say(
                    f"part f: {name}: eviction {row['eviction_ms']:.1f} ms, "
                    f"decode step {row['decode_step_ms']:.1f} ms, {len(cost)} evictions"
                )
    part.tables.append(table)
    if spent.rows:
        part.tables.append(spent)
    part.data["rows"] = rows
    for allocator in allocators:
        own = [row for row in rows if row["allocator"] == allocator]
        part.summary.append(
            f"{allocator}: an eviction takes {max(r['ratio'] for r in own):.2f} decode steps and "
            f"{max(r['share'] for r in own):.1%} of decode time at most"
        )
    return part


def step_cost(
    part: Part,
    model: Path,
    out: Path,
    cpu: bool,
    ours: dict[str, Any],
    length: int,
    batch: int,
    turns: int,
    starts: int,
) -> Part:
    """Add to part d: single decode steps of stock vLLM, also with pages of our size, and of ours,
    of sequences that may be evicted beside ones that are kept whole in the same engine."""
    config = json.loads((model / "config.json").read_text())
    room = length + WARM_UP + turns + 2 * BLOCK
    tokens = 4 * batch * room  # two groups in an engine, and as much to spare
    gib = kv_gib(config, tokens)
    plain = engine_options(cpu, room, batch, -(-tokens // BLOCK) + 1)
    pages = plain | {"block_size": BLOCK}
    unpaged = plain | {"num_gpu_blocks_override": None}  # stock's own page size
    groups = {
        "stock": ("stock", None),
        f"stock, {BLOCK}-token pages": ("stock-pages", None),
        "ours, kept whole": ("ours", {"kv_budget": "full"}),
        "ours, evictable": ("ours", None),
    }
    speeds: dict[str, list[float]] = {name: [] for name in groups}
    for start in range(starts):
        say(f"part {part.letter}: starting three engines, {start + 1}/{starts}")
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    Stepped(name, model, options, nexus, gib, out / f"engine-{name}.log")
                )
                for name, options, nexus in (
                    ("stock", unpaged, None),
                    ("stock-pages", pages, None),
                    ("ours", plain | {"max_num_seqs": 2 * batch}, ours),
                )
            }
            for engine in engines.values():
                engine.ready()
            for name, (host, extra) in groups.items():
                shape = {"count": batch, "length": length, "tokens": room - length}
                engines[host]("start", name=name, **shape, extra=extra)
            steps: dict[str, list[float]] = {name: [] for name in groups}
            for turn in range(-WARM_UP, turns):
                for name in list(groups)[:: -1 if turn % 2 else 1]:
                    (step,) = engines[groups[name][0]]("turn", name=name)
                    if step["evictions"]:
                        raise RuntimeError(f"{name} has evicted: its pool is not ample")
                    if turn >= 0:
                        steps[name].append(step["seconds"])
        for name, taken in steps.items():
            speeds[name].append(median(taken))
    table = Table(["one decode step", *(f"start {i + 1}, ms" for i in range(starts)), "stock / it"])
    shares = {
        name: [a / b for a, b in zip(speeds["stock"], own, strict=True)]
        for name, own in speeds.items()
    }
    for name, own in speeds.items():
        table.rows.append([name, *(1e3 * seconds for seconds in own), median(shares[name])])
    part.tables.append(table)
    part.data["steps"] = {"length": length, "batch": batch, "seconds": speeds}
    whole, evictable = speeds["ours, kept whole"], speeds["ours, evictable"]
    within = [a / b for a, b in zip(whole, evictable, strict=True)]
    part.summary.append(
        f"decode steps of {batch} sequences of {length} tokens, engines started {starts} times: "
        + ", ".join(f"{name} {median(shares[name]):.3f}" for name in list(groups)[1:])
        + f" of stock's speed; evictable against kept whole, in one engine: {median(within):.3f} "
        f"({', '.join(f'{share:.3f}' for share in within)})"
    )
    return part


def decode_speed(
    part: Part,
    model: Path,
    out: Path,
    cpu: bool,
    contexts: Sequence[int],
    batches: Sequence[int],
    densities: Sequence[int],
    turns: int,
) -> Part:
    """Part b: batches of every density and stock's, one decode step each in turn."""
    config = json.loads((model / "config.json").read_text())
    kv_token = kv_bytes_per_token(config, ELEMENT)
    weights = ELEMENT * weight_elements(model, bool(config.get("tie_word_embeddings")))
    longest, most = max(contexts), max(batches)
    room = turns + WARM_UP + 4 * BLOCK
    # Whole prompts are shared by the batches; an eviction copies what stays.
    shares = 1 + most * (1 + sum(density / 100 for density in densities))
    tokens = int(longest * shares) + most * len(densities) * (room + 4 * BLOCK) + 2 * longest
    max_len = longest + room
    options = engine_options(cpu, max_len, most * len(densities) + 1, tokens // BLOCK + 64)
    table = Table(
        [
            "context",
            "batch",
            "who",
            "live tokens",
            "decode step, ms",
            "tokens/s",
            "against stock",
            "ideal, ms",
            "share of the ideal",
        ]
    )
    parts = Table(
        [
            "context",
            "batch",
            "who",
            "linear layers, ms",
            "attention, ms",
            "other operators, ms",
            "between operators, ms",
            "profiled step, ms",
        ]
    )
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {
            "stock": Stepped(
                "stock",
                model,
                engine_options(cpu, max_len, most, 0)
                | {"num_gpu_blocks_override": None},  # as much as stock takes itself
                None,
                kv_gib(config, most * (longest + 2 * room)),
                out / "engine-b-stock.log",
            ),
            "ours": Stepped(
                "ours", model, options, FLOOR, kv_gib(config, tokens), out / "engine-b.log"
            ),
        }
        for engine in engines.values():
            stack.enter_context(engine)
        say("part b: starting two engines")
        part.data["engines"] = {name: engine.ready() for name, engine in engines.items()}
        bandwidth = median([engines["ours"]("bandwidth") for _ in range(3)])
        part.data |= {
            "bandwidth": bandwidth,
            "weight_bytes": weights,
            "kv_bytes_per_token": kv_token,
        }
        part.summary.append(
            f"{weights / 1e6:.0f} MB of weights, {kv_token / 1e3:.0f} kB of KV per token, "
            f"{bandwidth / 1e9:.1f} GB/s of a large copy (read and written)"
        )
        for context in contexts:
            for batch in batches:
                who = {"stock": ("stock", "stock")}
                shape = {"count": batch, "length": context, "tokens": room - BLOCK}
                engines["stock"]("start", name="stock", **shape)
                for density in densities:
                    name = f"ours {density}%"
                    budget = "full" if density >= 100 else str(context * density // 100)
                    engines["ours"]("start", name=name, **shape, extra={"kv_budget": budget})
                    who[name] = ("ours", name)
                say(f"part b: {context} tokens, batch {batch}: prompts done")
                steps: dict[str, list[dict[str, Any]]] = {name: [] for name in who}
                for turn in range(-WARM_UP, turns):
                    for name in list(who)[:: -1 if turn % 2 else 1]:
                        host, group = who[name]
                        step = engines[host]("turn", name=group)[0]
                        if turn >= 0:
                            steps[name].append(step)
                speeds = {}
                for name, taken in steps.items():
                    # Steps with an eviction are left out here; part f counts them.
                    pure = [s["seconds"] for s in taken if not s["evictions"]]
                    speeds[name] = median(pure)
                    live = (
                        batch * (context + turns // 2)
                        if name in ("stock", "ours 100%")
                        else median([s["pages"] for s in taken]) * BLOCK
                    )
                    ideal = ideal_seconds(weights, live * kv_token, bandwidth)
                    row = {
                        "context": context,
                        "batch": batch,
                        "who": name,
                        "live_tokens": live,
                        "step_ms": 1e3 * speeds[name],
                        "tokens_per_s": batch / speeds[name],
                        "against_stock": ratio(speeds["stock"], speeds[name]),
                        "ideal_ms": 1e3 * ideal,
                        "share_of_ideal": ideal / speeds[name],
                    }
                    rows.append(row)
                    table.rows.append(list(row.values()))
                    say(
                        f"part b: {context} x {batch}, {name}: {row['step_ms']:.1f} ms, "
                        f"{row['against_stock']:.2f} of stock's speed"
                    )
                if cpu and batch == most:
                    for name in shown_in_detail(list(who)):
                        host, group = who[name]
                        spent = engines[host]("breakdown", name=group, count=8)
                        parts.rows.append([context, batch, name, *spent.values()])
                        part.data.setdefault("breakdown", []).append(
                            {"context": context, "batch": batch, "who": name, **spent}
                        )
                for host, group in who.values():
                    engines[host]("close", name=group)
    part.tables.append(table)
    if parts.rows:
        part.tables.append(parts)
    part.data["rows"] = rows
    return part


def shown_in_detail(names: list[str]) -> list[str]:
    """Stock and the density next to a fifth."""
    ours = [name for name in names if name != "stock"]
    return ["stock", min(ours, key=lambda name: abs(int(name.split()[1].rstrip("%")) - 20))]


def long_stream(
    part: Part,
    model: Path,
    out: Path,
    cpu: bool,
    fed: int,
    generated: int,
    budget: int,
    allocators: Sequence[str],
) -> Part:
    """Part e: one sequence per allocator that is fed a long prompt and generates on and on."""
    config = json.loads((model / "config.json").read_text())
    slices = 40
    # As small as the budget allows: pages that were not given back would show as a hang.
    blocks = len(allocators) * (budget // BLOCK + 16) + 64
    options = engine_options(cpu, fed + generated + BLOCK, 4, blocks)
    table = Table(
        ["allocator", "tokens", "", "held pages, most", "seconds of a step, median", "p95"]
    )
    part.data["streams"] = {}
    with Stepped(
        "ours",
        model,
        options,
        FLOOR | {"budget": budget},
        kv_gib(config, blocks * BLOCK),
        out / "engine-e.log",
    ) as engine:
        say("part e: starting an engine")
        part.data["engine"] = engine.ready()
        for name in allocators:
            extra = {"kv_allocator": name, "kv_prefill": "streaming"}
            told = engine("start", name=name, count=1, length=fed, tokens=generated, extra=extra)
            say(f"part e: {name}: fed {fed} tokens in {sum(s['seconds'] for s in told):.0f} s")
            made: list[dict[str, Any]] = []
            while len(made) < generated - 2:
                made += engine("turn", name=name, count=min(100, generated - 2 - len(made)))
            engine("close", name=name)
            # The first chunks fill the budget, and the last one is shorter.
            usual = statistics.mode(step["tokens"] for step in told)
            chunks = [s for s in told if s["tokens"] == usual][-(-budget // usual) :]
            phases = {"fed": chunks, "generated": made[32:]}
            series: list[list[Any]] = []
            found: dict[str, Any] = {"tokens": fed + len(made), "series": series}
            begin = {"fed": fed - usual * len(chunks), "generated": fed}
            for phase, steps in phases.items():
                seconds = [s["seconds"] for s in steps]
                first, last = quarters(seconds)
                found[phase] = {
                    "first_quarter_s": first,
                    "last_quarter_s": last,
                    "last_to_first": ratio(last, first),
                    "pages": max((s["pages"] for s in steps), default=0),
                }
                size = max(1, -(-len(steps) // slices))
                for index in range(0, len(steps), size):
                    some = steps[index : index + size]
                    taken = [1e3 * s["seconds"] for s in some]
                    tokens = begin[phase] + (index + len(some)) * (usual if phase == "fed" else 1)
                    pages = max(s["pages"] for s in some)
                    series.append([tokens, pages, median(taken), percentile(taken, 95), phase])
                part.summary.append(
                    f"{name}, {phase} up to token {fed if phase == 'fed' else fed + len(made)}: "
                    f"last quarter / first quarter of the step time {ratio(last, first):.3f} "
                    f"({first:.3f} s, {last:.3f} s), at most {found[phase]['pages']} pages"
                )
            part.data["streams"][name] = found
            for tokens, pages, middle, high, phase in series[:: max(1, len(series) // 16)]:
                table.rows.append([name, tokens, phase, pages, middle / 1e3, high / 1e3])
    part.tables.append(table)
    return part
