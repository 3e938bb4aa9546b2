"""The scheduler's reports, taken out of vLLM's stats in the API server's process.

The scheduler puts one plain dict per step into `SchedulerStats.kv_connector_stats[STATS_KEY]`:
`eviction_steps`, `evicted_blocks`, `moved_blocks`, `postponed`, `replay_tokens`, `seconds` (one per
eviction step), `requests` (by policy) and `finished` (records) since the last report, and
`live_blocks` now.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager

from nexus_vllm.engine.cli import active_settings
from nexus_vllm.engine.hooks import wrap
from nexus_vllm.server.metrics import metrics, observe
from nexus_vllm.server.records import recent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

STATS_KEY = "nexus_kv_eviction"


class EvictionStatLogger(AggregateStatLoggerBase):
    """Feeds our metrics and records; goes first, so that vLLM's own loggers never see a report."""

    def __init__(self, vllm_config: "VllmConfig", engine_indexes: list[int]) -> None:
        settings = active_settings(vllm_config.additional_config)
        assert settings is not None, "only engines with KV eviction get this logger"
        recent.resize(settings.records)
        for engine in engine_indexes:
            metrics().live_blocks.labels(str(engine)).set(0)

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        carrier = scheduler_stats.kv_connector_stats
        if not carrier or STATS_KEY not in carrier:
            return
        report = carrier.pop(STATS_KEY)
        if not carrier:
            scheduler_stats.kv_connector_stats = None
        observe(report, engine_idx)
        for record in report["finished"]:
            recent.add(record)

    def log_engine_initialized(self) -> None:
        """Abstract in vLLM; nothing to say."""


def install() -> None:
    """Wrap `StatLoggerManager.__init__` so that engines with eviction on get EvictionStatLogger.

    Symptom without: no metrics, and our reports reach vLLM's KV-connector loggers. Cause: vLLM's
    entry point for stat loggers switches stats on for everyone who has the package installed, and
    does not serve `LLM(...)`. Remove when a stat logger plugin may decline an engine.
    """
    wrap(
        StatLoggerManager,
        "__init__",
        ("self", "vllm_config", "engine_idxs", "custom_stat_loggers"),
        _adding_logger,
    )


def _adding_logger(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any,
        vllm_config: "VllmConfig",
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: list[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if active_settings(vllm_config.additional_config) is not None:
            custom_stat_loggers = [EvictionStatLogger, *(custom_stat_loggers or [])]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    return __init__
