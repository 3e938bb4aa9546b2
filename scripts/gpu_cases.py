"""What scripts/gpu_check.py compares: each kernel, shape by shape, with float64 on the same inputs.

Nothing here imports vLLM. To cover another kernel, decorate a function with `covers`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.jit import KernelInterface

import nexus_vllm.kernels
from nexus_vllm import pairing
from nexus_vllm.engine import units as engine_units
from nexus_vllm.kernels import (
    fill,
    pairs,
    ranked,
    score,
    select,
    shift,
    statistics,
    units,
    walk,
    window,
)
from nexus_vllm.kernels.rows import Rows
from nexus_vllm.policies.base import Pool, Tokens

BLOCK = 32
SIZES = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 7, 8, 16)
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC")
WINDOWS = (16, 5, 1)
POOLS: tuple[tuple[Pool, Pool], ...] = (
    ("mean", "mean"), ("max", "mean"), ("mean", "max"), ("max", "max"),
)  # fmt: skip
LAYERS = 2


@dataclass(frozen=True)
class Place:
    """Where kernels run. small: few and tiny shapes, for Triton's interpreter."""

    device: torch.device
    small: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Four, of caches; bfloat16 twice where fp8 cannot be."""
        eight_bit = torch.float8_e4m3fn if self.has_fp8 else torch.bfloat16
        return (torch.bfloat16, torch.float16, torch.float32, eight_bit)

    @property
    def has_fp8(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (
            8, 9,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Rows of four sequences, two layers and `kv_heads` heads, and what asks them."""

    dim: int
    group: int
    window: int
    dtype: torch.dtype
    layout: str
    pools: tuple[Pool, Pool]
    kv_heads: int = 2
    lengths: tuple[int, ...] = (41, 7, 1, 0)  # blocks of each sequence
    averaged: bool = False
    scaled: bool = False  # whether what is stored has a scale, as fp8 has

    def __str__(self) -> str:
        heads = f"{self.kv_heads} heads averaged" if self.averaged else f"GQA {self.group}"
        dtype = str(self.dtype).removeprefix("torch.")
        dtype += " scaled" if self.scaled else ""
        return f"{dtype} {self.layout} size {self.dim} {heads} window {self.window}"


@dataclass(frozen=True)
class Check:
    """A kernel's comparison. error: how far it is off at one of `cases`, at most `limit`."""

    kernel: str
    limit: float
    cases: Callable[[Place], Iterable[Any]]
    error: Callable[[Place, Any], float]


@dataclass
class Result:
    """What came of a check. failures: a line each. worst: NaN where nothing was compared."""

    kernel: str
    limit: float
    compared: int = 0
    worst: float = float("nan")
    failures: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def passed(self) -> bool:
        return self.compared > 0 and not self.failures


CHECKS: list[Check] = []


def covers(
    kernel: str, cases: Callable[[Place], Iterable[Any]], limit: float = 0
) -> Callable[[Callable[[Place, Any], float]], Callable[[Place, Any], float]]:
    """Compare `kernel` (module.function) over these cases. limit 0: equal, number by number."""

    def register(error: Callable[[Place, Any], float]) -> Callable[[Place, Any], float]:
        CHECKS.append(Check(kernel, limit, cases, error))
        return error

    return register


def kernels() -> set[str]:
    """module.function of all that launches a kernel: what modules with one offer, but references.

    Found in the folder, so that what is added to it cannot be forgotten here.
    """
    found = set()
    for info in pkgutil.iter_modules(nexus_vllm.kernels.__path__):
        module = importlib.import_module(f"nexus_vllm.kernels.{info.name}")
        told = vars(module)
        if any(isinstance(value, KernelInterface) for value in told.values()):
            found |= {
                f"{info.name}.{name}"
                for name, value in told.items()
                if inspect.isfunction(value) and value.__module__ == module.__name__
                if not name.startswith("_") and not name.endswith("reference")
            }
    return found


def uncovered() -> set[str]:
    return kernels() - {check.kernel for check in CHECKS}


def run(check: Check, place: Place) -> Result:
    """Compare at every case. What raises, or is NaN, is a failure as well."""
    result, begin = Result(check.kernel, check.limit), time.perf_counter()
    for case in check.cases(place):
        result.compared += 1
        try:
            error = check.error(place, case)
        except Exception as raised:
            last = traceback.extract_tb(raised.__traceback__)[-1]
            told = f"{type(raised).__name__}: {raised} ({last.name}, line {last.lineno})"
            result.failures.append(f"{case}: {told}")
            continue
        if not error <= check.limit:
            result.failures.append(f"{case}: off by {error:.3g}")
        if not error <= result.worst:  # also where that is NaN
            result.worst = error
    result.seconds = time.perf_counter() - begin
    return result


# Inputs ------------------------------------------------------------------------------------------


def shapes(place: Place) -> Iterator[Shape]:
    """An 8B model's; 35 in which any two of the lists meet in every combination; the largest.

    The lengths of the lists have no common factor: 5 sizes, 7 groups, 4 dtypes, 3 layouts.
    """
    if place.small:
        for step, dim in ((1, 64), (3, 80)):
            yield replace(_shape(place, step), dim=dim, lengths=(6, 1, 0), kv_heads=1)
        return
    large = (257, 96, 1, 0)
    yield Shape(128, 4, 16, torch.bfloat16, "LBHNC", ("mean", "mean"), kv_heads=8, lengths=large)
    for step in range(len(SIZES) * len(GROUPS)):
        yield _shape(place, step)
    for dtype in dict.fromkeys(place.dtypes):  # what takes most registers and shared memory
        yield Shape(SIZES[-1], GROUPS[-1], WINDOWS[0], dtype, LAYOUTS[0], POOLS[0])


def _shape(place: Place, step: int) -> Shape:
    def turn(values: Sequence[Any], by: int = 1) -> Any:
        return values[step // by % len(values)]

    dims = turn(SIZES), turn(GROUPS), turn(WINDOWS, 2)
    scaled = step % len(place.dtypes) == len(place.dtypes) - 1
    return Shape(*dims, turn(place.dtypes), turn(LAYOUTS), turn(POOLS, 3), scaled=scaled)


def asked_shapes(place: Place) -> Iterator[Shape]:
    """Those, and some in which a row averages KV heads."""
    yield from shapes(place)
    for step in (1,) if place.small else (0, 1, 2):
        told = replace(_shape(place, step), group=1, averaged=True)
        yield replace(told, lengths=(5, 1, 0), kv_heads=2) if place.small else told


def rows_of(place: Place, shape: Shape) -> tuple[Rows, torch.Generator]:
    """Rows whose blocks lie scattered in a pool, and the generator for what comes after."""
    random = torch.Generator().manual_seed(1000 * shape.dim + shape.group)
    content, heads = 2 * shape.dim, shape.kv_heads
    pages = sum(shape.lengths) + 3
    page = heads * BLOCK * content
    head, token = BLOCK * content, content
    layer, step = pages * page, page
    if shape.layout == "LBNHC":
        head, token = content, heads * content
    elif shape.layout == "BLHNC":
        layer, step = page, LAYERS * page
    cache = torch.randn(LAYERS * pages * page, generator=random)
    free, size = torch.randperm(pages, generator=random), max(shape.lengths)
    places, blocks, counts = [], [], []
    for length in shape.lengths:
        taken, free = free[:length], free[length:]
        ids = torch.randperm(2 * size, generator=random)[:length]
        for index in range(LAYERS):
            for first in range(1 if shape.averaged else heads):
                # What a row lacks must not be looked at: it lies outside of the pool.
                places.append(torch.full((size,), -(2**40)))
                places[-1][:length] = index * layer + taken * step + first * head
                blocks.append(torch.full((size,), 2**40))
                blocks[-1][:length] = ids
                counts.append(length)
    scales = 0.5 + torch.rand(2, len(counts), generator=random)
    return Rows(
        cache=cache.to(shape.dtype).to(place.device),
        units=torch.stack(places).to(place.device),
        blocks=torch.stack(blocks).to(place.device),
        counts=torch.tensor(counts).to(place.device),
        block=BLOCK,
        head_size=shape.dim,
        token_step=token,
        values=shape.dim,
        heads=heads if shape.averaged else 1,
        head_step=head if shape.averaged else 0,
        scales=scales.to(place.device) if shape.scaled else None,
    ), random


def asking(
    place: Place, shape: Shape, rows: Rows, random: torch.Generator
) -> tuple[Tensor, Tensor, float]:
    """Queries, their positions (some see not all blocks, some none) and the scale of logits."""
    size = (rows.shape[0], shape.group, shape.window, shape.dim)
    eight_bit = shape.dtype.itemsize == 1
    queries = torch.randn(size, generator=random).to(torch.bfloat16 if eight_bit else shape.dtype)
    last = 2 * max(shape.lengths) * BLOCK
    first = torch.randint(-shape.window, last, (rows.shape[0], 1), generator=random)
    positions = first + torch.arange(shape.window)
    return queries.to(place.device), positions.to(place.device), shape.dim**-0.5


# What kernels should give, in float64 ------------------------------------------------------------


def exact(rows: Rows, values: bool = False) -> Tensor:
    """Keys, or values, [R, N, block, D] float64."""
    wide = replace(rows, cache=rows.cache.double(), heads=1, scales=None)
    found = [
        replace(wide, keys=rows.keys + head * rows.head_step).gather(values)
        for head in range(rows.heads)
    ]
    mean = torch.stack(found).mean(0)
    return mean if rows.scales is None else mean * rows.scales[int(values), :, None, None, None]


def exact_logits(rows: Rows, queries: Tensor, positions: Tensor, scale: float) -> Tensor:
    """[R, G, W, N, b] float64."""
    logits = torch.einsum("rgwd,rnbd->rgwnb", queries.double(), exact(rows)) * scale
    token = rows.blocks[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    seen = (token[:, None] <= positions[:, :, None, None]) & rows.exists[:, None, :, None]
    return logits.masked_fill(~seen[:, None], -torch.inf)


def distance(found: Tensor, expected: Tensor, relative_to: float | None = None) -> float:
    """The largest difference; with `relative_to`, as a share of what is expected plus that.

    Infinite where one is infinite and the other is not, NaN where one is NaN.
    """
    if found.shape != expected.shape:
        raise ValueError(f"got {tuple(found.shape)}, expected {tuple(expected.shape)}")
    found = found.double()
    apart = torch.where(found == expected, 0.0, (found - expected).abs())
    if relative_to is not None:
        apart = apart / (expected.abs() + relative_to)
    return float(apart.max()) if apart.numel() else 0.0


def unequal(found: Tensor, expected: Tensor) -> float:
    """How many numbers differ."""
    if found.shape != expected.shape:
        raise ValueError(f"got {tuple(found.shape)}, expected {tuple(expected.shape)}")
    return float((found.cpu() != expected.cpu()).sum())


def twice(kernel: Callable[[], Tensor]) -> Tensor:
    """What a kernel returns, the same bits each time."""
    first, second = kernel(), kernel()
    if not torch.equal(first, second):
        raise ValueError("two runs on the same inputs differ")
    return first


def captured(place: Place, kernel: Callable[[], None], outputs: Sequence[Tensor]) -> None:
    """Launch it; on a GPU from a CUDA graph, which nothing that allocates or waits gets into."""
    before = [output.clone() for output in outputs]
    kernel()
    if place.device.type != "cuda":
        return
    torch.cuda.synchronize(place.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel()
    for output, told in zip(outputs, before, strict=True):
        output.copy_(told)
    graph.replay()
    torch.cuda.synchronize(place.device)


# Kernels -----------------------------------------------------------------------------------------


@covers("score.block_lse", asked_shapes, limit=1e-4)
def block_lse(place: Place, shape: Shape) -> float:
    rows, random = rows_of(place, shape)
    queries, positions, scale = asking(place, shape, rows, random)
    expected = exact_logits(rows, queries, positions, scale).logsumexp(-1)
    return distance(twice(lambda: score.block_lse(rows, queries, positions, scale)), expected)


@covers("score.token_attention", asked_shapes, limit=1e-3)
def token_attention(place: Place, shape: Shape) -> float:
    """Relative: what a token gets may be a billionth."""
    rows, random = rows_of(place, shape)
    queries, positions, scale = asking(place, shape, rows, random)
    logits = exact_logits(rows, queries, positions, scale)
    totals = logits.flatten(-2).logsumexp(-1).float()
    shares = (logits - totals[..., None, None].double()).nan_to_num(nan=-torch.inf).exp()
    over_rows, over_heads = shape.pools
    shares = shares.mean(2) if over_rows == "mean" else shares.amax(2)
    expected = shares.mean(1) if over_heads == "mean" else shares.amax(1)
    told = (rows, queries, positions, totals, scale, over_rows, over_heads)
    return distance(twice(lambda: score.token_attention(*told)), expected, relative_to=1e-9)


@dataclass(frozen=True)
class Walk:
    """Maps of `group` query heads a row, of W rows of so many blocks, and how they are pooled."""

    window: int
    group: int
    blocks: int
    pool: walk.Rows
    chosen: bool  # whether the walk runs over some blocks only
    begun: bool  # whether it starts from something


def walks(place: Place) -> Iterator[Walk]:
    sizes = ((5, 2, 30),) if place.small else (
        (16, 4, 256), (16, 4, 4096), (1, 1, 1), (5, 7, 61), (32, 16, 1025), (3, 3, 0),
    )  # fmt: skip
    hows: tuple[tuple[walk.Rows, bool, bool], ...] = (
        ("mean", False, False), ("max", True, False), ("sum", True, True), ("mean", False, True),
    )  # fmt: skip
    for back, group, blocks in sizes:
        for pool, chosen, begun in hows:
            yield Walk(back, group, blocks, pool, chosen, begun)


def maps(place: Place, case: Walk) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exps [R, G, W, N], candidates [R, N] and beginnings [R, N].

    One row has no block, one half of them; some queries see nothing.
    """
    random = torch.Generator().manual_seed(case.window + case.blocks)
    shape = (4, case.group, case.window, case.blocks)
    lse = torch.randn(shape, generator=random) * 5 + 10
    counts = torch.tensor([case.blocks, case.blocks // 2, 0, case.blocks])[:, None, None, None]
    lse.masked_fill_(torch.arange(case.blocks) >= counts, -torch.inf)
    lse.masked_fill_(torch.rand(*shape[:3], 1, generator=random) < 0.2, -torch.inf)
    candidates = torch.rand(4, case.blocks, generator=random) < 0.7
    start = torch.rand(4, case.blocks, generator=random)
    start[:, ::3] = torch.nan
    return lse.to(place.device), candidates.to(place.device), start.to(place.device)


@covers("walk.walk", walks, limit=1e-4)
def walking(place: Place, case: Walk) -> float:
    """Relative: a block's score may be a millionth."""
    lse, candidates, start = maps(place, case)
    chosen = candidates if case.chosen else None
    order = tuple(range(case.window - 1, -1, -1))[: max(1, case.window - 1)]
    begun = start if case.begun else None
    expected = walk.reference(
        lse.double(), chosen, order, 0.7, case.pool, None if begun is None else begun.double()
    )
    found = twice(lambda: torch.stack(walk.walk(lse, chosen, order, 0.7, case.pool, begun)))
    return distance(found, torch.stack(expected), relative_to=1e-9)


@dataclass(frozen=True)
class Ranking:
    """Rows of so many blocks, and how a block's tokens count together."""

    rows: int
    blocks: int
    tokens: Tokens


def rankings(place: Place) -> Iterator[Ranking]:
    for rows, blocks in ((2, 70),) if place.small else ((256, 256), (256, 4096), (3, 1), (5, 61)):
        for tokens in get_args(Tokens):
            yield Ranking(rows, blocks, tokens)


@covers("ranked.ranked", rankings, limit=1e-4)
def weighing(place: Place, case: Ranking) -> float:
    """Relative: e^z of tokens' scores in standard deviations, in float64."""
    random = torch.Generator().manual_seed(case.blocks)
    scores = torch.randn(case.rows, case.blocks, BLOCK, generator=random) + 3
    candidates = torch.rand(case.rows, case.blocks, generator=random) < 0.8
    candidates[:, 0] = True
    wide = scores.double()
    if case.tokens != "sum":
        pooled = wide.amax(-1) if case.tokens == "max" else wide.mean(-1)
        wide = pooled[..., None]
    inside = candidates[..., None].expand_as(wide)
    count = inside.sum((1, 2), keepdim=True)
    mean = (wide * inside).sum((1, 2), keepdim=True) / count
    deviation = (((wide - mean) ** 2 * inside).sum((1, 2), keepdim=True) / count).sqrt()
    least = mean.abs() * 2.0**-16  # what differs in the last bits does not count
    z = ((wide - mean) / deviation.maximum(least)).clamp(-80, 80)
    there = scores.to(place.device), candidates.to(place.device)
    found = twice(lambda: ranked.ranked(*there, case.tokens))
    return distance(found.cpu(), z.exp().sum(-1), relative_to=1e-9)


@covers("walk.pooled", walks, limit=1e-4)
def pooling(place: Place, case: Walk) -> float:
    lse, _, _ = maps(place, case)
    expected = walk.pooled_reference(lse.double(), case.pool)
    return distance(twice(lambda: walk.pooled(lse, case.pool)), expected, relative_to=1e-9)


@covers("statistics.anchor", shapes, limit=1e-5)
def anchor(place: Place, shape: Shape) -> float:
    rows, _ = rows_of(place, shape)
    return distance(twice(lambda: statistics.anchor(rows)), exact_anchor(rows))


def exact_anchor(rows: Rows) -> Tensor:
    unit = functional.normalize(exact(rows), dim=-1)
    return functional.normalize(unit.sum(dim=(1, 2)), dim=-1)


@covers("statistics.statistics", shapes, limit=1e-5)
def token_statistics(place: Place, shape: Shape) -> float:
    """Norms and ranges relative to themselves plus 1; cosines as they are, at most 1."""
    rows, _ = rows_of(place, shape)
    keys, values, to = exact(rows), exact(rows, values=True), exact_anchor(rows).float()
    expected = {
        "norm": keys.norm(dim=-1),
        "cosine": (functional.normalize(keys, dim=-1) * to.double()[:, None, None]).sum(-1),
        "range": values.amax(-1) - values.amin(-1),
    }
    errors = []
    for kind in get_args(statistics.Kind):
        found = twice(partial(statistics.statistics, kind, rows, to))
        errors.append(distance(found, expected[kind], relative_to=1.0))
    return max(errors)


@dataclass(frozen=True)
class Draw:
    """How blocks are drawn. steep: the power that weights are raised to, so that they differ."""

    kind: str
    n: int
    temperature: float
    rows: int
    blocks: int
    steep: int

    def __str__(self) -> str:
        return f"{self.kind} n={self.n} T={self.temperature}, {self.rows} rows of {self.blocks}"


def draws(place: Place) -> Iterator[Draw]:
    kinds: tuple[tuple[str, int, float], ...] = (
        ("topk", 1, 0.0), ("gumbel", 1, 0.1), ("gumbel", 1, 1.0), ("gumbel", 1, 0.0),
        ("reservoir", 1, 0.0), ("reservoir", 5, 0.0),
    )  # fmt: skip
    if place.small:  # one of each
        kinds = (kinds[0], kinds[1], kinds[5])
    sizes = ((3, 17),) if place.small else ((256, 256), (256, 4096), (7, 1), (5, 61), (33, 1025))
    for index, (rows, blocks) in enumerate(sizes):
        for kind, n, temperature in kinds:
            yield Draw(kind, n, temperature, rows, blocks, (1, 8, 0, 40)[index % 4])


@covers("select.select", draws)
def selection(place: Place, draw: Draw) -> float:
    """Blocks that are chosen otherwise than by the reference on the CPU, whose draw is float64."""
    random = torch.Generator().manual_seed(draw.rows * draw.blocks)
    shape = (draw.rows, draw.blocks)
    weights = torch.rand(shape, generator=random) ** draw.steep
    odd = torch.tensor([0.0, 1e-45, 1e-38, 3e38])
    rare = torch.rand(shape, generator=random) < 0.05
    weights[rare] = odd[torch.randint(0, len(odd), (int(rare.sum()),), generator=random)]
    forced = torch.rand(shape, generator=random) < 0.1
    keep = torch.randint(0, draw.blocks + 1, (draw.rows,), generator=random)
    ids = [torch.randperm(2 * draw.blocks, generator=random) for _ in range(draw.rows)]
    told: dict[str, Any] = {
        "weights": weights,
        "keep": keep.maximum(forced.sum(-1)),
        "forced": forced,
        "layers": torch.arange(draw.rows) * 3,
        "block_ids": torch.stack(ids)[:, : draw.blocks],
    }
    rest: dict[str, Any] = {
        "seeds": [(-1) ** row * (2**63 - 1 - row % 3) for row in range(draw.rows)],
        "events": [row % 2 for row in range(draw.rows)],
        "n": draw.n,
        "temperature": draw.temperature,
    }
    expected = select.reference(draw.kind, **told, **rest)
    moved = {name: value.to(place.device).contiguous() for name, value in told.items()}
    return unequal(twice(lambda: select.select(draw.kind, **moved, **rest)), expected)


@dataclass(frozen=True)
class Copies:
    """Rows of `most` copies of `words` int32 each; counted: of each row only some are made."""

    words: int
    rows: int
    most: int
    counted: bool = False


def copies(place: Place) -> Iterator[Copies]:
    """Pages and units of several models, odd ends of a program's; the counts of an eviction."""
    if place.small:
        yield from (Copies(1028, 1, 2), Copies(4, 1, 1), Copies(1028, 3, 2, counted=True))
        return
    for words, rows, most in (
        (4096, 256, 8), (32768, 1, 64), (1028, 3, 11), (5120, 1, 7), (4, 1, 3), (1024, 256, 300),
    ):  # fmt: skip
        yield Copies(words, rows, most)
        yield Copies(words, rows, most, counted=True)


@covers("fill.fill", copies)
def copying(place: Place, case: Copies) -> float:
    random = torch.Generator().manual_seed(case.words + case.most)
    total = case.rows * case.most
    size = (2 * total + 3) * case.words
    cache = torch.randint(-(2**31), 2**31 - 1, (size,), generator=random, dtype=torch.int32)
    places = torch.randperm(2 * total + 3, generator=random)[: 2 * total] * case.words
    source, target = places.view(2, case.rows, case.most)
    counts = None
    if case.counted:
        counts = torch.randint(0, case.most + 1, (case.rows,), generator=random)
        counts[0] = case.most
    found = cache.to(place.device, copy=True)
    fill.reference(cache, source, target, case.words, counts)
    there = [part.to(place.device) for part in (source, target)]
    there_counts = None if counts is None else counts.to(place.device)
    fill.fill(found, there[0], there[1], case.words, there_counts)
    return unequal(found, cache)


@dataclass(frozen=True)
class Moves:
    """Rows of so many blocks, of which as many stay as there are places."""

    rows: int
    blocks: int
    places: int
    own: bool  # whether each row has places of its own


def evictions(place: Place) -> Iterator[Moves]:
    sizes = ((2, 9, 5),) if place.small else (
        (256, 256, 248), (256, 4096, 3968), (7, 1, 1), (5, 61, 0), (33, 1025, 512), (3, 40000, 9),
    )  # fmt: skip
    for rows, blocks, places in sizes:
        for own in (False, True):
            yield Moves(rows, blocks, places, own)


@covers("pairs.pairs", evictions)
def moving(place: Place, case: Moves) -> float:
    """Of sources and targets only what counts say is looked at: the rest is of no use."""
    random = torch.Generator().manual_seed(case.blocks)
    slots = torch.full((case.rows if case.own else 1, case.blocks), -1)
    for row in slots:
        stay = torch.randperm(case.blocks, generator=random)[: case.places]
        row[stay] = torch.arange(case.places)
    shape = (case.rows, case.blocks)
    kept = torch.rand(shape, generator=random).argsort(1) < case.places
    most = min(case.places, case.blocks - case.places)
    expected = pairing.pair(kept, slots if case.own else slots[0], case.places, most)
    there = kept.to(place.device), (slots if case.own else slots[0]).to(place.device)
    found = pairs.pairs(*there, case.places, most)
    made = torch.arange(most) < expected.counts[:, None]
    return sum(
        (
            unequal(found.taken, expected.taken),
            unequal(found.counts, expected.counts),
            unequal(found.source.cpu().where(made, -1), expected.source.where(made, -1)),
            unequal(found.target.cpu().where(made, -1), expected.target.where(made, -1)),
        )
    )


@dataclass(frozen=True)
class Tables:
    """Requests of `kinds`; heads hold up to `most` units apart, in a model of such a shape."""

    layers: int
    heads: int
    most: int
    kinds: tuple[str, ...] = ("apart", "alike", "padding", "apart")


def unit_tables(place: Place) -> Iterator[Tables]:
    yield from (Tables(2, 2, 9),) if place.small else (
        Tables(32, 8, 256), Tables(2, 1, 4096), Tables(3, 3, 0), Tables(32, 8, 61, ("apart",) * 64),
    )  # fmt: skip


@covers("units.tables", unit_tables)
def tables_of_units(place: Place, case: Tables) -> float:
    random = torch.Generator().manual_seed(case.most)
    pages, requests, shape = 50, len(case.kinds), (case.layers, case.heads)

    def drawn(most: int, *size: int) -> Tensor:
        return torch.randint(0, most, size, generator=random)

    held: list[tuple[Tensor, Tensor] | None] = []
    for kind in case.kinds:
        counts, taken = drawn(case.most + 1, *shape), drawn(2**30, *shape, case.most)
        taken[torch.arange(case.most) >= counts[..., None]] = -1
        held.append((taken, counts) if kind == "apart" else None)
    first = [0 if kind == "padding" else 7 for kind in case.kinds]
    tail = [0 if kind == "padding" else 1 + row % 5 for row, kind in enumerate(case.kinds)]
    lengths = torch.tensor([(a + b) * BLOCK - (b > 0) for a, b in zip(first, tail, strict=True)])
    table, base = drawn(pages, requests, 13).int(), drawn(2**20, case.layers) * case.heads
    rest = (case.heads, BLOCK, case.most + 5)
    expected = engine_units.unit_tables(held, first, tail, table, lengths.int(), base, *rest)
    there = [
        None if dealt is None else (dealt[0].to(place.device), dealt[1].to(place.device))
        for dealt in held
    ]
    told = [part.to(place.device) for part in (table, lengths.int(), base)]
    found = units.tables(there, first, tail, told[0], told[1], told[2], *rest)
    return unequal(found[0], expected[0]) + unequal(found[1], expected[1])


def batches(place: Place) -> Iterator[tuple[int, int]]:
    """Requests of a step, and the most that each has: blocks, or new tokens."""
    yield from ((3, 9),) if place.small else ((1, 1), (7, 300), (64, 4096), (256, 40))


@covers("shift.shift", batches)
def shifting(place: Place, case: tuple[int, int]) -> float:
    requests, width = case
    random = torch.Generator().manual_seed(width)

    def upto(most: Tensor) -> Tensor:
        return (torch.rand(requests, generator=random) * (most + 1)).int().minimum(most)

    table = torch.randint(0, 9999, (requests, width), generator=random, dtype=torch.int32)
    blocks = upto(torch.full((requests,), width, dtype=torch.int32))
    blocks[-1] = 0  # padding
    released = upto(blocks)
    told = [part.to(place.device) for part in (table, blocks * BLOCK, released)]
    expected = torch.full_like(told[0], -7), torch.full_like(told[1], -7)
    found = torch.full_like(told[0], -7), torch.full_like(told[1], -7)
    shift.reference(told[0], told[1], told[2], BLOCK, expected)
    captured(place, lambda: shift.shift(told[0], told[1], told[2], BLOCK, found), found)
    return unequal(found[0], expected[0]) + unequal(found[1], expected[1])


def rings(place: Place) -> Iterator[tuple[int, int, torch.dtype]]:
    """Requests, and most of new tokens of each, in every dtype of a model."""
    for requests, most in batches(place):
        for dtype in place.dtypes[: 1 if place.small else 3]:
            yield requests, most, dtype


@covers("window.window", rings)
def recording(place: Place, case: tuple[int, int, torch.dtype]) -> float:
    requests, most, dtype = case
    random = torch.Generator().manual_seed(most)
    heads, dim, rows = (3, 80, 5) if place.small else (32, 128, 17)

    def drawn(most: int) -> Tensor:
        return torch.randint(0, most + 1, (requests,), generator=random, dtype=torch.int32)

    new = drawn(most)
    slots = torch.randperm(requests, generator=random).int()
    slots[drawn(3) == 0] = -1  # padding, or a request that is not recorded
    starts = functional.pad(new.cumsum(0), (1, 0)).int()
    query = torch.randn(int(starts[-1]) + 3, heads, dim, generator=random).to(dtype)
    lengths = new + drawn(99)
    query, starts, lengths, slots = (
        part.to(place.device) for part in (query, starts, lengths, slots)
    )
    expected = torch.zeros(requests * rows, heads, dim, dtype=dtype, device=place.device)
    found = torch.zeros_like(expected)
    window.reference(query, starts, lengths, slots, rows, expected)
    captured(place, lambda: window.window(query, starts, lengths, slots, rows, found), [found])
    return unequal(found, expected)
