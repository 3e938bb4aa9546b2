#!/usr/bin/env python3
"""kvpress 0.5.5 on the work of `nexus-vllm eval`: same model, samples, budgets and judgement.

    scripts/peers.py MODEL --out DIR [--suite quick] [--budgets 20%,10%] [--presses NAME,...]
    scripts/peers.py MODEL --out DIR --eval EVAL   # with what `nexus-vllm eval --out EVAL` measured
    scripts/peers.py --setup                       # only make .venv-kvpress

MODEL is a model's folder (scripts/prepare_model.py prints one). kvpress needs an older transformers
than vLLM, so it has an environment of its own, made when it is missing; there
scripts/peers_kvpress.py computes. DIR gets results.jsonl, in the format of `nexus-vllm eval`, and
eval.md and eval.json, by its functions. The same command goes on where it stopped.
What is compared and how: docs/peers.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_vllm.config import Settings
from nexus_vllm.tools.bench import machine, model_folder
from nexus_vllm.tools.bench_servers import run_command, say
from nexus_vllm.tools.eval_options import check_baseline, named, natural, seeds, settings, words
from nexus_vllm.tools.eval_plan import FULL, Job, Method, budget_blocks, stages
from nexus_vllm.tools.eval_report import Run, as_json, render, summary
from nexus_vllm.tools.eval_results import (
    FIELDS,
    Results,
    key_of,
    lines_so_far,
    model_identity,
    samples_identity,
)
from nexus_vllm.tools.eval_samples import Sample, samples, tokenizing
from nexus_vllm.tools.eval_suite import BLOCK, Suite, load, suites

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers_kvpress import PRESSES

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "scripts" / "peers_kvpress.py"
LOCK = ROOT / "deploy" / "kvpress" / "requirements.lock"
ENVIRONMENT = ".venv-kvpress"
SAME = 1e-3
"""Most that a log-probability per answer token may differ between the two full caches."""


@dataclass(frozen=True)
class Plan:
    """All jobs in order, and for each the name of its press (None: the full cache)."""

    jobs: list[Job]
    press_of: Mapping[Method, str]


def plan(
    made: Sequence[Sample],
    presses: Sequence[str],
    budgets: Mapping[str, int],
    settings: Sequence[str],
    seeds: Sequence[int],
    limit: int | None,
) -> Plan:
    """Each question under each press, budget and setting; further seeds where a press draws.

    A press that does not look at the end of the prompt (later_only) is not asked in the window.
    """
    press_of = {Method(PRESSES[n].policy, PRESSES[n].allocator): n for n in presses}
    (stage,) = stages(made, list(press_of), budgets, settings, seeds, limit, own=False)

    def wanted(job: Job) -> bool:
        if job.method == FULL:
            return True
        press = PRESSES[press_of[job.method]]
        if press.later_only and job.setting != "later":
            return False
        return press.drawn or job.seed == seeds[0]

    return Plan([job for job in stage.jobs if wanted(job)], press_of)


def kept_tokens(job: Job, sample: Sample) -> int | None:
    """Tokens that `nexus-vllm eval`'s server holds after its cut: the budget's blocks, and the
    tokens after the last whole block. None for the full cache."""
    if job.blocks is None:
        return None
    total = len(sample.tokens)
    if job.setting == "in-window":
        total += len(asked(sample, job.question))
    return job.blocks * BLOCK + total % BLOCK


def asked(sample: Sample, question: int) -> tuple[int, ...]:
    """The part of a question that ends the prompt: without its last token, which is decoded, unless
    the answer is a list."""
    told = sample.questions[question]
    return told.tokens if told.items else told.tokens[:-1]


def work(
    folder: Path, made: Sequence[Sample], jobs: Sequence[Job], press_of: Mapping[Method, str]
) -> dict[str, Any]:
    """What the kvpress side is given, as JSON."""
    told: list[dict[str, Any]] = []
    for sample in made:
        questions = [
            {
                "asked": asked(sample, index),
                "lead": question.tokens[-1],
                "answer": question.answer,
                "answer_tokens": question.answer_tokens,
                "items": question.items,
                "reply_tokens": (1 + len(question.answer_tokens)) * 3 // 2 + 8,
            }
            for index, question in enumerate(sample.questions)
        ]
        told.append({"tokens": sample.tokens, "questions": questions})
    return {
        "model": str(folder),
        "samples": told,
        "jobs": [
            {
                "line": dict(zip(FIELDS, job.key, strict=True)),
                "press": press_of.get(job.method),
                "kept": kept_tokens(job, made[job.sample]),
                "about": about(job, made[job.sample]),
            }
            for job in jobs
        ],
    }


def about(job: Job, sample: Sample) -> dict[str, Any]:
    """What a line tells of its question and of the cut."""
    question = sample.questions[job.question]
    return {
        "name": sample.name,
        "task": question.task,
        "depth": round(question.depth, 4),
        "end": round(question.end, 4),
        "blind": 1.0 if job.setting == "later" else 0.0,
        "served": job.method.allocator,
    }


def merged(
    ours: Sequence[Mapping[str, Any]],
    peers: Sequence[Mapping[str, Any]],
    settings: Sequence[str],
    budgets: Sequence[str],
) -> tuple[list[Mapping[str, Any]], str]:
    """Lines of both, ours first, for these settings and budgets; and how the full caches agree.

    Only questions that both were asked. The full cache is ours. Raises ValueError where a score or
    a log-probability per token (SAME) of the two full caches differs: then a difference between
    methods would be one between programs.
    """
    full = [{_asked(x): x for x in lines if x["policy"] == FULL.policy} for lines in (ours, peers)]
    common = full[0].keys() & full[1].keys()
    if not common:
        raise ValueError("no question was asked of both full caches; use the same suite and limit")
    most = 0.0
    for key in sorted(common):
        one, other = full[0][key], full[1][key]
        if one["tokens"] and one["whole"]:
            most = max(most, abs(one["logprob"] - other["logprob"]) / one["tokens"])
        if one["score"] != other["score"] or most > SAME:
            raise ValueError(
                f"sample {key[0]}, question {key[1]}: the full caches give {_worth(one)} and "
                f"{_worth(other)}; they must agree to {SAME} per token"
            )
    told = (
        f"same scores on {len(common)} questions, log-probabilities per answer token within "
        f"{most:.1e}"
    )
    both = [*ours, *(line for line in peers if line["policy"] != FULL.policy)]

    def wanted(line: Mapping[str, Any]) -> bool:
        cell = line["setting"] in settings and line["budget"] in budgets
        return _asked(line) in common and (cell or line["policy"] == FULL.policy)

    return [line for line in both if wanted(line)], told


def _asked(line: Mapping[str, Any]) -> tuple[int, int]:
    return line["sample"], line["question"]


def _worth(line: Mapping[str, Any]) -> str:
    return f"score {line['score']}, log-probability {line['logprob']}"


def environment() -> Path:
    """The Python of .venv-kvpress, made first where it is missing or of another lock."""
    where = Path(os.environ.get("KVPRESS_ENV", ROOT / ENVIRONMENT))
    python, stamp = where / "bin" / "python", where / ".setup-stamp"
    torch = f"torch=={_pinned_torch()}"
    inputs = f"{torch}\n{LOCK.read_text()}"
    if stamp.exists() and stamp.read_text() == inputs:
        return python
    say(f"making {where.name}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(where)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    pip += ["--prefer-binary", "--no-compile", "--constraint", str(LOCK)]
    subprocess.run([*pip, torch], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "--no-deps", "-r", str(LOCK)], check=True, stdout=sys.stderr)
    stamp.write_text(inputs)
    return python


def _pinned_torch() -> str:
    for line in (ROOT / "scripts" / "setup.sh").read_text().splitlines():
        if line.startswith("TORCH_VERSION="):
            return line.partition("=")[2]
    raise RuntimeError("scripts/setup.sh names no TORCH_VERSION")


def of_questions(source: str, **changes: object) -> Suite:
    """The suite. Raises ValueError on one that decodes: a press cuts once, after the prompt."""
    suite = load(source, **changes)
    if suite.decode:
        raise ValueError(
            f"suite {suite.name!r} decodes a text, and kvpress cuts once, after the prompt: use "
            "one of questions, as quick or retention"
        )
    return suite


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises ValueError, with the remedy, for what cannot be done."""
    suite = of_questions(args.suite, prompt_tokens=args.prompt_tokens, settings=args.settings)
    if args.setup:
        print(environment())
        return 0
    if args.model is None or args.out is None:
        raise ValueError("MODEL and --out are needed, or --setup")
    for name in args.presses:
        if name not in PRESSES:
            raise ValueError(f"no press {name!r}: use {', '.join(PRESSES)}")
    folder = model_folder(args.model)
    made = samples(suite, *tokenizing(folder))
    names = args.budgets or suite.budgets
    budgets = {name: budget_blocks(name, suite.prompt_tokens, Settings()) for name in names}
    chosen = plan(made, args.presses, budgets, suite.settings, args.seeds, args.limit)
    python = environment()
    versions = _output([str(python), str(WORKER), "--versions"])
    identity = {
        "suite": samples_identity(suite, made),
        "model": model_identity(folder),
        "versions": versions,
        "code": hashlib.sha256(WORKER.read_bytes()).hexdigest()[:16],
    }
    ours = _other(args.eval, identity)[0] if args.eval else []
    compared = dict.fromkeys(Method(line["policy"], line["allocator"]) for line in ours)
    check_baseline(args.baseline, [*(m for m in compared if m != FULL), *chosen.press_of])
    results = Results(args.out, identity)
    left = [job for job in chosen.jobs if not results.has(job)]
    begun = time.monotonic()
    if left:
        todo = args.out / "work.json"
        todo.write_text(json.dumps(work(folder, made, left, chosen.press_of)))
        command = [str(python), str(WORKER), str(todo), str(results.path)]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, check=False, env=offline)
        todo.unlink()
        if done.returncode:
            raise RuntimeError(f"{WORKER.name} ended with status {done.returncode}")
        results = Results(args.out, identity)
    planned = {job.key for job in chosen.jobs}
    lines = [line for line in results.lines if key_of(line) in planned]
    told = _told(args, suite, folder, versions)
    took = f"{time.monotonic() - begun:.0f} s for {len(left)} of them"
    seconds = sum(line["seconds"] for line in lines)
    told["kvpress"] = f"{len(lines)} results in {seconds:.0f} s; the last run took {took}"
    print(_report(args, suite, list(names), identity, lines, told))
    return 0


def _told(args: argparse.Namespace, suite: Suite, folder: Path, versions: str) -> dict[str, str]:
    here = machine(cpu=True)
    return {
        "date": here["date"],
        "machine": f"{here['machine']}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '-')}",
        "model": folder.name,
        "command": _typed(args),
        "kvpress versions": versions,
        "seeds": ", ".join(map(str, args.seeds)) + f"; of the suite: {suite.seed}",
    }


def _typed(args: argparse.Namespace) -> str:
    """This command, without the folders of this machine."""
    names = {str(args.model): "MODEL", str(args.out): "DIR", str(args.eval): "EVAL"}
    return shlex.join(["scripts/peers.py", *(names.get(item, item) for item in sys.argv[1:])])


def _report(
    args: argparse.Namespace,
    suite: Suite,
    budgets: Sequence[str],
    identity: Mapping[str, str],
    lines: Sequence[Mapping[str, Any]],
    told: dict[str, str],
) -> str:
    """Write eval.md and eval.json; returns what to print."""
    if args.eval:
        ours, mark = _other(args.eval, identity)
        lines, told["full caches"] = merged(ours, lines, suite.settings, budgets)
        told["versions"] = mark["versions"]
    report = Run(
        suite=suite,
        lines=lines,
        budgets=budgets,
        baseline=named(args.baseline or "nexus"),
        told=told,
    )
    (args.out / "eval.json").write_text(as_json(report))
    (args.out / "eval.md").write_text(render(report))
    return f"{summary(report)}\n\n{args.out / 'eval.md'}"


def _other(
    folder: Path, identity: Mapping[str, str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Lines and identity of a folder of `nexus-vllm eval` on the same samples and model."""
    path = folder / "run.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no folder of nexus-vllm eval: it has no run.json")
    mark: dict[str, str] = json.loads(path.read_text())
    for key in ("suite", "model"):
        if mark.get(key) != identity[key]:
            raise ValueError(
                f"{folder} is of {key} {mark.get(key)}, not {identity[key]}; run nexus-vllm eval "
                "with the same MODEL, --suite and --prompt-tokens"
            )
    return lines_so_far(folder / "results.jsonl"), mark


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("model", type=Path, metavar="MODEL", nargs="?", help="folder of a model")
    option("--setup", action="store_true", help=f"only make {ENVIRONMENT}")
    option("--out", type=Path, metavar="DIR", help="eval.md, eval.json and results")
    option("--eval", type=Path, metavar="EVAL", help="a folder of nexus-vllm eval to compare with")
    option("--suite", default="quick", help=f"{', '.join(suites())}, or a YAML file (quick)")
    option(
        "--presses",
        type=words,
        default=list(PRESSES),
        metavar="NAME,...",
        help=f"{', '.join(PRESSES)} (all)",
    )
    option("--budgets", type=words, metavar="B,...", help="default: the suite's")
    option("--settings", type=settings, metavar="S,...", help="in-window, later, or both")
    option("--seeds", type=seeds, default=[0], metavar="N,...", help="of presses that draw (0)")
    option("--prompt-tokens", type=int, metavar="N", help="of a haystack; default: the suite's")
    option("--limit", type=natural, metavar="N", help="only the first N questions")
    option("--baseline", metavar="POLICY[,ALLOCATOR]", help="others minus this (nexus)")
    args = parser.parse_args()
    return run_command("peers", lambda: run(args), "stopped; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
