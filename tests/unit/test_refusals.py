"""What `compat.refusals` says of an engine, on a stub of its configuration.

`tests/engine/test_fail_closed.py` has those that vLLM lets through to us on a CPU.
"""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from vllm.config.cache import CacheDType

import nexus_vllm
from nexus_vllm.config import Settings
from nexus_vllm.engine import attention, compat
from nexus_vllm.engine.manager import EvictionManager, EvictionSpec
from nexus_vllm.engine.scheduler import EvictionScheduler

WITHOUT = "serve this model without --kv-eviction"


def config(**changes: Any) -> Any:
    """A configuration that is not refused, but for `changes`: {"part.attribute": value}."""
    stub = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            get_sliding_window=lambda: None,
            dtype=torch.bfloat16,
            runner_type="generate",
            use_mla=False,
            is_encoder_decoder=False,
            is_hybrid=False,
            is_attention_free=False,
            is_diffusion=False,
            is_mm_prefix_lm=False,
            is_multimodal_model=False,
            attention_chunk_size=None,
        ),
        cache_config=SimpleNamespace(
            sliding_window=None,
            block_size=32,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_match_unit=None,
            kv_sharing_fast_prefill=False,
            kv_offloading_size=None,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            distributed_executor_backend="mp",
            world_size=1,
            use_ubatching=False,
            enable_dbo=False,
            ubatch_size=0,
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, disable_chunked_mm_input=False),
        quant_config=None,
        diffusion_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        additional_config=nexus_vllm.engine_args(budget=128)["additional_config"],
    )
    for path, value in changes.items():
        part, _, attribute = path.rpartition(".")
        vars(vars(stub)[part] if part else stub)[attribute] = value
    return stub


class OtherScheduler:
    """Stands for one that a plugin has put into the configuration."""


def test_a_plain_engine_is_not_refused() -> None:
    assert compat.refusals(config()) == []
    ours = {"scheduler_config.scheduler_cls": compat.ASYNC_SCHEDULER}
    assert compat.refusals(config(**ours)) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"scheduler_config.scheduler_cls": "other.Scheduler"},
            (
                "the scheduler other.Scheduler is already chosen",
                "eviction needs its own scheduler class",
                "remove the option or plugin that chooses it, or serve without --kv-eviction",
            ),
        ),
        (
            {"scheduler_config.scheduler_cls": OtherScheduler},
            (
                f"the scheduler {__name__}.OtherScheduler is already chosen",
                "eviction needs its own scheduler class",
                "remove the option or plugin that chooses it, or serve without --kv-eviction",
            ),
        ),
        (
            {
                "model_config.is_diffusion": True,
                "scheduler_config.scheduler_cls": (
                    "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
                ),
            },
            ("a diffusion model", "a token that has been computed must stay as it is", WITHOUT),
        ),
        (
            {
                "model_config.is_multimodal_model": True,
                "scheduler_config.disable_chunked_mm_input": True,
            },
            (
                "--disable-chunked-mm-input",
                "prefill must be able to end inside of an image",
                "drop --disable-chunked-mm-input",
            ),
        ),
        (
            {
                "model_config.is_multimodal_model": True,
                "model_config.is_mm_prefix_lm": True,
                "scheduler_config.disable_chunked_mm_input": True,
            },
            (
                "the model attends to images in both directions",
                "prefill must be able to end inside of an image",
                "serve text only, with --language-model-only, or without --kv-eviction",
            ),
        ),
        (
            {
                "additional_config": {"kv_eviction": {"policy": "kvzip"}},
                "cache_config.enable_prefix_caching": False,
            },
            (
                "--no-enable-prefix-caching with the policy kvzip",
                "a replay finds its prompt in the prefix cache",
                "drop --no-enable-prefix-caching, or choose another policy",
            ),
        ),
        (
            {"parallel_config.use_ubatching": True, "parallel_config.enable_dbo": True},
            ("--enable-dbo", "batches must not be split in the worker", "drop --enable-dbo"),
        ),
        (
            {"parallel_config.use_ubatching": True, "parallel_config.ubatch_size": 4},
            ("--ubatch-size 4", "batches must not be split in the worker", "drop --ubatch-size"),
        ),
        (
            {"parallel_config.prefill_context_parallel_size": 2},
            (
                "context parallelism (decode over 1 ranks, prefill over 2)",
                "a block must lie on one rank",
                "drop the context-parallel flags",
            ),
        ),
        (
            {
                "parallel_config.distributed_executor_backend": "external_launcher",
                "parallel_config.world_size": 2,
            },
            (
                "the executor external_launcher over 2 ranks",
                "one scheduler must hear of what happens on all ranks",
                "drop --distributed-executor-backend",
            ),
        ),
    ],
)
def test_what_only_a_stub_can_show(changes: dict[str, Any], told: tuple[str, str, str]) -> None:
    assert compat.refusals(config(**changes)) == [told]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_cache_is_refused_unless_it_is_of_the_models_own_dtype(dtype: torch.dtype) -> None:
    """Whatever name vLLM takes for it."""
    own = {"auto", str(dtype).removeprefix("torch.")} & {*get_args(CacheDType)}
    for name in get_args(CacheDType):
        changes = {"model_config.dtype": dtype, "cache_config.cache_dtype": name}
        found = compat.refusals(config(**changes))
        assert bool(found) == (name not in own), name
        if found:
            assert found == [
                (
                    f"--kv-cache-dtype {name}",
                    f"scoring reads keys in the model's own dtype, {str(dtype)[6:]}",
                    "drop --kv-cache-dtype",
                )
            ]


def test_a_match_unit_that_is_a_block_or_unused_is_no_reason() -> None:
    assert compat.refusals(config(**{"cache_config.prefix_match_unit": 32})) == []
    unused = {"cache_config.prefix_match_unit": 16, "cache_config.enable_prefix_caching": False}
    assert compat.refusals(config(**unused)) == []


def test_hashes_finer_than_blocks_are_refused_by_the_scheduler() -> None:
    manager = EvictionManager.__new__(EvictionManager)
    manager.block_size = 32
    coordinator = SimpleNamespace(single_type_managers=[manager])
    scheduler: Any = SimpleNamespace(
        eviction=Settings(),
        hash_block_size=32,
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
    )
    assert EvictionScheduler._only_manager(scheduler) is manager
    scheduler.hash_block_size = 16
    with pytest.raises(compat.UnsupportedError) as refused:
        EvictionScheduler._only_manager(scheduler)
    assert refused.value.refusal == (
        "prefixes are hashed every 16 tokens",
        "blocks of 32 tokens must be found whole",
        "drop --prefix-match-unit",
    )


def test_only_a_plain_spec_becomes_evictable() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    backend: Any = attention.CPU_ATTN
    plain = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    others: list[dict[str, Any]] = [
        {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR},
        {"non_causal": True},
    ]
    assert type(backend.customize_spec(FullAttentionSpec(**plain))) is EvictionSpec
    for other in others:
        assert (
            type(backend.customize_spec(FullAttentionSpec(**plain, **other))) is FullAttentionSpec
        )
