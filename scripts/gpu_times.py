"""What scripts/gpu_check.py times on a GPU: the kernels at the shapes of scripts/gpu_budget.py.

A time is the median of many launches between two CUDA events, each after the L2 cache has been
flushed. Bytes are those that gpu_budget counts; the bandwidth they are compared with is that of a
large copy within the device, timed in the same way.
"""

from __future__ import annotations

import statistics as numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_budget import LIVE, Cost, Model, costs, others
from torch import Tensor

from nexus_vllm.kernels import fill, pairs, score, select, statistics, walk
from nexus_vllm.kernels.rows import Rows
from nexus_vllm.tools.bench_report import Table

BLOCK, WINDOW = 32, 16
WARM_UP, REPEATS = 5, 30
WANTED = {"score": 0.7, "fill, at most": 0.8}
"""Least share of the copy bandwidth, of those that must have one."""
COPIED = 2 << 30
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Time:
    """One operation at so many live tokens. seconds: medians; spread: 10th to 90th percentile."""

    name: str
    live: int
    seconds: float
    spread: tuple[float, float]
    moved: float  # bytes, counted by gpu_budget
    share: float  # of the copy bandwidth
    wanted: float | None

    @property
    def passed(self) -> bool | None:
        """None: nothing is asked of it."""
        return None if self.wanted is None else self.share >= self.wanted


class Clock:
    """Times launches on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        told = torch.cuda.get_device_properties(device)
        # So much that the host is back with the next launch before the device is done with it.
        size = max(1 << 30, 8 * getattr(told, "L2_cache_size", 0))
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(self, launch: Callable[[], object]) -> list[float]:
        for _ in range(WARM_UP):
            launch()
        pairs = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            launch()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return sorted(begin.elapsed_time(end) / 1e3 for begin, end in pairs)

    def bandwidth(self) -> float:
        """Bytes a second, read and written, of a copy within the device."""
        free, _ = torch.cuda.mem_get_info(self.device)
        size = min(COPIED, free // 4)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / numbers.median(self.seconds(lambda: target.copy_(source)))


def needed(model: Model, live: int) -> int:
    """Bytes of device memory, about: the pool and what is computed of it."""
    cost = costs(model, live, WINDOW, BLOCK)
    pool = 2 * cost["anchors"].read + cost["fill, at most"].written
    return int(1.1 * pool + 2 * cost["score"].written + cost["cosines"].written + (2 << 30))


def times(device: torch.device, bandwidth: float, clock: Clock) -> Iterator[Time | str]:
    """Each operation at each length; a line instead where the device has too little memory."""
    model = Model()
    for live in LIVE:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if needed(model, live) > free:
            yield f"{live:,} live tokens: needs {needed(model, live) / 1e9:.0f} GB of device memory"
        else:
            yield from times_at(device, bandwidth, clock, model, live)


def times_at(
    device: torch.device, bandwidth: float, clock: Clock, model: Model, live: int
) -> Iterator[Time]:
    cost = {**costs(model, live, WINDOW, BLOCK), **others(model, live, WINDOW, BLOCK)}
    for name, launch in launches(device, model, live, cost).items():
        told = clock.seconds(launch)
        tenth = len(told) // 10
        median, moved = numbers.median(told), cost[name].moved
        yield Time(
            name=name,
            live=live,
            seconds=median,
            spread=(told[tenth], told[-1 - tenth]),
            moved=moved,
            share=moved / median / bandwidth,
            wanted=WANTED.get(name),
        )


def launches(
    device: torch.device, model: Model, live: int, cost: dict[str, Cost]
) -> dict[str, Callable[[], object]]:
    """What to time of what gpu_budget counts, by its name there: one eviction of one sequence."""
    unit = BLOCK * 2 * model.size
    count, blocks = model.layers * model.kv_heads, live // BLOCK
    gone = round(cost["fill, at most"].written / (count * unit * model.number))
    rows = pool(device, model, blocks, gone)
    group = model.heads // model.kv_heads
    queries = torch.randn(count, group, WINDOW, model.size, device=device).to(DTYPE)
    positions = (live - WINDOW + torch.arange(WINDOW, device=device)).expand(count, -1).contiguous()
    to = statistics.anchor(rows)
    weights = torch.rand(count, blocks, device=device)
    forced = torch.zeros(count, blocks, dtype=torch.bool, device=device)
    forced[:, [0, -1]] = True
    keep = torch.full((count,), blocks - gone, device=device)
    layers = torch.arange(count, device=device)
    source, target = ends(rows, gone, model, device)
    words = rows.cache.view(torch.int32)
    unit_words = unit * model.number // 4
    scale = model.size**-0.5
    lse = score.block_lse(rows, queries, positions, scale)
    totals, candidates = lse.logsumexp(-1), ~forced
    order = (WINDOW - 1, WINDOW - 2, WINDOW - 3)
    kept = torch.rand(count, blocks, device=device).argsort(1) < blocks - gone
    slots = torch.arange(-gone, blocks - gone, device=device).clamp(min=-1)
    made = {
        "score": lambda: score.block_lse(rows, queries, positions, scale),
        "anchors": lambda: statistics.anchor(rows),
        "cosines": lambda: statistics.statistics("cosine", rows, to),
        "walk": lambda: walk.walk(lse, candidates, order, 1.0),
        "pairs": lambda: pairs.pairs(kept, slots, blocks - gone, gone),
        "select": lambda: select.select(
            "gumbel", weights, keep, forced, seeds=[1] * count, events=[0] * count,
            layers=layers, block_ids=rows.blocks,
        ),
        "fill, at most": lambda: fill.fill(words, source, target, unit_words),
        "attention of tokens": lambda: score.token_attention(
            rows, queries, positions, totals, scale
        ),
        "pooled rows": lambda: walk.pooled(lse, "mean"),
        "norms, or ranges": lambda: statistics.statistics("norm", rows),
    }  # fmt: skip
    return {name: launch for name, launch in made.items() if name in cost}


def pool(device: torch.device, model: Model, blocks: int, gone: int) -> Rows:
    """One sequence's rows in a pool [layers, pages, KV heads, unit], at pages in random order."""
    unit, pages = BLOCK * 2 * model.size, blocks + gone
    count = model.layers * model.kv_heads
    cache = torch.empty(model.layers * pages * model.kv_heads * unit, dtype=DTYPE, device=device)
    taken = torch.randperm(pages, device=device)[:blocks]
    row = torch.arange(count, device=device)
    layer, head = row // model.kv_heads, row % model.kv_heads
    place = (layer[:, None] * pages + taken) * model.kv_heads + head[:, None]
    return Rows(
        cache=cache.normal_(),
        units=place * unit,
        blocks=torch.arange(blocks, device=device).expand(count, -1).contiguous(),
        counts=torch.full((count,), blocks, device=device),
        block=BLOCK,
        head_size=model.size,
        token_step=2 * model.size,
        values=model.size,
    )


def ends(rows: Rows, gone: int, model: Model, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where `gone` units of each row come from and go to, in int32 words; none is both."""
    order = torch.randperm(rows.shape[1], device=device)
    words = rows.units * model.number // 4
    return words[:, order[:gone]].flatten(), words[:, order[gone : 2 * gone]].flatten()


def table(found: list[Time]) -> Table:
    made = Table(["live tokens", "kernel", "MB moved", "us", "of a copy's bandwidth", "at least"])
    for time in found:
        made.rows.append(
            [
                f"{time.live:,}",
                time.name,
                f"{time.moved / 1e6:,.1f}",
                f"{time.seconds * 1e6:,.1f}",
                f"{time.share:.0%}",
                "" if time.wanted is None else f"{time.wanted:.0%}: {verdict(time.passed)}",
            ]
        )
    return made


def verdict(passed: bool | None) -> str:
    return "not asked" if passed is None else "pass" if passed else "FAIL"
