"""What of vLLM has changed under this plugin's overrides.

A method that vLLM renames would never be called again, a parameter it adds would end a request in
an exception: both must be known before an engine starts.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Drift(NamedTuple):
    """A symbol of vLLM that is not what this release was written for, and how it differs."""

    symbol: str
    how: str


def drift(
    overrides: Iterable[tuple[type, type]], calls: Mapping[type, Iterable[str]]
) -> list[Drift]:
    """Every symbol of vLLM that differs from what we rely on. Pure.

    Args:
        overrides: (our class, vLLM's class under it). Checked are the methods that exist in both,
            and those of ours that call `super()` by their own name.
        calls: what we call or read, by vLLM's class: `name(parameter, ...)` with the leading
            parameters after self, or a field's bare name.
    """
    found = []
    for ours, theirs in overrides:
        for name in _overriding(ours, theirs):
            found += _compared(theirs, name, _parameters(getattr(ours, name)))
    for theirs, used in calls.items():
        for call in used:
            name, _, parameters = call.rstrip(")").partition("(")
            needed = ["self", *parameters.split(", "), ...] if parameters else [...]
            found += _compared(theirs, name, needed)
    return list(dict.fromkeys(found))


def _overriding(ours: type, theirs: type) -> Iterator[str]:
    for name, member in vars(ours).items():
        function = getattr(member, "__func__", member)  # of a static or class method
        if not inspect.isfunction(function):
            continue
        inherited = getattr(theirs, name, None) is not getattr(object, name, None)
        if inherited or _calls_super(function, name):
            yield name


def _calls_super(function: Callable[..., Any], name: str) -> bool:
    code = function.__code__
    return "__class__" in code.co_freevars and name in code.co_names


def _compared(theirs: type, name: str, needed: list[Any]) -> list[Drift]:
    symbol = f"{theirs.__module__}.{theirs.__qualname__}.{name}"
    if name in getattr(theirs, "__dataclass_fields__", ()):
        return []
    method = getattr(theirs, name, None)
    if method is None:
        return [Drift(symbol, "it is gone")]
    if needed == [...]:
        return []
    has = _parameters(method)
    leading = has[: len(needed) - 1] if needed[-1:] == [...] else has
    if leading == [parameter for parameter in needed if parameter is not ...]:
        return []
    return [Drift(symbol, f"it takes ({_told(has)}), not ({_told(needed)})")]


def _parameters(function: Callable[..., Any]) -> list[Any]:
    """Parameter names in order, "*" before the first keyword-only one, ... for any others."""
    names: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _VARIABLE:
            if names[-1:] != [...]:
                names.append(...)
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names


def _told(parameters: list[Any]) -> str:
    return ", ".join("..." if name is ... else name for name in parameters)


def installed() -> list[Drift]:
    """`drift` of the installed vLLM."""
    try:
        return drift(_overrides(), _calls())
    except (ImportError, AttributeError) as error:  # a module or class we import has moved
        return [Drift(getattr(error, "name", None) or "vllm", str(error))]


def _overrides() -> list[tuple[type, type]]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    from nexus_vllm.engine import attention, manager, scheduler, stats, worker

    pairs: list[tuple[Any, Any]] = [
        (scheduler.EvictionSchedulerMixin, Scheduler),
        (scheduler.EvictionSchedulerMixin, AsyncScheduler),
        (manager.EvictionManager, FullAttentionManager),
        (worker.EvictionWorker, worker.EvictionWorker.__base__),
        (stats.EvictionStatLogger, AggregateStatLoggerBase),
    ]
    for name in attention.BACKENDS:
        stock: Any = attention._stock(name)
        pairs += [
            (attention.EvictionBuilderMixin, stock.get_builder_cls()),
            (attention.EvictionImplMixin, stock.get_impl_cls()),
            (attention.evicting(stock), stock),
        ]
    return pairs


def _calls() -> dict[type, tuple[str, ...]]:
    from vllm import CompletionOutput, SamplingParams
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request
    from vllm.v1.worker.block_table import MultiGroupBlockTable
    from vllm.v1.worker.gpu.block_table import BlockTables

    return {
        BlockPool: (
            "is_block_writable(block)",
            "get_num_free_blocks",
            "get_new_blocks(num_blocks)",
            "evict_blocks(block_ids)",
            "free_blocks(ordered_blocks)",
        ),
        Scheduler: ("finish_requests(request_ids, finished_status)",),
        EngineCoreOutput: (
            "new_token_ids",
            "finish_reason",
            "stop_reason",
            "events",
            "trace_headers",
        ),
        CompletionOutput: ("finish_reason", "stop_reason"),
        EngineCoreOutputs: ("outputs",),
        Request: ("get_finished_reason", "take_events"),
        SamplingParams: ("prompt_logprobs", "prompt_logprob_token_ids"),
        KVCacheManager: ("truncate_computed_blocks(blocks, num_computed_tokens)",),
        GroupCoordinator: (
            "is_first_rank",
            "is_last_rank",
            "isend_object(obj, dst)",
            "recv_object(src)",
        ),
        MultiGroupBlockTable: ("add_row(block_ids, row_idx)",),
        BlockTables: (
            "append_block_ids(req_index, new_block_ids, overwrite)",
            "apply_staged_writes",
        ),
        ModelConfig: (
            "get_total_num_hidden_layers",
            "get_total_num_kv_heads",
            "get_head_size",
            "is_diffusion",
            "is_mm_prefix_lm",
            "is_multimodal_model",
        ),
        CacheConfig: ("kv_offloading_size", "kv_sharing_fast_prefill", "prefix_match_unit"),
        ParallelConfig: ("use_ubatching", "ubatch_size", "local_engines_only"),
        SchedulerConfig: ("scheduler_cls", "disable_chunked_mm_input"),
        CommonAttentionMetadata: (
            "replace",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "causal",
            "query_start_loc",
            "req_idx",
            "block_table_tensor",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "max_seq_len",
            "query_start_loc_cpu",
        ),
    }
