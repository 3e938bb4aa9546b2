"""Everything that can happen to requests, at random, on vLLM's real scheduler and small pools.

Requests of all kinds arrive, alone or as siblings that share a prompt, stop, are aborted wherever
they are and preempted; sessions take turns; the engine is paused and its prefix cache reset. Every
step checks what simulation.py can check: rows, references, contents, and that the KV events tell
what is cached. No two worlds, of so many events each, are alike.

NEXUS_EVENTS (default 3,000; fewer may not meet every case, which fails) and NEXUS_SEED (default 0)
choose the run. A failure names seed and event.
"""

import itertools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from nexus_vllm import allocators, policies
from nexus_vllm.engine import compat

from .simulation import BLOCK, LONGEST, PIPELINES, Simulation, answer

EVENTS = int(os.environ.get("NEXUS_EVENTS", "3000"))
SEED = int(os.environ.get("NEXUS_SEED", "0"))
EVENTS_PER_WORLD = max(150, EVENTS // 2500)  # a world's end costs a thousand steps
MOST_REQUESTS = 8
LONGEST_SESSION = 1500
MOST_KEPT = 2

EXPECTED = {
    *(f"pipeline {how}" for how in PIPELINES),
    *(f"trigger {how}" for how in ("budget", "pressure")),
    *(f"policy {how}" for how in ("fcfs", "priority")),
    "refused",
    "siblings",
    "turn",
    "turn before the last one ended",
    "session closed",
    "aborted in the queue",
    "aborted in its prompt",
    "aborted after its prompt",
    "aborted while it is evicted",
    "preempted",
    "cache reset under running requests",
    "paused",
    "ended by a stop token",
    "ended by its length",
    "prefix hit",
    "replay cut short",
    "replay found again",
    "replay made room",
    "kept replays reset",
    "draft accepted",
    "draft rejected",
    "copied out",
    "in place",
    "private pages",
    "uneven",
    *(f"evicted by {name}" for name in ("other", *policies.names())),
    *(f"allocated by {name}" for name in allocators.names()),
}


class World:
    """A scheduler over a small pool, and what happens there."""

    def __init__(
        self, model: Path, draw: random.Random, seen: Counter[str], pipeline: tuple[bool, int]
    ) -> None:
        self.draw, self.seen = draw, seen
        asynchronous, depth = pipeline
        self.pages = draw.choice([draw.randint(4, 12), draw.randint(13, 40), draw.randint(41, 64)])
        # In some worlds everybody asks the same few prompts to be replayed.
        self.replaying = draw.random() < 0.3
        if self.replaying:
            self.pages = draw.randint(41, 64)
        # Drafts are refused where a step is planned before the last one's results are known.
        self.drafts = 0 if asynchronous or depth > 1 else draw.choice([0, 1, 3, 7, 40])
        # vLLM pads the last token of a prompt with drafts; a step without room for them hangs it.
        chunks = [tokens for tokens in (32, 64, 200, 2048) if tokens > self.drafts]
        trigger, policy = draw.choice(["budget", "pressure"]), draw.choice(["fcfs", "priority"])
        high = draw.choice([0.5, 0.9, 1.0])
        sink, recency = draw.randint(0, 1), draw.randint(1, 2)
        floor = (sink + recency + draw.randint(1, 2)) * BLOCK
        self.sim = Simulation(
            model,
            pages=self.pages,
            budget=draw.choice(["full", "20%", str(floor)]),
            asynchronous=asynchronous,
            depth=depth,
            drafts=self.drafts,
            chunk=draw.choice(chunks),
            max_seqs=draw.randint(2, 6),
            caching=self.replaying or draw.random() < 0.9,
            scheduling={
                "policy": policy,
                "long_prefill_token_threshold": draw.choice([0, 0, 45, 100]),
            },
            knobs={
                "trigger": trigger,
                "high_water": high,
                "low_water": high * draw.random(),
                "sink_blocks": sink,
                "recency_blocks": recency,
                "budget_floor": floor,
                "window": draw.choice([1, 16, 40]),
                "profile": "simulation.PROFILE",
                "interval": draw.choice([32, 64, 160]),
                "chunk": draw.choice([32, 96, 512]),
                "variants": {
                    "other": {
                        "policy": draw.choice(policies.names()),
                        "sink_blocks": 0,
                        "recency_blocks": 1,
                        "window": draw.choice([1, 16, 40]),
                        "interval": draw.choice([32, 64, 160]),
                        "chunk": draw.choice([32, 96, 512]),
                    }
                },
            },
        )
        self.sim.memory.seen = seen
        self.scheduler = self.sim.scheduler
        self.scheduler.replays.kept = draw.randint(1, MOST_KEPT)
        self.kept: set[str] = set()
        self.documents = [self.tokens(1900) for _ in range(2)]
        self.aborted: set[str] = set()
        self.sessions: set[str] = set()
        self.ended: set[str] = set()
        for kind in (f"pipeline {(asynchronous, depth)}", f"trigger {trigger}", f"policy {policy}"):
            seen[kind] += 1

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(1000) for _ in range(count)]

    def happen(self) -> None:
        """Something happens, or nothing, and one step is made."""
        draw = self.draw
        if len(self.scheduler.requests) < MOST_REQUESTS and draw.random() < 0.3:
            self.arrive()
        for session in sorted(self.sessions):
            if draw.random() < 0.2:
                self.take_turn(session)
        clients = [i for i in self.scheduler.requests if self.scheduler.replays.piece(i) is None]
        if clients and draw.random() < 0.04:
            self.abort(draw.choice(clients))
        waiting = [i for i in self.scheduler.requests if self.scheduler.replays.waits(i)]
        if waiting and draw.random() < 0.04:
            self.abort(draw.choice(waiting))
        if draw.random() < 0.02:
            self.preempt()
        if draw.random() < 0.02:
            self.reset()
        if draw.random() < 0.03:
            self.pause(draw.choice(list(PauseState)))
        elif draw.random() < 0.3:
            self.pause(PauseState.UNPAUSED)
        self.sim.step(self.abort_evicted if draw.random() < 0.1 else None)
        self.check()

    def arrive(self) -> None:
        """One request, a session, or siblings that share a prompt."""
        draw, most = self.draw, min(1900, self.pages * BLOCK * 2)
        shared = draw.choice(self.documents)[: draw.choice([0, draw.randrange(most)])]
        prompt = shared + self.tokens(draw.randint(1, draw.choice([10, 100, most])))
        if draw.random() < 0.15:  # of which all but a token may be found in the cache
            prompt = self.documents[0][: draw.randrange(1, most, BLOCK)]
        wanted: dict[str, Any] = {
            "max_tokens": draw.choice([1, draw.randint(2, 90), 300]),
            "priority": draw.randrange(3),
            "kv_budget": draw.choice(["full", "160", "192", "256", "20%", "70%"]),
            "kv_prefill": draw.choice(["auto", "oneshot", "streaming"]),
            # Replays have more ways to go than other policies.
            "kv_policy": draw.choice(
                ["random", "other", *policies.names(), *["kvzip"] * 2, "none"]
            ),
            "kv_allocator": draw.choice(["uniform", *allocators.names()]),
        }
        if draw.random() < 0.3:
            wanted["stops"] = draw.sample(range(1000, 2000), 60)
        if not self.drafts and draw.random() < 0.35:
            # Short turns, and below few early ones: else the next is there before one ends.
            wanted |= {"session": f"s{len(self.sim.requests)}", "max_tokens": draw.randint(1, 60)}
        if self.replaying:
            wanted |= {
                "kv_policy": "kvzip",
                "kv_budget": draw.choice(["160", "192"]),
                "max_tokens": draw.randint(1, 40),
            }
            wanted.pop("session", None)
            prompt = draw.choice(self.documents)[: draw.choice([200, 300, 400])]
        siblings = 1 if "session" in wanted or draw.random() < 0.8 else draw.randint(2, 4)
        idle = len(self.scheduler.replays.idle())
        try:
            ids = [self.sim.add(prompt[:most], **wanted) for _ in range(siblings)]
        except VLLMValidationError:
            self.seen["refused"] += 1
            return
        if "session" in wanted:
            self.sessions.update(ids)
        self.seen["siblings"] += siblings > 1
        self.seen["replay found again"] += len(self.scheduler.replays.idle()) < idle

    def take_turn(self, session: str) -> None:
        """Its next input, perhaps while the last is being answered; or the word that it is over."""
        draw, request = self.draw, self.scheduler.requests.get(session)
        if request is None:
            self.sessions.discard(session)
            return
        waits = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        if not waits and (request.streaming_queue or draw.random() < 0.95):
            return
        if request.num_tokens + request.max_tokens > LONGEST_SESSION or draw.random() < 0.3:
            over = Request(session, [1], request.sampling_params, None, resumable=False)
            self.scheduler.add_request(over)
            self.seen["session closed"] += 1
            return
        self.sim.add(
            self.tokens(draw.choice([1, draw.randint(1, 100), 300])),
            max_tokens=draw.randint(1, 60),
            checked=False,
            stops=draw.choice([None, draw.sample(range(1000, 2000), 100)]),
            session=session,
        )
        self.seen["turn" if waits else "turn before the last one ended"] += 1

    def abort(self, request_id: str) -> None:
        request = self.scheduler.requests[request_id]
        if not self.scheduler.pages.held_blocks(request_id):
            self.seen["aborted in the queue"] += 1
        elif request.num_computed_tokens < request.num_prompt_tokens:
            self.seen["aborted in its prompt"] += 1
        else:
            self.seen["aborted after its prompt"] += 1
        self.sim.abort(request_id)
        self.aborted.add(request_id)

    def abort_evicted(self, output: Any) -> None:
        """Abort, between a step and its results, who is shrunk in it."""
        for eviction in compat.plan_of(output).evictions[:1]:
            self.abort(eviction.request_id)
            self.seen["aborted while it is evicted"] += 1

    def preempt(self) -> None:
        if running := self.scheduler.running:
            request = running.pop(self.draw.randrange(len(running)))
            self.scheduler._preempt_request(request, 0.0)

    def reset(self) -> None:
        """Preempts all that run; vLLM raises if a waiting session holds pages."""
        if any(map(self.scheduler._holds_kv_blocks, self.scheduler.kv_holding_waiting)):
            return
        self.seen["cache reset under running requests"] += bool(self.scheduler.running)
        self.seen["kept replays reset"] += bool(self.scheduler.replays.idle())
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert not self.scheduler.replays.idle()
        self.kept = set()

    def pause(self, state: PauseState) -> None:
        self.seen["paused"] += state != PauseState.UNPAUSED
        self.scheduler.set_pause_state(state)

    def check(self) -> None:
        """Whoever has ended said just what it should, and is gone, but for a few replays."""
        self.check_replays()
        for request_id in self.sim.requests.keys() - self.scheduler.requests.keys() - self.ended:
            self.ended.add(request_id)
            request = self.sim.requests[request_id]
            self.seen["preempted"] += request.num_preemptions > 0
            assert request_id not in self.scheduler.ledgers
            assert request_id not in self.scheduler.pages.holds
            assert request_id not in self.scheduler.pages.published
            if request.status == RequestStatus.FINISHED_ABORTED and request_id.startswith(
                "replay-"
            ):
                self.seen["replay cut short"] += 1
                continue
            start = request.num_prompt_tokens
            said = list(request.all_token_ids)[start:]
            assert said == [answer(request_id, start + i) for i in range(len(said))]
            if request.resumable or request_id in self.aborted:
                continue
            if request.status == RequestStatus.FINISHED_STOPPED:
                assert said[-1] == request.stop_reason
                self.seen["ended by a stop token"] += 1
            else:
                assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
                assert len(said) == min(request.max_tokens, LONGEST - start)
                self.seen["ended by its length"] += 1

    def check_replays(self) -> None:
        """No more are kept than may be, and the worker has the scores of those and no others."""
        replays, scores = self.scheduler.replays, self.sim.memory.replays.scores
        kept = {replay.name for replay in replays.idle()}
        needed = {replay.name for replay in replays._by_member.values()}
        assert len(kept) <= replays.kept
        assert kept <= scores.keys() <= kept | needed | set(replays.forgotten)
        self.seen["replay made room"] += bool(self.kept - kept - needed)
        self.kept = kept

    def close(self) -> None:
        """Sessions end; all others get to their end, and every page comes back."""
        self.pause(PauseState.UNPAUSED)
        for request_id in sorted(self.sessions & self.scheduler.requests.keys()):
            self.abort(request_id)
        self.sim.run(limit=20_000)
        self.check()
        assert self.ended == self.sim.requests.keys()
        assert self.sim.free_pages == self.pages - 1
        assert not self.scheduler.ledgers
        assert not self.scheduler.pages.holds
        assert not self.sim.memory.rows
        assert not self.sim.memory.sequences.by_id
        assert not self.scheduler.replays.at_work()
        assert not self.scheduler.replays._by_member
        assert not self.sim.memory.replays.pieces
        assert self.scheduler.reset_prefix_cache()
        assert not self.scheduler.replays._by_key
        self.sim.step()  # the KV events tell that, too


def live(model: Path, seed: int, events: int) -> Counter[str]:
    """So many events, in one world after the other; returns how often what happened.

    Raises AssertionError that says how to see the same failure again.
    """
    seen: Counter[str] = Counter()
    # By turns, or a short run of few worlds misses one now and then.
    worlds = zip(range(0, events, EVENTS_PER_WORLD), itertools.cycle(PIPELINES), strict=False)
    for first, pipeline in worlds:
        world = World(model, random.Random(f"{seed}/{first}"), seen, pipeline)
        end = min(events, first + EVENTS_PER_WORLD)
        for event in range(first, end + 1):
            try:
                if event < end:
                    world.happen()
                else:
                    world.close()
            except Exception as error:
                what = (str(error).splitlines() or [""])[0]
                raise AssertionError(
                    f"seed {seed}, event {event}: {type(error).__name__}: {what}; "
                    f"again with NEXUS_SEED={seed} NEXUS_EVENTS={events}"
                ) from error
    return seen


def test_whatever_happens_pages_rows_and_contents_are_right(model_path: Path) -> None:
    seen = live(model_path, SEED, EVENTS)
    never = sorted(kind for kind in EXPECTED if not seen[kind])
    assert not never, f"seed {SEED}, {EVENTS} events: never met {never}"
