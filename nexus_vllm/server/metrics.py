"""What Prometheus sees of evictions, on vLLM's own /metrics."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from nexus_vllm.config import DIRECTIVE_KEYS, POLICIES

REJECTIONS = (
    *(key.removeprefix("kv_") for key in DIRECTIVE_KEYS),
    *("unknown", "repeated", "conflict", "body"),
)
_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics(NamedTuple):
    eviction_steps: Counter
    evicted_blocks: Counter
    moved_blocks: Counter
    postponed: Counter
    replay_tokens: Counter
    requests: Counter
    rejected: Counter
    eviction_seconds: Histogram
    live_blocks: Gauge


@functools.cache
def metrics() -> Metrics:
    """This process's metrics: made once, however many engines it starts.

    vLLM unregisters only its own (`vllm:`) when an engine starts, so ours are neither doubled nor
    lost.
    """
    made = Metrics(
        Counter("nexus:eviction_steps", "Evictions of one sequence."),
        Counter("nexus:evicted_blocks", "KV blocks given up by sequences."),
        Counter("nexus:moved_blocks", "Kept KV blocks copied into another page."),
        Counter("nexus:postponed", "Evictions put off because no page was free to copy into."),
        Counter("nexus:replay_tokens", "Tokens computed to replay prompts, for policies that ask."),
        Counter("nexus:requests", "Requests by eviction policy.", ["policy"]),
        Counter("nexus:rejected", "Requests refused for their KV directive.", ["reason"]),
        Histogram("nexus:eviction_seconds", "Seconds an eviction step takes.", buckets=_BUCKETS),
        Gauge(
            "nexus:live_blocks",
            "KV blocks held by running sequences.",
            ["engine"],
            multiprocess_mode="mostrecent",
        ),
    )
    for policy in (*POLICIES, "none"):
        made.requests.labels(policy)
    for reason in REJECTIONS:
        made.rejected.labels(reason)
    return made


def rejected(reason: str) -> None:
    """Count one refused request. `reason` is one of REJECTIONS."""
    metrics().rejected.labels(reason).inc()


def observe(report: Mapping[str, Any], engine: int) -> None:
    """Add one report of engine `engine`'s scheduler: deltas, except `live_blocks`."""
    to = metrics()
    to.eviction_steps.inc(report["eviction_steps"])
    to.evicted_blocks.inc(report["evicted_blocks"])
    to.moved_blocks.inc(report["moved_blocks"])
    to.postponed.inc(report["postponed"])
    to.replay_tokens.inc(report["replay_tokens"])
    to.live_blocks.labels(str(engine)).set(report["live_blocks"])
    for seconds in report["seconds"]:
        to.eviction_seconds.observe(seconds)
    for policy, count in report["requests"].items():
        to.requests.labels(policy).inc(count)
