"""The scheduler's reports: out of vLLM's stats, into Prometheus and the records."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager
from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from nexus_vllm.config import DIRECTIVE_KEYS, DirectiveError, Settings
from nexus_vllm.engine import stats
from nexus_vllm.engine.hooks import is_wrapped
from nexus_vllm.engine.stats import STATS_KEY, EvictionStatLogger
from nexus_vllm.server.metrics import REJECTIONS, metrics, rejected
from nexus_vllm.server.records import recent

RECORD = {
    "request_id": "chatcmpl-m-0123abcd",
    "policy": "nexus",
    "budget_tokens": 512,
    "prompt_tokens": 3000,
    "eviction_steps": 2,
    "evicted_blocks": 79,
    "moved_blocks": 300,
    "peak_blocks": 94,
    "final_blocks": 17,
    "prefill": "oneshot",
}


def report(**changes: Any) -> dict[str, Any]:
    made = {
        "eviction_steps": 2,
        "evicted_blocks": 79,
        "moved_blocks": 300,
        "postponed": 1,
        "replay_tokens": 500,
        "seconds": [0.002, 0.2],
        "live_blocks": 40,
        "requests": {"nexus": 1, "none": 2},
        "finished": [RECORD],
    }
    return made | changes


def configured(additional_config: Any) -> Any:
    return SimpleNamespace(additional_config=additional_config)


ON = configured({"kv_eviction": Settings(records=7).to_json()})
OFF = configured({})


def scrape() -> dict[str, float]:
    text = generate_latest(get_prometheus_registry()).decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("nexus:"))
    return {name: float(value) for name, _, value in lines}


def test_a_report_reaches_the_scrape_under_the_documented_names() -> None:
    logger = EvictionStatLogger(ON, [0, 1])
    before = scrape()
    logger.record(SchedulerStats(kv_connector_stats={STATS_KEY: report()}), None)
    logger.record(
        SchedulerStats(kv_connector_stats={STATS_KEY: report(live_blocks=5)}), None, None, 1
    )
    rejected("budget")
    after = scrape()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown == {
        "nexus:eviction_steps_total": 4,
        "nexus:evicted_blocks_total": 158,
        "nexus:moved_blocks_total": 600,
        "nexus:postponed_total": 2,
        "nexus:replay_tokens_total": 1000,
        "nexus:eviction_seconds_count": 4,
        "nexus:eviction_seconds_sum": pytest.approx(0.404),
        'nexus:requests_total{policy="nexus"}': 2,
        'nexus:requests_total{policy="none"}': 4,
        'nexus:rejected_total{reason="budget"}': 1,
        'nexus:live_blocks{engine="0"}': 40,
        'nexus:live_blocks{engine="1"}': 5,
        **{
            f'nexus:eviction_seconds_bucket{{le="{le}"}}': count
            for le, count in (
                *((le, 2) for le in ("0.0025", "0.005", "0.01", "0.025", "0.05", "0.1")),
                *((le, 4) for le in ("0.25", "0.5", "1.0", "+Inf")),
            )
        },
    }


@pytest.mark.parametrize("key", [*DIRECTIVE_KEYS, "kv_bugdet"])
def test_every_refusal_is_on_the_scrape_before_it_happens(key: str) -> None:
    reason = DirectiveError(key, "x", "no", "Do not.").reason
    assert reason in REJECTIONS
    metrics()
    assert f'nexus:rejected_total{{reason="{reason}"}}' in scrape()


def test_finished_requests_are_remembered() -> None:
    logger = EvictionStatLogger(ON, [0])
    logger.record(SchedulerStats(kv_connector_stats={STATS_KEY: report()}), None)
    assert recent.find("chatcmpl-m")[-1] == RECORD
    for _ in range(20):
        logger.record(SchedulerStats(kv_connector_stats={STATS_KEY: report()}), None)
    assert len(recent) == 7


def test_vllms_own_loggers_never_see_a_report() -> None:
    logger = EvictionStatLogger(ON, [0])
    alone = SchedulerStats(kv_connector_stats={STATS_KEY: report()})
    shared = SchedulerStats(kv_connector_stats={STATS_KEY: report(), "theirs": 1})
    none = SchedulerStats()
    for each in (alone, shared, none, None):
        logger.record(each, None)
    assert alone.kv_connector_stats is None
    assert shared.kv_connector_stats == {"theirs": 1}
    assert none.kv_connector_stats is None


def test_metrics_survive_a_second_engine_in_the_process() -> None:
    first = metrics()
    EvictionStatLogger(ON, [0])
    unregister_vllm_metrics()
    EvictionStatLogger(ON, [0])
    assert metrics() is first
    assert "nexus:eviction_steps_total" in scrape()


class Recorder(AggregateStatLoggerBase):
    """A user's own stat logger: notes what it was given."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self.seen: list[Any] = []

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(scheduler_stats.kv_connector_stats)

    def log_engine_initialized(self) -> None: ...


class Prometheus(Recorder):
    """Stands for vLLM's own, which needs a whole config."""


@pytest.fixture
def _wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatLoggerManager, "__init__", StatLoggerManager.__init__)
    monkeypatch.setattr("vllm.v1.metrics.loggers.PrometheusStatLogger", Prometheus)
    stats.install()
    stats.install()
    assert is_wrapped(StatLoggerManager, "__init__")


@pytest.mark.usefixtures("_wrapped")
def test_our_logger_goes_first_and_only_where_eviction_is_on() -> None:
    on = StatLoggerManager(ON, custom_stat_loggers=[Recorder], enable_default_loggers=False)
    assert [type(each) for each in on.stat_loggers] == [EvictionStatLogger, Recorder, Prometheus]
    on.record(SchedulerStats(kv_connector_stats={STATS_KEY: report()}), None)
    assert [each.seen for each in on.stat_loggers[1:]] == [[None], [None]]
    off = StatLoggerManager(OFF, enable_default_loggers=False)
    assert [type(each) for each in off.stat_loggers] == [Prometheus]


SERVE = """
import sys
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from nexus_vllm.server.metrics import observe
report = dict(eviction_steps=1, evicted_blocks=2, moved_blocks=3, postponed=0, replay_tokens=0)
report |= dict(seconds=[0.1], live_blocks=int(sys.argv[1]), requests={}, finished=[])
observe(report, engine=0)
registry = CollectorRegistry()  # as vLLM's get_prometheus_registry does
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_add_up(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for live in ("9", "4"):
        text = subprocess.check_output([sys.executable, "-c", SERVE, live], env=env, text=True)
    assert "nexus:evicted_blocks_total 4.0" in text
    assert 'nexus:live_blocks{engine="0"} 4.0' in text
