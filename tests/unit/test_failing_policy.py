"""A policy or an allocator that raises costs its own request only: the worker's side."""

import logging
from functools import partial
from typing import Any

import pytest
import torch

from nexus_vllm import allocators
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor, Layer
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.replay_scores import ReplayScores
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.engine.worker import EvictionWorker
from nexus_vllm.plan import Eviction, StepPlan, StepReport
from nexus_vllm.policies.random_blocks import RandomBlocks

LAYERS, HEADS = 2, 2
CHECKED = Settings(check_integrity=True)


class Broken(RandomBlocks):
    """Neither scores nor counts."""

    selector = None

    def weights(self, obs: Any) -> Any:
        raise ZeroDivisionError("no blocks to score")

    def counts(self, situation: Any) -> Any:
        raise ZeroDivisionError("no blocks to count")


def layers() -> list[Layer]:
    """Two layers whose every number names its block: pages 1 to 10 hold blocks 0 to 9."""
    pages = torch.arange(20).view(-1, 1, 1, 1) - 1.0
    caches = pages.expand(20, HEADS, 32, 4).repeat(LAYERS, 1, 1, 1, 1)
    order = torch.arange(32)[:, None] * 4 + torch.arange(2)
    window = LayerWindow(1, 16, 1, 2, torch.float32, torch.device("cpu"))
    return [
        Layer(index, cache, UnitLayout.of(order), 1.0, 2, window)
        for index, cache in enumerate(caches)
    ]


def eviction(allocator: str, released: int = 0, target: int = 5) -> Eviction:
    return Eviction(
        request_id="r",
        policy="random",
        allocator=allocator,
        seed=0,
        event=0,
        computed=320,
        released=released,
        target=target,
        pages=list(range(1 + released, 11)),
        kept_pages=list(range(1 + target, 11)),
        tail_pages=[],
    )


def test_without_a_policy_sinks_and_the_newest_blocks_stay() -> None:
    found = layers()
    even, sequence = Evictor(found, CHECKED), Sequence(0)
    errors: list[Exception] = []
    even.policies["random"] = Broken()  # type: ignore[assignment]
    _, kept = even.evict(sequence, eviction("uniform"), errors.append)
    assert [repr(error) for error in errors] == ["ZeroDivisionError('no blocks to score')"]
    assert [sorted(row) for row in kept.tolist()] == [[0, 6, 7, 8, 9]] * LAYERS
    for layer, row in zip(found, kept, strict=True):
        assert layer.cache[6:11, 0, 0, 0].tolist() == row.tolist()
    assert sequence.released == 5


@pytest.mark.parametrize("broken", ["policy", "allocator"])
def test_the_same_of_units_whatever_the_heads_held_before(broken: str) -> None:
    found = layers()
    uneven, sequence = UnevenEvictor(found, CHECKED), Sequence(0)
    errors: list[Exception] = []
    policy = Evictor(found, CHECKED).policies["random"]
    dealing = allocators.make("global")
    uneven.evict(sequence, eviction("global", 0, 2), policy, dealing, errors.append)
    assert errors == []
    held = sequence.holding
    assert held is not None
    assert held.counts.min() < held.counts.max()
    failing: tuple[Any, Any] = (Broken(), dealing) if broken == "policy" else (policy, Broken())
    _, kept = uneven.evict(sequence, eviction("global", 2, 6), *failing, errors.append)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    holding = sequence.holding
    assert holding is not None
    assert int(holding.counts.sum()) == 4 * LAYERS * HEADS
    for head in kept.flatten(0, 1).tolist():
        assert {0, 9} <= set(head)
    inside = holding.units[holding.valid]
    assert uneven.space.flat[inside, 0, 0, 0].tolist() == holding.blocks[holding.valid].tolist()


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_nobody_told_nothing_changed(allocator: str) -> None:
    found, sequence = layers(), Sequence(0)
    before = [layer.cache.clone() for layer in found]
    even, uneven = Evictor(found, CHECKED), UnevenEvictor(found, CHECKED)
    even.policies["random"] = Broken()  # type: ignore[assignment]
    evict: Any = even.evict
    if allocator != "uniform":
        dealt: Any = {"policy": even.policies["random"], "allocator": allocators.make(allocator)}
        evict = partial(uneven.evict, **dealt)
    with pytest.raises(ZeroDivisionError):
        evict(sequence, eviction(allocator))
    assert (sequence.released, sequence.holding) == (0, None)
    for layer, was in zip(found, before, strict=True):
        assert torch.equal(layer.cache, was)


class Runner:
    """Keeps the rows it is given."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def overwrite_row(self, request_id: str, row: list[int]) -> None:
        self.rows[request_id] = row


class Table:
    """The worker's table, of one sequence."""

    def __init__(self) -> None:
        self.by_id = {"r": Sequence(0)}

    def stop(self, request_id: str) -> None:
        del self.by_id[request_id]


def worker() -> Any:
    found = layers()
    one: Any = EvictionWorker.__new__(EvictionWorker)
    one.eviction = Settings(trace=True)
    one.sequences, one.runner = Table(), Runner()
    one.replays = ReplayScores(Runner(), found, 32)  # type: ignore[arg-type]
    one.evictor, one.uneven = Evictor(found, CHECKED), UnevenEvictor(found, CHECKED)
    one.evictor.policies["random"] = Broken()
    one.allocators = {"global": allocators.make("global")}
    one._trace, one._failed = {}, set()
    return one


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_the_worker_reports_and_logs_once(
    allocator: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    one, report = worker(), StepReport()
    for first, last in ((0, 2), (2, 5)):
        one._evict(eviction(allocator, first, last), report)
    assert report.failed == {"r": "ZeroDivisionError: no blocks to score"}
    assert one.runner.rows == {"r": [0] * 5 + [6, 7, 8, 9, 10]}
    (said,) = caplog.records
    assert said.getMessage() == (
        f"r: policy random, allocator {allocator} could not choose what stays; the request ends."
    )
    assert said.exc_info is not None
    one._carry_out(StepPlan(stopped=["r"]))
    assert one._failed == set()
