"""What this plugin asks of vLLM, and what it refuses to run with.

Everything here fails closed: an engine that cannot evict as promised does not start.
"""

import copy
from typing import TYPE_CHECKING, Any

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.engine.cli import CONFIG_KEY, active_settings
from nexus_vllm.engine.hooks import SUPPORTED_TOLD, SUPPORTED_VLLM, vllm_version
from nexus_vllm.plan import StepPlan, StepReport

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

WORKER = "nexus_vllm.engine.worker.EvictionWorker"
SCHEDULER = "nexus_vllm.engine.scheduler.EvictionScheduler"
ASYNC_SCHEDULER = "nexus_vllm.engine.scheduler.AsyncEvictionScheduler"

_PLAN = "kv_eviction_plan"
_REPORT = "kv_eviction_report"


class UnsupportedError(ValueError):
    """KV eviction cannot run like this. Names what was found, what is needed and what to do."""

    def __init__(self, found: str, needed: str, remedy: str) -> None:
        self.refusal = (found, needed, remedy)
        super().__init__(f"KV eviction refuses to start: {found}; {needed}. Remedy: {remedy}.")


def settings_of(vllm_config: "VllmConfig") -> Settings:
    """The settings an engine was started with."""
    settings = active_settings(vllm_config.additional_config)
    if settings is None:
        raise UnsupportedError(
            f"additional_config has no {CONFIG_KEY!r}",
            "this class only serves engines started with it",
            "use --kv-eviction, or nexus_vllm.engine_args() offline",
        )
    return settings


def check_version() -> None:
    """Refuse a vLLM this release was not written for."""
    version = vllm_version()
    if not version.startswith(tuple(f"{supported}." for supported in SUPPORTED_VLLM)):
        raise UnsupportedError(
            f"vLLM {version} is installed",
            f"this release is made for vLLM {SUPPORTED_TOLD}",
            f"install vLLM {SUPPORTED_TOLD}, or another nexus-vllm",
        )


def prepare_engine_args(engine_args: "EngineArgs", settings: Settings) -> None:
    """Name our worker before vLLM's config picks the platform's own. Raises UnsupportedError."""
    check_version()
    if engine_args.worker_cls not in ("auto", WORKER):
        raise UnsupportedError(
            f"--worker-cls {engine_args.worker_cls}",
            "eviction needs its own worker class",
            "drop --worker-cls",
        )
    if engine_args.scheduler_cls is not None:
        raise UnsupportedError(
            f"--scheduler-cls {engine_args.scheduler_cls}",
            "eviction needs its own scheduler class",
            "drop --scheduler-cls",
        )
    engine_args.worker_cls = WORKER


def check_config(vllm_config: "VllmConfig") -> None:
    """Refuse what eviction cannot serve, then settle the profile and choose the scheduler.

    Raises UnsupportedError.
    """
    for found, needed, remedy in [*drifted(), *refusals(vllm_config)]:
        raise UnsupportedError(found, needed, remedy)
    from nexus_vllm.engine import profiles  # imports this module

    # All processes read their settings from here: server, scheduler and workers.
    vllm_config.additional_config[CONFIG_KEY] = profiles.settle(vllm_config).to_json()
    # After the config is built: only then has vLLM decided between its two schedulers.
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER


def wrong_parameters(settings: Settings) -> list[tuple[str, str, str]]:
    """Parameters that a policy does not take, as `refusals`."""
    found = []
    for part in ("", *settings.variants):
        own = settings.of(part)
        for name in own.parameters:
            try:
                policies.make(name, own)
            except ValueError as error:
                where = f"variants.{part}." if part else ""
                needed = f"{where}parameters.{name} are that policy's own"
                found.append((str(error), needed, "correct --kv-eviction-config"))
    return found


def drifted() -> list[tuple[str, str, str]]:
    """Every symbol of vLLM that is not what our overrides were written for, as `refusals`."""
    from nexus_vllm.engine import drift  # imports the overrides, which import this module

    return [
        (
            f"vLLM {vllm_version()} has changed {symbol}: {how}",
            f"this release overrides or calls it as it is in vLLM {SUPPORTED_TOLD}",
            f"install vLLM {SUPPORTED_TOLD}, or a nexus-vllm release made for this one",
        )
        for symbol, how in drift.installed()
    ]


def refusals(vllm_config: "VllmConfig") -> list[tuple[str, str, str]]:
    """Everything about this engine that eviction does not support: (found, needed, remedy)."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, settings = vllm_config.parallel_config, settings_of(vllm_config)
    without = "serve this model without --kv-eviction"
    # Read by default: not every model's own config has these. What is missed so is refused by the
    # worker, which looks at the layers themselves.
    layers = set(getattr(model.hf_text_config, "layer_types", None) or ())
    window = model.get_sliding_window()
    sliding = window is not None and (
        cache.sliding_window is not None or "sliding_attention" in layers
    )
    scheduler = vllm_config.scheduler_config
    decode_ranks = parallel.decode_context_parallel_size
    prefill_ranks = parallel.prefill_context_parallel_size
    microbatches = (
        "--enable-dbo" if parallel.enable_dbo else f"--ubatch-size {parallel.ubatch_size}"
    )
    launched_apart = parallel.distributed_executor_backend == "external_launcher"
    connector, connector_flag = vllm_config.kv_transfer_config, "--kv-transfer-config"
    if cache.kv_offloading_size is not None:  # of which vLLM has made a connector
        connector_flag = "--kv-offloading-size (and --kv-transfer-config, if it is given)"
    drafts = vllm_config.speculative_config
    diffusion = model.is_diffusion or vllm_config.diffusion_config is not None
    shared_layers = getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0
    own_dtype = keys_needed(model)
    checks = [
        (
            model.runner_type != "generate",
            f"the model runs as {model.runner_type!r}",
            "only generation has a KV cache to evict from",
            without,
        ),
        (
            diffusion,
            "a diffusion model",
            "a token that has been computed must stay as it is",
            without,
        ),
        (
            not diffusion and scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER),
            f"the scheduler {_qualified(scheduler.scheduler_cls)} is already chosen",
            "eviction needs its own scheduler class",
            "remove the option or plugin that chooses it, or serve without --kv-eviction",
        ),
        (model.use_mla, "the model uses MLA", "its latent cache has no keys per head", without),
        (
            model.is_encoder_decoder,
            "the model is an encoder-decoder",
            "cross-attention blocks cannot be evicted",
            without,
        ),
        (
            model.is_hybrid or model.is_attention_free,
            "the model has state-space layers",
            "all layers must be attention",
            without,
        ),
        (
            sliding,
            f"the model has layers with a sliding window of {window} tokens",
            "every layer must be plain full attention",
            f"pass --disable-sliding-window, for contexts no longer than that, or {without}",
        ),
        (
            model.attention_chunk_size is not None,
            f"the model has layers with chunks of {model.attention_chunk_size} tokens",
            "every layer must be plain full attention",
            without,
        ),
        (
            model.is_mm_prefix_lm,
            "the model attends to images in both directions",
            "prefill must be able to end inside of an image",
            "serve text only, with --language-model-only, or without --kv-eviction",
        ),
        (
            # Without effect on a model of text alone.
            scheduler.disable_chunked_mm_input
            and model.is_multimodal_model
            and not (model.is_mm_prefix_lm or model.is_encoder_decoder),
            "--disable-chunked-mm-input",
            "prefill must be able to end inside of an image",
            "drop --disable-chunked-mm-input",
        ),
        (
            cache.block_size != settings.block_size,
            f"vLLM chose a KV block of {cache.block_size} tokens",
            f"eviction is set up for {settings.block_size}",
            f"pass --block-size {settings.block_size}",
        ),
        (
            cache.enable_prefix_caching
            and cache.prefix_match_unit not in (None, settings.block_size),
            f"--prefix-match-unit {cache.prefix_match_unit}",
            f"blocks of {settings.block_size} tokens must be found whole",
            "drop --prefix-match-unit",
        ),
        (
            not cache.enable_prefix_caching and policies.POLICIES[settings.policy].needs_replay,
            f"--no-enable-prefix-caching with the policy {settings.policy}",
            "a replay finds its prompt in the prefix cache",
            "drop --no-enable-prefix-caching, or choose another policy",
        ),
        (
            # As above: of vLLM's quantisation configs, some have it.
            getattr(vllm_config.quant_config, "kv_cache_scheme", None) is not None
            and cache.cache_dtype == "auto",
            "the checkpoint quantises the KV cache (kv_cache_scheme in its config.json)",
            own_dtype,
            without,
        ),
        (
            not in_model_dtype(cache.cache_dtype, model),
            f"--kv-cache-dtype {cache.cache_dtype}",
            own_dtype,
            "drop --kv-cache-dtype",
        ),
        (
            shared_layers > 0,
            f"the model has layers that share another's KV cache "
            f"(num_kv_shared_layers={shared_layers})",
            "every layer must have a KV cache of its own to evict from",
            without,
        ),
        (
            cache.kv_sharing_fast_prefill,
            "--kv-sharing-fast-prefill",
            "every layer must see every token of a prompt",
            "drop --kv-sharing-fast-prefill",
        ),
        (
            max(decode_ranks, prefill_ranks) > 1,
            f"context parallelism (decode over {decode_ranks} ranks, prefill over {prefill_ranks})",
            "a block must lie on one rank",
            "drop the context-parallel flags",
        ),
        (
            launched_apart and parallel.world_size > 1,
            f"the executor external_launcher over {parallel.world_size} ranks",
            "one scheduler must hear of what happens on all ranks",
            "drop --distributed-executor-backend",
        ),
        (
            parallel.use_ubatching,
            microbatches,
            "batches must not be split in the worker",
            f"drop {microbatches.split()[0]}",
        ),
        (
            drafts is not None and drafts.method != "ngram",
            f"speculative decoding by {drafts and drafts.method!r}",
            "of its methods, only ngram has neither layers nor drafts of its own on the device",
            'use {"method": "ngram", ...}, or drop --speculative-config',
        ),
        (
            drafts is not None and parallel.pipeline_parallel_size > 1,
            f"speculative decoding over {drafts and parallel.pipeline_parallel_size} "
            "pipeline stages",
            "drafts must be accepted or rejected before the next step is planned",
            "drop --speculative-config or --pipeline-parallel-size",
        ),
        (
            connector is not None,
            f"a KV connector ({connector and connector.kv_connector})",
            "transferring evicted sequences is not supported by this release",
            f"drop {connector_flag}",
        ),
    ]
    told = [(found, needed, remedy) for refused, found, needed, remedy in checks if refused]
    return told + wrong_parameters(settings)


def in_model_dtype(cache_dtype: str, model_config: "ModelConfig") -> bool:
    """Whether a KV cache of vLLM's `cache_dtype` holds keys as the model computes them."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return bool(kv_cache_dtype_str_to_dtype(cache_dtype, model_config) == model_config.dtype)


def keys_needed(model_config: "ModelConfig") -> str:
    """What a KV cache of another dtype is told."""
    dtype = str(model_config.dtype).removeprefix("torch.")
    return f"scoring reads keys in the model's own dtype, {dtype}"


def _qualified(thing: Any) -> str:
    """A class given as such or by its name, for messages."""
    return f"{thing.__module__}.{thing.__qualname__}" if isinstance(thing, type) else str(thing)


# The plan and the report travel as attributes: vLLM pickles both carriers whole. Remove when its
# SchedulerOutput and ModelRunnerOutput have a field for out-of-tree extensions.


def attach_plan(output: "SchedulerOutput", plan: StepPlan) -> None:
    """Let a step's plan ride on its scheduler output."""
    vars(output)[_PLAN] = plan


def plan_of(output: "SchedulerOutput") -> StepPlan:
    """The plan that rides on a scheduler output. Raises UnsupportedError if there is none."""
    plan: StepPlan | None = getattr(output, _PLAN, None)
    if plan is None:
        raise UnsupportedError(
            "a step arrived without an eviction plan",
            "another scheduler class is at work",
            "start with --kv-eviction, or nexus_vllm.engine_args() offline",
        )
    return plan


def with_report(output: "ModelRunnerOutput", report: StepReport) -> "ModelRunnerOutput":
    """A copy of the output, which has come from the device, with the report on it; vLLM shares one
    empty output among steps."""
    output = copy.copy(output)
    vars(output)[_REPORT] = report.settle()
    return output


def report_of(output: "ModelRunnerOutput") -> StepReport | None:
    """The report on a model runner's output, if any."""
    return getattr(output, _REPORT, None)
