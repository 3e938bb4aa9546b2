#!/usr/bin/env python3
"""Does a hidden pass key survive eviction? Asks a running server, once per policy.

    scripts/serve.sh --port 8000            # in another terminal
    scripts/passkey.py [--url http://127.0.0.1:8000] [--budget 400] [--json results.json]

Each prompt is about 2,000 tokens of RULER's noise with one pass key in it and the question at the
end; the same prompts are asked under every policy and with the full cache. Exits 1 if the server
answered without evicting (or evicted with policy none), 2 if it cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
# As shares of the noise. The head is where attention sinks are and the tail is what a recency
# window of a fifth keeps, so a key in either would prove nothing.
DEPTHS = (0.06, 0.76)
BLOCK = 32
FULL = "none"


@dataclass(frozen=True)
class Prompt:
    text: str
    key: str
    depth: float
    tokens: int
    key_tokens: tuple[int, int]  # first token of the needle, and the one after its last


def make_prompts(
    count: int, length: int, seed: int, tokenize: Callable[[str], int]
) -> list[Prompt]:
    """One prompt per stretch of `DEPTHS`, at a random place in it, with a random key.

    Args:
        length: tokens wanted; the prompt is the longest of whole noise lines that stays within.
        tokenize: text -> number of tokens.
    """
    chance = random.Random(seed)
    per_line = (tokenize(NOISE * 11) - tokenize(NOISE)) / 10
    around = tokenize(NEEDLE.format(key=12345) + QUESTION)
    lines = int((length - around) / per_line)
    prompts = []
    low, high = DEPTHS
    for i in range(count):
        depth = low + (high - low) * (i + chance.random()) / count
        before = round(depth * lines)
        key = str(chance.randrange(10000, 100000))
        head = NOISE * before
        needle = NEEDLE.format(key=key)
        text = (head + needle + NOISE * (lines - before) + QUESTION).lstrip()
        start = tokenize(head.lstrip())
        prompts.append(
            Prompt(
                text=text,
                key=key,
                depth=before / lines,
                tokens=tokenize(text),
                key_tokens=(start, tokenize((head + needle).lstrip())),
            )
        )
    return prompts


def answers(prompt: Prompt, reply: str) -> bool:
    return reply.strip().startswith(prompt.key)


def inside_window(prompt: Prompt, budget: int) -> bool:
    """Would the newest `budget` tokens hold any of the needle?

    Generous to recency: it counts the sink block and the partial block as recency too.
    """
    return prompt.key_tokens[1] > prompt.tokens - budget


def inside_sink(prompt: Prompt) -> bool:
    return prompt.key_tokens[0] < BLOCK


class Server:
    def __init__(self, url: str, model: str | None, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.model = model or self._json("/v1/models")["data"][0]["id"]

    def _json(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            return json.load(reply)

    def count_tokens(self, text: str) -> int:
        return int(self._json("/tokenize", {"model": self.model, "prompt": text})["count"])

    def ask(self, prompt: Prompt, policy: str, budget: int) -> tuple[str, dict[str, Any]]:
        """The reply, and what the server says it evicted ({} if it says nothing)."""
        headers = {"X-KV-Policy": policy}
        if policy != FULL:
            headers["X-KV-Budget"] = str(budget)
        body = {
            "model": self.model,
            "prompt": prompt.text,
            "temperature": 0,
            "max_tokens": len(prompt.key) + 4,
        }
        reply = self._json("/v1/completions", body, headers)
        transfer = reply.get("kv_transfer_params") or {}
        return reply["choices"][0]["text"], transfer.get("kv_eviction") or {}


def measure(
    server: Server, prompts: list[Prompt], policies: list[str], budget: int
) -> list[dict[str, Any]]:
    records = []
    for number, prompt in enumerate(prompts):
        for policy in policies:
            text, stats = server.ask(prompt, policy, budget)
            records.append(
                {
                    "prompt": number,
                    "policy": policy,
                    "depth": round(prompt.depth, 3),
                    "prompt_tokens": prompt.tokens,
                    "key": prompt.key,
                    "reply": text,
                    "correct": answers(prompt, text),
                    "key_in_recency_window": inside_window(prompt, budget),
                    "key_in_sink_block": inside_sink(prompt),
                    "kv_eviction": stats,
                }
            )
            mark = "right" if records[-1]["correct"] else "wrong"
            print(f"{number + 1}/{len(prompts)} {policy}: {mark} {text!r}", file=sys.stderr)
    return records


def wrongly_served(records: list[dict[str, Any]]) -> list[str]:
    """Replies that prove nothing: nothing evicted although asked, or the other way round."""
    return [
        f"prompt {r['prompt'] + 1}, policy {r['policy']}: kv_eviction = {r['kv_eviction']}"
        for r in records
        if (r["kv_eviction"].get("evicted_blocks", 0) > 0) == (r["policy"] == FULL)
    ]


def table(records: list[dict[str, Any]], policies: list[str], budget: int) -> str:
    first = [r for r in records if r["policy"] == policies[0]]
    lengths = [r["prompt_tokens"] for r in first]
    lines = [
        f"{len(first)} prompts of {min(lengths)}-{max(lengths)} tokens, budget {budget} tokens, "
        f"key at {min(r['depth'] for r in first):.0%}-{max(r['depth'] for r in first):.0%} of the "
        f"text; keys inside the newest {budget} tokens: "
        f"{sum(r['key_in_recency_window'] for r in first)}, in the sink block: "
        f"{sum(r['key_in_sink_block'] for r in first)}.",
        "",
        "| policy | keys answered | evicted blocks | final blocks |",
        "|---|---|---|---|",
    ]
    for policy in policies:
        own = [r for r in records if r["policy"] == policy]
        name = "full cache" if policy == FULL else policy
        evicted, final = (
            _range([r["kv_eviction"].get(field) for r in own])
            for field in ("evicted_blocks", "final_blocks")
        )
        right = sum(r["correct"] for r in own)
        lines.append(f"| {name} | {right}/{len(own)} | {evicted} | {final} |")
    return "\n".join(lines)


def _range(values: list[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return str(known[0]) if min(known) == max(known) else f"{min(known)}-{max(known)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=400, help="tokens that may stay")
    parser.add_argument(
        "--policies", nargs="+", default=["nexus", "streaming-llm", "random", FULL], metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one request")
    parser.add_argument("--json", type=Path, help="write every reply and its statistics here")
    args = parser.parse_args()
    try:
        server = Server(args.url, args.model, args.timeout)
        prompts = make_prompts(args.prompts, args.length, args.seed, server.count_tokens)
        records = measure(server, prompts, args.policies, args.budget)
    except urllib.error.HTTPError as error:
        print(f"{error.url}: HTTP {error.code}: {error.read().decode()}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{args.url}: {error}; is the server running?", file=sys.stderr)
        return 2
    print(table(records, args.policies, args.budget))
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    wrong = wrongly_served(records)
    if wrong:
        print("\nThe server did not do what was asked, so this table says nothing:")
        print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
