"""What the front end does about eviction: refuse what cannot be done, tell why a request failed.

Directives are validated here once more, whatever way they came, before the engine sees them.

`SamplingParams(extra_args={"kv_budget": ...})` offline, `vllm_xargs` on any route, and whatever
slips past the middleware all meet in `InputProcessor.process_inputs`.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from vllm.utils import length_from_prompt_token_ids_or_embeds

from nexus_vllm.admission import carried_pages, check_replay, evicts, plans
from nexus_vllm.config import (
    DIRECTIVE_KEYS,
    Directive,
    DirectiveError,
    Settings,
    beam_search_refusal,
    plain_name,
)
from nexus_vllm.engine.hooks import wrap
from nexus_vllm.replay import longest_replay

if TYPE_CHECKING:
    from vllm import PoolingParams, RequestOutput, SamplingParams
    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor


def install() -> None:
    """Wrap `InputProcessor.process_inputs` with the check, `AsyncLLM.generate` with the reason.

    Symptom without: a malformed directive reaches the scheduler, where an error ends the engine.
    Cause: vLLM lets no plugin but a logits processor validate a request at admission. Remove when
    it does.

    Symptom without: of a policy that raised, a client hears "Internal server error". Cause: vLLM's
    server has no other words for the finish reason "error". Remove when it tells a reason.

    `generate` checks, too, for the sake of streamed replies (see `install_server`).
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"), _validating)
    wrap(AsyncLLM, "generate", ("self", "prompt", "sampling_params", "request_id"), _telling)


def install_server() -> None:
    """Wrap the Responses API's way to `generate` with the check, beam search with a refusal.

    Symptom without: what is refused is no HTTP 400 if streamed, but an error within a stream that
    has begun, or its end without a word. Cause: vLLM processes a request's inputs when the first
    output is asked for, and sends the status before. Remove when it does not.

    Symptom without: where no header is read (/invocations, `vllm run-batch`), beams are kept whole
    though the body asks for a budget. Cause: their parameters have no extra arguments. Remove when
    they have.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    parameters = ("self", "request_id", "engine_input", "sampling_params")
    wrap(OpenAIServingResponses, "_generate_with_builtin_tools", parameters, _asking_first)
    beams = ("self", "max_tokens", "default_sampling_params")
    for kind in (ChatCompletionRequest, CompletionRequest):
        wrap(kind, "to_beam_search_params", beams, _without_directives)


def _asking_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def _generate_with_builtin_tools(
        self: "OpenAIServingResponses",
        request_id: str,
        engine_input: Any,
        sampling_params: "SamplingParams",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        refuse_at_once(self.engine_client, engine_input, sampling_params)
        return original(self, request_id, engine_input, sampling_params, *args, **kwargs)

    return _generate_with_builtin_tools


def _without_directives(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_beam_search_params(
        self: "ChatCompletionRequest | CompletionRequest", *args: Any, **kwargs: Any
    ) -> Any:
        asked: dict[str, Any] = self.vllm_xargs or {}
        with _as_validation_error():
            if any(plain_name(key) in DIRECTIVE_KEYS for key in asked):
                raise beam_search_refusal()
        return original(self, *args, **kwargs)

    return to_beam_search_params


def _validating(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: "InputProcessor",
        request_id: str,
        prompt: Any,
        params: "SamplingParams | PoolingParams",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from vllm import SamplingParams

        settings = _settings(self)
        if settings is not None and isinstance(params, SamplingParams):
            validate(params, settings)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if settings is not None:
            fit(request, settings, self.vllm_config)
        return request

    return process_inputs


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    async def told(
        outputs: "AsyncGenerator[RequestOutput, None]",
    ) -> "AsyncGenerator[RequestOutput, None]":
        from vllm.exceptions import GenerationError

        output: RequestOutput
        async with aclosing(outputs):  # its end aborts
            async for output in outputs:
                for one in output.outputs:
                    # Only the scheduler's `_fail` gives an error a reason.
                    if one.finish_reason == "error" and isinstance(one.stop_reason, str):
                        raise GenerationError(one.stop_reason)
                yield output

    def generate(
        self: "AsyncLLM", prompt: Any, sampling_params: "SamplingParams", *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        refuse_at_once(self, prompt, sampling_params)
        return told(original(self, prompt, sampling_params, *args, **kwargs))

    return generate


def refuse_at_once(client: "AsyncLLM", prompt: Any, params: "SamplingParams") -> None:
    """Raise what `process_inputs` will refuse a rendered prompt for, once it is called."""
    rendered: dict[str, Any] = prompt if isinstance(prompt, dict) else {}
    if not rendered.keys() & {"prompt_token_ids", "prompt_embeds"}:
        return
    settings = _settings(client.input_processor)
    if settings is None:
        return
    validate(params, settings)
    tokens = length_from_prompt_token_ids_or_embeds(
        rendered.get("prompt_token_ids"), rendered.get("prompt_embeds")
    )
    words = not rendered.keys() & {"prompt_embeds", "mm_kwargs"}
    room(params, tokens, False, settings, client.vllm_config, words)


def validate(params: "SamplingParams", settings: Settings) -> None:
    """Raise vLLM's own validation error (HTTP 400) when the directive in `params` is malformed."""
    with _as_validation_error():
        settings.directive(params.extra_args)


def scores_prompt(params: "SamplingParams | None") -> bool:
    """Whether a request wants logprobs of its prompt, each of which must see all tokens before."""
    if params is None:  # a pooling request
        return False
    asked = (params.prompt_logprobs, params.prompt_logprob_token_ids)
    return any(value is not None for value in asked)


def fit(request: "EngineCoreRequest", settings: Settings, vllm_config: "VllmConfig") -> None:
    """Refuse (HTTP 400) what the pool can never carry to its end, rather than let it wait forever.

    A sequence that keeps everything may grow until the pool is full, then ends with "length", as
    it does at vLLM's `max_model_len`.
    """
    params = request.sampling_params
    if params is None:
        return
    prompt = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    words = request.prompt_embeds is None and not request.mm_features
    most = room(params, prompt, request.resumable, settings, vllm_config, words)
    if most is not None:
        params.max_tokens = min(params.max_tokens, most)


def room(
    params: "SamplingParams",
    prompt: int,
    resumable: bool,
    settings: Settings,
    vllm_config: "VllmConfig",
    words: bool = True,
) -> int | None:
    """How many tokens the pool has room for after a prompt that is kept whole, else None.

    words: whether the prompt is nothing but tokens.
    Raises vLLM's own validation error for what it can never carry.
    """
    pool: int | None = vllm_config.cache_config.num_gpu_blocks
    if not pool:
        return None
    # vLLM's front end sums up the pools of its data-parallel engines; one page is its null block.
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    drafts = vllm_config.num_speculative_tokens
    longest = vllm_config.model_config.max_model_len
    pages = carried_pages(pool // engines - 1, drafts, settings.block_size, longest)
    with _as_validation_error():
        directive = settings.directive(params.extra_args)
        scored = scores_prompt(params)
        most = longest - prompt if params.max_tokens is None else params.max_tokens
        found = plans(directive, prompt, most, settings, pages, scored)
        tokens = pages * settings.block_size
        if _replayed(directive, settings) and evicts(found, prompt + most, resumable):
            model, cache = vllm_config.model_config, vllm_config.cache_config
            check_replay(
                directive.policy,
                prompt,
                longest_replay(pages, settings.block_size, longest),
                session=resumable,
                words=words,
                caching=cache.enable_prefix_caching,
                tokenizer=not model.skip_tokenizer_init,
            )
        if not found and resumable and tokens < longest:
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                f"a session may grow to max_model_len={longest}, the pool holds {tokens} tokens",
                "Give it a budget, such as 20%.",
            )
        if found and resumable and drafts:
            raise DirectiveError(
                "kv_budget",
                str(directive.budget),
                "a session's turn that ends among accepted drafts goes on from tokens that were "
                "never said",
                "Send whole prompts, or serve without --speculative-config.",
            )
        if found and resumable and scored:
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
    return None if found else tokens - prompt


def _replayed(directive: Directive, settings: Settings) -> bool:
    """Whether a request's policy looks at a replay of its prompt."""
    from nexus_vllm import policies  # torch

    policy = policies.POLICIES.get(settings.policy_of(directive.policy))  # none is no policy
    return policy is not None and policy.needs_replay


@contextmanager
def _as_validation_error() -> Iterator[None]:
    from vllm.exceptions import VLLMValidationError

    from nexus_vllm.server.metrics import rejected

    try:
        yield
    except DirectiveError as error:
        rejected(error.reason)
        raise VLLMValidationError(str(error), parameter=error.field) from None


def _settings(processor: "InputProcessor") -> Settings | None:
    """The engine's settings, read once per processor."""
    from nexus_vllm.engine.cli import active_settings

    known = vars(processor)
    if "nexus_settings" not in known:
        known["nexus_settings"] = active_settings(processor.vllm_config.additional_config)
    settings: Settings | None = known["nexus_settings"]
    return settings
