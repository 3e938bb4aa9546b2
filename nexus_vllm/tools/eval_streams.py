"""What `nexus-vllm eval` tells of streams: answers and text against decode steps. Pure.

A line of results.jsonl is of a whole stream. Here it becomes a line for each asking, and one for
each passage of the text, with what `measured` needs. Their `question` is 0: a haystack with its
stream is what is resampled, since its askings share a cache.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nexus_vllm.tools.bench_report import Plot, Table, render_table
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_report import (
    Interval,
    Line,
    Run,
    by_question,
    difference,
    head,
    mean,
    paired,
    references,
    written,
)
from nexus_vllm.tools.eval_results import FIELDS
from nexus_vllm.tools.eval_suite import DECODE, Decode

BUCKETS = 5  # at most, columns of a table


@dataclass(frozen=True)
class Kind:
    """Lines that are told of together. `uses`: of an asking: 0, 1 for more, None for the text.

    `measures`: title by the name that `measured` has for it. `shown`: the one that is plotted.
    """

    name: str
    title: str
    uses: int | None
    measures: Mapping[str, str]
    shown: str


ANSWERED = {"score": "share answered", "logprob": "log-probability per answer token"}
SAID = {
    "accuracy": "share of tokens whose likeliest is the full cache's",
    "logprob": "log-probability per token of the text",
}
FIRST = Kind("first", "asked for the first time", 0, ANSWERED, "score")
AGAIN = Kind("again", "asked again", 1, ANSWERED, "score")
TEXT = Kind("text", "the text itself", None, SAID, "accuracy")
KINDS = (FIRST, AGAIN, TEXT)


def askings(lines: Iterable[Line]) -> list[Line]:
    """A line for each question that was asked in a stream."""
    return [
        {**_shared(line), **asking, "question": 0} for line in lines for asking in line["asked"]
    ]


def passages(lines: Sequence[Line]) -> list[Line]:
    """A line for each passage of the text, for those streams that were decoded in full as well.

    `right` of its `tokens` are the likeliest where the full cache has the same likeliest.
    """
    whole = {line["sample"]: line["passages"] for line in lines if line["policy"] == FULL.policy}
    return [
        {**_shared(line), **_agreement(own, full), "whole": True, "task": "text"}
        for line in lines
        for own, full in zip(line["passages"], whole.get(line["sample"], ()), strict=False)
    ]


def _shared(line: Line) -> dict[str, Any]:
    return {key: line[key] for key in (*FIELDS, "served")}


def _agreement(own: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    pairs = list(zip(own["likeliest"], full["likeliest"], strict=True))
    right = sum(a == b for a, b in pairs)
    return {**{key: own[key] for key in ("step", "logprob")}, "right": right, "tokens": len(pairs)}


def of_kind(run: Run, kind: Kind) -> list[Line]:
    if kind.uses is None:
        return list(run.texts)
    return [line for line in run.lines if min(line["uses"], 1) == kind.uses]


def kinds(run: Run) -> list[Kind]:
    """Those that there is something to tell of."""
    return [kind for kind in KINDS if of_kind(run, kind)]


def buckets(decode: Decode) -> list[tuple[int, int]]:
    """First step and end of each: whole stretches, as many to each but the last."""
    size = math.ceil(decode.stretches / BUCKETS) * decode.every
    return [(at, min(at + size, decode.tokens)) for at in range(0, decode.tokens, size)]


@dataclass(frozen=True)
class Cell:
    """One method in one bucket of decode steps. `since`: mean tokens since the answer was told."""

    start: int
    end: int
    found: Interval
    since: float | None


def against_steps(run: Run, kind: Kind, method: Method, budget: str, measure: str) -> list[Cell]:
    """One measure, bucket by bucket."""
    decode = run.suite.decode
    assert decode is not None
    lines = replace(run, lines=of_kind(run, kind)).pick(DECODE, method, budget)
    made = []
    for start, end in buckets(decode):
        own = [line for line in lines if start <= line["step"] < end]
        since = [line["since"] for line in own if "since" in line]
        mean_since = sum(since) / len(since) if since else None
        made.append(Cell(start, end, mean(by_question(own, measure)), mean_since))
    return made


def step_table(run: Run, kind: Kind, measure: str) -> Table:
    """Rows: policy, allocator and budget; columns: decode steps."""
    assert run.suite.decode is not None
    steps = [f"steps {start + 1}-{end}" for start, end in buckets(run.suite.decode)]
    made = Table(["policy, allocator", "budget", *steps])
    for method, budget in rows(run):
        cells = against_steps(run, kind, method, budget, measure)
        made.rows.append([run.shown(method), budget, *(str(cell.found) for cell in cells)])
    return made


def rows(run: Run) -> list[tuple[Method, str]]:
    return [(FULL, "full"), *((m, b) for b in run.budgets for m in run.methods())]


def since_told(run: Run, kind: Kind) -> str:
    """How long before each bucket's askings the answer was last told; nothing for the text."""
    cells = against_steps(run, kind, FULL, "full", "score")
    told = ["-" if cell.since is None else f"{cell.since:.0f}" for cell in cells]
    return f"Tokens since the answer was last told, mean: {', '.join(told)}."


def render(run: Run, plots: Sequence[Plot] = ()) -> str:
    """The report as Markdown."""
    suite, decode = run.suite, run.suite.decode
    assert decode is not None
    streams = len({line["sample"] for line in (*run.lines, *run.texts)})
    asked = (
        f"streams: {streams}, each a haystack of {suite.prompt_tokens} tokens and "
        f"{decode.tokens} that are decoded after it, in stretches of {decode.every}"
    )
    lines = head(run, asked, "haystack", "seeds and askings averaged first", plots)
    for kind in kinds(run):
        lines += ["", f"## {_capital(kind.title)}"]
        if kind != TEXT:
            lines += ["", since_told(run, kind)]
        own = replace(run, lines=of_kind(run, kind))
        for measure, title in kind.measures.items():
            lines += ["", f"### {_capital(title)}", ""]
            lines += render_table(step_table(run, kind, measure))
        for other, (measure, title) in itertools.product(references(run), kind.measures.items()):
            lines += ["", f"### {_capital(title)}, all steps, minus {run.shown(other)}", ""]
            lines += render_table(paired(own, DECODE, measure, other))
    return "\n".join(lines) + "\n"


def as_json(run: Run) -> str:
    """Every cell with its interval, and what the run was."""
    cells = []
    for kind, (method, budget) in itertools.product(kinds(run), rows(run)):
        named = {"kind": kind.name, "policy": method.policy, "allocator": method.allocator}
        told: dict[str, Any] = {**named, "budget": budget}
        own = replace(run, lines=of_kind(run, kind))
        for measure in kind.measures:
            ours = by_question(own.pick(DECODE, method, budget), measure)
            told[measure] = vars(mean(ours))
            for other in references(run):
                if other != method:
                    theirs = by_question(own.pick(DECODE, other, budget), measure)
                    told[f"{measure} minus {other.label}"] = vars(difference(ours, theirs))
            told[f"{measure} by step"] = [
                {"start": c.start, "end": c.end, "since": c.since, **vars(c.found)}
                for c in against_steps(run, kind, method, budget, measure)
            ]
        cells.append(told)
    return written(run, cells)


def summary(run: Run) -> str:
    """What the command prints: of each kind the measure that is plotted."""
    lines = []
    for kind in kinds(run):
        lines += ["", f"{_capital(kind.title)}: {kind.measures[kind.shown]}", ""]
        lines += render_table(step_table(run, kind, kind.shown))
    return "\n".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
