"""The product over HTTP: a real model, real evictions, real refusals."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pydoc_data.topics import topics
from typing import Any

import pytest
from engine.harness import Engine, Mode, Request
from openai import OpenAI
from transformers import AutoTokenizer

from .conftest import MODEL, Server

pytestmark = pytest.mark.engine

BLOCK = 32


@pytest.fixture(scope="module")
def book(server: Server) -> list[int]:
    """Token ids of the Python reference, which comes with every Python."""
    text = " ".join(re.sub(r"\s+", " ", topic) for topic in topics.values())
    ids: list[int] = AutoTokenizer.from_pretrained(server.model_path)(text[:60_000]).input_ids
    return ids


def eviction(reply: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = reply["kv_transfer_params"]["kv_eviction"]
    return told


def record_of(server: Server, response_id: str) -> dict[str, Any]:
    """Of the one sequence of a request that may not have ended yet."""
    path, deadline = f"/kv_eviction/requests/{response_id}", time.monotonic() + 60
    while (found := server.get(path)).status_code == 404:
        assert time.monotonic() < deadline, found.text
        time.sleep(0.1)
    (record,) = found.json()["sequences"]
    return dict(record)


def tokens(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def test_a_long_prompt_is_cut_to_its_budget(server: Server, book: list[int]) -> None:
    before = server.metric("nexus:evicted_blocks_total")
    reply = server.complete(book[1000:4000], 96, {"X-KV-Budget": "512"})
    told = eviction(reply)
    assert told["budget_tokens"] == 512
    assert told["prompt_tokens"] == 3000
    assert told["evicted_blocks"] >= 70
    assert told["final_blocks"] <= 512 // BLOCK + 1
    assert told["peak_blocks"] == 3000 // BLOCK + 1
    assert told["eviction_steps"] >= 3
    assert told["moved_blocks"] > 0
    assert server.metric("nexus:evicted_blocks_total") - before == told["evicted_blocks"]
    record = server.get(f"/kv_eviction/requests/{reply['id']}").json()["sequences"][0]
    assert {key: record[key] for key in told} == told


def test_pages_are_free_while_the_request_runs(server: Server, book: list[int]) -> None:
    """vLLM's own gauge stands at the budget's share of the pool, not at the prompt's.

    Looked at between tokens of an answer that ends when we have seen enough, however slow we are.
    """
    wait_until_idle(server)
    most = (512 // BLOCK + 1.5) / server.pool_pages()
    looks: list[float] = []
    with OpenAI(base_url=server.url + "/v1", api_key="none").completions.create(
        model=MODEL,
        prompt=book[1000:4000],
        max_tokens=4000,
        temperature=0,
        stream=True,
        extra_headers={"X-KV-Budget": "512"},
        extra_body={"ignore_eos": True},
    ) as stream:
        for _ in stream:
            looks.append(server.metric("vllm:kv_cache_usage_perc"))
            if sum(0 < look <= most for look in looks) == 5:
                break
    assert sum(0 < look <= most for look in looks) == 5, f"usage stayed up: {looks}"
    wait_until_idle(server)


def test_the_full_budget_is_stock_vllm_token_for_token(server: Server, book: list[int]) -> None:
    """I1: against vLLM without the plugin, in a process of its own."""
    prompt = book[1000:4000]
    reply = server.complete(prompt, 64, {"X-KV-Budget": "full"})
    assert eviction(reply)["evicted_blocks"] == 0
    assert eviction(reply)["eviction_steps"] == 0
    with Engine(Mode("v1", "sync"), server.model_path, max_model_len=8192) as stock:
        (expected,) = stock.generate([Request(prompt, {"max_tokens": 64})])
    assert tokens(reply) == expected.tokens


def test_a_repeated_prompt_still_hits_the_prefix_cache(server: Server, book: list[int]) -> None:
    prompt, headers = book[5000:6500], {"X-KV-Budget": "256", "X-KV-Seed": "5"}
    first = server.complete(prompt, 40, headers)
    hits = server.metric("vllm:prefix_cache_hits_total")
    second = server.complete(prompt, 40, headers)
    assert eviction(first)["evicted_blocks"] > 30
    # All but the window, in whole blocks.
    assert server.metric("vllm:prefix_cache_hits_total") - hits >= 1500 - 2 * BLOCK
    assert tokens(second) == tokens(first)
    assert eviction(second) == eviction(first)


def test_ten_concurrent_requests_that_share_a_prefix_say_what_they_say_alone(
    server: Server, book: list[int]
) -> None:
    shared = book[7000:8200]
    requests: list[tuple[list[int], dict[str, str]]] = []
    for index in range(10):
        prompt = shared + book[9000 + 100 * index : 9060 + 100 * index]
        headers = {"X-KV-Budget": "full"}
        if index % 2:
            headers = {"X-KV-Budget": str(256 + 32 * index), "X-KV-Seed": str(index)}
        requests.append((prompt, headers))

    def ask(request: tuple[list[int], dict[str, str]]) -> dict[str, Any]:
        return server.complete(request[0], 24, request[1])

    alone = [ask(request) for request in requests]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(ask, requests))
    for index, (one, many) in enumerate(zip(alone, together, strict=True)):
        assert (eviction(many)["evicted_blocks"] > 0) == bool(index % 2)
        assert eviction(many)["final_blocks"] == eviction(one)["final_blocks"]
    assert [tokens(reply) for reply in together] == [tokens(reply) for reply in alone]


MALFORMED = [
    *({"X-KV-Budget": value} for value in ("", "0", "-5", "31", "95", "1e3", "20 %", "0%")),
    *({"X-KV-Budget": value} for value in ("101%", "12q", "k", "%", "fulll", "4096 tokens", "∞")),
    *({"X-KV-Policy": value} for value in ("", "nexsus", "h2", "None!", "nexus,random", "42")),
    *({"X-KV-Seed": value} for value in ("", "-1", "1.5", "seed", "99999999999999999999")),
    *({"X-KV-Prefill": value} for value in ("", "chunked", "one-shot", "auto;streaming")),
    {"X-KV-Bugdet": "512"},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_malformed_directive_is_a_400_and_the_server_goes_on(
    server: Server, stream: bool
) -> None:
    assert len(MALFORMED) >= 30
    body = {"prompt": "Hello", "max_tokens": 2, "stream": stream}
    before = server.metric("nexus:rejected_total")
    for headers in MALFORMED:
        ((name, value),) = headers.items()
        reply = server.post("/v1/completions", body, {name: value.encode()})  # type: ignore[dict-item]
        assert reply.status_code == 400, (headers, reply.text)
        error = reply.json()["error"]
        assert error["type"] == "BadRequestError"
        assert error["code"] == 400
        assert len(error["message"]) > 40, "value, limit and remedy"
    assert server.metric("nexus:rejected_total") - before == len(MALFORMED)
    assert server.complete("Hello", 2, {})["choices"][0]["text"]


def test_header_and_body_that_disagree_are_refused(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "vllm_xargs": {"kv_budget": "256"}}
    reply = server.post("/v1/completions", body, {"X-KV-Budget": "512"})
    assert reply.status_code == 400
    assert "512" in reply.json()["error"]["message"]
    assert "256" in reply.json()["error"]["message"]


GRASS = "The grass is green. The sky is blue. The sun is yellow. " * 25
ROUTES = {
    "/v1/completions": {"prompt": "{text}", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "{text}"}], "max_tokens": 8},
    "/v1/responses": {"input": "{text}", "max_output_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "{text}"}], "max_tokens": 8},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_route_takes_headers_and_reports(server: Server, route: str, stream: bool) -> None:
    body = json.loads(json.dumps(ROUTES[route]).replace("{text}", GRASS))
    before = server.metric("nexus:evicted_blocks_total")
    headers = {"X-KV-Budget": "128", "X-KV-Policy": "streaming-llm", "X-KV-Prefill": "oneshot"}
    reply = server.post(route, {**body, "stream": stream}, headers)
    assert reply.status_code == 200, reply.text
    expected = "policy=streaming-llm; budget=128; prefill=oneshot; allocator=lu"
    assert reply.headers["x-kv-eviction"] == expected
    if not stream:
        told = eviction(reply.json())
        assert told["policy"] == "streaming-llm"
        assert told["evicted_blocks"] > 5
    deadline = time.monotonic() + 30
    while server.metric("nexus:evicted_blocks_total") == before:
        assert time.monotonic() < deadline, "no eviction was counted"
        time.sleep(0.1)


def test_the_openai_sdk_sets_a_budget_through_extra_body(server: Server, book: list[int]) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    reply = client.completions.create(
        model=MODEL,
        prompt=book[100:1100],
        max_tokens=8,
        extra_body={"vllm_xargs": {"kv_budget": "256", "kv_policy": "random", "kv_seed": "3"}},
    )
    told = reply.model_dump()["kv_transfer_params"]["kv_eviction"]
    assert told["policy"] == "random"
    assert told["evicted_blocks"] == 1000 // BLOCK - 256 // BLOCK


def test_a_reply_ended_by_a_stop_string_is_told_of_in_its_record_only(
    server: Server, book: list[int]
) -> None:
    """vLLM's front end ends it and does not wait for what the engine would tell."""
    prompt, headers = book[3000:4000], {"X-KV-Budget": "256"}
    text = server.complete(prompt, 40, headers)["choices"][0]["text"]
    reply = server.complete(prompt, 40, headers, stop=[text[-6:]])
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert not reply["kv_transfer_params"]
    record = record_of(server, reply["id"])
    assert record["budget_tokens"] == 256
    assert record["evicted_blocks"] >= 1000 // BLOCK - 256 // BLOCK


def test_a_message_ended_by_a_stop_sequence_says_so_and_has_its_record(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": GRASS}], "max_tokens": 30, "temperature": 0}
    headers = {"X-KV-Budget": "128", "X-KV-Seed": "1"}
    whole = server.post("/v1/messages", body, headers).json()
    text = whole["content"][0]["text"]
    stop = text[-8:]
    reply = server.post("/v1/messages", {**body, "stop_sequences": [stop]}, headers).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert reply["content"][0]["text"] == text[: text.index(stop)]
    assert record_of(server, reply["id"])["evicted_blocks"] > 5


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_streamed_is_what_is_said_at_once(server: Server, route: str) -> None:
    content = json.loads(json.dumps(ROUTES[route]).replace("{text}", GRASS))
    body = {**content, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    headers = {"X-KV-Budget": "128", "X-KV-Seed": "1"}
    whole = server.post(route, body, headers).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    reply = server.post(route, asked, headers)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = map(json.loads, lines)
    assert last["choices"] == []
    for key in ("prompt_tokens", "completion_tokens"):
        assert last["usage"][key] == whole["usage"][key]
    choices = [chunk["choices"][0] for chunk in chunks]
    said = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    (choice,) = whole["choices"]
    assert said == (choice["text"] if "text" in choice else choice["message"]["content"])
    told, record = eviction(whole), record_of(server, last["id"])
    assert told["eviction_steps"] >= 2
    assert {key: record[key] for key in told} == told


def background(server: Server, **body: Any) -> str:
    """A response that is computed while nobody waits for it; its id."""
    asked = {"input": GRASS, "temperature": 0, "background": True, **body}
    reply = server.post("/v1/responses", asked, {"X-KV-Budget": "128", "X-KV-Seed": "1"})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-kv-eviction"].startswith("policy=nexus; budget=128;")
    assert reply.json()["status"] == "queued"
    return str(reply.json()["id"])


def test_a_response_in_the_background_is_evicted_and_retrieved(server: Server) -> None:
    body = {"input": GRASS, "temperature": 0, "max_output_tokens": 40}
    at_once = server.post("/v1/responses", body, {"X-KV-Budget": "128", "X-KV-Seed": "1"}).json()
    path = "/v1/responses/" + background(server, max_output_tokens=40)
    deadline = time.monotonic() + 60
    while (reply := server.get(path).json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline, reply
        time.sleep(0.1)
    assert reply["status"] == at_once["status"]
    assert reply["output"][0]["content"] == at_once["output"][0]["content"]
    assert eviction(reply) == eviction(at_once)
    assert eviction(reply)["evicted_blocks"] > 5


def test_a_response_cancelled_in_the_background_gives_its_pages_back(server: Server) -> None:
    before = server.metric("nexus:evicted_blocks_total")
    response = background(server, max_output_tokens=4000, ignore_eos=True)
    deadline = time.monotonic() + 60
    while server.metric("nexus:evicted_blocks_total") == before:
        assert time.monotonic() < deadline, "no eviction was counted"
        time.sleep(0.1)
    # A client may send its headers with every request; this one generates nothing.
    reply = server.post(f"/v1/responses/{response}/cancel", {}, {"X-KV-Budget": "128"})
    assert reply.json()["status"] == "cancelled"
    wait_until_idle(server)
    assert record_of(server, response)["evicted_blocks"] > 5


def test_a_response_goes_on_from_the_one_before(server: Server) -> None:
    """A second turn by `previous_response_id` is the conversation sent as a whole."""
    headers = {"X-KV-Budget": "128", "X-KV-Seed": "1"}
    common = {"temperature": 0, "max_output_tokens": 40}
    first = server.post("/v1/responses", {**common, "input": GRASS}, headers).json()
    assert eviction(first)["evicted_blocks"] > 5
    question = "What colour is the sky?"
    second = server.post(
        "/v1/responses",
        {**common, "input": question, "previous_response_id": first["id"]},
        headers,
    ).json()
    said = first["output"][0]["content"][0]["text"]
    conversation = [
        {"role": "user", "content": GRASS},
        {"role": "assistant", "content": said},
        {"role": "user", "content": question},
    ]
    whole = server.post("/v1/responses", {**common, "input": conversation}, headers).json()
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert eviction(second) == eviction(whole)
    assert eviction(second)["evicted_blocks"] > eviction(first)["evicted_blocks"]


LIKE_LLAMA_3 = (
    "<|begin_of_text|>{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
    "<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, LIKE_LLAMA_3], ids=["own", "like-llama-3"])
def test_a_chat_template_gives_the_prompt_that_it_gives_without_us(
    server: Server, template: str | None
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": GRASS},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "What colour is the sky?"},
    ]
    body = {"messages": messages, "max_tokens": 8, "return_token_ids": True}
    chosen = {} if template is None else {"chat_template": template}
    reply = server.post("/v1/chat/completions", body | chosen, {"X-KV-Budget": "128"}).json()
    assert eviction(reply)["evicted_blocks"] > 5
    tokenizer = AutoTokenizer.from_pretrained(server.model_path)
    prompt = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer(prompt, add_special_tokens=False).input_ids
    assert reply["prompt_token_ids"] == expected


def test_a_header_on_a_route_that_reads_none_is_refused(server: Server) -> None:
    headers = {"X-KV-Budget": "512"}
    reply = server.post("/generative_scoring", {"query": "a", "items": ["b"]}, headers)
    assert reply.status_code == 400
    assert "/generative_scoring" in reply.json()["error"]["message"]
    assert server.post("/tokenize", {"prompt": "Hello"}, headers).status_code == 200


def test_aborted_requests_give_their_pages_back(server: Server, book: list[int]) -> None:
    """I4 seen from outside: vLLM's gauge returns to zero."""
    with OpenAI(base_url=server.url + "/v1", api_key="none").completions.create(
        model=MODEL,
        prompt=book[2000:3500],
        max_tokens=2000,
        stream=True,
        extra_headers={"X-KV-Budget": "256"},
    ) as stream:
        for count, _ in enumerate(stream):
            if count == 5:
                break
    wait_until_idle(server)


def test_kvzip_is_for_who_asks_and_tells_what_it_costs(server: Server, book: list[int]) -> None:
    prompt, headers = book[4000:5000], {"X-KV-Policy": "kvzip", "X-KV-Budget": "256"}
    before = server.metric("nexus:replay_tokens_total")
    told = eviction(server.complete(prompt, 40, {"X-KV-Budget": "256"}))
    assert "replay_tokens" not in told
    assert server.metric("nexus:replay_tokens_total") == before
    reply = server.complete(prompt, 40, headers)
    told = eviction(reply)
    assert told["policy"] == "kvzip"
    assert told["eviction_steps"] > 0
    # The prompt was in the cache, all but its last block; it is repeated at once, as told.
    assert 1000 < told["replay_tokens"] < 1000 + 32 + 1000 % BLOCK + BLOCK
    assert server.metric("nexus:replay_tokens_total") - before == told["replay_tokens"]
    assert record_of(server, reply["id"])["replay_tokens"] == told["replay_tokens"]
    again = server.complete(prompt, 40, headers)
    assert eviction(again) == {**told, "replay_tokens": 0}
    assert again["choices"][0]["text"] == reply["choices"][0]["text"]
    assert server.metric("nexus:replay_tokens_total") - before == told["replay_tokens"]


@pytest.mark.parametrize("route", ROUTES)
def test_kvzip_on_every_route_streamed(server: Server, route: str) -> None:
    # The same text by another route may be the same prompt, whose replay was kept.
    body = json.loads(json.dumps(ROUTES[route]).replace("{text}", f"{route} {GRASS}"))
    before = server.metric("nexus:replay_tokens_total")
    headers = {"X-KV-Budget": "128", "X-KV-Policy": "kvzip"}
    reply = server.post(route, {**body, "stream": True}, headers)
    assert reply.status_code == 200, reply.text
    assert "error" not in reply.text
    wait_until_idle(server)
    assert server.metric("nexus:replay_tokens_total") > before + 350


def test_kvzip_is_refused_where_its_replay_does_not_fit(server: Server, book: list[int]) -> None:
    headers = {"X-KV-Policy": "kvzip", "X-KV-Budget": "256"}
    for stream in (False, True):
        body = {"prompt": book[:8150], "max_tokens": 20, "stream": stream}
        reply = server.post("/v1/completions", body, headers)
        assert reply.status_code == 400
        assert "kv_policy='kvzip'" in reply.json()["error"]["message"]
        assert "8150 tokens needs room for 64 more" in reply.json()["error"]["message"]
    forged = {"prompt": "Hello", "max_tokens": 2, "vllm_xargs": {"kv_replay": "r/replay/0"}}
    reply = server.post("/v1/completions", forged)
    assert reply.status_code == 400
    assert "no such directive" in reply.json()["error"]["message"]


def test_kvzip_aborted_amid_its_replay_gives_everything_back(
    server: Server, book: list[int]
) -> None:
    body = {"model": MODEL, "prompt": book[6000:9000], "max_tokens": 2000, "ignore_eos": True}
    headers = {"X-KV-Policy": "kvzip", "X-KV-Budget": "256", "Content-Type": "application/json"}
    before = server.metric("nexus:replay_tokens_total")
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    while server.metric("nexus:replay_tokens_total") == before:
        pass
    connection.close()
    wait_until_idle(server)
    # It was ended there: the whole replay would have been that many.
    assert server.metric("nexus:replay_tokens_total") - before < 6000


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 60
    while True:
        server.complete("Hello", 2, {})
        if server.metric("vllm:kv_cache_usage_perc") == 0 == server.metric("nexus:live_blocks"):
            return
        assert time.monotonic() < deadline, "an aborted request still holds pages"
