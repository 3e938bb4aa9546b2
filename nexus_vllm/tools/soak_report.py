"""The pure side of the soak: what must hold after a drain, whether memory is flat, the summary."""

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nexus_vllm.tools.bench_report import Table, render_table
from nexus_vllm.tools.bench_servers import metric
from nexus_vllm.tools.soak_plan import Ask

IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "nexus:live_blocks",
)
"""Gauges that are 0 when nothing runs. Pages that only the prefix cache knows count as free."""
COUNTERS = {
    "eviction_steps": "nexus:eviction_steps_total",
    "evicted_blocks": "nexus:evicted_blocks_total",
    "moved_blocks": "nexus:moved_blocks_total",
    "postponed": "nexus:postponed_total",
    "sequences": "nexus:requests_total",
    "rejected": "nexus:rejected_total",
    "eviction_seconds": "nexus:eviction_seconds_count",
    "preemptions": "vllm:num_preemptions_total",
    "cache_hits": "vllm:prefix_cache_hits_total",
}

WARM_UP = 2000
"""Requests after which a process has everything it will ever keep: the records are full, each
thread has its arena, each grammar is compiled, and on a CPU each layer has its 32 oneDNN kernels,
one for each number of tokens in a step."""
FEWEST_DRAINS = 5
"""After the warm-up; fewer points give no slope."""
GROWTH = 1.0
"""MiB per 1,000 requests that a process may grow by, as the median slope between any two drains:
1 KiB per request, less than what a request's record takes, and more than an allocator's noise over
thousands of requests. The median does not hear single drains."""


def counters(page: str) -> Counter[str]:
    """The counters of a /metrics page; those with a label of ours also by that, as in `key label`.

    As a Counter, so that a label seen for the first time has been 0.
    """
    told: Counter[str] = Counter()
    for key, name in COUNTERS.items():
        told[key] = round(metric(page, name))
        for label, value in re.findall(rf'^{name}{{(?:policy|reason)="(.*)"}} (\S+)$', page, re.M):
            told[f"{key} {label}"] = round(float(value))
    return told


def held(page: str) -> dict[str, float]:
    """Gauges of a /metrics page that say that something is still held."""
    return {name: value for name in IDLE if (value := metric(page, name))}


@dataclass
class Answer:
    """What came of a request."""

    ask: Ask
    status: int = 0  # 0: no reply
    left: bool = False  # the client hung up
    text: str = ""
    told: dict[str, Any] | None = None  # the record in the reply
    fault: str | None = None

    @property
    def outcome(self) -> str:
        return "hung up" if self.left else str(self.status or "no reply")


@dataclass
class Drain:
    """The server at rest."""

    requests: int  # so far
    seconds: float  # so far
    memory: dict[str, dict[str, float]]  # MiB of each process: rss, pss
    changes: dict[str, int]  # of `counters`, since the drain before
    evicted: int  # sequences since then that lost pages


@dataclass
class Result:
    """Everything that the summary tells."""

    command: str
    server: str
    tally: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind, outcome
    drains: list[Drain] = field(default_factory=list)
    canaries: int = 0
    changed_canaries: int = 0
    faults: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """As JSON, tally by kind."""
        told: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.tally.items()):
            told.setdefault(kind, {})[outcome] = count
        return {**vars(self), "drains": [asdict(drain) for drain in self.drains], "tally": told}


def inconsistencies(
    answers: Sequence[Answer],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    changes: Mapping[str, int],
) -> list[str]:
    """Where metrics, records and replies of the same requests disagree.

    `records`: of every request that can have reached the engine, by name. `changes`: of `counters`.
    """
    expected: Counter[str] = Counter()
    for record in itertools.chain.from_iterable(records.values()):
        expected["eviction_steps"] += record["eviction_steps"]
        expected["evicted_blocks"] += record["evicted_blocks"]
        expected[f"sequences {record['policy']}"] += 1
    expected.update(f"rejected {a.ask.reason}" for a in answers if a.ask.reason)
    faults = [
        f"/metrics: {key} grew by {changes.get(key, 0)}, requests and records say {expected[key]}"
        for key in sorted({*expected, *(key for key in changes if " " in key)})
        if changes.get(key, 0) != expected[key]
    ]
    for answer in answers:
        asked = answer.ask
        if answer.status == 200 and not answer.left:
            faults += _misled(asked, answer.told, records[asked.name])
    return faults


def _misled(
    asked: Ask, told: Mapping[str, Any] | None, found: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What is wrong with the records of an answered request."""
    if len(found) != asked.sequences:
        return [f"{asked.name}: {len(found)} records of {asked.sequences} sequences"]
    policy, budget = asked.directive.get("kv_policy"), asked.directive.get("kv_budget", "")
    faults = []
    for record in found:
        if policy and record["policy"] != policy:
            faults.append(f"{asked.name}: asked for {policy}, served with {record['policy']}")
        kept = "full" if policy == "none" else budget
        tokens = {"full": None, "1k": 1024}.get(kept, int(kept) if kept.isdecimal() else -1)
        if tokens != -1 and record["budget_tokens"] != tokens:
            faults.append(f"{asked.name}: asked for {kept}, served {record['budget_tokens']}")
        if tokens is None and record["evicted_blocks"]:
            faults.append(f"{asked.name}: evicted although it may keep everything")
    if asked.tells and told not in [_public(record) for record in found]:
        faults.append(f"{asked.name}: the reply says {told}, its record {found}")
    return faults


def _public(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "request_id"}


def canary(answer: Answer, found: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """What must be the same each time: text and records."""
    return answer.text, [_public(record) for record in found]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between any two points (Theil and Sen)."""
    return statistics.median(
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)
    )


def growth(drains: Sequence[Drain], warm_up: int) -> dict[str, float] | None:
    """MiB per 1,000 requests of each process after the warm-up; None where drains are too few."""
    judged = [drain for drain in drains if drain.requests >= warm_up]
    if len(judged) < FEWEST_DRAINS:
        return None
    names = set.intersection(*(set(drain.memory) for drain in judged))
    return {
        name: slope([(drain.requests / 1000, drain.memory[name]["rss"]) for drain in judged])
        for name in sorted(names)
    }


def verdict(result: Result, warm_up: int) -> list[str]:
    """Why the run fails; empty where it passes."""
    faults = list(result.faults)
    for name, rate in (growth(result.drains, warm_up) or {}).items():
        if rate > GROWTH:
            faults.append(f"{name} grows by {rate:.2f} MiB per 1,000 requests, {GROWTH} may be")
    for before, after in itertools.pairwise(result.drains):
        if set(before.memory) != set(after.memory):
            faults.append(
                f"processes after {before.requests} requests: {', '.join(sorted(before.memory))}; "
                f"after {after.requests}: {', '.join(sorted(after.memory))}"
            )
    return faults


def render(result: Result, warm_up: int, machine: Mapping[str, str], finished: bool) -> str:
    """The summary as Markdown."""
    faults, rates = verdict(result, warm_up), growth(result.drains, warm_up)
    last = result.drains[-1] if result.drains else None
    total = sum(result.tally.values())
    state = "passed" if not faults else f"failed: {len(faults)} faults"
    lines = [
        "# Soak",
        "",
        f"{machine['date']}, {machine['machine']}; {machine['versions']}.",
        "",
        f"`{result.command}`, server: `{result.server}`.",
        "",
        f"**{state if finished else 'stopped early, ' + state}**",
        "",
        *(f"- {fault}" for fault in faults[:20]),
        *([f"- and {len(faults) - 20} more, in soak.json"] if len(faults) > 20 else []),
    ]
    if last:
        lines += [f"{total} requests in {last.seconds:.0f} s, {total / last.seconds:.2f} a second."]
    lines += [
        f"Canaries: {result.canaries} asked, {result.changed_canaries} changed.",
        "",
        *render_table(_requests(result)),
        "",
        *render_table(_counts(result.drains)),
        "",
        *render_table(_memory(result.drains)),
        "",
    ]
    if rates is None:
        lines += [
            f"Memory is not judged: that takes {FEWEST_DRAINS} drains after the first "
            f"{warm_up} requests."
        ]
    else:
        told = ", ".join(f"{name} {rate:+.2f}" for name, rate in rates.items())
        lines += [
            f"MiB per 1,000 requests, median slope of RSS after {warm_up} requests "
            f"(at most {GROWTH}): {told}."
        ]
    return "\n".join(lines) + "\n"


def _requests(result: Result) -> Table:
    outcomes = sorted({outcome for _, outcome in result.tally})
    kinds = sorted({kind for kind, _ in result.tally})
    rows: list[Sequence[Any]] = [
        [kind, *(result.tally.get((kind, outcome), "-") for outcome in outcomes)] for kind in kinds
    ]
    return Table(["requests", *outcomes], rows)


def _counts(drains: Sequence[Drain]) -> Table:
    keys = [key for key in COUNTERS if key != "eviction_seconds"]
    shown = [key.replace("_", " ") for key in keys]
    rows: list[list[Any]] = [
        [drain.requests, drain.evicted, *(drain.changes[key] for key in keys)] for drain in drains
    ]
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    return Table(["after", "evicted sequences", *shown], [*rows, ["total", *totals]])


def _memory(drains: Sequence[Drain]) -> Table:
    names = list(dict.fromkeys(name for drain in drains for name in drain.memory))
    rows: list[Sequence[Any]] = [
        [drain.requests, *(_mib(drain.memory.get(name)) for name in names)] for drain in drains
    ]
    return Table(["RSS (PSS), MiB, after", *names], rows)


def _mib(memory: Mapping[str, float] | None) -> str:
    return f"{memory['rss']:.1f} ({memory['pss']:.1f})" if memory else "-"
