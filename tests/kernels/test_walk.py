"""The walk and the pooling of rows: against their references, and these against the policies."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm import policies
from nexus_vllm.kernels import walk
from nexus_vllm.policies.base import Observation, block_attention
from nexus_vllm.policies.nexus import Nexus
from tests.kernels.test_against_references import SOME

BOUND = {"rtol": 2e-6, "atol": 1e-9}


@st.composite
def maps(draw: Any) -> tuple[Tensor, Tensor]:
    """Log-sum-exps [R, G, W, N] and candidates [R, N]: sharp and flat ones, rows that see nothing,
    rows of fewer blocks than others, rows without candidates."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 3, 4)))
    window, size = draw(st.sampled_from((1, 5, 16, 20))), draw(st.sampled_from((0, 1, 30, 600)))
    sharp = draw(st.sampled_from((0.0, 1.0, 20.0)))
    lse = torch.randn(rows, group, window, size, generator=random) * sharp + 10
    count = torch.randint(0, size + 1, (rows,), generator=random)
    count[0] = size
    lse.masked_fill_(torch.arange(size) >= count[:, None, None, None], -torch.inf)
    unseen = torch.rand(rows, group, window, 1, generator=random) < 0.2
    hidden = torch.rand(rows, 1, window, size, generator=random) < 0.2
    lse.masked_fill_(unseen | hidden, -torch.inf)
    candidates = torch.rand(rows, size, generator=random) < draw(st.sampled_from((0.0, 0.5, 1.0)))
    return lse, candidates


@SOME
@given(
    told=maps(),
    over=st.booleans(),
    steps=st.integers(0, 20),
    oldest=st.booleans(),
    pool=st.sampled_from(("mean", "max")),
    started=st.booleans(),
)
def test_walks(told: Any, over: bool, steps: int, oldest: bool, pool: Any, started: bool) -> None:
    lse, candidates = told
    window = lse.shape[2]
    order = tuple(range(min(steps, window)))
    if not oldest:
        order = tuple(window - 1 - step for step in order)
    start = torch.rand(candidates.shape) if started else None
    if start is not None:
        start[:, ::3] = torch.nan
    arguments = (lse, candidates if over else None, order, 0.5, pool, start)
    expected, found = walk.reference(*arguments), walk.walk(*arguments)
    for mine, its in zip(found, expected, strict=True):
        assert torch.allclose(mine, its, **BOUND)
    assert torch.allclose(found[1].sum(-1), found[1].sum(-1).round(), rtol=0, atol=1e-5)


@SOME
@given(told=maps(), pool=st.sampled_from(("mean", "max", "sum")))
def test_pooled_rows(told: Any, pool: Any) -> None:
    lse, _ = told
    expected = walk.pooled_reference(lse, pool)
    assert torch.allclose(walk.pooled(lse, pool), expected, **BOUND)


def observation(state: bool) -> tuple[Observation, Tensor]:
    """Two layers, 4 query heads to 2 KV heads, and their log-sum-exps [R, G, W, N]."""
    random = torch.Generator().manual_seed(7)
    layers, window, heads, size, block, dim = 2, 16, 4, 12, 8, 16
    queries = torch.randn(layers, window, heads, dim, generator=random)
    keys = torch.randn(layers, size, 2, block, dim, generator=random)
    ids = torch.stack([torch.randperm(20, generator=random)[:size] for _ in range(layers)])
    known = torch.rand(layers, size, 2, generator=random)
    known[:, 3] = torch.nan
    obs = Observation(
        queries=queries,
        query_positions=100 + torch.arange(window),
        keys=keys,
        block_ids=ids,
        scale=dim**-0.5,
        candidates=(ids != 0) & (ids < 15),
        seed=0,
        event=0,
        layers=torch.arange(layers),
        state=known if state else None,
    )
    grouped = queries.view(layers, window, 2, 2, dim)
    logits = torch.einsum("lwhgd,lnhbd->lhgwnb", grouped, keys) * dim**-0.5
    token = ids[..., None] * block + torch.arange(block)
    seen = token[:, None] <= obs.query_positions[:, None, None]  # type: ignore[index]
    lse = logits.masked_fill(~seen[:, None, None], -torch.inf).logsumexp(-1)
    return obs, lse.flatten(1, 2)


@pytest.mark.parametrize("pool_heads", ["mean", "max"])
@pytest.mark.parametrize("pool_rows", ["mean", "max"])
@pytest.mark.parametrize("over", ["all", "candidates"])
@pytest.mark.parametrize(
    ("rows", "order"), [("newest", (15, 14, 13)), ("oldest", (0, 1, 2)), ("spread", (15, 7, 0))]
)
@pytest.mark.parametrize("state", ["fresh", "carried"])
def test_the_reference_is_nexus(
    pool_heads: Any, pool_rows: Any, over: Any, rows: Any, order: tuple[int, ...], state: Any
) -> None:
    obs, lse = observation(state == "carried")
    policy = Nexus(
        walk_rows=rows, walk_over=over, walk_state=state, pool_rows=pool_rows,
        pool_heads=pool_heads, eps_tie=0.0,
    )  # fmt: skip
    score, found = walk.reference(
        lse, obs.candidates if over == "candidates" else None, order, policy.lam, pool_rows,
        None if obs.state is None else obs.state[..., 0],
    )  # fmt: skip
    pooled = score.mean(1) if pool_heads == "mean" else score.amax(1)
    remembered = policy.remember(obs)
    assert torch.allclose(remembered[..., 1], pooled, rtol=1e-5, atol=1e-7)
    assert torch.allclose(remembered[..., 0], found.mean(1), rtol=1e-5, atol=1e-7)


def test_pooled_rows_are_those_of_the_policies() -> None:
    obs, lse = observation(False)
    h2o = policies.make("h2o").remember(obs)[..., 0]
    assert torch.allclose(walk.pooled_reference(lse, "sum").mean(1), h2o, rtol=1e-5, atol=1e-7)
    newest = walk.pooled_reference(lse[:, :, -1:], "sum").mean(1)
    assert torch.allclose(newest, policies.make("tova").weights(obs), rtol=1e-5, atol=1e-7)
    highest = block_attention(obs).amax(-2)
    assert torch.allclose(walk.pooled_reference(lse, "max"), highest, rtol=1e-5, atol=1e-7)
