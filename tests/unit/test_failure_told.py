"""What a client hears of a request whose policy has raised: vLLM's own way from its engine out."""

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from nexus_vllm.engine import requests
from nexus_vllm.engine.hooks import is_wrapped

WHY = "KV eviction ended this request: policy 'nexus' ..."


def outputs_of(stream: bool, last: EngineCoreOutput) -> Any:
    """vLLM's outputs of a request that says a token and then ends with `last`."""
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    processor = OutputProcessor(None, log_stats=False)
    request = EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(detokenize=False, output_kind=kind),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    queue = RequestOutputCollector(kind, "r")
    processor.add_request(request, None, queue=queue)
    found = []
    for output in (EngineCoreOutput(request_id="r", new_token_ids=[7]), last):
        processor.process_outputs([output])
        if (told := queue.get_nowait()) is not None:
            found.append(told)
    return found


class Engine:
    """Stands for vLLM's, whose `generate` it wraps."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.closed = False

    async def stock(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        try:
            for output in self.outputs:
                yield output
        finally:
            self.closed = True

    generate: Any = requests._telling(stock)


def engine(stream: bool, reason: FinishReason, why: str | None) -> Engine:
    last = EngineCoreOutput(request_id="r", new_token_ids=[], finish_reason=reason, stop_reason=why)
    return Engine(outputs_of(stream, last))


async def streamed(outputs: AsyncGenerator[Any, None]) -> list[str]:
    """What vLLM's completion route sends of them."""
    serving: Any = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    vars(serving).update(
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_per_request_metrics=False,
        return_tokens_as_token_ids=False,
        system_fingerprint=None,
        _extract_prompt_text=lambda prompt: None,
    )

    async def numbered() -> AsyncGenerator[Any, None]:
        async for output in outputs:
            yield 0, output

    request = CompletionRequest(model="m", prompt=[1, 2], stream=True)
    chunks = serving.completion_stream_generator(
        request,
        [{"prompt_token_ids": [1, 2], "type": "token"}],
        numbered(),
        "r",
        0,
        "m",
        num_prompts=1,
        tokenizer=None,
        request_metadata=SimpleNamespace(final_usage_info=None),
    )
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_reason_is_raised_as_vllms_own_error(stream: bool) -> None:
    broken = engine(stream, FinishReason.ERROR, WHY)
    outputs = broken.generate("p", None, "r")
    if stream:
        assert (await anext(outputs)).outputs[0].token_ids == [7]
    with pytest.raises(GenerationError) as raised:
        await anext(outputs)
    assert broken.closed
    reply = await vllm_error_handler(SimpleNamespace(), raised.value)  # type: ignore[arg-type]
    assert reply.status_code == 500
    error = json.loads(bytes(reply.body))["error"]
    assert (error["message"], error["type"]) == (WHY, "InternalServerError")


async def test_a_streamed_reply_ends_in_the_reason() -> None:
    broken = engine(True, FinishReason.ERROR, WHY)
    *_, told, done = await streamed(broken.generate("p", None, "r"))
    assert json.loads(told.removeprefix("data: "))["error"]["message"] == WHY
    assert done == "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("reason", "why"),
    [(FinishReason.ERROR, None), (FinishReason.STOP, "stop"), (FinishReason.LENGTH, None)],
)
async def test_all_else_is_left_to_vllm(reason: FinishReason, why: str | None) -> None:
    other = engine(True, reason, why)
    seen = [output async for output in other.generate("p", None, "r")]
    assert seen == other.outputs
    assert str(seen[-1].outputs[0].finish_reason) == str(reason)


async def test_a_client_that_leaves_closes_vllms_own_generator() -> None:
    left = engine(True, FinishReason.LENGTH, None)
    outputs = left.generate("p", None, "r")
    await anext(outputs)
    await outputs.aclose()
    assert left.closed


def test_it_is_vllms_generate_that_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[tuple[type, str]] = [(AsyncLLM, "generate"), (InputProcessor, "process_inputs")]
    for owner, name in hooked:  # to be as before afterwards
        monkeypatch.setattr(owner, name, getattr(owner, name))
    requests.install()
    assert is_wrapped(AsyncLLM, "generate")
    with pytest.raises(GenerationError, match="Internal server error"):
        GenerateBaseServing._raise_if_error(None, "error", "r")  # type: ignore[arg-type]
