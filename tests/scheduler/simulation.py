"""vLLM's real scheduler and our real evictor over a memory that knows what every page holds.

No model runs. The stand-in worker keeps page rows the way vLLM's does, and "computes" a token by
writing three facts into its slot: the token, its position, and how many blocks its sequence had
released by then. Whatever a live window holds can then be checked against what it should hold.
"""

import itertools
import os
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from nexus_vllm import allocators
from nexus_vllm.config import Settings
from nexus_vllm.engine import compat
from nexus_vllm.engine.cli import CONFIG_KEY
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.manager import EvictionSpec
from nexus_vllm.engine.replay_scores import Reading, ReplayScores
from nexus_vllm.engine.requests import fit
from nexus_vllm.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler
from nexus_vllm.engine.sequences import Sequence, Sequences
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.units import Holding
from nexus_vllm.engine.window import LayerWindow, recording, ring_rows
from nexus_vllm.plan import Eviction, Piece
from nexus_vllm.policies import Rope
from nexus_vllm.profile import ModelFacts, Profile

BLOCK = 32
LAYERS = 2
HEADS = 2
LONGEST = 2048
"""`max_model_len`."""
CPU = torch.device("cpu")
TOKEN, POSITION, RELEASED = 0, 1, 2
PROFILE = Profile(
    ModelFacts("stand-in", LAYERS, HEADS, 2),
    "random",
    {},
    BLOCK,
    (0.2, 0.6),
    torch.tensor([[[0.1, 0.4], [0.0, 0.3]], [[0.5, 1.0], [0.2, 0.7]]]),
)
"""What `lu` deals by."""
PIPELINES = [(False, 1), (False, 2), (True, 2), (True, 3)]
"""Whether scheduling is asynchronous, and batches in flight: without a pipeline and with one."""


def answer(request_id: str, position: int) -> int:
    """What the model says at a position: a function of it, so that recomputing repeats it."""
    return 1000 + zlib.crc32(f"{request_id} {position}".encode()) % 1000


def over_the_wire(params: SamplingParams) -> SamplingParams:
    """As an engine's process reads them: parameters that break vLLM's rules end its input thread,
    and with it all requests."""
    try:
        sent = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    except VLLMValidationError as error:  # which would pass for a refusal
        raise AssertionError(f"the engine cannot read {params}") from error
    return cast(SamplingParams, sent)


class Memory:
    """The stand-in for model and worker."""

    def __init__(self, pages: int, slots: int, settings: Settings, depth: int, drafts: int) -> None:
        self.cache = list(torch.full((LAYERS, pages, HEADS, BLOCK, 4), -1.0))
        rows = ring_rows(settings.widest_window, depth, drafts)
        self.sequences = Sequences(None, slots, rows, BLOCK, CPU)  # type: ignore[arg-type]
        self.ring = torch.full((slots, rows), -1)
        order = torch.arange(BLOCK)[:, None] * 4 + torch.arange(2)
        keys, values = UnitLayout.of(order), UnitLayout.of(order + 2)
        rope = Rope(torch.ones(4096, 1), torch.zeros(4096, 1))
        layers = []
        for index, cache in enumerate(self.cache):
            window = LayerWindow(slots, rows, HEADS, 2, torch.float32, CPU)
            layers.append(Layer(index, cache, keys, 1e-6, 2, window, values, rope))
        self.evictor = Evictor(layers, settings)
        self.uneven = UnevenEvictor(layers, settings)
        self.replays = ReplayScores(None, layers, BLOCK)  # type: ignore[arg-type]
        self.rows: dict[str, list[int]] = {}
        self.history: dict[str, list[tuple[int, list[list[int]]]]] = {}
        self.first: dict[str, int] = {}
        self.texts: dict[str, tuple[int, torch.Tensor]] = {}
        self.replayed: dict[tuple[int, ...], torch.Tensor] = {}
        self.seen: Counter[str] = Counter()
        self.hashed: Callable[[], set[int]] = set

    def execute(self, output: Any, requests: dict[str, Request]) -> None:
        """One step, as `EvictionWorker` and a model runner carry it out."""
        plan = compat.plan_of(output)
        for request_id in plan.stopped:
            self.sequences.stop(request_id)
            self.replays.stop(request_id)
            self.rows.pop(request_id, None)
        for eviction in plan.evictions:
            self.check_replay(requests[eviction.request_id], eviction)
            self.evict(eviction)
        for request_id in plan.started:
            self.sequences.start(request_id)
            self.history[request_id] = []
        for piece in plan.pieces:
            self.replays.start(piece)
            self.seen["replayed"] += 1
        for replay in plan.forgotten:
            self.replays.forget(replay)
        self.replays.check_integrity()
        cached = output.scheduled_cached_reqs
        starts = _starts(output)
        for request_id in (*(n.req_id for n in output.scheduled_new_reqs), *cached.resumed_req_ids):
            if request_id not in self.rows:  # not a session's next turn
                self.first[request_id] = starts[request_id]
                self.seen["prefix hit"] += starts[request_id] > 0
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[0])
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.rows[request_id] = self.rows.get(request_id, []) + (ids[0] if ids else [])
        for request_id, count in output.num_scheduled_tokens.items():
            self.check_window(requests[request_id], starts[request_id])
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            self.forward(requests[request_id], starts[request_id], count, drafts)

    def check_replay(self, request: Request, eviction: Eviction) -> None:
        """Evicted by what a replay of this very prompt finds, whether or not it was kept: I8."""
        if eviction.replay is not None:
            scores = self.replays.scores[eviction.replay]
            before = self.replayed.setdefault(tuple(request.prompt_token_ids or ()), scores.clone())
            torch.testing.assert_close(scores, before, msg=f"scores of {request.request_id}")

    def evict(self, eviction: Eviction) -> None:
        row = self.rows[eviction.request_id]
        assert row[eviction.released : eviction.full] == eviction.pages
        sequence = self.sequences.by_id[eviction.request_id]
        sequence.replay = self.replays.scores.get(eviction.replay or "")
        rows = self.evictor.settings.of(eviction.policy).window
        window = torch.arange(eviction.computed - rows, eviction.computed)
        assert window[0] >= self.first[eviction.request_id], "queries that were never computed"
        recorded = self.ring[sequence.slot, window % self.ring.shape[1]]
        assert recorded.equal(window), f"queries of {recorded} instead"
        fresh = set(eviction.kept_pages) - set(eviction.pages)
        own = "private pages" if eviction.released else "in place"
        self.seen["copied out" if fresh else own] += 1
        self.seen[f"evicted by {eviction.policy}"] += 1
        self.seen[f"allocated by {eviction.allocator}"] += 1
        assert not self.hashed() & set(eviction.kept_pages), "I3: a fill into a published page"
        kept = sorted(set(eviction.kept_pages))
        others = torch.tensor([p for p in range(len(self.cache[0])) if p not in kept])
        before = [cache[others].clone() for cache in self.cache]
        if eviction.allocator == "uniform":
            _, origin = self.evictor.evict(sequence, eviction)
        else:
            self.seen["uneven"] += 1
            policy = self.evictor.policies[eviction.policy]
            allocator = allocators.make(eviction.allocator, PROFILE)
            _, origin = self.uneven.evict(sequence, eviction, policy, allocator)
        for cache, was in zip(self.cache, before, strict=True):
            assert torch.equal(cache[others], was), (
                "I3: a fill wrote outside the pages it was given"
            )
        self.rows[eviction.request_id] = eviction.row
        self.history[eviction.request_id].append((eviction.computed, origin.tolist()))

    def text(self, request: Request) -> torch.Tensor:
        """The tokens at all positions of the sequence, said or yet to be said."""
        prompt, request_id = request.prompt_token_ids or [], request.request_id
        length, text = self.texts.get(request_id, (-1, torch.empty(0)))
        if length != len(prompt):  # a session's next turn extends it
            said = [answer(request_id, p) for p in range(len(prompt), LONGEST)]
            text = torch.tensor(prompt + said, dtype=torch.float32)
            self.texts[request_id] = len(prompt), text
        return text

    def forward(self, request: Request, start: int, count: int, drafts: list[int]) -> None:
        # In flight, an output is a placeholder; the one this step promises is none to it yet.
        promised = max(0, request.num_output_placeholders - (not request.is_prefill_chunk))
        known = request.num_tokens + promised + len(drafts)
        assert start + count <= known, f"position {start + count - 1} of {known} known tokens"
        row, sequence = self.rows[request.request_id], self.sequences.by_id.get(request.request_id)
        positions = torch.arange(start, start + count)
        pages = torch.tensor(row)[positions // BLOCK]
        assert (pages != 0).all(), "a token must not be written to the null page"
        facts = torch.zeros(count, 4)
        facts[:, TOKEN] = self.text(request)[positions]
        facts[count - len(drafts) :, TOKEN] = torch.tensor(drafts, dtype=torch.float32)
        facts[:, POSITION] = positions.float()
        facts[:, RELEASED] = sequence.released if sequence else 0
        for cache in self.cache:
            cache[pages, :, positions % BLOCK] = facts[:, None]
        if piece := self.replays.pieces.get(request.request_id):
            self.repeat(piece, facts, start, row)
        if sequence:
            starts, ends, slots = map(np.array, ([0, count], [start + count], [sequence.slot]))
            new = recording(starts, ends, slots, self.ring.shape[1], CPU)
            assert new is not None
            self.ring.view(-1)[new.target] = new.taken(positions)
            queries = facts[:, None, :RELEASED].repeat(1, HEADS, 1)
            for layer in self.evictor.layers:
                layer.window.record(queries, new)

    def repeat(self, piece: Piece, facts: torch.Tensor, start: int, row: list[int]) -> None:
        """Look at what a step computes of a piece; the prompt must be what it repeats."""
        first, end = max(start, piece.first), min(start + len(facts), piece.end)
        if first < end:
            rows = slice(first - start, end - start)
            seen = Reading(
                piece,
                rows,
                torch.arange(first, end),
                torch.tensor(row[: -(-end // BLOCK)]),
            )
            queries = facts[:, None, :RELEASED].repeat(1, HEADS, 1)
            for index in range(LAYERS):
                self.replays.read(index, queries, [seen])

    def check_window(self, request: Request, computed: int) -> None:
        """What attention would read before this step is what it should: every live block, once."""
        row, sequence = self.rows[request.request_id], self.sequences.by_id.get(request.request_id)
        released, full = (sequence.released if sequence else 0), computed // BLOCK
        assert row[:released] == [0] * released
        assert 0 not in row[released:]
        if computed % BLOCK:
            for cache in self.cache:
                self.check_blocks(request, [full], cache[row[full], :, None], computed % BLOCK)
        if sequence is not None and sequence.holding is not None:
            self.check_units(request, row, sequence, sequence.holding, full)
            return
        if sequence is None:
            blocks = torch.arange(full).expand(LAYERS, -1)
        else:
            blocks = sequence.live_blocks(LAYERS, full)
        pages = torch.tensor(row[released:full], dtype=torch.long)
        for layer, cache in enumerate(self.cache):
            ids = blocks[layer].tolist()
            assert len(set(ids)) == len(ids) == full - released, "I5: distinct live blocks"
            facts = cache[pages]
            self.check_blocks(request, ids, facts.transpose(0, 1))
            if not released:
                assert not facts[..., RELEASED].any(), "I6: a prefix hit on evicted KV"

    def check_blocks(
        self, request: Request, blocks: list[int], facts: torch.Tensor, tokens: int = BLOCK
    ) -> None:
        """`facts` [..., blocks, BLOCK, 4] are those of these blocks, up to so many tokens."""
        positions = torch.tensor(blocks, dtype=torch.long)[:, None] * BLOCK + torch.arange(tokens)
        found = facts[..., :tokens, :]
        assert (found[..., POSITION] == positions).all(), f"positions of {request.request_id}"
        wanted = self.text(request)[positions]
        assert (found[..., TOKEN] == wanted).all(), f"tokens of {request.request_id}"

    def check_units(
        self, request: Request, row: list[int], sequence: Sequence, holding: Holding, full: int
    ) -> None:
        """The same under uneven budgets: dealt units hold their blocks, tail pages their own."""
        space = self.uneven.space
        dealt = row[sequence.released : sequence.dealt]
        holding.check_integrity(space.own(torch.tensor(dealt)).flatten())
        tail = torch.tensor(row[sequence.dealt : full], dtype=torch.long)
        now = holding.grown(space, tail, torch.arange(sequence.dealt, full))
        used = now.units >= 0
        self.check_blocks(request, now.blocks[used].tolist(), space.flat[now.units[used], 0])


class NoMemory(Memory):
    """For long runs that are about the scheduler alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cache = []

    def execute(self, output: Any, requests: dict[str, Request]) -> None:
        self.seen["evictions"] += len(compat.plan_of(output).evictions)


class Mirror:
    """What a subscriber to vLLM's KV events takes to be cached: how often each hash, and what."""

    def __init__(self) -> None:
        self.hashes: Counter[Any] = Counter()
        self.tokens: dict[Any, list[int]] = {}

    def publish(self, batch: Any) -> None:
        self.follow(batch.events)

    def shutdown(self) -> None:
        pass

    def follow(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.hashes.update(event.block_hashes)
                for index, block in enumerate(event.block_hashes):
                    self.tokens[block] = event.token_ids[index * BLOCK : (index + 1) * BLOCK]
            elif isinstance(event, BlockRemoved):
                self.hashes.subtract(event.block_hashes)
                assert min(self.hashes.values()) >= 0, "removed, but never stored"
            else:
                assert isinstance(event, AllBlocksCleared)
                self.hashes.clear()

    def check(self, pool: Any, cache: list[torch.Tensor]) -> None:
        """Raise AssertionError unless the pool has just these hashes, over pages that hold it."""
        hashed = [block for block in pool.blocks if block.block_hash is not None]
        names = [maybe_convert_block_hash(get_block_hash(b.block_hash)) for b in hashed]
        assert Counter(names) == +self.hashes, "the KV events do not tell what is cached"
        pages = torch.tensor([block.block_id for block in hashed], dtype=torch.long)
        told = torch.tensor([self.tokens[name] for name in names]).view(-1, 1, BLOCK)
        for layer in cache:
            facts = layer[pages]
            assert (facts[..., TOKEN] == told).all(), "published, but not computed"
            assert not facts[..., RELEASED].any(), "I6: published, but computed after an eviction"


class Simulation:
    """A scheduler, a memory, and requests to throw at them.

    `depth`: batches in flight, by default as many as without a pipeline. `drafts`: tokens that are
    proposed at a time, of which `proposed` draws how many, and where the first wrong one is.
    `scheduling`: more of vLLM's scheduler options.
    """

    def __init__(
        self,
        model: Path,
        *,
        pages: int = 40,
        budget: str = "256",
        asynchronous: bool = False,
        depth: int | None = None,
        drafts: int = 0,
        chunk: int = 64,
        max_tokens: int = 100,
        max_seqs: int = 6,
        caching: bool = True,
        scheduling: dict[str, Any] | None = None,
        knobs: dict[str, Any] | None = None,
        memory: type[Memory] = Memory,
    ) -> None:
        self.settings = Settings.from_source(
            {"budget_floor": 128, **(knobs or {})},
            policy="random",
            budget=budget,
            check_integrity=True,
        )
        options = {"max_num_seqs": max_seqs, "max_num_batched_tokens": chunk, **(scheduling or {})}
        self.config = _config(model, self.settings, options, asynchronous, caching, drafts)
        spec = EvictionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=2, dtype=torch.float32)
        kv = KVCacheConfig(
            num_blocks=pages,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([str(i) for i in range(LAYERS)], spec)],
        )
        self.config.cache_config.num_gpu_blocks = pages
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        kind = AsyncEvictionScheduler if asynchronous else EvictionScheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.depth = depth or (2 if asynchronous else 1)
        self.drafts, self.proposed = drafts, random.Random(0)
        self.memory = memory(pages, max_seqs, self.settings, self.depth, drafts)
        pool = self.scheduler.pages.block_pool
        self.memory.hashed = lambda: {
            b.block_id for b in pool.blocks if b.block_hash is not None or b.ref_cnt > 1
        }
        self.mirror = self.scheduler.kv_event_publisher = Mirror()
        self.in_flight: deque[Any] = deque()
        if asynchronous and self.depth > 2:  # a pipeline, which takes the V2 runner
            self.scheduler.use_v2_model_runner = True
            self.scheduler.decode_stagger = self.depth - 1
        self.max_tokens = max_tokens
        self.finished: dict[str, dict[str, Any]] = {}
        self.preemptions = 0
        self.requests: dict[str, Request] = {}
        self._ids = itertools.count()

    def add(
        self,
        prompt: list[int],
        max_tokens: int | None = None,
        checked: bool = True,
        stops: list[int] | None = None,
        priority: int = 0,
        session: str | None = None,
        prompt_logprobs: int | None = None,
        min_tokens: int = 0,
        **directive: str,
    ) -> str:
        """Send a request in; `checked` as the front end does, or past it.

        `stops`: tokens that end it. `session`: the id of one that this opens, or is a turn of.
        """
        number = next(self._ids)
        request_id = session or f"r{number}"
        params = SamplingParams(
            max_tokens=max_tokens or self.max_tokens,
            min_tokens=min_tokens,
            ignore_eos=True,
            stop_token_ids=stops,
            prompt_logprobs=prompt_logprobs,
            extra_args=directive or None,
        )
        params.update_from_generation_config({}, 1)
        arriving = SimpleNamespace(
            sampling_params=params,
            prompt_token_ids=prompt,
            prompt_embeds=None,
            mm_features=None,
            resumable=session is not None,
        )
        if checked:
            fit(arriving, self.settings, self.config)
        params = over_the_wire(params)
        request = Request(
            request_id,
            prompt,
            params,
            None,
            arrival_time=float(number),
            priority=priority,
            block_hasher=self.hasher,
            resumable=session is not None,
        )
        if request_id not in self.scheduler.requests:
            self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, meanwhile: Callable[[Any], None] | None = None) -> bool:
        """Schedule and execute one step; process the oldest output when the pipeline is full.

        `meanwhile` gets the step while it is in flight.
        """
        busy = self.scheduler.has_requests()
        if busy:
            output = self.scheduler.schedule()
            for request_id in output.num_scheduled_tokens:  # those of replays are nobody's
                self.requests.setdefault(request_id, self.scheduler.requests[request_id])
            self.memory.execute(output, self.requests)
            self.memory.sequences.check_integrity()
            self.in_flight.append(output)
            if meanwhile:
                meanwhile(output)
        while self.in_flight and (len(self.in_flight) >= self.depth or not busy):
            self._process(self.in_flight.popleft())
        self.scheduler.pages.check_integrity()
        self.mirror.follow(self.scheduler.kv_cache_manager.take_events())
        self.mirror.check(self.scheduler.pages.block_pool, self.memory.cache)
        return busy or bool(self.in_flight)

    def _process(self, output: Any) -> None:
        starts = _starts(output)
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            end = starts[request_id] + output.num_scheduled_tokens[request_id]
            known = len(self.requests[request_id].prompt_token_ids or [])
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            done = end >= max(known, self.requests[request_id].num_tokens)
            said = [answer(request_id, end - len(drafts))] if done else []
            for draft in drafts:
                if draft != said[-1]:
                    self.memory.seen["padded" if draft == -1 else "draft rejected"] += 1
                    break
                self.memory.seen["draft accepted"] += 1
                said.append(answer(request_id, end - len(drafts) + len(said)))
            sampled.append(said)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                # A turn of a session ends without a record.
                if one.finish_reason is not None and one.kv_transfer_params:
                    told = one.kv_transfer_params["kv_eviction"]
                    self.finished[one.request_id] = told
        if self.drafts:
            self.scheduler.update_draft_token_ids(self._propose(ids))

    def _propose(self, ids: list[str]) -> DraftTokenIds:
        """Drafts for these requests: right ones, then perhaps wrong ones."""
        drafts = []
        for request_id in ids:
            start, length = (
                self.requests[request_id].num_tokens,
                self.proposed.randint(0, self.drafts),
            )
            right = self.proposed.randint(0, self.drafts)
            said = [answer(request_id, start + index) for index in range(length)]
            drafts.append([token + (index >= right) for index, token in enumerate(said)])
        return DraftTokenIds(ids, drafts)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"still busy after {limit} steps")

    @property
    def free_pages(self) -> int:
        return self.scheduler.pages.block_pool.get_num_free_blocks()


def _starts(output: Any) -> dict[str, int]:
    """Where each request of a step goes on."""
    cached = output.scheduled_cached_reqs
    starts = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _config(
    model: Path,
    settings: Settings,
    scheduling: dict[str, Any],
    asynchronous: bool,
    caching: bool,
    drafts: int,
) -> VllmConfig:
    os.environ["HF_HUB_OFFLINE"] = "1"
    model_config = ModelConfig(
        model=str(model), tokenizer=str(model), dtype="float32", max_model_len=LONGEST, seed=0
    )
    speculation = drafts and SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=2,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
    )
    config = VllmConfig(
        model_config=model_config,
        speculative_config=speculation or None,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            **scheduling,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=caching, publisher="null"),
        additional_config={CONFIG_KEY: settings.to_json()},
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config
