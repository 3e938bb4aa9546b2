"""What the front end does about eviction: refuse what cannot be done, tell why a request failed.

Directives are validated here once more, whatever way they came, before the engine sees them.

`SamplingParams(extra_args={"kv_budget": ...})` offline, `vllm_xargs` on any route, and whatever
slips past the middleware all meet in `InputProcessor.process_inputs`.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from nexus_vllm.admission import carried_pages, plans
from nexus_vllm.config import DirectiveError, Settings
from nexus_vllm.engine.hooks import wrap


def install() -> None:
    """Wrap `InputProcessor.process_inputs` with the check, `AsyncLLM.generate` with the reason.

    Symptom without: a malformed directive reaches the scheduler, where an error ends the engine.
    Cause: vLLM lets no plugin but a logits processor validate a request at admission. Remove when
    it does.

    Symptom without: of a policy that raised, a client hears "Internal server error". Cause: vLLM's
    server has no other words for the finish reason "error". Remove when it tells a reason.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"), _validating)
    wrap(AsyncLLM, "generate", ("self", "prompt", "sampling_params", "request_id"), _telling)


def _validating(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        settings = _settings(self)
        if settings is not None:
            validate(params, settings)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if settings is not None:
            fit(request, settings, self.vllm_config)
        return request

    return process_inputs


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        from vllm.exceptions import GenerationError

        async with aclosing(original(self, *args, **kwargs)) as outputs:  # its end aborts
            async for output in outputs:
                for one in output.outputs:
                    # Only the scheduler's `_fail` gives an error a reason.
                    if one.finish_reason == "error" and isinstance(one.stop_reason, str):
                        raise GenerationError(one.stop_reason)
                yield output

    return generate


def validate(params: Any, settings: Settings) -> None:
    """Raise vLLM's own validation error (HTTP 400) when the directive in `params` is malformed."""
    with _as_validation_error():
        settings.directive(getattr(params, "extra_args", None))


def scores_prompt(params: Any) -> bool:
    """Whether a request wants logprobs of its prompt, each of which must see all tokens before."""
    if params is None:  # a pooling request
        return False
    asked = (params.prompt_logprobs, params.prompt_logprob_token_ids)
    return any(value is not None for value in asked)


def fit(request: Any, settings: Settings, vllm_config: Any) -> None:
    """Refuse (HTTP 400) what the pool can never carry to its end, rather than let it wait forever.

    A sequence that keeps everything may grow until the pool is full, then ends with "length", as
    it does at vLLM's `max_model_len`.
    """
    params, pool = request.sampling_params, vllm_config.cache_config.num_gpu_blocks
    if params is None or not pool:
        return
    from vllm.utils import length_from_prompt_token_ids_or_embeds

    # vLLM's front end sums up the pools of its data-parallel engines; one page is its null block.
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    drafts = vllm_config.num_speculative_tokens
    longest = vllm_config.model_config.max_model_len
    pages = carried_pages(pool // engines - 1, drafts, settings.block_size, longest)
    prompt = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    with _as_validation_error():
        directive = settings.directive(params.extra_args)
        scored = scores_prompt(params)
        found = plans(directive, prompt, params.max_tokens, settings, pages, scored)
        tokens = pages * settings.block_size
        if not found and request.resumable and tokens < longest:
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                f"a session may grow to max_model_len={longest}, the pool holds {tokens} tokens",
                "Give it a budget, such as 20%.",
            )
        if found and request.resumable and drafts:
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                "a session's turn that ends among accepted drafts goes on from tokens that were "
                "never said",
                "Send whole prompts, or serve without --speculative-config.",
            )
        if found and request.resumable and scored:
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                "prompt_logprobs must see the whole prompt, and a session's next one comes when "
                "part of the last may be gone",
                "Use full, or drop prompt_logprobs.",
            )
        if not found and params.min_tokens > tokens - prompt:
            # With fewer max_tokens than that, the parameters would not be read by the engine.
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                f"min_tokens={params.min_tokens} after a prompt of {prompt} tokens need all of "
                f"their KV, the pool holds {tokens} tokens",
                "Give it a budget, such as 20%, or lower min_tokens.",
            )
    if not found:
        params.max_tokens = min(params.max_tokens, tokens - prompt)


@contextmanager
def _as_validation_error() -> Iterator[None]:
    from vllm.exceptions import VLLMValidationError

    from nexus_vllm.server.metrics import rejected

    try:
        yield
    except DirectiveError as error:
        rejected(error.reason)
        raise VLLMValidationError(str(error), parameter=error.field) from None


def _settings(processor: Any) -> Settings | None:
    """The engine's settings, read once per processor."""
    from nexus_vllm.engine.cli import active_settings

    known = vars(processor)
    if "nexus_settings" not in known:
        known["nexus_settings"] = active_settings(processor.vllm_config.additional_config)
    settings: Settings | None = known["nexus_settings"]
    return settings
