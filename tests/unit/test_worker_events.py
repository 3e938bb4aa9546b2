"""The worker's side of a long random life, against an account of it that knows every block.

No vLLM and no model: sequences start, grow, are evicted (by the real evictors), preempted, aborted
and finished at random over a small pool of pages. An account kept beside it knows in which unit
each (layer, KV head) of each sequence has each of its blocks, and what that must hold; all of it is
compared after every event.

NEXUS_WORKER_EVENTS (default 3,000; fewer may not meet every case, which fails) and
NEXUS_WORKER_SEED (default 0) choose the run. A failure names seed and event.
"""

import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from nexus_vllm import allocators, policies
from nexus_vllm.allocators import Allocator, Situation
from nexus_vllm.allocators.cake import Cake
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.sequences import Sequences
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.unit_batch import UnevenBatch
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction, EvictionPlan
from nexus_vllm.policies import Observation, Rope, block_attention, score, state_size
from nexus_vllm.profile import ModelFacts, Profile
from nexus_vllm.selectors import SELECTORS, select

EVENTS = int(os.environ.get("NEXUS_WORKER_EVENTS", "3000"))
SEED = int(os.environ.get("NEXUS_WORKER_SEED", "0"))
EVENTS_PER_WORLD = 250
MOST_BLOCKS = 40
"""Of one sequence."""
SEQUENCES = 6
HEAD_SIZE = 2
CPU = torch.device("cpu")
ANGLES = torch.linspace(0, 100, 1000)[:, None]
ROPE = Rope(ANGLES.cos(), ANGLES.sin())

EXPECTED = {
    "start",
    "prefix hit",
    "not evictable",
    "grow",
    "evict",
    "evicted again",
    "several evictions at once",
    "in place",
    "copied out",
    "own and fresh pages",
    "published pages withdrawn",
    "postponed",
    "preempt",
    "preempted before its eviction was carried out",
    "preempted for room",
    "restart",
    "restart unannounced",
    "extend",
    "abort",
    "finish",
    "page reused by another sequence",
    "eviction with pages of others shared",
    "eviction with a part-filled page",
    "counts checked exactly",
    "more blocks than the budget",
    "fewer blocks than the budget",
    "by the decode selector",
    "unit lent to another layer",
    "unit lent to another head",
    "batch of uneven, even and not evictable sequences",
    "batch with a part-filled page",
    *(f"allocator {name}" for name in allocators.names()),
    *(f"policy {name}" for name in policies.names()),
    *(f"{kind} with {policy}" for kind in ("even", "uneven") for policy in policies.names()),
}


@dataclass
class Life:
    """One sequence as it must be.

    `contents` [layers, heads, MOST_BLOCKS, block, 2 * head size]: what every token writes.
    `units` [layers, heads, MOST_BLOCKS]: the unit that holds each live full block, -1 for none.
    No `plan`: never evicted, and unknown to the worker's table. `length`: tokens at its end.
    `publishes`: how many of its first blocks others may share. `state` [layers, heads, MOST_BLOCKS,
    S]: what the policy has said of each block, NaN where nothing yet; heads is 1 where all keep the
    same ones. `seen`: tokens at the last eviction. `replay` [layers, heads, the prompt's blocks]:
    what its prompt's replay has found.
    """

    request_id: str
    plan: EvictionPlan | None
    policy: str
    allocator: str
    seed: int
    length: int
    publishes: int
    contents: np.ndarray
    units: np.ndarray
    state: torch.Tensor
    replay: torch.Tensor
    row: list[int] = field(default_factory=list)
    computed: int = 0
    released: int = 0
    event: int = 0
    seen: int = 0

    @property
    def due(self) -> bool:
        return self.plan is not None and self.computed >= self.plan.next_eviction(self.released)


def random_profile(layers: int, heads: int, draw: random.Random) -> Profile:
    """Shares with the right means, some of them 0 or 1."""
    densities = tuple(sorted(draw.sample([0.1, 0.2, 0.3, 0.5, 0.7, 0.9], draw.randint(1, 3))))
    shares = []
    for density in densities:
        apart = torch.tensor([draw.random() ** 2 for _ in range(layers * heads)]).double()
        apart -= apart.mean()
        most, least = max(1e-9, float(apart.max())), max(1e-9, -float(apart.min()))
        shares.append(density + apart * min((1 - density) / most, density / least))
    table = torch.stack(shares).clamp(0, 1).view(-1, layers, heads)
    return Profile(ModelFacts("tiny", layers, heads, HEAD_SIZE), "nexus", {}, 32, densities, table)


class World:
    """A pool of pages, the worker's classes over it, and the sequences that live there."""

    def __init__(self, draw: random.Random, seen: Counter[str]) -> None:
        self.draw, self.seen = draw, seen
        self.numbers = np.random.default_rng(draw.getrandbits(63))
        self.layers, self.heads = draw.choice([2, 3, 3, 4]), draw.choice([1, 2, 2, 3])
        self.block = draw.choice([4, 4, 8, 16, 32])
        pages = draw.randint(24, 64)
        self.settings = Settings(
            block_size=self.block,
            force_block_size=True,
            window=draw.choice([1, 4, 16]),
            sink_blocks=draw.randint(0, 2),
            recency_blocks=draw.randint(1, 3),
            selector=draw.choice(SELECTORS),
            decode_selector=draw.choice([None, *SELECTORS]),
            smoothing=draw.choice([0.0, 0.0, 0.6]),
            walk_state=draw.choice(["fresh", "carried"]),
        )
        self._allocate(pages)
        self._connect()
        self.references = [0] * pages
        self.published: set[int] = set()
        self.free = list(range(1, pages))
        self.last_user: dict[int, str] = {}
        self.running: dict[str, Life] = {}
        self.waiting: dict[str, Life] = {}
        self.born = 0

    def _allocate(self, pages: int) -> None:
        """One allocation with the layers in any order and a few units between them."""
        draw, content = self.draw, 2 * HEAD_SIZE
        order = draw.sample(range(self.layers), self.layers)
        starts, end = {}, draw.randint(0, 3)
        first = end
        for layer in order:
            starts[layer] = end
            end += pages * self.heads + draw.randint(0, 3)
        storage = torch.from_numpy(self._random(end, self.block, content))
        self.caches = [
            storage[starts[layer] : starts[layer] + pages * self.heads].view(
                pages, self.heads, self.block, content
            )
            for layer in range(self.layers)
        ]
        self.everything = storage.numpy()
        self.memory = self.everything[first:]
        self.image = self.everything.copy()
        self.known = self.image[first:]
        base = np.array([starts[layer] - first for layer in range(self.layers)])
        self.base = base[:, None, None] + np.arange(self.heads)[:, None]

    def _connect(self) -> None:
        draw, settings = self.draw, self.settings
        order = torch.arange(self.block)[:, None] * 2 * HEAD_SIZE + torch.arange(HEAD_SIZE)
        self.first_layer = draw.randint(0, 5)
        layers = []
        for index, cache in enumerate(self.caches):
            window = LayerWindow(
                SEQUENCES, settings.window, 2 * self.heads, HEAD_SIZE, torch.float32, CPU
            )
            window.ring[:] = torch.from_numpy(self._random(*window.ring.shape)) * 2 - 1
            layer = self.first_layer + index
            both = UnitLayout.of(order), UnitLayout.of(order + HEAD_SIZE)
            layers.append(Layer(layer, cache, both[0], 1.0, HEAD_SIZE, window, both[1], ROPE))
        self.rings = [layer.window.ring for layer in layers]
        self.evictor = Evictor(layers, settings)
        self.uneven = UnevenEvictor(layers, settings)
        self.sequences = Sequences(None, SEQUENCES, settings.window, self.block, CPU)  # type: ignore[arg-type]
        profile = random_profile(self.layers, self.heads, draw)
        self.allocators: dict[str, Allocator] = {
            name: allocators.make(name, profile) for name in allocators.names()
        }

    def _random(self, *shape: int) -> np.ndarray:
        return self.numbers.random(shape, dtype=np.float32)

    def own(self, pages: list[int]) -> np.ndarray:
        """Unit numbers of every pair's own units in these pages, [layers, heads, len(pages)]."""
        return self.base + np.array(pages, dtype=np.int64) * self.heads

    # The pool

    def take(self, count: int, life: Life) -> list[int]:
        """Free pages, whichever; whatever they were published as is gone."""
        taken = [self.free.pop(self.draw.randrange(len(self.free))) for _ in range(count)]
        for page in taken:
            self.published.discard(page)
            self.references[page] = 1
            before = self.last_user.get(page)
            self.seen["page reused by another sequence"] += before not in (None, life.request_id)
            self.last_user[page] = life.request_id
        return taken

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)

    # Events

    def happen(self) -> str:
        """One random event; returns its name."""
        draw, alive = self.draw, len(self.running) + len(self.waiting)
        due = [life for life in self.running.values() if life.due]
        kinds: dict[str, float] = {
            "start": 4 * (alive < SEQUENCES and len(self.free) > 0),
            "restart": 3 * (len(self.waiting) > 0 and len(self.free) > 0),
            "grow": 10 * (len(self.running) > 0),
            "evict": 12 * (len(due) > 0),
            "preempt": 0.4 * (len(self.running) > 0),
            "extend": 0.4 * (len(self.running) > 0),
            "abort": 0.3 * (alive > 0),
            "finish": 0.3 * (len(self.running) > 0),
        }
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        if kind == "grow":
            life = draw.choice(list(self.running.values()))
            if life.computed >= life.length:
                kind = "finish"
                self.end(life)
            else:
                self.grow(life)
        elif kind == "evict":
            self.evict(draw.sample(due, draw.randint(1, len(due))))
        elif kind == "start":
            self.start()
        elif kind == "restart":
            self.restart(draw.choice(list(self.waiting.values())))
        elif kind == "preempt":
            self.preempt(draw.choice(list(self.running.values())))
        elif kind == "extend":
            self.extend(draw.choice(list(self.running.values())))
        elif kind == "abort":
            self.end(draw.choice([*self.running.values(), *self.waiting.values()]))
        else:
            self.end(draw.choice(list(self.running.values())))
        self.seen[kind] += 1
        return kind

    def start(self) -> None:
        draw, settings = self.draw, self.settings
        prompt = draw.randint(1, 22 * self.block)
        plan = None
        if draw.random() < 0.85:
            least = settings.sink_blocks + settings.recency_blocks + 1
            plan = EvictionPlan(
                prompt_tokens=prompt,
                budget=least + draw.randint(0, 6),
                interval=draw.randint(1, 4),
                chunk=draw.randint(1, 6),
                block_size=self.block,
                streaming=draw.random() < 0.4,
            )
        shape = self.layers, self.heads, MOST_BLOCKS
        self.born += 1
        life = Life(
            request_id=f"r{self.born}",
            plan=plan,
            policy=draw.choice(policies.names()),
            allocator=draw.choice(["uniform", "uniform", *allocators.names()]),
            seed=draw.getrandbits(31),
            length=min(prompt + draw.randint(1, 20 * self.block), MOST_BLOCKS * self.block - 1),
            publishes=draw.choice([0, draw.randint(1, 12), MOST_BLOCKS]),
            contents=np.empty(0),
            units=np.full(shape, -1),
            state=torch.empty(0),
            replay=torch.rand(
                *shape[:2],
                -(-prompt // self.block),
                generator=torch.Generator().manual_seed(draw.getrandbits(31)),
            ),
        )
        self.seen["not evictable"] += plan is None
        self._begin(life)

    def restart(self, life: Life) -> None:
        """A preempted sequence starts over, from nothing or a prefix of somebody's."""
        del self.waiting[life.request_id]
        self._begin(life)

    def _begin(self, life: Life) -> None:
        shape = self.layers, self.heads, MOST_BLOCKS, self.block, 2 * HEAD_SIZE
        life.contents, life.units[:] = self._random(*shape), -1
        life.row, life.computed, life.released, life.event, life.seen = [], 0, 0, 0, 0
        size = state_size(self.evictor.policies[life.policy], self.settings.smoothing)
        heads = 1 if life.allocator == "uniform" else self.heads
        life.state = torch.full((self.layers, heads, MOST_BLOCKS, size), torch.nan)
        self._hit_prefix(life)
        self.running[life.request_id] = life
        if life.plan is not None:
            self.sequences.start(life.request_id)

    def _hit_prefix(self, life: Life) -> None:
        """Begin with published pages of another sequence, now and then."""
        donors = [d for d in self.running.values() if d.publishes and not d.released]
        if not donors or self.draw.random() < 0.3:
            return
        donor = self.draw.choice(donors)
        most = min(donor.publishes, donor.computed // self.block, (life.length - 1) // self.block)
        if life.plan is not None:
            most = min(
                most, max(0, life.plan.next_eviction(0) - self.settings.window) // self.block
            )
        hit = self.draw.choice([self.draw.randint(0, most), most])
        life.row = donor.row[:hit]
        for page in life.row:
            assert page in self.published
            self.references[page] += 1
        life.contents[:, :, :hit] = donor.contents[:, :, :hit]
        life.units[:, :, :hit] = self.own(life.row)
        life.computed = hit * self.block
        self.seen["prefix hit"] += hit > 0

    def grow(self, life: Life) -> None:
        """Compute some tokens: mostly up to the next eviction, as the scheduler does."""
        draw, block = self.draw, self.block
        count = draw.choice([1, draw.randint(1, block), *[30 * block] * 3])
        if life.plan is not None:
            wait = life.plan.next_eviction(life.released) - life.computed
            if wait > 0:
                count = min(count, wait)
            else:
                # A pool without room has made the eviction wait.
                self.seen["postponed"] += 1
                count = min(count, 2 * block)
        end = min(life.computed + count, life.length)
        missing = max(0, -(-end // block) - len(life.row))
        life.row += self.take(min(missing, len(self.free)), life)
        end = min(end, len(life.row) * block)
        if end == life.computed:
            self.seen["preempted for room"] += 1
            self.preempt(draw.choice(list(self.running.values())))
            return
        positions = np.arange(life.computed, end)
        blocks, offsets = positions // block, positions % block
        pages = np.array(life.row)[blocks]
        for page in set(pages.tolist()):
            assert page != 0
            assert self.references[page] == 1
            assert page not in self.published
        units = self.own(pages.tolist())
        for memory in (self.memory, self.known):
            memory[units, offsets] = life.contents[:, :, blocks, offsets]
        first, full = life.computed // block, end // block
        life.units[:, :, first:full] = self.own(life.row[first:full])
        life.computed = end
        if not life.released:
            self.published.update(life.row[: min(full, life.publishes)])

    def extend(self, life: Life) -> None:
        """A session goes on: its prompt is longer than was known."""
        more = self.draw.randint(1, 8 * self.block)
        prompt = min(life.computed + more, MOST_BLOCKS * self.block - 1)
        life.length = max(life.length, prompt)
        if life.plan is not None and life.computed:
            life.plan = replace(life.plan, prompt_tokens=prompt, turn_start=life.computed)

    def preempt(self, life: Life) -> None:
        del self.running[life.request_id]
        self.waiting[life.request_id] = life
        if self.draw.random() < 0.8:
            self.sequences.stop(life.request_id)
        else:
            # The worker hears no more than that it starts again.
            self.seen["restart unannounced"] += life.plan is not None and life.released > 0
        self._leave(life)

    def end(self, life: Life) -> None:
        """Finished or aborted; for the worker it is the same."""
        self.waiting.pop(life.request_id, None)
        self.running.pop(life.request_id, None)
        self.sequences.stop(life.request_id)
        self._leave(life)

    def _leave(self, life: Life) -> None:
        self.give_back(life.row[life.released :])
        life.row, life.computed, life.released = [], 0, 0

    def evict(self, due: list[Life]) -> None:
        """One step's evictions: all planned first, then carried out in that order."""
        planned = [(life, self.slide(life)) for life in due]
        self.seen["several evictions at once"] += sum(e is not None for _, e in planned) > 1
        lost = None
        if self.draw.random() < 0.05:
            lost, eviction = self.draw.choice(planned)
            name = "preempted before its eviction was carried out"
            self.seen[name] += eviction is not None
            self.preempt(lost)
        for life, eviction in planned:
            if life is not lost and eviction is not None:
                self.fill(life, eviction)

    def slide(self, life: Life) -> Eviction | None:
        """The scheduler's half, see `EvictionManager.slide`: which pages stay, and fresh ones."""
        assert life.plan is not None
        draw, released, full = self.draw, life.released, life.computed // self.block
        target = life.plan.target(life.computed)
        keep, live = full - target, life.row[released:full]
        mine = [p for p in live if self.references[p] == 1 and p not in self.published]
        if len(mine) > keep and draw.random() < 0.5:
            staying = [mine[i] for i in sorted(draw.sample(range(len(mine)), keep))]
        else:
            staying = mine[-keep:]
        short, withdrawn = keep - len(staying), []
        if short > len(self.free) or draw.random() < 0.1:
            alone = [p for p in live if self.references[p] == 1 and p in self.published]
            withdrawn = alone[-short:] if short else []
            short -= len(withdrawn)
        if short > len(self.free):
            self.seen["postponed"] += 1
            return None
        fresh = self.take(short, life)
        self.published -= set(withdrawn)
        own = set(staying + withdrawn)
        kept = self._placed(life.row[target:full], [p for p in live if p in own], fresh)
        shared = any(self.references[page] > 1 for page in live)
        self.seen["eviction with pages of others shared"] += shared
        self.seen["eviction with a part-filled page"] += len(life.row) > full
        self.seen["published pages withdrawn"] += bool(withdrawn)
        self.seen["in place" if not fresh else "own and fresh pages" if own else "copied out"] += 1
        eviction = Eviction(
            request_id=life.request_id,
            policy=life.policy,
            allocator=life.allocator,
            seed=life.seed,
            event=life.event,
            computed=life.computed,
            released=released,
            target=target,
            pages=live,
            kept_pages=kept,
            tail_pages=life.row[full:],
            prompt_tokens=life.plan.prompt_tokens,
        )
        self.give_back([page for page in live if page not in own])
        life.row, life.released = eviction.row, target
        self.seen["evicted again"] += released > 0
        return eviction

    def _placed(self, slots: list[int], staying: list[int], fresh: list[int]) -> list[int]:
        """Pages in row order: as the manager places them, or in any order at all."""
        if self.draw.random() < 0.3:
            return self.draw.sample(staying + fresh, len(slots))
        others = iter([page for page in staying if page not in slots] + fresh)
        return [slot if slot in staying else next(others) for slot in slots]

    def fill(self, life: Life, eviction: Eviction) -> None:
        """The worker's half, and whether it did what was asked."""
        assert life.plan is not None
        budget, pairs, full = life.plan.budget, self.layers * self.heads, eviction.full
        before, room = life.units, self.own(eviction.kept_pages)
        expected, state = self.choice(life, eviction)
        policy, allocator = self.evictor.policies[life.policy], self.allocators[life.allocator]
        sequence = self.sequences.by_id[life.request_id]
        sequence.replay = life.replay
        if life.allocator == "uniform":
            moved, _ = self.evictor.evict(sequence, eviction)
            moved *= self.heads
        else:
            moved, _ = self.uneven.evict(sequence, eviction, policy, allocator)
        life.event += 1
        life.seen = eviction.computed
        # Nothing else may have been written; `check` compares.
        self.known[room] = self.memory[room]

        after = self.places(life)
        had, has = before >= 0, after >= 0
        assert not (has & ~had).any(), "a block is back that had been evicted"
        kept = has.sum(-1)
        assert kept.sum() == budget * pairs, f"{kept.sum()} blocks kept, not {budget * pairs}"
        assert not (had & ~has)[:, :, self.forced(full)].any(), "a forced block is gone"
        scored = policy.reads_keys
        if not allocator.needs_preference and not (allocator.needs_weights and scored):
            self.seen["counts checked exactly"] += 1
            assert np.array_equal(kept, expected.sum(-1)), "a head keeps another number"
        # Sums in another order may exchange blocks that are all but equal: one, in each head.
        others = (has[:, :, :full] != expected).sum()
        assert others <= (2 * self.heads if scored or allocator.needs_preference else 0), (
            f"{others} blocks kept or not that should be the other way round"
        )
        may_stay = has & np.isin(before, room)
        assert (after == before)[may_stay].all(), "a block moved that could stay"
        assert moved == (has & ~may_stay).sum(), "copies miscounted"
        life.units = after
        life.state[:] = torch.nan
        stays = torch.from_numpy(has[:, : state.shape[1], :full])
        life.state[:, :, :full][stays] = state[stays]

        seen = self.seen
        seen[f"allocator {life.allocator}"] += 1
        seen[f"policy {life.policy}"] += 1
        kind = "even" if life.allocator == "uniform" else "uneven"
        seen[f"{kind} with {life.policy}"] += 1
        seen["choice of almost equal blocks"] += bool(others)
        seen["more blocks than the budget"] += int(kept.max()) > budget
        seen["fewer blocks than the budget"] += int(kept.min()) < budget
        layer = np.arange(self.layers)[:, None, None]
        home = np.full(len(self.memory), -1)
        home[room] = layer
        away = home[after] != layer
        seen["unit lent to another layer"] += bool((away & has).any())
        home[room] = np.arange(self.heads)[:, None]
        away = ~away & (home[after] != np.arange(self.heads)[:, None])
        seen["unit lent to another head"] += bool((away & has).any())

    def forced(self, full: int) -> np.ndarray:
        """Block numbers that every head must keep."""
        blocks = np.arange(full)
        settings = self.settings
        return blocks[(blocks < settings.sink_blocks) | (blocks >= full - settings.recency_blocks)]

    def choice(self, life: Life, eviction: Eviction) -> tuple[np.ndarray, torch.Tensor]:
        """Which blocks must stay, [L, H, full] bool, and their state [L, H or 1, full, S].

        Worked out anew from the account, where blocks lie in their order and keys are as written.
        """
        policy, allocator = self.evictor.policies[life.policy], self.allocators[life.allocator]
        full, budget, settings = eviction.full, len(eviction.kept_pages), self.settings
        even = life.allocator == "uniform"
        held = torch.from_numpy(life.units[:, : 1 if even else self.heads, :full] >= 0)
        capacity = held.sum(-1)
        # Held blocks' numbers first, then some beyond every query, the part-filled block's too.
        numbers = torch.arange(full)
        ids = torch.where(held, numbers, full + 1 + numbers).sort(-1).values
        ids = ids[..., : int(capacity.max())]
        valid = ids < full
        forced = torch.isin(ids, torch.from_numpy(self.forced(full)))
        layers = torch.arange(self.layers)[:, None, None]
        heads = torch.arange(held.shape[1])[:, None]
        rows = (self.first_layer + layers[..., 0]) * held.shape[1] + heads[:, 0]
        contents = torch.from_numpy(life.contents)
        count = min(settings.window, life.computed)
        positions = torch.arange(life.computed - count, life.computed)
        slot = self.sequences.by_id[life.request_id].slot * settings.window
        queries = torch.stack([ring[slot + positions % settings.window] for ring in self.rings])
        if even:
            both = contents[layers[..., 0], :, ids[:, 0].clamp(max=full - 1)]
        else:
            both = contents[layers, heads, ids.clamp(max=full - 1)].unsqueeze(3)
            queries = queries.unflatten(2, (self.heads, -1)).transpose(1, 2)
        known = life.state[layers, torch.arange(life.state.shape[1])[:, None], ids.clamp(max=full)]
        asked = ids.expand(-1, self.heads, -1)
        beyond, last = asked >= life.replay.shape[-1], life.replay.shape[-1] - 1
        replay = life.replay[layers, torch.arange(self.heads)[:, None], asked.clamp(max=last)]
        replay = replay.masked_fill(beyond, torch.nan)  # [L, H, n]
        seen = Observation(
            queries=queries,
            query_positions=positions,
            keys=both[..., :HEAD_SIZE],
            values=both[..., HEAD_SIZE:],
            valid=valid[:, 0] if even else valid,
            state=(known[:, 0] if even else known) if known.shape[-1] else None,
            new_queries=life.computed - life.seen,
            keep=budget,
            prompt_blocks=eviction.prompt_tokens // self.block,
            rope=ROPE,
            replay=replay.transpose(1, 2) if even else replay.unsqueeze(-1),
            block_ids=ids[:, 0] if even else ids,
            scale=1.0,
            candidates=(valid & ~forced)[:, 0] if even else valid & ~forced,
            seed=life.seed,
            event=life.event,
            layers=rows[:, 0] if even else rows,
        )
        found, state = score(policy, seen, settings.smoothing)
        weights = found.view(ids.shape)
        weights = torch.where(valid, weights.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
        preference = None
        if isinstance(allocator, Cake):
            maps = block_attention(seen).flatten(1, 2)
            group = maps.shape[1] // self.heads
            candidates = seen.candidates.repeat_interleave(group, dim=1)
            preference = allocator.preference(maps, candidates)
        counts = torch.full_like(capacity, budget)
        if not even:
            counts = allocator.counts(
                Situation(
                    budget=budget,
                    seen=full,
                    capacity=capacity,
                    floor=forced.sum(-1),
                    weights=weights,
                    candidates=valid & ~forced,
                    block_ids=ids,
                    preference=preference,
                )
            )
        later = life.event > 0 and life.computed > eviction.prompt_tokens
        chosen = later and settings.decode_selector
        kept = select(
            policy.selector or chosen or settings.selector,
            weights.flatten(0, 1),
            counts.flatten(),
            forced.flatten(0, 1),
            seed=life.seed,
            event=life.event,
            layers=rows.flatten(),
            block_ids=ids.flatten(0, 1),
            n=settings.n,
            temperature=settings.temperature,
        )
        self.seen["by the decode selector"] += bool(chosen)
        wide = torch.zeros(self.layers, held.shape[1], 2 * full + 1, dtype=torch.bool)
        wide.scatter_(2, ids, kept.view(ids.shape))
        of_blocks = torch.full((*wide.shape, known.shape[-1]), torch.nan)
        if state is not None:
            places = ids[..., None].expand(*ids.shape, state.shape[-1])
            of_blocks.scatter_(2, places, state.view(places.shape))
        return wide[..., :full].expand(-1, self.heads, -1).numpy(), of_blocks[:, :, :full]

    # What must hold after every event

    def check(self) -> None:
        assert np.array_equal(self.everything.view(np.int32), self.image.view(np.int32)), (
            "memory was written that nobody may have written"
        )
        for life in self.running.values():
            self.check_life(life)
        self.sequences.check_integrity()
        check_batch(self)

    def check_life(self, life: Life) -> None:
        """Every live block is where it should be and holds what it should."""
        full, part = divmod(life.computed, self.block)
        assert life.row[: life.released] == [0] * life.released
        assert 0 not in life.row[life.released :]
        assert np.array_equal(self.places(life), life.units), "blocks are elsewhere"
        where = (life.units >= 0).nonzero()
        assert np.array_equal(self.memory[life.units[where]], life.contents[where]), (
            f"{life.request_id}: a block does not hold what was written"
        )
        if part:
            tail = self.memory[self.own(life.row[full : full + 1])[:, :, 0], :part]
            assert np.array_equal(tail, life.contents[:, :, full, :part]), "tail page touched"

    def places(self, life: Life) -> np.ndarray:
        """Where the worker's table has each live block: units [L, H, MOST_BLOCKS], -1 for none.

        Checks on the way that every unit of the sequence's pages has exactly one owner.
        """
        full, found = life.computed // self.block, np.full_like(life.units, -1)
        sequence = self.sequences.by_id.get(life.request_id)
        if sequence is None:
            assert life.plan is None
            found[:, :, :full] = self.own(life.row[:full])
            return found
        released, holding = sequence.released, sequence.holding
        assert released == life.released
        pairs = np.arange(self.layers)[:, None, None], np.arange(self.heads)[:, None]
        if holding is None:
            blocks = sequence.live_blocks(self.layers, full).numpy()
            found[(*pairs, blocks[:, None])] = self.own(life.row[released:full])
        else:
            dealt = sequence.dealt
            units, blocks, counts = (
                t.numpy() for t in (holding.units, holding.blocks, holding.counts)
            )
            valid = np.arange(units.shape[-1]) < counts[..., None]
            assert np.array_equal(units >= 0, valid), "units and counts disagree"
            assert np.array_equal(blocks >= 0, valid), "blocks and counts disagree"
            room = self.own(life.row[released:dealt])
            assert counts.sum() == room.size, f"{counts.sum()} units owned of {room.size}"
            assert np.array_equal(np.sort(units[valid]), np.sort(room, axis=None)), (
                "a unit has two owners or none"
            )
            layer, head, _ = valid.nonzero()
            found[layer, head, blocks[valid]] = units[valid]
            found[:, :, dealt:full] = self.own(life.row[dealt:full])
            holding.check_integrity(torch.from_numpy(room).flatten())
        units_held = (full - released) * self.layers * self.heads
        assert (found >= 0).sum() == units_held, "a head has a block twice"
        return found

    def close(self) -> None:
        """All sequences end, and every page is back."""
        for life in [*self.running.values(), *self.waiting.values()]:
            self.end(life)
        self.check()
        assert sorted(self.free) == list(range(1, len(self.references)))
        assert not self.sequences.by_id


def check_batch(world: World) -> None:
    """A batch of some of the sequences lists each head's live blocks, then its part-filled one."""
    lives = [life for life in world.running.values() if life.computed]
    if lives:
        lives = world.draw.sample(lives, world.draw.randint(1, len(lives)))
    rows = [world.sequences.by_id.get(life.request_id) for life in lives]
    if not any(row is not None and row.holding is not None for row in rows):
        return
    block, count = world.block, len(lives)
    table = torch.zeros(count, max(len(life.row) for life in lives) + 1, dtype=torch.int32)
    for index, life in enumerate(lives):
        table[index, : len(life.row)] = torch.tensor(life.row)
    lengths = np.array([life.computed for life in lives], dtype=np.int32)
    queries = [world.draw.randint(1, min(3, life.computed)) for life in lives]
    starts = np.cumsum([0, *queries], dtype=np.int32)
    batch = UnevenBatch.of(world.uneven.space, rows, table, lengths, starts, block)
    tables = batch.tables.numpy().reshape(world.layers, world.heads, count, -1)
    told = batch.lengths.numpy().reshape(world.layers, world.heads, count)

    kinds = {row if row is None else row.holding is not None for row in rows}
    world.seen["batch of uneven, even and not evictable sequences"] += len(kinds) == 3
    nowhere = len(world.memory)
    columns = np.arange(tables.shape[-1])
    for index, life in enumerate(lives):
        full, part = divmod(life.computed, block)
        blocks = (life.units >= 0).sum(-1)
        assert np.array_equal(told[:, :, index], blocks * block + part), "wrong lengths"
        listed = np.where(columns < blocks[..., None], tables[:, :, index], nowhere)
        wanted = np.where(life.units >= 0, life.units, nowhere)
        most = int(blocks.max())
        assert np.array_equal(np.sort(listed)[..., :most], np.sort(wanted)[..., :most]), (
            "attention reads other units than those of the live blocks"
        )
        if part:
            last = np.take_along_axis(tables[:, :, index], blocks[..., None], axis=-1)
            own = world.own(life.row[full : full + 1])
            assert np.array_equal(last, own), "the part-filled page is not last"
            world.seen["batch with a part-filled page"] += 1


@torch.inference_mode()
def live(seed: int, events: int) -> Counter[str]:
    """So many events, in one world after the other, no two alike; returns how often what happened.

    Raises AssertionError that says how to see the same failure again.
    """
    seen: Counter[str] = Counter()
    for first in range(0, events, EVENTS_PER_WORLD):
        world = World(random.Random(f"{seed}/{first}"), seen)
        end = min(events, first + EVENTS_PER_WORLD)
        for event in range(first, end + 1):
            try:
                if event < end:
                    world.happen()
                    world.check()
                else:
                    world.close()
            except Exception as error:
                what, again = (str(error).splitlines() or [""])[0], f"NEXUS_WORKER_SEED={seed}"
                raise AssertionError(
                    f"seed {seed}, event {event}: {type(error).__name__}: {what}; "
                    f"again with {again} NEXUS_WORKER_EVENTS={events}"
                ) from error
    return seen


def test_every_unit_has_one_owner_and_every_block_its_contents() -> None:
    seen = live(SEED, EVENTS)
    never = sorted(kind for kind in EXPECTED if not seen[kind])
    assert not never, f"seed {SEED}, {EVENTS} events: never met {never}"
