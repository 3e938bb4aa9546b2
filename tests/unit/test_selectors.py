"""Selectors: counts, ties and order; the sampling laws of Eq. 6 and of Gumbel top-k; numerics."""

import itertools
import math
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm.rng import uniforms
from nexus_vllm.selectors import SELECTORS, inclusion, priorities, select

W5 = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])


def pick(kind: str, weights: Tensor, keep: int | Tensor, **options: Any) -> Tensor:
    """`select` with plain counters: row r is layer r, block ids count up."""
    rows, size = weights.shape
    given_options: dict[str, Any] = {
        "forced": torch.zeros(rows, size, dtype=torch.bool),
        "seed": 11,
        "event": 2,
        "layers": torch.arange(rows),
        "block_ids": torch.arange(size).expand(rows, size),
    }
    return select(kind, weights, keep, **given_options | options)


def successive_sampling(weights: list[float], keep: int) -> dict[frozenset[int], float]:
    """Law of the set of `keep` successive draws in proportion to weight, without replacement."""
    law: dict[frozenset[int], float] = {}
    for order in itertools.permutations(range(len(weights)), keep):
        left, chance = sum(weights), 1.0
        for item in order:
            chance *= weights[item] / left
            left -= weights[item]
        law[frozenset(order)] = law.get(frozenset(order), 0.0) + chance
    return law


def chi_square(kept: Tensor, law: dict[frozenset[int], float]) -> tuple[float, int]:
    seen = dict.fromkeys(law, 0)
    for row in kept.tolist():
        seen[frozenset(i for i, flag in enumerate(row) if flag)] += 1
    total = len(kept)
    chi = sum((seen[s] - total * p) ** 2 / (total * p) for s, p in law.items())
    return chi, len(law) - 1


# --- the contract -----------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    keep = draw(st.integers(0, size))
    # Few distinct values, zero among them: ties are the hard part.
    values = st.sampled_from([0.0, 1e-30, 0.01, 0.5, 1.5])
    weights = draw(st.lists(values, min_size=rows * size, max_size=rows * size))
    ids = torch.stack(
        [torch.tensor(draw(st.permutations(range(3, 3 + size)))) for _ in range(rows)]
    )
    must = torch.zeros(rows, size, dtype=torch.bool)
    for row in range(rows):
        must[row, draw(st.permutations(range(size)))[: draw(st.integers(0, keep))]] = True
    return {
        "kind": draw(st.sampled_from(SELECTORS)),
        "weights": torch.tensor(weights).view(rows, size),
        "keep": keep,
        "forced": must,
        "block_ids": ids,
        "layers": torch.tensor(draw(st.permutations(range(rows)))),
        "seed": draw(st.integers(-(2**63), 2**63)),
        "event": draw(st.integers(0, 1000)),
        "n": draw(st.integers(1, 4)),
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "order": torch.tensor(draw(st.permutations(range(size)))),
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_exact_count_forced_kept_and_no_dependence_on_order(case: dict[str, Any]) -> None:
    order = case.pop("order")
    kept = select(**case)
    assert kept.dtype == torch.bool
    assert kept.sum(-1).tolist() == [case["keep"]] * len(kept)
    assert torch.all(kept[case["forced"]])
    columns = {k: case[k][:, order] for k in ("weights", "forced", "block_ids")}
    assert torch.equal(select(**case | columns), kept[:, order])
    rows = {k: case[k].flip(0) for k in ("weights", "forced", "block_ids", "layers")}
    assert torch.equal(select(**case | rows), kept.flip(0))
    assert torch.equal(select(**case, validate=False), kept)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_zero_weights_come_after_positive_ones(case: dict[str, Any]) -> None:
    case.pop("order")
    kept = select(**case)
    free = ~case["forced"]
    zero, positive = free & (case["weights"] == 0), free & (case["weights"] > 0)
    for row in range(len(kept)):
        if kept[row][zero[row]].any():
            assert kept[row][positive[row]].all()


@pytest.mark.parametrize("kind", SELECTORS)
def test_a_row_depends_on_itself_alone(kind: str) -> None:
    weights = torch.rand(6, 20, generator=torch.Generator().manual_seed(1))
    whole = pick(kind, weights, 7)
    assert torch.equal(pick(kind, weights[4:5], 7, layers=torch.tensor([4])), whole[4:5])


@pytest.mark.parametrize("kind", ["reservoir", "gumbel", "pareto", "systematic"])
def test_events_and_seeds_draw_afresh(kind: str) -> None:
    weights = torch.linspace(1, 2, 64)[None]
    kept = pick(kind, weights, 32)
    assert torch.equal(pick(kind, weights, 32), kept)
    assert not torch.equal(pick(kind, weights, 32, event=3), kept)
    assert not torch.equal(pick(kind, weights, 32, seed=12), kept)
    assert not torch.equal(pick(kind, weights, 32, layers=torch.tensor([1])), kept)


def test_topk_breaks_ties_towards_the_newer_block() -> None:
    ids = torch.tensor([[9, 2, 7, 4]])
    kept = pick("topk", torch.tensor([[0.5, 0.5, 0.5, 0.9]]), 3, block_ids=ids)
    assert ids[kept].tolist() == [9, 7, 4]


def test_many_ties_stay_in_order() -> None:
    """Sorting algorithms differ with size and device; thousands of equal weights tell."""
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(4))[None]
    kept = pick("topk", torch.full((1, 5000), 0.1), 1234, block_ids=ids)
    assert ids[kept].min() == 5000 - 1234


def test_keep_may_differ_between_rows() -> None:
    kept = pick("topk", W5.expand(3, 5), torch.tensor([0, 2, 5]))
    assert kept.sum(-1).tolist() == [0, 2, 5]
    assert kept[1].tolist() == [False, True, False, True, False]


def test_forced_stays_before_a_weight_that_is_not_finite() -> None:
    forced = torch.tensor([[True, False, False]])
    wrong = torch.tensor([[0.0, math.inf, math.nan]])
    kept = pick("topk", wrong, 1, forced=forced, validate=False)
    assert kept.tolist() == forced.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 6}, "cannot keep 6 of 5 blocks"),
        ({"keep": -1}, "cannot keep -1 of 5 blocks"),
        ({"keep": 4, "forced": torch.ones(1, 5).bool()}, "5 blocks are forced but only 4 may stay"),
        ({"weights": -W5[None]}, "finite and not negative"),
        ({"weights": W5[None] * math.nan}, "finite and not negative"),
        ({"kind": "best"}, "'best' is unknown.*topk, reservoir, gumbel, pareto, systematic"),
        ({"kind": "reservoir", "n": 0}, "n is 0"),
        ({"kind": "gumbel", "temperature": -0.1}, "temperature is -0.1"),
        ({"kind": "gumbel", "temperature": math.nan}, "temperature is nan"),
        ({"layers": torch.arange(2)}, r"layers \(2,\)"),
        ({"keep": torch.tensor([1, 2])}, "keep names 2 rows, weights have 1"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"kind": "topk", "weights": W5[None], "keep": 2}
    with pytest.raises(ValueError, match=message):
        pick(**arguments | change)


# --- laws -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e3])
@pytest.mark.parametrize(
    ("kind", "options"), [("reservoir", {"n": 1}), ("gumbel", {"temperature": 1.0})]
)
def test_one_draw_is_successive_sampling(kind: str, options: Any, scale: float) -> None:
    """Efraimidis-Spirakis = Gumbel top-k = successive sampling, at any scale of the weights."""
    kept = pick(kind, (W5 * scale).expand(6000, 5), 2, **options)
    chi, freedom = chi_square(kept, successive_sampling(W5.tolist(), 2))
    assert freedom == 9
    assert chi < 27.9  # 99.9 %


def test_gumbel_at_one_equals_one_draw_reservoir_set_by_set() -> None:
    weights = torch.rand(50, 40, generator=torch.Generator().manual_seed(2))
    same = pick("gumbel", weights, 13, temperature=1.0)
    assert torch.equal(pick("reservoir", weights, 13, n=1), same)


def test_equation_6_value() -> None:
    """At weights of order one the literal mean of u^(1/w) is safe, and ours is its logarithm."""
    layers, ids = torch.arange(1), torch.arange(5)[None]
    u = uniforms(11, 2, layers, ids, 5).double()
    literal = (u ** (1 / W5.double()[None, :, None])).mean(-1)
    ours = priorities(
        "reservoir", W5[None], seed=11, event=2, layers=layers, block_ids=ids, n=5, draws=layers
    ).exp()
    torch.testing.assert_close(ours, literal, rtol=1e-12, atol=0)


def test_many_draws_approach_the_mean_of_lemma_a2() -> None:
    """E pi = w / (w + 1), Var pi = w / (n (w + 1)^2 (w + 2)); so n -> infinity is top-k."""
    weights, n = torch.tensor([[0.2, 3.0, 0.7, 1.5]]), 20_000
    found = priorities(
        "reservoir",
        weights,
        seed=1,
        event=0,
        layers=torch.arange(1),
        block_ids=torch.arange(4)[None],
        n=n,
        draws=torch.tensor([1]),
    ).exp()
    w = weights.double()
    sigma = (w / (n * (w + 1) ** 2 * (w + 2))).sqrt()
    assert torch.all((found - w / (w + 1)).abs() < 4 * sigma)
    for keep in range(5):
        sampled = pick("reservoir", weights, keep, n=n)
        assert torch.equal(sampled, pick("topk", weights, keep))


def test_averaging_is_inert_at_the_scale_of_attention_weights() -> None:
    """methods.md 1.4: with w << 1 the largest draw decides, and n = 5 keeps the law of n = 1."""
    kept = pick("reservoir", (W5 * 1e-3).expand(6000, 5), 2, n=5)
    chi, _ = chi_square(kept, successive_sampling(W5.tolist(), 2))
    assert chi < 27.9
    kept = pick("reservoir", (W5 * 10).expand(6000, 5), 2, n=5)
    chi, _ = chi_square(kept, successive_sampling(W5.tolist(), 2))
    assert chi > 1000


def test_gumbel_cools_to_topk() -> None:
    weights = torch.rand(200, 30, generator=torch.Generator().manual_seed(3)) + 0.01
    best = pick("topk", weights, 10)
    assert torch.equal(pick("gumbel", weights, 10, temperature=0.0), best)
    overlap = [
        (pick("gumbel", weights, 10, temperature=t) & best).sum().item() / 2000
        for t in (1e-6, 0.1, 0.3, 1.0, 10.0)
    ]
    assert overlap[0] > 0.999
    assert overlap == sorted(overlap, reverse=True)
    assert overlap[-1] < 0.45  # chance is 1/3


def water_filling(weights: list[float], draws: int) -> list[float]:
    """min(1, c w) that sums to `draws`, by bisection of c."""
    low, high = 0.0, draws / min(w for w in weights if w > 0)
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * w) for w in weights) < draws else (low, c)
    return [min(1.0, high * w) for w in weights]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_inclusion_is_water_filling(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    value = st.one_of(st.sampled_from([0.0, 1e-38, 0.5, 0.5, 1e6]), st.floats(1e-6, 1.0))
    weights = data.draw(st.lists(value, min_size=size, max_size=size))
    draws = data.draw(st.integers(0, size))
    (found,) = inclusion(torch.tensor([weights], dtype=torch.float64), torch.tensor([draws]))
    positive = sum(w > 0 for w in weights)
    if draws >= positive:
        assert found.tolist() == [float(w > 0) for w in weights]
    else:
        expected = torch.tensor(water_filling(weights, draws), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert abs(found.sum().item() - draws) < 1e-9


@pytest.mark.parametrize(("kind", "slack"), [("pareto", 0.012), ("systematic", 0.0)])
def test_pi_ps_includes_each_block_with_its_probability(kind: str, slack: float) -> None:
    """20,000 draws of 3 from 8 with one forced block, one certain and one of weight 0."""
    rows = 20_000
    weights = torch.tensor([9.0, 4.0, 0.3, 0.1, 0.4, 0.0, 0.2, 0.25])
    forced = torch.zeros(rows, 8, dtype=torch.bool)
    forced[:, 0] = True
    kept = pick(kind, weights.expand(rows, 8), 4, forced=forced)
    expected = torch.tensor([1.0, *water_filling(weights[1:].tolist(), 3)], dtype=torch.float64)
    assert expected[1] == 1
    sigma = (expected * (1 - expected) / rows).sqrt()
    assert torch.all((kept.double().mean(0) - expected).abs() <= 4 * sigma + slack)


def race(chances: list[float], draws: int) -> np.ndarray:
    """Inclusion probabilities of Pareto sampling, by integration.

    Block j finishes at odds(u) / odds(p_j), so before t / (1 - t) with probability
    t p_j / (t p_j + (1 - t) (1 - p_j)); the first `draws` stay. Blocks of p = 1 are there at once.
    """
    p = np.array(chances)
    sure = p >= 1
    edges = np.linspace(0, 1, 20_001)
    ahead = edges[:, None] * p / (edges[:, None] * p + (1 - edges[:, None]) * (1 - p) + 1e-300)
    middle = (edges[1:, None] + edges[:-1, None]) / 2
    before = middle * p / (middle * p + (1 - middle) * (1 - p) + 1e-300)
    out = sure.astype(float)
    left = draws - int(sure.sum())
    for j in np.flatnonzero(~sure):
        rivals = np.zeros((len(middle), left))  # how many others are there already, if fewer
        rivals[:, :1] = 1
        for k in np.flatnonzero(~sure & (np.arange(len(p)) != j)):
            there = before[:, k, None]
            moved = np.pad(rivals, ((0, 0), (1, 0)))[:, :-1]
            rivals = rivals * (1 - there) + moved * there
        out[j] = np.diff(ahead[:, j]) @ rivals.sum(1)
    return out


def literal(weights: list[float], draws: int, n: int, trials: int) -> np.ndarray:
    """Frequencies of Eq. 6 as it is written, with random numbers of another kind."""
    u = np.random.default_rng(0).random((trials, len(weights), n))
    keys = (u ** (1 / np.array(weights))[:, None]).mean(-1)
    first = np.argpartition(-keys, draws - 1, axis=1)[:, :draws]
    return np.bincount(first.ravel(), minlength=len(weights)) / trials


TRIALS = 400_000
LAWS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {}),
    ("reservoir", {"n": 1}),
    ("reservoir", {"n": 5}),
    ("gumbel", {"temperature": 0.1}),
    ("gumbel", {"temperature": 0.3}),
    ("gumbel", {"temperature": 1.0}),
    ("pareto", {}),
    ("systematic", {}),
]
"""Selectors with their parameters, all of SELECTORS."""


def expected_inclusion(
    kind: str, options: dict[str, Any], weights: list[float], draws: int
) -> Tensor:
    """Probabilities [N] that each of N blocks of different weights, all > 0, is among `draws`.

    Gumbel noise at T on log w is noise at 1 on log w^(1/T), and that is successive sampling.
    """
    if kind == "topk":
        best = sorted(range(len(weights)), key=lambda j: weights[j])[-draws:]
        return torch.tensor([float(j in best) for j in range(len(weights))]).double()
    if kind == "reservoir" and options["n"] > 1:
        return torch.from_numpy(literal(weights, draws, options["n"], TRIALS))
    if kind == "pareto":
        return torch.from_numpy(race(water_filling(weights, draws), draws))
    if kind == "systematic":
        return torch.tensor(water_filling(weights, draws)).double()
    scaled = [w / max(weights) for w in weights]
    law = successive_sampling([w ** (1 / options.get("temperature", 1.0)) for w in scaled], draws)
    found = [sum(p for kept, p in law.items() if j in kept) for j in range(len(weights))]
    return torch.tensor(found).double()


def check_inclusion(
    kind: str, options: dict[str, Any], weights: Tensor, forced: Tensor, keep: int
) -> None:
    """20,000 draws of one row, [N], against theory: 4.5 standard errors, and its own accuracy."""
    rows = 20_000
    many = forced.expand(rows, -1)
    kept = pick(kind, weights.expand(rows, -1), keep, forced=many, **options)
    assert bool(kept[many].all())
    free = [float(w) for w in weights[~forced]]
    expected = expected_inclusion(kind, options, free, keep - int(forced.sum()))
    seen = kept.double().mean(0)[~forced]
    assert expected.sum().item() == pytest.approx(keep - int(forced.sum()), abs=1e-6)
    error = (expected * (1 - expected)).clamp(min=0).sqrt() * (1 / rows + 1 / TRIALS) ** 0.5
    assert torch.all((seen - expected).abs() <= 4.5 * error + 1e-4), f"{seen} for {expected}"


def test_every_selector_has_its_law() -> None:
    assert {kind for kind, _ in LAWS} == set(SELECTORS)


@pytest.mark.parametrize(("kind", "options"), LAWS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_inclusion_frequencies(kind: str, options: dict[str, Any], scale: float) -> None:
    weights = torch.tensor([2.0, 9.0, 0.7, 0.05, 1.2, 0.3, 0.15, 0.4]) * scale
    forced = torch.arange(8) == 1
    check_inclusion(kind, options, weights, forced, 4)


def test_systematic_spreads_over_the_text() -> None:
    """Of equal blocks every third stays, whichever the first: in order of age, not of listing."""
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(5)).expand(200, 30)
    kept = pick("systematic", torch.ones(200, 30), 10, block_ids=ids)
    firsts = set()
    for row in range(200):
        stays = sorted(ids[row, kept[row]].tolist())
        assert stays == list(range(stays[0], 30, 3))
        firsts.add(stays[0])
    assert firsts == {0, 1, 2}


def test_successive_sampling_includes_heavy_blocks_less_than_pi_ps() -> None:
    """What Lemma A.1 leaves open: inclusion under Eq. 6 is not proportional to weight."""
    p = water_filling(W5.tolist(), 2)[1]
    rows = 20_000
    shares = {k: pick(k, W5.expand(rows, 5), 2, n=1)[:, 1].double().mean() for k in SELECTORS[1:]}
    assert p == pytest.approx(0.8)
    assert shares["reservoir"] < p - 0.05
    assert abs(shares["systematic"] - p) < 0.012


# --- numerics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5])
def test_literal_powers_underflow_where_ours_do_not(n: int) -> None:
    size = 4096
    layers, ids = torch.arange(1), torch.arange(size)[None]
    weights = torch.full((1, size), 1 / size)
    literal = uniforms(5, 0, layers, ids, n).pow(1 / weights[..., None]).mean(-1)
    assert (literal == 0).float().mean() > 0.8
    ours = priorities(
        "reservoir", weights, seed=5, event=0, layers=layers, block_ids=ids, n=n, draws=layers
    )
    assert bool(ours.isfinite().all())
    assert ours.unique().numel() >= size - 8  # 23-bit uniforms: about one repeat in 4096


@pytest.mark.parametrize("weight", [1e-3, 0.3, 1.0, 2.0, 30.0, 1e6, 1e15, 1e30])
def test_equation_6_tells_weights_apart_however_large(weight: float) -> None:
    """To 12 digits of log pi, and of its distance to 0 where pi is next to 1."""
    layers, ids = torch.arange(1), torch.arange(50)[None]
    found = priorities(
        "reservoir",
        torch.full((1, 50), weight),
        seed=5,
        event=0,
        layers=layers,
        block_ids=ids,
        n=5,
        draws=layers,
    )
    exact = []
    with localcontext(Context(prec=60)):
        w = Decimal(float(torch.tensor(weight)))  # as float32 has it
        for draws in uniforms(5, 0, layers, ids, 5)[0].tolist():
            powers = [(Decimal(u).ln() / w).exp() for u in draws]
            exact.append(float((sum(powers) / 5).ln()))
    expected = torch.tensor([exact], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        ("reservoir", 1),
        ("reservoir", 5),
        ("gumbel", 1),
        ("pareto", 1),
        ("systematic", 1),
    ],
)
def test_smallest_positive_weight_still_outranks_zero(kind: str, n: int) -> None:
    weights = torch.zeros(64, 8)
    weights[:, 3] = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    assert (weights[:, 3] > 0).all()
    assert pick(kind, weights, 1, n=n, temperature=1.0)[:, 3].all()
