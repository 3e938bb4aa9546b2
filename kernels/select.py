"""select: which blocks stay.

Priorities are those of `nexus_vllm.selectors`: 64-bit floats of counter-based random numbers
(`nexus_vllm.rng`), whose integers are the same bits on every device. A row is never sorted: its
K-th highest priority is found bit by bit, and the newer of equal blocks in the same way.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm import selectors

KINDS = ("topk", "gumbel", "reservoir")
"""What the kernel draws. Others sum weights over a row, which `reference` does on any device."""


def reference(
    kind: str,
    weights: Tensor,
    keep: Tensor,
    forced: Tensor,
    *,
    seeds: Sequence[int],
    events: Sequence[int],
    layers: Tensor,
    block_ids: Tensor,
    n: int = 5,
    temperature: float = 0.1,
) -> Tensor:
    """`selectors.select` of rows of several sequences: seeds, events [R] say whose each one is."""
    kept = torch.empty_like(forced)
    for which in dict.fromkeys(zip(seeds, events, strict=True)):
        told = enumerate(zip(seeds, events, strict=True))
        rows = torch.tensor([row for row, its in told if its == which], device=weights.device)
        kept[rows] = selectors.select(
            kind, weights[rows], keep[rows], forced[rows], seed=which[0], event=which[1],
            layers=layers[rows], block_ids=block_ids[rows], n=n, temperature=temperature,
            validate=False,
        )  # fmt: skip
    return kept


def select(
    kind: str,
    weights: Tensor,
    keep: Tensor,
    forced: Tensor,
    *,
    seeds: Sequence[int],
    events: Sequence[int],
    layers: Tensor,
    block_ids: Tensor,
    n: int = 5,
    temperature: float = 0.1,
) -> Tensor:
    """The same as `reference`, one launch. Raises ValueError on a kind that is not of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"select: {kind!r} has no kernel, only {', '.join(KINDS)}")
    rows, size = weights.shape
    kept = torch.empty_like(forced)
    if size == 0:
        return kept
    if kind == "gumbel" and temperature == 0:
        kind = "topk"
    address = torch.tensor([[_int64(s) for s in seeds], list(events)], device=weights.device)
    _select[(rows,)](
        weights, keep, forced, address, layers, block_ids, kept, rows, size,
        n if kind == "reservoir" else 1, temperature,
        KIND=KINDS.index(kind), SIZE=max(16, triton.next_power_of_2(size)),
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip
    return kept


def _int64(seed: int) -> int:
    """The int64 with the same low 64 bits."""
    low = seed & 0xFFFF_FFFF_FFFF_FFFF
    return low - (1 << 64) if low >> 63 else low


@triton.jit
def _avalanche(x):
    """SplitMix64's finaliser; products wrap."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _advance(state, counter):
    return _avalanche(state + (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def _uniform(state, draw):
    """An odd multiple of 2^-24 in (0, 1), float64: `nexus_vllm.rng.uniforms`."""
    bits = _advance(state, draw) >> 41
    return (2 * bits + 1).to(tl.float64) * (1.0 / 16777216)


@triton.jit
def _expm1(x):
    """exp(x) - 1 to the last bits, for x <= 0 (Kahan)."""
    u = tl.exp(x)
    near = u == 1.0
    return tl.where(near, x, (u - 1) * (x / tl.log(tl.where(near, 2.0, u))))


@triton.jit
def _log1p(y):
    """log(1 + y) to the last bits, for y > -1 (Kahan)."""
    u = 1 + y
    near = u == 1.0
    return tl.where(near, y, tl.log(u) * (y / tl.where(near, 1.0, u - 1)))


@triton.jit
def _above(keys, exists, wanted, BITS: tl.constexpr):
    """The `wanted`-th highest of the unsigned keys that exist, bit by bit."""
    found = tl.zeros((), dtype=tl.uint64)
    for step in range(BITS):
        bit = tl.full((), BITS - 1, tl.uint64) - tl.cast(step, tl.uint64)
        tried = found | (tl.full((), 1, tl.uint64) << bit)
        enough = tl.sum((exists & (keys >= tried)).to(tl.int32), 0) >= wanted
        found = tl.where(enough, tried, found)
    return found


@triton.jit
def _select(
    weights, keep, forced, address, layers, block_ids, kept, rows, size, n, temperature,
    KIND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    exists = column < size
    must = tl.load(forced + row * size + column, mask=exists, other=0) != 0
    w = tl.load(weights + row * size + column, mask=exists, other=0.0).to(tl.float64)
    w = tl.where(must, 0.0, w)  # they are out of the draw
    block = tl.load(block_ids + row * size + column, mask=exists, other=0)

    if KIND == 0:
        ranking = w
    else:
        state = _advance(tl.load(address + row).to(tl.uint64), tl.zeros((), tl.int64))
        state = _advance(state, tl.load(layers + row))
        state = _advance(state, tl.load(address + rows + row))
        state = _advance(state, block)
        draw = tl.zeros((), tl.int64)
        if KIND == 1:
            noise = tl.log(-tl.log(_uniform(state, draw)))
            ranking = tl.log(w) - temperature * noise
        else:
            lowest = tl.log(_uniform(state, draw)) / w
            highest, near = lowest, tl.zeros((SIZE,), tl.float64)
            for index in range(n):
                key = tl.log(_uniform(state, tl.cast(index, tl.int64))) / w
                lowest, highest = tl.minimum(lowest, key), tl.maximum(highest, key)
                near += _expm1(tl.maximum(key, -1.0))
            total = tl.zeros((SIZE,), tl.float64)
            top = tl.where(highest == -float("inf"), 0.0, highest)
            for index in range(n):
                total += tl.exp(tl.log(_uniform(state, tl.cast(index, tl.int64))) / w - top)
            far = tl.where(total > 0, top + tl.log(total / n), -float("inf"))
            ranking = tl.where(lowest < -1, far, _log1p(near / n))

    # Only a forced block may hold +inf, so that no weight can push one out, and only NaN -inf.
    finite = tl.minimum(tl.maximum(ranking, -1.7976931348623157e308), 1.7976931348623157e308)
    ranking = tl.where((w != w) | (ranking != ranking), -float("inf"), finite) + 0.0  # no -0
    ranking = tl.where(must, float("inf"), ranking)
    bits = ranking.to(tl.int64, bitcast=True)
    keys = (bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.uint64) ^ (
        tl.full((), 1, tl.uint64) << 63
    )
    wanted = tl.load(keep + row).to(tl.int32)
    level = _above(keys, exists, wanted, 64)
    above = exists & (keys > level)
    tied = exists & (keys == level)
    newest = _above(block.to(tl.uint64), tied, wanted - tl.sum(above.to(tl.int32), 0), 40)
    stays = above | (tied & (block.to(tl.uint64) >= newest))
    stays = stays & (wanted > 0)
    tl.store(kept + row * size + column, stays, mask=exists)
