"""Which blocks move where: against the reference, and this against a plain loop."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nexus_vllm.kernels import pairs
from tests.kernels.test_against_references import SOME

Told = tuple[Tensor, Tensor, int, int]


@st.composite
def evictions(draw: Any) -> Told:
    """kept, slots, places and a bound on copies: pages that stay are the last ones, or any."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, size = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 30, 1023, 2100)))
    places = draw(st.integers(0, size))
    own, last = draw(st.booleans()), draw(st.booleans())
    slots = torch.full((rows, size), -1)
    for row in range(rows if own else 1):
        stay = torch.arange(size) if last else torch.randperm(size, generator=random)
        slots[row if own else slice(None), stay[size - places :]] = torch.arange(places)
    kept = torch.rand(rows, size, generator=random).argsort(1) < places
    fewest = min(places, size - places)
    return kept, slots if own else slots[0], places, fewest + draw(st.integers(0, 2))


def by_hand(kept: list[bool], slots: list[int], places: int) -> tuple[list[int], list[Any]]:
    taken = [-1] * places
    for block, (stays, slot) in enumerate(zip(kept, slots, strict=True)):
        if stays and slot >= 0:
            taken[slot] = block
    leaving = [
        b for b, (stays, slot) in enumerate(zip(kept, slots, strict=True)) if stays and slot < 0
    ]
    copies = list(zip(leaving, (s for s in range(places) if taken[s] < 0), strict=False))
    for block, slot in copies:
        taken[slot] = block
    return taken, copies


def check(found: pairs.Pairs, told: Told) -> None:
    kept, slots, places, _ = told
    for row, marks in enumerate(kept.tolist()):
        its = slots if slots.ndim == 1 else slots[row]
        taken, copies = by_hand(marks, its.tolist(), places)
        count = int(found.counts[row])
        assert found.taken[row].tolist() == taken
        moves = zip(
            found.source[row, :count].tolist(), found.target[row, :count].tolist(), strict=True
        )
        assert list(moves) == copies


@SOME
@given(told=evictions())
def test_pairs(told: Told) -> None:
    check(pairs.reference(*told), told)
    check(pairs.pairs(*told), told)


@SOME
@given(told=evictions())
def test_a_row_of_all_rows_is_one_list(told: Told) -> None:
    """As uneven budgets need it: units go across heads and layers."""
    kept, slots, places, most = told
    offsets = torch.arange(len(kept))[:, None] * places
    spread = (slots + offsets).where(slots >= 0, -1).expand(kept.shape)
    one: Told = kept.reshape(1, -1), spread.reshape(1, -1), places * len(kept), most * len(kept)
    check(pairs.pairs(*one), one)


def test_a_row_that_keeps_too_much_writes_nothing_outside_its_own() -> None:
    kept = torch.ones(3, 8, dtype=torch.bool)
    slots = torch.tensor([-1, -1, -1, -1, -1, 0, -1, -1])
    for function in (pairs.pairs, pairs.reference):
        found = function(kept, slots, 4, 2)
        assert found.counts.tolist() == [2, 2, 2]
        assert found.source.tolist() == [[0, 1]] * 3
        assert found.target.tolist() == [[1, 2]] * 3
        assert found.taken.tolist() == [[5, 0, 1, -1]] * 3


def test_long_rows_have_the_same_pairs() -> None:
    random = torch.Generator().manual_seed(0)
    size = pairs.LONG + 5
    kept = torch.rand(1, size, generator=random) < 0.5
    places = int(kept.sum())
    slots = torch.arange(size) - (size - places)
    told: Told = (kept, slots.clamp(min=-1), places, places)
    check(pairs.pairs(*told), told)


def test_state_moves_with_blocks() -> None:
    told = torch.tensor([[True, False, True, True]]), torch.tensor([-1, 0, 1, 2]), 3, 1
    found = pairs.pairs(*told)
    state = torch.arange(8.0).view(1, 4, 2)
    assert found.taken.tolist() == [[0, 2, 3]]
    assert torch.equal(found.moved(state), state[:, [0, 2, 3]])
    assert torch.equal(found.moved(state[..., 0]), state[:, [0, 2, 3], 0])
