"""Policies: one contract for all of them, and Nexus against its formulas in plain Python."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nexus_vllm import policies
from nexus_vllm.policies import Observation, Policy, Rope, base, block_attention, score
from nexus_vllm.policies.nexus import Nexus, WalkOver, WalkRows, age_rank
from nexus_vllm.selectors import SELECTORS, select


def observe(
    lead: tuple[int, ...] = (),
    blocks: int = 5,
    window: int = 4,
    query_heads: int = 4,
    kv_heads: int = 2,
    block: int = 2,
    dim: int = 3,
    seed: int = 0,
    last: int | None = None,
    neox: bool = True,
) -> Observation:
    """Random tensors, block ids unsorted with gaps, the last query at position `last`.

    The last dimension, if there are several, is not rotated.
    """
    g = torch.Generator().manual_seed(seed)
    rows = math.prod(lead)
    ids = torch.stack([torch.randperm(blocks + 4, generator=g)[:blocks] for _ in range(rows)])
    end = (blocks + 4) * block - 1 if last is None else last
    replay = torch.rand(*lead, blocks, kv_heads, generator=torch.Generator().manual_seed(seed))
    angles = torch.arange(1000)[:, None] * 0.7 ** torch.arange(max(1, (dim - 1) // 2))
    return Observation(
        queries=torch.randn(*lead, window, query_heads, dim, generator=g) * 2,
        query_positions=torch.arange(end + 1 - window, end + 1),
        keys=torch.randn(*lead, blocks, kv_heads, block, dim, generator=g) * 2,
        block_ids=ids.view(*lead, blocks),
        scale=dim**-0.5,
        candidates=torch.rand(*lead, blocks, generator=g) < 0.7,
        seed=seed,
        event=1,
        layers=torch.arange(rows).view(lead),
        values=torch.randn(*lead, blocks, kv_heads, block, dim, generator=g),
        state=torch.rand(*lead, blocks, 1, generator=g),
        new_queries=3,
        keep=max(1, blocks - 1),
        prompt_blocks=4,
        rope=Rope(angles.cos(), angles.sin(), neox),
        replay=replay.where(torch.rand(*lead, blocks, 1, generator=g) < 0.6, math.nan),
    )


OF_BLOCKS = ("keys", "values", "block_ids", "candidates", "valid", "state", "replay")
OF_ROWS = (*OF_BLOCKS, "queries", "layers")


def changed(
    obs: Observation, names: tuple[str, ...], change: Callable[[Tensor], Tensor]
) -> Observation:
    """The observation with those of its tensors changed that it has."""
    tensors = {name: getattr(obs, name) for name in names}
    return dataclasses.replace(
        obs, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None}
    )


def row_of(obs: Observation, index: int | tuple[int, ...]) -> Observation:
    return changed(obs, OF_ROWS, lambda tensor: tensor[index])


def permuted(obs: Observation, order: Tensor) -> Observation:
    axis = obs.layers.dim()
    return changed(obs, OF_BLOCKS, lambda tensor: tensor.index_select(axis, order))


def as_seen_by(policy: Policy, obs: Observation) -> Observation:
    """Without what the policy does not ask for; all it remembers is the same number."""
    keys, state = policy.reads_keys, obs.state
    if state is not None:
        state = state[..., :1].expand(*state.shape[:-1], policy.state_size)
    return dataclasses.replace(
        obs,
        queries=obs.queries if policy.needs_window else None,
        query_positions=obs.query_positions if policy.needs_window else None,
        keys=obs.keys if keys else None,
        values=obs.values if policy.needs_values else None,
        rope=obs.rope if policy.needs_rope else None,
        state=state if policy.state_size else None,
        replay=obs.replay if policy.needs_replay else None,
    )


def padded(obs: Observation) -> Observation:
    """With two entries more that are no blocks, among the others."""
    size, lead = obs.block_ids.shape[-1], obs.layers.dim()
    g = torch.Generator().manual_seed(1)

    def longer(x: Tensor | None, fill: float) -> Tensor | None:
        if x is None:
            return None
        shape = (*x.shape[:lead], 2, *x.shape[lead + 1 :])
        more = torch.randn(shape, generator=g) * 100 if fill == 1 else torch.full(shape, fill)
        return torch.cat([x, more.to(x.dtype)], dim=lead)

    obs = dataclasses.replace(
        obs,
        keys=longer(obs.keys, 1),
        values=longer(obs.values, 1),
        state=longer(obs.state, math.nan),
        replay=longer(obs.replay, math.nan),
        block_ids=longer(obs.block_ids, 500),
        candidates=longer(obs.candidates, False),
        valid=longer(torch.ones_like(obs.candidates), False),
    )
    return permuted(obs, torch.tensor([size, *range(size), size + 1]))


# --- the contract -----------------------------------------------------------------------------

EVERY_POLICY = [
    pytest.param(policies.make(name, options), id=f"{name}-{options}")
    for name, options in [(name, {}) for name in policies.names()]
    + [
        ("nexus", {"heads": "mean", "walk_over": "all", "walk_rows": "oldest"}),
        ("nexus", {"walk_over": "all", "walk_rows": "spread", "walk_steps": 99}),
        ("nexus", {"walk_steps": 0, "eps_tie": 0.0}),
        ("snapkv", {"pool": 7, "pooling": "max"}),
        ("nexus", {"pool_rows": "max", "pool_heads": "max"}),
        ("nexus", {"walk_state": "carried"}),
        ("nexus", {"prior": "keydiff"}),
        ("nexus", {"prior": "knorm", "prior_weight": 1.0, "walk_over": "all", "heads": "mean"}),
        ("nexus", {"eps_tie": 1.0}),  # large enough to be seen
        ("nexus", {"walk_state": "carried", "walk_over": "all", "heads": "mean"}),
        ("snapkv", {"pool": 1}),
        ("snapkv", {"pool_rows": "max", "pool_heads": "max"}),
        ("cake", {"gamma": 0.0}),
        ("expected-attention", {"future": 3, "eps": 0.02}),
        ("vase", {"share": 1.0}),
    ]
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"lead": (3,)},
    {"lead": (2, 3)},
    {"lead": (2,), "blocks": 1},
    {"lead": (2,), "window": 1},
    {"query_heads": 6, "kv_heads": 1},
    {"lead": (2,), "last": 5},  # part of the keys lies after every query
    {"last": -1},  # all of them do
]


every_policy = pytest.mark.parametrize("policy", EVERY_POLICY)


@every_policy
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contract(policy: Policy, shape: dict[str, Any]) -> None:
    seen = as_seen_by(policy, observe(**shape))
    weights, state = score(policy, seen)
    assert weights.shape == seen.block_ids.shape
    assert (0 if state is None else state.shape[-1]) == policy.state_size
    for tensor in [weights] if state is None else [weights, state]:
        assert tensor.shape[: weights.dim()] == weights.shape
        assert tensor.dtype == torch.float32
        assert bool(tensor.isfinite().all())
    assert bool((weights >= 0).all())
    assert torch.equal(score(policy, seen)[0], weights)

    order = torch.randperm(seen.block_ids.shape[-1], generator=torch.Generator().manual_seed(1))
    shuffled, _ = score(policy, permuted(seen, order))
    torch.testing.assert_close(shuffled, weights[..., order], rtol=1e-4, atol=1e-5)
    if shape.get("lead"):
        for index in range(len(weights)):
            torch.testing.assert_close(score(policy, row_of(seen, index))[0], weights[index])


@every_policy
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_changes_nothing(policy: Policy, shape: dict[str, Any]) -> None:
    seen = as_seen_by(policy, observe(**shape))
    weights, state = score(policy, seen)
    more, longer = score(policy, padded(seen))
    assert bool(more.isfinite().all())
    torch.testing.assert_close(more[..., 1:-1], weights)
    if state is not None:
        assert longer is not None
        torch.testing.assert_close(longer[..., 1:-1, :], state)


@every_policy
def test_a_policy_asks_for_what_it_needs(policy: Policy) -> None:
    """Without one of its inputs it says so; `as_seen_by` has shown that it needs no other."""
    obs = as_seen_by(policy, observe())
    needs = {
        "keys": policy.reads_keys,
        "queries": policy.needs_window,
        "query_positions": policy.needs_window,
        "values": policy.needs_values,
        "rope": policy.needs_rope,
        "replay": policy.needs_replay,
    }
    for name in [name for name, needed in needs.items() if needed]:
        with pytest.raises(ValueError, match=name):
            score(policy, dataclasses.replace(obs, **{name: None}))
    if policy.state_size:
        with pytest.raises(ValueError, match="state"):
            policy.weights(dataclasses.replace(obs, state=None))


@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_computes_in_float32(policy: Policy, dtype: torch.dtype) -> None:
    """The numbers are large: sums of their squares are beyond float16, and so are differences."""
    obs = as_seen_by(policy, observe(lead=(2,), blocks=6, dim=64, block=4))
    half = changed(obs, ("keys", "values"), lambda x: (x / x.abs().amax() * 65000).to(dtype))
    half = changed(half, ("queries",), lambda x: (x / 65000).to(dtype))
    same = changed(half, ("queries", "keys", "values"), torch.Tensor.float)
    weights, _ = score(policy, half)
    assert bool(weights.isfinite().all())
    assert torch.equal(weights, score(policy, same)[0])


@every_policy
@pytest.mark.parametrize("limit", [1, 30, 300])
def test_in_pieces(policy: Policy, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory limit splits rows, then KV heads; the weights stay the same."""
    seen = as_seen_by(policy, observe(lead=(2, 3), last=9))
    whole, _ = score(policy, seen)
    monkeypatch.setattr(base, "MAX_LOGITS", limit)
    torch.testing.assert_close(score(policy, seen)[0], whole)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation returns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.size = max(self.size, out.numel())
        return out


@every_policy
def test_memory_is_bounded(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is larger than the logits of one KV head of one row, or the limit."""
    monkeypatch.setattr(base, "MAX_LOGITS", 1000)
    shape: dict[str, Any] = {"lead": (2,), "blocks": 8, "block": 16, "window": 32, "query_heads": 8}
    obs = as_seen_by(policy, observe(**shape))
    with Largest() as largest:
        score(policy, obs)
    # Four query heads share a KV head. Expected attention has a row more than W: the mean.
    assert 0 < largest.size <= (32 + 1) * 4 * 8 * 16


@pytest.mark.parametrize("name", policies.names())
def test_registry(name: str) -> None:
    kind = policies.POLICIES[name]
    assert kind.name == name
    assert isinstance(policies.make(name), kind)
    assert kind.selector is None or kind.selector in SELECTORS


def test_make_takes_a_mapping_or_any_settings_object() -> None:
    assert policies.make("nexus", {"lam": 0.25}) == Nexus(lam=0.25)
    settings = SimpleNamespace(walk_steps=2, heads="mean", selector="topk", window=16)
    assert policies.make("nexus", settings) == Nexus(walk_steps=2, heads="mean")
    assert policies.make("random", settings) == policies.make("random")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nexsu", {}, "'nexsu' is unknown.*nexus, snapkv, .*streaming-llm, random"),
        ("nexus", {"lambda": 0.5}, "no parameter lambda; it takes: walk_steps, lam"),
        ("random", {"lam": 0.5}, "no parameter lam; it takes: none"),
        ("nexus", {"lam": -0.5}, "lam is -0.5"),
        ("nexus", {"lam": math.nan}, "lam is nan"),
        ("nexus", {"eps_tie": math.inf}, "eps_tie is inf"),
        ("nexus", {"walk_steps": -1}, "walk_steps is -1"),
        ("nexus", {"heads": "max"}, "heads is 'max'.*'per-head' or 'mean'"),
        ("nexus", {"walk_rows": "last"}, "walk_rows is 'last'.*'newest', 'oldest' or 'spread'"),
        ("nexus", {"walk_state": "kept"}, "walk_state is 'kept'.*'fresh' or 'carried'"),
        ("nexus", {"pool_rows": "avg"}, "pool_rows is 'avg'.*'mean' or 'max'"),
        ("snapkv", {"pool_heads": "sum"}, "pool_heads is 'sum'.*'mean' or 'max'"),
        ("nexus", {"walk_over": "some"}, "walk_over is 'some'.*'all' or 'candidates'"),
    ],
)
def test_wrong_parameters_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policies.make(name, options)


def test_observation_names_the_shape_that_does_not_fit() -> None:
    obs = observe(lead=(2,))
    with pytest.raises(ValueError, match=r"candidates is \(2, 4\), expected \(2, 5\)"):
        dataclasses.replace(obs, candidates=obs.candidates[:, :4])
    with pytest.raises(ValueError, match=r"query_positions is \(3,\), expected \(4,\)"):
        dataclasses.replace(obs, query_positions=torch.arange(3))
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        observe(query_heads=3)
    with pytest.raises(ValueError, match="needs queries"):
        Nexus().weights(dataclasses.replace(obs, queries=None, query_positions=None))
    with pytest.raises(ValueError, match="needs keys"):
        Nexus().weights(dataclasses.replace(obs, keys=None))
    with pytest.raises(ValueError, match="'max', choose one of per-head, mean"):
        block_attention(obs, heads="max")  # type: ignore[arg-type]


# --- block attention --------------------------------------------------------------------------


def naive_maps(obs: Observation, heads: str) -> list[list[list[float]]]:
    """Eq. 1 for one row in Python floats: softmax over tokens, block sums, row-normalise."""
    assert obs.queries is not None
    assert obs.keys is not None
    assert obs.query_positions is not None
    queries, keys = obs.queries.double(), obs.keys.double()
    if heads == "mean":
        queries, keys = queries.mean(1, keepdim=True), keys.mean(1, keepdim=True)
    window, query_heads, dim = queries.shape
    size, kv_heads, block, _ = keys.shape
    maps = []
    for head in range(query_heads):
        kv_head = head // (query_heads // kv_heads)
        rows = []
        for w in range(window):
            mass = [0.0] * size
            for j in range(size):
                for offset in range(block):
                    if int(obs.block_ids[j]) * block + offset <= int(obs.query_positions[w]):
                        q, k = queries[w, head].tolist(), keys[j, kv_head, offset].tolist()
                        logit = obs.scale * sum(q[i] * k[i] for i in range(dim))
                        mass[j] += math.exp(logit)
            total = sum(mass)
            rows.append([m / total if total else 0.0 for m in mass])
        maps.append(rows)
    return maps


CASES: list[dict[str, Any]] = [
    {},
    {"last": 7, "seed": 1},
    {"last": 3, "seed": 2},  # the oldest query sees position 0 alone, which may be in no live block
    {"query_heads": 3, "kv_heads": 3, "seed": 3},
    {"query_heads": 6, "kv_heads": 2, "block": 1, "seed": 4, "last": 6},
    {"blocks": 1, "seed": 5},
    {"window": 1, "seed": 6},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", ["per-head", "mean"])
def test_block_attention_is_equation_1(case: dict[str, Any], heads: base.Heads) -> None:
    obs = observe(**case)
    expected = torch.tensor(naive_maps(obs, heads))
    torch.testing.assert_close(block_attention(obs, heads), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", ["per-head", "mean"])
@pytest.mark.parametrize("limit", [1, 30, 100, 300])
def test_block_attention_in_pieces(
    heads: base.Heads, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory limit splits rows, then KV heads; the maps stay the same."""
    obs = observe(lead=(2, 3), last=9)
    whole = block_attention(obs, heads)
    monkeypatch.setattr(base, "MAX_LOGITS", limit)
    torch.testing.assert_close(block_attention(obs, heads), whole)


def test_block_attention_computes_in_float32_and_survives_large_logits() -> None:
    obs = observe()
    assert obs.queries is not None
    assert obs.keys is not None
    half = dataclasses.replace(obs, queries=obs.queries.bfloat16(), keys=obs.keys.bfloat16())
    same = dataclasses.replace(
        obs, queries=obs.queries.bfloat16().float(), keys=obs.keys.bfloat16().float()
    )
    assert torch.equal(block_attention(half), block_attention(same))
    large = block_attention(dataclasses.replace(obs, queries=obs.queries * 1e4))
    torch.testing.assert_close(large.sum(-1), torch.ones(4, 4))


def test_kv_heads_as_rows_give_the_maps_of_each_head() -> None:
    """How a caller keeps one set per KV head: the head moves to the leading dimensions."""
    obs = observe(lead=(3,), query_heads=4, kv_heads=2)
    assert obs.queries is not None
    assert obs.keys is not None
    split = Observation(
        queries=obs.queries.unflatten(2, (2, 2)).movedim(2, 1),
        query_positions=obs.query_positions,
        keys=obs.keys.movedim(2, 1).unsqueeze(3),
        block_ids=obs.block_ids[:, None].expand(3, 2, -1),
        scale=obs.scale,
        candidates=obs.candidates[:, None].expand(3, 2, -1),
        seed=0,
        event=0,
        layers=torch.arange(6).view(3, 2),
    )
    torch.testing.assert_close(block_attention(split).flatten(1, 2), block_attention(obs))
    mean = Nexus().weights(split).mean(1)
    torch.testing.assert_close(mean, Nexus().weights(obs))


# --- Nexus ------------------------------------------------------------------------------------


def from_maps(rows: list[list[float]], ids: list[int] | None = None) -> Observation:
    """One head whose map is exactly `rows`: keys are unit vectors, queries log-probabilities."""
    size = len(rows[0])
    return Observation(
        queries=torch.tensor(rows).log()[:, None],
        query_positions=torch.full((len(rows),), 1000),
        keys=torch.eye(size)[:, None, None],
        block_ids=torch.tensor(ids or list(range(size))),
        scale=1.0,
        candidates=torch.tensor([False] + [True] * (size - 1)),
        seed=0,
        event=0,
        layers=torch.tensor(0),
    )


def test_walk_by_hand() -> None:
    """Rows (1/2, 1/2) then (1/4, 3/4): a = (3/8, 5/8); the second gamma is 1 + 1/2."""
    obs = from_maps([[0.5, 0.5], [0.25, 0.75]])
    options: dict[str, Any] = {"walk_steps": 2, "walk_over": "all", "eps_tie": 0.0}
    newest = Nexus(**options, walk_rows="newest").weights(obs)  # c = (1, 1.5) / 2.5
    torch.testing.assert_close(newest, torch.tensor([0.375 + 0.2, 0.625 + 0.3]))
    oldest = Nexus(**options, walk_rows="oldest").weights(obs)  # c = (0.875, 1.625) / 2.5
    torch.testing.assert_close(oldest, torch.tensor([0.375 + 0.175, 0.625 + 0.325]))


def test_walk_over_candidates_by_hand() -> None:
    """Block 0 is forced. Rows without it: (1/2, 1/2), (1/4, 3/4); c = (0.4, 0.6), scaled by the
    candidates' share of a, (0.4 + 0.8) / 2 = 0.6; a = (0.4, 0.2, 0.4)."""
    obs = from_maps([[0.6, 0.2, 0.2], [0.2, 0.2, 0.6]])
    policy = Nexus(walk_steps=2, walk_over="candidates", eps_tie=0.0, walk_rows="newest")
    expected = torch.tensor([0.4, 0.2 + 0.5 * 0.6 * 0.4, 0.4 + 0.5 * 0.6 * 0.6])
    torch.testing.assert_close(policy.weights(obs), expected)


def test_window_rows_that_see_no_live_block_do_not_count() -> None:
    """Two queries at positions 1 and 2, live blocks 2 and 9: only the second sees one, block 2."""
    obs = from_maps([[0.5, 0.5], [0.5, 0.5]], ids=[2, 9])
    obs = dataclasses.replace(obs, query_positions=torch.tensor([1, 2]))
    assert block_attention(obs)[0].tolist() == [[0.0, 0.0], [1.0, 0.0]]
    weights = Nexus(walk_over="all", eps_tie=0.0).weights(obs)
    torch.testing.assert_close(weights, torch.tensor([1.5, 0.0]))


def test_age_rank_follows_original_positions() -> None:
    torch.testing.assert_close(
        age_rank(torch.tensor([[7, 0, 40], [3, 2, 1]])),
        torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.5, 0.0]]),
    )
    assert age_rank(torch.tensor([9])).tolist() == [0.0]
    ids = torch.tensor([[7, 0, 40], [3, 50, 51]])
    valid = torch.tensor([[True, True, True], [True, False, False]])
    assert age_rank(ids, valid)[valid].tolist() == [0.5, 0.0, 1.0, 0.0]


def test_tie_break_keeps_the_newer_of_equal_blocks() -> None:
    obs = from_maps([[0.25, 0.25, 0.25, 0.25]], ids=[8, 2, 5, 11])
    assert Nexus(walk_over="all").weights(obs).argsort(descending=True).tolist() == [3, 0, 2, 1]


def naive_nexus(obs: Observation, policy: Nexus) -> list[float]:
    """Section 2.1-2.2 in Python floats, one row of the observation, H at most W."""
    scores = []
    for rows in naive_maps(obs, policy.heads):
        window, size = len(rows), len(rows[0])
        seeing = [row for row in rows if sum(row) > 0]
        a = [sum(row[j] for row in seeing) / max(1, len(seeing)) for j in range(size)]
        order = {
            "oldest": list(range(window)),
            "newest": list(range(window))[::-1],
        }[policy.walk_rows][: policy.walk_steps]
        share = 1.0
        if policy.walk_over == "candidates":
            share = sum(a[j] for j in range(size) if obs.candidates[j])
            inside = [[p if obs.candidates[j] else 0.0 for j, p in enumerate(row)] for row in rows]
            rows = [[p / sum(row) if sum(row) else 0.0 for p in row] for row in inside]
        state = [0.0] * size
        for index in order:
            gamma = 1 + sum(s * c for s, c in zip(rows[index], state, strict=True))
            state = [c + gamma * s for s, c in zip(rows[index], state, strict=True)]
        total = sum(state) or 1.0
        scores.append([a[j] + policy.lam * share * state[j] / total for j in range(size)])
    size = len(scores[0])
    ids = obs.block_ids.tolist()
    age = [sorted(ids).index(i) / max(1, size - 1) for i in ids]
    mean = [sum(head[j] for head in scores) / len(scores) for j in range(size)]
    return [mean[j] + policy.eps_tie * age[j] for j in range(size)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", ["per-head", "mean"])
@pytest.mark.parametrize("walk_rows", ["newest", "oldest"])
@pytest.mark.parametrize("walk_over", ["all", "candidates"])
@pytest.mark.parametrize("walk_steps", [0, 3, 9])
def test_nexus_is_its_formulas(
    case: dict[str, Any],
    heads: base.Heads,
    walk_rows: WalkRows,
    walk_over: WalkOver,
    walk_steps: int,
) -> None:
    policy = Nexus(walk_steps, 0.4, 0.01, heads, walk_rows, walk_over)
    obs = observe(**case)
    expected = torch.tensor(naive_nexus(obs, policy))
    torch.testing.assert_close(policy.weights(obs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", ["per-head", "mean"])
def test_total_weight_at_the_paper_scale(heads: base.Heads) -> None:
    weights = Nexus(heads=heads, walk_over="all").weights(observe(lead=(3,), blocks=9))
    torch.testing.assert_close(weights.sum(-1), torch.full((3,), 1.5 + 1e-6 * 9 / 2))


@pytest.mark.parametrize(
    ("rows", "window", "steps", "order"),
    [
        ("newest", 16, 3, [15, 14, 13]),
        ("oldest", 16, 3, [0, 1, 2]),
        ("spread", 16, 3, [15, 7, 0]),
        ("spread", 16, 1, [15]),
        ("spread", 4, 9, [3, 2, 1, 0]),
        ("newest", 2, 9, [1, 0]),
        ("oldest", 1, 3, [0]),
        ("spread", 1, 3, [0]),
        ("newest", 16, 0, []),
    ],
)
def test_walk_takes_fresh_rows(rows: Any, window: int, steps: int, order: list[int]) -> None:
    assert Nexus(walk_steps=steps, walk_rows=rows)._row_order(window) == order


# --- baselines --------------------------------------------------------------------------------


def kept_ids(policy: Policy, obs: Observation, keep: int) -> Tensor:
    none = torch.zeros_like(obs.candidates)
    assert policy.selector is not None
    kept = select(
        policy.selector,
        policy.weights(obs),
        keep,
        none,
        seed=obs.seed,
        event=obs.event,
        layers=obs.layers,
        block_ids=obs.block_ids,
    )
    return obs.block_ids[kept].view(-1, keep).sort().values


def test_streaming_llm_keeps_the_newest() -> None:
    obs = observe(lead=(4,), blocks=6)
    newest = obs.block_ids.sort().values[:, -3:]
    assert torch.equal(kept_ids(policies.make("streaming-llm"), obs, 3), newest)


def test_random_keeps_uniform_subsets_that_only_the_seed_decides() -> None:
    policy, rows = policies.make("random"), 3000
    ids = torch.arange(5).expand(rows, 5)
    obs = Observation(
        queries=None,
        query_positions=None,
        keys=None,
        block_ids=ids,
        scale=1.0,
        candidates=torch.ones(rows, 5, dtype=torch.bool),
        seed=4,
        event=0,
        layers=torch.arange(rows),
    )
    kept = kept_ids(policy, obs, 2)
    assert torch.equal(kept_ids(policy, obs, 2), kept)
    assert not torch.equal(kept_ids(policy, dataclasses.replace(obs, event=1), 2), kept)
    assert not torch.equal(kept_ids(policy, dataclasses.replace(obs, seed=5), 2), kept)
    seen = torch.bincount(kept[:, 0] * 5 + kept[:, 1], minlength=25)
    seen = seen[seen > 0].double()
    assert len(seen) == 10
    assert ((seen - rows / 10) ** 2 / (rows / 10)).sum() < 27.9  # chi-square, 9 degrees, 99.9 %
