"""A policy that raises costs its own request only: the scheduler's side."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason

from nexus_vllm.engine import compat
from nexus_vllm.engine.stats import STATS_KEY
from nexus_vllm.plan import Eviction, StepReport
from nexus_vllm.policies.random_blocks import RandomBlocks

from .simulation import Memory, Simulation, answer
from .test_invariants import BOTH, prompt


class Broken(RandomBlocks):
    selector = None

    def weights(self, obs: Any) -> Any:
        raise ZeroDivisionError("no blocks to score")


class FailingMemory(Memory):
    """Its policy streaming-llm raises; what happened is kept by step, as the worker reports it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.evictor.policies["streaming-llm"] = Broken()  # type: ignore[assignment]
        self.reports: dict[int, StepReport] = {}
        self.request_id = ""
        for evictor in (self.evictor, self.uneven):
            evictor.evict = self._telling(evictor.evict)  # type: ignore[method-assign]

    def _telling(self, evict: Any) -> Any:
        def on_error(error: Exception) -> None:
            self.report.failed[self.request_id] = f"{type(error).__name__}: {error}"

        return lambda *args: evict(*args, on_error)

    def execute(self, output: Any, requests: Any) -> None:
        self.report = self.reports[id(output)] = StepReport()
        super().execute(output, requests)

    def evict(self, eviction: Eviction) -> None:
        self.request_id = eviction.request_id
        super().evict(eviction)


class Watched(Simulation):
    """Hands reports to the scheduler, and collects all that it tells clients."""

    memory: FailingMemory

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, memory=FailingMemory, **options)
        self.told: dict[str, list[EngineCoreOutput]] = defaultdict(list)
        self.records: dict[str, dict[str, Any]] = {}
        update = self.scheduler.update_from_output

        def reporting(output: Any, result: Any) -> Any:
            report = self.memory.reports.pop(id(output))
            outputs = update(output, compat.with_report(result, report))
            for of_client in outputs.values():
                for one in of_client.outputs:
                    self.told[one.request_id].append(one)
                stats = of_client.scheduler_stats
                if stats is not None and stats.kv_connector_stats:
                    for record in stats.kv_connector_stats[STATS_KEY]["finished"]:
                        self.records[record["request_id"]] = record
            return outputs

        scheduler: Any = self.scheduler
        scheduler.update_from_output = reporting

    def tokens(self, request_id: str) -> list[int]:
        return [token for one in self.told[request_id] for token in one.new_token_ids]


@BOTH
@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_only_the_request_whose_policy_fails_ends(
    model_path: Path, asynchronous: bool, allocator: str
) -> None:
    """Its prompt of 300 tokens fits the budget of 256 no more: it fails at its first eviction."""
    sim = Watched(model_path, asynchronous=asynchronous, chunk=512)
    free = sim.free_pages
    first = sim.add(prompt(500), max_tokens=90, kv_allocator=allocator)
    victim = sim.add(
        prompt(300, seed=1), max_tokens=90, kv_policy="streaming-llm", kv_allocator=allocator
    )
    other = sim.add(prompt(300, seed=2), max_tokens=90, kv_allocator=allocator)
    sim.run()
    # Evicted before its second token is computed: the one sampled from the prompt is all it has.
    assert sim.tokens(victim) == [answer(victim, 300)]
    reasons = [one.finish_reason for one in sim.told[victim]]
    assert reasons == [None, FinishReason.ERROR]
    assert sim.told[victim][-1].stop_reason == (
        "KV eviction ended this request: policy 'streaming-llm' with allocator "
        f"{allocator!r} could not choose what stays (ZeroDivisionError: no blocks to score). Use "
        "another policy or allocator, or the budget full."
    )
    record = sim.records[victim]
    assert record["error"] == "ZeroDivisionError: no blocks to score"
    assert record["eviction_steps"] == 1
    for request_id, start in ((first, 500), (other, 300)):
        expected = [answer(request_id, start + position) for position in range(90)]
        assert sim.tokens(request_id) == expected
        assert "error" not in sim.records[request_id]
    assert sim.free_pages == free
    assert sim.scheduler.ledgers == {}


@BOTH
def test_a_last_token_does_not_hide_the_error(model_path: Path, asynchronous: bool) -> None:
    """The step of the failed eviction would have ended the request: it is an error all the same."""
    sim = Watched(model_path, asynchronous=asynchronous, chunk=512)
    victim = sim.add(prompt(300), max_tokens=2, kv_policy="streaming-llm")
    sim.run()
    assert sim.told[victim][-1].finish_reason == FinishReason.ERROR
    assert sim.tokens(victim) == [answer(victim, 300)]


@BOTH
def test_an_error_that_comes_after_an_abort_is_nobodys(
    model_path: Path, asynchronous: bool
) -> None:
    sim = Watched(model_path, asynchronous=asynchronous, chunk=512)
    free = sim.free_pages
    victim = sim.add(prompt(300), max_tokens=50, kv_policy="streaming-llm")
    scheduler: Any = sim.scheduler
    update, aborted = scheduler.update_from_output, []

    def late(output: Any, result: Any) -> Any:
        if sim.memory.reports[id(output)].failed:
            sim.abort(victim)
            aborted.append(len(sim.told[victim]))
        return update(output, result)

    scheduler.update_from_output = late
    sim.run()
    assert aborted == [len(sim.told[victim])]
    assert sim.free_pages == free
