#!/usr/bin/env python3
"""What a sequence still knows after an eviction, for every way to deal out its budget.

    scripts/prepare_texts.py                # once: the essays that the facts are hidden in
    scripts/head_budgets.py MODEL [--profile FILE ...] [--lengths 1024 2048] [--json FILE]
    scripts/head_budgets.py --report FILE ...

Facts, word lists and real sentences are asked for in vLLM itself, offline, with pages really freed.
Everything is asked in two turns of a session (vLLM's streaming input), the eviction in between.
"later": the first turn is the context alone, so nothing could know the question. "inside": the
first turn ends with the question, and only the beginning of the answer follows. The full cache
answers the same questions. Each context is prefilled once; all runs share its
prefix-cached pages. Exits 1 if an eviction that a cell counts on did not take place.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from prepare_model import default_cache_dir

BLOCK = 32
FACTS = (  # sentence, question, how the answer begins, values; none of them is in the profiler's
    ("The bicycle was repaired by {}.", "Who repaired the bicycle?", "The bicycle was repaired by",
     ("Oliver", "Sarah", "Peter", "Monica", "Victor", "Laura")),
    ("The secret recipe needs a spoon of {}.", "What does the secret recipe need?",
     "The secret recipe needs a spoon of",
     ("honey", "butter", "salt", "sugar", "pepper", "milk")),
    ("The ferry to the island departs from {}.", "Where does the ferry to the island depart from?",
     "The ferry to the island departs from",
     ("Boston", "Sydney", "Dublin", "Athens", "Naples", "Tokyo")),
    ("The code of the safe is {}.", "What is the code of the safe?", "The code of the safe is",
     ("4821", "7395", "2640", "9173", "5068", "3714")),
    ("The lost necklace was found inside the {}.", "Where was the lost necklace found?",
     "The lost necklace was found inside the",
     ("piano", "garden", "oven", "church", "boat", "library")),
    ("The name of the gardener's dog is {}.", "What is the name of the gardener's dog?",
     "The name of the gardener's dog is", ("Max", "Rex", "Bella", "Daisy", "Rocky", "Luna")),
    ("The concert on Friday starts at {} o'clock.", "When does the concert on Friday start?",
     "The concert on Friday starts at", ("seven", "eight", "nine", "ten", "six", "five")),
    ("The uniform of the guards is {}.", "Which color is the uniform of the guards?",
     "The uniform of the guards is", ("blue", "red", "green", "black", "white", "yellow")),
)  # fmt: skip
NOUNS = (
    "apple river candle mountain pencil window guitar forest button castle mirror tiger blanket "
    "ocean hammer garden rocket basket silver kitchen spider carpet lemon tower wagon feather "
    "bottle desert ladder monkey pillow bridge turtle violin helmet"
)
ORDINALS = ("first", "second", "third")
CUE_WORDS, WORDS = 4, 12
QUOTE_CUE, QUOTE = 12, 16
TASKS = ("fact", "copy", "quote")
DEPTHS = (0.04, 0.86)


@dataclass(frozen=True)
class Question:
    """Token ids: what asks, how the answer begins, and the answer."""

    task: str
    cue: list[int]
    begin: list[int]
    answer: list[int]

    def turns(self, context: list[int], setting: str) -> tuple[list[int], list[int]]:
        """What comes before and after the eviction. New lists: vLLM extends them in place."""
        if setting == "later":
            return list(context), self.cue + self.begin
        return context + self.cue, list(self.begin)


@dataclass(frozen=True)
class Haystack:
    context: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Method:
    policy: str
    allocator: str
    profile: str = ""  # for lu: which one, if there are several

    @property
    def label(self) -> str:
        if self.policy == "none":
            return "full cache"
        return f"{self.policy}, {self.allocator}" + (f" ({self.profile})" if self.profile else "")


FULL = Method("none", "uniform")


def haystacks(tokenizer: Any, texts: Path, length: int, count: int, seed: int) -> list[Haystack]:
    """`count` contexts of `length` tokens, each of other essays, and the questions about them."""
    text = " ".join(path.read_text() for path in sorted(texts.glob("*.txt")))
    if not text:
        raise SystemExit(f"{texts} holds no text; run scripts/prepare_texts.py, or give --texts")
    sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text))
    made = []
    for index in range(count):
        chance = random.Random(f"{seed} {length} {index}")
        start = int(len(sentences) * (index + 0.8 * chance.random()) / count)
        made.append(_haystack(tokenizer, iter(sentences[start:]), length, chance))
    return made


def _haystack(
    tokenizer: Any, sentences: Iterator[str], length: int, chance: random.Random
) -> Haystack:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    needles: list[str] = []
    questions: list[Question] = []
    for sentence, question, begin, values in FACTS:
        value = chance.choice(values)
        needles.append(sentence.format(value))
        cue = ids(f"\n\nQuestion: {question}\n")
        questions.append(Question("fact", cue, ids(f"Answer: {begin}"), ids(f" {value}")))
    for ordinal in ORDINALS:
        words = chance.sample(NOUNS.split(), WORDS)
        needles.append(f"The {ordinal} code phrase is: {' '.join(words)}.")
        cue = ids(f"\n\nThe {ordinal} code phrase is: {' '.join(words[:CUE_WORDS])}")
        answer = ids(" " + " ".join(words[CUE_WORDS:]))
        questions.append(Question("copy", cue[:-1], cue[-1:], answer))
    chance.shuffle(needles)
    room = length - sum(len(ids(" " + needle)) for needle in needles)
    pieces, sizes = [], 0
    while sizes < room:
        pieces.append(next(sentences))
        sizes += len(ids(" " + pieces[-1]))
    low, high = DEPTHS
    quotable = [
        (index, tokens)
        for index, piece in enumerate(pieces)
        if len(tokens := ids(piece)) > QUOTE_CUE + QUOTE and low < index / len(pieces) < high
    ]
    for _, tokens in chance.sample(quotable, 4):
        cue = ids('\n\nAs quoted above: "') + tokens[:QUOTE_CUE]
        answer = tokens[QUOTE_CUE : QUOTE_CUE + QUOTE]
        questions.append(Question("quote", cue[:-1], cue[-1:], answer))
    for number, needle in reversed(list(enumerate(needles))):
        depth = low + (high - low) * (number + chance.random()) / len(needles)
        pieces.insert(round(depth * len(pieces)), needle)
    return Haystack(ids(" ".join(pieces))[:length], questions)


class Engine:
    """One vLLM engine; each request's budget, policy and allocator are its own."""

    def __init__(self, model: str, profile: str | None, options: argparse.Namespace) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        import nexus_vllm

        longest = max(options.lengths) + 512
        arguments = nexus_vllm.engine_args(
            config=options.config,
            policy="nexus",
            budget="full",
            budget_floor=(1 + 2 + 1) * BLOCK,
            trace=True,
            **({"profile": profile} if profile else {}),
        )
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                dtype="float32",
                enforce_eager=True,
                max_model_len=longest,
                max_num_batched_tokens=max(options.lengths) + 512,
                max_num_seqs=options.concurrency,
                num_gpu_blocks_override=(options.concurrency + 4) * -(-longest // BLOCK),
                disable_log_stats=True,
                **arguments,
            )
        )
        self.slots = asyncio.Semaphore(options.concurrency)
        self.numbers = itertools.count()

    async def ask(
        self, haystack: Haystack, question: Question, method: Method, share: float, setting: str
    ) -> tuple[str, list[int]]:
        """The request's id and the tokens it answers with."""
        from vllm import SamplingParams
        from vllm.engine.protocol import StreamingInput
        from vllm.sampling_params import RequestOutputKind

        extra: dict[str, Any] = {"kv_policy": method.policy, "kv_allocator": method.allocator}
        if method.policy != "none":
            extra["kv_budget"] = str(round(share * len(haystack.context)))
        else:
            del extra["kv_allocator"]

        def params(tokens: int) -> SamplingParams:
            return SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                extra_args=extra,
                output_kind=RequestOutputKind.DELTA,
            )

        answer = len(question.answer)

        async def turns() -> AsyncGenerator[StreamingInput, None]:
            for ids, count in zip(
                question.turns(haystack.context, setting), (1, answer), strict=True
            ):
                yield StreamingInput({"prompt_token_ids": ids}, params(count))

        tokens: list[int] = []
        name = f"q{next(self.numbers)}"
        async with self.slots:
            async for output in self.engine.generate(turns(), params(answer), name):
                tokens += output.outputs[0].token_ids
        return name, tokens[-answer:]

    async def evictions(self) -> dict[str, list[dict[str, Any]]]:
        """Every eviction so far, by request."""
        (trace,) = await self.engine.collective_rpc("kv_eviction_trace")
        return trace


def scores(question: Question, tokens: list[int]) -> tuple[float, float]:
    """Exact match, and the share of tokens that are right."""
    right = [mine == wanted for mine, wanted in zip(tokens, question.answer, strict=True)]
    return float(all(right)), sum(right) / len(right)


@dataclass(frozen=True)
class Cell:
    """One method's answers at one length: task -> one (exact, tokens right) per question."""

    model: str
    length: int
    method: str
    share: float
    setting: str
    answers: dict[str, list[tuple[float, float]]]

    def task(self, name: str) -> float:
        """Facts count when they are right; of lists and sentences every right token counts."""
        return statistics.mean(a[0 if name == "fact" else 1] for a in self.answers[name])

    @property
    def column(self) -> tuple[str, int, float]:
        return self.model, self.length, self.share

    @property
    def score(self) -> float:
        return statistics.mean(self.task(name) for name in TASKS)


def plan(options: argparse.Namespace, profile: str | None, first: bool) -> list[Any]:
    """(method, share, setting) to run on an engine with this profile."""
    tag = Path(profile).stem if profile and not first else ""
    lu = [Method(policy, "lu", tag) for policy in options.policies] if profile else []
    rest = []
    if first:
        rest = [Method("nexus", name) for name in options.allocators]
        rest += [Method(policy, "uniform") for policy in options.policies if policy != "nexus"]
    inside = [m for m in lu + rest if m.policy == "nexus"]
    shares = options.shares
    runs = [(m, share, "later") for m, share in itertools.product(rest + lu, shares)]
    runs += [(m, share, "inside") for m, share in itertools.product(inside, shares)]
    return ([(FULL, 1.0, "later"), (FULL, 1.0, "inside")] if first else []) + runs


async def measure(options: argparse.Namespace) -> list[Cell]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {
        length: haystacks(tokenizer, options.texts, length, options.haystacks, options.seed)
        for length in options.lengths
    }
    cells = []
    for number, profile in enumerate(options.profile or [None]):
        engine = Engine(options.model, profile, options)
        try:
            for length in options.lengths:
                runs = plan(options, profile, first=number == 0)
                cells += await _measure_length(engine, options.model, length, texts[length], runs)
                if options.json:
                    told = json.dumps([asdict(cell) for cell in cells], indent=1)
                    options.json.write_text(told + "\n")
        finally:
            engine.engine.shutdown()
    return cells


async def _measure_length(
    engine: Engine, model: str, length: int, texts: list[Haystack], runs: list[Any]
) -> list[Cell]:
    results: dict[Any, dict[str, list[tuple[float, float]]]] = {
        run: {task: [] for task in TASKS} for run in runs
    }
    for number, haystack in enumerate(texts):
        begin = time.monotonic()
        first = haystack.questions[0]
        await engine.ask(haystack, first, FULL, 1.0, "inside")  # fills the prefix cache
        jobs = list(itertools.product(runs, haystack.questions))
        asked = await asyncio.gather(*(engine.ask(haystack, q, *run) for run, q in jobs))
        trace = await engine.evictions()
        for (run, question), (name, tokens) in zip(jobs, asked, strict=True):
            _prove(trace, name, haystack, question, *run)
            results[run][question.task].append(scores(question, tokens))
        print(
            f"{length} tokens, context {number + 1}/{len(texts)}: {len(jobs)} questions in "
            f"{time.monotonic() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return [
        Cell(Path(model).name, length, method.label, share, setting, answers)
        for (method, share, setting), answers in results.items()
    ]


def _prove(
    trace: dict[str, Any],
    name: str,
    haystack: Haystack,
    question: Question,
    method: Method,
    share: float,
    setting: str,
) -> None:
    """Exit unless the request was cut to its budget where it should have been."""
    events = [e for key, es in trace.items() if key.split("-")[0] == name for e in es]
    where = len(question.turns(haystack.context, setting)[0])
    blocks = round(share * len(haystack.context)) // BLOCK
    for event in events:
        kept = np.asarray(event["kept"])  # [layers, blocks] or [layers, heads, blocks]
        pairs = kept[..., 0].size
        if event["num_computed"] == where and int((kept >= 0).sum()) == blocks * pairs:
            return
    if method.policy != "none":
        raise SystemExit(f"{name} ({method.label}, {share:.0%}, {setting}): evictions {events}")


def table(cells: list[Cell]) -> str:
    """One table per setting: how much of the full cache's score is left, by method and column."""
    lines = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        own = [cell for cell in cells if cell.setting == setting]
        full = {(c.model, c.length): c for c in own if c.method == FULL.label}
        columns = list(dict.fromkeys(c.column for c in own if c.method != FULL.label))
        counts = {tuple(len(c.answers[task]) for task in TASKS) for c in own}
        scores = " | ".join(f"{full[column[:2]].score:.2f}" for column in columns)
        lines += [
            "",
            f"Question {setting}; {', '.join(TASKS)}: {', '.join(map(str, sorted(counts)))}",
            "",
            "| | " + " | ".join(f"{m} {length}, {s:.0%}" for m, length, s in columns) + " |",
            "|---|" + "---|" * len(columns),
            f"| full cache (score) | {scores} |",
        ]
        for method in dict.fromkeys(c.method for c in own if c.method != FULL.label):
            row = {c.column: c for c in own if c.method == method}
            shown = [
                f"{row[column].score / full[column[:2]].score:.0%}" if column in row else "-"
                for column in columns
            ]
            lines.append(f"| {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder or hub id of the model")
    parser.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only print tables of these --json files",
    )
    parser.add_argument("--profile", action="append", help="profile for lu; may be given again")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4])
    parser.add_argument("--haystacks", type=int, default=3, help="contexts for each length")
    parser.add_argument(
        "--allocators", nargs="+", default=["uniform", "pyramid", "ada", "cake", "global"]
    )
    parser.add_argument("--policies", nargs="+", default=["nexus", "streaming-llm", "random"])
    parser.add_argument("--config", help="as --kv-eviction-config, to try other settings")
    parser.add_argument("--texts", type=Path, default=default_cache_dir() / "texts")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every cell here")
    options = parser.parse_args()
    if options.report:
        told = [json.loads(path.read_text()) for path in options.report]
        print(table([Cell(**cell) for cell in itertools.chain(*told)]))
        return 0
    if options.model is None:
        parser.error("name a MODEL, or --report FILE")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cells = asyncio.run(measure(options))
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
