"""How far kernels and references are from float64, computed from the same stored numbers.

Bounds are in units of 2^-24, what float32 rounds a number by. docs/gpu.md states them.
"""

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nexus_vllm.kernels import score, statistics, walk
from nexus_vllm.kernels.rows import Rows
from tests.kernels.test_against_references import BLOCK, SOME, WINDOWS, asked, caches
from tests.kernels.test_walk import maps

FEW = settings(SOME, max_examples=12)
UNIT = 2.0**-24
LSE, TOKENS, WALK, STATISTICS = 6, 12, 12, 5


def exact(rows: Rows) -> Rows:
    """The same numbers in float64."""
    scales = None if rows.scales is None else rows.scales.double()
    return dataclasses.replace(rows, cache=rows.cache.double(), scales=scales)


def logits_of(rows: Rows, queries: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Logits [R, G, W, N, b], float64, and for each what its terms' sizes add up to."""
    keys = exact(rows).gather()
    logits = torch.einsum("rgwd,rnbd->rgwnb", queries.double(), keys) * scale
    size = torch.einsum("rgwd,rnbd->rgwnb", queries.double().abs(), keys.abs()) * scale
    token = rows.blocks[..., None] * BLOCK + torch.arange(BLOCK)
    seen = (token[:, None] <= positions[:, :, None, None]) & rows.exists[:, None, :, None]
    return logits.masked_fill(~seen[:, None], -torch.inf), size


@FEW
@given(
    rows=caches().filter(lambda rows: rows.shape[1] > 0),
    shape=WINDOWS,
    seed=st.integers(0, 2**31),
    loud=st.sampled_from((0.1, 1.0, 8.0)),
)
def test_attention(rows: Rows, shape: tuple[int, int], seed: int, loud: float) -> None:
    queries, positions = asked(rows, *shape, seed)
    scale = rows.head_size**-0.5 * loud
    logits, size = logits_of(rows, queries, positions, scale)
    expected = logits.logsumexp(-1)
    most = expected.nan_to_num(neginf=0).abs().maximum(size.amax(-1)).clamp(min=1)
    for function in (score.block_lse, score.block_lse_reference):
        found = function(rows, queries, positions, scale)
        off = (found - expected).masked_fill(expected.isinf(), 0).abs()
        assert (off / most).max() <= LSE * UNIT

    totals = expected.logsumexp(-1).float()
    shares = (logits - totals[..., None, None]).nan_to_num(nan=-torch.inf).exp()
    tokens = shares.mean(2).mean(1)
    bound = TOKENS * UNIT * float(size.amax().clamp(min=1))
    for function in (score.token_attention, score.token_attention_reference):
        found = function(rows, queries, positions, totals, scale)
        assert torch.allclose(found.double(), tokens, rtol=bound, atol=1e-30)


@FEW
@given(told=maps(), steps=st.integers(0, 5), pool=st.sampled_from(("mean", "max")))
def test_walks(told: Any, steps: int, pool: Any) -> None:
    lse, candidates = told
    window = lse.shape[2]
    order = tuple(window - 1 - step for step in range(min(steps, window)))
    start = torch.rand(candidates.shape)
    # An exponential is off by what its argument, relative to the row's largest, is rounded by.
    finite = lse[lse.isfinite()]
    spread = float(finite.max() - finite.min()) if finite.numel() else 0.0
    expected = walk.reference(lse.double(), candidates, order, 0.5, pool, start.double())
    for function in (walk.walk, walk.reference):
        found = function(lse, candidates, order, 0.5, pool, start)
        for mine, its in zip(found, expected, strict=True):
            assert its.dtype == torch.float64
            assert torch.allclose(mine.double(), its, rtol=(WALK + spread) * UNIT, atol=1e-30)


@FEW
@given(rows=caches().filter(lambda rows: rows.shape[1] > 0))
def test_statistics(rows: Rows) -> None:
    keys, values = exact(rows).gather(), exact(rows).gather(values=True)
    unit = functional.normalize(keys, dim=-1)
    anchor = functional.normalize(unit.sum(dim=(1, 2)), dim=-1)
    for function in (statistics.anchor, statistics.anchor_reference):
        assert (function(rows) - anchor).abs().max() <= STATISTICS * UNIT
    expected = {
        "norm": keys.norm(dim=-1),
        "cosine": (unit * anchor[:, None, None]).sum(-1),
        "range": values.amax(-1) - values.amin(-1),
    }
    for kind in statistics.KINDS:
        for function in (statistics.statistics, statistics.reference):
            off = (function(kind, rows, anchor.float()) - expected[kind]).abs()
            assert (off / expected[kind].clamp(min=1)).max() <= STATISTICS * UNIT
