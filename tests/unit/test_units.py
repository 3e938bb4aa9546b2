"""Uneven budgets share whole pages: every unit has one owner, and packing moves the least."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nexus_vllm.engine.units import Holding, UnitSpace, packed_state

LAYERS, HEADS, PAGES, BLOCK, CONTENT = 3, 2, 12, 4, 6


def space() -> UnitSpace:
    pool = torch.zeros(LAYERS, PAGES, HEADS, BLOCK, CONTENT)
    return UnitSpace.of([pool[layer] for layer in range(LAYERS)])


def test_a_unit_is_a_pages_slice_for_one_layer_and_head() -> None:
    pool = torch.arange(LAYERS * PAGES * HEADS * BLOCK * CONTENT).float()
    pool = pool.view(LAYERS, PAGES, HEADS, BLOCK, CONTENT)
    all_units = UnitSpace.of([pool[layer] for layer in range(LAYERS)])
    pages = torch.tensor([7, 2])
    units = all_units.own(pages)
    assert units.shape == (LAYERS, HEADS, 2)
    for layer in range(LAYERS):
        for head in range(HEADS):
            for i, page in enumerate(pages.tolist()):
                unit = all_units.flat[units[layer, head, i], 0]
                assert torch.equal(unit, pool[layer, page, head])


@pytest.mark.parametrize(
    "caches",
    [
        [torch.zeros(4, 2, 4, 6), torch.zeros(4, 2, 4, 6)],
        [torch.zeros(4, 4, 2, 6).transpose(1, 2)],
    ],
    ids=["two allocations", "tokens before heads"],
)
def test_other_layouts_are_refused(caches: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="one allocation"):
        UnitSpace.of(caches)


@given(st.data())
def test_every_unit_has_one_owner_over_a_sequences_life(data: st.DataObject) -> None:
    """Grow, shrink to any uneven counts, again and again; contents follow their blocks."""
    all_units = space()
    free = list(range(1, PAGES))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def write(holding: Holding, fresh: torch.Tensor) -> None:
        for unit, block in zip(
            holding.units[fresh].tolist(), holding.blocks[fresh].tolist(), strict=True
        ):
            all_units.flat[unit] = float(block)

    def check(holding: Holding, pages: list[int]) -> None:
        room = all_units.own(torch.tensor(pages)).flatten()
        holding.check_integrity(room)
        for unit, block in zip(
            holding.units[holding.valid].tolist(),
            holding.blocks[holding.valid].tolist(),
            strict=True,
        ):
            # Block numbers are the same in every head: tell heads apart by what was written.
            assert all_units.flat[unit, 0, 0, 0] == float(block)

    pages = [free.pop() for _ in range(5)]
    holding = Holding.even(
        all_units, torch.tensor(pages), torch.arange(5).expand(LAYERS, -1).contiguous()
    )
    write(holding, holding.valid)
    check(holding, pages)
    seen = 5
    for _ in range(data.draw(st.integers(1, 4))):
        more = min(data.draw(st.integers(1, 3)), len(free))
        new = [free.pop() for _ in range(more)]
        before = holding.valid.clone()
        holding = holding.grown(all_units, torch.tensor(new), torch.arange(seen, seen + more))
        fresh = holding.valid.clone()
        fresh[..., : before.shape[-1]] &= ~before
        write(holding, fresh)
        seen, pages = seen + more, pages + new
        check(holding, pages)

        keep = data.draw(st.integers(1, len(pages) - 1))
        stay = [pages[i] for i in torch.randperm(len(pages), generator=generator)[:keep].tolist()]
        room = all_units.own(torch.tensor(stay)).flatten()
        scores = torch.rand(holding.units.shape, generator=generator)
        scores[~holding.valid] = -1
        kept = torch.zeros(scores.numel(), dtype=torch.bool)
        kept[scores.flatten().topk(len(room)).indices] = True
        kept = kept.view(scores.shape)
        inside = torch.isin(holding.units, room) & kept
        holding, copies = holding.packed(all_units, kept, kept.sum(-1), room)
        source, target = copies.source, copies.target
        moved = int(kept.sum() - inside.sum())
        assert len(source) == copies.count == moved, "a block that could stay has moved"
        assert not set(source.tolist()) & set(target.tolist())
        all_units.copy(copies)
        free += [page for page in pages if page not in stay]
        pages = stay
        check(holding, pages)


def test_more_blocks_than_units_is_refused() -> None:
    all_units = space()
    holding = Holding.even(all_units, torch.tensor([1, 2]), torch.arange(2).expand(LAYERS, -1))
    with pytest.raises(ValueError, match="to keep in"):
        holding.packed(
            all_units, holding.valid, holding.counts, all_units.own(torch.tensor([1])).flatten()
        )


@given(st.data())
def test_packing_is_what_lists_would_give(data: st.DataObject) -> None:
    """The i-th block that must leave goes to the i-th unit left over, and rows keep their order."""
    all_units, seed = space(), data.draw(st.integers(0, 2**31))
    random = torch.Generator().manual_seed(seed)
    count = data.draw(st.integers(1, 6))
    pages = torch.randperm(PAGES, generator=random)[:count]
    holding = Holding.even(all_units, pages, torch.arange(count).expand(LAYERS, -1))
    for _ in range(2):  # the second time rows are ragged, and units anywhere
        kept = holding.valid & (torch.rand(holding.units.shape, generator=random) < 0.6)
        kept[0, 0, 0] |= not bool(kept.any())
        total = int(kept.sum())
        room = all_units.own(torch.randperm(PAGES, generator=random)).flatten()
        room = room[torch.randperm(len(room), generator=random)][:total]

        inside = set(room.tolist())
        chosen = [
            [unit for unit, stays in zip(row, marks, strict=True) if stays]
            for row, marks in zip(
                holding.units.flatten(0, 1).tolist(), kept.flatten(0, 1).tolist(), strict=True
            )
        ]
        staying = {unit for row in chosen for unit in row if unit in inside}
        leaving = [unit for row in chosen for unit in row if unit not in inside]
        left = [unit for unit in room.tolist() if unit not in staying]
        moved = dict(zip(leaving, left, strict=True))
        blocks = [
            [block for block, stays in zip(row, marks, strict=True) if stays]
            for row, marks in zip(
                holding.blocks.flatten(0, 1).tolist(), kept.flatten(0, 1).tolist(), strict=True
            )
        ]
        state = torch.rand(*kept.shape, 2, generator=random)
        values = [
            row[marks].tolist()
            for row, marks in zip(state.flatten(0, 1), kept.flatten(0, 1), strict=True)
        ]

        packed, copies = holding.packed(all_units, kept, kept.sum(-1), room)
        packed.check_integrity(room)
        most = packed.units.shape[-1]
        assert most == max(map(len, chosen))
        assert copies.source.tolist() == leaving
        assert copies.target.tolist() == left
        expected = [[moved.get(unit, unit) for unit in row] for row in chosen]
        for row, found in zip(expected, packed.units.flatten(0, 1).tolist(), strict=True):
            assert found == row + [-1] * (most - len(row))
        for row, found in zip(blocks, packed.blocks.flatten(0, 1).tolist(), strict=True):
            assert found == row + [-1] * (most - len(row))
        carried = packed_state(state, kept, most).flatten(0, 1)
        for row, found in zip(values, carried, strict=True):
            assert found[: len(row)].tolist() == row
            assert found[len(row) :].isnan().all()
        holding = packed
