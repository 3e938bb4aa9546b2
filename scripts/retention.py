#!/usr/bin/env python3
"""docs/retention.md: every policy on the same questions, and what each part of Nexus Sampling does.

    scripts/prepare_texts.py                      # once: the essays
    scripts/retention.py list                     # the studies and their commands, in this clone
    scripts/retention.py run STUDY ... --out DIR  # a study that was stopped goes on
    scripts/retention.py report --out DIR         # tables of the studies that are in DIR

A study is one run of `nexus-vllm eval` (docs/evaluation.md), in DIR/STUDY. `report` writes its
table between two marks in docs/retention.md, which hold nothing else, and what the run was
(machine, versions, seeds, command) with every cell to docs/retention/STUDY.json. Results of another
tool on the same questions (scripts/peers.py) are read from DIR/STUDY/peers.jsonl, if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from prepare_model import default_cache_dir

from nexus_vllm.config import Settings
from nexus_vllm.tools.bench_report import Table, render_table
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_report import Interval, Line, by_question, difference, mean

ROOT = Path(__file__).resolve().parent.parent
SMOL = "smollm2-135m-instruct"
STUDIES = ROOT / "configs" / "studies"
DOCUMENT = ROOT / "docs" / "retention.md"
SHORT = {"in-window": "inside", "later": "later"}

Cell = tuple[str, str]  # setting, budget
ASKED = ("setting", "policy", "allocator", "budget")


@dataclass(frozen=True)
class Study:
    """One run of `nexus-vllm eval`. `config`: a file in configs/studies, whose variants are asked
    for."""

    model: str
    suite: str
    options: tuple[str, ...]
    config: str | None = None

    def command(self, out: Path) -> list[str]:
        told = ["nexus-vllm", "eval", str(default_cache_dir() / self.model)]
        told += ["--suite", self.suite, "--out", str(out), *self.options]
        if self.config:
            source = STUDIES / self.config
            names = ["nexus", *Settings.from_source(str(source)).variants]
            told += ["--kv-eviction-config", str(source.relative_to(ROOT))]
            told += ["--policies", ",".join(names)]
        return told


OF = {
    "quick": Study(SMOL, "quick", ()),
    "ablation": Study(
        SMOL,
        "retention",
        ("--allocators", "uniform,lu", "--budgets", "20%,10%"),
        config="ablation.yaml",
    ),
    "policies": Study(
        SMOL, "retention", ("--allocators", "uniform,per-head,lu", "--budgets", "20%,10%")
    ),
    "allocators": Study(
        SMOL,
        "retention",
        (
            *("--policies", "nexus,snapkv,expected-attention"),
            *("--allocators", "uniform,per-head,pyramid,ada,cake,global,lu"),
            *("--budgets", "20%,10%"),
        ),
    ),
}


@dataclass(frozen=True)
class Results:
    """What a study has found. `cells`: (setting, budget) pairs, in the order of the tables."""

    lines: Sequence[Line]
    cells: Sequence[Cell]
    told: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Of a study's folder: the results that its last report is of."""
        report = json.loads((folder / "eval.json").read_text())
        told = {tuple(cell[key] for key in ASKED) for cell in report["cells"]}
        lines = [json.loads(line) for line in (folder / "results.jsonl").open()]
        lines = [
            line
            for line in lines
            if line["policy"] == FULL.policy or tuple(line[key] for key in ASKED) in told
        ]
        peers = folder / "peers.jsonl"
        if peers.is_file():
            lines += [json.loads(line) for line in peers.open()]
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


def whole_table(found: Results) -> Table:
    """A row for each method, the best first: score in each cell, then the mean of all cells."""
    names = [f"{SHORT[setting]} {budget}" for setting, budget in found.cells]
    made = Table(["policy, allocator", *names, "mean", "log-probability"])
    full, *others = found.methods
    others.sort(key=lambda method: -found.mean(method, "score", found.cells).mean)
    for method in (full, *others):
        cells = [f"{found.mean(method, 'score', [cell]).mean:.2f}" for cell in found.cells]
        score = found.mean(method, "score", found.cells)
        logprob = found.mean(method, "logprob", found.cells)
        made.rows.append([method.label, *cells, str(score), f"{logprob.mean:.2f}"])
    return made


def parts_table(found: Results) -> Table:
    """A row for each variant: what it changes against `nexus` with the same allocator."""
    settings = list(dict.fromkeys(setting for setting, _ in found.cells))
    heads = [f"log-probability {SHORT[setting]}, minus" for setting in settings]
    made = Table(["variant", "allocator", "score", "score, minus", *heads])
    for method in found.methods[1:]:
        same = Method("nexus", method.allocator)
        row = [method.policy, method.allocator, str(found.mean(method, "score", found.cells))]
        if method == same:
            row += ["-"] * (1 + len(settings))
        else:
            row.append(found.minus(method, same, "score", found.cells).signed())
            for setting in settings:
                cells = [cell for cell in found.cells if cell[0] == setting]
                row.append(found.minus(method, same, "logprob", cells).signed())
        made.rows.append(row)
    return made


TABLES: dict[str, Callable[[Results], Table]] = {"ablation": parts_table}


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
            rows.append(json.dumps(told))
    cells = ",\n  ".join(rows)
    return f'{{"told": {json.dumps(found.told)},\n "cells": [\n  {cells}\n ]}}\n'


def written(document: str, name: str, text: str) -> str:
    """The document with this between the marks of that name. Raises ValueError without marks."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not marks.search(document):
        raise ValueError(f"{DOCUMENT.name} has no marks <!-- {name} --> and <!-- /{name} -->")
    return marks.sub(lambda m: f"{m[1]}{text}{m[2]}", document)


def section(name: str, found: Results) -> str:
    """What the report says of one study."""
    asked = {(line["sample"], line["question"]) for line in found.lines}
    lines = [
        f"{len(asked)} questions a cell about {len({sample for sample, _ in asked})} haystacks; "
        f"{found.told['machine']}; {found.told['versions']}; seeds {found.told['seeds']}. "
        f"Every cell: [{name}.json](retention/{name}.json).",
        "",
        *render_table(TABLES.get(name, whole_table)(found)),
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def report(out: Path) -> None:
    document, folder = DOCUMENT.read_text(), DOCUMENT.parent / "retention"
    folder.mkdir(exist_ok=True)
    for name in OF:
        if not (out / name / "eval.json").is_file():
            print(f"{name}: no report in {out / name}, left as it is", file=sys.stderr)
            continue
        found = Results.read(out / name)
        document = written(document, name, section(name, found))
        (folder / f"{name}.json").write_text(as_json(found))
    DOCUMENT.write_text(document)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "run", "report"))
    parser.add_argument("study", nargs="*", choices=(*OF, []), metavar="STUDY", help=", ".join(OF))
    parser.add_argument("--out", type=Path, default=Path("retention"), metavar="DIR")
    args = parser.parse_args()
    if args.what == "list":
        for name, study in OF.items():
            print(f"{name}: {' '.join(study.command(args.out / name))}")
    elif args.what == "run":
        for name in args.study or OF:
            subprocess.run(OF[name].command(args.out.resolve() / name), check=True, cwd=ROOT)
    else:
        report(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
