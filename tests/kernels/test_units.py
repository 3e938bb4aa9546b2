"""A step's unit tables in one launch equal the reference, and that a table drawn up by hand."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexus_vllm.engine import ops
from nexus_vllm.engine.units import Copies, Holding, UnitSpace
from nexus_vllm.kernels import units

BLOCK = 4


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    requests=st.lists(
        st.tuples(
            st.sampled_from(("apart", "alike", "padding")), st.integers(0, 300), st.integers(0, 5)
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**31),
)
def test_tables(layers: int, heads: int, requests: list[tuple[str, int, int]], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    pages = 310
    table = torch.randint(0, 50, (len(requests) + 1, pages), generator=random, dtype=torch.int32)
    lengths = torch.zeros(len(requests) + 1, dtype=torch.int32)
    base = torch.randperm(layers, generator=random) * 50 * heads
    held: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    first, tail = [], []
    for row, (kind, most, more) in enumerate(requests):
        first.append(0 if kind == "padding" else min(most, 7))
        tail.append(0 if kind == "padding" else more)
        lengths[row] = 0 if kind == "padding" else max(0, (first[-1] + more) * BLOCK - 1)
        if kind != "apart":
            held.append(None)
            continue
        counts = torch.randint(0, most + 1, (layers, heads), generator=random)
        taken = torch.randint(0, 50 * heads * layers, (layers, heads, most + 1), generator=random)
        taken[torch.arange(most + 1) >= counts[..., None]] = -1
        held.append((taken[..., :most], counts))  # rows further apart than they are long
    width = max(
        tail[row] + (0 if dealt is None else int(dealt[1].max())) for row, dealt in enumerate(held)
    )
    told: dict[str, Any] = {
        **{"held": held, "first": first, "tail": tail, "table": table, "lengths": lengths},
        **{"base": base, "heads": heads, "block": BLOCK, "width": width},
    }
    found, tokens = units.tables(**told)
    expected, expected_tokens = units.reference(**told)
    assert found.dtype == tokens.dtype == torch.int32
    assert torch.equal(found, expected)
    assert torch.equal(tokens, expected_tokens)
    by_hand = found.view(layers, heads, len(requests), width).tolist()
    for layer in range(layers):
        for head in range(heads):
            for row, dealt in enumerate(held):
                count = 0 if dealt is None else int(dealt[1][layer, head])
                line = [] if dealt is None else dealt[0][layer, head, :count].tolist()
                rest = table[row, first[row] : first[row] + tail[row]].tolist()
                line += [int(base[layer]) + page * heads + head for page in rest]
                line += [0] * (width - len(line))
                assert by_hand[layer][head][row] == line
                length = count * BLOCK + int(lengths[row]) - first[row] * BLOCK
                assert tokens.view(layers, heads, -1)[layer, head, row] == length


def test_units_that_are_no_rows_are_refused() -> None:
    spread = torch.zeros(2, 2, 6, dtype=torch.long)[..., ::2]
    counts = torch.zeros(2, 2, dtype=torch.long)
    table = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="are no rows"):
        units.tables([(spread, counts)], [0], [0], table, table[:, 0], torch.arange(2), 2, BLOCK, 3)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_copies_that_are_not_needed_change_nothing(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """A GPU's list of copies has room for more than there are."""
    monkeypatch.setenv(ops.ENVIRONMENT, implementation)
    pool = torch.randn(2, 8, 2, 4, 8)
    space = UnitSpace.of([pool[0], pool[1]])
    holding = Holding.even(space, torch.tensor([3, 5, 6]), torch.arange(3).expand(2, -1))
    kept = torch.ones(2, 2, 3, dtype=torch.bool)
    kept[0, :, 1] = kept[1, :, 2] = False
    room = space.own(torch.tensor([3, 5])).flatten()
    packed, copies = holding.packed(space, kept, kept.sum(-1), room)
    assert packed.counts.sum() == len(room)
    assert len(copies.source) == copies.count == 2
    expected = pool.clone()
    there = UnitSpace.of([expected[0], expected[1]]).flat
    there[copies.target] = there[copies.source]
    padding = torch.zeros(3, dtype=torch.long)
    listed = [torch.cat([units, padding]) for units in (copies.source, copies.target)]
    space.copy(Copies(*listed, copies.count))
    assert torch.equal(pool, expected)
