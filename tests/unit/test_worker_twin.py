"""The worker's whole step beside a twin in plain Python that knows what every token wrote.

test_worker_events checks which blocks an eviction chooses. Here the real worker carries out plans,
and the real builder and implementation of attention run over them, around a stand-in that reads
what it is shown. The twin keeps dictionaries: what each unit of memory holds, and where each
(layer, KV head) of each sequence has its blocks. After every step it compares all memory, the
worker's table, the recorded queries, and every key, value and query that attention would see.

Hypothesis draws the events. NEXUS_TWIN_EVENTS (default 3,000; fewer may not meet every case, which
fails) and NEXUS_TWIN_SEED (default 0) choose the run. A failure prints the events that lead to it.
"""

import os
import random
import struct
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.attention.backend import CommonAttentionMetadata

from nexus_vllm import allocators
from nexus_vllm.config import Settings
from nexus_vllm.engine import attention
from nexus_vllm.engine.attention import EvictionBuilderMixin, EvictionImplMixin
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.replay_scores import ReplayScores
from nexus_vllm.engine.sequences import Sequences
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.unit_batch import UnitTables
from nexus_vllm.engine.window import LayerWindow, ring_rows
from nexus_vllm.engine.worker import EvictionWorker
from nexus_vllm.plan import Eviction, StepPlan
from nexus_vllm.policies import Rope
from nexus_vllm.policies.random_blocks import RandomBlocks
from nexus_vllm.profile import ModelFacts, Profile

EVENTS = int(os.environ.get("NEXUS_TWIN_EVENTS", "3000"))
SEED = int(os.environ.get("NEXUS_TWIN_SEED", "0"))
EVENTS_PER_WORLD = 40
WORLDS_PER_ROUND = 10
"""Hypothesis remembers what it has drawn: rounds let it forget."""
BLOCK, LAYERS, HEADS, GROUP, SIZE, PAGES, SLOTS = 32, 3, 2, 2, 3, 40, 4
QUERY_HEADS = HEADS * GROUP
LONGEST = 20 * BLOCK
CPU = torch.device("cpu")
ROPE = Rope(torch.ones(4096, SIZE // 2), torch.zeros(4096, SIZE // 2))
FACT, UNIT = 2 * SIZE * 4, BLOCK * 2 * SIZE * 4
"""Bytes."""
PAIRS = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
BROKEN = "broken"
PROFILE = Profile(
    ModelFacts("tiny", LAYERS, HEADS, SIZE),
    "nexus",
    {},
    BLOCK,
    (0.2, 0.6),
    torch.tensor([[[0.05, 0.35], [0.1, 0.3], [0, 0.4]], [[0.4, 0.8], [0.2, 1], [0.5, 0.7]]]),
)

# One for each way to look at a sequence; test_worker_events.py has them all.
LOOKING = (
    "nexus",
    "h2o",
    "keydiff",
    "vase",
    "expected-attention",
    "streaming-llm",
    "random",
    BROKEN,
)
EXPECTED = {
    *(f"policy {name}" for name in LOOKING),
    *(f"allocator {name}" for name in allocators.names()),
    *(f"pages {how}" for how in ("in place", "fresh", "mixed")),
    "evicted again",
    "several evictions at once",
    "eviction withdrawn",
    "page taken in the step that gave it back",
    "finished",
    "preempted",
    "restart unannounced",
    "tokens taken back",
    "not evictable",
    "slot reused",
    "batch as it is",
    "batch shifted",
    "batch over units",
    "batch over units, tables reused",
    "batch over units, folded",
    "batch padded",
    "unit lent to another layer",
    "unit lent to another head",
}

Place = tuple[int, int, int]
"""Of a block: layer, KV head, block number."""


def key_and_value(token: int, position: int, layer: int, head: int) -> bytes:
    """What a token writes: its key, then its value."""
    pair = layer * HEADS + head
    return struct.pack("6f", token, position, pair, -token - 1, -position - 1, -pair - 1)


def query_of(token: int, position: int, layer: int, head: int) -> bytes:
    return struct.pack("3f", token, position, layer * QUERY_HEADS + head)


def tensor(facts: bytes, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(facts), dtype=torch.float32).view(shape)


@dataclass
class Life:
    """One sequence as it must be: `tokens` by position, full blocks by place and by content."""

    request_id: str
    evictable: bool
    policy: str
    allocator: str
    tokens: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    released: int = 0
    settled: int = 0
    furthest: int = 0
    events: int = 0
    places: dict[Place, int] = field(default_factory=dict)
    contents: dict[Place, bytes] = field(default_factory=dict)

    @property
    def full(self) -> int:
        return len(self.tokens) // BLOCK

    def fill_up(self, place: Place, unit: int) -> None:
        """A block has got its last token."""
        layer, head, block = place
        positions = range(block * BLOCK, (block + 1) * BLOCK)
        facts = b"".join(key_and_value(self.tokens[p], p, layer, head) for p in positions)
        self.contents[place], self.places[place] = facts, unit

    def live(self, layer: int, head: int) -> set[int]:
        return {block for of, at, block in self.places if (of, at) == (layer, head)}


class Rows:
    """The model runner: page rows of requests, and whose the batch's rows are."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.batch: list[str] = []

    def row(self, request_id: str) -> list[int]:
        return self.rows[request_id]

    def overwrite_row(self, request_id: str, row: list[int]) -> None:
        self.rows[request_id] = list(row)

    def commit_rows(self, now: bool) -> None:
        pass

    def batch_request_ids(self, batch: Any) -> list[str]:
        return self.batch


class Builder:
    """The wrapped backend's: hands on what it is shown."""

    num_heads, num_kv_heads = QUERY_HEADS, HEADS

    def build(self, prefix: int, common: Any, fast: bool = False) -> Any:
        return SimpleNamespace(
            common=common,
            shape=(self.num_heads, self.num_kv_heads),
            num_actual_tokens=common.num_actual_tokens,
        )


class Impl:
    """The wrapped backend's: notes all that attention would read, and answers with the queries."""

    def __init__(self) -> None:
        self.read: list[tuple[bytes, list[bytes]]] = []

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any
    ) -> Any:
        common = metadata.common
        assert (query.shape[1], cache.shape[1]) == metadata.shape
        assert common.seq_lens.equal(common.seq_lens_cpu_upper_bound)
        assert common.max_seq_len == common.seq_lens.max()
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        assert query.shape[0] == starts[-1] == common.num_actual_tokens
        self.read = []
        for index in range(common.num_reqs):
            length = lengths[index]
            pages = common.block_table_tensor[index, : -(-length // BLOCK)].long()
            heads = cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
            queries = query[starts[index] : starts[index + 1]].numpy().tobytes()
            self.read.append((queries, [head.numpy().tobytes() for head in heads]))
        output.copy_(query)
        return output


class EvictionBuilder(EvictionBuilderMixin, Builder):
    pass


class EvictionImpl(EvictionImplMixin, Impl):
    pass


class Failing(RandomBlocks):
    """A policy that raises."""

    selector = None

    def weights(self, obs: Any) -> Any:
        raise ZeroDivisionError("no blocks to score")


KIND = st.tuples(
    st.sampled_from(LOOKING),
    st.sampled_from(["uniform", "uniform", *allocators.names()]),
)
"""Policy and allocator."""


class Twin(RuleBasedStateMachine):
    """Worker and twin, and what may happen to both. A rule plans; `prefill` and `decode` step."""

    seen: ClassVar[Counter[str]] = Counter()
    leading: ClassVar[str] = BROKEN
    """The policy of the first sequence in each world of a round."""

    @initialize(
        window=st.sampled_from([1, 8, 40]),
        depth=st.integers(1, 3),
        sink=st.integers(0, 2),
        recency=st.integers(1, 2),
        selector=st.sampled_from(["topk", "reservoir", "gumbel"]),
        order=st.permutations(range(LAYERS)),
        gaps=st.lists(st.integers(0, 2), min_size=LAYERS, max_size=LAYERS),
        first=st.lists(KIND, max_size=2),
        dealt=st.sampled_from(["uniform", *allocators.names()]),
    )
    def begin(
        self,
        window: int,
        depth: int,
        sink: int,
        recency: int,
        selector: Any,
        order: list[int],
        gaps: list[int],
        first: list[tuple[str, str]],
        dealt: str,
    ) -> None:
        self.settings = Settings(
            window=window,
            sink_blocks=sink,
            recency_blocks=recency,
            selector=selector,
            check_integrity=True,
            trace=True,
        )
        self.depth, self.ring_rows = depth, ring_rows(window, depth, 0)
        self.start, end = {}, 0
        for layer, gap in zip(order, gaps, strict=True):
            self.start[layer] = end = end + gap
            end += PAGES * HEADS
        self.storage = torch.full((end, BLOCK, 2 * SIZE), -0.5)
        self.memory = {unit: bytearray(held) for unit, held in self.stored().items()}
        self.connect()
        self.free = list(range(1, PAGES))
        self.lives: dict[str, Life] = {}
        self.plan, self.born, self.token = StepPlan(), 0, 0
        self.slots: set[int] = set()
        self.given_back: set[int] = set()
        for policy, allocator in ((self.leading, dealt), *first):
            self.start_one((policy, allocator), True)
        self.step([256, 200, 100], 0, 0, fold=False)

    def connect(self) -> None:
        """The worker and attention, as start-up leaves them."""
        order = torch.arange(BLOCK)[:, None] * 2 * SIZE + torch.arange(SIZE)
        keys, values = UnitLayout.of(order), UnitLayout.of(order + SIZE)
        layers = []
        for layer in range(LAYERS):
            first = self.start[layer]
            cache = self.storage[first : first + PAGES * HEADS]
            window = LayerWindow(SLOTS, self.ring_rows, QUERY_HEADS, SIZE, torch.float32, CPU)
            cache = cache.view(PAGES, HEADS, BLOCK, 2 * SIZE)
            layers.append(Layer(layer, cache, keys, 1e-6, SIZE, window, values, ROPE))
        self.layers, self.runner = layers, Rows()
        self.worker = worker = EvictionWorker.__new__(EvictionWorker)
        worker.eviction, worker.runner = self.settings, self.runner  # type: ignore[assignment]
        worker.reports = SimpleNamespace(alone=True, gather=lambda report: report)  # type: ignore[assignment]
        worker.sequences = Sequences(self.runner, SLOTS, self.ring_rows, BLOCK, CPU)  # type: ignore[arg-type]
        worker.evictor = Evictor(layers, self.settings)
        worker.evictor.policies[BROKEN] = Failing()  # type: ignore[assignment]
        worker.uneven = UnevenEvictor(layers, self.settings)
        worker.replays = ReplayScores(self.runner, layers, BLOCK)  # type: ignore[arg-type]
        worker.allocators = {name: allocators.make(name, PROFILE) for name in allocators.names()}
        worker._report, worker._failed, worker._trace = None, set(), {}
        self.builder = EvictionBuilder()
        self.builder.sequences = worker.sequences
        self.builder.tables = UnitTables(worker.uneven.space)
        self.impls = [EvictionImpl() for _ in layers]
        for row, impl in enumerate(self.impls):
            impl.window, impl.row = layers[row].window, row

    def stored(self) -> dict[int, bytes]:
        """What each unit really holds."""
        raw = self.storage.numpy().tobytes()
        return {at // UNIT: raw[at : at + UNIT] for at in range(0, len(raw), UNIT)}

    def unit(self, layer: int, page: int, head: int) -> int:
        """Which part of the memory is a layer's and head's slice of a page."""
        return self.start[layer] + page * HEADS + head

    # What the scheduler does

    @precondition(lambda self: len(self.lives) < SLOTS)
    @rule(
        kind=KIND,
        evictable=st.sampled_from([True, True, True, False]),
    )
    def start_one(self, kind: tuple[str, str], evictable: bool) -> None:
        self.born += 1
        self.enter(Life(f"r{self.born}", evictable, *kind))
        self.seen["not evictable"] += not evictable

    def enter(self, life: Life) -> None:
        self.lives[life.request_id] = life
        if life.evictable:
            self.plan.started.append(life.request_id)

    @precondition(lambda self: self.lives)
    @rule(
        which=st.integers(0, 99),
        how=st.sampled_from(["finished", "preempted", "restart unannounced"]),
    )
    def stop_one(self, which: int, how: str) -> None:
        """It finishes, or starts over; of a start over, the worker may hear no more than that."""
        life = self.chosen(which)
        name, plan = life.request_id, self.plan
        del self.lives[name]
        self.give_back(life.row[life.released :])
        withdrawn = [e for e in plan.evictions if e.request_id == name]
        self.seen["eviction withdrawn"] += len(withdrawn)
        plan.evictions = [e for e in plan.evictions if e not in withdrawn]
        if name in plan.started:
            plan.started.remove(name)
        known = name in self.worker.sequences.by_id
        if known and how != "restart unannounced":
            plan.stopped.append(name)
        self.runner.rows.pop(name, None)
        if how != "finished":
            self.enter(Life(name, life.evictable, life.policy, life.allocator))
        self.seen[how] += known

    @precondition(lambda self: self.can_shrink())
    @rule(
        which=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=3),
        keep=st.integers(0, 9),
        fresh=st.sampled_from([0, 1, 3, 99]),
        mix=st.integers(0, 999),
    )
    def evict(self, which: list[int], keep: int, fresh: int, mix: int) -> None:
        for index in which:
            if lives := self.can_shrink():
                self.shrink(lives[index % len(lives)], keep, fresh, mix)

    def shrink(self, life: Life, keep: int, fresh: int, mix: int) -> None:
        """Some of its pages stay, the newest or any in any order, and fresh ones may come in."""
        draw = random.Random(mix)
        pages, least = life.row[life.released : life.full], self.least
        budget = least + keep % (len(pages) - least)
        fresh = min(fresh, budget, len(self.free))
        staying = pages[len(pages) - budget + fresh :]
        if mix % 2:
            staying = draw.sample(pages, budget - fresh)
        kept = staying + self.take(fresh)
        if mix % 2:
            draw.shuffle(kept)
        self.plan.evictions.append(
            Eviction(
                request_id=life.request_id,
                policy=life.policy,
                allocator=life.allocator,
                seed=mix,
                event=life.events,
                computed=len(life.tokens),
                released=life.released,
                target=life.full - budget,
                pages=pages,
                kept_pages=kept,
                tail_pages=life.row[life.full :],
            )
        )
        self.give_back([page for page in pages if page not in kept])
        self.seen["evicted again"] += life.released > 0
        how = "mixed" if fresh and staying else "fresh" if fresh else "in place"
        self.seen[f"pages {how}"] += 1
        life.released, life.row = life.full - budget, self.plan.evictions[-1].row
        life.settled, life.events = len(life.tokens), life.events + 1

    @property
    def least(self) -> int:
        return self.settings.sink_blocks + self.settings.recency_blocks

    def can_shrink(self) -> list[Life]:
        """Whoever has more than it must keep, and is not shrunk in this step already."""
        due = {eviction.request_id for eviction in self.plan.evictions}
        return [
            life
            for life in self.lives.values()
            if life.evictable and life.request_id not in due
            if life.full - life.released > self.least
        ]

    @precondition(lambda self: self.depth > 1 and self.lives)
    @rule(which=st.integers(0, 99), count=st.integers(1, 2))
    def take_back(self, which: int, count: int) -> None:
        """The newest tokens were not to be, as when a turn ends with steps in flight."""
        life = self.chosen(which)
        least = max(life.settled, life.furthest - (self.depth - 1))
        end = max(least, len(life.tokens) - count)
        self.seen["tokens taken back"] += end < len(life.tokens)
        del life.tokens[end:]
        life.places = {p: unit for p, unit in life.places.items() if p[2] < life.full}

    def chosen(self, which: int) -> Life:
        return list(self.lives.values())[which % len(self.lives)]

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        self.seen["page taken in the step that gave it back"] += bool(self.given_back & {*taken})
        return taken

    def give_back(self, pages: list[int]) -> None:
        self.free += pages
        self.given_back |= {*pages}

    # Steps

    @rule(
        counts=st.lists(st.sampled_from([0, 1, 31, 32, 100, 256]), min_size=SLOTS, max_size=SLOTS),
        mix=st.integers(0, 999),
        padding=st.integers(0, 2),
    )
    def prefill(self, counts: list[int], mix: int, padding: int) -> None:
        self.step(counts, mix, padding, fold=False)

    @rule(
        steps=st.integers(1, 3),
        shrink=st.booleans(),
        out=st.sampled_from([None, None, 0, 1]),
        mix=st.integers(0, 999),
        padding=st.integers(0, 1),
        fold=st.booleans(),
    )
    def decode(
        self, steps: int, shrink: bool, out: int | None, mix: int, padding: int, fold: bool
    ) -> None:
        """Some steps of one token each, perhaps without one of the sequences; some shrink twice."""
        for _ in range(steps):
            if shrink:
                self.evict([0, 1], keep=mix, fresh=0, mix=mix)
            self.step([int(index != out) for index in range(SLOTS)], mix, padding, fold)

    def step(self, counts: list[int], mix: int, padding: int, fold: bool) -> None:
        self.carry_out()
        batch = []
        for life, count in zip(self.lives.values(), counts, strict=False):
            begin = len(life.tokens)
            missing = -(-min(begin + count, LONGEST) // BLOCK) - len(life.row)
            life.row += self.take(max(0, min(missing, len(self.free))))
            end = min(begin + count, LONGEST, len(life.row) * BLOCK)
            self.runner.rows[life.request_id] = list(life.row)
            if end > begin:
                self.write(life, end)
                batch.append((life, begin))
        self.given_back.clear()
        if not mix % 4:
            random.Random(mix).shuffle(batch)
        if batch:
            self.attend(batch, padding, fold)
        self.check()

    def write(self, life: Life, end: int) -> None:
        """As vLLM does: every token goes to row[position // 32]."""
        begin = len(life.tokens)
        self.token += 1
        life.tokens += [self.token] * (end - begin)
        life.furthest = max(life.furthest, end)
        for layer, head in PAIRS:
            for block in range(begin // BLOCK, -(-end // BLOCK)):
                assert life.row[block] != 0
                unit = self.unit(layer, life.row[block], head)
                first, last = max(begin, block * BLOCK), min(end, (block + 1) * BLOCK)
                facts = b"".join(
                    key_and_value(self.token, p, layer, head) for p in range(first, last)
                )
                first, last = first - block * BLOCK, last - block * BLOCK
                self.memory[unit][first * FACT : last * FACT] = facts
                self.storage[unit, first:last] = tensor(facts, -1, 2 * SIZE)
                if block < life.full:
                    life.fill_up((layer, head, block), unit)

    def carry_out(self) -> None:
        """The worker follows the plan; what it then did must be what it was told."""
        plan, self.plan = self.plan, StepPlan()
        self.worker._carry_out(plan)
        report = self.worker._report
        for eviction in plan.evictions:
            self.follow(self.lives[eviction.request_id], eviction)
        if plan.evictions:
            assert report is not None
            broken = {e.request_id for e in plan.evictions if e.policy == BROKEN}
            assert report.failed.keys() == broken
        self.seen["several evictions at once"] += len(plan.evictions) > 1
        slots = {self.worker.sequences.by_id[name].slot for name in plan.started}
        self.seen["slot reused"] += bool(slots & self.slots)
        self.slots |= slots

    def follow(self, life: Life, eviction: Eviction) -> None:
        """Find every block that stays where it now lies, by what it holds."""
        budget, full = len(eviction.kept_pages), eviction.full
        even = eviction.allocator == "uniform"
        room = {
            self.unit(layer, page, head): (layer, head)
            for layer, head in PAIRS
            for page in eviction.kept_pages
        }
        places: dict[Place, int] = {}
        for unit, (layer, head) in room.items():
            held = self.storage[unit].numpy().tobytes()
            _, position, pair, *_ = map(int, struct.unpack_from("6f", held))
            of, at = divmod(pair, HEADS)
            place = of, at, position // BLOCK
            assert place in life.places, f"unit {unit} holds what the sequence did not: {place}"
            assert place not in places, f"{place} is held twice"
            assert held == life.contents[place], f"unit {unit}: not what block {place} holds"
            if even:
                assert (of, at) == (layer, head), "an even budget, but in another's unit"
            self.seen["unit lent to another layer"] += of != layer
            self.seen["unit lent to another head"] += of == layer and at != head
            places[place] = unit
            self.memory[unit] = bytearray(held)
        stayed = [p for p, unit in places.items() if life.places[p] == unit]
        could = [p for p in places if life.places[p] in room]
        assert stayed == could, "a block moved that could stay"
        moved = (len(places) - len(stayed)) // (HEADS if even else 1)
        assert self.worker._report is not None
        assert self.worker._report.moved[life.request_id] == moved
        told = self.worker._trace[life.request_id][-1]["kept"]
        settings, live = self.settings, life.places
        life.places = places
        for layer, head in PAIRS:
            of = life.live(layer, head)
            held_before = {b for on, at, b in live if (on, at) == (layer, head)}
            forced = {b for b in held_before if b < settings.sink_blocks}
            forced |= {b for b in held_before if b >= full - settings.recency_blocks}
            assert forced <= of, "a sink or one of the newest blocks is gone"
            listed = told[layer] if even else [b for b in told[layer][head] if b >= 0]
            assert sorted(listed) == sorted(of), "other blocks stay than it says"
            if even and eviction.policy in ("streaming-llm", BROKEN):
                newest = sorted(held_before - forced)[len(forced) - budget :]
                assert of == forced | set(newest if len(forced) < budget else []), "not the newest"
        self.seen[f"policy {life.policy}"] += 1
        self.seen[f"allocator {life.allocator}"] += 1

    def attend(self, batch: list[tuple[Life, int]], padding: int, fold: bool) -> None:
        """A forward pass over (sequence, first new position) pairs, and what it read."""
        counts = [len(life.tokens) - begin for life, begin in batch]
        lengths = [len(life.tokens) for life, _ in batch] + [0] * padding
        starts = np.cumsum([0, *counts, *[0] * padding], dtype=np.int32)
        table = torch.zeros(len(lengths), max(len(life.row) for life, _ in batch) + 1).int()
        for index, (life, _) in enumerate(batch):
            table[index, : len(life.row)] = torch.tensor(life.row)
        self.runner.batch = [life.request_id for life, _ in batch]
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=torch.tensor(lengths).int(),
            seq_lens_cpu_upper_bound=torch.tensor(lengths).int(),
            num_reqs=len(batch),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table.clone(),
            slot_mapping=torch.empty(0),
        )
        tables = self.builder.tables
        assert tables is not None
        known = tables._known.batch.tables if tables._known else None
        with mock.patch.object(attention, "worth_folding", return_value=fold):
            metadata = self.builder.build(0, common)
        assert common.block_table_tensor.equal(table), "vLLM's own table was written"
        over_units = getattr(metadata, "kv_eviction_uneven", None)
        for layer, impl in enumerate(self.impls):
            queries = b"".join(
                query_of(life.tokens[p], p, layer, head)
                for life, begin in batch
                for p in range(begin, len(life.tokens))
                for head in range(QUERY_HEADS)
            )
            query = tensor(queries, -1, QUERY_HEADS, SIZE)
            output = torch.zeros_like(query)
            impl.forward(None, query, None, None, self.layers[layer].cache, metadata, output)
            assert output.equal(query), "another token's or head's result"
            for index, (life, begin) in enumerate(batch):
                for head in range(HEADS):
                    if over_units:
                        asked, (read,) = impl.read[head * len(batch) + index]
                        mine = range(head * GROUP, (head + 1) * GROUP)
                    else:
                        asked, read = impl.read[index][0], impl.read[index][1][head]
                        mine = range(QUERY_HEADS)
                    positions = range(begin, len(life.tokens))
                    wanted = [
                        query_of(life.tokens[p], p, layer, at) for p in positions for at in mine
                    ]
                    assert asked == b"".join(wanted), "others' queries"
                    self.check_read(life, layer, head, read, positions)
        self.seen["batch padded"] += padding > 0
        if over_units:
            self.seen["batch over units"] += 1
            self.seen["batch over units, folded"] += over_units.fold
            self.seen["batch over units, tables reused"] += (
                tables._known is not None and tables._known.batch.tables is known
            )
        else:
            shifted = any(life.released for life, _ in batch)
            self.seen["batch shifted" if shifted else "batch as it is"] += 1

    def check_read(self, life: Life, layer: int, head: int, read: bytes, new: range) -> None:
        """Attention reads every live block once, in any order, and the new tokens last."""
        found = []
        for at in range(0, len(read) // UNIT * UNIT, UNIT):
            block = int(struct.unpack_from("6f", read, at)[1]) // BLOCK
            wanted = life.contents.get((layer, head, block))
            assert read[at : at + UNIT] == wanted, f"not what block {block} holds"
            found.append(block)
        assert sorted(found) == sorted(life.live(layer, head)), "other blocks than the live ones"
        rest = range(life.full * BLOCK, len(life.tokens))
        assert len(read) == len(found) * UNIT + len(rest) * FACT
        for positions in (rest, new):
            facts = b"".join(key_and_value(life.tokens[p], p, layer, head) for p in positions)
            assert read.endswith(facts), "the newest tokens are not last"

    def check(self) -> None:
        """All memory, and all that the worker knows of its sequences."""
        now = self.stored()
        assert now == self.memory, (
            f"units {[u for u in now if now[u] != self.memory[u]]} hold what nobody wrote there"
        )
        known = self.worker.sequences.by_id
        assert known.keys() == {i for i, life in self.lives.items() if life.evictable}
        self.worker.sequences.check_integrity()
        for name, sequence in known.items():
            life = self.lives[name]
            assert sequence.released == life.released
            found: dict[Place, int] = {}
            if sequence.holding is None:
                for layer, row in enumerate(sequence.live_blocks(LAYERS, life.full).tolist()):
                    for block, page in zip(row, life.row[life.released : life.full], strict=True):
                        for head in range(HEADS):
                            found[layer, head, block] = self.unit(layer, page, head)
            else:
                units, blocks = sequence.holding.units.tolist(), sequence.holding.blocks.tolist()
                first = min(self.start.values())
                for layer, head in PAIRS:
                    for unit, block in zip(units[layer][head], blocks[layer][head], strict=True):
                        if unit >= 0:
                            found[layer, head, block] = first + unit
                    for block in range(sequence.dealt, life.full):
                        found[layer, head, block] = self.unit(layer, life.row[block], head)
            assert found == life.places, f"{name}: blocks are elsewhere"
            self.check_window(life, sequence.slot)

    def check_window(self, life: Life, slot: int) -> None:
        """The queries that the next eviction would look at are those of the newest tokens."""
        newest = range(len(life.tokens))[-self.settings.window :]
        for index, layer in enumerate(self.layers):
            ring = layer.window.ring.numpy()
            for position in newest:
                recorded = ring[slot * self.ring_rows + position % self.ring_rows].tobytes()
                token = life.tokens[position]
                wanted = [query_of(token, position, index, h) for h in range(QUERY_HEADS)]
                assert recorded == b"".join(wanted), f"{life.request_id}: query of {position}"


@torch.inference_mode()
def test_the_worker_does_to_memory_what_its_twin_does() -> None:
    Twin.seen.clear()
    worlds = max(1, EVENTS // EVENTS_PER_WORLD)
    for first in range(0, worlds, WORLDS_PER_ROUND):
        Twin.leading = LOOKING[first // WORLDS_PER_ROUND % len(LOOKING)]
        run_state_machine_as_test(
            seed(f"{SEED}/{first}")(Twin),
            settings=settings(
                max_examples=min(WORLDS_PER_ROUND, worlds - first),
                stateful_step_count=EVENTS_PER_WORLD,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
                database=None,
                deadline=None,
                print_blob=True,
            ),
        )
    never = sorted(kind for kind in EXPECTED if not Twin.seen[kind])
    assert not never, f"seed {SEED}, {EVENTS} events: never met {never}"
