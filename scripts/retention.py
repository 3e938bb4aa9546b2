#!/usr/bin/env python3
"""docs/retention.md: every policy on the same questions, and what each part of Nexus Sampling does.

    scripts/prepare_texts.py                           # once: the essays
    scripts/retention.py list                          # the studies and their commands
    scripts/retention.py run STUDY ... --out DIR       # a study that was stopped goes on
    scripts/retention.py report [STUDY ...] --out DIR  # tables of the studies that are in DIR

A study is one run of `nexus-vllm eval` (docs/evaluation.md), in DIR/STUDY, and where kvpress is
asked the same questions one of scripts/peers.py, in DIR/STUDY/peers. `report` writes its table
between two marks in docs/retention.md, which hold nothing else; a figure to
docs/retention/STUDY.svg; and what the run was (machine, versions, seeds, command) with every cell
to docs/retention/STUDY.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from prepare_model import default_cache_dir

from nexus_vllm.config import Settings
from nexus_vllm.policies import POLICIES
from nexus_vllm.tools import eval_plots, eval_streams
from nexus_vllm.tools.bench_plots import COLOURS, GREY, STYLE, installed
from nexus_vllm.tools.bench_report import Table, finite, render_table
from nexus_vllm.tools.bench_servers import run_command
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_report import Interval, Line, Run, by_question, difference, mean
from nexus_vllm.tools.eval_results import lines_so_far
from nexus_vllm.tools.eval_suite import load

ROOT = Path(__file__).resolve().parent.parent
SMOL, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"
STUDIES = ROOT / "configs" / "studies"
DOCUMENT = ROOT / "docs" / "retention.md"
SHORT = {"in-window": "inside", "later": "later"}

Cell = tuple[str, str]  # setting, budget
ASKED = ("setting", "policy", "allocator", "budget")


@dataclass(frozen=True)
class Study:
    """One run of `nexus-vllm eval`.

    config: a file in configs/studies; with `variants`, they are asked for beside `nexus`: `only`
      these, or all.
    peers: options of scripts/peers.py, where kvpress is asked the same.
    """

    model: str
    suite: str
    options: tuple[str, ...]
    config: str | None = None
    only: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None

    @property
    def work(self) -> list[str]:
        """Model and suite, as both tools take them."""
        return [str(default_cache_dir() / self.model), "--suite", self.suite]

    def command(self, out: Path) -> list[str]:
        told = ["nexus-vllm", "eval", *self.work, "--out", str(out), *self.options]
        if self.config:
            source = STUDIES / self.config
            told += ["--kv-eviction-config", str(source.relative_to(ROOT))]
            told += ["--policies", ",".join(self.variants)]
        return told

    @property
    def variants(self) -> list[str]:
        """What is asked for of `config`, in its order."""
        if self.config is None:
            return []
        known = Settings.from_source(str(STUDIES / self.config)).variants
        return ["nexus", *(name for name in known if name in (self.only or known))]

    def commands(self, out: Path) -> list[list[str]]:
        """All that a study is made of."""
        made = [self.command(out)]
        if self.peers is not None:
            told = ["scripts/peers.py", *self.work, "--out", str(out / "peers"), *self.peers]
            made.append([sys.executable, *told])
        return made


ONCE = [name for name, policy in POLICIES.items() if not policy.needs_replay]
"""Policies that compute each prompt once."""
BOTH = ("--budgets", "20%,10%")
LU = ("--allocators", "lu", *BOTH)
FEW = (
    *("--policies", "nexus,snapkv,cake,expected-attention,knorm,keydiff,streaming-llm"),
    *("--allocators", "uniform,lu", *BOTH),
)
ASKED_OF_PRIOR = (
    *("no-prior", "knorm-0.3", "knorm-0.7", "keydiff-0.3", "keydiff-0.7"),
    *("recency-2", "sink-0", "max-rows", "max-heads", "max-both", "topk"),
)
OF = {
    "quick": Study(SMOL, "quick", ()),
    "policies": Study(
        SMOL,
        "retention",
        ("--allocators", "uniform,lu", *BOTH),
        peers=BOTH,
    ),
    "policies-large": Study(
        QWEN,
        "retention-large",
        ("--policies", ",".join(ONCE), "--allocators", "uniform,lu", *BOTH),
        peers=BOTH,
    ),
    "policies-4k": Study(SMOL, "retention", (*FEW, "--prompt-tokens", "4096", "--limit", "20")),
    "policies-7k": Study(SMOL, "retention", (*FEW, "--prompt-tokens", "7168", "--limit", "5")),
    "policies-large-4k": Study(
        QWEN, "retention-large", (*FEW, "--prompt-tokens", "4096", "--limit", "10")
    ),
    "policies-large-7k": Study(
        QWEN,
        "retention-large",
        (
            *("--policies", "nexus,snapkv,cake,keydiff", "--allocators", "uniform,lu", *BOTH),
            *("--prompt-tokens", "7168", "--limit", "4"),
        ),
    ),
    "kvzip-large": Study(
        QWEN,
        "retention-large",
        (
            *("--policies", "nexus,kvzip,keydiff", "--allocators", "uniform,lu,global"),
            *("--settings", "later", *BOTH),
        ),
    ),
    "allocators": Study(
        SMOL,
        "retention",
        (
            *("--policies", "nexus,snapkv,knorm"),
            *("--allocators", "uniform,per-head,pyramid,ada,cake,global,lu"),
            *(*BOTH, "--limit", "20"),
        ),
    ),
    "prior": Study(SMOL, "retention", LU, config="prior.yaml", only=ASKED_OF_PRIOR),
    "prior-large": Study(QWEN, "retention-large", LU, config="prior.yaml", only=ASKED_OF_PRIOR),
    "ablation": Study(
        SMOL, "retention", ("--allocators", "uniform,lu", *BOTH), config="ablation.yaml"
    ),
    "events": Study(
        SMOL,
        "retention",
        ("--allocators", "lu", "--budgets", "10%", "--settings", "later", "--limit", "20"),
        config="events.yaml",
    ),
    "long-decode": Study(
        SMOL,
        "long-decode",
        ("--policies", "nexus,streaming-llm", "--allocators", "uniform,lu"),
    ),
}


@dataclass(frozen=True)
class Results:
    """What a study has found. `cells`: (setting, budget) pairs, in the order of the tables."""

    lines: Sequence[Line]
    cells: Sequence[Cell]
    told: dict[str, str]

    @classmethod
    def read(cls, folder: Path, order: Sequence[str] = ()) -> Results:
        """Of a study's folder: the results that its last report is of, policies in this order.

        Those of folders in it are added: `peers`, or a run of other policies.
        """
        report = json.loads((folder / "eval.json").read_text())
        told = {tuple(cell[key] for key in ASKED) for cell in report["cells"]}
        lines = [
            line
            for line in lines_so_far(folder / "results.jsonl")
            if line["policy"] == FULL.policy or tuple(line[key] for key in ASKED) in told
        ]
        place = {name: at for at, name in enumerate(order)}
        lines.sort(key=lambda line: place.get(line["policy"], -1))
        for more in sorted(folder.glob("*/results.jsonl")):
            _check_same(folder, more.parent)
            lines += [line for line in lines_so_far(more) if line["policy"] != FULL.policy]
        asked = {(cell["setting"], cell["budget"]): None for cell in report["cells"]}
        cells = [cell for cell in asked if cell[1] != "full"]
        return cls(lines, cells, report["told"])

    @property
    def methods(self) -> list[Method]:
        """All with results, the full cache first."""
        found = dict.fromkeys(Method(line["policy"], line["allocator"]) for line in self.lines)
        return [FULL, *(method for method in found if method != FULL)]

    def values(
        self, method: Method, measure: str, cells: Sequence[Cell]
    ) -> dict[tuple[int, int], float]:
        """By question, the mean over these cells; of the questions that have them all."""
        parts = [by_question(self.pick(method, cell), measure) for cell in cells]
        common = [asked for asked in parts[0] if all(asked in part for part in parts)]
        return {asked: sum(part[asked] for part in parts) / len(parts) for asked in common}

    def pick(self, method: Method, cell: Cell) -> list[Line]:
        own = [
            line
            for line in self.lines
            if (line["policy"], line["allocator"]) == (method.policy, method.allocator)
        ]
        if method == FULL:
            return own
        return [line for line in own if (line["setting"], line["budget"]) == cell]

    def mean(self, method: Method, measure: str, cells: Sequence[Cell]) -> Interval:
        return mean(self.values(method, measure, cells))

    def minus(self, method: Method, other: Method, measure: str, cells: Sequence[Cell]) -> Interval:
        """Paired by question."""
        ours, theirs = (self.values(m, measure, cells) for m in (method, other))
        return difference(ours, theirs)


def _check_same(ours: Path, theirs: Path) -> None:
    """Raise ValueError where the two folders are not of the same questions and model."""
    one, other = (json.loads((folder / "run.json").read_text()) for folder in (ours, theirs))
    for key in ("suite", "model"):
        if one.get(key) != other.get(key):
            raise ValueError(
                f"{theirs} is of {key} {other.get(key)}, {ours} of {one.get(key)}: remove the one "
                "that is older, and run the study again"
            )


def whole_table(found: Results) -> Table:
    """A row for each method, the best first: score in each cell, then the mean of all cells."""
    names = [f"{SHORT[setting]} {budget}" for setting, budget in found.cells]
    made = Table(["policy, allocator", *names, "mean", "log-probability"])
    for method in ranked(found):
        cells = [_short(found.mean(method, "score", [cell])) for cell in found.cells]
        score = found.mean(method, "score", found.cells)
        logprob = found.mean(method, "logprob", found.cells)
        made.rows.append([method.label, *cells, str(score), _short(logprob)])
    return made


BRIEF = {"policies": "SmolLM2-135M", "policies-large": "Qwen2.5-Coder-0.5B"}
"""Studies of the table that comes first, and their models."""
TOLD = ("nexus", "snapkv", "cake", "knorm", "keydiff", "streaming-llm", "random")


def brief_table(founds: Sequence[tuple[str, Results]]) -> Table:
    """A row for each method of TOLD, and the best press: each model's score by setting, as means
    of its budgets."""
    columns = [
        (f"{model}, {SHORT[setting]}", found, [c for c in found.cells if c[0] == setting])
        for model, found in founds
        for setting in dict.fromkeys(setting for setting, _ in found.cells)
    ]
    told = [FULL, *(Method(name, how) for how in ("lu", "uniform") for name in TOLD)]
    made = Table(["policy, allocator", *(title for title, _, _ in columns)])
    for method in told:
        cells = [_short(found.mean(method, "score", cells)) for _, found, cells in columns]
        made.rows.append([method.label, *cells])
    best = [
        max(
            (found.mean(m, "score", cells) for m in presses(found)), key=lambda i: (i.n > 0, i.mean)
        )
        for _, found, cells in columns
    ]
    made.rows.append(["the best press of kvpress in each column", *map(_short, best)])
    return made


def presses(found: Results) -> list[Method]:
    return [method for method in found.methods if method.policy.startswith("kvpress:")]


def ranked(found: Results) -> list[Method]:
    """The full cache, then the best first; last what was not asked everything."""
    full, *others = found.methods
    means = {method: found.mean(method, "score", found.cells) for method in others}
    others.sort(key=lambda method: -means[method].mean if means[method].n else 1)
    return [full, *others]


def _short(interval: Interval) -> str:
    return f"{interval.mean:.2f}" if interval.n else "-"


def parts_table(found: Results) -> Table:
    """A row for each variant: what it changes against `nexus` with the same allocator."""
    told = changes(found)
    made = Table(["variant", "allocator", "score", *(f"{title}, minus" for title, _, _ in told)])
    for method in found.methods[1:]:
        same = Method("nexus", method.allocator)
        row = [method.policy, method.allocator, str(found.mean(method, "score", found.cells))]
        for _, measure, cells in told:
            minus = found.minus(method, same, measure, cells)
            row.append("-" if method == same else minus.signed())
        made.rows.append(row)
    return made


def changes(found: Results) -> list[tuple[str, str, list[Cell]]]:
    """What is told of a variant against `nexus`: title, measure and cells."""
    made = [("score", "score", list(found.cells))]
    for setting in dict.fromkeys(setting for setting, _ in found.cells):
        cells = [cell for cell in found.cells if cell[0] == setting]
        made.append((f"log-probability {SHORT[setting]}", "logprob", cells))
    return made


def draw_whole(found: Results, path: Path) -> None:
    """A panel for each cell: a row for each policy, the best first, a dot for each allocator."""
    methods = ranked(found)[1:]
    rows = list(dict.fromkeys(method.policy for method in methods))
    panels = [
        (f"{SHORT[setting]}, {budget}", found.mean(FULL, "score", [(setting, budget)]).mean)
        for setting, budget in found.cells
    ]

    def dot(column: int, method: Method) -> Interval:
        return found.mean(method, "score", [found.cells[column]])

    _draw(panels, rows, methods, dot, "score; grey: the full cache", path)


def draw_parts(found: Results, path: Path) -> None:
    """A panel for each column of `parts_table`: a row for each variant, a dot per allocator."""
    told = changes(found)
    methods = [method for method in found.methods[1:] if method.policy != "nexus"]
    rows = list(dict.fromkeys(method.policy for method in methods))

    def dot(column: int, method: Method) -> Interval:
        _, measure, cells = told[column]
        return found.minus(method, Method("nexus", method.allocator), measure, cells)

    panels = [(title, 0.0) for title, _, _ in told]
    _draw(panels, rows, methods, dot, "minus nexus with the same allocator", path)


def _draw(
    panels: Sequence[tuple[str, float]],
    rows: Sequence[str],
    methods: Sequence[Method],
    dot: Callable[[int, Method], Interval],
    x: str,
    path: Path,
) -> None:
    """Dots with 95 % intervals. panels: title, and where a grey line stands."""
    from matplotlib import style
    from matplotlib.figure import Figure

    allocators = list(dict.fromkeys(method.allocator for method in methods))
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(2 + 2 * len(panels), 1 + 0.24 * len(rows)), layout="constrained")
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for column, (axes, (title, line)) in enumerate(zip(grid, panels, strict=True)):
            axes.axvline(line, color=GREY, linewidth=0.8)
            for index, allocator in enumerate(allocators):
                shift = 0.5 * ((index + 0.5) / len(allocators) - 0.5)
                own = [m for m in methods if m.allocator == allocator]
                told = [(rows.index(m.policy) + shift, dot(column, m)) for m in own]
                told = [(place, interval) for place, interval in told if interval.n]
                mean_of = [interval.mean for _, interval in told]
                ends = [
                    [interval.mean - interval.low for _, interval in told],
                    [interval.high - interval.mean for _, interval in told],
                ]
                look = {"color": COLOURS[index % len(COLOURS)], "elinewidth": 0.8}
                axes.errorbar(
                    mean_of, [p for p, _ in told], xerr=ends, fmt="o", label=allocator, **look
                )
            axes.set_title(title)
        grid[0].set_yticks(range(len(rows)), rows)
        grid[0].invert_yaxis()
        figure.supxlabel(x, fontsize=9)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=8)
        metadata = {"Title": path.stem, "Date": None, "Creator": None}
        figure.savefig(path, format="svg", metadata=metadata)


PARTS = [name for name, study in OF.items() if study.config]
"""Studies of what single changes do."""


def as_json(found: Results) -> str:
    """Every cell, and what the run was."""
    rows = []
    for method in found.methods:
        for cell in found.cells if method != FULL else found.cells[:1]:
            told: dict[str, Any] = {"policy": method.policy, "allocator": method.allocator}
            told |= {"setting": cell[0], "budget": cell[1]} if method != FULL else {}
            for measure in ("score", "logprob"):
                interval = found.mean(method, measure, [cell])
                numbers = (interval.mean, interval.low, interval.high)
                told |= {measure: [round(number, 4) for number in numbers], "n": interval.n}
            rows.append(json.dumps(finite(told)))
    cells = ",\n  ".join(rows)
    return f'{{"told": {json.dumps(found.told)},\n "cells": [\n  {cells}\n ]}}\n'


def written(document: str, name: str, text: str) -> str:
    """The document with this between the marks of that name. Raises ValueError without marks."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not marks.search(document):
        raise ValueError(f"{DOCUMENT.name} has no marks <!-- {name} --> and <!-- /{name} -->")
    return marks.sub(lambda m: f"{m[1]}{text}{m[2]}", document)


def section(name: str, found: Results, folder: Path) -> str:
    """What the report says of one study, and its figure."""
    parts = name in PARTS
    (draw_parts if parts else draw_whole)(found, folder / f"{name}.svg")
    haystacks = len({line["sample"] for line in found.lines})
    counted = f"{_questions(found)} questions a cell about {haystacks} haystacks"
    table = (parts_table if parts else whole_table)(found)
    return _section(name, found.told, counted, render_table(table))


def _questions(found: Results) -> str:
    """How many questions a cell has; from how many to how many, where a run is not through."""
    sizes = {len(found.values(m, "score", [cell])) for m in found.methods for cell in found.cells}
    fewest, most = min(sizes - {0}, default=0), max(sizes)
    return str(most) if fewest == most else f"{fewest} to {most}"


def stream_section(name: str, study: Study, out: Path, folder: Path) -> str:
    """The same of a study that decodes."""
    report = json.loads((out / "eval.json").read_text())
    lines = lines_so_far(out / "results.jsonl")
    run = Run(
        suite=load(study.suite),
        lines=eval_streams.askings(lines),
        texts=eval_streams.passages(lines),
        budgets=list(dict.fromkeys(c["budget"] for c in report["cells"] if c["budget"] != "full")),
        baseline=Method("nexus", "uniform"),
        told=report["told"],
    )
    (plot,) = eval_plots.draw_streams(run, folder)
    (folder / plot.file).rename(folder / f"{name}.svg")
    shown = []
    for kind in eval_streams.kinds(run):
        shown += [f"**{kind.title.capitalize()}**: {kind.measures[kind.shown]}.", ""]
        shown += [*render_table(eval_streams.step_table(run, kind, kind.shown)), ""]
    counted = f"{len({line['sample'] for line in lines})} streams"
    return _section(name, report["told"], counted, shown[:-1])


def _section(name: str, told: dict[str, str], counted: str, table: Sequence[str]) -> str:
    lines = [
        f"{counted}; {told['machine']}; {told['versions']}; seeds {told['seeds']}. "
        f"Every cell: [{name}.json](retention/{name}.json).",
        "",
        f"![{name}](retention/{name}.svg)",
        "",
        *table,
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def report(out: Path, studies: Sequence[str]) -> None:
    document, folder = DOCUMENT.read_text(), DOCUMENT.parent / "retention"
    folder.mkdir(exist_ok=True)
    for name in studies:
        study, told = OF[name], out / name / "eval.json"
        # A run that was stopped in the full cache has a report without a cell.
        if not told.is_file() or not json.loads(told.read_text())["cells"]:
            print(f"{name}: no report in {out / name}, left as it is", file=sys.stderr)
            continue
        if load(study.suite).decode:
            text = stream_section(name, study, out / name, folder)
            cells = (out / name / "eval.json").read_text()
        else:
            found = Results.read(out / name, study.variants)
            text, cells = section(name, found, folder), as_json(found)
        document = written(document, name, text)
        (folder / f"{name}.json").write_text(cells)
    if all((out / name / "eval.json").is_file() for name in BRIEF):
        founds = [(model, Results.read(out / name)) for name, model in BRIEF.items()]
        text = "\n".join(["", *render_table(brief_table(founds)), "", ""])
        document = written(document, "brief", text)
    DOCUMENT.write_text(document)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "run", "report"))
    parser.add_argument("study", nargs="*", choices=(*OF, []), metavar="STUDY", help=", ".join(OF))
    parser.add_argument("--out", type=Path, default=Path("retention"), metavar="DIR")
    args = parser.parse_args()
    return run_command("retention", lambda: run(args), "stopped; `run` goes on from here")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises RuntimeError where a study ends with an error."""
    studies = list(args.study or OF)
    if args.what == "list":
        for name in studies:
            for command in OF[name].commands(args.out / name):
                print(f"{name}: {shlex.join(command)}")
    elif args.what == "run":
        for name in studies:
            for command in OF[name].commands(args.out.resolve() / name):
                if status := subprocess.run(command, check=False, cwd=ROOT).returncode:
                    raise RuntimeError(f"{name}: {command[0]} ended with status {status}")
    elif installed():  # says so itself where there is no matplotlib
        report(args.out, studies)
    else:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
