"""Allocators: one contract for all of them, and each against its rule in plain Python."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm import allocators
from nexus_vllm.allocators import ALLOCATORS, Allocator, Situation
from nexus_vllm.allocators.base import apportion
from nexus_vllm.allocators.cake import Cake
from nexus_vllm.allocators.lu import Lu
from nexus_vllm.profile import ModelFacts, Profile


def profile_of(shares: list[list[list[float]]], densities: tuple[float, ...]) -> Profile:
    table = torch.tensor(shares, dtype=torch.float64)
    facts = ModelFacts("tiny", table.shape[1], table.shape[2], 4)
    return Profile(facts, "nexus", {}, 32, densities, table)


def random_profile(layers: int, heads: int, generator: torch.Generator) -> Profile:
    """Two knots at 0.25 and 0.5, some shares at 0."""
    draw = torch.rand(layers, heads, generator=generator, dtype=torch.float64)
    draw = (draw - 0.2).clamp(min=0) + 1e-9
    quarter = draw / draw.mean() / 4
    quarter = 0.25 + (quarter - 0.25) * min(1.0, 0.25 / float(quarter.max() - 0.25 + 1e-9))
    return profile_of([quarter.tolist(), (2 * quarter).tolist()], (0.25, 0.5))


def make(name: str, layers: int, heads: int, seed: int = 0, **params: Any) -> Allocator:
    generator = torch.Generator().manual_seed(seed)
    return allocators.make(name, random_profile(layers, heads, generator), **params)


def situation(
    layers: int = 2,
    heads: int = 3,
    seen: int = 10,
    budget: int = 4,
    floor: int | Tensor = 1,
    capacity: Tensor | None = None,
    weights: Tensor | None = None,
    seed: int = 0,
) -> Situation:
    """Forced and padding slots are anywhere; random weights and preference unless given."""
    g = torch.Generator().manual_seed(seed)
    shape = (layers, heads)
    floor = torch.full(shape, floor) if isinstance(floor, int) else floor
    capacity = torch.full(shape, seen) if capacity is None else capacity
    ids = torch.rand(*shape, seen, generator=g).argsort(-1)
    place = torch.rand(*shape, seen, generator=g).argsort(-1)
    candidates = (place >= floor[..., None]) & (place < capacity[..., None])
    if weights is None:
        weights = torch.rand(*shape, seen, generator=g)
    return Situation(
        budget=budget,
        seen=seen,
        capacity=capacity,
        floor=floor,
        weights=weights,
        candidates=candidates,
        block_ids=ids,
        preference=torch.rand(layers, generator=g),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Ragged capacities and floors, any budget they allow, weights with ties and infinities."""
    layers, heads, seen = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    size = layers * heads

    def table(low: int, high: int) -> Tensor:
        cells = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return torch.tensor(cells).view(layers, heads)

    capacity = table(draw(st.sampled_from([1, seen])), seen)
    floor = torch.minimum(table(0, draw(st.integers(0, seen))), capacity)
    least, most = -(-int(floor.sum()) // size), int(capacity.sum()) // size
    if least > most:
        floor, least = torch.zeros_like(floor), 0
    seed = draw(st.integers(0, 1000))
    g = torch.Generator().manual_seed(seed)
    values = draw(st.sampled_from([[0.0], [0.0, 1.0, 2.0], [-math.inf, -1.0, 0.5, math.inf]]))
    weights = torch.tensor(values)[torch.randint(len(values), (layers, heads, seen), generator=g)]
    if draw(st.booleans()):
        weights = torch.rand(layers, heads, seen, generator=g)
    drawn = situation(
        layers=layers,
        heads=heads,
        seen=seen,
        budget=draw(st.integers(least, most)),
        floor=floor,
        capacity=capacity,
        weights=weights,
        seed=seed,
    )
    preference = draw(
        st.lists(st.sampled_from([0.0, 1e-30, 0.3, 1.0]), min_size=layers, max_size=layers)
    )
    return dataclasses.replace(drawn, preference=torch.tensor(preference))


def reorder(seen: Situation, layers: Tensor, heads: Tensor, slots: Tensor) -> Situation:
    def pick(table: Tensor | None) -> Tensor:
        assert table is not None
        return table[layers][:, heads]

    assert seen.preference is not None
    return dataclasses.replace(
        seen,
        capacity=pick(seen.capacity),
        floor=pick(seen.floor),
        weights=pick(seen.weights)[..., slots],
        candidates=pick(seen.candidates)[..., slots],
        block_ids=pick(seen.block_ids)[..., slots],
        preference=seen.preference[layers],
    )


# --- the contract -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", allocators.names())
@given(seen=situations(), seed=st.integers(0, 1000))
def test_contract(name: str, seen: Situation, seed: int) -> None:
    layers, heads = seen.floor.shape
    allocator = make(name, layers, heads, seed)
    shown = seen
    if not allocator.needs_weights:
        shown = dataclasses.replace(shown, weights=None, candidates=None, block_ids=None)
    if not allocator.needs_preference:
        shown = dataclasses.replace(shown, preference=None)
    counts = allocator.counts(shown)
    assert counts.dtype == torch.int64
    assert counts.shape == seen.floor.shape
    assert int(counts.sum()) == seen.total == seen.budget * layers * heads
    assert bool((counts >= seen.floor).all())
    assert bool((counts <= seen.capacity).all())
    assert torch.equal(allocator.counts(seen), counts), "other inputs, or chance, play a part"

    g = torch.Generator().manual_seed(seed)
    assert seen.weights is not None
    slots = torch.randperm(seen.weights.shape[-1], generator=g)
    order = reorder(seen, torch.arange(layers), torch.arange(heads), slots)
    assert torch.equal(allocator.counts(order), counts), "the order of blocks plays a part"


@pytest.mark.parametrize("name", allocators.names())
def test_nothing_is_lost_when_the_budget_is_everything(name: str) -> None:
    seen = situation(budget=10)
    assert torch.equal(make(name, 2, 3).counts(seen), seen.capacity)


@pytest.mark.parametrize("name", allocators.names())
def test_only_forced_blocks_when_the_budget_is_that(name: str) -> None:
    seen = situation(budget=2, floor=torch.tensor([[0, 4, 1], [3, 3, 1]]))
    assert torch.equal(make(name, 2, 3).counts(seen), seen.floor)


@pytest.mark.parametrize("name", ["uniform", "cake", "ada", "global", "pyramid"])
@pytest.mark.parametrize("seed", range(5))
def test_order_of_heads_and_layers(name: str, seed: int) -> None:
    """Heads and, but for pyramid, layers are interchangeable, up to who gets a rounded block."""
    seen = situation(layers=3, heads=4, seen=12, budget=5, seed=seed)
    g = torch.Generator().manual_seed(seed)
    layers = torch.arange(3) if name == "pyramid" else torch.randperm(3, generator=g)
    heads, slots = torch.randperm(4, generator=g), torch.arange(12)
    allocator = make(name, 3, 4)
    there = allocator.counts(reorder(seen, layers, heads, slots))
    here = allocator.counts(seen)[layers][:, heads]
    if allocator.needs_weights:
        assert torch.equal(there, here)
    else:
        assert int((there - here).abs().max()) <= 1


@pytest.mark.parametrize("name", allocators.names())
def test_registry(name: str) -> None:
    allocator = make(name, 1, 1)
    assert ALLOCATORS[name].name == name
    assert isinstance(allocator, ALLOCATORS[name])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("adda", {}, "'adda' is unknown.*uniform, per-head, pyramid, ada, cake, lu, global"),
        ("ada", {"beta": 3}, "'ada' has no parameter beta; it takes: alpha"),
        ("uniform", {"alpha": 0.1}, "it takes: none"),
        ("ada", {"alpha": 1.5}, "alpha is 1.5"),
        ("ada", {"alpha": math.nan}, "alpha is nan"),
        ("pyramid", {"beta": 0.5}, "beta is 0.5"),
        ("cake", {"tau1": 0.0}, "tau1 is 0.0"),
        ("cake", {"tau2": math.inf}, "tau2 is inf"),
        ("lu", {}, "needs a profile.*--kv-profile"),
    ],
)
def test_make_refuses(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocators.make(name, **params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "6 blocks are forced but only 0 blocks x 2 layers x 3 KV heads = 0"),
        ({"budget": 11}, "60 blocks are held, fewer than 11 blocks x 2 layers x 3 KV heads = 66"),
        ({"seen": 9}, "holds 10 blocks, the sequence has had only 9"),
        ({"floor": torch.full((2, 3), 11)}, "between 0 and capacity"),
        ({"floor": torch.full((2, 3), -1)}, "between 0 and capacity"),
        ({"floor": torch.ones(2, dtype=torch.long)}, r"floor \(2,\) must both be"),
        ({"floor": torch.full((2, 3), 2)}, "capacity - floor candidates"),
        ({"weights": torch.full((2, 3, 10), math.nan)}, "is nan"),
        ({"weights": torch.rand(2, 3, 9)}, r"\(2, 3, 9\).*must be \[2, 3, blocks\]"),
        ({"weights": torch.rand(2, 30)}, r"must be \[2, 3, blocks\]"),
        ({"candidates": None}, "lacks them"),
        ({"preference": torch.rand(3)}, r"preference \(3,\) must be \[2\]"),
        ({"preference": torch.tensor([1.0, -1.0])}, "finite and not negative"),
    ],
)
def test_situation_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(situation(), **change)


@pytest.mark.parametrize("name", ["ada", "global", "cake"])
def test_what_is_needed_must_be_there(name: str) -> None:
    bare = dataclasses.replace(situation(), weights=None, preference=None)
    with pytest.raises(ValueError, match="lacks"):
        make(name, 2, 3).counts(bare)


# --- apportion --------------------------------------------------------------------------------


@given(seen=situations(), seed=st.integers(0, 1000))
def test_apportion_rounds_a_clamped_level(seen: Situation, seed: int) -> None:
    """Every count is less than 1 from one and the same level of the path, clamped."""
    g = torch.Generator().manual_seed(seed)
    slope = torch.rand(seen.floor.shape, generator=g, dtype=torch.float64) + 0.01
    counts = apportion(lambda level: level * slope, 1e6, seen.total, seen.floor, seen.capacity)
    low = torch.where(counts > seen.floor, (counts - 1) / slope, 0.0).max()
    high = torch.where(counts < seen.capacity, (counts + 1) / slope, 1e9).min()
    assert low <= high
    assert int(counts.sum()) == seen.total


def test_apportion_is_exact_where_the_path_jumps() -> None:
    """A path too steep for bisection still ends at the sum, lower index first."""
    zeros = torch.zeros(5, dtype=torch.long)
    jump = apportion(
        lambda level: torch.full((5,), 9.0 * (level > 0.3), dtype=torch.float64),
        1.0, 17, zeros, torch.tensor([9, 9, 1, 0, 9]),
    )  # fmt: skip
    assert jump.tolist() == [6, 5, 1, 0, 5]


def test_rounding_ties_go_to_the_lower_index() -> None:
    half = apportion(
        lambda level: level * torch.ones(4, dtype=torch.float64),
        9.0, 6, torch.zeros(4, dtype=torch.long), torch.full((4,), 9),
    )  # fmt: skip
    assert half.tolist() == [2, 2, 1, 1]


# --- each by its own rule ---------------------------------------------------------------------


def test_uniform_deals_what_full_and_forced_heads_leave() -> None:
    seen = situation(
        heads=3, layers=1, budget=4,
        capacity=torch.tensor([[2, 10, 10]]), floor=torch.tensor([[1, 6, 1]]),
    )  # fmt: skip
    assert make("uniform", 1, 3).counts(seen).tolist() == [[2, 6, 4]]
    assert make("uniform", 2, 3).counts(situation()).tolist() == [[4, 4, 4]] * 2


def test_pyramid_is_the_paper_s_line_above_the_forced_blocks() -> None:
    """L = 5, C - w = 20: lo = 20 / beta = 2, hi = 38, so 38, 29, 20, 11, 2 (beta = 10)."""
    seen = situation(layers=5, heads=2, seen=60, budget=23, floor=3)
    counts = make("pyramid", 5, 2, beta=10.0).counts(seen)
    assert counts.tolist() == [[41, 41], [32, 32], [23, 23], [14, 14], [5, 5]]
    assert make("pyramid", 5, 2, beta=1.0).counts(seen).tolist() == [[23, 23]] * 5
    # Full at 40, the top layer leaves 2 to the others: 3 + 126/62 * (14.5, 10, 5.5, 1) each.
    held = dataclasses.replace(seen, capacity=torch.full((5, 2), 40), weights=None)
    counts = make("pyramid", 5, 2, beta=10.0).counts(held)
    assert counts[0].tolist() == [40, 40]
    assert counts[1:].sum(1).tolist() == [66, 46, 28, 10]


def ada_by_hand(seen: Situation, alpha: float) -> list[list[int]]:
    """For equal layers: protect, then drop the worst of the layer until B*H are left."""
    weights, candidates, ids = seen.ranked()
    layers, heads = seen.floor.shape
    counts = []
    for layer in range(layers):
        kept = []
        for head in range(heads):
            blocks = [
                (-float(weights[layer, head, slot]), -int(ids[layer, head, slot]), head)
                for slot in candidates[layer, head].nonzero().flatten().tolist()
            ]
            safe = max(0, math.floor(alpha * seen.budget) - int(seen.floor[layer, head]))
            kept += [(rank >= safe, *block) for rank, block in enumerate(sorted(blocks))]
        kept = sorted(kept)[: seen.budget * heads - int(seen.floor[layer].sum())]
        counts.append(
            [int(seen.floor[layer, h]) + sum(k[-1] == h for k in kept) for h in range(heads)]
        )
    return counts


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_ada_is_a_joint_top_k_with_a_safeguard(alpha: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    weights = torch.randint(6, (2, 3, 12), generator=g) * torch.tensor([1.0, 2.0, 5.0])[:, None]
    seen = situation(seen=12, budget=5, weights=weights, seed=seed)
    counts = make("ada", 2, 3, alpha=alpha).counts(seen)
    assert counts.tolist() == ada_by_hand(seen, alpha)
    assert counts.sum(1).tolist() == [15, 15]
    if alpha == 1:
        assert counts.tolist() == [[5, 5, 5]] * 2


def test_ada_cuts_protected_blocks_where_forced_ones_take_the_room() -> None:
    seen = situation(layers=1, heads=2, budget=5, floor=torch.tensor([[8, 0]]))
    assert make("ada", 1, 2, alpha=1.0).counts(seen).tolist() == [[8, 2]]


@pytest.mark.parametrize("seed", range(4))
def test_global_counts_the_best_of_all(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    weights = torch.randint(9, (2, 3, 12), generator=g).float()
    seen = situation(
        seen=12, weights=weights, floor=torch.tensor([[0, 3, 1], [1, 2, 0]]), seed=seed
    )
    _, candidates, ids = seen.ranked()
    blocks = sorted(
        (-float(weights[layer, head, slot]), -int(ids[layer, head, slot]), layer, head)
        for layer, head, slot in candidates.nonzero().tolist()
    )
    expected = seen.floor.clone()
    for *_, layer, head in blocks[: seen.total - int(seen.floor.sum())]:
        expected[layer, head] += 1
    assert torch.equal(make("global", 2, 3).counts(seen), expected)


def test_cake_deals_by_the_layers_preference() -> None:
    seen = dataclasses.replace(
        situation(layers=3, heads=2, seen=40, budget=12, floor=2),
        preference=torch.tensor([0.1, 0.3, 0.2]),
    )
    assert make("cake", 3, 2).counts(seen).tolist() == [[7, 7], [17, 17], [12, 12]]
    one = dataclasses.replace(seen, preference=torch.tensor([0.0, 0.4, 0.2]))
    assert make("cake", 3, 2).counts(one).tolist() == [[2, 2], [22, 22], [12, 12]]
    full = dataclasses.replace(one, budget=28)  # two layers hold no more: the third is served last
    assert make("cake", 3, 2).counts(full).tolist() == [[4, 4], [40, 40], [40, 40]]
    nothing = dataclasses.replace(seen, preference=torch.zeros(3))
    assert make("cake", 3, 2).counts(nothing).tolist() == [[12, 12]] * 3


@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (1.6, 0.4)])
def test_cake_preference_is_entropy_times_variance(tau1: float, tau2: float) -> None:
    g = torch.Generator().manual_seed(3)
    maps = torch.rand(3, 4, 5, 6, generator=g) ** 4
    maps = maps / maps.sum(-1, keepdim=True)
    candidates = torch.tensor([[False, True, True, True, True, False]]).repeat(3, 1)
    expected = []
    for layer in range(3):
        entropy = shift = 0.0
        for head in range(4):
            for block in range(1, 5):
                column = maps[layer, head, :, block].double().tolist()
                mean = sum(column) / 5
                entropy -= sum(a * math.log(a) for a in column)
                shift += sum((a - mean) ** 2 for a in column) / 5
        expected.append(entropy ** (1 / tau1) * shift ** (1 / tau2))
    cake = Cake(tau1, tau2)
    got = cake.preference(maps, candidates)
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, wanted / wanted.max())
    per_head = candidates[:, None].expand(3, 4, 6)
    torch.testing.assert_close(cake.preference(maps, per_head), got)


def test_cake_prefers_nothing_when_no_layer_looks_anywhere_twice() -> None:
    """One window row has no variance: equal layers, not nan."""
    maps = torch.full((2, 3, 1, 4), 0.25)
    assert Cake().preference(maps, torch.ones(2, 4, dtype=torch.bool)).tolist() == [0.0, 0.0]


SHARES = [[[0.4, 0.0], [0.2, 0.2]], [[1.0, 0.1], [0.5, 0.4]]]  # means 0.2 and 0.5


def lu(**parts: Any) -> Lu:
    return Lu(profile_of(SHARES, (0.2, 0.5)), **parts)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (20, [[40, 0], [20, 20]]),  # a knot
        (50, [[100, 10], [50, 40]]),  # the other
        (35, [[70, 5], [35, 30]]),  # half-way
        (10, [[20, 0], [10, 10]]),  # below the first knot: in proportion
        (75, [[100, 55], [75, 70]]),  # above the last: towards all of them
        (100, [[100, 100], [100, 100]]),
    ],
)
def test_lu_follows_the_profile(budget: int, expected: list[list[int]]) -> None:
    seen = situation(layers=2, heads=2, seen=100, budget=budget, floor=0)
    assert lu().counts(seen).tolist() == expected


def test_lu_deals_what_bounds_free_or_cost_along_the_profile() -> None:
    """Head 0 holds only 25 of its 40: the others move up the profile, from 0.2 towards 0.5."""
    capacity = torch.tensor([[25, 100], [100, 100]])
    seen = situation(layers=2, heads=2, seen=100, budget=20, floor=0, capacity=capacity)
    # 40 + 60 t = 55 with t = 1/4 of the way: 0 + 2.5, 20 + 7.5, 20 + 5.
    assert lu().counts(seen).tolist() == [[25, 3], [27, 25]]
    # Floors of 3 cost the others: 0.2 down to where 100 d * (2 + 1 + 1) = 77.
    forced = situation(layers=2, heads=2, seen=100, budget=20, floor=3)
    assert lu().counts(forced).tolist() == [[39, 3], [19, 19]]


def test_lu_takes_its_rank_s_part() -> None:
    """Heads of one rank share that rank's budget in the profile's order."""
    seen = situation(layers=2, heads=1, seen=100, budget=30, floor=0)
    assert lu(heads=(0, 1)).counts(seen).tolist() == [[40], [20]]
    with pytest.raises(ValueError, match="2 layers x 2 KV heads, the sequence 2 x 1"):
        lu().counts(seen)
    with pytest.raises(ValueError, match=r"heads is \(1, 3\), the profile has 2"):
        lu(heads=(1, 3))
