"""A request waits for its prompt's replay, which costs what it says and leaves only its scores."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.engine import compat
from nexus_vllm.policies.kvzip import KVzip
from nexus_vllm.replay import OVERLAP

from .simulation import BLOCK, PIPELINES, Simulation

KVZIP = {"kv_policy": "kvzip", "kv_budget": "160", "kv_prefill": "oneshot"}
PIECE = 100


@pytest.fixture(params=PIPELINES, ids=str)
def sim(request: pytest.FixtureRequest, model_path: Path) -> Simulation:
    asynchronous, depth = request.param
    return Simulation(
        model_path,
        pages=40,
        asynchronous=asynchronous,
        depth=depth,
        knobs={"parameters": {"kvzip": {"piece": PIECE}}},
    )


def text(tokens: int, first: int = 0) -> list[int]:
    return [(first + i) % 977 for i in range(tokens)]


def pieces(sim: Simulation) -> list[str]:
    return [i for i in sim.scheduler.requests if sim.scheduler.replays.piece(i)]


def nothing_is_left(sim: Simulation, kept: int = 0) -> bool:
    """But for the scores of so many replays that are kept."""
    sim.add([1, 2, 3], max_tokens=2)  # for the worker to hear of the last end
    sim.run()
    replays, worker = sim.scheduler.replays, sim.memory.replays
    known = (replays._by_member, replays._by_piece, replays.forgotten)
    pages = sim.scheduler.pages
    assert not any([*known, worker.pieces, pages.published, sim.scheduler.ledgers])
    assert sim.free_pages == pages.block_pool.num_gpu_blocks - 1
    names = {replay.name for replay in replays._by_key.values()}
    assert names == worker.scores.keys()
    return len(names) == kept


def ask(sim: Simulation, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Ask alone, to the end; returns the record."""
    request = sim.add(prompt, **{**KVZIP, **more})
    sim.run()
    return sim.finished[request]


def run(sim: Simulation) -> int:
    """To the end; returns how many tokens of pieces were computed on the way."""
    computed: list[int] = []

    def count(output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        computed.extend(scheduled[i] for i in scheduled if sim.scheduler.replays.piece(i))

    while sim.step(count):
        pass
    return sum(computed)


def test_a_request_waits_until_its_prompt_has_been_replayed(sim: Simulation) -> None:
    """Piece by piece, one at a time; somebody else does not wait."""
    request = sim.add(text(330), **KVZIP)
    other = sim.add(text(40, 500), max_tokens=5)
    seen: list[str] = []
    while request not in sim.memory.rows:
        assert len(pieces(sim)) <= 1
        seen += [piece for piece in pieces(sim) if piece not in seen]
        assert sim.step()
    replay = sim.scheduler.replays.of(request)
    assert replay is not None
    assert seen == [f"{replay.name}/{i}" for i in range(4)]
    assert other in sim.finished
    assert run(sim) == 0
    assert sim.finished[request]["eviction_steps"] > 0
    tokenizer = sim.scheduler.replays.tokenizer
    assert tokenizer is not None
    instruction = len(tokenizer.encode(KVzip().instruction, add_special_tokens=False))
    repeated = 330 + 3 * OVERLAP
    computed = 330 + 3 * (330 % BLOCK)  # all pieces but the first find whole blocks
    total = computed + 4 * instruction + repeated
    assert sim.finished[request]["replay_tokens"] == total
    assert nothing_is_left(sim, kept=1)


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_an_abort_takes_the_replay_along(sim: Simulation, steps: int) -> None:
    request = sim.add(text(330), **KVZIP)
    for _ in range(steps):
        sim.step()
    done = not sim.scheduler.replays.waits(request)
    sim.abort(request)
    assert not pieces(sim)
    sim.run()
    assert nothing_is_left(sim, kept=int(done))


def test_who_asks_alike_shares(sim: Simulation) -> None:
    """The replay goes on until the last one has ended, also if the first one leaves early."""
    ids = [sim.add(text(200), **KVZIP) for _ in range(3)]
    other = sim.add(text(200, 1), **KVZIP)
    sim.step()
    assert len(pieces(sim)) == 2
    sim.abort(ids[0])
    assert len(pieces(sim)) == 2
    computed = sum(replay.tokens for replay in sim.scheduler.replays._by_key.values()) + run(sim)
    first, second, alone = (sim.finished[i]["replay_tokens"] for i in (*ids[1:], other))
    assert first == second
    assert first + alone == computed
    assert nothing_is_left(sim, kept=2)


def test_a_preempted_piece_starts_again(sim: Simulation) -> None:
    request = sim.add(text(330), **KVZIP)
    for victim in (3, 4, 9):
        for _ in range(victim):
            sim.step()
        running = sim.scheduler.running
        if running:
            sim.scheduler._preempt_request(running.pop(), 0.0)
    sim.run()
    assert sim.finished[request]["eviction_steps"] > 0
    assert nothing_is_left(sim, kept=1)


def test_what_is_repeated_is_neither_published_nor_found(sim: Simulation) -> None:
    """Else the next replay of the same prompt would have nothing to look at."""
    sim.scheduler.replays.kept = 0
    for _ in range(2):
        request = sim.add(text(330), **KVZIP)
        computed = run(sim)
        assert sim.finished[request]["replay_tokens"] == computed
        assert computed > 330
    whole = 330 // BLOCK
    assert len(sim.mirror.hashes) <= whole + 1
    assert nothing_is_left(sim)


def test_who_asks_again_waits_for_nothing(sim: Simulation) -> None:
    """With another budget, seed and allocator, and is evicted by the very same scores."""
    assert ask(sim, text(330))["replay_tokens"] > 330
    (scores,) = sim.memory.replays.scores.values()
    before = scores.clone()
    for more in ({}, {"kv_budget": "224"}, {"kv_seed": "7"}, {"kv_allocator": "per-head"}):
        request = sim.add(text(330), **{**KVZIP, **more})
        assert not sim.scheduler.replays.waits(request)
        assert run(sim) == 0
        told = sim.finished[request]
        assert told["replay_tokens"] == 0
        assert told["eviction_steps"] > 0
    (scores,) = sim.memory.replays.scores.values()
    assert scores.equal(before)
    assert nothing_is_left(sim, kept=1)


def test_who_comes_after_the_end_pays_nothing_and_who_waited_does(sim: Simulation) -> None:
    first = sim.add(text(330), **KVZIP)
    while sim.scheduler.replays.waits(first):
        sim.step()
    second = sim.add(text(330), **KVZIP)
    sim.run()
    assert sim.finished[first]["replay_tokens"] > 330
    assert sim.finished[second]["replay_tokens"] == 0
    assert nothing_is_left(sim, kept=1)


def test_another_prompt_is_replayed_anew(sim: Simulation) -> None:
    """Also one that begins alike, or is the beginning: the attention to it is another."""
    ask(sim, text(330))
    for other in (text(331), text(329), text(330, 1)):
        assert ask(sim, other)["replay_tokens"] > 329
    assert nothing_is_left(sim, kept=4)


def test_the_same_request_id_again_is_another_request(sim: Simulation) -> None:
    """A client may name two requests alike, one after the other."""
    sim._ids = itertools.repeat(1)
    for prompt in (text(330), text(360, 500)):
        told = ask(sim, prompt)
        assert told["eviction_steps"] > 0
        assert told["replay_tokens"] > len(prompt)
    assert ask(sim, text(330))["replay_tokens"] == 0
    sim._ids = itertools.count(2)
    assert nothing_is_left(sim, kept=2)


def test_the_one_not_needed_for_longest_makes_room(sim: Simulation) -> None:
    sim.scheduler.replays.kept = 2
    a, b, c = (text(200, first) for first in (0, 300, 600))
    assert all(ask(sim, prompt)["replay_tokens"] for prompt in (a, b))
    assert ask(sim, a)["replay_tokens"] == 0
    assert ask(sim, c)["replay_tokens"] > 200  # b makes room
    assert nothing_is_left(sim, kept=2)
    assert ask(sim, a)["replay_tokens"] == 0
    assert ask(sim, b)["replay_tokens"] > 200
    assert nothing_is_left(sim, kept=2)


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_of_the_prefix_cache_forgets_what_is_kept(sim: Simulation, running: bool) -> None:
    """Those who are there go on; nobody who comes later joins them."""
    ask(sim, text(330))
    assert nothing_is_left(sim, kept=1)
    there = []
    if running:
        there = [sim.add(text(200), **KVZIP), sim.add(text(330), **KVZIP)]
        sim.step()
        sim.step()
        # vLLM would deliver what is in flight for requests that it has preempted.
        while sim.in_flight:
            sim._process(sim.in_flight.popleft())
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    later = [sim.add(text(tokens), **KVZIP) for tokens in (200, 330)]
    sim.run()
    assert all(sim.finished[i]["replay_tokens"] >= 330 for i in later[1:])
    assert all(sim.finished[i]["eviction_steps"] for i in (*there, *later))
    assert nothing_is_left(sim, kept=2)


def test_a_piece_that_breaks_off_leaves_no_scores(sim: Simulation) -> None:
    """Nobody but vLLM itself could end one; then the eviction has nothing to go by, and says so."""
    request = sim.add(text(330), **KVZIP)
    sim.step()
    (piece,) = pieces(sim)
    sim.abort(piece)
    with pytest.raises(ValueError, match="needs the prompt's replay; there was none"):
        sim.run()
    assert sim.scheduler.replays.scores(request) is None
    sim.abort(request)
    assert not sim.scheduler.replays._by_key


def test_the_plan_tells_the_worker_when_to_forget(sim: Simulation) -> None:
    told: list[Any] = []
    sim.scheduler.replays.kept = 1
    for prompt in (text(200), text(200, 300), text(10)):
        sim.add(prompt, **KVZIP)
        while sim.step(lambda output: told.append(compat.plan_of(output))):
            pass
    used = list(dict.fromkeys(e.replay for plan in told for e in plan.evictions))
    assert len(used) == 2
    assert [plan.forgotten for plan in told if plan.forgotten] == [used[:1]]
