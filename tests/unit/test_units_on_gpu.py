"""Uneven budgets on a GPU that is not there: no mixed devices, and nothing that waits for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from triton.runtime.jit import JITFunction

from nexus_vllm import allocators, policies
from nexus_vllm.allocators import Situation
from nexus_vllm.config import Settings
from nexus_vllm.engine import ops
from nexus_vllm.engine.ops import sent
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.unit_batch import UnevenBatch, UnitAttention, UnitTables
from nexus_vllm.engine.units import Holding, UnitSpace, packed_state
from nexus_vllm.plan import Eviction

from .counting_host import CountingHost
from .fake_gpu import GPU, CopiedToHost
from .test_allocators import random_profile
from .test_fake_gpu import evictions, layers

LAYERS, HEADS, PAGES, BLOCK, CONTENT = 3, 2, 30, 32, 8
NOTICED = (DataDependentOutputException, DynamicOutputShapeException, CopiedToHost)
HOST_COUNTS = ("per-head", "pyramid", "lu")


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no contents cannot be given to a kernel."""
    monkeypatch.setenv(ops.ENVIRONMENT, "torch")
    monkeypatch.setattr(ops, "number", lambda count: count)  # for when the step is over


def space() -> UnitSpace:
    units = LAYERS * PAGES * HEADS
    flat = torch.zeros(units, 1, BLOCK, CONTENT, device=GPU)
    return UnitSpace(flat, sent([0, 60, 120], GPU), HEADS)


def allocator(name: str) -> allocators.Allocator:
    return allocators.make(name, random_profile(LAYERS, HEADS, torch.Generator().manual_seed(0)))


def eviction(released: int, pages: list[int], kept: list[int]) -> Eviction:
    full = released + len(pages)
    return Eviction(
        request_id="a", policy="nexus", allocator="lu", seed=7, event=1, computed=full * BLOCK + 3,
        released=released, target=full - len(kept), pages=pages, kept_pages=kept, tail_pages=[29],
    )  # fmt: skip


class Scored(UnevenEvictor):
    """Weights and state come from elsewhere: how they are found is not the matter here."""

    def __init__(self) -> None:
        self.layers, self.settings = [None] * LAYERS, Settings()
        self.space, self.heads = space(), HEADS
        self.rows = sent(torch.arange(LAYERS * HEADS).view(LAYERS, HEADS), GPU)

    def _score(self, *told: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape = told[5].shape
        return (
            torch.rand(shape, device=GPU),
            torch.rand(LAYERS, device=GPU),
            torch.rand(*shape, 2, device=GPU),
        )


class Failing(allocators.Allocator):
    name = "failing"

    def counts(self, situation: Situation) -> Tensor:
        raise ValueError("no counts")


def evicted(name: str) -> Sequence:
    """After two evictions; in between it has grown."""
    sequence, evictor = Sequence(slot=0), Scored()
    policy = policies.served("nexus", Settings())
    pages = list(range(1, 13))
    first = eviction(0, pages, pages[:8])
    moved, kept = evictor.evict(sequence, first, policy, allocator(name))
    assert isinstance(moved, Tensor)
    assert moved.device == GPU
    assert kept.device == GPU
    pages = [*pages[:8], 20, 21, 22]
    second = eviction(4, pages, [*pages[3:10], 25])
    evictor.evict(sequence, second, policy, allocator(name))
    return sequence


@pytest.mark.parametrize("name", HOST_COUNTS)
def test_an_eviction_waits_for_nothing(name: str) -> None:
    with CountingHost():
        sequence = evicted(name)
        assert sequence.holding is not None
        assert sequence.holding.counts.device.type == "cpu"
        assert int(sequence.holding.counts.sum()) == 8 * LAYERS * HEADS
        assert sequence.holding.units.shape[-1] == int(sequence.holding.counts.max())
        assert sequence.state.shape == (*sequence.holding.units.shape, 2)


@pytest.mark.parametrize("name", ["ada", "cake", "global"])
def test_weights_cost_one_copy_to_the_host_an_eviction(name: str) -> None:
    """Of a number for each head, or for each layer."""
    if name == "cake":
        answers = [torch.rand(LAYERS) for _ in range(2)]
    else:  # on top of the forced blocks of each head
        forced = Settings().sink_blocks + Settings().recency_blocks
        each = torch.tensor([2, -2, 1, -1, 0, 0])
        answers = [(each + 8 - forced).clone() for _ in range(2)]
    mode = CountingHost(*answers)
    with mode:
        evicted(name)
    assert not mode.answers


@pytest.mark.parametrize("name", ["ada", "cake", "global"])
def test_that_copy_is_noticed(name: str) -> None:
    """Where nothing may be read."""
    with CountingHost(), pytest.raises(CopiedToHost):
        evicted(name)


def whole_eviction(
    monkeypatch: pytest.MonkeyPatch, implementation: str, policy: str, name: str
) -> Sequence:
    """Two in a row, and a step's tables after them; what kernels are told is not looked at."""
    monkeypatch.setenv(ops.ENVIRONMENT, implementation)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    settings = Settings(policy=policy)
    evictor = UnevenEvictor(layers(settings), settings)
    served = policies.served(policy, settings)
    sequence = Sequence(0, replay=torch.empty(LAYERS, HEADS, 22, device=GPU))
    for step in evictions(policy, name):
        evictor.evict(sequence, step, served, allocator(name))
    lengths, starts = np.array([29 * BLOCK]), np.array([0, 1])
    table = torch.zeros(1, 40, dtype=torch.int32, device=GPU)
    batch = UnitTables(evictor.space).batch([sequence], table, lengths, starts, BLOCK)
    assert batch.tables.device == GPU
    return sequence


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_scores_of_uneven_holdings_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch, implementation: str, policy: str
) -> None:
    with CountingHost():
        sequence = whole_eviction(monkeypatch, implementation, policy, "lu")
        assert sequence.holding.units.device == GPU


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_maps_of_layers_cost_one_copy_an_eviction(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    answers = [torch.rand(LAYERS, dtype=torch.float64) for _ in range(2)]
    with CountingHost(*answers) as mode:
        whole_eviction(monkeypatch, implementation, "keydiff", "cake")
    assert not mode.answers


def test_what_stays_after_an_error_is_counted_once() -> None:
    """Nobody has chosen the counts, so the host reads them."""
    told: list[Exception] = []
    with CountingHost(torch.full((LAYERS, HEADS), 8)) as mode:
        sequence, evictor, pages = Sequence(slot=0), Scored(), list(range(1, 13))
        failing = Failing()
        policy = policies.served("nexus", Settings())
        evictor.evict(sequence, eviction(0, pages, pages[:8]), policy, failing, told.append)
    assert [str(error) for error in told] == ["no counts"]
    assert not mode.answers
    assert sequence.holding is not None
    assert sequence.state is None


def test_what_waits_or_mixes_devices_is_noticed() -> None:
    with CountingHost():
        numbers = torch.ones(3, dtype=torch.long, device=GPU)
        reads: list[Callable[[], Any]] = [
            *(lambda: int(numbers.max()), numbers.tolist, numbers.nonzero, numbers.cpu),
            *(lambda: numbers[numbers > 0], numbers.bincount, lambda: torch.ones(3).copy_(numbers)),
        ]
        for read in reads:
            with pytest.raises(NOTICED):
                read()
        for mixes in (lambda: numbers[torch.arange(2)], lambda: numbers + torch.ones(3)):
            with pytest.raises(AssertionError, match="on the CPU"):
                mixes()


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_s_tables_wait_for_nothing(exact: bool) -> None:
    with CountingHost():
        sequence = evicted("lu")
        holding = sequence.holding
        rows = [sequence, None, Sequence(slot=1, released=2)]
        tables = UnitTables(space())
        for step in range(2):
            lengths = np.array([16 * BLOCK + step, 40, 5 * BLOCK, 0], dtype=np.int32)
            starts = np.array([0, 1, 2, 3, 3], dtype=np.int32)
            table = torch.zeros(4, 20, dtype=torch.int32, device=GPU)
            told = torch.zeros(4, dtype=torch.int32, device=GPU) if exact else None
            batch = tables.batch(rows, table, lengths, starts, BLOCK, told)
            width = max(int(holding.counts.max()) + 16 + (step > 0) - sequence.dealt, 3)
            whole = -(-width // 16) * 16
            assert batch.tables.shape == (LAYERS, HEADS * 3, whole)
            assert batch.tables.device == batch.lengths.device == batch.starts.device == GPU
            assert batch.starts_cpu.tolist() == [0, 1, 2, 3, 4, 5, 6]
            expected = torch.stack(
                [
                    holding.counts * BLOCK + 16 * BLOCK + step - sequence.dealt * BLOCK,
                    torch.full_like(holding.counts, 40),
                    torch.full_like(holding.counts, 3 * BLOCK),
                ],
                -1,
            )
            assert torch.equal(batch.lengths_cpu, expected.flatten(1, 2).int())


def test_queries_and_results_stay_on_the_gpu() -> None:
    with CountingHost():
        flat = space().flat
        units = UnitAttention(UnevenBatch(flat, HEADS, *[flat] * 5), [], fold=False)
        query = torch.zeros(7, HEADS * 4, 16, device=GPU)
        queries, results = units.queries(query, 5)
        assert queries.shape == results.shape == (HEADS * 5, 4, 16)
        assert queries.device == results.device == GPU
        units.restore(torch.zeros(7, HEADS * 4 * 16, device=GPU))


def test_packing_and_growing_by_themselves() -> None:
    with CountingHost():
        here = space()
        blocks = torch.arange(6, device=GPU)
        holding = Holding.even(here, sent([4, 5, 6, 7, 8, 9], GPU), blocks.expand(LAYERS, -1))
        room = here.own(sent([4, 5, 20, 21], GPU)).flatten()
        kept = torch.zeros(holding.units.shape, dtype=torch.bool, device=GPU)
        counts = torch.tensor([[6, 2], [4, 4], [5, 3]])
        packed, copies = holding.packed(here, kept, counts, room, moves=4 * LAYERS * HEADS)
        here.copy(copies)
        assert packed.units.shape == packed.blocks.shape == (LAYERS, HEADS, 6)
        assert len(copies.source) == len(copies.target) == 24
        grown = packed.grown(here, sent([22, 23], GPU), torch.arange(6, 8, device=GPU))
        assert grown.counts.tolist() == (counts + 2).tolist()
        state = torch.zeros(*kept.shape, 3, device=GPU)
        assert packed_state(state, kept, 6).shape == (LAYERS, HEADS, 6, 3)


def test_a_situation_is_checked_where_that_costs_nothing() -> None:
    """Contents on the GPU are not; shapes and what the host knows are."""
    with CountingHost():
        held = torch.full((LAYERS, HEADS), 5)
        weights = torch.zeros(LAYERS, HEADS, 5, device=GPU)
        told: dict[str, Any] = {
            **{"seen": 5, "capacity": held, "floor": held - 4, "weights": weights},
            **{"candidates": weights > 0, "block_ids": weights.long()},
        }
        Situation(budget=3, **told)
        with pytest.raises(ValueError, match="nothing to evict"):
            Situation(budget=6, **told)
        with pytest.raises(ValueError, match="must be"):
            Situation(budget=3, **{**told, "weights": weights[:2]})
