"""Invariants I2-I6 and I8 on vLLM's real scheduler, with a memory that knows what it holds.

Every step of every simulation checks that attention would read exactly the blocks it should (I5),
that fills write only the pages they were given, private and unpublished (I3), that rows and
reference counts add up (I4), and that a prefix hit never serves KV computed after an eviction (I6).
"""

import random
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from nexus_vllm.engine.stats import STATS_KEY

from .simulation import BLOCK, Simulation, answer

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 10_000 + i).randrange(1000) for i in range(length)]


@BOTH
def test_i2_after_evictions_exactly_the_budget_and_the_tail_is_held(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Simulation(model_path, asynchronous=asynchronous)
    request_id = sim.add(prompt(500), max_tokens=90)
    while request_id not in sim.finished:
        sim.step()
        hold = sim.scheduler.pages.holds.get(request_id)
        if hold and hold.released:
            held = sim.scheduler.pages.held_blocks(request_id)
            assert 256 // BLOCK <= held <= 256 // BLOCK + 1
    told = sim.finished[request_id]
    # 15 full blocks at the prompt's end, then one more at 512, 544 and 576 tokens of 590.
    assert told["eviction_steps"] == 4
    assert told["evicted_blocks"] == 15 - 8 + 3
    assert told["peak_blocks"] == 16
    assert told["final_blocks"] == 9
    assert told["moved_blocks"] == 0  # reported by the worker, which is not here


@BOTH
def test_i1_a_budget_that_covers_everything_evicts_nothing_and_records_nothing(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Simulation(model_path, asynchronous=asynchronous)
    ids = [sim.add(prompt(200), kv_budget="full"), sim.add(prompt(200), kv_policy="none")]
    ids.append(sim.add(prompt(200), kv_budget="1024"))
    sim.step()
    assert sim.memory.sequences.by_id == {}
    sim.run()
    for request_id in ids:
        assert sim.finished[request_id]["evicted_blocks"] == 0


def test_i4_live_blocks_are_those_of_all_sequences(model_path: Path) -> None:
    """Also of those that keep everything, or end before they are evicted."""
    sim = Simulation(model_path)
    for seed, budget in enumerate(("full", "128", "1024")):
        sim.add(prompt(300, seed), max_tokens=100, kv_budget=budget)
    while len(sim.finished) < 3:
        sim.step()
        stats = sim.scheduler.make_stats()
        held = sim.scheduler.pages.block_pool.num_gpu_blocks - 1 - sim.free_pages
        assert stats.kv_connector_stats[STATS_KEY]["live_blocks"] == held  # none is shared


def as_sets(history: list[tuple[int, list[list[int]]]]) -> list[tuple[int, list[list[int]]]]:
    """Where a kept block lies depends on the pool; which blocks are kept must not."""
    return [(computed, [sorted(row) for row in rows]) for computed, rows in history]


def test_i8_kept_sets_depend_on_the_request_alone(model_path: Path) -> None:
    """Alone, in a crowd, asynchronously, with other chunks, preempted, from the prefix cache."""

    def kept(sim: Simulation, request_id: str) -> list[tuple[int, list[list[int]]]]:
        while request_id not in sim.finished:
            sim.step()
        history = sim.memory.history[request_id]
        sim.run()
        return as_sets(history)

    def alone(**options: bool | int) -> list[tuple[int, list[list[int]]]]:
        sim = Simulation(model_path, **options)  # type: ignore[arg-type]
        return kept(sim, sim.add(prompt(500), kv_seed="7"))

    expected = alone()
    assert len(expected) == 4
    assert alone(asynchronous=True) == expected
    assert alone(chunk=200) == expected
    assert alone(caching=False) == expected

    crowd = Simulation(model_path, pages=48)
    first = crowd.add(prompt(500), kv_seed="7")
    for seed in range(1, 5):
        crowd.add(prompt(300 + 40 * seed, seed), max_tokens=60)
    last = crowd.add(prompt(500), kv_seed="7")
    assert kept(crowd, first) == expected
    assert as_sets(crowd.memory.history[last]) == expected

    sim = Simulation(model_path)
    request_id = sim.add(prompt(500), kv_seed="7")
    for _ in range(40):
        sim.step()
    request = sim.scheduler.running.pop()
    assert sim.scheduler.pages.holds[request_id].released > 0
    sim.scheduler._preempt_request(request, 0.0)
    assert kept(sim, request_id) == expected, "the same evictions again after a preemption"


def test_a_malformed_directive_that_slipped_past_the_front_end_gets_the_default(
    model_path: Path,
) -> None:
    sim = Simulation(model_path)
    request_id = sim.add(prompt(500), checked=False, kv_budget="banana")
    sim.run()
    assert sim.finished[request_id]["budget_tokens"] == 256


def test_streaming_prefill_never_holds_more_than_budget_and_chunk(model_path: Path) -> None:
    sim = Simulation(model_path, pages=16, max_tokens=40, knobs={"chunk": 128})
    request_id = sim.add(prompt(1500), kv_prefill="auto", kv_budget="128")
    sim.run()
    told = sim.finished[request_id]
    assert told["prefill"] == "streaming"
    assert told["peak_blocks"] <= 15


def test_a_repeated_prompt_hits_the_cache_after_its_eviction(model_path: Path) -> None:
    """Copy out: with room in the pool, evicting withdraws no hash."""
    sim = Simulation(model_path, pages=64)
    sim.add(prompt(500))
    sim.run()
    again = sim.add(prompt(500))
    sim.step()
    # 500 tokens less the window of 16, whole blocks: 480.
    assert sim.requests[again].num_computed_tokens == 480 + 20


def test_prefix_hits_stop_short_of_the_window(model_path: Path) -> None:
    """The last W prompt tokens are computed, for their queries, although all blocks are cached."""
    sim = Simulation(model_path, pages=64)
    for expected in (0, 480):
        request_id = sim.add(prompt(520))
        sim.step()
        assert sim.memory.first[request_id] == expected
        sim.run()
    request_id = sim.add(prompt(520), kv_budget="full")
    sim.step()
    assert sim.memory.first[request_id] == 512, "only sequences that may be evicted are capped"


def test_an_eviction_whose_sequence_is_preempted_in_the_same_step_is_void(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(model_path)
    request_id = sim.add(prompt(500))
    hold = sim.scheduler.pages.holds[request_id]
    while sim.requests[request_id].num_computed_tokens < 500:
        sim.step()
    assert hold.released == 0
    with monkeypatch.context() as patched:
        patched.setattr(sim.scheduler.kv_cache_manager, "allocate_slots", lambda *a, **k: None)
        sim.step()  # evicts, then finds no page for the next token
    assert sim.requests[request_id].num_preemptions == 1
    sim.run()
    told = sim.finished[request_id]
    assert told["final_blocks"] == 9
    assert told["eviction_steps"] == len(sim.memory.history[request_id]), "only what was done"


@BOTH
def test_a_session_of_short_turns_is_held_to_its_budget(
    model_path: Path, asynchronous: bool
) -> None:
    """A turn that ends where an eviction is due leaves no running request to evict from."""
    sim = Simulation(model_path, asynchronous=asynchronous, budget="128")

    def turn(seed: int) -> Request:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        return Request("s", prompt(64, seed), params, None, block_hasher=sim.hasher, resumable=True)

    session = sim.requests["s"] = turn(0)
    sim.scheduler.add_request(session)
    for seed in range(1, 25):
        for _ in range(10):
            sim.step()
            if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                break
        else:
            raise AssertionError(f"turn {seed} hangs: the session holds the whole pool")
        assert sim.scheduler.pages.held_blocks("s") <= 4 + 2 + 1
        sim.scheduler.add_request(turn(seed))


def test_i8_a_token_computed_behind_the_end_of_a_turn_takes_no_window_query_away(
    model_path: Path,
) -> None:
    """Position 330 is in flight when its token turns out to end the turn; 330 - 16 is needed."""
    sim = Simulation(model_path, asynchronous=True, budget="128", knobs={"interval": 160})
    end = answer("s", 330)
    session = sim.add(prompt(300), max_tokens=60, stops=[end], session="s")
    while sim.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        sim.step()
    sim.add(prompt(8, 1), max_tokens=1, session=session, checked=False)
    sim.step()  # the memory compares the queries with their positions
    assert [computed for computed, _ in sim.memory.history[session]] == [300, 330]


@BOTH
@pytest.mark.parametrize(("budget", "max_tokens"), [("256", 1), ("480", 13)])
def test_nothing_is_evicted_for_a_sequence_that_computes_no_further_token(
    model_path: Path, asynchronous: bool, budget: str, max_tokens: int
) -> None:
    sim = Simulation(model_path, asynchronous=asynchronous, budget=budget)
    request_id = sim.add(prompt(500), max_tokens=max_tokens)
    sim.run()
    assert sim.finished[request_id]["eviction_steps"] == 0


@pytest.mark.parametrize("trigger", ["budget", "pressure"])
def test_nothing_to_schedule_stays_nothing(model_path: Path, trigger: str) -> None:
    """In a pipeline a token waits until it is known; every simulation's memory checks that."""
    for pages in (200, 17):
        sim = Simulation(model_path, pages=pages, depth=2, knobs={"trigger": trigger})
        for seed in range(3):
            sim.add(prompt(450, seed), max_tokens=40)
        running = 0
        while sim.step():
            for request in sim.scheduler.running:
                computed = request.num_computed_tokens
                assert sim.scheduler._reserve_prefill_lookahead(request, computed, 0) == 0
                running += 1
        assert running
        assert len(sim.finished) == 3


def test_i6_a_victim_publishes_nothing_of_the_step_that_preempted_it(model_path: Path) -> None:
    """Priority scheduling may preempt whom the same step has just scheduled, and published."""
    sim = Simulation(
        model_path,
        pages=22,
        chunk=512,
        scheduling={"policy": "priority", "long_prefill_token_threshold": 96},
    )
    victim = sim.add(prompt(544), max_tokens=6, priority=2, kv_budget="full")
    sim.add(prompt(30, 1), max_tokens=60, priority=2, kv_budget="full")
    sim.step()
    for seed, length in enumerate((29, 20, 33), 2):
        sim.add(prompt(length, seed), max_tokens=60, kv_budget="full")
        sim.step()
    while not sim.requests[victim].num_preemptions:
        assert victim not in sim.finished
        sim.step()  # the mirror finds what is published, but not computed
    sim.run()


def test_in_place_when_the_pool_is_empty(model_path: Path) -> None:
    """A prompt that fills the pool can still be shrunk: hashes are withdrawn, tail first."""
    sim = Simulation(model_path, pages=17, max_tokens=40)
    request_id = sim.add(prompt(500))
    sim.run()
    assert sim.finished[request_id]["evicted_blocks"] > 0
    again = sim.add(prompt(500))
    sim.step()
    assert sim.requests[again].num_computed_tokens > 0


def test_pages_shared_with_a_sequence_that_keeps_them_are_never_written(model_path: Path) -> None:
    sim = Simulation(model_path, pages=48, max_tokens=64)
    full = sim.add(prompt(500), kv_budget="full")
    while sim.requests[full].num_computed_tokens < 501:
        sim.step()
    evicted = sim.add(prompt(500))
    sim.run()  # check_window of `full` fails if one of its pages changed
    assert sim.finished[evicted]["evicted_blocks"] > 0


def test_drafts_change_neither_evictions_nor_what_is_kept(model_path: Path) -> None:
    """I2 and I8 under speculative decoding: rejected drafts are never part of an eviction."""
    told = []
    for drafts in (0, 3, 40):
        sim = Simulation(model_path, budget="160", drafts=drafts, knobs={"interval": 32})
        request_id = sim.add(prompt(500), max_tokens=200)
        while request_id not in sim.finished:
            sim.step()
            hold = sim.scheduler.pages.holds.get(request_id)
            if hold and hold.released:
                held = sim.scheduler.pages.held_blocks(request_id)
                assert 5 <= held <= 6, "the budget, and the page that is being filled"
        told.append((sim.finished[request_id], as_sets(sim.memory.history[request_id])))
        if drafts:
            assert sim.memory.seen["draft accepted"]
            assert sim.memory.seen["draft rejected"]
    assert told[0] == told[1] == told[2]
    assert told[0][0]["eviction_steps"] > 5


def test_a_last_token_that_vllm_pads_with_drafts_is_not_cut_short(model_path: Path) -> None:
    """Of a prompt in the cache all but a token is found, and an eviction is due just behind it."""
    sim = Simulation(model_path, pages=31, budget="128", drafts=3, knobs={"window": 1})
    for _ in range(2):
        request_id = sim.add(prompt(481), max_tokens=60)
        sim.run()
        assert sim.finished[request_id]["evicted_blocks"] > 0
    assert sim.memory.seen["padded"]


def test_drafts_do_not_keep_a_request_from_its_end(model_path: Path) -> None:
    """Where the pool is as large as the request, its last drafts have a page of their own."""
    for budget in ("128", "full"):
        sim = Simulation(model_path, pages=8, budget=budget, drafts=7)
        for length in range(120, 132):
            request_id = sim.add(prompt(length), max_tokens=94)
            sim.run()
            assert request_id in sim.finished
            assert not sim.requests[request_id].num_preemptions


def test_a_session_that_starts_with_a_hit_is_evicted_by_queries_that_were_computed(
    model_path: Path,
) -> None:
    """Its next turn finds it over budget before a window of tokens has been computed."""
    sim = Simulation(model_path, budget="160", knobs={"window": 40, "interval": 160})
    sim.add(prompt(161), kv_budget="full")
    sim.run()
    session = sim.add(prompt(161), max_tokens=33, session="talk")
    while sim.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        sim.step()
    sim.add(prompt(90, 1), max_tokens=20, checked=False, session="talk")
    while sim.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        sim.step()
    computed = [event[0] for event in sim.memory.history[session]]
    assert computed[0] == 160 + 40


@BOTH
def test_pages_of_a_session_are_published_under_their_own_hashes(
    model_path: Path, asynchronous: bool
) -> None:
    """The turn's last token completes a page in vain: it is dropped. vLLM 0.31 forgets that."""
    sim = Simulation(model_path, asynchronous=asynchronous)
    session = sim.add(prompt(60), max_tokens=4, session="talk")
    for turn in (prompt(90, 1), prompt(30, 2)):
        while sim.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            sim.step()
        sim.add(turn, max_tokens=4, checked=False, session=session)
    talk = sim.requests[session]
    ids = list(talk.all_token_ids)
    alike = Request("alike", ids, talk.sampling_params, None, block_hasher=sim.hasher)
    assert len(ids) == 60 + 3 + 90 + 3 + 30
    assert talk.block_hashes == alike.block_hashes
