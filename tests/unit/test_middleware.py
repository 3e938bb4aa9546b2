"""Directives over HTTP: what reaches vLLM, what is refused, what is reported."""

import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIWebSocketRoute
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message

from nexus_vllm.config import MAX_SEED, Settings
from nexus_vllm.engine.hooks import vllm_version
from nexus_vllm.server.metrics import REJECTIONS, metrics
from nexus_vllm.server.middleware import HARMLESS, PATHS, EvictionMiddleware
from nexus_vllm.server.records import Records, recent

REPORT = {"request_id": "cmpl-abc-0-0123abcd", "policy": "nexus", "evicted_blocks": 78}


def make_app(additional_config: Any = None) -> FastAPI:
    """Echoes what a handler of vLLM's would see, behind the middleware."""
    app = FastAPI()
    if additional_config is None:
        additional_config = {"kv_eviction": Settings().to_json()}
    app.state.vllm_config = SimpleNamespace(additional_config=additional_config)

    async def echo(request: Request) -> Any:
        content = await request.json()
        if content.get("stream"):

            async def events() -> AsyncIterator[str]:
                for i in range(3):
                    yield f"data: {i}\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        length = request.headers.get("content-length")
        raw = len(await request.body())
        answer = {"seen": content, "length": length and int(length), "raw": raw}
        return JSONResponse(answer, status_code=content.get("status", 200))

    for path in (*PATHS, *HARMLESS, "/v1/embeddings"):
        app.post(path)(echo)
    app.add_middleware(EvictionMiddleware)
    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app()) as client:
        yield client


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def rejections() -> dict[str, float]:
    rejected = metrics().rejected
    return {reason: rejected.labels(reason)._value.get() for reason in REJECTIONS}


# What reaches vLLM


@pytest.mark.parametrize("path", PATHS)
async def test_headers_become_vllm_xargs_and_are_reported(
    client: httpx.AsyncClient, path: str
) -> None:
    headers = {
        "X-KV-Budget": "2k",
        "x-kv-policy": "random",
        "X-Kv-Seed": "7",
        "X-KV-PREFILL": "streaming",
    }
    response = await client.post(
        path, json={"prompt": "żółw", "vllm_xargs": {"a": 1}}, headers=headers
    )
    assert response.status_code == 200
    answer = response.json()
    assert answer["seen"]["prompt"] == "żółw"
    assert answer["seen"]["vllm_xargs"] == {
        "a": 1,
        "kv_budget": "2k",
        "kv_policy": "random",
        "kv_seed": "7",
        "kv_prefill": "streaming",
    }
    assert answer["length"] is None  # the one the client sent is wrong by now
    assert response.headers["X-KV-Eviction"] == "policy=random; budget=2048; prefill=streaming"


async def test_a_variant_is_asked_for_like_a_policy() -> None:
    settings = Settings(variants={"short": {"sink_blocks": 0, "recency_blocks": 1}})
    async with client_of(make_app({"kv_eviction": settings.to_json()})) as client:
        for order in (1, -1):
            headers = [("X-KV-Budget", "64"), ("X-KV-Policy", "short")][::order]
            response = await client.post(PATHS[0], json={}, headers=headers)
            assert response.headers["X-KV-Eviction"] == "policy=short; budget=64; prefill=auto"
        response = await client.post(PATHS[0], json={}, headers={"X-KV-Budget": "64"})
        assert response.status_code == 400
        assert "X-KV-Budget='64'" in response.text
        assert "the least is 96" in response.text


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_directive_the_body_is_untouched_and_the_default_is_reported(
    client: httpx.AsyncClient, path: str
) -> None:
    body = b'{ "prompt":  "hi", "b": 1.0 }'
    response = await client.post(path, content=body)
    assert response.json()["raw"] == response.json()["length"] == len(body)
    assert response.headers["X-KV-Eviction"] == "policy=nexus; budget=20%; prefill=auto"


@pytest.mark.parametrize("body", ['{"use_beam_search": true}', '{"use\\u005fbeam_search": true}'])
async def test_beams_are_reported_as_never_evicted(client: httpx.AsyncClient, body: str) -> None:
    response = await client.post(PATHS[0], content=body)
    assert response.json()["raw"] == len(body)
    assert response.headers["X-KV-Eviction"].startswith("policy=none; budget=full")
    for path, asked in ((PATHS[0], False), (PATHS[2], True), (PATHS[3], True)):
        response = await client.post(path, json={"use_beam_search": asked})
        assert response.headers["X-KV-Eviction"].startswith("policy=nexus")


@pytest.mark.parametrize("escape", [False, True], ids=["plain", "escaped"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
async def test_directives_in_the_body_are_reported_however_they_are_spelt(
    client: httpx.AsyncClient, encoding: str, escape: bool
) -> None:
    text = json.dumps({"vllm_xargs": {"kv_budget": 512}})
    if escape:
        text = text.replace("kv_budget", "\\u006bv\\u005fbudget")
    response = await client.post(PATHS[0], content=text.encode(encoding))
    assert response.headers["X-KV-Eviction"] == "policy=nexus; budget=512; prefill=auto"
    assert response.json()["seen"]["vllm_xargs"] == {"kv_budget": 512}


async def test_header_and_body_may_agree_in_other_words(client: httpx.AsyncClient) -> None:
    response = await client.post(
        PATHS[1], json={"vllm_xargs": {"kv_budget": 2048}}, headers={"X-KV-Budget": "2K"}
    )
    assert response.status_code == 200
    assert response.json()["seen"]["vllm_xargs"] == {"kv_budget": 2048}


async def test_policy_none_is_reported_as_such(client: httpx.AsyncClient) -> None:
    response = await client.post(PATHS[0], json={}, headers={"X-KV-Policy": "none"})
    assert response.headers["X-KV-Eviction"].startswith("policy=none; budget=full")


async def test_streaming_replies_carry_the_header_and_arrive_whole(
    client: httpx.AsyncClient,
) -> None:
    headers = {"X-KV-Budget": "512"}
    async with client.stream("POST", PATHS[1], json={"stream": True}, headers=headers) as response:
        assert response.headers["X-KV-Eviction"] == "policy=nexus; budget=512; prefill=auto"
        text = "".join([chunk async for chunk in response.aiter_text()])
    assert text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


async def test_a_chunked_body_is_merged_and_gets_no_content_length(
    client: httpx.AsyncClient,
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b'{"prom', b"", b'pt": "a"', b"}"):
            yield part

    response = await client.post(PATHS[0], content=parts(), headers={"X-KV-Budget": "512"})
    assert response.json()["seen"] == {"prompt": "a", "vllm_xargs": {"kv_budget": "512"}}
    assert response.json()["length"] is None


async def test_a_failing_reply_carries_no_header(client: httpx.AsyncClient) -> None:
    response = await client.post(PATHS[0], json={"status": 500}, headers={"X-KV-Budget": "512"})
    assert response.status_code == 500
    assert "X-KV-Eviction" not in response.headers


async def test_other_paths_and_methods_pass_untouched(client: httpx.AsyncClient) -> None:
    headers = {"X-KV-Budget": "nonsense"}
    body = {"vllm_xargs": {"kv_x": 1}}
    for path, sent in (("/v1/embeddings", {}), *((path, headers) for path in HARMLESS)):
        response = await client.post(path.format(response_id="resp_1"), json=body, headers=sent)
        assert response.status_code == 200
        assert response.json()["seen"] == body
        assert "X-KV-Eviction" not in response.headers
    assert (await client.get(PATHS[0], headers=headers)).status_code == 405


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\x00", b'{"kv_budget": nul}'])
async def test_invalid_json_is_left_to_vllm(body: bytes) -> None:
    seen = await asgi(body, headers={"X-KV-Budget": "512"})
    assert seen.body == body


@pytest.mark.parametrize("body", [b"[1]", b'"kv_budget"', b"7", b"null"])
async def test_json_that_is_no_object_is_left_to_vllm(body: bytes) -> None:
    assert (await asgi(body, headers={"X-KV-Budget": "512"})).body == body


async def test_lone_surrogates_and_big_numbers_survive_the_merge() -> None:
    body = b'{"a":"\\ud800","n":12345678901234567890,"f":1e400,"d":0.1}'
    seen = await asgi(body, headers={"X-KV-Budget": "512"})
    expected = json.loads(body) | {"vllm_xargs": {"kv_budget": "512"}}
    assert json.loads(seen.body) == expected


async def test_a_client_that_leaves_before_the_body_is_passed_on() -> None:
    seen = await asgi(b"{", messages=[{"type": "http.disconnect"}])
    assert seen.disconnected


async def test_a_client_that_leaves_after_the_body_is_noticed() -> None:
    seen = await asgi(b'{"prompt": "a"}', read_on=True)
    assert seen.disconnected


@pytest.mark.parametrize(
    ("root", "prefix"), [("/behind", "/behind"), ("/behind", ""), ("/", ""), ("/v", "")]
)
async def test_a_root_path_is_allowed_for(root: str, prefix: str) -> None:
    app = make_app()
    transport = httpx.ASGITransport(app=app, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        path = prefix + PATHS[0]
        response = await client.post(path, json={}, headers={"X-KV-Budget": "1"})
        assert response.status_code == 400
        assert "the least is 96 tokens" in response.text
        response = await client.post(path, json={}, headers={"X-KV-Budget": "512"})
        assert response.status_code == 200
        assert "budget=512" in response.headers["X-KV-Eviction"]


async def test_authentication_comes_first() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app = make_app()
    middleware = app.user_middleware.pop()
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    app.user_middleware.insert(0, middleware)  # outermost, where vLLM puts --middleware
    async with client_of(app) as client:
        bad = {"X-KV-Budget": "nonsense"}
        assert (await client.post(PATHS[0], json={}, headers=bad)).status_code == 401
        bad["Authorization"] = "Bearer secret"
        assert (await client.post(PATHS[0], json={}, headers=bad)).status_code == 400


# What is refused

X = "X-KV-"
MALFORMED: list[tuple[dict[str, str] | list[tuple[str, str]], Any, str, str, str]] = [
    # headers, body, the value told, the remedy or limit told, reason
    *(
        ({X + "Budget": value}, {}, value, "Use 96 tokens or more, a percentage, or", "budget")
        for value in ("", "0", "95", "-512", "512 tokens", "1.5k", "0%", "100.01%", "20%%", "1e3")
    ),
    *(({X + "Budget": value}, {}, value[:9], "full", "budget") for value in ("9" * 40, "512, 512")),
    *(({X + "Policy": value}, {}, value, "nexus", "policy") for value in ("nexsu", "full", "")),
    *(
        ({X + "Seed": value}, {}, value, str(MAX_SEED), "seed")
        for value in ("-1", "1.5", "x", "", "9" * 19)
    ),
    *(({X + "Prefill": value}, {}, value, "oneshot", "prefill") for value in ("once", "", "full")),
    ({X + "Bugdet": "512"}, {}, "512", "X-KV-Budget", "unknown"),
    ({X + "Eviction": "nexus"}, {}, "nexus", "X-KV-", "unknown"),
    *(({name: "512"}, {}, "512", "X-KV-Budget", "budget") for name in ("X_KV_Budget", "KV-Budget")),
    ([(X + "Budget", "512"), (X + "Budget", "512")], {}, "512", "once", "repeated"),
    ([(X + "Policy", "none"), (X + "Policy", "nexus")], {}, "nexus", "once", "repeated"),
    *(
        ({}, {"vllm_xargs": {"kv_budget": value}}, repr(value)[:20], "96", "budget")
        for value in (64, 0, -1, 1.5, True, None, [512], {"n": 1}, "", "full!", 2**70)
    ),
    *(
        ({}, {"vllm_xargs": {"kv_policy": value}}, repr(value), "nexus", "policy")
        for value in ("NEXSU", 1, None, ["nexus"])
    ),
    *(
        ({}, {"vllm_xargs": {"kv_seed": value}}, repr(value), str(MAX_SEED), "seed")
        for value in (-1, 0.5, False, "seven", 2**63)
    ),
    ({}, {"vllm_xargs": {"kv_prefill": "twice"}}, "twice", "streaming", "prefill"),
    ({}, {"vllm_xargs": {"kv_bugdet": 512}}, "512", "kv_budget", "unknown"),
    *(
        ({}, {"vllm_xargs": {key: 512}}, "512", "mean 'kv_budget'?", "budget")
        for key in ("KV_BUDGET", "kv-budget", "X-KV-Budget", "x_kv_budget")
    ),
    *(
        ({}, {key: 512}, "512", '{"vllm_xargs": {"kv_budget": ...}}', "body")
        for key in ("kv_budget", "KV_Budget", "kv-budget", "X-KV-Budget")
    ),
    ({X + "Seed": "1"}, {"vllm_xargs": [1]}, "[1]", "object", "body"),
    ({X + "Seed": "1"}, {"use_beam_search": True}, "True", "beam search", "body"),
    ({X + "Budget": "512"}, {"vllm_xargs": {"kv_budget": 513}}, "512", "513", "conflict"),
    ({X + "Policy": "none"}, {"vllm_xargs": {"kv_policy": "nexus"}}, "none", "nexus", "conflict"),
    ({X + "Seed": "1"}, {"vllm_xargs": {"kv_seed": 2}}, "1", "kv_seed=2", "conflict"),
    ({X + "Prefill": "auto"}, {"vllm_xargs": {"kv_prefill": "oneshot"}}, "auto", "one", "conflict"),
    ({X + "Allocator": "even"}, {}, "even", "uniform", "allocator"),
    ({X + "Budget": "512"}, {"vllm_xargs": {"kv_budget": "5x"}}, "5x", "96", "budget"),
]  # fmt: skip


@pytest.mark.parametrize(("headers", "body", "value", "remedy", "reason"), MALFORMED)
async def test_a_malformed_directive_is_a_400_naming_value_and_remedy(
    client: httpx.AsyncClient, headers: Any, body: Any, value: str, remedy: str, reason: str
) -> None:
    before = rejections()
    response = await client.post(PATHS[1], json=body, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert error["param"]
    assert error["param"] in error["message"]
    assert value in error["message"]
    assert remedy in error["message"]
    after = rejections()
    assert {r for r in REJECTIONS if after[r] != before[r]} == {reason}
    # and the server still answers
    assert (await client.post(PATHS[1], json={})).status_code == 200


def test_there_are_at_least_thirty_of_them() -> None:
    assert len(MALFORMED) >= 30


async def test_errors_have_the_shape_of_vllms_own(client: httpx.AsyncClient) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    bad = {"X-KV-Budget": "1"}
    openai = (await client.post("/v1/completions", json={}, headers=bad)).json()
    message = openai["error"]["message"]
    assert openai == create_error_response(message, param="X-KV-Budget").model_dump()
    anthropic = (await client.post("/v1/messages", json={}, headers=bad)).json()
    assert anthropic == AnthropicErrorResponse.model_validate(anthropic).model_dump()
    assert anthropic["error"]["message"] == message


@pytest.mark.parametrize("config", [{}, {"kv_eviction": None}, {"other": 1}, "not a dict"])
async def test_without_settings_the_server_refuses_instead_of_passing(config: Any) -> None:
    async with client_of(make_app(config)) as client:
        for path in PATHS:
            response = await client.post(path, json={})
            assert response.status_code == 500
            assert "--kv-eviction" in response.json()["error"]["message"]
        assert (await client.post("/v1/embeddings", json={})).status_code == 200


# Inspection


async def test_settings_and_versions_can_be_read(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/kv_eviction")).json()
    assert answer["settings"] == Settings().to_json()
    assert answer["versions"].keys() == {"nexus-vllm", "vllm", "torch"}


async def test_a_recent_request_can_be_inspected(client: httpx.AsyncClient) -> None:
    recent.add(REPORT)
    assert (await client.get("/kv_eviction/requests/cmpl-abc")).json() == {
        "id": "cmpl-abc",
        "sequences": [REPORT],
    }
    missing = await client.get("/kv_eviction/requests/cmpl-ab")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "NotFoundError"
    assert "1024" in missing.json()["error"]["message"]
    assert (await client.get("/kv_eviction/other")).status_code == 404
    assert (await client.get("/kv_evictions")).status_code == 404


@pytest.mark.parametrize(
    ("engine_ids", "request_id"),
    [
        (["chatcmpl-f00-0123abcd"], "chatcmpl-f00"),
        (["0_chatcmpl-f00-0123abcd", "1_chatcmpl-f00-0123abcd"], "chatcmpl-f00"),
        (["cmpl-f00-0-0123abcd", "cmpl-f00-1-89abcdef"], "cmpl-f00"),
        (["0_cmpl-f00-0-0123abcd", "1_cmpl-f00-0-0123abcd"], "cmpl-f00"),
        (["resp_f00_0-0123abcd", "resp_f00_1-89abcdef"], "resp_f00"),
        (["chatcmpl-order-7-0123abcd"], "chatcmpl-order-7"),
        (["cmpl-f00-0"], "cmpl-f00"),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    ],
)
def test_records_are_found_by_the_id_in_the_reply(engine_ids: list[str], request_id: str) -> None:
    records = Records(8)
    records.add({"request_id": "chatcmpl-other-0123abcd"})
    for engine_id in engine_ids:
        records.add({"request_id": engine_id})
    assert [record["request_id"] for record in records.find(request_id)] == engine_ids


def test_records_are_bounded() -> None:
    records = Records(3)
    for i in range(10):
        records.add({"request_id": f"cmpl-{i}-0-0123abcd"})
    assert len(records) == 3
    assert not records.find("cmpl-6")
    assert records.find("cmpl-9")
    records.resize(1)
    assert len(records) == 1


# The four protocols carry vllm_xargs to the engine


def _sampling(path: str, content: dict[str, Any]) -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    message = {"role": "user", "content": "hi"}
    read: dict[str, Callable[[], Any]] = {
        "/v1/completions": lambda: CompletionRequest(**content, prompt="hi"),
        "/v1/chat/completions": lambda: ChatCompletionRequest(**content, messages=[message]),
        "/v1/responses": lambda: ResponsesRequest(**content, input="hi"),
        "/v1/messages": lambda: AnthropicServingMessages._build_base_request(
            AnthropicMessagesRequest(**content, messages=[message], max_tokens=4), [message]
        ),
    }
    return read[path]().to_sampling_params(4, {})


@pytest.mark.parametrize("path", PATHS)
async def test_directives_reach_sampling_params(client: httpx.AsyncClient, path: str) -> None:
    headers = {"X-KV-Budget": "512", "X-KV-Seed": "3"}
    response = await client.post(path, json={"model": "m"}, headers=headers)
    params = _sampling(path, response.json()["seen"])
    assert params.extra_args == {"kv_budget": "512", "kv_seed": "3"}
    assert Settings().directive(params.extra_args).seed == 3


# A bare ASGI app, for what httpx cannot show


class Seen:
    """What the app behind the middleware received."""

    def __init__(self) -> None:
        self.body = b""
        self.disconnected = False


async def asgi(
    body: bytes,
    headers: dict[str, str] | None = None,
    messages: list[Message] | None = None,
    read_on: bool = False,
) -> Seen:
    seen = Seen()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        if message["type"] == "http.request":
            assert not message["more_body"]
            seen.body = message["body"]
            if read_on:
                message = await receive()
        seen.disconnected = message["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    queue = messages or [
        {"type": "http.request", "body": body[:3], "more_body": True},
        {"type": "http.request", "body": body[3:], "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return queue.pop(0)

    async def send(message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATHS[0],
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        "app": make_app(),
    }
    await EvictionMiddleware(app)(scope, receive, send)
    return seen


# Routes where nobody reads a header

REFUSED = {
    # these generate
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v1/realtime",
    "/v1/systemone",
    # these make of a prompt what another server generates from
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    # these are for who runs the server
    "/abort_requests",
    "/collective_rpc",
    "/fault_tolerance/apply",
    "/finish_weight_update",
    "/inference/v1/abort_requests",
    "/init_weight_transfer_engine",
    "/is_scaling_elastic_ep",
    "/pause",
    "/ping",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_checker",
}
NOT_EVERYWHERE = {"/cohere/v2/chat", "/start_profile", "/stop_profile"}
"""Routes of this vLLM that come with a package or a setting which this process may lack."""

SINCE_0_32 = {
    "/inference/v1/abort_requests",
    "/shutdown_weight_transfer_engine",
    "/v1/systemone",
    "/weight_checker",
}


@pytest.fixture(scope="module")
def vllm_app() -> FastAPI:
    """Every route the installed vLLM can have on a server that generates, behind the middleware."""
    from vllm import tasks
    from vllm.entrypoints.launchers.api_server.routers import register_api_routers

    app = FastAPI()
    app.state.args = Namespace(
        enable_scale_out=True, enable_fault_tolerance=True, tokens_only=True, root_path=""
    )
    with pytest.MonkeyPatch.context() as patch:
        for switch in (
            "VLLM_SERVER_DEV_MODE",
            "VLLM_ENABLE_COHERE_API",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        ):
            patch.setenv(switch, "1")
        every = tuple(sorted({*tasks.GENERATION_TASKS, "render"}))
        register_api_routers(app.state.args, app, every)  # type: ignore[arg-type]
    app.add_middleware(EvictionMiddleware)
    return app


def acting(app: FastAPI) -> set[str]:
    """Paths on which a client can make the server do something."""
    return {
        route.path
        for route in app.routes
        if isinstance(route, WebSocketRoute | APIWebSocketRoute)
        or (isinstance(route, Route) and (route.methods or set()) - {"GET", "HEAD", "OPTIONS"})
    }


def test_every_route_of_this_vllm_is_known(vllm_app: FastAPI) -> None:
    """A route that is new in vLLM has its headers refused until somebody looks at it."""
    known = {*PATHS, *HARMLESS, *REFUSED}
    if vllm_version().startswith("0.31."):
        known -= SINCE_0_32
    assert acting(vllm_app) - NOT_EVERYWHERE == known


async def test_a_header_that_nobody_would_read_is_refused(vllm_app: FastAPI) -> None:
    async with client_of(vllm_app) as client:
        posts = (acting(vllm_app) | NOT_EVERYWHERE | {"/new/in/vllm"}) - {"/v1/realtime"}
        for path in sorted(posts - {*PATHS, *HARMLESS}):
            response = await client.post(path, json={}, headers={"X-KV-Budget": "512"})
            assert response.status_code == 400, path
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("BadRequestError", "X-Kv-Budget")
            assert path in error["message"]


@pytest.mark.parametrize("told", [True, False], ids=["with a reply", "without"])
async def test_on_a_websocket_too(told: bool) -> None:
    sent: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    if told:
        scope["extensions"] = {"websocket.http.response": {}}
    await EvictionMiddleware(app)(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.accept"]
    sent.clear()
    await EvictionMiddleware(app)({**scope, "headers": [(b"x-kv-budget", b"512")]}, receive, send)
    if not told:
        assert [message["type"] for message in sent] == ["websocket.close"]
        return
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 400)
    assert "X-Kv-Budget" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"kv_policy": "' + b"random " * 200_000 + b'"}}',
        b'{"vllm_xargs": {"kv_' + b"budget" * 200_000 + b'": 1}}',
        b'{"vllm_xargs": {"kv_\\ud800": 1}}',
    ],
    ids=["long value", "long key", "lone surrogate"],
)
async def test_a_monstrous_directive_is_refused_briefly(
    client: httpx.AsyncClient, body: bytes
) -> None:
    """No echo of a megabyte, no search through one, no character that cannot be encoded."""
    response = await client.post(PATHS[0], content=body)
    assert response.status_code == 400
    assert len(response.content) < 1000
