"""Each kernel against its reference, over shapes, dtypes, layouts and ragged lengths."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm.kernels import fill, pairs, ranked, score, select, shift, statistics, window
from nexus_vllm.kernels.rows import Rows

SOME = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
SIZES = (64, 80, 96, 128, 256)
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC")
BLOCK = 32


@st.composite
def caches(draw: Any, heads: int | None = None) -> Rows:
    """Rows of up to three sequences in a small pool: two layers, a few KV heads, any layout."""
    dim, layout = draw(st.sampled_from(SIZES)), draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(DTYPES))
    by_dim = layout == "LBHNC" and draw(st.booleans())  # as a CPU's cache may be
    kv_heads, layers, pages = draw(st.sampled_from((1, 2, 3))), 2, 7
    content = 2 * dim
    # Numbers from one to the next of: layer, page, head, token.
    page = kv_heads * BLOCK * content
    step = {
        "LBHNC": (pages * page, page, BLOCK * content, content),
        "LBNHC": (pages * page, page, content, kv_heads * content),
        "BLHNC": (page, layers * page, BLOCK * content, content),
    }[layout]
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    cache = torch.randn(layers * pages * kv_heads * BLOCK * content, generator=random).to(dtype)
    rows = []
    for length in draw(st.lists(st.integers(0, pages), min_size=1, max_size=3)):
        taken, ids = torch.full((pages,), -1), torch.full((pages,), 2**40)
        taken[:length] = torch.randperm(pages, generator=random)[:length]
        ids[:length] = torch.randperm(2 * pages, generator=random)[:length]
        for layer in range(layers):
            for head in range(kv_heads if heads is None else 1):
                units = layer * step[0] + taken * step[1] + head * step[2]
                rows.append((units, ids, torch.tensor(length)))
    units, blocks, counts = (torch.stack(part) for part in zip(*rows, strict=True))
    size = int(counts.max())
    scales = torch.rand(2, len(rows), generator=random) + 0.5
    return Rows(
        cache=cache,
        units=units[:, :size].contiguous(),
        blocks=blocks[:, :size].contiguous(),
        counts=counts,
        block=BLOCK,
        head_size=dim,
        token_step=step[3] if not by_dim else 1,
        dim_step=BLOCK if by_dim else 1,
        values=BLOCK * dim if by_dim else dim,
        heads=1 if heads is None else kv_heads,
        head_step=0 if heads is None else step[2],
        scales=scales if dtype == torch.float8_e4m3fn else None,
    )


def asked(rows: Rows, group: int, window: int, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and positions of rows; the window's last query may come before some blocks."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows.shape[0], group, window, rows.head_size)
    dtype = torch.bfloat16 if rows.scales is not None else rows.cache.dtype
    queries = torch.randn(shape, generator=random).to(dtype)
    first = torch.randint(0, 14 * BLOCK, (rows.shape[0], 1), generator=random)
    return queries, first + torch.arange(window)


WINDOWS = st.tuples(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16)), st.sampled_from((1, 5, 13, 16)))


@SOME
@given(rows=caches(), shape=WINDOWS, seed=st.integers(0, 2**31))
def test_attention(rows: Rows, shape: tuple[int, int], seed: int) -> None:
    check_attention(rows, *shape, seed)


@SOME
@given(rows=caches(heads=1), window=st.sampled_from((1, 4, 16)), seed=st.integers(0, 2**31))
def test_attention_of_averaged_heads(rows: Rows, window: int, seed: int) -> None:
    check_attention(rows, 1, window, seed)


def check_attention(rows: Rows, group: int, window: int, seed: int) -> None:
    queries, positions = asked(rows, group, window, seed)
    scale = rows.head_size**-0.5
    expected = score.block_lse_reference(rows, queries, positions, scale)
    found = score.block_lse(rows, queries, positions, scale)
    seen = expected.isfinite()
    assert torch.equal(seen, found.isfinite())
    assert torch.allclose(found[seen], expected[seen], rtol=0, atol=2e-5)
    totals = expected.logsumexp(-1)
    for pools in (("mean", "mean"), ("max", "mean"), ("mean", "max"), ("max", "max")):
        told = (rows, queries, positions, totals, scale, *pools)
        tokens = score.token_attention(*told)
        assert torch.allclose(tokens, score.token_attention_reference(*told), rtol=2e-5, atol=1e-7)


@SOME
@given(rows=caches())
def test_statistics(rows: Rows) -> None:
    anchor = statistics.anchor_reference(rows)
    assert torch.allclose(statistics.anchor(rows), anchor, rtol=0, atol=1e-6)
    for kind in statistics.KINDS:
        expected = statistics.reference(kind, rows, anchor)
        assert torch.allclose(
            statistics.statistics(kind, rows, anchor), expected, rtol=1e-6, atol=1e-6
        )


@SOME
@given(
    kind=st.sampled_from((("topk", 1, 0.0), ("gumbel", 1, 0.1), ("gumbel", 1, 1.0),
                          ("gumbel", 1, 0.0), ("reservoir", 1, 0.0), ("reservoir", 5, 0.0))),
    shape=st.tuples(st.integers(1, 5), st.integers(0, 70) | st.sampled_from((513, 1100))),
    steep=st.sampled_from((0, 1, 8, 40)),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_selections_are_the_same(kind: Any, shape: tuple[int, int], steep: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, size = shape
    weights = torch.rand(shape, generator=random) ** steep
    odd = torch.tensor([0.0, 1e-45, 1e-38, 3e38, torch.inf, torch.nan])
    spoilt = torch.rand(shape, generator=random) < 0.1
    weights[spoilt] = odd[torch.randint(0, len(odd), (int(spoilt.sum()),), generator=random)]
    forced = torch.rand(shape, generator=random) < 0.2
    keep = torch.randint(0, size + 1, (rows,), generator=random).maximum(forced.sum(-1))
    seeds = torch.randint(-(2**63), 2**63 - 1, (2,), generator=random).tolist() * rows
    told: dict[str, Any] = {
        "seeds": seeds[:rows],
        "events": [row // 2 for row in range(rows)],
        "layers": torch.arange(rows) * 7,
        "block_ids": torch.stack(
            [torch.randperm(2 * size + 1, generator=random)[:size] for _ in range(rows)]
        ),
        "n": kind[1],
        "temperature": kind[2],
    }
    expected = select.reference(kind[0], weights, keep, forced, **told)
    found = select.select(kind[0], weights, keep, forced, **told)
    assert torch.equal(found.sum(-1), keep)
    assert torch.equal(found, expected)


def test_a_selector_without_a_kernel_is_refused() -> None:
    some = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="'pareto' has no kernel"):
        select.select(
            "pareto", some, torch.ones(1), some.bool(), seeds=[0], events=[0],
            layers=torch.zeros(1), block_ids=some.long(),
        )  # fmt: skip


@SOME
@given(
    words=st.sampled_from((4, 1024, 1028, 5120)),
    copies=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_fills(words: int, copies: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    cache = torch.randint(-(2**31), 2**31 - 1, (9 * words,), generator=random, dtype=torch.int32)
    places = torch.randperm(9, generator=random)[: 2 * copies] * words
    expected = cache.clone()
    fill.reference(expected, places[:copies], places[copies:], words)
    fill.fill(cache, places[:copies], places[copies:], words)
    assert torch.equal(cache, expected)


@SOME
@given(counts=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 2**31))
def test_fills_guarded_by_counts(counts: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    words, most = 8, 3
    cache = torch.randint(-(2**31), 2**31 - 1, (20 * words,), generator=random, dtype=torch.int32)
    places = torch.randperm(20, generator=random)[: 2 * most * len(counts)] * words
    source, target = places.view(2, len(counts), most)
    made = torch.tensor(counts, dtype=torch.int64)
    expected, found, alone = cache.clone(), cache.clone(), cache.clone()
    for row, count in enumerate(counts):
        fill.reference(alone, source[row, :count], target[row, :count], words)
    fill.reference(expected, source, target, words, made)
    fill.fill(found, source, target, words, made)
    assert torch.equal(expected, alone)
    assert torch.equal(found, alone)


@pytest.mark.parametrize(("words", "first"), [(6, 0), (8, 1)])
def test_what_is_not_aligned_is_refused(words: int, first: int) -> None:
    cache = torch.zeros(64, dtype=torch.int32)[first:]
    with pytest.raises(ValueError, match="not 16-byte aligned"):
        fill.fill(cache, torch.tensor([0]), torch.tensor([16]), words)


@SOME
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=4),
    width=st.sampled_from((1, 255, 256, 300)),
    seed=st.integers(0, 2**31),
)
def test_shifts(rows: list[tuple[int, int]], width: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 999, (len(rows), width), generator=random, dtype=torch.int32)
    blocks = torch.tensor([min(max(row), width) for row in rows], dtype=torch.int32)
    released = torch.tensor([min(min(row), width) for row in rows], dtype=torch.int32)
    lengths = blocks * BLOCK
    expected = torch.full_like(table, -7), torch.full_like(lengths, -7)
    found = torch.full_like(table, -7), torch.full_like(lengths, -7)
    shift.reference(table, lengths, released, BLOCK, expected)
    shift.shift(table, lengths, released, BLOCK, found)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    for row, gone in enumerate(released.tolist()):
        assert torch.equal(found[0][row, : width - gone], table[row, gone:])


@SOME
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.booleans()), max_size=4),
    heads=st.sampled_from((1, 3)),
    rows=st.sampled_from((1, 4, 17)),
)
def test_windows(requests: list[tuple[int, int, bool]], heads: int, rows: int) -> None:
    new = torch.tensor([0, *(tokens for tokens, _, _ in requests)], dtype=torch.int32)
    starts = new.cumsum(0).int()
    lengths = torch.tensor([n + before for n, before, _ in requests], dtype=torch.int32)
    slots = torch.tensor(
        [slot if known else -1 for slot, (_, _, known) in enumerate(requests)], dtype=torch.int32
    )
    query = torch.randn(int(starts[-1]) + 3, heads, 80)
    expected = torch.zeros(max(1, len(requests)) * rows, heads, 80)
    found = expected.clone()
    window.reference(query, starts, lengths, slots, rows, expected)
    window.window(query, starts, lengths, slots, rows, found)
    assert torch.equal(found, expected)
    for slot, (tokens, before, known) in enumerate(requests):
        for back in range(min(tokens, rows) if known else 0):
            place = slot * rows + (tokens + before - 1 - back) % rows
            assert torch.equal(found[place], query[int(starts[slot + 1]) - 1 - back])


@SOME
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(0, 150)),
    tokens=st.sampled_from(("sum", "max", "mean")),
    spread=st.sampled_from((0.0, 0.1, 1.0, 1e4)),
    offset=st.sampled_from((0.0, -0.9, 50.0)),
    seed=st.integers(0, 2**31),
)
def test_weights_of_what_only_ranks(
    shape: tuple[int, int], tokens: Any, spread: float, offset: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, BLOCK, generator=random) * spread + offset
    candidates = torch.rand(shape, generator=random) < 0.8
    found = ranked.ranked(scores, candidates, tokens)
    assert torch.allclose(found, ranked.reference(scores, candidates, tokens), rtol=2e-3)


def test_tensors_that_are_not_contiguous() -> None:
    """As they come from slices and expansions; a kernel computes addresses by itself."""
    random = torch.Generator().manual_seed(0)
    weights = torch.rand(40, 3, generator=random).T
    forced = (torch.rand(40, 6, generator=random) < 0.2).T[::2]
    ids = torch.arange(40).expand(3, -1)
    keep = torch.tensor([20, 25, 30])
    told: dict[str, Any] = {
        "seeds": [1, 2, 3], "events": [0] * 3, "layers": torch.arange(3), "block_ids": ids,
    }  # fmt: skip
    for kind in select.KINDS:
        expected = select.reference(kind, weights, keep, forced, **told)
        assert torch.equal(select.select(kind, weights, keep, forced, **told), expected)
    scores = torch.randn(40, 3, BLOCK, generator=random).transpose(0, 1)
    found = ranked.ranked(scores, ~forced, "max")
    assert torch.allclose(found, ranked.reference(scores, ~forced, "max"), rtol=1e-5)
    slots = torch.cat([torch.arange(20), torch.full((20,), -1)])
    kept = select.reference("topk", weights, torch.tensor([20] * 3), forced, **told)
    by_column = kept.T.contiguous().T
    expected_pairs = pairs.reference(kept, slots, 20, 20)
    for one, other in zip(pairs.pairs(by_column, slots, 20, 20), expected_pairs, strict=True):
        assert torch.equal(one, other)
