#!/usr/bin/env python3
"""The tables of docs/gpu.md: bytes and operations of each kernel, counted, not measured.

    scripts/gpu_budget.py          # writes them between the marks of docs/gpu.md

What is counted is what each kernel must read and write, once; times are bytes over the memory
bandwidth that the vendor names. scripts/gpu_check.sh measures.
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
    """Of one eviction that gives up a 32nd of a sequence of so many live tokens, as decode does."""
    blocks = live // block
    keys = model.layers * model.kv_heads * live * model.size * model.number
    unit = block * 2 * model.size * model.number
    rows = model.layers * model.kv_heads
    maps = model.layers * model.heads * window * blocks * 4
    gone = blocks // 32
    queries = model.layers * model.heads * window * model.size * model.number
    return {
        "score": Cost(
            keys + queries, maps, 2 * model.heads * model.layers * window * live * model.size
        ),
        "anchors": Cost(keys, 0, 4 * keys / model.number),
        "cosines": Cost(keys, rows * live * 4, 4 * keys / model.number),
        "maps to weights": Cost(maps + rows * live * 4, rows * blocks * 4, 8 * maps / 4),
        "select": Cost(rows * blocks * (4 + 8 + 1), rows * blocks),
        "fill, at most": Cost(rows * gone * unit, rows * gone * unit),
    }


def step(model: Model, live: int) -> Cost:
    """One decode step of one sequence: all weights and all live keys and values."""
    cache = model.layers * model.kv_heads * live * 2 * model.size * model.number
    attention = 4 * model.layers * model.heads * live * model.size
    return Cost(model.weights + cache, 0, model.weights + attention)


def table(model: Model, live: int) -> Table:
    made = Table(
        [f"{live:,} live tokens", "MB read", "MB written", "GFLOP", *(f"{g}, us" for g in GPUS)]
    )
    parts = costs(model, live)
    total = Cost(
        sum(c.read for c in parts.values()),
        sum(c.written for c in parts.values()),
        sum(c.flop for c in parts.values()),
    )
    decode = step(model, live)
    for name, cost in {**parts, "an eviction": total, "a decode step": decode}.items():
        times = [f"{cost.moved / speed * 1e6:,.1f}" for speed in GPUS.values()]
        numbers = [f"{n:,.1f}" for n in (cost.read / 1e6, cost.written / 1e6, cost.flop / 1e9)]
        made.rows.append([name, *numbers, *times])
    every = live // 32
    share = total.moved / (every * decode.moved)
    made.rows.append(
        [f"evictions, once in {every:,} steps: {share:.2%} of decode", *[""] * (3 + len(GPUS))]
    )
    return made


def written(document: str) -> str:
    tables = "\n\n".join("\n".join(render_table(table(Model(), live))) for live in LIVE)
    marks = re.compile(r"(<!-- budget -->\n).*?(<!-- /budget -->)", re.DOTALL)
    return marks.sub(lambda m: f"{m[1]}\n{tables}\n\n{m[2]}", document)


def main() -> int:
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
