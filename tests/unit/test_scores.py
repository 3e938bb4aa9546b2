"""Each score against a reading of its formula in plain float64, also on a real model's tensors.

The readings share no code with what they check. They take one row, put its tokens in the order of
the text, and compute what the paper says, one query head at a time.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from nexus_vllm import policies
from nexus_vllm.policies import Observation, Policy, Rope, score
from nexus_vllm.policies.base import state_size
from nexus_vllm.policies.cake import CakeScore
from nexus_vllm.policies.expected_attention import ExpectedAttention
from nexus_vllm.policies.h2o import H2O
from nexus_vllm.policies.keydiff import KeyDiff
from nexus_vllm.policies.knorm import KNorm
from nexus_vllm.policies.kvzip import KVzip
from nexus_vllm.policies.nexus import Nexus, WalkOver
from nexus_vllm.policies.random_blocks import RandomBlocks, RandomGenerated
from nexus_vllm.policies.snapkv import SnapKV
from nexus_vllm.policies.streaming_llm import StreamingLLM
from nexus_vllm.policies.tokens import Tokens
from nexus_vllm.policies.tova import TOVA
from nexus_vllm.policies.vase import VaSE
from nexus_vllm.selectors import SELECTORS, select

from .test_policies import SHAPES, as_seen_by, changed, kept_ids, observe, permuted, row_of
from .test_rng import splitmix
from .test_selectors import LAWS, check_inclusion

# --- the readings -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row in float64, its blocks in the order of the text and cut into T tokens."""

    obs: Observation
    order: Tensor
    at: Tensor
    """[T] positions of the tokens."""
    keys: Tensor
    """[Hkv, T, D]; values too."""
    values: Tensor

    @classmethod
    def of(cls, obs: Observation) -> "Row":
        assert obs.keys is not None
        assert obs.values is not None
        block = obs.keys.shape[-2]
        ids = obs.block_ids.tolist()
        there = [True] * len(ids) if obs.valid is None else obs.valid.tolist()
        order = sorted((j for j in range(len(ids)) if there[j]), key=lambda j: ids[j])
        return cls(
            obs,
            torch.tensor(order),
            torch.tensor([ids[j] * block + i for j in order for i in range(block)]),
            torch.cat([obs.keys[j].double() for j in order], dim=1),
            torch.cat([obs.values[j].double() for j in order], dim=1),
        )

    def attention(self) -> Tensor:
        """[Hq, W, T]; zeros where a query sees nothing."""
        assert self.obs.queries is not None
        assert self.obs.query_positions is not None
        queries = self.obs.queries.double()
        group = queries.shape[1] // len(self.keys)
        heads = []
        for head in range(queries.shape[1]):
            logits = queries[:, head] @ self.keys[head // group].T * self.obs.scale
            logits[self.at[None] > self.obs.query_positions[:, None]] = -math.inf
            heads.append(logits.softmax(-1).nan_to_num(0.0))
        return torch.stack(heads)

    def blocks(self, tokens: Tensor) -> Tensor:
        """Sums [blocks] of the tokens [T] of each."""
        return tokens.view(len(self.order), -1).sum(1)

    def back(self, blocks: Tensor) -> Tensor:
        """In the order that blocks were given in, NaN for padding."""
        out = torch.full(self.obs.block_ids.shape, math.nan, dtype=torch.float64)
        out[self.order] = blocks
        return out


def pool(tokens: Tensor, kernel: int, how: str = "avg") -> Tensor:
    """[T] -> [T], with zeros beyond the ends."""
    around = [0.0] * (kernel // 2)
    padded = [*around, *tokens.tolist(), *around]
    windows = [padded[i : i + kernel] for i in range(len(tokens))]
    return torch.tensor([max(w) if how == "max" else sum(w) / kernel for w in windows]).double()


def over(rows: list[Tensor], how: str) -> Tensor:
    """The mean of some vectors, or the largest of each entry."""
    columns = zip(*(row.tolist() for row in rows), strict=True)
    found = [max(column) if how == "max" else sum(column) / len(column) for column in columns]
    return torch.tensor(found, dtype=torch.float64)


def nexus(row: Row, policy: Nexus) -> Tensor:
    return nexus_and_walk(row, policy)[0]


def nexus_and_walk(row: Row, policy: Nexus) -> tuple[Tensor, Tensor]:
    """Weights, and where the walks of all heads were, on average."""
    candidates = row.obs.candidates[row.order].double()
    priors: list[Tensor] = []
    if policy.prior != "none":
        knorms = policy.prior == "knorm"
        priors = knorm_by_head(row, KNorm()) if knorms else keydiff_by_head(row, KeyDiff())
        priors = [x * candidates / max(1e-300, float(x @ candidates)) for x in priors]
    if policy.heads == "mean":
        assert row.obs.queries is not None
        assert row.obs.keys is not None
        queries, keys = row.obs.queries.double().mean(1, True), row.obs.keys.double().mean(1, True)
        shown = replace(row.obs, queries=queries, keys=keys, values=None)
        priors = [over(priors, "mean")] if priors else []
        row = replace(row, obs=shown, keys=row.keys.mean(0, keepdim=True))
    start = torch.zeros(len(row.order)).double()
    if policy.walk_state == "carried" and row.obs.state is not None:
        start = row.obs.state[row.order, 0].double().nan_to_num(0.0)
        start = start * candidates if policy.walk_over == "candidates" else start
        start = start / max(1e-300, float(start.sum()))
    heads, walks = [], []
    attention = row.attention()
    for index, head in enumerate(attention):
        maps = [row.blocks(query) for query in head]
        a = over([x for x in maps if x.sum() > 0] or maps, policy.pool_rows)
        walked, within = maps, a
        if policy.walk_over == "candidates":
            walked = [x * candidates / max(1e-300, float(x @ candidates)) for x in maps]
            within = a * candidates
        steps = min(policy.walk_steps, len(maps))
        taken = {
            "newest": [len(maps) - 1 - i for i in range(steps)],
            "oldest": list(range(steps)),
            "spread": [
                len(maps) - 1 - round(i * (len(maps) - 1) / max(1, steps - 1)) for i in range(steps)
            ],
        }[policy.walk_rows]
        c = start
        for i in taken:
            c = c + (1 + walked[i] @ c) * walked[i]
        c = c / max(1e-300, float(c.sum()))
        walks.append(c)
        score = a + policy.lam * within.sum() * c
        if priors:
            prior = priors[index * len(priors) // len(attention)]
            share = (score * candidates).sum()
            score = (1 - policy.prior_weight) * score + policy.prior_weight * share * prior
        heads.append(score)
    age = torch.arange(len(row.order)) / max(1, len(row.order) - 1)
    return over(heads, policy.pool_heads) + policy.eps_tie * age, over(walks, "mean")


def snapkv(row: Row, policy: SnapKV) -> Tensor:
    group = len(row.attention()) // len(row.keys)
    tokens = [over(list(head), policy.pool_rows) for head in row.attention()]
    shared = [tokens[i : i + group] for i in range(0, len(tokens), group)]
    pooled = [pool(over(heads, policy.pool_heads), policy.pool, policy.pooling) for heads in shared]
    return over([row.blocks(head) for head in pooled], policy.pool_heads)


def tova(row: Row, policy: TOVA) -> Tensor:
    return row.blocks(row.attention()[:, -1].mean(0))


def h2o(row: Row, policy: H2O) -> Tensor:
    seen = row.attention()
    window = seen.shape[1]
    new = window if row.obs.new_queries is None else min(window, row.obs.new_queries)
    total = row.blocks(seen[:, window - new :].sum(1).mean(0))
    if row.obs.state is not None:
        total += row.obs.state[row.order, 0].double().nan_to_num(0.0)
    return total


def cake(row: Row, policy: CakeScore) -> Tensor:
    total = 0.0
    for head in row.attention():
        mean = head.mean(0)
        variance = ((head - mean) ** 2).sum(0) / max(1, len(head) - 1)
        total = total + row.blocks(pool(mean + policy.gamma * variance, policy.pool))
    return total / len(row.attention())


def spread_out(scores: Tensor, among: Tensor) -> Tensor:
    """e to the standard score among some, unless all are alike to five digits."""
    counted = scores[among].tolist()
    mean = sum(counted) / max(1, len(counted))
    deviation = math.sqrt(sum((x - mean) ** 2 for x in counted) / max(1, len(counted)))
    deviation = max(deviation, abs(mean) / 2**16, 1e-37)
    return ((scores - mean) / deviation).clamp(-80, 80).exp()


def ranked(row: Row, heads: list[Tensor], tokens: str) -> list[Tensor]:
    """Weights [blocks] from a score [T] of each head's tokens that only ranks."""
    may = row.obs.candidates[row.order]
    block = len(row.at) // len(row.order)
    found = []
    for head in heads:
        if tokens == "sum":
            each = [bool(may[t // block]) for t in range(len(head))]
            found.append(row.blocks(spread_out(head, torch.tensor(each))))
            continue
        parts = [head[i : i + block].tolist() for i in range(0, len(head), block)]
        one = [max(part) if tokens == "max" else sum(part) / block for part in parts]
        found.append(spread_out(torch.tensor(one).double(), may))
    return found


def keydiff(row: Row, policy: KeyDiff) -> Tensor:
    return over(keydiff_by_head(row, policy), "mean")


def keydiff_by_head(row: Row, policy: KeyDiff) -> list[Tensor]:
    heads = []
    for keys in row.keys:
        anchor = torch.stack([key / key.norm() for key in keys]).mean(0)
        unlike = [-(key @ anchor) / key.norm() / anchor.norm() for key in keys]
        heads.append(torch.stack(unlike))
    return ranked(row, heads, policy.tokens)


def knorm(row: Row, policy: KNorm) -> Tensor:
    return over(knorm_by_head(row, policy), "mean")


def knorm_by_head(row: Row, policy: KNorm) -> list[Tensor]:
    return ranked(row, [-keys.square().sum(-1).sqrt() for keys in row.keys], policy.tokens)


def rotation(rope: Rope, position: int, dim: int) -> Tensor:
    """What rotates a vector at this position, [D, D]; beyond the table, at its last position."""
    position = min(position, len(rope.cos) - 1)
    half = rope.cos.shape[1]
    first = torch.arange(half) if rope.neox else torch.arange(half) * 2
    second = first + (half if rope.neox else 1)
    matrix = torch.eye(dim, dtype=torch.float64)
    matrix[first, first] = matrix[second, second] = rope.cos[position].double()
    matrix[second, first] = rope.sin[position].double()
    matrix[first, second] = -rope.sin[position].double()
    return matrix


def unrotated(obs: Observation) -> Tensor:
    """Queries [W, Hq, D] of one row as they were before rotation."""
    assert obs.queries is not None
    assert obs.query_positions is not None
    assert obs.rope is not None
    rows = []
    for query, position in zip(obs.queries.double(), obs.query_positions.tolist(), strict=True):
        matrix = rotation(obs.rope, position, query.shape[-1])
        rows.append(torch.linalg.solve(matrix, query.T).T)
    return torch.stack(rows)


def expected_attention(row: Row, policy: ExpectedAttention) -> Tensor:
    assert row.obs.rope is not None
    assert row.obs.query_positions is not None
    queries = unrotated(row.obs)
    last = int(row.obs.query_positions[-1])
    dim, group = queries.shape[-1], queries.shape[1] // len(row.keys)
    turns = [rotation(row.obs.rope, last + 1 + i, dim) for i in range(policy.future)]
    turn = torch.stack(turns).mean(0)
    total = torch.zeros(len(row.at)).double()
    block = len(row.at) // len(row.order)
    may_leave = row.obs.candidates[row.order].repeat_interleave(block)
    for head in range(queries.shape[1]):
        keys, values = row.keys[head // group], row.values[head // group]
        mean = turn @ queries[:, head].mean(0)
        spread = queries[:, head] - queries[:, head].mean(0)
        covariance = turn @ (spread.T @ spread / len(spread)) @ turn.T
        z = row.obs.scale * keys @ mean
        z += row.obs.scale**2 * torch.einsum("td,de,te->t", keys, covariance, keys) / 2
        share = torch.zeros_like(z)
        share[may_leave] = z[may_leave].softmax(0)
        total += (share + policy.eps) * values.norm(dim=-1)
    return row.blocks(total) / queries.shape[1]


def value_range(row: Row) -> Tensor:
    """[blocks], the largest Range(v) of a block's tokens, averaged over KV heads."""
    ranges = row.values.amax(-1) - row.values.amin(-1)
    return ranges.view(len(ranges), len(row.order), -1).amax(-1).mean(0)


def reserved(row: Row, policy: VaSE) -> set[int]:
    """The ids of the blocks of large values; ranges must differ."""
    assert row.obs.keep is not None
    forced = int((~row.obs.candidates[row.order]).sum())
    count = round(policy.share * max(0, row.obs.keep - forced))
    ranges = value_range(row).tolist()
    ids = row.obs.block_ids[row.order].tolist()
    free = [j for j, index in enumerate(row.order.tolist()) if row.obs.candidates[index]]
    free.sort(key=lambda j: ranges[j], reverse=True)
    return {ids[j] for j in free[:count]}


def streaming_llm(row: Row, policy: StreamingLLM) -> Tensor:
    return 1 + row.obs.block_ids[row.order].double()


def drawn(row: Row, policy: RandomBlocks) -> Tensor:
    obs, layer = row.obs, int(row.obs.layers)
    ids = obs.block_ids[row.order].tolist()
    numbers = [splitmix(obs.seed, obs.event, layer, j, 0) for j in ids]
    if policy.name == "random-generated":
        numbers = [x + (j < obs.prompt_blocks) for j, x in zip(ids, numbers, strict=True)]
    return torch.tensor(numbers, dtype=torch.float64)


def kvzip(row: Row, policy: KVzip) -> Tensor:
    """What the replay says where it says something, else the most that any window has seen."""
    assert row.obs.replay is not None
    most = row.attention().amax(1).unflatten(0, (len(row.keys), -1)).amax(1)  # [Hkv, T]
    window = most.unflatten(1, (len(row.order), -1)).amax(2).mean(0)
    if row.obs.state is not None:
        window = torch.fmax(window, row.obs.state[row.order, 0].double())
    replayed = row.obs.replay[row.order].double().mean(1)
    return torch.where(replayed.isnan(), window, replayed)


Reading = Callable[[Row, Any], Tensor]
READINGS: list[tuple[Policy, Reading]] = [
    (Nexus(), nexus),
    (Nexus(eps_tie=0.0, walk_rows="spread", walk_over="all"), nexus),
    (Nexus(heads="mean", walk_rows="oldest", walk_over="all"), nexus),
    (Nexus(walk_steps=0, lam=2.0), nexus),
    (Nexus(pool_rows="max"), nexus),
    (Nexus(pool_heads="max", walk_rows="spread"), nexus),
    (Nexus(pool_rows="max", pool_heads="max", walk_over="all"), nexus),
    (Nexus(walk_state="carried"), nexus),
    (Nexus(walk_state="carried", walk_over="all", walk_rows="oldest", pool_rows="max"), nexus),
    (Nexus(prior="knorm"), nexus),
    (Nexus(prior="knorm", prior_weight=1.0, heads="mean", pool_heads="max"), nexus),
    (Nexus(prior="keydiff", prior_weight=0.3, walk_state="carried", walk_over="all"), nexus),
    (SnapKV(pool_rows="max"), snapkv),
    (SnapKV(pool_heads="max", pool=3), snapkv),
    (SnapKV(pool_rows="max", pool_heads="max", pooling="max"), snapkv),
    (SnapKV(), snapkv),
    (SnapKV(pool=1), snapkv),
    (SnapKV(pool=9), snapkv),
    (SnapKV(pool=7, pooling="max"), snapkv),
    (TOVA(), tova),
    (H2O(), h2o),
    (CakeScore(), cake),
    (CakeScore(gamma=0.0, pool=1), cake),
    (CakeScore(gamma=7.0, pool=3), cake),
    *((KeyDiff(tokens=how), keydiff) for how in get_args(Tokens)),
    *((KNorm(tokens=how), knorm) for how in get_args(Tokens)),
    (ExpectedAttention(), expected_attention),
    (ExpectedAttention(future=3, eps=0.02), expected_attention),
    (ExpectedAttention(future=1), expected_attention),
    (KVzip(), kvzip),
    (VaSE(share=0.0), snapkv),
    (VaSE(share=0.0, pool=3), snapkv),
    (StreamingLLM(), streaming_llm),
    (RandomBlocks(), drawn),
    (RandomGenerated(), drawn),
]


def read(policy: Policy, reading: Reading, obs: Observation) -> Tensor:
    """The reading of all rows, [..., N] float32, NaN for padding."""
    out = torch.empty(obs.block_ids.shape, dtype=torch.float64)
    shown = policy
    if isinstance(policy, VaSE):  # but for what it reserves, it is SnapKV
        shown = SnapKV(pool=policy.pool)
    for index in itertools.product(*(range(size) for size in obs.layers.shape)):
        row = Row.of(row_of(obs, index))
        out[index] = row.back(reading(row, shown))
    return out.float()


def check(policy: Policy, reading: Reading, obs: Observation, rtol: float = 1e-4) -> None:
    found, _ = score(policy, as_seen_by(policy, obs))
    expected = read(policy, reading, obs)
    there = ~expected.isnan()
    torch.testing.assert_close(found[there], expected[there], rtol=rtol, atol=1e-9)


each_reading = pytest.mark.parametrize(
    ("policy", "reading"), [pytest.param(*pair, id=str(pair[0])) for pair in READINGS]
)


def test_every_policy_is_read() -> None:
    assert {policy.name for policy, _ in READINGS} == set(policies.names())


# --- on random tensors ------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    *SHAPES,
    {"blocks": 9, "block": 4, "dim": 8, "seed": 1},
    {"last": 7, "seed": 2},
    {"query_heads": 3, "kv_heads": 3, "dim": 4, "seed": 3, "neox": False},
    {"query_heads": 6, "kv_heads": 2, "block": 1, "dim": 6, "seed": 4, "last": 6},
    {"lead": (2,), "blocks": 7, "dim": 6, "seed": 5, "neox": False},
    {"blocks": 1, "block": 1, "window": 1, "seed": 6},
]


@each_reading
@pytest.mark.parametrize("case", CASES, ids=str)
def test_score_is_its_formula(policy: Policy, reading: Reading, case: dict[str, Any]) -> None:
    check(policy, reading, observe(**case))


def test_defaults_are_the_papers() -> None:
    assert SnapKV() == SnapKV(pool=5, pooling="avg", pool_rows="mean", pool_heads="mean")
    assert CakeScore() == CakeScore(gamma=200.0, pool=5)
    assert ExpectedAttention() == ExpectedAttention(future=512, eps=0.0)
    assert VaSE() == VaSE(share=0.25, pool=5)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_expected_attention_with_scaled_rotations(neox: bool, factor: float) -> None:
    """YaRN and LongRoPE lengthen what they rotate."""
    obs = observe(lead=(2,), dim=6, neox=neox)
    assert obs.rope is not None
    obs = replace(obs, rope=Rope(obs.rope.cos * factor, obs.rope.sin * factor, neox))
    check(ExpectedAttention(future=5), expected_attention, obs)


@pytest.mark.parametrize("beyond", [0, 3, 8])
def test_expected_attention_at_the_end_of_the_table(beyond: int) -> None:
    """A sequence may end where the model's positions do."""
    obs = observe(dim=6)
    assert obs.rope is not None
    assert obs.query_positions is not None
    size = int(obs.query_positions[-1]) + 1 + 8 - beyond
    obs = replace(obs, rope=Rope(obs.rope.cos[:size], obs.rope.sin[:size]))
    check(ExpectedAttention(future=8), expected_attention, obs)


# --- on a real model's tensors ----------------------------------------------------------------

LAYERS = [1, 13, 29]
"""Of SmolLM2-135M: 30 layers, 9 query heads, 3 KV heads, head size 64."""
TOKENS, BLOCK, WINDOW = 392, 32, 16
GONE = [3, 8]
"""Blocks evicted earlier."""


@dataclass(frozen=True)
class Real:
    """Tensors of a real text. The newest block is not seen whole by the older queries."""

    obs: Observation
    plain: Tensor
    """Queries before rotation, as obs.queries."""


@pytest.fixture(scope="module")
def real(model_path: Path) -> Real:
    from transformers import AutoModel, AutoTokenizer
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModel.from_pretrained(model_path, dtype=torch.float32).eval()
    ids = tokenizer(topics["assignment"], return_tensors="pt").input_ids[:, :TOKENS]
    projected: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, output: projected.__setitem__(layer, output)

    for layer in LAYERS:
        model.layers[layer].self_attn.q_proj.register_forward_hook(keep(layer))
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        cos, sin = model.rotary_emb(torch.zeros(1), torch.arange(1024)[None])
        assert ids.shape[1] == TOKENS
        plain = torch.cat([projected[layer] for layer in LAYERS])  # [L, T, Hq D]
        plain = plain.unflatten(2, (-1, 64)).transpose(1, 2)
        rotated, _ = apply_rotary_pos_emb(plain, plain, cos[:, :TOKENS], sin[:, :TOKENS])
    live = torch.tensor([j for j in range(TOKENS // BLOCK) if j not in GONE])
    live = live[torch.randperm(len(live), generator=torch.Generator().manual_seed(0))]

    def blocks(tensors: list[Tensor]) -> Tensor:
        cut = torch.cat(tensors)[:, :, : TOKENS // BLOCK * BLOCK].unflatten(2, (-1, BLOCK))
        return cut.transpose(1, 2)[:, live].clone()

    obs = Observation(
        queries=rotated[:, :, -WINDOW:].transpose(1, 2).clone(),
        query_positions=torch.arange(TOKENS - WINDOW, TOKENS),
        keys=blocks([cache.layers[layer].keys for layer in LAYERS]),
        block_ids=live.expand(len(LAYERS), -1),
        scale=64**-0.5,
        candidates=((live > 0) & (live < live.max())).expand(len(LAYERS), -1),
        seed=0,
        event=0,
        layers=torch.tensor(LAYERS),
        values=blocks([cache.layers[layer].values for layer in LAYERS]),
        keep=6,
        rope=Rope(cos[0, :, :32].clone(), sin[0, :, :32].clone()),
        replay=torch.full((len(LAYERS), len(live), 3), math.nan),
    )
    return Real(obs, plain[:, :, -WINDOW:].transpose(1, 2).clone())


@each_reading
def test_real_tensors(policy: Policy, reading: Reading, real: Real) -> None:
    assert int(real.obs.query_positions[0]) < int(real.obs.block_ids.max() + 1) * BLOCK
    check(policy, reading, real.obs)


def test_queries_are_unrotated_to_what_they_were(real: Real) -> None:
    """What expected attention starts from; `Rope` turns it as the model does."""
    obs = real.obs
    assert obs.rope is not None
    assert obs.queries is not None
    for layer in range(len(LAYERS)):
        found = unrotated(row_of(obs, layer)).float()
        torch.testing.assert_close(found, real.plain[layer], rtol=1e-4, atol=1e-4)
    cos, sin = (table[obs.query_positions][:, None] for table in (obs.rope.cos, obs.rope.sin))
    turned = obs.rope.turned(real.plain, cos, sin)
    torch.testing.assert_close(turned, obs.queries, rtol=1e-4, atol=1e-4)
    turned = obs.rope.turned(obs.queries, cos, -sin)
    torch.testing.assert_close(turned, real.plain, rtol=1e-4, atol=1e-4)


@each_reading
def test_one_block(policy: Policy, reading: Reading, real: Real) -> None:
    check(policy, reading, permuted(real.obs, torch.tensor([4])))


@each_reading
@pytest.mark.parametrize("ids", [[4], []], ids=str)
def test_one_candidate_and_none(
    policy: Policy, reading: Reading, ids: list[int], real: Real
) -> None:
    may = torch.isin(real.obs.block_ids, torch.tensor(ids, dtype=torch.int64))
    check(policy, reading, replace(real.obs, candidates=may))


@each_reading
def test_blocks_that_are_all_alike(policy: Policy, reading: Reading, real: Real) -> None:
    obs = real.obs
    assert obs.query_positions is not None
    obs = changed(obs, ("keys", "values"), lambda x: x[:, :1].expand_as(x).clone())
    obs = replace(obs, query_positions=obs.query_positions + BLOCK)
    check(policy, reading, obs)
    if reading in (streaming_llm, drawn):  # they look at nothing but where a block is
        return
    weights, _ = score(policy, as_seen_by(policy, obs))
    inner = weights[obs.candidates].view(len(LAYERS), -1)
    torch.testing.assert_close(inner, inner[:, :1].expand_as(inner))


def cut(kind: str, weights: Tensor, keep: int, obs: Observation, **more: float) -> Tensor:
    """Which blocks of an observation a selector keeps, bool [rows, N]."""
    return select(
        kind,
        weights,
        keep,
        ~obs.candidates,
        seed=0,
        event=0,
        layers=obs.layers,
        block_ids=obs.block_ids,
        **more,
    )


def with_sink(obs: Observation, gap: float) -> Observation:
    """The oldest token's logits are `gap` or more above the log-sum of all the others'."""
    assert obs.queries is not None
    assert obs.keys is not None
    queries, keys = obs.queries.clone(), obs.keys.clone()
    size = keys.shape[1]
    oldest = int(obs.block_ids[0].argmin())
    up = torch.nn.functional.normalize(torch.ones(64), dim=0)
    queries += 20 * up
    for layer in range(len(LAYERS)):
        row = replace(obs, queries=queries, keys=keys)
        logits = torch.stack(
            [
                queries[layer, :, head] @ keys[layer, :, head // 3].reshape(size * BLOCK, 64).T
                for head in range(9)
            ]
        )
        logits *= row.scale
        need = logits.logsumexp(-1).amax() - logits[..., oldest * BLOCK].amin() + gap
        keys[layer, oldest, :, 0] += up * need / (row.scale * 20) * 1.2
    return replace(obs, queries=queries, keys=keys)


@each_reading
def test_a_sink_that_gets_almost_everything(policy: Policy, reading: Reading, real: Real) -> None:
    obs = with_sink(real.obs, math.log(999))
    for layer in range(len(LAYERS)):
        assert Row.of(row_of(obs, layer)).attention()[..., 0].amin() > 0.999
    check(policy, reading, obs, rtol=1e-3)


@pytest.mark.parametrize("block", [0, 9])
def test_expected_attention_does_not_ask_what_forced_blocks_get(block: int, real: Real) -> None:
    """However much a block gets that stays anyway, the others weigh what they did."""
    policy, obs = ExpectedAttention(), with_sink(real.obs, math.log(999))
    assert obs.keys is not None
    forced = replace(obs, candidates=obs.candidates & (obs.block_ids != block))
    weights, _ = score(policy, forced)
    keys = obs.keys.clone()
    keys[obs.block_ids == block] *= 3
    other, _ = score(policy, replace(forced, keys=keys))
    assert torch.equal(weights[forced.candidates], other[forced.candidates])
    free = replace(obs, candidates=torch.ones_like(obs.candidates))
    assert not torch.allclose(score(policy, free)[0], score(policy, replace(free, keys=keys))[0])


@pytest.mark.parametrize("policy", [policies.make(name) for name in policies.names()], ids=str)
@pytest.mark.parametrize("selector", SELECTORS)
def test_denormal_weights(policy: Policy, selector: str, real: Real) -> None:
    """Next to such a sink the others' attention is around 1e-40, or 0 once rounded."""
    obs = with_sink(real.obs, 92.0)
    others = Row.of(row_of(obs, 0)).attention()[..., 1:].sum(-1)
    assert others.max() < torch.finfo(torch.float32).tiny
    weights, _ = score(policy, as_seen_by(policy, obs))
    assert bool(weights.isfinite().all())
    assert bool((weights >= 0).all())
    kept = cut(policy.selector or selector, weights, 6, obs)
    assert kept.sum(-1).tolist() == [6] * len(LAYERS)


@pytest.mark.parametrize(
    ("policy", "selector", "options"),
    [
        pytest.param(policy, *law, id=f"{policy.name}-{law}")
        for policy in map(policies.make, policies.names())
        for law in LAWS
        if policy.selector in (None, law[0])
    ],
)
def test_inclusion_frequencies_of_real_weights(
    policy: Policy, selector: str, options: dict[str, Any], real: Real
) -> None:
    weights, _ = score(policy, as_seen_by(policy, replace(real.obs, keep=2)))
    check_inclusion(selector, options, weights[1], ~real.obs.candidates[1], 5)


@pytest.mark.parametrize("policy", [policies.make(name) for name in policies.names()], ids=str)
@pytest.mark.parametrize("empty", ["queries", "keys", "values"])
def test_zeros(policy: Policy, empty: str, real: Real) -> None:
    obs = changed(real.obs, (empty,), torch.zeros_like)
    weights, _ = score(policy, as_seen_by(policy, obs))
    assert bool(weights.isfinite().all())
    assert bool((weights >= 0).all())


# --- what is remembered -----------------------------------------------------------------------


def events(seed: int) -> list[tuple[list[int], int]]:
    """Ids of the live blocks, shuffled, and how many of the queries are new, eviction by eviction.

    Each time some blocks have gone, one of which is an old one, and some have filled up.
    """
    g = torch.Generator().manual_seed(seed)
    live, following, out = [0, 1, 2, 3, 4], 5, []
    for event in range(6):
        order = torch.randperm(len(live), generator=g).tolist()
        live = [live[i] for i in order]
        out.append((live, [99, 3, 0, 4, 1, 7][event]))
        grown = event % 3
        live = [*live[2:], *range(following, following + grown + 1)]
        following += grown + 1
    return out


def seen_at(event: int, ids: list[int], new: int, state: dict[int, Tensor]) -> Observation:
    obs = observe(blocks=len(ids), seed=event, last=200)
    size = len(next(iter(state.values()))) if state else 0
    unknown = torch.full((size,), math.nan)
    return replace(
        obs,
        block_ids=torch.tensor(ids),
        candidates=torch.ones(len(ids), dtype=torch.bool),
        state=torch.stack([state.get(j, unknown) for j in ids]) if size else None,
        new_queries=None if event == 0 else new,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.6])
def test_h2o_adds_up_over_evictions(smoothing: float) -> None:
    """Each query counts once, and a block that left takes its sum with it."""
    state: dict[int, Tensor] = {}
    sums: dict[int, float] = {}
    smooth: dict[int, float] = {}
    for event, (ids, new) in enumerate(events(0)):
        obs = seen_at(event, ids, new, state)
        seen = Row.of(obs).attention()[:, max(0, 4 - new) :]  # of a window of 4
        shares = Row.of(obs).blocks(seen.sum(1).mean(0)).tolist()
        sums = {j: sums.get(j, 0.0) + x for j, x in zip(sorted(ids), shares, strict=True)}
        f = smoothing
        smooth = {j: f * smooth.get(j, x) + (1 - f) * x for j, x in sums.items()}
        weights, after = score(H2O(), replace(obs, values=None), smoothing)
        torch.testing.assert_close(weights, torch.tensor([smooth[j] for j in ids]))
        assert after is not None
        assert after.shape == (len(ids), 2 if smoothing else 1)
        state = dict(zip(ids, after, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.6])
@pytest.mark.parametrize("walk_over", ["candidates", "all"])
def test_a_walk_goes_on_from_the_blocks_that_are_left(
    walk_over: WalkOver, smoothing: float
) -> None:
    policy = Nexus(walk_over=walk_over, walk_state="carried")
    state: dict[int, Tensor] = {}
    walk: dict[int, float] = {}
    smooth: dict[int, float] = {}
    for event, (ids, new) in enumerate(events(2)):
        obs = seen_at(event, ids, new, state)
        obs = replace(obs, candidates=obs.block_ids > min(ids))
        known = torch.tensor([[walk.get(j, math.nan)] for j in ids])
        shown = replace(obs, state=known if walk else None)
        weights, walked = nexus_and_walk(Row.of(shown), policy)
        now = dict(zip(sorted(ids), weights.tolist(), strict=True))
        walk = dict(zip(sorted(ids), walked.tolist(), strict=True))
        f = smoothing
        smooth = {j: f * smooth.get(j, x) + (1 - f) * x for j, x in now.items()}
        found, after = score(policy, obs, smoothing)
        torch.testing.assert_close(found, torch.tensor([smooth[j] for j in ids]))
        assert after is not None
        assert after.shape == (len(ids), 3 if smoothing else 2)
        state = dict(zip(ids, after, strict=True))
        fresh = Nexus(walk_over=walk_over).weights(obs)
        assert torch.allclose(fresh, torch.tensor([now[j] for j in ids]).float()) == (event == 0)


def test_smoothing_is_a_moving_average_of_each_block() -> None:
    state: dict[int, Tensor] = {}
    smooth: dict[int, float] = {}
    for event, (ids, new) in enumerate(events(1)):
        obs = seen_at(event, ids, new, state)
        now = dict(zip(sorted(ids), tova(Row.of(obs), TOVA()).tolist(), strict=True))
        smooth = {j: 0.8 * smooth[j] + 0.2 * x if j in smooth else x for j, x in now.items()}
        weights, after = score(TOVA(), obs, 0.8)
        torch.testing.assert_close(weights, torch.tensor([smooth[j] for j in ids]))
        assert after is not None
        state = dict(zip(ids, after, strict=True))


@pytest.mark.parametrize(
    "policy",
    [*(policies.make(name) for name in policies.names()), Nexus(walk_state="carried")],
    ids=str,
)
def test_what_is_kept_of_a_block(policy: Policy) -> None:
    obs = replace(as_seen_by(policy, observe(lead=(2,))), state=None)
    plain, state = score(policy, obs)
    assert (state is None) == (policy.state_size == 0)
    weights, smooth = score(policy, obs, 0.5)
    assert torch.equal(weights, plain)  # nothing is known of any block yet
    if policy.selector:
        assert smooth is None
    else:
        assert smooth is not None
        assert smooth.shape == (2, 5, policy.state_size + 1)
    for kept, smoothing in ((state, 0.0), (smooth, 0.5)):
        assert state_size(policy, smoothing) == (0 if kept is None else kept.shape[-1])


# --- VaSE, random-generated -------------------------------------------------------------------


@pytest.mark.parametrize("keep", [2, 3, 5, 6, 10])
@pytest.mark.parametrize("reserve", [0.0, 0.25, 0.4, 1.0])
def test_vase_reserves_large_values_and_is_snapkv_else(
    keep: int, reserve: float, real: Real
) -> None:
    obs, policy = replace(real.obs, keep=keep), VaSE(share=reserve)
    weights, _ = score(policy, obs)
    expected = read(policy, snapkv, obs)
    for layer in range(len(LAYERS)):
        ids = obs.block_ids[layer].tolist()
        above = {j for j, w in zip(ids, weights[layer].tolist(), strict=True) if w > 1}
        assert above == reserved(Row.of(row_of(obs, layer)), policy)
        assert len(above) == round(reserve * max(0, keep - 2))
    rest = weights <= 1
    torch.testing.assert_close(weights[rest], expected[rest], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_whatever_draws_the_others_reserved_blocks_stay(selector: str, temperature: float) -> None:
    rows = 4000
    obs = observe(lead=(rows,), blocks=6, window=1, dim=2)
    obs = replace(obs, keep=3, candidates=torch.ones_like(obs.candidates))
    weights, _ = score(VaSE(share=2 / 3), obs)
    kept = cut(selector, weights, 3, obs, temperature=temperature)
    assert ((weights > 1) & kept).sum(-1).tolist() == [2] * rows


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_row_with_less_room_than_is_reserved_keeps_the_largest_values(
    selector: str, keep: int
) -> None:
    """Under uneven budgets `Observation.keep` is an average."""
    rows = 40
    obs = replace(observe(lead=(rows,), blocks=8), keep=5)
    obs = replace(obs, candidates=torch.ones_like(obs.candidates))
    weights, _ = score(VaSE(share=0.8), obs)
    assert (weights > 1).sum(-1).tolist() == [4] * rows
    kept = cut(selector, weights, keep, obs)
    for index in range(rows):
        row = Row.of(row_of(obs, index))
        best = row.order[value_range(row).argsort(descending=True)[:keep]]
        assert kept[index].nonzero().flatten().tolist() == sorted(best.tolist())


def test_vase_with_equal_values_reserves_the_newest(real: Real) -> None:
    obs = changed(real.obs, ("values",), torch.ones_like)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    for seen in (obs, permuted(obs, order)):
        weights, _ = score(VaSE(share=0.5), seen)
        for ids, high in zip(seen.block_ids, weights > 1, strict=True):
            assert sorted(ids[high].tolist()) == [9, 10]


def test_smoothing_does_not_keep_what_was_reserved_once(real: Real) -> None:
    """What is added for a reserved block is gone at the next eviction, whatever the smoothing."""
    first, policy = replace(real.obs, keep=6), VaSE(share=0.5)
    before, state = score(policy, first, 0.9)
    assert first.values is not None
    other = replace(first, values=first.values.flip(1), state=state, event=2)
    weights, _ = score(policy, other, 0.9)
    for layer in range(len(LAYERS)):
        row = Row.of(row_of(other, layer))
        ids = other.block_ids[layer].tolist()
        above = {j for j, w in zip(ids, weights[layer].tolist(), strict=True) if w > 1}
        assert above == reserved(row, policy)
    assert not torch.equal(before > 1, weights > 1)


def test_vase_needs_to_know_how_many_stay() -> None:
    with pytest.raises(ValueError, match="does not say how many"):
        score(VaSE(), replace(observe(), keep=None))


def test_random_generated_gives_up_generated_blocks_first() -> None:
    obs = replace(observe(lead=(300,), blocks=6), prompt_blocks=4)
    policy = policies.make("random-generated")
    kept = kept_ids(policy, as_seen_by(policy, obs), 4)
    subsets = set()
    for ids, stay in zip(obs.block_ids.tolist(), kept.tolist(), strict=True):
        prompt = [j for j in ids if j < 4]
        assert len([j for j in stay if j < 4]) == min(4, len(prompt))
        subsets.add(tuple(stay))
    assert len(subsets) > 30
    # Without a prompt, and within one, it is the same draw as `random`.
    plain = policies.make("random").weights(obs)
    for blocks, more in ((0, 0.0), (99, 1.0)):
        found = policy.weights(replace(obs, prompt_blocks=blocks))
        torch.testing.assert_close(found, plain + more)


# --- KV heads as rows -------------------------------------------------------------------------


def by_heads(policy: Policy) -> str | None:
    """What makes the weights of KV heads those of a layer: "mean", "max" or nothing."""
    if (
        policy.name in ("keydiff", "knorm", "random", "random-generated")
        or getattr(policy, "heads", None) == "mean"
    ):
        return None
    return getattr(policy, "pool_heads", "mean")


@pytest.mark.parametrize(
    "policy", [pytest.param(pair[0], id=str(pair[0])) for pair in READINGS if by_heads(pair[0])]
)
def test_kv_heads_as_rows_make_the_whole(policy: Policy, real: Real) -> None:
    """How a caller keeps one set per KV head."""
    obs = real.obs
    assert obs.queries is not None
    assert obs.keys is not None
    assert obs.values is not None
    assert obs.replay is not None
    ids = obs.block_ids[:, None].expand(-1, 3, -1)
    split = replace(
        obs,
        queries=obs.queries.unflatten(2, (3, 3)).movedim(2, 1),
        keys=obs.keys.movedim(2, 1).unsqueeze(3),
        values=obs.values.movedim(2, 1).unsqueeze(3),
        block_ids=ids,
        candidates=obs.candidates[:, None].expand_as(ids),
        layers=torch.arange(9).view(3, 3),
        replay=obs.replay.movedim(2, 1).unsqueeze(3),
    )
    joint, _ = score(policy, as_seen_by(policy, obs))
    apart, _ = score(policy, as_seen_by(policy, split))
    apart = apart.amax(1) if by_heads(policy) == "max" else apart.mean(1)
    torch.testing.assert_close(apart, joint, rtol=1e-4, atol=1e-8)
