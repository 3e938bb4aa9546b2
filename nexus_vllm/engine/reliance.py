"""What of vLLM this plugin relies on: classes it overrides, and what it uses of their objects.

`drift` compares both with the installed vLLM before an engine starts. `unit/test_drift.py` reads
our code and fails where it uses anything that is not in here, or no longer uses what is.
"""

import sys
from typing import Any


def overrides() -> list[tuple[type, type]]:
    """(our class, vLLM's class under it)."""
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
    for name in attention.admitted():
        stock: Any = attention._stock(name)
        pairs += [
            (attention.EvictionBuilderMixin, stock.get_builder_cls()),
            (attention.EvictionImplMixin, stock.get_impl_cls()),
            (attention.evicting(stock), stock),
        ]
    return pairs


def uses() -> dict[type, tuple[str, ...]]:
    """By vLLM's class: `name` of what is read or written, `name(parameter, ...)` of what is called.

    Of the parameters only the leading ones, without self, that we pass. `__dict__`: we attach
    something of our own.
    """
    import vllm.config as config
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.distributed.parallel_state import GroupCoordinator, Handle
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import GenerationError, VLLMValidationError
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.platforms import current_platform
    from vllm.tokenizers import TokenizerLike
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        CommonAttentionMetadata,
    )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        SingleTypeKVCacheManager,
    )
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.block_table import MultiGroupBlockTable
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        ModelCudaGraphManager,
    )
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
    from vllm.v1.worker.utils import AttentionGroup

    from nexus_vllm.engine import attention, worker

    table: dict[Any, tuple[str, ...]] = {
        # Configuration
        EngineArgs: ("additional_config", "block_size", "scheduler_cls", "worker_cls"),
        config.VllmConfig: (
            "additional_config",
            "cache_config",
            "diffusion_config",
            "kv_transfer_config",
            "max_concurrent_batches",
            "model_config",
            "num_speculative_tokens",
            "parallel_config",
            "quant_config",
            "scheduler_config",
            "speculative_config",
        ),
        config.ModelConfig: (
            "attention_chunk_size",
            "dtype",
            "get_head_size()",
            "get_sliding_window()",
            "get_total_num_hidden_layers()",
            "get_total_num_kv_heads()",
            "hf_text_config",
            "is_attention_free",
            "is_diffusion",
            "is_encoder_decoder",
            "is_hybrid",
            "is_mm_prefix_lm",
            "is_multimodal_model",
            "max_model_len",
            "model",
            "runner_type",
            "skip_tokenizer_init",
            "use_mla",
        ),
        config.CacheConfig: (
            "block_size",
            "cache_dtype",
            "enable_prefix_caching",
            "kv_offloading_size",
            "kv_sharing_fast_prefill",
            "num_gpu_blocks",
            "prefix_match_unit",
            "sliding_window",
        ),
        config.ParallelConfig: (
            "data_parallel_size",
            "data_parallel_size_local",
            "decode_context_parallel_size",
            "distributed_executor_backend",
            "enable_dbo",
            "local_engines_only",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "tensor_parallel_size",
            "ubatch_size",
            "use_ubatching",
            "world_size",
        ),
        config.SchedulerConfig: (
            "async_scheduling",
            "disable_chunked_mm_input",
            "max_num_seqs",
            "scheduler_cls",
        ),
        config.SpeculativeConfig: ("method",),
        config.KVTransferConfig: ("kv_connector",),
        # Front end
        InputProcessor: ("__dict__", "vllm_config"),
        EngineCoreRequest: (
            "mm_features",
            "prompt_embeds",
            "prompt_token_ids",
            "resumable",
            "sampling_params",
        ),
        SamplingParams: (
            "extra_args",
            "ignore_eos",
            "max_tokens",
            "min_tokens",
            "prompt_logprob_token_ids",
            "prompt_logprobs",
            "temperature",
        ),
        AsyncLLM: ("input_processor", "vllm_config"),
        UsageContext: ("OPENAI_API_SERVER",),
        RequestOutput: ("outputs",),
        CompletionOutput: ("finish_reason", "stop_reason"),
        GenerationError: ("__init__(message)",),
        VLLMValidationError: ("__init__(message, *, parameter)",),
        # Scheduler
        Scheduler: (
            "hash_block_size",
            "kv_cache_manager",
            "kv_holding_waiting",
            "max_model_len",
            "max_num_scheduled_tokens",
            "num_spec_tokens",
            "running",
            "structured_output_manager",
            "vllm_config",
            "waiting",
        ),
        StructuredOutputManager: ("tokenizer",),
        LoRARequest: ("load_inplace",),
        TokenizerLike: ("encode(text, truncation, max_length, add_special_tokens)",),
        RequestQueue: ("peek_request()",),
        Request: (
            "__init__(request_id, prompt_token_ids, sampling_params, pooling_params, "
            "client_index, arrival_time, prompt_embeds, prompt_is_token_ids, mm_features, "
            "lora_request, cache_salt, priority, trace_headers, block_hasher)",
            "_block_hasher",
            "arrival_time",
            "block_hashes",
            "cache_salt",
            "client_index",
            "get_finished_reason()",
            "lora_request",
            "max_tokens",
            "num_computed_tokens",
            "num_preemptions",
            "num_prompt_tokens",
            "num_tokens",
            "num_tokens_with_spec",
            "priority",
            "prompt_token_ids",
            "request_id",
            "resumable",
            "sampling_params",
            "status",
            "take_events()",
            "trace_headers",
        ),
        RequestStatus: (
            "FINISHED_ABORTED",
            "FINISHED_ERROR",
            "FINISHED_LENGTH_CAPPED",
            "RUNNING",
        ),
        SchedulerOutput: (
            "__dict__",
            "num_scheduled_tokens",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
        ),
        NewRequestData: ("num_computed_tokens", "req_id"),
        CachedRequestData: ("num_computed_tokens", "req_ids", "resumed_req_ids"),
        ModelRunnerOutput: ("__dict__",),
        AsyncModelRunnerOutput: ("get_output()",),
        EngineCoreOutput: (
            "events",
            "finish_reason",
            "new_token_ids",
            "request_id",
            "stop_reason",
            "trace_headers",
        ),
        EngineCoreOutputs: ("outputs",),
        SchedulerStats: ("kv_connector_stats",),
        # Pages
        KVCacheManager: ("coordinator", "truncate_computed_blocks(blocks, num_computed_tokens)"),
        KVCacheCoordinator: ("single_type_managers",),
        KVCacheBlocks: ("blocks",),
        SingleTypeKVCacheManager: ("block_size", "kv_cache_spec"),
        FullAttentionManager: ("_null_block", "block_pool", "block_size", "req_to_blocks"),
        BlockPool: (
            "blocks",
            "evict_blocks(block_ids)",
            "free_blocks(ordered_blocks)",
            "get_new_blocks(num_blocks)",
            "get_num_free_blocks()",
            "is_block_writable(block)",
            "num_gpu_blocks",
        ),
        KVCacheBlock: ("block_hash", "block_id", "is_null", "ref_cnt"),
        FullAttentionSpec: ("kv_quant_mode", "non_causal", "page_size_bytes"),
        KVCacheSpecRegistry: ("register(kvcache_spec_cls, manager_class, uniform_type_base_spec)",),
        # Worker and attention
        worker.EvictionWorker.__base__: (
            "device",
            "get_model()",
            "model_config",
            "model_runner",
            "vllm_config",
        ),
        RotaryEmbedding: (
            "cos_sin_cache",
            "forward_native(positions, query, key)",
            "head_size",
            "is_neox_style",
        ),
        GroupCoordinator: (
            "is_first_rank",
            "is_last_rank",
            "isend_object(obj, dst)",
            "recv_object(src)",
            "world_size",
        ),
        Handle: ("wait()",),
        Attention: (
            "attn_backend",
            "head_size",
            "impl",
            "kv_cache",
            "kv_cache_dtype",
            "kv_sharing_target_layer_name",
            "num_heads",
            "num_kv_heads",
        ),
        AttentionGroup: ("metadata_builders",),
        AttentionBackend: ("get_builder_cls()", "get_impl_cls()", "get_name()"),
        AttentionBackendEnum: ("get_class()",),
        AttentionCGSupport: ("NEVER",),
        AttentionSpec: ("block_size",),
        KVCacheLayout: ("LBHNC",),
        type(current_platform): ("device_type",),
        CommonAttentionMetadata: (
            "block_table_tensor",
            "causal",
            "max_query_len",
            "max_seq_len",
            "num_actual_tokens",
            "num_reqs",
            "query_start_loc",
            "query_start_loc_cpu",
            "replace()",
            "req_idx",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
        ),
        CPUAttentionMetadata: ("__dict__", "num_actual_tokens"),
        # CUDA graphs
        config.CUDAGraphMode: ("FULL",),
        CudagraphDispatcher: (
            "__dict__",
            "dispatch(num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes, "
            "invalid_modes)",
        ),
        ModelCudaGraphManager: (
            "__dict__",
            "dispatch(num_reqs, num_tokens, uniform_token_count)",
            "max_num_reqs",
        ),
        BatchExecutionDescriptor: ("cg_mode", "num_reqs"),
        # Model runner V1
        GPUModelRunnerV1: (
            "attn_groups",
            "cudagraph_dispatcher",
            "device",
            "discard_request_mask",
            "input_batch",
            "prepare_inputs_event",
            "requests",
        ),
        InputBatch: ("block_table", "generators", "req_id_to_index", "req_ids"),
        CachedRequestState: ("block_ids",),
        MultiGroupBlockTable: ("add_row(block_ids, row_idx)",),
        CpuGpuBuffer: ("np",),
        # Model runner V2
        GPUModelRunnerV2: (
            "attn_groups",
            "block_tables",
            "cudagraph_manager",
            "device",
            "req_states",
        ),
        RequestState: ("index_to_req_id", "req_id_to_index"),
        BlockTables: (
            "append_block_ids(req_index, new_block_ids, overwrite)",
            "apply_staged_writes()",
            "block_tables",
            "num_blocks",
        ),
        UvaBackedTensor: ("np",),
        StagedWriteTensor: ("gpu",),
    }
    # Of a server only; nothing else need import them.
    server = "vllm.entrypoints.openai."
    if responses := sys.modules.get(server + "responses.serving"):
        table[responses.OpenAIServingResponses] = ("engine_client",)
    if completion := sys.modules.get(server + "completion.protocol"):
        table[completion.CompletionRequest] = ("vllm_xargs",)
    if chat := sys.modules.get(server + "chat_completion.protocol"):
        table[chat.ChatCompletionRequest] = ("vllm_xargs",)
    for name in attention.admitted():
        stock = attention._stock(name)
        table[stock.get_builder_cls()] = (
            "__dict__",
            "kv_cache_spec",
            *attention.HEADS.get(name, ("num_heads", "num_kv_heads")),
            "vllm_config",
        )
        table[stock.get_impl_cls()] = (
            "alibi_slopes",
            "do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)",
            "scale",
            "sinks",
        )
    return table
