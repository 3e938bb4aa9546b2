"""What never fits is refused before a stream begins: when it has, its status has been sent."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.usage.usage_lib import UsageContext

from nexus_vllm.engine import cli, compat, requests
from nexus_vllm.engine.hooks import is_wrapped


class Client:
    """Stands for vLLM's `AsyncLLM` over a pool of 352 tokens, whose `generate` is wrapped."""

    def __init__(self, eviction: dict[str, Any] | None) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={} if eviction is None else {"kv_eviction": eviction},
            cache_config=SimpleNamespace(num_gpu_blocks=12),
            parallel_config=SimpleNamespace(data_parallel_size=1, local_engines_only=False),
            num_speculative_tokens=0,
            model_config=SimpleNamespace(max_model_len=2048),
        )
        self.input_processor = SimpleNamespace(vllm_config=self.vllm_config)
        self.asked = 0

    async def stock(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        self.asked += 1
        yield SimpleNamespace(outputs=[])

    generate: Any = requests._telling(stock)


class Responses:
    """Stands for vLLM's handler of /v1/responses, whose way to `generate` is wrapped."""

    def __init__(self, client: Client) -> None:
        self.engine_client = client

    async def stock(self, request_id: str, engine_input: Any, sampling_params: Any) -> Any:
        async for output in self.engine_client.generate(engine_input, sampling_params, request_id):
            yield output

    asked: Any = requests._asking_first(stock)

    def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        return self.asked(request_id=request_id, engine_input=prompt, sampling_params=params)


BEAMS: tuple[Any, ...] = (ChatCompletionRequest, CompletionRequest)
TOKENS = {"type": "token", "prompt_token_ids": [1] * 352}
EMBEDDED = {"type": "embeds", "prompt_embeds": torch.zeros(352, 4)}
KEPT = {"kv_budget": "full"}
REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (TOKENS, KEPT, {}, "a prompt of 352 tokens needs all of its KV"),
    (EMBEDDED, KEPT, {}, "a prompt of 352 tokens needs all of its KV"),
    (TOKENS, KEPT, {"max_tokens": None}, "a prompt of 352 tokens needs all of its KV"),
    (TOKENS, {"kv_budget": "128", "kv_prefill": "oneshot"}, {}, "352 tokens at once"),
    (TOKENS, {"kv_budget": "128"}, {"prompt_logprobs": 1}, "prompt_logprobs must see the whole"),
    (TOKENS, {"kv_budget": "1"}, {}, "the least is 96 tokens"),
]


@pytest.mark.parametrize("through", [lambda client: client, Responses], ids=["engine", "responses"])
@pytest.mark.parametrize(("prompt", "directive", "more", "why"), REFUSED)
async def test_before_anything_is_asked_for(
    through: Any, prompt: Any, directive: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    client = Client({"budget_floor": 128})
    params = SamplingParams(**{"max_tokens": 40, **more}, extra_args=directive)
    before = params.clone()
    with pytest.raises(VLLMValidationError, match=why):
        through(client).generate(prompt, params, "r")
    assert params == before
    # Stock engines take the same as before.
    stock = Client(None)
    assert len([output async for output in through(stock).generate(prompt, params, "r")]) == 1
    assert (client.asked, stock.asked) == (0, 1)


@pytest.mark.parametrize(
    "prompt", ["text", {"prompt": "text"}, {"type": "token", "prompt_token_ids": [1]}]
)
async def test_what_fits_or_is_not_rendered_goes_its_way(prompt: Any) -> None:
    client = Client({})
    params = SamplingParams(extra_args={"kv_budget": "full"})
    assert len([output async for output in Responses(client).generate(prompt, params, "r")]) == 1


@pytest.mark.parametrize("usage", [UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS, None])
def test_a_server_hooks_the_responses_api(
    monkeypatch: pytest.MonkeyPatch, usage: UsageContext | None
) -> None:
    name = "_generate_with_builtin_tools"
    monkeypatch.setattr(OpenAIServingResponses, name, vars(OpenAIServingResponses)[name])
    assert not is_wrapped(OpenAIServingResponses, name)
    for kind in BEAMS:
        beams = vars(kind)["to_beam_search_params"]
        monkeypatch.setattr(kind, "to_beam_search_params", beams)
    monkeypatch.setattr(cli, "prepare", lambda *args: None)
    monkeypatch.setattr(compat, "check_config", lambda config: None)
    args = SimpleNamespace(additional_config={"kv_eviction": {}})
    create: Any = cli._activating(lambda self, usage_context=None: "config")
    assert create(args, usage_context=usage) == "config"
    serving = usage == UsageContext.OPENAI_API_SERVER
    assert is_wrapped(OpenAIServingResponses, name) == serving
    for kind in BEAMS:
        assert is_wrapped(kind, "to_beam_search_params") == serving


@pytest.mark.parametrize("kind", BEAMS)
def test_beams_with_a_directive_are_refused_whatever_the_route(kind: Any) -> None:
    """/invocations and `vllm run-batch` read no headers and pass no middleware."""
    prompt = {"messages": []} if kind is ChatCompletionRequest else {"prompt": "x"}
    refusing = requests._without_directives(kind.to_beam_search_params)
    plain = kind(model="m", use_beam_search=True, vllm_xargs={"other": 1}, **prompt)
    assert refusing(plain, 5, {}) == kind.to_beam_search_params(plain, 5, {})
    for key in ("kv_budget", "KV-Policy"):
        asking = kind(model="m", use_beam_search=True, vllm_xargs={key: "128"}, **prompt)
        with pytest.raises(VLLMValidationError, match="beam search drops KV directives"):
            refusing(asking, 5, {})
