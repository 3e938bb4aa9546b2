#!/usr/bin/env python3
"""The side of scripts/peers.py that runs in kvpress' own environment.

    .venv-kvpress/bin/python scripts/peers_kvpress.py WORK.json RESULTS.jsonl
    .venv-kvpress/bin/python scripts/peers_kvpress.py --versions

WORK.json, which scripts/peers.py writes, holds the model's folder, the samples as token ids and the
jobs; a line is appended to RESULTS.jsonl for each. Needs nothing of nexus_vllm.

A haystack is prefilled once. Its layers' inputs are recorded, and each press is given them through
its own forward hook, the way it meets them in a prefill: a press acts after a layer's attention, so
nothing else of the prefill depends on it. KVzip, which reads the prompt a second time, prefills it
by itself. Then question and answer are fed at their true positions: at once, or one by one where
layers hold different numbers of keys, since transformers makes one mask for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FULL = "none"
PREFIX = "kvpress:"
KEPT = 1e-6
"""What a ratio leaves above the number of tokens, so that rounding down gives that number."""


@dataclass(frozen=True)
class Press:
    """A press under the names that the report gives it: what scores, and what deals out the budget.

    make: from the module kvpress. uneven: how a budget is spread, which says what is checked: ""
    for the same number of tokens in each layer and head, "layers" for the same in a layer's heads
    and the budget on average, "heads" for masked keys, the budget on average. drops: it counts what
    it drops, not what it keeps. drawn: it uses the seed. later_only: it never looks at the question
    and costs several prefills.
    """

    scorer: str
    allocator: str
    make: Callable[[Any], Any]
    uneven: str = ""
    drops: bool = False
    drawn: bool = False
    later_only: bool = False

    @property
    def policy(self) -> str:
        return PREFIX + self.scorer


def _ada(scorer: str, make: Callable[[Any], Any]) -> Press:
    return Press(scorer, "ada", lambda k: k.AdaKVPress(make(k)), "heads")


PRESSES = {
    "snapkv": Press("snapkv", "uniform", lambda k: k.SnapKVPress()),
    "snapkv-w16": Press("snapkv-w16", "uniform", lambda k: k.SnapKVPress(window_size=16)),
    "ada-snapkv": _ada("snapkv", lambda k: k.SnapKVPress()),
    "ada-snapkv-w16": _ada("snapkv-w16", lambda k: k.SnapKVPress(window_size=16)),
    "pyramidkv": Press("snapkv", "pyramid", lambda k: k.PyramidKVPress(), "layers"),
    "pyramidkv-w8": Press(
        "snapkv-w8", "pyramid", lambda k: k.PyramidKVPress(window_size=8), "layers"
    ),
    "expected-attention": Press(
        "expected-attention", "uniform", lambda k: k.ExpectedAttentionPress()
    ),
    "ada-expected-attention": _ada("expected-attention", lambda k: k.ExpectedAttentionPress()),
    "ada-expected-attention-e2": _ada(
        "expected-attention-e2", lambda k: k.ExpectedAttentionPress(epsilon=1e-2)
    ),
    "keydiff": Press("keydiff", "uniform", lambda k: k.KeyDiffPress()),
    "block-keydiff": Press(
        "keydiff-block128", "uniform", lambda k: k.BlockPress(k.KeyDiffPress(), block_size=128)
    ),
    "tova": Press("tova", "uniform", lambda k: k.TOVAPress()),
    "knorm": Press("knorm", "uniform", lambda k: k.KnormPress()),
    "streaming-llm": Press("streaming-llm", "uniform", lambda k: k.StreamingLLMPress()),
    "random": Press("random", "uniform", lambda k: k.RandomPress(), drawn=True),
    "kvzip": Press(
        "kvzip", "global", lambda k: k.KVzipPress(), "heads", drops=True, later_only=True
    ),
}


def ratio(kept: int, total: int, drops: bool = False) -> float:
    """The compression_ratio at which a press keeps `kept` of `total` tokens.

    Presses round down what they keep, or (drops) what they drop. Raises ValueError unless
    0 < kept < total.
    """
    if not 0 < kept < total:
        raise ValueError(f"{kept} of {total} tokens cannot be kept by a press")
    return 1 - (kept - KEPT if drops else kept + KEPT) / total


@dataclass
class Prefill:
    """What the presses see of a prompt: per layer the inputs of its attention, keys and values.

    hidden: (1, tokens, hidden size). keys, values: (1, KV heads, tokens, head size). rotary: cosine
    and sine, (1, tokens, head size). logits: of the newest token.
    """

    tokens: list[int]
    hidden: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    rotary: tuple[Tensor, Tensor]
    logits: Tensor

    def cache(self) -> Any:
        """All of it, as a cache of its own."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys, values, layer)
        return cache


class Model:
    """A model in kvpress' hands."""

    def __init__(self, folder: Path, plain: Path) -> None:
        """plain: where a tokenizer without a chat template can be left.

        KVzip takes the tokens of the template's beginning for granted and never scores them; our
        prompts have none.
        """
        import kvpress
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.disable_progress_bar()
        self.kvpress = kvpress
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        bare = AutoTokenizer.from_pretrained(folder)
        bare.chat_template = None
        bare.save_pretrained(plain)
        self.model.config.name_or_path = str(plain)
        self.attentions: list[nn.Module] = [x.self_attn for x in self.model.model.layers]

    def prefill(self, tokens: Sequence[int], before: Prefill | None = None) -> Prefill:
        """Compute `tokens`, after those of `before` if it is given."""
        from transformers import DynamicCache

        start = len(before.tokens) if before else 0
        cache = before.cache() if before else DynamicCache()
        self.unmask()
        hidden: list[Tensor] = []
        rotary: list[tuple[Tensor, Tensor]] = []

        def record(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            hidden.append(kwargs["hidden_states"])
            rotary.append(kwargs["position_embeddings"])

        hooks = [x.register_forward_pre_hook(record, with_kwargs=True) for x in self.attentions]
        try:
            logits = self._forward(cache, tokens, start, 1)[0]
        finally:
            for hook in hooks:
                hook.remove()
        cos, sin = rotary[0]
        if before:
            hidden = [torch.cat(pair, dim=1) for pair in zip(before.hidden, hidden, strict=True)]
            cos, sin = (
                torch.cat(pair, dim=1) for pair in zip(before.rotary, (cos, sin), strict=True)
            )
        whole = [*(before.tokens if before else ()), *tokens]
        keys, values = [x.keys for x in cache.layers], [x.values for x in cache.layers]
        return Prefill(whole, hidden, keys, values, (cos, sin), logits)

    def compressed(self, press: Press, prefill: Prefill, kept: int, seed: int = 0) -> Any:
        """The cache that `press` leaves of a prompt. Raises RuntimeError unless it is `kept` tokens
        per head, on average where the press deals them out unevenly."""
        from transformers import DynamicCache

        total = len(prefill.tokens)
        made = press.make(self.kvpress)
        made.compression_ratio = ratio(kept, total, press.drops)
        torch.manual_seed(seed)
        self.unmask()
        if isinstance(made, self.kvpress.KVzipPress):
            cache = DynamicCache()
            with made(self.model):
                self.model.model(input_ids=torch.tensor([prefill.tokens]), past_key_values=cache)
        else:
            cache = prefill.cache()
            with made(self.model):
                for attention, hidden in zip(self.attentions, prefill.hidden, strict=True):
                    told = {
                        "hidden_states": hidden,
                        "past_key_values": cache,
                        "cache_position": torch.arange(total),
                        "position_embeddings": prefill.rotary,
                    }
                    made.forward_hook(attention, [], told, [None, None])
        check_kept(press, self.kept(cache), kept)
        return cache

    def kept(self, cache: Any) -> list[list[int]]:
        """Keys that attention still sees, per layer and KV head."""
        found = []
        for attention, layer in zip(self.attentions, cache.layers, strict=True):
            heads, tokens = layer.keys.shape[1:3]
            masked = getattr(attention, "masked_key_indices", None)
            gone = [0] * heads
            if masked is not None:
                gone = torch.bincount(masked[1], minlength=heads).tolist()
            found.append([tokens - count for count in gone])
        return found

    def unmask(self) -> None:
        """Forget the keys that an earlier press masked: they are kept in the modules."""
        for attention in self.attentions:
            attention.masked_key_indices = None

    def _forward(self, cache: Any, tokens: Sequence[int], position: int, last: int) -> Tensor:
        """Logits after the `last` newest of `tokens`, (last, vocabulary)."""
        positions = torch.arange(position, position + len(tokens))
        out = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=positions[None],
            past_key_values=cache,
            logits_to_keep=last,
        )
        return out.logits[0]

    def feed(self, cache: Any, tokens: Sequence[int], position: int, last: int = 1) -> Tensor:
        """Feed `tokens` from `position` on; logits after the `last` newest, (last, vocabulary)."""
        if len({layer.keys.shape[2] for layer in cache.layers}) == 1:
            return self._forward(cache, tokens, position, last)
        rows = [self._forward(cache, [t], position + i, 1) for i, t in enumerate(tokens)]
        return torch.cat(rows[-last:])

    @contextlib.contextmanager
    def again(self, cache: Any) -> Iterator[Any]:
        """The cache for one question: what is added to it is taken out again."""
        lengths = [layer.keys.shape[2] for layer in cache.layers]
        yield cache
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.keys = layer.keys[:, :, :length]
            layer.values = layer.values[:, :, :length]


def check_kept(press: Press, found: Sequence[Sequence[int]], kept: int) -> None:
    """Raise RuntimeError unless each head, or all of them on average, holds `kept` tokens."""
    counts = list(itertools.chain(*found))
    mean = sum(counts) / len(counts)
    fine = {
        "": set(counts) == {kept},
        # Each layer's budget is rounded.
        "layers": all(len(set(row)) == 1 for row in found) and abs(mean - kept) <= 0.5,
        "heads": sum(counts) == kept * len(counts),
    }
    if not fine[press.uneven]:
        raise RuntimeError(
            f"{press.policy}, {press.allocator} keeps {min(counts)} to {max(counts)} tokens, "
            f"{mean:.2f} on average; {kept} were asked for"
        )


def judged(logits: Tensor, answer: Sequence[int]) -> dict[str, Any]:
    """As nexus_vllm.tools.eval_plan judges: each answer token after the right ones before it.

    logits: (answer tokens, vocabulary).
    """
    told = torch.log_softmax(logits.double(), dim=-1)
    own = told.gather(1, torch.tensor(answer)[:, None])[:, 0]
    right = int((own >= told.amax(dim=-1)).sum())
    score, logprob = float(right == len(answer)), float(own.sum())
    return {
        "score": score,
        "right": right,
        "tokens": len(answer),
        "logprob": logprob,
        "whole": True,
    }


def listed(reply: str, items: Sequence[str]) -> dict[str, Any]:
    """Likewise for a question with items: the share of them in the reply."""
    score = sum(item in reply for item in items) / len(items)
    return {"score": score, "right": 0, "tokens": 0, "logprob": None, "whole": True}


class Work:
    """Jobs of one WORK.json, answered into RESULTS.jsonl."""

    def __init__(self, model: Model, work: dict[str, Any], results: Path) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self.model, self.samples, self.jobs = model, work["samples"], work["jobs"]
        self.results, self.before = results, time.monotonic()
        self.bar = tqdm(total=len(self.jobs), desc="kvpress", unit="job", mininterval=2)

    def run(self) -> None:
        for index, group in itertools.groupby(self.jobs, key=lambda job: job["line"]["sample"]):
            self._sample(self.samples[index], list(group))
        self.bar.close()

    def _sample(self, sample: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
        haystack = self.model.prefill(sample["tokens"])
        later = [job for job in jobs if job["line"]["setting"] == "later"]
        for chosen in _grouped(later, "press", "kept", "seed"):
            cache = self._compressed(chosen[0], haystack)
            for job in chosen:
                question = sample["questions"][job["line"]["question"]]
                self._answer(job, question, haystack, question["asked"], cache)
        rest = [job for job in jobs if job["line"]["setting"] != "later"]
        for chosen in _grouped(rest, "question"):
            question = sample["questions"][chosen[0]["line"]["question"]]
            prompt = self.model.prefill(question["asked"], haystack)
            for job in chosen:
                self._answer(job, question, prompt, [], self._compressed(job, prompt))

    def _compressed(self, job: dict[str, Any], prefill: Prefill) -> Any:
        if job["press"] is None:
            self.model.unmask()
            return prefill.cache()
        line = job["line"]
        # A draw of its own for each prompt.
        seed = (line["seed"] * 1009 + line["sample"]) * 1009
        seed += line["question"] if line["setting"] == "in-window" else 0
        return self.model.compressed(PRESSES[job["press"]], prefill, job["kept"], seed)

    def _answer(
        self,
        job: dict[str, Any],
        question: dict[str, Any],
        prefill: Prefill,
        asked: Sequence[int],
        cache: Any,
    ) -> None:
        """Ask in `cache`, what is left of `prefill`, after feeding `asked`; write a line."""
        kept = list(itertools.chain(*self.model.kept(cache)))
        position, answer = len(prefill.tokens), question["answer_tokens"]
        with self.model.again(cache):
            if question["items"]:
                logits = prefill.logits
                if asked:
                    (logits,) = self.model.feed(cache, asked, position)
                position += len(asked)
                reply = self._greedy(cache, logits, position, question["reply_tokens"])
                told = listed(self.model.tokenizer.decode(reply), question["items"])
            else:
                fed = [*asked, question["lead"], *answer[:-1]]
                rows = self.model.feed(cache, fed, position, len(answer))
                told, reply = judged(rows, answer), rows.argmax(dim=-1).tolist()
        now = time.monotonic()
        line = {
            **job["line"],
            **job["about"],
            **told,
            "kept_tokens": round(sum(kept) / len(kept), 3),
            "kept_least": min(kept),
            "kept_most": max(kept),
            "text": self.model.tokenizer.decode(reply),
            "answer": question["answer"],
            "seconds": round(now - self.before, 3),
        }
        self.before = now
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.bar.update()

    def _greedy(self, cache: Any, logits: Tensor, position: int, count: int) -> list[int]:
        reply = [int(logits.argmax())]
        while len(reply) < count:
            (logits,) = self.model.feed(cache, reply[-1:], position + len(reply) - 1)
            reply.append(int(logits.argmax()))
        return reply


def _grouped(jobs: Sequence[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Jobs that agree in `keys`, of the job or its line, in the order in which they came."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for job in jobs:
        found.setdefault(tuple({**job["line"], **job}[key] for key in keys), []).append(job)
    return list(found.values())


def versions() -> str:
    """Of all that has a say in the numbers."""
    names = ("kvpress", "transformers", "torch")
    told = [f"{name} {metadata.version(name)}" for name in names]
    return ", ".join([*told, f"Python {platform.python_version()}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--versions", action="store_true")
    args = parser.parse_args()
    if args.versions:
        print(versions())
        return 0
    if args.results is None:
        parser.error("WORK.json and RESULTS.jsonl are needed")
    work = json.loads(args.work.read_text())
    with torch.inference_mode(), tempfile.TemporaryDirectory() as plain:
        Work(Model(Path(work["model"]), Path(plain)), work, args.results).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
