"""The solver: hulls are hulls, and the greedy is a dynamic program's optimum."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm import lukv


def measured(
    layers: int = 2, heads: int = 2, blocks: int = 6, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Skewed importance, and scores that follow it more or less well, head by head; ties."""
    g = torch.Generator().manual_seed(seed)
    importance = torch.rand(layers, heads, blocks, generator=g) ** 4
    fidelity = torch.rand(layers, heads, 1, generator=g)
    noise = torch.rand(layers, heads, blocks, generator=g)
    return importance, (8 * (fidelity * importance + (1 - fidelity) * noise)).round()


def ends(blocks: int, sink: int = 1, recency: int = 1) -> Tensor:
    index = torch.arange(blocks)
    return (index < sink) | (index >= blocks - recency)


cases = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 8), st.integers(0, 500), st.integers(0, 2)
)


# --- ranking and curves -----------------------------------------------------------------------


def test_forced_blocks_first_then_score_then_newer() -> None:
    scores = torch.tensor([[[5.0, 1.0, 3.0, 3.0, -math.inf, 9.0]]])
    forced = torch.tensor([False, True, False, False, False, False])
    assert lukv.rank_blocks(scores, forced).tolist() == [[[1, 5, 0, 3, 2, 4]]]


def test_loss_is_the_importance_of_what_is_dropped() -> None:
    importance = torch.tensor([[[1.0, 2.0, 4.0, 8.0]]])
    scores = torch.tensor([[[0.0, 3.0, 2.0, 1.0]]])
    forced = torch.tensor([True, False, False, False])
    curves = lukv.loss_curves(importance, scores, forced)
    assert curves.tolist() == [[[15.0, 14.0, 12.0, 8.0, 0.0]]]
    # Beyond the forced block every run saves more per block than the one before: one run of three.
    hull = lukv.convex_curves(importance, scores, forced)
    torch.testing.assert_close(
        hull, torch.tensor([[[15.0, 14.0, 28 / 3, 14 / 3, 0.0]]], dtype=torch.float64)
    )


def hull_by_hand(curve: list[float], first: int) -> list[float]:
    """Lowest chord over each point, between any two points of the curve from `first` on."""
    size = len(curve)
    out = list(curve)
    for b in range(first, size):
        chords = [
            curve[i] + (curve[j] - curve[i]) * (b - i) / (j - i)
            for i, j in itertools.combinations(range(first, size), 2)
            if i <= b <= j
        ]
        out[b] = min([curve[b], *chords])
    return out


@given(cases)
def test_hull_is_the_lower_convex_hull(case: tuple[int, ...]) -> None:
    layers, heads, blocks, seed, sink = case
    importance, scores = measured(layers, heads, blocks, seed)
    forced = torch.arange(blocks) < sink
    first = int(forced.sum())
    curves = lukv.loss_curves(importance, scores, forced)
    hulls = lukv.convex_curves(importance, scores, forced)
    for curve, hull in zip(
        curves.flatten(0, 1).tolist(), hulls.flatten(0, 1).tolist(), strict=True
    ):
        assert hull == pytest.approx(hull_by_hand(curve, first), abs=1e-9)
        assert all(low <= high + 1e-9 for low, high in zip(hull, curve, strict=True))
        slopes = [b - a for a, b in itertools.pairwise(hull[first:])]
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(slopes)), "not convex"
        bends = [
            first + 1 + k for k, (a, b) in enumerate(itertools.pairwise(slopes)) if b > a + 1e-9
        ]
        for knot in [first, *bends, blocks]:
            assert hull[knot] == pytest.approx(curve[knot], abs=1e-9), "does not touch at a knot"


# --- the greedy -------------------------------------------------------------------------------


def best_split(curves: list[list[float]], first: int, budget: int) -> float:
    """Least total loss of exactly `budget` blocks over the heads, each at least `first`."""
    best = {0: 0.0}
    for curve in curves:
        best = {
            total: min(
                best[total - b] + curve[b] for b in range(first, len(curve)) if total - b in best
            )
            for total in range(budget + 1)
            if any(total - b in best for b in range(first, len(curve)))
        }
    return best[budget]


@given(cases)
def test_greedy_is_optimal_on_convex_curves(case: tuple[int, ...]) -> None:
    layers, heads, blocks, seed, sink = case
    importance, scores = measured(layers, heads, blocks, seed)
    forced = torch.arange(blocks) < sink
    first, size = int(forced.sum()), layers * heads
    budgets = range(max(1, first * size), size * blocks + 1)
    densities = [budget / (size * blocks) for budget in budgets]
    shares = lukv.solve(importance, scores, forced, densities)
    hulls = lukv.convex_curves(importance, scores, forced)
    losses = lukv.total_loss(hulls, shares).tolist()
    rows = hulls.flatten(0, 1).tolist()
    for budget, loss in zip(budgets, losses, strict=True):
        assert loss == pytest.approx(best_split(rows, first, budget), abs=1e-9)
    # On the raw curves no budget does better than the relaxed optimum.
    raw = lukv.loss_curves(importance, scores, forced).flatten(0, 1).tolist()
    for budget, loss in zip(budgets, losses, strict=True):
        assert best_split(raw, first, budget) >= loss - 1e-9


@given(cases)
def test_shares_add_up_and_grow(case: tuple[int, ...]) -> None:
    layers, heads, blocks, seed, sink = case
    importance, scores = measured(layers, heads, blocks, seed)
    forced = torch.arange(blocks) < sink
    for shares in (
        lukv.solve(importance, scores, forced, lukv.DENSITIES),
        lukv.replay_shares(scores, forced, lukv.DENSITIES),
    ):
        assert shares.shape == (len(lukv.DENSITIES), layers, heads)
        means = torch.tensor(lukv.DENSITIES, dtype=torch.float64)
        torch.testing.assert_close(shares.mean((1, 2)), means, atol=1e-12, rtol=0)
        assert bool((shares.diff(dim=0) >= -1e-12).all())
        assert bool(((shares >= 0) & (shares <= 1 + 1e-12)).all())
        enough = means * blocks >= float(forced.sum()) - 1e-9
        assert bool((shares[enough] * blocks >= float(forced.sum()) - 1e-9).all())


def test_budget_goes_where_the_score_is_right() -> None:
    """Head 0 needs two blocks and ranks them first; head 1 needs nothing; head 2 ranks them last.

    Half the blocks: head 2 must be kept whole to save what it needs, head 0 only in part.
    """
    importance = torch.tensor([[[5.0, 5, 0, 0], [0, 0, 0, 0], [5, 5, 0, 0]]])
    scores = torch.tensor([[[4.0, 3, 2, 1], [4, 3, 2, 1], [1, 2, 3, 4]]])
    nothing = torch.zeros(4, dtype=torch.bool)
    shares = lukv.solve(importance, scores, nothing, [2 / 12, 6 / 12])
    assert (shares * 4).tolist() == [[[2, 0, 0]], [[2, 0, 4]]]


def test_replay_is_one_ranking() -> None:
    scores = torch.tensor([[[9.0, 8, 1, 1], [5, 4, 3, 2]]])
    forced = ends(4, sink=0)
    # Forced are the last of each head; then 9, 8, 5, 4, 3, 1.
    shares = lukv.replay_shares(scores, forced, [0.25, 0.5, 5 / 8, 7 / 8])
    assert (shares * 4).tolist() == [[[1, 1]], [[3, 1]], [[3, 2]], [[3, 4]]]


def test_forced_blocks_may_differ_between_heads() -> None:
    scores = torch.zeros(1, 2, 4)
    forced = torch.tensor([[[True, True, True, False], [True, False, False, False]]])
    shares = lukv.replay_shares(scores, forced, [0.25, 0.5, 0.75])
    assert (shares * 4).tolist() == [[[1.5, 0.5]], [[3, 1]], [[3, 3]]]


def test_total_loss_is_linear_between_blocks() -> None:
    curves = torch.tensor([[[6.0, 2, 0], [4, 4, 0]]], dtype=torch.float64)
    shares = torch.tensor([[[0.25, 0.5]], [[1.0, 0.75]]])
    assert lukv.total_loss(curves, shares).tolist() == [8.0, 2.0]


@pytest.mark.parametrize(
    ("importance", "scores", "densities", "message"),
    [
        (torch.ones(1, 1, 3), torch.ones(1, 1, 4), [0.5], "must be"),
        (-torch.ones(1, 1, 3), torch.ones(1, 1, 3), [0.5], "not negative"),
        (torch.full((1, 1, 3), math.inf), torch.ones(1, 1, 3), [0.5], "finite"),
        (torch.ones(1, 1, 3), torch.full((1, 1, 3), math.nan), [0.5], "without nan"),
        (torch.ones(1, 3), torch.ones(1, 3), [0.5], r"\(1, 3\) must be \[L, H, N\]"),
        (torch.ones(1, 1, 3), torch.ones(1, 1, 3), [0.5, 1.5, 0.0], r"not \[1.5, 0.0\]"),
    ],
)
def test_solve_refuses(
    importance: Tensor, scores: Tensor, densities: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lukv.solve(importance, scores, torch.zeros(3, dtype=torch.bool), densities)
