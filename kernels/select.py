"""select: which blocks stay.

Priorities are those of `nexus_vllm.selectors`: 64-bit floats of counter-based random numbers
(`nexus_vllm.rng`), whose integers are the same bits on every device. A row is never sorted: its
K-th highest priority is found bit by bit, and the newer of equal blocks in the same way.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexus_vllm import selectors
from nexus_vllm.engine.ops import sent
from nexus_vllm.rng import signed

PART = 512
"""Blocks whose priorities a program computes at once."""

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
    kept = torch.empty(rows, size, dtype=torch.bool, device=weights.device)
    if size == 0:
        return kept
    if kind == "gumbel" and temperature == 0:
        kind = "topk"
    keys = torch.empty(rows, size, dtype=torch.int64, device=weights.device)
    address = sent(torch.tensor([[signed(s) for s in seeds], list(events)]), weights.device)
    _select[(rows,)](
        weights.contiguous(), keep, forced.contiguous(), address, layers, block_ids.contiguous(),
        keys, kept, rows, size, n, temperature,
        KIND=KINDS.index(kind), PART=PART, **_shape(size),
    )  # fmt: skip
    return kept


def _shape(size: int) -> dict[str, Any]:
    """Of a row of so many blocks. Nothing is fused, so that numbers are rounded as torch does."""
    width = max(16, triton.next_power_of_2(size))
    return {"SIZE": width, "num_warps": min(16, max(4, width // 512)), "enable_fp_fusion": False}


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
def _key(ranking):
    """Unsigned integers in the order of the float64 numbers `ranking`."""
    bits = (ranking + 0.0).to(tl.int64, bitcast=True)  # no -0
    bits = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    return bits.to(tl.uint64) ^ (tl.full((), 1, tl.uint64) << 63)


@triton.jit
def _priority(w, state, n, temperature, KIND: tl.constexpr, PART: tl.constexpr):
    """Of blocks of these weights and states of the generator, float64."""
    draw = tl.zeros((), tl.int64)
    if KIND == 0:
        return w
    elif KIND == 1:
        return tl.log(w) - temperature * tl.log(-tl.log(_uniform(state, draw)))
    else:
        lowest = tl.log(_uniform(state, draw)) / w
        highest, near = lowest, tl.zeros((PART,), tl.float64)
        for index in range(n):
            key = tl.log(_uniform(state, tl.cast(index, tl.int64))) / w
            lowest, highest = tl.minimum(lowest, key), tl.maximum(highest, key)
            near += _expm1(tl.maximum(key, -1.0))
        total = tl.zeros((PART,), tl.float64)
        top = tl.where(highest == -float("inf"), 0.0, highest)
        for index in range(n):
            total += tl.exp(tl.log(_uniform(state, tl.cast(index, tl.int64))) / w - top)
        far = tl.where(total > 0, top + tl.log(total / n), -float("inf"))
        return tl.where(lowest < -1, far, _log1p(near / n))


@triton.jit(do_not_specialize=["rows", "size", "n"])
def _select(
    weights, keep, forced, address, layers, block_ids, keys, kept, rows, size, n, temperature,
    KIND: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if KIND != 0:
        state = _advance(tl.load(address + row).to(tl.uint64), tl.zeros((), tl.int64))
        state = _advance(state, tl.load(layers + row))
        state = _advance(state, tl.load(address + rows + row))
    # A part at a time, or what they take would not fit the registers.
    for first in range(0, size, PART):
        column = first + tl.arange(0, PART)
        exists = column < size
        place = row * size + column
        must = tl.load(forced + place, mask=exists, other=0) != 0
        w = tl.load(weights + place, mask=exists, other=0.0).to(tl.float64)
        w = tl.where(must, 0.0, w)  # they are out of the draw
        if KIND == 0:
            ranking = w
        else:
            its = _advance(state, tl.load(block_ids + place, mask=exists, other=0))
            ranking = _priority(w, its, n, temperature, KIND, PART)
        # Only a forced block may hold +inf, so that no weight can push one out, and only NaN -inf.
        finite = tl.minimum(tl.maximum(ranking, -1.7976931348623157e308), 1.7976931348623157e308)
        ranking = tl.where((w != w) | (ranking != ranking), -float("inf"), finite)
        key = _key(tl.where(must, float("inf"), ranking))
        tl.store(keys + place, key.to(tl.int64, bitcast=True), mask=exists)

    tl.debug_barrier()
    column = tl.arange(0, SIZE)
    exists = column < size
    place = row * size + column
    wanted = tl.load(keep + row).to(tl.int32)
    key = tl.load(keys + place, mask=exists, other=0).to(tl.uint64, bitcast=True)
    level = _above(key, exists, wanted, 64)
    above = exists & (key > level)
    tied = exists & (key == level)
    block = tl.load(block_ids + place, mask=exists, other=0).to(tl.uint64)
    newest = _above(block, tied, wanted - tl.sum(above.to(tl.int32), 0), 40)
    stays = (above | (tied & (block >= newest))) & (wanted > 0)
    tl.store(kept + place, stays, mask=exists)
