"""The pressure trigger: nobody gives anything up while there is room, then whoever has most."""

from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from .simulation import Simulation
from .test_admission import prompt

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
PRESSURE = {"trigger": "pressure"}


@BOTH
def test_with_ample_memory_nothing_is_evicted_and_hits_are_whole(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Simulation(model_path, pages=200, asynchronous=asynchronous, knobs=PRESSURE)
    for seed in range(3):
        sim.add(prompt(900, seed))
    sim.run()
    again = sim.add(prompt(900, 1))
    sim.run()
    assert all(told["eviction_steps"] == 0 for told in sim.finished.values())
    assert sim.memory.first[again] == 896  # all whole blocks of the prompt


@BOTH
def test_the_longest_over_its_budget_shrinks_before_anyone_is_preempted(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Simulation(model_path, pages=101, asynchronous=asynchronous, knobs=PRESSURE)
    long = sim.add(prompt(1600), max_tokens=300)
    short = sim.add(prompt(700, 1), max_tokens=300)
    while sim.requests[short].num_computed_tokens < 720:
        sim.step()
    assert not sim.finished
    third = sim.add(prompt(900, 2), max_tokens=100)
    while third not in sim.finished:
        sim.step()
    ledgers = sim.scheduler.ledgers
    assert ledgers[long].eviction_steps > 0
    assert ledgers[short].eviction_steps == 0
    sim.run()
    assert all(request.num_preemptions == 0 for request in sim.requests.values())


@BOTH
def test_a_session_that_goes_on_has_computed_its_window(
    model_path: Path, asynchronous: bool
) -> None:
    """It need not wait for queries of the new turn before it can be shrunk."""
    sim = Simulation(model_path, pages=61, asynchronous=asynchronous, knobs=PRESSURE)
    session = sim.add(prompt(600), max_tokens=5, session="s", kv_budget="128")
    while sim.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        sim.step()
    sim.add(prompt(3, 1), session=session, checked=False)
    sim.step()
    assert sim.requests[session].num_computed_tokens >= 604 + 3
    assert sim.scheduler.ledgers[session].first_computed == 0
    assert sim.memory.first[session] == 0


@BOTH
def test_a_resumed_sequence_is_shrunk_once_it_has_computed_its_window(
    model_path: Path, asynchronous: bool
) -> None:
    """Not by queries from before its preemption: most of it is found in the cache again."""
    sim = Simulation(model_path, pages=41, asynchronous=asynchronous, knobs=PRESSURE)
    request_id = sim.add(prompt(800), max_tokens=300, kv_budget="128")
    while sim.requests[request_id].num_computed_tokens < 803:
        sim.step()
    sim.scheduler._preempt_request(sim.scheduler.running.pop(), 0.0)
    while sim.requests[request_id].num_computed_tokens < 803:
        sim.step()
    first = sim.memory.first[request_id]
    assert first == 800
    sim.add(prompt(900, 1))
    while not sim.memory.history[request_id]:
        sim.step()
    assert sim.memory.history[request_id][0][0] >= first + sim.settings.window


@BOTH
def test_a_prompt_longer_than_the_pool_shrinks_on_its_way_in(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Simulation(model_path, pages=21, asynchronous=asynchronous, chunk=2048, knobs=PRESSURE)
    request_id = sim.add(prompt(1900), max_tokens=60)
    sim.run()
    told = sim.finished[request_id]
    assert told["peak_blocks"] <= 20
    assert told["eviction_steps"] > 1
    assert sim.requests[request_id].num_preemptions == 0


@BOTH
@pytest.mark.parametrize("asked", [None, 0, 5])
def test_a_prompt_that_is_scored_is_not_shrunk_before_its_end(
    model_path: Path, asynchronous: bool, asked: int | None
) -> None:
    """Its neighbour keeps everything: nobody else can make the room that it wants."""
    sim = Simulation(model_path, pages=61, asynchronous=asynchronous, knobs=PRESSURE)
    neighbour = sim.add(prompt(400, 1), max_tokens=150, kv_budget="full")
    scored = sim.add(prompt(1400), max_tokens=100, prompt_logprobs=asked)
    positions: set[int] = set()
    while scored not in sim.finished:
        sim.step()
        positions |= {computed for computed, _ in sim.memory.history.get(scored, ())}
    assert positions
    assert (min(positions) < 1400) == (asked is None)
    sim.run()
    assert {scored, neighbour} == sim.finished.keys()
