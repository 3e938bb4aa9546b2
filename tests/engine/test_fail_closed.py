"""An engine that cannot evict as promised does not start, and names found, needed and remedy.

Every scenario below breaks one thing. All but one run in a single child process that imports vLLM
once and forks per scenario; the models are two random layers, so an engine takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import harness
from .harness import Mode

pytestmark = pytest.mark.engine
MODE = Mode("v1", "sync")
WITHOUT = "Remedy: serve this model without --kv-eviction."
SHORTER = "Remedy: pass --disable-sliding-window, for contexts no longer than that, or serve this"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    },
    "interleaved": {
        **LLAMA,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma_3": {
        **LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 80,
        "sliding_window_pattern": 2,
    },
    "deepseek": {
        **LLAMA,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 2,
        "num_key_value_heads": 2,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "torch_dtype": "float32",
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": 128,
        "max_target_positions": 256,
        "torch_dtype": "float32",
    },
    "chunked": {**LLAMA, "attention_chunk_size": 64},
    "shared": {**LLAMA, "num_kv_shared_layers": 1},
    "images_both_ways": {**LLAMA, "is_mm_prefix_lm": True},
    "quantised_cache": {
        **LLAMA,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 128,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 128,
        "seq_length": 512,
        "torch_dtype": "float32",
    },
}


@dataclasses.dataclass
class Outcome:
    """How a scenario ended: the exception's type or "", what it said or returned, and its log."""

    error: str
    told: str
    log: str


# Scenarios: run in the child, one fork each ----------------------------------------------------

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def options(model: str = "llama", **extra: Any) -> dict[str, Any]:
    import nexus_vllm

    path = Path.cwd() / model
    given = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 32,
        **nexus_vllm.engine_args(budget=128),
        **extra,
    }
    return harness.engine_options(path, given)


def start(model: str = "llama", **extra: Any) -> Any:
    from vllm import LLM

    return LLM(**options(model, **extra))


def configure(model: str = "llama", **extra: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**options(model, **extra)).create_engine_config()


def generate(llm: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": [i % 100 for i in range(200)]}
    return llm.generate([prompt], params, use_tqdm=False)[0]


@scenario
def healthy() -> Any:
    return generate(start()).kv_transfer_params["kv_eviction"]


@scenario
def policy_that_raises() -> Any:
    """How three requests at once end, the second one's policy broken: why, and their tokens."""
    from vllm import SamplingParams

    llm = start()
    core = llm.llm_engine.engine_core.engine_core
    policies: Any = core.model_executor.driver_worker.worker.evictor.policies
    type(policies["streaming-llm"]).weights = lambda self, seen: 1 / 0

    def ask(*which: str) -> list[Any]:
        prompts: Any = [
            {"prompt_token_ids": [(i + len(w)) % 100 for i in range(200)]} for w in which
        ]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=20,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_policy": policy},
            )
            for policy in which
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ends = [o.outputs[0] for o in outputs]
        return [[end.finish_reason, end.stop_reason, list(end.token_ids)] for end in ends]

    together = ask("nexus", "streaming-llm", "random")
    pool = core.scheduler.pages.block_pool
    free = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return [together, [*ask("nexus"), *ask("random")], free]


@scenario
def backend_not_overridden() -> None:
    from nexus_vllm.engine import attention

    attention.install = lambda: None
    start()


@scenario
def stock_scheduler_in_the_config() -> None:
    from nexus_vllm.engine import compat

    check = compat.check_config

    def check_then_swap(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.scheduler.Scheduler"

    compat.check_config = check_then_swap
    start()


@scenario
def stock_scheduler_behind_the_config() -> None:
    from vllm.config import SchedulerConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    SchedulerConfig.get_scheduler_cls = lambda self: Scheduler
    generate(start())


@scenario
def stock_manager() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry.get_manager_class = lambda *args, **kwargs: FullAttentionManager
    start()


@scenario
def stock_spec() -> None:
    stock = our_backend().__base__
    our_backend().customize_spec = stock.customize_spec
    start()


@scenario
def stock_builder() -> None:
    stock = our_backend().__base__
    our_backend().get_builder_cls = stock.get_builder_cls
    start()


def our_backend() -> Any:
    from nexus_vllm.engine import attention

    return attention.CPU_ATTN


@scenario
def alibi() -> None:
    start("bloom")


@scenario
def attention_sinks() -> None:
    impl = our_backend().get_impl_cls()
    stock = impl.__init__

    def with_sinks(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.sinks = object()

    impl.__init__ = with_sinks
    start()


@scenario
def kv_sharing_layer() -> None:
    from vllm.model_executor.layers.attention.attention import Attention

    stock = Attention.__init__

    @functools.wraps(stock)  # drift reads what it assigns
    def sharing(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        if ".1." in prefix:
            kwargs["kv_sharing_target_layer_name"] = "model.layers.0.self_attn.attn"
        stock(self, *args, prefix=prefix, **kwargs)

    Attention.__init__ = sharing
    start()


@scenario
def kv_sharing_fast_prefill() -> None:
    configure(kv_sharing_fast_prefill=True)


@scenario
def kv_sharing_model() -> None:
    configure("shared")


@scenario
def quantised_layer() -> None:
    change_layer(1, kv_cache_dtype="fp8")
    start()


@scenario
def uneven_layers() -> None:
    change_layer(1, num_kv_heads=2)
    start()


def change_layer(index: int, **attributes: Any) -> None:
    """Give one layer other attributes when it has been built."""
    from vllm.model_executor.layers.attention.attention import Attention

    stock = Attention.__init__

    @functools.wraps(stock)  # drift reads what it assigns
    def changed(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        stock(self, *args, prefix=prefix, **kwargs)
        if f".{index}." in prefix:
            vars(self).update(attributes)

    Attention.__init__ = changed


@scenario
def quantised_cache() -> None:
    configure("quantised_cache")


@scenario
def diffusion() -> None:
    configure(diffusion_config={"canvas_length": 32})


@scenario
def images_both_ways() -> None:
    configure("images_both_ways")


@scenario
def whole_images_without_images() -> Any:
    return configure(disable_chunked_mm_input=True).scheduler_config.scheduler_cls


@scenario
def prefix_match_unit() -> None:
    configure(prefix_match_unit=16)


@scenario
def kv_connector() -> None:
    configure(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"})


@scenario
def kv_offloading() -> None:
    configure(kv_offloading_size=1)


@scenario
def pooling() -> None:
    configure(runner="pooling")


@scenario
def encoder_decoder() -> None:
    configure("whisper")


@scenario
def state_space() -> None:
    configure("mamba")


@scenario
def attention_chunks() -> None:
    configure("chunked")


@scenario
def context_parallelism() -> None:
    configure(tensor_parallel_size=2, decode_context_parallel_size=2)


@scenario
def sliding_window() -> None:
    configure("mistral")


@scenario
def interleaved_sliding_window() -> None:
    configure("interleaved")


@scenario
def gemma_3() -> None:
    configure("gemma_3")


@scenario
def sliding_window_switched_off() -> Any:
    config = configure("interleaved", disable_sliding_window=True, max_model_len=96)
    return config.scheduler_config.scheduler_cls


@scenario
def sliding_window_unpredicted() -> None:
    """The worker's own check, should a model hide its sliding window from the config check."""
    from nexus_vllm.engine import compat

    compat.refusals = lambda config: []
    start("interleaved")


@scenario
def mla() -> None:
    configure("deepseek")


@scenario
def fp8_cache() -> None:
    configure(kv_cache_dtype="fp8")


@scenario
def half_cache_of_a_float_model() -> None:
    configure(kv_cache_dtype="bfloat16")


@scenario
def cache_of_the_models_dtype() -> Any:
    told = generate(start(dtype="float16", kv_cache_dtype="float16"))
    return told.kv_transfer_params["kv_eviction"]


def save_profile(path: str, **changes: Any) -> str:
    """A profile of the model "llama", or of what `changes` say."""
    import torch

    from nexus_vllm import policies
    from nexus_vllm.config import Settings
    from nexus_vllm.profile import ModelFacts, Profile

    score = changes.pop("score", "nexus")
    Profile(
        model=ModelFacts(
            **{"name": "llama", "layers": 2, "kv_heads": 1, "head_size": 64, **changes}
        ),
        score=score,
        parameters=dataclasses.asdict(policies.make(score, Settings())),  # type: ignore[call-overload]
        block_size=32,
        densities=(0.5,),
        shares=torch.full((1, 2, 1), 0.5),
    ).save(Path(path))
    return path


def with_settings(**knobs: Any) -> dict[str, Any]:
    import nexus_vllm

    return nexus_vllm.engine_args(budget=128, **knobs)


@scenario
def profile_of_another_model() -> None:
    configure(**with_settings(profile=save_profile("other.json", name="opt", layers=2)))


@scenario
def profile_of_another_score() -> None:
    configure(**with_settings(profile=save_profile("score.json", score="random")))


@scenario
def profile_of_other_parameters() -> None:
    configure(**with_settings(profile=save_profile("walk.json"), walk_steps=7))


@scenario
def profile_missing() -> None:
    configure(**with_settings(profile="nowhere.json"))


@scenario
def lu_without_profile() -> None:
    configure(**with_settings(allocator="lu"))


@scenario
def lu_by_a_given_profile() -> Any:
    knobs = with_settings(profile=save_profile("given.json"), check_integrity=True)
    return generate(start(**knobs)).kv_transfer_params["kv_eviction"]


@scenario
def lu_by_a_shipped_profile() -> Any:
    """The default, "auto", by what is shipped: where the server's score is its, and where not."""
    from nexus_vllm.engine import compat, profiles

    profiles.config_folder = Path.cwd
    Path("profiles").mkdir()
    save_profile("profiles/llama.json")
    found = []
    for policy in ("nexus", "random"):
        settings = compat.settings_of(configure(**with_settings(policy=policy)))
        asked = [settings.directive({"kv_policy": name}).allocator for name in ("nexus", "random")]
        found.append([bool(settings.profile), *asked])
    return found


@scenario
def speculation_by_a_model() -> None:
    drafts = {"model": options("llama")["model"], "num_speculative_tokens": 2}
    configure(speculative_config=drafts)


@scenario
def speculation_in_a_pipeline() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    configure(speculative_config=drafts, pipeline_parallel_size=2)


@scenario
def block_size() -> None:
    configure(block_size=16)


@scenario
def other_scheduler() -> None:
    configure(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")


@scenario
def other_worker() -> None:
    configure(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")


@scenario
def other_version() -> None:
    from importlib import metadata

    metadata.version = lambda name: "0.33.1" if name.startswith("vllm") else "1"
    configure()


@scenario
def method_renamed() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    Scheduler.__reserve_prefill_lookahead = Scheduler._reserve_prefill_lookahead
    del Scheduler._reserve_prefill_lookahead
    configure()


@scenario
def parameter_added() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    original = FullAttentionManager.get_num_blocks_to_allocate

    def get_num_blocks_to_allocate(
        self: Any, request_id: str, num_tokens: int, new_computed_blocks: Any, group: int
    ) -> Any:
        return original(self, request_id, num_tokens, new_computed_blocks, group)

    FullAttentionManager.get_num_blocks_to_allocate = get_num_blocks_to_allocate
    configure()


@scenario
def hook_gone_offline() -> None:
    change_create_engine_config()
    configure()


def change_create_engine_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs.create_engine_config = lambda self, usage, headless=False: None


def vllm_command(*argv: str) -> None:
    """The `vllm` console script, in this process."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *argv]
    main()


@scenario
def hook_gone_serve() -> None:
    change_create_engine_config()
    vllm_command("serve", "model", "--kv-eviction", "nexus")


@scenario
def hook_gone_help() -> None:
    change_create_engine_config()
    vllm_command("serve", "--help=all")


@scenario
def stock_help() -> None:
    os.environ["VLLM_PLUGINS"] = ""
    vllm_command("serve", "--help=all")


@scenario
def our_help() -> None:
    vllm_command("serve", "--help=all")


@scenario
def stock_config() -> Any:
    os.environ["VLLM_PLUGINS"] = ""
    return plain_config()


@scenario
def our_config() -> Any:
    return plain_config()


def plain_config() -> Any:
    """Arguments and configuration of an engine without eviction, plugins loaded as vLLM does."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"skip_tokenizer_init": True, "max_model_len": 256}
    args = EngineArgs(**harness.engine_options(Path.cwd() / "llama", given))
    config = args.create_engine_config()
    config.instance_id = ""
    told = [repr(args), repr(config), config.compute_hash(), config.parallel_config.worker_cls]
    fields = [field.name for field in dataclasses.fields(EngineArgs)]
    mine = sorted(name for name in sys.modules if name.startswith("nexus_vllm."))
    return {"told": told, "fields": fields, "modules": mine}


def main() -> None:
    """The child: one fork per scenario, one JSON file each, in the folder it runs in."""
    # Everything vLLM needs, imported once; plugins are loaded by the scenarios.
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.llm
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for name, function in SCENARIOS.items():
        child = os.fork()
        if child == 0:
            try:
                run(name, function)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def run(name: str, function: Callable[[], Any]) -> None:
    log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.alarm(120)  # ends a scenario that hangs
    try:
        error, told = "", json.dumps(function())
    except BaseException as raised:
        if not isinstance(raised, SystemExit):
            traceback.print_exc()
        error, told = type(raised).__name__, str(raised)
    sys.stdout.flush()
    Path(f"{name}.json").write_text(json.dumps([error, told]))


# Tests -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every model of MODELS: a config.json and no weights."""
    folder = tmp_path_factory.mktemp("fail-closed")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    environment = harness.child_environment(MODE)
    environment.pop("VLLM_PLUGINS", None)
    return {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def outcomes(folder: Path, environment: dict[str, str]) -> Callable[[str], Outcome]:
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=900)

    def outcome(name: str) -> Outcome:
        log = (folder / f"{name}.log").read_text(errors="replace")
        path = folder / f"{name}.json"
        assert path.exists(), f"{name} died:\n{log[-3000:]}"
        return Outcome(*json.loads(path.read_text()), log)

    return functools.cache(outcome)


Outcomes = Callable[[str], Outcome]


def test_unbroken_the_same_engine_starts_and_evicts(outcomes: Outcomes) -> None:
    healthy = outcomes("healthy")
    assert healthy.error == "", healthy.log[-3000:]
    assert json.loads(healthy.told)["evicted_blocks"] > 0


def test_a_policy_that_raises_ends_its_request_only(outcomes: Outcomes) -> None:
    outcome = outcomes("policy_that_raises")
    assert outcome.error == "", outcome.log[-3000:]
    (first, broken, last), alone, free = json.loads(outcome.told)
    assert [first, last] == alone
    assert [*first[:2], len(first[2])] == ["length", None, 20]
    assert [broken[0], len(broken[2])] == ["error", 1]
    assert "policy 'streaming-llm' with allocator 'uniform'" in broken[1]
    assert "(ZeroDivisionError: division by zero)" in broken[1]
    assert free
    said = "policy streaming-llm, allocator uniform could not choose what stays; the request ends."
    assert outcome.log.count(said) == 1
    assert "ZeroDivisionError: division by zero" in outcome.log


@pytest.mark.parametrize(
    ("name", "found", "needed", "remedy"),
    [
        (
            "backend_not_overridden",
            "layer model.layers.0.self_attn.attn uses CPUAttentionBackendImpl",
            "eviction has been tested with the attention backends CPU_ATTN",
            "Remedy: choose one with --attention-backend, or serve without --kv-eviction.",
        ),
        (
            "stock_scheduler_in_the_config",
            "this engine's scheduler does not evict",
            "worker and scheduler work together",
            "Remedy: start with --kv-eviction, or nexus_vllm.engine_args() offline.",
        ),
        (
            "stock_manager",
            "the model's KV cache has the groups [EvictionSpec in FullAttentionManager]",
            "KV eviction needs exactly one, in EvictionManager",
            WITHOUT,
        ),
        (
            "stock_spec",
            "layer model.layers.0.self_attn.attn has the cache FullAttentionSpec",
            "every layer must be plain full attention and evictable (EvictionSpec)",
            WITHOUT,
        ),
        (
            "stock_builder",
            "attention metadata is built by CPUAttentionMetadataBuilder",
            "only a builder of nexus-vllm hides evicted blocks from attention",
            "Remedy: remove whatever replaces the attention backend",
        ),
        (
            "stock_scheduler_behind_the_config",
            "a step arrived without an eviction plan",
            "another scheduler class is at work",
            "Remedy: start with --kv-eviction",
        ),
        ("alibi", "uses ALiBi", "its bias depends on how many blocks lie between", WITHOUT),
        (
            "attention_sinks",
            "layer model.layers.0.self_attn.attn has attention sinks of its own",
            "they are not part of the scores",
            WITHOUT,
        ),
        (
            "kv_sharing_layer",
            "layer model.layers.1.self_attn.attn shares the KV cache of model.layers.0.self_attn",
            "every layer must have a KV cache of its own to evict from",
            WITHOUT,
        ),
        (
            "kv_sharing_fast_prefill",
            "--kv-sharing-fast-prefill",
            "every layer must see every token of a prompt",
            "Remedy: drop --kv-sharing-fast-prefill.",
        ),
        (
            "kv_sharing_model",
            "the model has layers that share another's KV cache (num_kv_shared_layers=1)",
            "every layer must have a KV cache of its own to evict from",
            WITHOUT,
        ),
        (
            "quantised_layer",
            "layer model.layers.1.self_attn.attn has a KV cache of fp8",
            "scoring reads keys in the model's own dtype, float32",
            WITHOUT,
        ),
        (
            "quantised_cache",
            "the checkpoint quantises the KV cache (kv_cache_scheme in its config.json)",
            "scoring reads keys in the model's own dtype, float32",
            WITHOUT,
        ),
        (
            "uneven_layers",
            "layer model.layers.1.self_attn.attn has 2 query heads and 2 KV heads of size 64, but "
            "model.layers.0.self_attn.attn has 2 query heads and 1 KV heads of size 64",
            "all layers must be alike to deal blocks out among their heads",
            WITHOUT,
        ),
        (
            "diffusion",
            "a diffusion model",
            "a token that has been computed must stay as it is",
            WITHOUT,
        ),
        (
            "images_both_ways",
            "the model attends to images in both directions",
            "prefill must be able to end inside of an image",
            "Remedy: serve text only, with --language-model-only, or without --kv-eviction.",
        ),
        (
            "prefix_match_unit",
            "--prefix-match-unit 16",
            "blocks of 32 tokens must be found whole",
            "Remedy: drop --prefix-match-unit.",
        ),
        (
            "kv_connector",
            "a KV connector (ExampleConnector)",
            "transferring evicted sequences is not supported by this release",
            "Remedy: drop --kv-transfer-config.",
        ),
        (
            "kv_offloading",
            "a KV connector (OffloadingConnector)",
            "transferring evicted sequences is not supported by this release",
            "Remedy: drop --kv-offloading-size (and --kv-transfer-config, if it is given).",
        ),
        (
            "pooling",
            "the model runs as 'pooling'",
            "only generation has a KV cache to evict from",
            WITHOUT,
        ),
        (
            "encoder_decoder",
            "the model is an encoder-decoder",
            "cross-attention blocks cannot be evicted",
            WITHOUT,
        ),
        (
            "state_space",
            "the model has state-space layers",
            "all layers must be attention",
            WITHOUT,
        ),
        (
            "attention_chunks",
            "the model has layers with chunks of 64 tokens",
            "every layer must be plain full attention",
            WITHOUT,
        ),
        (
            "context_parallelism",
            "context parallelism (decode over 2 ranks, prefill over 1)",
            "a block must lie on one rank",
            "Remedy: drop the context-parallel flags.",
        ),
        (
            "sliding_window",
            "the model has layers with a sliding window of 64 tokens",
            "every layer must be plain full attention",
            SHORTER,
        ),
        (
            "interleaved_sliding_window",
            "the model has layers with a sliding window of 96 tokens",
            "every layer must be plain full attention",
            SHORTER,
        ),
        (
            "gemma_3",
            "the model has layers with a sliding window of 80 tokens",
            "every layer must be plain full attention",
            SHORTER,
        ),
        (
            "sliding_window_unpredicted",
            "layer model.layers.0.self_attn.attn has the cache SlidingWindowSpec",
            "every layer must be plain full attention",
            WITHOUT,
        ),
        ("mla", "the model uses MLA", "its latent cache has no keys per head", WITHOUT),
        (
            "fp8_cache",
            "--kv-cache-dtype fp8",
            "scoring reads keys in the model's own dtype, float32",
            "Remedy: drop --kv-cache-dtype.",
        ),
        (
            "half_cache_of_a_float_model",
            "--kv-cache-dtype bfloat16",
            "scoring reads keys in the model's own dtype, float32",
            "Remedy: drop --kv-cache-dtype.",
        ),
        (
            "profile_of_another_model",
            "--kv-profile other.json: profile made for name='opt', this is name='llama'",
            "shares are those of one model, score and block size",
            "Remedy: give the file that `nexus-vllm profile MODEL` makes for them, or no",
        ),
        (
            "profile_of_another_score",
            "--kv-profile score.json: profile made for score='random', this is score='nexus'",
            "shares are those of one model, score and block size",
            "Remedy: give the file that `nexus-vllm profile MODEL` makes for them, or no",
        ),
        (
            "profile_of_other_parameters",
            "profile made for nexus walk_steps=3, this is nexus walk_steps=7",
            "shares are those of one model, score and block size",
            "Remedy: give the file that `nexus-vllm profile MODEL` makes for them, or no",
        ),
        (
            "profile_missing",
            "--kv-profile nowhere.json: [Errno 2] No such file or directory",
            "shares are those of one model, score and block size",
            "Remedy: give the file that `nexus-vllm profile MODEL` makes for them, or no",
        ),
        (
            "lu_without_profile",
            "--kv-allocator lu without a profile",
            "none is shipped for llama with this score and block size",
            "Remedy: make one with `nexus-vllm profile MODEL` and pass it as --kv-profile FILE.",
        ),
        (
            "speculation_by_a_model",
            "speculative decoding by 'draft_model'",
            "of its methods, only ngram has neither layers nor drafts of its own on the device",
            'Remedy: use {"method": "ngram", ...}, or drop --speculative-config.',
        ),
        (
            "speculation_in_a_pipeline",
            "speculative decoding over 2 pipeline stages",
            "drafts must be accepted or rejected before the next step is planned",
            "Remedy: drop --speculative-config or --pipeline-parallel-size.",
        ),
        (
            "other_scheduler",
            "--scheduler-cls vllm.v1.core.sched.scheduler.Scheduler",
            "eviction needs its own scheduler class",
            "Remedy: drop --scheduler-cls.",
        ),
        (
            "other_worker",
            "--worker-cls vllm.v1.worker.cpu_worker.CPUWorker",
            "eviction needs its own worker class",
            "Remedy: drop --worker-cls.",
        ),
        (
            "other_version",
            "vLLM 0.33.1 is installed",
            "this release is made for vLLM 0.31.x or 0.32.x",
            "Remedy: install vLLM 0.31.x or 0.32.x, or another nexus-vllm.",
        ),
        (
            "method_renamed",
            "has changed vllm.v1.core.sched.scheduler.Scheduler._reserve_prefill_lookahead: "
            "it is gone",
            "this release overrides or calls it as it is in vLLM 0.31.x or 0.32.x",
            "Remedy: install vLLM 0.31.x or 0.32.x, or a",
        ),
        (
            "parameter_added",
            "FullAttentionManager.get_num_blocks_to_allocate: it takes (self, request_id, "
            "num_tokens, new_computed_blocks, group), not (self, request_id, num_tokens, ",
            "this release overrides or calls it as it is in vLLM 0.31.x or 0.32.x",
            "Remedy: install vLLM 0.31.x or 0.32.x, or a",
        ),
    ],
)
def test_refuses_to_start(
    outcomes: Outcomes, name: str, found: str, needed: str, remedy: str
) -> None:
    outcome = outcomes(name)
    assert outcome.error == "UnsupportedError", outcome.log[-3000:]
    for part in ("KV eviction refuses to start: ", found, needed, remedy):
        assert part in outcome.told


def test_a_profile_that_fits_is_the_default(outcomes: Outcomes) -> None:
    given = outcomes("lu_by_a_given_profile")
    assert given.error == "", given.log[-3000:]
    told, uniform = (json.loads(o.told) for o in (given, outcomes("healthy")))
    assert (told.pop("allocator"), uniform.pop("allocator")) == ("lu", "uniform")
    assert told["final_blocks"] == uniform["final_blocks"]
    shipped = outcomes("lu_by_a_shipped_profile")
    assert shipped.error == "", shipped.log[-3000:]
    assert json.loads(shipped.told) == [[True, "lu", "lu"], [False, "uniform", "uniform"]]


def test_a_kv_cache_of_the_models_own_dtype_is_accepted_by_name(outcomes: Outcomes) -> None:
    outcome = outcomes("cache_of_the_models_dtype")
    assert outcome.error == "", outcome.log[-3000:]
    assert json.loads(outcome.told) == json.loads(outcomes("healthy").told)


def test_refuses_another_block_size(outcomes: Outcomes) -> None:
    outcome = outcomes("block_size")
    assert outcome.error == "ValueError"
    assert "--block-size 16 does not go with KV eviction: blocks are 32 tokens" in outcome.told
    assert "Drop --block-size, or set force_block_size: true" in outcome.told


@pytest.mark.parametrize("name", ["sliding_window_switched_off", "whole_images_without_images"])
def test_what_is_without_effect_is_no_reason(outcomes: Outcomes, name: str) -> None:
    outcome = outcomes(name)
    assert (outcome.error, json.loads(outcome.told)) == (
        "",
        "nexus_vllm.engine.scheduler.EvictionScheduler",
    )


def test_where_vllm_has_changed_the_flag_is_unknown_and_stock_serving_goes_on(
    outcomes: Outcomes,
) -> None:
    changed = "EngineArgs.create_engine_config has changed, it takes (self, usage, headless)"
    offline = outcomes("hook_gone_offline")
    assert offline.error == "HookError"
    assert changed in offline.told
    assert "Install vLLM 0.31.x or 0.32.x, or a" in offline.told
    served = outcomes("hook_gone_serve")
    assert (served.error, served.told) == ("SystemExit", "2")
    assert "unrecognized arguments: --kv-eviction nexus" in served.log
    assert served.log.count("nexus-vllm is disabled: KV eviction cannot hook into vLLM 0.3") == 1
    assert changed in served.log
    assert outcomes("hook_gone_help").told == "0"
    assert "--kv-eviction" not in outcomes("hook_gone_help").log.split("usage:", 1)[1]


def test_without_the_flag_vllm_is_stock(outcomes: Outcomes) -> None:
    ours, stock = (help_text(outcomes(name)) for name in ("our_help", "stock_help"))
    group = ours[ours.index("KVEviction:") :]
    group = group[: 1 + next(i for i, line in enumerate(group[1:]) if line and line[0] != " ")]
    flags = ["--kv-allocator", "--kv-budget", "--kv-budget-floor", "--kv-eviction"]
    flags += ["--kv-eviction-config", "--kv-profile"]
    assert [line.split()[0] for line in group if line.startswith("  --")] == flags
    start = ours.index("KVEviction:")
    assert ours[:start] + ours[start + len(group) :] == stock

    ours, stock = (json.loads(outcomes(name).told) for name in ("our_config", "stock_config"))
    assert ours["told"] == stock["told"]
    assert ours["fields"] == stock["fields"]
    assert stock["modules"] == []
    assert not [name for name in ours["modules"] if name.endswith((".compat", ".worker"))]


def help_text(outcome: Outcome) -> list[str]:
    """Option lines of a help, from its first group on: the usage line is wrapped anew."""
    assert (outcome.error, outcome.told) == ("SystemExit", "0"), outcome.log[-3000:]
    lines = [line.rstrip() for line in outcome.log.splitlines()]
    return lines[lines.index("positional arguments:") :]


BREAK_A_HOOK = '''
"""Attention backends are never overridden, in this process and all it spawns."""
import importlib.abc, importlib.util, sys

class Breaker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "nexus_vllm.engine.attention":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.install = lambda: None
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Breaker())
'''


@pytest.fixture
def broken_server(
    model_path: Path, tmp_path: Path, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """`vllm serve MODEL --kv-eviction nexus` whose engine process misses one hook."""
    (tmp_path / "sitecustomize.py").write_text(BREAK_A_HOOK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--kv-eviction", "nexus", "--port", str(port), "--host", "127.0.0.1"]
    flags += ["--enforce-eager", "--dtype", "float32", "--load-format", "dummy"]
    flags += ["--max-model-len", "1024"]
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("vllm")), "serve", str(model_path), *flags],
            cwd=tmp_path,
            env={
                **environment,
                "PYTHONPATH": str(tmp_path),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    yield process, port, log
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_with_a_broken_hook_never_answers(
    broken_server: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, log = broken_server
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        with pytest.raises((urllib.error.URLError, ConnectionError, TimeoutError)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
        time.sleep(0.5)
    text = log.read_text(errors="replace")
    assert process.poll() not in (None, 0), text[-3000:]
    assert "KV eviction refuses to start: layer model.layers.0.self_attn.attn uses CPU" in text
    assert "eviction has been tested with the attention backends CPU_ATTN" in text
    assert "Remedy: choose one with --attention-backend" in text
