"""The batch over units: tables kept from the last step are never stale, rows come back in order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.unit_batch import UnevenBatch, UnitAttention, UnitTables, worth_folding
from nexus_vllm.engine.units import Holding, UnitSpace

LAYERS, HEADS, PAGES, BLOCK, WIDTH = 2, 3, 40, 4, 12


def space() -> UnitSpace:
    pool = torch.zeros(LAYERS, PAGES, HEADS, BLOCK, 6)
    return UnitSpace.of([pool[layer] for layer in range(LAYERS)])


class Batch:
    """Rows of a batch; `tables` sees each of its states and must agree with building anew."""

    def __init__(self, seed: int) -> None:
        self.space = space()
        self.tables = UnitTables(self.space)
        self.draw = np.random.default_rng(seed)
        self.rows: list[Sequence | None] = []
        self.table = torch.zeros(8, WIDTH, dtype=torch.int32)  # one buffer, as the runner has it
        self.lengths = np.zeros(8, dtype=np.int32)
        self.chunks = np.ones(8, dtype=np.int32)
        for kind in ("uneven", "even", "none", "uneven"):
            self.join(kind)

    def pages(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.draw.choice(np.arange(1, PAGES), count, replace=False)).int()

    def join(self, kind: str) -> None:
        row = len(self.rows)
        self.table[row] = self.pages(WIDTH)
        self.lengths[row] = 5 * BLOCK + 2
        self.chunks[row] = 1
        self.rows.append(None if kind == "none" else Sequence(slot=row))
        if kind == "even":
            self.rows[-1].released = 2
        if kind == "uneven":
            self.evict(row)

    def evict(self, row: int) -> None:
        """Deal out all units of the full blocks, whose order and shares are chance."""
        sequence = self.rows[row]
        full = int(self.lengths[row]) // BLOCK
        counts = torch.from_numpy(self.draw.integers(1, full + 1, (LAYERS, HEADS)))
        most = int(counts.max())
        units = torch.from_numpy(self.draw.integers(1, PAGES, (LAYERS, HEADS, most)))
        units[torch.arange(most) >= counts[..., None]] = -1
        sequence.released, sequence.dealt = 0, full
        sequence.holding = Holding(units, units, counts)

    def seen(self) -> UnevenBatch:
        count = len(self.rows)
        starts = np.cumsum([0, *self.chunks[:count]], dtype=np.int32)
        # The runner's arrays are longer than the batch, and overwritten in place afterwards.
        lengths, table = self.lengths.copy(), self.table.clone()
        known = self.tables.batch(self.rows, table, lengths, starts, BLOCK)
        fresh = UnevenBatch.of(self.space, list(self.rows), table, lengths, starts, BLOCK)
        for name in ("tables", "lengths", "lengths_cpu", "starts", "starts_cpu"):
            ours, expected = getattr(known, name), getattr(fresh, name)
            assert ours.dtype == torch.int32
            assert torch.equal(ours, expected), name
        assert torch.equal(known.lengths, known.lengths_cpu)
        self.check_by_hand(fresh, table, lengths)
        lengths += 1000
        table.zero_()
        return known

    def check_by_hand(self, batch: UnevenBatch, table: torch.Tensor, lengths: np.ndarray) -> None:
        """Unit by unit: what a head holds apart, then its own unit of each page of the tail."""
        shape = (LAYERS, HEADS, len(self.rows), -1)
        for place in np.ndindex(shape[:3]):
            layer, head, row = place
            sequence, length = self.rows[row], int(lengths[row])
            holding = None if sequence is None else sequence.holding
            first, line = 0 if sequence is None else sequence.released, []
            if holding is not None:
                count = int(holding.counts[layer, head])
                first, line = sequence.dealt, holding.units[layer, head, :count].tolist()
            tokens = len(line) * BLOCK + length - first * BLOCK
            for page in table[row, first : -(-length // BLOCK)].tolist():
                line.append(int(self.space.base[layer]) + page * HEADS + head)
            found = batch.tables.view(shape)[place].tolist()
            assert found == line + [0] * (len(found) - len(line))
            assert batch.lengths.view(shape)[place] == tokens

    def change(self, what: str, row: int) -> None:
        row %= len(self.rows)
        room = WIDTH * BLOCK - int(self.lengths[row])
        if what == "token":
            self.lengths[row] += min(room, 1)
        elif what == "every row a token" and self.lengths[: len(self.rows)].max() < WIDTH * BLOCK:
            self.lengths[: len(self.rows)] += 1
        elif what == "tail page":
            self.lengths[row] += min(room, BLOCK)
        elif what == "chunk":
            self.chunks[row] = self.draw.integers(1, 4)
        elif what == "eviction":
            if self.rows[row] is not None and self.lengths[row] >= BLOCK:
                self.evict(row)
        elif what == "even eviction":
            if self.rows[row] is not None and self.rows[row].holding is None:
                self.rows[row].released = min(4, self.rows[row].released + 1)
        elif what == "another page":  # a row overwritten, or a page of another sequence
            self.table[row] = self.pages(WIDTH)
        elif what == "order":
            order = np.roll(np.arange(len(self.rows)), 1)
            self.rows = [self.rows[i] for i in order]
            for array in (self.lengths, self.chunks):
                array[: len(order)] = array[order]
            self.table[: len(order)] = self.table[torch.from_numpy(order)]
        elif what == "restart":  # preempted: the same id and slot, computed from its first token
            self.rows[row] = Sequence(slot=row)
            self.lengths[row] = self.draw.integers(1, 3 * BLOCK)
        elif what == "leave" and len(self.rows) > 1:
            self.rows.pop()
        elif what == "join" and len(self.rows) < 8:
            self.join(["none", "even", "uneven"][row % 3])


CHANGES = (
    "token",
    "every row a token",
    "tail page",
    "chunk",
    "eviction",
    "even eviction",
    "another page",
    "order",
    "restart",
    "leave",
    "join",
)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 7), st.booleans()), max_size=40),
)
def test_kept_tables_equal_tables_built_anew(
    seed: int, changes: list[tuple[str, int, bool]]
) -> None:
    batch = Batch(seed)
    batch.seen()
    for what, row, look in changes:
        batch.change(what, row)
        if look:  # or this row was not in the batch for a while
            batch.seen()
    batch.seen()


@pytest.mark.parametrize("what", CHANGES)
def test_tables_are_kept_exactly_while_only_tokens_are_new(what: str) -> None:
    batch = Batch(7)
    before = batch.seen()
    batch.change(what, 1 if what == "even eviction" else 0)
    after = batch.seen()
    kept = what in ("token", "every row a token", "chunk")
    assert (after.tables is before.tables) == kept
    assert batch.seen().tables is after.tables


def test_an_eviction_that_changes_no_number_is_still_seen() -> None:
    """Counts, first block and pages as before: only the holding is another."""
    batch = Batch(3)
    before = batch.seen()
    old = batch.rows[0].holding
    units = torch.where(old.units >= 0, (old.units + 1) % PAGES, -1)
    batch.rows[0].holding = Holding(units, old.blocks, old.counts)
    assert not torch.equal(batch.seen().tables, before.tables)


def test_earlier_lengths_are_not_overwritten() -> None:
    """An asynchronous engine may still hold the last step's batch."""
    batch = Batch(5)
    before = batch.seen()
    lengths = before.lengths.clone()
    batch.change("every row a token", 0)
    assert torch.equal(batch.seen().lengths, lengths + 1)
    assert torch.equal(before.lengths, lengths)


@pytest.mark.parametrize("flat_output", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_queries_are_ordered_by_head_and_results_come_back(fold: bool, flat_output: bool) -> None:
    tokens, group, size = 5, 2, 4
    none = torch.empty(0)
    batch = UnevenBatch(none, HEADS, none, none, none, none, none)
    units = UnitAttention(batch, [], fold)
    width = HEADS * group * size
    packed = torch.randn(tokens + 2, 3 * width)  # queries, keys and values side by side, padded
    query = packed[:, :width].view(-1, HEADS * group, size)
    for _ in range(2):  # two layers share the buffers
        queries, results = units.queries(query, tokens)
        shape = (tokens * HEADS * group, 1, size) if fold else (HEADS * tokens, group, size)
        assert queries.shape == results.shape == shape
        assert queries.is_contiguous()
        assert results.is_contiguous()
        by_head = queries.view(HEADS, tokens, group, size)
        for head in range(HEADS):
            rows = query[:tokens, head * group : (head + 1) * group]
            assert torch.equal(by_head[head], rows)
        results.copy_(queries)
        output = torch.full((tokens + 2, HEADS * group, size), torch.nan)
        units.restore(output.flatten(1) if flat_output else output)
        assert torch.equal(output[:tokens], query[:tokens])
        assert output[tokens:].isnan().all()
        query = query + 1


def test_heads_are_folded_where_threads_stay_equally_busy() -> None:
    assert worth_folding(1, 1)
    assert not worth_folding(9, 2)
    assert worth_folding(24, 2)
    assert not worth_folding(24, 16)
