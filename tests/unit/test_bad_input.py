"""Whatever a client or an operator sends is taken or refused by name, and nothing else happens."""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from hypothesis import example, given
from hypothesis import strategies as st

from nexus_vllm.config import (
    ALLOCATORS,
    DIRECTIVE_KEYS,
    POLICIES,
    PREFILL_MODES,
    VLLM_KEYS,
    Directive,
    DirectiveError,
    Settings,
    plain_name,
)
from nexus_vllm.server.middleware import HEADERS, PATHS, EvictionMiddleware

SETTINGS = Settings()
GOOD: dict[str, list[Any]] = {
    "kv_budget": ["512", 512, "2k", "20%", "full"],
    "kv_policy": [*POLICIES, "none"],
    "kv_allocator": ["auto", *ALLOCATORS],
    "kv_seed": ["7", 7, 0],
    "kv_prefill": list(PREFILL_MODES),
}
# More than Python turns into text, and so beyond what hypothesis can report.
UNSHOWABLE = {
    "huge": lambda: 10**5000,
    "negative": lambda: -(10**5000),
    "deep": lambda: nested(1000),
}
unshowable = pytest.mark.parametrize("value", UNSHOWABLE)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def mostly_good(key: str) -> st.SearchStrategy[Any]:
    good = st.sampled_from(GOOD.get(key, ["512"]))
    return good | good.map(lambda value: f" {value} ") | values


def mappings(keys: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    items = keys.flatmap(lambda key: st.tuples(st.just(key), mostly_good(key)))
    return st.lists(items, max_size=4).map(dict)


xargs = mappings(
    st.sampled_from([*DIRECTIVE_KEYS, *sorted(VLLM_KEYS)])
    | st.text(max_size=8).map("kv_".__add__)
    | st.sampled_from(["KV_BUDGET", "kv-policy", "X-KV-Seed", "x_kv_prefill", "Kv_x"])
)


def shown_key(key: str) -> str:
    return key[:80].encode("ascii", "backslashreplace").decode()


def directive_or_error(asked: dict[str, Any]) -> Directive | DirectiveError:
    try:
        return SETTINGS.directive(asked)
    except DirectiveError as error:
        return error


def check(directive: Directive) -> None:
    """Everything in it is one of what may be in it."""
    assert directive.policy in (*POLICIES, "none")
    assert directive.allocator in ALLOCATORS
    assert directive.prefill in PREFILL_MODES
    assert 0 <= directive.seed < 2**63
    blocks = directive.budget_blocks(5000, SETTINGS)
    assert blocks is None or blocks >= 4
    assert directive.header().isascii()


# Directives


@given(xargs)
def test_any_extra_arguments_make_a_directive_or_an_error_that_names_one(
    asked: dict[str, Any],
) -> None:
    got = directive_or_error(asked)
    if isinstance(got, DirectiveError):
        assert got.field in map(shown_key, asked)
        assert len(str(got)) < 1000
        assert str(got).encode()
        return
    check(got)
    assert asked.keys() <= {*DIRECTIVE_KEYS, *VLLM_KEYS}


@unshowable
@pytest.mark.parametrize("key", [*DIRECTIVE_KEYS, "kv_bugdet"])
def test_a_directive_that_cannot_even_be_shown_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(DirectiveError, match=f"^{key}=<(int|list) too large to show> is not all"):
        SETTINGS.directive({key: UNSHOWABLE[value]()})


def test_a_value_that_holds_the_words_of_the_error_does_not_garble_it() -> None:
    with pytest.raises(DirectiveError, match="not allowed: it is not one of full"):
        SETTINGS.directive({"kv_budget": "what is this"})


def make_app() -> FastAPI:
    """Parses a body as a handler of vLLM's does and gives it back, behind the middleware."""
    app = FastAPI()
    config = {"kv_eviction": SETTINGS.to_json()}
    app.state.vllm_config = SimpleNamespace(additional_config=config)

    async def echo(request: Request) -> Response:
        await request.json()
        return Response(await request.body())

    app.post(PATHS[1])(echo)
    app.add_middleware(EvictionMiddleware)
    return app


def answer(headers: Mapping[str, bytes], body: bytes) -> tuple[int, dict[str, Any], str]:
    """Status, content and report of one request through the middleware."""

    async def ask() -> tuple[int, dict[str, Any], str]:
        transport = httpx.ASGITransport(app=make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post(PATHS[1], content=body, headers=dict(headers))  # type: ignore[arg-type]
            report = response.headers.get("X-KV-Eviction", "")
            return response.status_code, response.json(), report

    return asyncio.run(ask())


def header_values(key: str) -> st.SearchStrategy[bytes]:
    good = st.sampled_from([str(value).encode() for value in GOOD[key]])
    return good | st.binary(max_size=20)


headers_of = st.fixed_dictionaries(
    {},
    optional={name: header_values(key) for name, key in HEADERS.items()},
)


@given(headers_of, xargs | values)
@example({"x-kv-seed": b"7"}, {"kv_seed": " " * 100_000 + "8"})
@example({}, {"kv_budget": nested(400)})
@example({"x-kv-budget": b"\xa0512\x85"}, {})
@example({}, float("inf"))
def test_any_headers_and_any_vllm_xargs_are_obeyed_or_a_400_that_names_one(
    headers: dict[str, bytes], asked: Any
) -> None:
    body = {"prompt": "a", "vllm_xargs": asked}
    status, content, report = answer(headers, json.dumps(body).encode())
    if status == 400:
        error = content["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        names = [name.lower() for name in (*headers, "vllm_xargs")]
        if isinstance(asked, dict):
            names += [shown_key(key).lower() for key in asked]
        assert error["param"].lower() in names
        assert error["message"].startswith(error["param"])
        assert len(error["message"]) < 1000
        return
    assert status == 200
    seen = content["vllm_xargs"]
    if asked is not None and not isinstance(asked, dict):
        assert not headers
        assert json.dumps(seen) == json.dumps(asked)  # vLLM's to refuse
        return
    directive = SETTINGS.directive(seen)
    check(directive)
    assert report == directive.header()
    for name in headers:
        assert HEADERS[name] in seen
    ours = {key for key in asked or {} if plain_name(key).startswith("kv_")}
    assert ours <= {*DIRECTIVE_KEYS, *VLLM_KEYS}


def test_a_body_nested_to_the_limit_does_not_lose_its_directive() -> None:
    """The middleware reads it some frames deeper than vLLM does, and writes it deeper still."""
    seen = set()
    for depth in [*range(850, 1000), 100_000]:
        body = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        status, content, _ = answer({"x-kv-budget": b"512"}, body)
        if status == 200:
            assert content["vllm_xargs"] == {"kv_budget": "512"}, depth
        else:
            assert (status, content["error"]["param"]) == (400, "X-KV-Budget"), depth
        seen.add(status)
    assert seen == {200, 400}


# Settings

knobs = mappings(st.sampled_from([*Settings.model_fields, "lambda"]) | st.text(max_size=8))


def refusal(source: Any) -> str | None:
    """What is told of a configuration, or None where it is taken."""
    told = None
    try:
        settings = Settings.from_source(source)
    except ValueError as error:
        told = str(error)
    if told is None:
        assert Settings.from_source(json.loads(json.dumps(settings.to_json()))) == settings
    else:
        assert told.startswith("KV eviction: ")
    return told


def check_refusal(told: str | None, asked: Mapping[str, Any]) -> None:
    unknown = asked.keys() - {*Settings.model_fields, "lambda"}
    if told is None:
        assert not unknown
    else:
        assert any(key in told or repr(key) in told for key in asked)


@given(knobs)
def test_any_mapping_makes_settings_or_an_error_that_names_a_key(asked: dict[str, Any]) -> None:
    check_refusal(refusal(asked), asked)


@unshowable
@pytest.mark.parametrize("key", ["window", "budget", "temperature", "interval", "policy", "heads"])
def test_a_setting_that_cannot_even_be_shown_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^KV eviction: {key}=<(int|list) too large to show>: "):
        Settings.from_source({key: UNSHOWABLE[value]()})


@given(knobs)
def test_any_inline_json_and_any_json_file_too(asked: dict[str, Any]) -> None:
    text = json.dumps(asked)
    check_refusal(refusal(text), asked)
    assert in_file(text.encode()) == refusal(text)


def in_file(content: bytes) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings"
        file.write_bytes(content)
        told = refusal(str(file))
        if told is not None and "cannot read" in told:
            assert str(file) in told
        return told


yaml_text = st.text("{}[]:,&*!|>-?#%@`'\" \n0x1a_wind") | st.text()


@given(st.binary() | yaml_text.map(lambda text: text.encode(errors="surrogatepass")))
@example(b"\xff\xfe\x00")
@example(b"window: 0x" + b"f" * 5000)
@example(b"window: " + b"9" * 5000)
@example(b"a: 2001-99-99")
@example(b"a: !!timestamp x")
@example(b"a: !!bool x")
@example(b"a: !!int x")
@example(b"[" * 10_000)
@example(b'{"window": ' + b"[" * 100_000)
@example(b"1: 2")
def test_any_file_makes_settings_or_an_error_that_names_it(content: bytes) -> None:
    in_file(content)


@given(st.text())
@example("a" * 5000)
@example("\0")
@example("\ud800")
@example('{"window": ' + "9" * 5000 + "}")
def test_any_text_makes_settings_or_an_error(text: str) -> None:
    refusal(text)


@given(values)
@example([1])
@example({1: 2})
@example(True)
def test_any_value_in_place_of_a_configuration_too(value: Any) -> None:
    """As `--additional-config '{"kv_eviction": VALUE}'` and `engine_args(config=VALUE)` pass it."""
    refusal(value)
