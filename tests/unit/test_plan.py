"""When sequences are shrunk: the plan is arithmetic, and simulating it token by token checks it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus_vllm.plan import Eviction, EvictionPlan, StepReport


def plan(**given: int | bool) -> EvictionPlan:
    defaults = {"prompt_tokens": 1000, "budget": 8, "interval": 2, "chunk": 4, "block_size": 32}
    return EvictionPlan(**{**defaults, "streaming": False, **given})  # type: ignore[arg-type]


def simulate(p: EvictionPlan, tokens: int) -> tuple[list[tuple[int, int]], int]:
    """Walk to `tokens` computed tokens; the evictions (position, released after) and the peak."""
    released, evictions, peak = 0, [], 0
    for computed in range(1, tokens + 1):
        # The page of the newest token is allocated before the eviction at its end can happen.
        peak = max(peak, -(-computed // p.block_size) - released)
        if computed == p.next_eviction(released):
            assert p.target(computed) > released, "an eviction must release something"
            released = p.target(computed)
            evictions.append((computed, released))
        assert computed < p.next_eviction(released)
    return evictions, peak


plans = st.builds(
    EvictionPlan,
    prompt_tokens=st.integers(1, 400),
    budget=st.integers(1, 12),
    interval=st.integers(1, 4),
    chunk=st.integers(1, 8),
    block_size=st.sampled_from([1, 2, 8, 32]),
    streaming=st.booleans(),
)


def test_a_oneshot_prompt_is_shrunk_once_at_its_end_and_then_every_interval() -> None:
    evictions, peak = simulate(plan(), 1200)
    assert evictions == [(1000, 23), (1056, 25), (1120, 27), (1184, 29)]
    assert peak == 32


def test_a_streamed_prompt_is_shrunk_every_chunk() -> None:
    evictions, peak = simulate(plan(streaming=True), 1010)
    assert [position for position, _ in evictions] == [384, 512, 640, 768, 896, 1000]
    assert peak == 8 + 4


def test_a_prompt_within_budget_is_left_alone_until_decode_outgrows_it() -> None:
    evictions, _ = simulate(plan(prompt_tokens=100), 400)
    assert evictions == [(320, 2), (384, 4)]


@given(plans, st.integers(1, 200))
def test_after_an_eviction_exactly_the_budget_is_held(p: EvictionPlan, extra: int) -> None:
    """I2: B full blocks and the partial tail, at every eviction of every plan."""
    evictions, _ = simulate(p, p.prompt_tokens + extra)
    for position, released in evictions:
        assert position // p.block_size - released == p.budget


@given(plans, st.integers(1, 200))
def test_most_blocks_is_a_bound_and_the_decode_window_never_outgrows_budget_and_interval(
    p: EvictionPlan, extra: int
) -> None:
    tokens = p.prompt_tokens + extra
    evictions, peak = simulate(p, tokens)
    assert peak <= p.most_blocks(tokens)
    released = 0
    pending = dict(evictions)
    for computed in range(1, tokens + 1):
        live = computed // p.block_size - released
        if computed > p.prompt_tokens:
            assert live <= p.budget + p.interval
        released = pending.get(computed, released)


def test_a_late_eviction_still_comes_down_to_the_budget() -> None:
    """A postponed eviction happens at a later token count than planned."""
    p = plan()
    assert p.next_eviction(0) == 1000
    assert p.target(1040) == 1040 // 32 - 8
    assert p.next_eviction(p.target(1040)) > 1040


@pytest.mark.parametrize("name", ["prompt_tokens", "budget", "interval", "chunk", "block_size"])
def test_a_plan_refuses_nothing_of_something(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        plan(**{name: 0})


def test_the_row_after_an_eviction_starts_with_nulls() -> None:
    eviction = Eviction(
        "r", "nexus", "uniform", 0, 0, 200, 1, 4, [11, 12, 13, 14, 15], [14, 15], [16]
    )
    assert eviction.full == 6
    assert eviction.row == [0, 0, 0, 0, 14, 15, 16]


def test_a_report_takes_in_another_ranks() -> None:
    ours = StepReport({"a": 3, "b": 0}, [0.1, 0.4], {"b": "ours"})
    ours.add(StepReport({"a": 4, "b": 5}, [0.2, 0.3], {"a": "theirs", "b": "theirs"}))
    assert ours == StepReport({"a": 7, "b": 5}, [0.2, 0.4], {"a": "theirs", "b": "ours"})
    with pytest.raises(
        RuntimeError, match=r"one rank has evicted from \['a', 'b'\], another .*'b'"
    ):
        ours.add(StepReport({"b": 1}, [0.1]))
