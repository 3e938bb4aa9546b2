"""A request waits for its prompt's replay, which costs what it says and leaves nothing behind."""

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


def nothing_is_left(sim: Simulation) -> bool:
    sim.add([1, 2, 3], max_tokens=2)  # for the worker to hear of the last end
    sim.run()
    replays, worker = sim.scheduler.replays, sim.memory.replays
    known = (replays._by_key, replays._by_member, replays._by_piece, replays.forgotten)
    pages = sim.scheduler.pages
    left = [*known, worker.pieces, worker.scores, pages.published, sim.scheduler.ledgers]
    return not any(left) and sim.free_pages == pages.block_pool.num_gpu_blocks - 1


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
    assert seen == [f"{request}/replay/{i}" for i in range(4)]
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
    assert nothing_is_left(sim)


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_an_abort_takes_the_replay_along(sim: Simulation, steps: int) -> None:
    request = sim.add(text(330), **KVZIP)
    for _ in range(steps):
        sim.step()
    sim.abort(request)
    assert not pieces(sim)
    sim.run()
    assert nothing_is_left(sim)


def test_who_asks_alike_shares(sim: Simulation) -> None:
    """The replay is there until the last one has ended, also if the first one leaves early."""
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
    assert nothing_is_left(sim)


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
    assert nothing_is_left(sim)


def test_what_is_repeated_is_neither_published_nor_found(sim: Simulation) -> None:
    """Else the next replay of the same prompt would have nothing to look at."""
    for _ in range(2):
        request = sim.add(text(330), **KVZIP)
        computed = run(sim)
        assert sim.finished[request]["replay_tokens"] == computed
        assert computed > 330
    whole = 330 // BLOCK
    assert len(sim.mirror.hashes) <= whole + 1
    assert nothing_is_left(sim)


def test_a_piece_that_breaks_off_leaves_no_scores(sim: Simulation) -> None:
    """Nobody but vLLM itself could end one; then the eviction has nothing to go by, and says so."""
    request = sim.add(text(330), **KVZIP)
    sim.step()
    (piece,) = pieces(sim)
    sim.abort(piece)
    with pytest.raises(ValueError, match="needs the prompt's replay; there was none"):
        sim.run()
    assert sim.scheduler.replays.scores(request) is None


def test_the_plan_tells_the_worker_when_to_forget(sim: Simulation) -> None:
    told: list[Any] = []
    request = sim.add(text(200), **KVZIP)
    while sim.step(lambda output: told.append(compat.plan_of(output))):
        pass
    sim.add(text(10), max_tokens=2)
    while sim.step(lambda output: told.append(compat.plan_of(output))):
        pass
    assert [plan.forgotten for plan in told if plan.forgotten] == [[request]]
    assert {e.replay for plan in told for e in plan.evictions} == {request}
