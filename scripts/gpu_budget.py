#!/usr/bin/env python3
"""The tables of docs/gpu.md: bytes and operations of each kernel, counted, not measured.

    scripts/gpu_budget.py          # writes them between the marks of docs/gpu.md

What is counted is what each kernel must read and write, once; times are bytes over the memory
bandwidth that the vendor names. The walk reads its maps three times: from the L2 cache, as far as
they fit. scripts/gpu_check.sh measures.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from nexus_vllm.tools.bench_report import Table, render_table

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
GPUS = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second, as the vendor names them."""
LIVE = (8192, 32768, 131072)


@dataclass(frozen=True)
class Model:
    """Llama-3.1-8B in bfloat16."""

    weights: float = 8.03e9 * 2
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    number: int = 2


@dataclass(frozen=True)
class Cost:
    """Bytes read and written, and floating point operations."""

    read: float
    written: float = 0
    flop: float = 0

    @property
    def moved(self) -> float:
        return self.read + self.written


def costs(model: Model, live: int, window: int = 16, block: int = 32) -> dict[str, Cost]:
    """Of one eviction by Nexus, each (layer, KV head) with blocks of its own, that gives up a 32nd
    of a sequence of so many live tokens, as decode does."""
    blocks = live // block
    keys = model.layers * model.kv_heads * live * model.size * model.number
    unit = block * 2 * model.size * model.number
    rows, heads = model.layers * model.kv_heads, model.layers * model.heads
    maps, pooled = heads * window * blocks * 4, heads * blocks * 4
    gone = blocks // 32
    stay = blocks - gone
    queries = heads * window * model.size * model.number
    return {
        "score": Cost(keys + queries, maps, 2 * heads * window * live * model.size),
        "walk": Cost(maps + rows * blocks, 2 * pooled, 12 * maps / 4),
        "anchors": Cost(keys, 0, 4 * keys / model.number),
        "cosines": Cost(keys, rows * live * 4, 4 * keys / model.number),
        "heads and prior, in torch": Cost(
            pooled + rows * live * 4, rows * blocks * 4, 2 * rows * live
        ),
        "select": Cost(rows * blocks * (4 + 8 + 1 + 8), rows * blocks * (8 + 1)),
        "pairs": Cost(rows * blocks + 8 * blocks, rows * (8 * stay + 16 * gone + 8)),
        "fill, at most": Cost(rows * gone * unit, rows * gone * unit),
        "origins and state, in torch": Cost(rows * stay * (8 + 8 + 8), rows * stay * (8 + 8)),
    }  # fmt: skip


def others(model: Model, live: int, window: int = 16, block: int = 32) -> dict[str, Cost]:
    """Of other policies: a pass for those that rank tokens, after `score`, and over keys or values
    alone. Values cost what keys do."""
    numbers = model.layers * model.kv_heads * live * model.size
    heads, tokens = model.layers * model.heads, model.layers * model.kv_heads * live * 4
    maps = heads * window * (live // block) * 4
    queries = heads * window * (model.size * model.number + 4)
    product = 2 * heads * window * live * model.size
    return {
        "attention of tokens": Cost(numbers * model.number + queries, tokens, product),
        "pooled rows": Cost(maps, maps // window, 4 * maps / 4),
        "norms, or ranges": Cost(numbers * model.number, tokens, 2 * numbers),
    }


def each_step(model: Model, live: int, block: int = 32) -> dict[str, Cost]:
    """Of what each step does for one sequence, all layers together."""
    blocks = live // block
    query = model.layers * model.heads * model.size * model.number
    return {"shift": Cost(4 * blocks + 8, 4 * blocks + 4), "window": Cost(query, query)}


def step(model: Model, live: int) -> Cost:
    """One decode step of one sequence: all weights and all live keys and values."""
    cache = model.layers * model.kv_heads * live * 2 * model.size * model.number
    attention = 4 * model.layers * model.heads * live * model.size
    return Cost(model.weights + cache, 0, model.weights + attention)


def table(model: Model, live: int) -> Table:
    made = Table(
        [f"{live:,} live tokens", "MB read", "MB written", "GFLOP", *(f"{g}, us" for g in GPUS)]
    )
    parts, more = costs(model, live), each_step(model, live)
    total, decode, added = summed(parts), step(model, live), summed(more)
    rows = {**parts, "an eviction": total, **others(model, live), **more, "a decode step": decode}
    for name, cost in rows.items():
        times = [f"{cost.moved / speed * 1e6:,.1f}" for speed in GPUS.values()]
        numbers = [f"{n:,.1f}" for n in (cost.read / 1e6, cost.written / 1e6, cost.flop / 1e9)]
        made.rows.append([name, *numbers, *times])
    every = live // 32
    share = (total.moved / every + added.moved) / decode.moved
    line = f"evictions, once in {every:,} steps, shifts and windows: {share:.2%} of decode"
    made.rows.append([line, *[""] * (3 + len(GPUS))])
    return made


def summed(parts: dict[str, Cost]) -> Cost:
    return Cost(
        sum(c.read for c in parts.values()),
        sum(c.written for c in parts.values()),
        sum(c.flop for c in parts.values()),
    )


def written(document: str) -> str:
    tables = "\n\n".join("\n".join(render_table(table(Model(), live))) for live in LIVE)
    marks = re.compile(r"(<!-- budget -->\n).*?(<!-- /budget -->)", re.DOTALL)
    return marks.sub(lambda m: f"{m[1]}\n{tables}\n\n{m[2]}", document)


def main() -> int:
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
