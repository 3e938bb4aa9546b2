"""The pure side of `nexus-vllm eval`: means, intervals, differences, and the report as Markdown."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nexus_vllm.tools.bench_report import Plot, Table, finite, render_table
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_suite import Suite

RESAMPLES = 2000
FEWEST = 8  # questions: with fewer a bootstrap interval is too narrow to be believed
MEASURES = {
    "score": "score (exact match, or share of the items)",
    "accuracy": "token accuracy",
    "logprob": "log-probability per answer token",
}
PAIRED = ("score", "logprob")

Line = Mapping[str, Any]
Asked = tuple[int, int]  # sample, question


@dataclass(frozen=True)
class Interval:
    """A mean over `n` questions, and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if not self.n:
            return "-"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def signed(self) -> str:
        """For a difference; in bold where the interval leaves 0 out, from FEWEST questions on."""
        if not self.n:
            return "-"
        text = f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"
        sure = self.n >= FEWEST and (self.low > 0 or self.high < 0)
        return f"**{text}**" if sure else text


def bootstrap(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Percentiles 2.5 and 97.5 of the means of `resamples` draws with replacement.

    The same seed and number of values give the same draws, so that two methods on the same
    questions meet the same ones.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan, 0)
    told = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(told), (resamples, len(told)))
    low, high = np.percentile(told[draws].mean(axis=1), (2.5, 97.5))
    return Interval(float(told.mean()), float(low), float(high), len(told))


def measured(line: Line, measure: str) -> float | None:
    """One measure of one result; None where it has none."""
    if measure == "score":
        return float(line["score"])
    if not line["tokens"]:
        return None
    if measure == "accuracy":
        return float(line["right"] / line["tokens"]) if line["whole"] else None
    return None if line["logprob"] is None else float(line["logprob"] / line["tokens"])


def by_question(lines: Iterable[Line], measure: str) -> dict[Asked, float]:
    """Means over seeds, by question."""
    found: dict[Asked, list[float]] = {}
    for line in lines:
        value = measured(line, measure)
        if value is not None:
            found.setdefault((line["sample"], line["question"]), []).append(value)
    return {asked: sum(values) / len(values) for asked, values in sorted(found.items())}


def mean(values: Mapping[Asked, float], seed: int = 0) -> Interval:
    return bootstrap(list(values.values()), seed)


def difference(
    ours: Mapping[Asked, float], other: Mapping[Asked, float], seed: int = 0
) -> Interval:
    """Mean of ours - other over the questions that both have: a question is resampled with both."""
    common = [asked for asked in ours if asked in other]
    return bootstrap([ours[asked] - other[asked] for asked in common], seed)


@dataclass
class Run:
    """Everything the report tells.

    `lines`: of results.jsonl; of streams a line for each asking, and `texts`, one for each passage
    (nexus_vllm.tools.eval_streams).
    """

    suite: Suite
    lines: Sequence[Line]
    budgets: Sequence[str]
    baseline: Method
    told: Mapping[str, str]
    """Machine, versions, model, commands, seeds."""
    failures: Sequence[str] = ()
    passes: Sequence[Mapping[str, Any]] = ()
    """For each haystack of each start: its server, requests and seconds, and prompt tokens: asked,
    found cached, and to be expected there."""
    texts: Sequence[Line] = ()

    def pick(self, setting: str, method: Method, budget: str) -> list[Line]:
        if method == FULL:
            return [line for line in self.lines if line["policy"] == FULL.policy]
        return [
            line
            for line in self.lines
            if (line["setting"], line["policy"], line["allocator"], line["budget"])
            == (setting, method.policy, method.allocator, budget)
        ]

    def methods(self) -> list[Method]:
        """Those with results, in the order in which they came; without the full cache."""
        lines = itertools.chain(self.lines, self.texts)
        found = (Method(line["policy"], line["allocator"]) for line in lines)
        return [method for method in dict.fromkeys(found) if method.policy != FULL.policy]

    def settings(self) -> list[str]:
        return [s for s in self.suite.modes if any(line["setting"] == s for line in self.lines)]

    def shown(self, method: Method) -> str:
        """Its label; what `auto` came to, if it was always the same."""
        if method.allocator != "auto":
            return method.label
        own = (method.policy, method.allocator)
        lines = itertools.chain(self.lines, self.texts)
        served = {line["served"] for line in lines if (line["policy"], line["allocator"]) == own}
        return f"{method.label} ({min(served)})" if len(served) == 1 else method.label


def table(run: Run, setting: str, measure: str) -> Table:
    """Rows: policy and allocator; columns: budgets."""
    made = Table(["policy, allocator", *run.budgets])
    for method in (FULL, *run.methods()):
        cells = (mean(by_question(run.pick(setting, method, b), measure)) for b in run.budgets)
        made.rows.append([run.shown(method), *map(str, cells)])
    return made


def paired(run: Run, setting: str, measure: str, other: Method) -> Table:
    """As `table`, minus the other method at the same budget."""
    made = Table([f"minus {run.shown(other)}", *run.budgets])
    for method in run.methods():
        if method != other:
            cells = [
                difference(
                    by_question(run.pick(setting, method, budget), measure),
                    by_question(run.pick(setting, other, budget), measure),
                ).signed()
                for budget in run.budgets
            ]
            made.rows.append([run.shown(method), *cells])
    return made


def by_task(run: Run, setting: str) -> Table:
    """Mean score of each task."""
    tasks = list(dict.fromkeys(line["task"] for line in run.lines))
    made = Table(["policy, allocator", "budget", *tasks])
    rows = [(FULL, "full"), *itertools.product(run.methods(), run.budgets)]
    for method, budget in rows:
        lines = run.pick(setting, method, budget)
        scores = [
            mean(by_question((line for line in lines if line["task"] == task), "score"))
            for task in tasks
        ]
        shown = (f"{s.mean:.2f} ({s.n})" if s.n else "-" for s in scores)
        made.rows.append([run.shown(method), budget, *shown])
    return made


def references(run: Run) -> list[Method]:
    """What others are compared with: the baseline, if it was measured, and the full cache."""
    return [*([run.baseline] if run.baseline in run.methods() else []), FULL]


def render(run: Run, plots: Sequence[Plot] = ()) -> str:
    """The report as Markdown."""
    done = {(line["sample"], line["question"]) for line in run.lines}
    asked = (
        f"questions: {len(done)} about {len({sample for sample, _ in done})} haystacks of "
        f"{run.suite.prompt_tokens} tokens"
    )
    lines = head(run, asked, "question", "seeds averaged first", plots)
    for setting in run.settings():
        lines += ["", f"## Question {'in the window' if setting == 'in-window' else 'later'}"]
        for measure, title in MEASURES.items():
            lines += ["", f"### {title[:1].upper()}{title[1:]}", ""]
            lines += render_table(table(run, setting, measure))
        for other, measure in itertools.product(references(run), PAIRED):
            title = MEASURES[measure].partition(" (")[0].capitalize()
            lines += ["", f"### {title}, minus {run.shown(other)}", ""]
            lines += render_table(paired(run, setting, measure, other))
        lines += ["", "### Score by task (questions)", ""]
        lines += render_table(by_task(run, setting))
    return "\n".join(lines) + "\n"


def head(run: Run, asked: str, unit: str, averaged: str, plots: Sequence[Plot]) -> list[str]:
    """What comes before the tables. `unit`: what is resampled; `averaged`: what before that."""
    suite = run.suite
    lines = [f"# Suite {suite.name}", "", f"{suite.about[:1].upper()}{suite.about[1:]}.", ""]
    lines += [f"- {key}: {value}" for key, value in run.told.items()]
    lines += [f"- {note}" for note in (asked, *_notes(run))]
    if run.failures:
        lines += ["", f"**{len(run.failures)} requests failed**", ""]
        lines += [f"- {text}" for text in run.failures[:10]]
    lines += [
        "",
        f"Cells: mean over {unit}s, {averaged}, and a 95 % interval: percentiles of {RESAMPLES} "
        f"bootstrap means, {unit}s resampled, seeded. Differences are paired by {unit}; bold where "
        f"the interval leaves 0 out and there are {FEWEST} {unit}s or more. "
        "How: docs/evaluation.md.",
    ]
    for plot in plots:
        lines += ["", f"![{plot.caption}]({plot.file})"]
    return lines


def _notes(run: Run) -> list[str]:
    notes = []
    if run.passes:
        notes += [f"server: {name}" for name in dict.fromkeys(p["server"] for p in run.passes)]
        requests, seconds = (sum(p[key] for p in run.passes) for key in ("requests", "seconds"))
        notes.append(f"{requests} requests in {seconds:.0f} s, starts of servers not counted")
        asked, found, due = (sum(p[key] for p in run.passes) for key in ("asked", "found", "due"))
        if due:
            notes.append(
                f"prefix cache: {found:.0f} of {asked:.0f} prompt tokens found in it, at least "
                f"{due:.0f} were to be"
            )
        short = [p["name"] for p in run.passes if p["found"] < p["due"]]
        if short:
            notes.append(f"**haystacks computed more than once: {', '.join(short)}**")
    later = [line["blind"] for line in run.lines if line["setting"] == "later"]
    if later:
        seen = [line for line in run.lines if line["setting"] == "later"]
        late = sum(line["end"] > line["blind"] for line in seen)
        notes.append(
            f"later: the last cut before the question at {min(later):.0%} to {max(later):.0%} of "
            f"the haystack; in {late} of {len(seen)} results the answer lay behind it"
        )
    partly = sum(not line["whole"] for line in run.lines)
    if partly:
        notes.append(
            f"{partly} answers were not forced: their log-probability ends at the first wrong "
            "token, so that it is too high (or is missing, where the model did not even end the "
            "question as asked), and they have no token accuracy"
        )
    return notes


def as_json(run: Run) -> str:
    """Every cell with its interval, and what the run was."""
    cells = []
    for setting in run.settings():
        for method, budget in [(FULL, "full"), *itertools.product(run.methods(), run.budgets)]:
            lines = run.pick(setting, method, budget)
            named = {"setting": setting, "policy": method.policy, "allocator": method.allocator}
            told: dict[str, Any] = {**named, "budget": budget, "results": len(lines)}
            for measure in MEASURES:
                own = by_question(lines, measure)
                told[measure] = vars(mean(own))
                for other in references(run) if measure in PAIRED else ():
                    if other != method:
                        theirs = by_question(run.pick(setting, other, budget), measure)
                        key = f"{measure} minus {other.label}"
                        told[key] = vars(difference(own, theirs))
            cells.append(told)
    return written(run, cells)


def written(run: Run, cells: Sequence[Mapping[str, Any]]) -> str:
    """The JSON of a report with these cells."""
    whole = {
        "suite": run.suite.model_dump(mode="json"),
        "told": dict(run.told),
        "failures": list(run.failures),
        "passes": list(run.passes),
        "cells": list(cells),
    }
    return json.dumps(finite(whole), indent=1) + "\n"


def summary(run: Run) -> str:
    """What the command prints: the score of each setting."""
    lines = []
    for setting in run.settings():
        lines += ["", f"Question {setting}: {MEASURES['score']}", ""]
        lines += render_table(table(run, setting, "score"))
    return "\n".join(lines)
