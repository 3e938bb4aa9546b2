"""Who is admitted to a pool, and that everybody who is gets to the end."""

import os
import random
import re
from pathlib import Path

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory

from .simulation import BLOCK, PIPELINES, NoMemory, Simulation

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
ARRIVALS = int(os.environ.get("NEXUS_ARRIVALS", "1500"))
SEED = int(os.environ.get("NEXUS_SEED", "0"))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


@BOTH
def test_a_prompt_three_times_the_pool_is_served(model_path: Path, asynchronous: bool) -> None:
    sim = Simulation(model_path, pages=21, budget="20%", asynchronous=asynchronous)
    request_id = sim.add(prompt(1900), max_tokens=100)
    sim.run()
    told = sim.finished[request_id]
    assert told["prefill"] == "streaming"
    assert told["peak_blocks"] <= 20
    assert told["final_blocks"] <= 1900 // 5 // BLOCK + 2


def test_a_server_starts_with_room_for_one_sequence_under_its_budget(model_path: Path) -> None:
    """2,048 tokens at 20 %: 12 blocks, one coming in, one being filled; and vLLM's null page."""
    sim = Simulation(model_path, budget="20%")
    spec = sim.scheduler.pages.kv_cache_spec
    specs = {"layer": spec}
    sim.config.cache_config.kv_cache_layout = "LBHNC"
    check_enough_kv_cache_memory(sim.config, dict(specs), 15 * spec.page_size_bytes)
    with pytest.raises(ValueError, match="KV cache"):
        check_enough_kv_cache_memory(sim.config, dict(specs), 14 * spec.page_size_bytes)
    full = Simulation(model_path, budget="full")
    full.config.cache_config.kv_cache_layout = "LBHNC"
    with pytest.raises(ValueError, match="KV cache"):
        check_enough_kv_cache_memory(full.config, dict(specs), 64 * spec.page_size_bytes)
    check_enough_kv_cache_memory(full.config, dict(specs), 65 * spec.page_size_bytes)


@BOTH
def test_auto_streams_while_the_pool_is_taken_and_not_else(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Simulation(model_path, pages=61, asynchronous=asynchronous, chunk=512)
    full = sim.add(prompt(900), max_tokens=60, kv_budget="full")
    while sim.requests[full].num_computed_tokens < 901:
        sim.step()
    squeezed = sim.add(prompt(1400, 1), max_tokens=20, kv_budget="128")
    patient = sim.add(prompt(1400, 2), max_tokens=20, kv_budget="128", kv_prefill="oneshot")
    while squeezed not in sim.finished:
        sim.step()
    assert full not in sim.finished
    sim.run()
    later = sim.add(prompt(1400, 3), max_tokens=20, kv_budget="128")
    sim.run()
    modes = [sim.finished[i]["prefill"] for i in (squeezed, patient, later)]
    assert modes == ["streaming", "oneshot", "oneshot"]
    assert all(request.num_preemptions == 0 for request in sim.requests.values())


@pytest.mark.parametrize(
    ("length", "directive", "message"),
    [
        (700, {"kv_budget": "full"}, "a prompt of 700 tokens needs all of its KV, the pool holds"),
        (700, {"kv_policy": "none"}, "kv_budget='full' is not allowed: a prompt of 700 tokens"),
        (700, {"kv_prefill": "oneshot"}, "a prompt of 700 tokens at once does not fit the pool of"),
        (900, {"kv_budget": "640"}, "and the pool of 640 tokens carries 576 at most"),
        (
            600,
            {"kv_budget": "full", "min_tokens": 41},
            "min_tokens=41 after a prompt of 600 tokens need all of their KV, the pool holds 640",
        ),
    ],
)
def test_what_never_fits_is_refused(
    model_path: Path, length: int, directive: dict[str, str | int], message: str
) -> None:
    sim = Simulation(model_path, pages=21)
    with pytest.raises(VLLMValidationError, match=message):
        sim.add(prompt(length), max_tokens=60, **directive)  # type: ignore[arg-type]


@pytest.mark.parametrize("directive", [{"kv_budget": "full"}, {"kv_policy": "none"}])
@pytest.mark.parametrize("least", [0, 1, 40])
def test_what_is_cut_to_the_pool_is_still_read_by_the_engine(
    model_path: Path, directive: dict[str, str], least: int
) -> None:
    sim = Simulation(model_path, pages=21, chunk=512)
    request_id = sim.add(prompt(600), max_tokens=1000, min_tokens=least, **directive)
    sim.run()
    assert sim.requests[request_id].num_tokens == 20 * BLOCK


@BOTH
@pytest.mark.parametrize("asked", [None, 0, 5])
def test_a_prompt_that_is_scored_does_not_stream(
    model_path: Path, asynchronous: bool, asked: int | None
) -> None:
    """`auto` streams while the pool is taken, but not where the prompt's logprobs are asked for."""
    sim = Simulation(model_path, pages=61, asynchronous=asynchronous, chunk=512)
    full = sim.add(prompt(900), max_tokens=60, kv_budget="full")
    while sim.requests[full].num_computed_tokens < 901:
        sim.step()
    scored = sim.add(prompt(1400, 1), max_tokens=20, prompt_logprobs=asked, kv_budget="128")
    positions: set[int] = set()
    while scored not in sim.finished:
        sim.step()
        positions |= {computed for computed, _ in sim.memory.history.get(scored, ())}
    assert (min(positions) < 1400) == (asked is None)
    assert sim.finished[scored]["prefill"] == ("streaming" if asked is None else "oneshot")


SCORED = "prompt_logprobs must see the whole prompt"


@pytest.mark.parametrize(
    ("pages", "directive", "message"),
    [
        (
            31,
            {"kv_prefill": "streaming"},
            f"kv_prefill='streaming' is not allowed: {SCORED}, and of its 700 tokens 128 may stay "
            "while it comes in. Use oneshot or auto, or drop prompt_logprobs",
        ),
        *(
            (
                21,
                {"kv_prefill": prefill},
                f"kv_prefill='{prefill}' is not allowed: {SCORED}, and 700 tokens at once do not "
                "fit the pool of 640 tokens. Shorten the prompt, or drop prompt_logprobs",
            )
            for prefill in ("auto", "oneshot", "streaming")
        ),
        (
            31,
            {"session": "s"},
            f"kv_budget='128' is not allowed: {SCORED}, and a session's next one comes when part "
            "of the last may be gone. Use full, or drop prompt_logprobs",
        ),
    ],
)
@pytest.mark.parametrize("trigger", ["budget", "pressure"])
def test_a_prompt_that_cannot_be_scored_whole_is_refused(
    model_path: Path, trigger: str, pages: int, directive: dict[str, str], message: str
) -> None:
    sim = Simulation(model_path, pages=pages, budget="128", knobs={"trigger": trigger})
    with pytest.raises(VLLMValidationError, match=re.escape(message)):
        sim.add(prompt(700), prompt_logprobs=1, **directive)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefill", ["auto", "oneshot", "streaming"])
def test_a_scored_prompt_within_its_budget_may_stream(model_path: Path, prefill: str) -> None:
    sim = Simulation(model_path, pages=21, budget="256")
    request_id = sim.add(prompt(250), max_tokens=200, prompt_logprobs=1, kv_prefill=prefill)
    sim.run()
    assert sim.finished[request_id]["eviction_steps"] > 0


@pytest.mark.parametrize("directive", [{"kv_budget": "full"}, {"kv_budget": "1024"}])
def test_what_slipped_past_the_front_end_does_not_wait_forever(
    model_path: Path, directive: dict[str, str]
) -> None:
    sim = Simulation(model_path, pages=21)
    request_id = sim.add(prompt(1200), max_tokens=40, checked=False, **directive)
    sim.run()
    assert sim.finished[request_id]["peak_blocks"] <= 20


def test_a_sequence_that_keeps_everything_ends_where_the_pool_does(model_path: Path) -> None:
    sim = Simulation(model_path, pages=21, chunk=512)
    request_id = sim.add(prompt(600), max_tokens=1000, kv_budget="full")
    sim.run()
    assert sim.requests[request_id].num_tokens == 20 * BLOCK
    assert sim.requests[request_id].num_preemptions == 0
    assert request_id in sim.finished


@pytest.mark.parametrize(("asynchronous", "depth"), PIPELINES)
@pytest.mark.parametrize("trigger", ["budget", "pressure"])
@pytest.mark.parametrize("pages", [9, 17, 34])
def test_every_request_ends(
    model_path: Path, asynchronous: bool, depth: int, trigger: str, pages: int
) -> None:
    """Random arrivals, budgets, modes, lengths, aborts on a tiny pool: nobody waits forever."""
    rng = random.Random(1000 * SEED + pages)
    sim = Simulation(
        model_path,
        pages=pages,
        asynchronous=asynchronous,
        depth=depth,
        max_seqs=8,
        chunk=rng.choice([32, 256, 2048]),
        memory=NoMemory,
        knobs={
            "trigger": trigger,
            "interval": rng.choice([32, 64]),
            "chunk": rng.choice([32, 512]),
        },
    )
    live: dict[str, int] = {}
    refused = aborted = steps = 0
    while len(sim.requests) < ARRIVALS // 24:
        if len(live) < 12 and rng.random() < 0.5:
            shared = prompt(1900, rng.randrange(3))[: rng.randrange(1901)]
            own = prompt(rng.randrange(1, 100), rng.randrange(10**6))
            directive = {
                "kv_budget": rng.choice(["full", "128", "160", "256", "20%", "70%"]),
                "kv_prefill": rng.choice(["auto", "oneshot", "streaming"]),
                "kv_policy": rng.choice(["random", "random", "none"]),
            }
            try:
                tokens = rng.choice([1, 2, 40, 200])
                given = (shared + own)[:1900]
                least = tokens if tokens == 200 else 0
                added = sim.add(given, max_tokens=tokens, min_tokens=least, **directive)
                live[added] = steps
            except VLLMValidationError:
                refused += 1
        if live and rng.random() < 0.02:
            gone = rng.choice(sorted(live))
            sim.abort(gone)
            del live[gone]
            aborted += 1
        sim.step()
        steps += 1
        for request_id in [i for i in live if i in sim.finished]:
            del live[request_id]
        assert not live or steps - min(live.values()) < 20_000, "somebody waits forever"
    sim.run()
    assert len(sim.finished) + aborted >= len(sim.requests)
    assert sim.free_pages == pages - 1
    assert sim.memory.seen["evictions"] > 0
    assert refused > 0


@BOTH
def test_two_that_share_pages_and_are_both_due_do_not_preempt_each_other_forever(
    model_path: Path, asynchronous: bool
) -> None:
    """Neither can be shrunk while the other holds the same pages and the pool is full."""
    sim = Simulation(
        model_path,
        pages=34,
        asynchronous=asynchronous,
        chunk=2048,
        knobs={"interval": 64, "chunk": 32},
    )
    shared = prompt(550)
    first = shared + prompt(738, 1)
    long = sim.add(first, max_tokens=2, kv_budget="70%", kv_prefill="streaming")
    short = sim.add(shared + prompt(60, 2), max_tokens=2, kv_budget="20%", kv_prefill="oneshot")
    sim.run(limit=500)
    assert {long, short} <= set(sim.finished)
