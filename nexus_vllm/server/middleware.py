"""Per-request directives over HTTP: headers in, `vllm_xargs` and a response header out.

A pure ASGI class that vLLM adds through `--middleware`. The request's body is read when the app
asks for it, so authentication and all else in front of the handler run first, as in stock vLLM.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from nexus_vllm.config import (
    DIRECTIVE_KEYS,
    Directive,
    DirectiveError,
    Settings,
    beam_search_refusal,
    nearest,
    plain_name,
    shown,
)
from nexus_vllm.engine.cli import active_settings
from nexus_vllm.server import routes
from nexus_vllm.server.metrics import rejected

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
HEADERS = {"x-" + key.replace("_", "-"): key for key in DIRECTIVE_KEYS}
HARMLESS = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/responses/{response_id}/cancel",
)
"""Routes that clients call beside PATHS, perhaps with the same headers, and that generate nothing.

On any other route a directive is refused, not lost: nobody would read it.
"""
RESPONSE_HEADER = "X-KV-Eviction"

_HARMLESS = re.compile("|".join(re.sub("{[a-z_]+}", "[^/]+", path) for path in HARMLESS))
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# A body is parsed only if it may hold a directive, or ask for beams, which no directive reaches:
# plain, escaped, or in UTF-16 or UTF-32.
_SUSPECT = re.compile(rb"(?i)kv[_-]|use_beam_search|\\u00[2-7]|\x00")


class EvictionMiddleware:
    """Turns `X-KV-*` headers into `vllm_xargs`, refuses malformed ones, reports what is used."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._settings: Settings | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = _route_path(scope)
        method = scope.get("method")  # a websocket has none
        directed = method == "POST" and path in PATHS
        inspected = method == "GET" and (path + "/").startswith(routes.ROOT + "/")
        if not directed and not inspected:
            lost = _directives(Headers(scope=scope))
            if not lost or method in _SAFE_METHODS or _HARMLESS.fullmatch(path):
                return await self.app(scope, receive, send)
            refusal = _unread(path, lost[0])
            if method is None:
                return await _deny(WebSocket(scope, receive, send), refusal)
            return await refusal(scope, receive, send)
        settings = self._find_settings(scope)
        if settings is None:
            return await _no_settings()(scope, receive, send)
        if directed:
            return await _Exchange(self.app, scope, receive, send, path, settings).run()
        response = routes.answer(path, settings)
        await (response or self.app)(scope, receive, send)

    def _find_settings(self, scope: Scope) -> Settings | None:
        """The engine's own settings, from the app that vLLM attached its config to."""
        if self._settings is None:
            app = scope.get("app")
            # An app that does not have it is not served: see `_no_settings`.
            vllm_config = getattr(getattr(app, "state", None), "vllm_config", None)
            self._settings = active_settings(getattr(vllm_config, "additional_config", None))
        return self._settings


class _Exchange:
    """One request and its response."""

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        path: str,
        settings: Settings,
    ) -> None:
        self.app = app
        self.scope = dict(scope)
        self.headers = Headers(scope=scope)
        if _directives(self.headers):
            # The body will grow, and the app may look at the length before it asks for the body.
            del MutableHeaders(scope=self.scope)["content-length"]
        self.receive = receive
        self.send = send
        self.path = path
        self.settings = settings
        self.body_seen = False
        self.directive: Directive | None = None
        self.refusal: JSONResponse | None = None

    async def run(self) -> None:
        try:
            await self.app(self.scope, self.receive_directed, self.send_reported)
        except Exception:
            if self.refusal is None:
                raise
        if self.refusal is not None:
            await self.refusal(self.scope, self.receive, self.send)

    async def receive_directed(self) -> Message:
        """The whole body, directives merged, as one message; then whatever the server sends."""
        if self.body_seen:
            return await self.receive()
        self.body_seen = True
        body = bytearray()
        more = True
        while more:
            message = await self.receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            beams = self.path.endswith("/completions")  # other routes have no such field
            merged, self.directive = merge(self.headers, bytes(body), self.settings, beams)
        except _Refusal as refusal:
            rejected(refusal.reason)
            self.refusal = _bad_request(self.path, refusal)
            return {"type": "http.disconnect"}  # the app gives up, `run` answers
        return {"type": "http.request", "body": merged, "more_body": False}

    async def send_reported(self, message: Message) -> None:
        if self.refusal is not None:
            return
        if (
            message["type"] == "http.response.start"
            and message["status"] < 300
            and self.directive is not None
        ):
            MutableHeaders(scope=message)[RESPONSE_HEADER] = self.directive.header()
        await self.send(message)


class _Refusal(Exception):
    """A directive that is answered with HTTP 400."""

    def __init__(self, error: DirectiveError, reason: str | None = None) -> None:
        super().__init__(str(error))
        self.field = error.field
        self.reason = reason or error.reason


def merge(
    headers: Headers, body: bytes, settings: Settings, beams: bool
) -> tuple[bytes, Directive]:
    """The body with the headers' directives in its `vllm_xargs`, and the resulting directive.

    beams: whether the body may ask for beam search, to which no directive applies.
    A body that is no JSON object passes as it is, for vLLM to refuse. Raises _Refusal.
    """
    asked = _from_headers(headers, settings)
    try:
        content = _parse(body) if asked or _SUSPECT.search(body) else None
    except RecursionError:  # vLLM reads it some frames further up, and may succeed there
        raise _too_deep(asked, body) from None
    if content is None:
        return body, _directive(asked, settings)
    for key in content:
        if (name := plain_name(key)) in DIRECTIVE_KEYS:
            raise _Refusal(
                DirectiveError(
                    key,
                    content[key],
                    "vLLM ignores it outside vllm_xargs",
                    f'Send {{"vllm_xargs": {{"{name}": ...}}}} or the header.',
                ),
                "body",
            )
    xargs = content.get("vllm_xargs")
    if xargs is None:
        xargs = {}
    if not isinstance(xargs, dict):
        if not asked:
            return body, _directive({}, settings)
        raise _Refusal(
            DirectiveError("vllm_xargs", xargs, "it must be an object", "Send one, or none."),
            "body",
        )
    directive = _directive({**asked, **xargs}, settings)
    for key in asked.keys() & xargs.keys():
        if _directive({key: asked[key]}, settings) != _directive({key: xargs[key]}, settings):
            raise _Refusal(
                DirectiveError(
                    _header_name(key),
                    asked[key],
                    f"the body's vllm_xargs say {key}={shown(xargs[key])}",
                    "Send one of the two, or the same value in both.",
                ),
                "conflict",
            )
    if beams and content.get("use_beam_search"):
        if asked or xargs.keys() & set(DIRECTIVE_KEYS):
            raise _Refusal(beam_search_refusal(), "body")
        return body, _directive({"kv_policy": "none"}, settings)
    if asked.keys() <= xargs.keys():
        return body, directive
    content["vllm_xargs"] = {**asked, **xargs}
    try:
        return json.dumps(content, separators=(",", ":")).encode(), directive
    except RecursionError:
        raise _too_deep(asked, body) from None


def _from_headers(headers: Headers, settings: Settings) -> dict[str, str]:
    """The directives in the headers, each valid by itself."""
    asked: dict[str, str] = {}
    spelt: dict[str, str] = {}
    for name, value in headers.items():
        if not _meant(name):
            continue
        told = "-".join(
            part.upper() if part in ("x", "kv") else part.title() for part in name.split("-")
        )
        if name not in HEADERS:
            remedy = nearest(told, [_header_name(key) for key in DIRECTIVE_KEYS])
            raise _Refusal(DirectiveError(told, value, "no such header", remedy))
        key = HEADERS[name]
        if key in asked:
            limit = f"it came before as {shown(asked[key])}"
            raise _Refusal(DirectiveError(told, value, limit, "Send it once."), "repeated")
        asked[key] = value
        spelt[key] = told
    # A variant has its own least budget.
    for key in sorted(asked, key="kv_policy".__ne__):
        policy = {"kv_policy": asked["kv_policy"]} if "kv_policy" in asked else {}
        try:
            settings.directive({**policy, key: asked[key]})
        except DirectiveError as error:
            raise _Refusal(
                DirectiveError(spelt[key], asked[key], error.limit, error.remedy)
            ) from None
    return asked


def _directive(xargs: Mapping[str, Any], settings: Settings) -> Directive:
    try:
        return settings.directive(xargs)
    except DirectiveError as error:
        raise _Refusal(error) from None


def _too_deep(asked: Mapping[str, str], body: bytes) -> _Refusal:
    field, value = "body", body[:80].decode(errors="replace")
    for key in asked:
        field, value = _header_name(key), asked[key]
    limit = "the body is nested too deeply to look for directives"
    return _Refusal(DirectiveError(field, value, limit, "Send a flatter one."), "body")


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _header_name(key: str) -> str:
    return "X-KV-" + key.removeprefix("kv_").title()


def _bad_request(path: str, refusal: _Refusal) -> JSONResponse:
    if path == "/v1/messages":  # Anthropic's format, as vLLM's own errors on this route
        error = {"type": "BadRequestError", "message": str(refusal)}
        return JSONResponse({"type": "error", "error": error}, status_code=400)
    body = routes.error_body(400, "BadRequestError", str(refusal), refusal.field)
    return JSONResponse(body, status_code=400)


def _directives(headers: Headers) -> list[str]:
    return [name for name in headers if _meant(name)]


def _meant(name: str) -> bool:
    """Whether a header is for us, also where it is misspelt: X-KV-Bugdet, X_KV_Budget, KV-Budget.

    What begins with KV- alone may be somebody else's.
    """
    plain = plain_name(name)
    return plain in DIRECTIVE_KEYS or (plain.startswith("kv_") and name[:2] in ("x-", "x_"))


def _route_path(scope: Scope) -> str:
    """The path that routes are looked up by: without a `root_path` that is all of its first parts,
    as starlette sees it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def _unread(path: str, name: str) -> JSONResponse:
    """A directive where nobody reads it is refused: the client counts on it."""
    rejected("unknown")
    message = (
        f"{name.title()} has no effect on {path[:80]!r}: KV eviction reads headers on "
        f"{', '.join(PATHS)}. Drop the header, or set vllm_xargs in the body if the route has them."
    )
    body = routes.error_body(400, "BadRequestError", message, name.title())
    return JSONResponse(body, status_code=400)


async def _deny(websocket: WebSocket, response: JSONResponse) -> None:
    """Refuse a websocket before it opens: with `response` where the server can, else with 403."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close()


def _no_settings() -> JSONResponse:
    message = (
        "KV eviction is switched on for this HTTP server but its engine has no settings for it. "
        "Start the server with --kv-eviction, or without the middleware."
    )
    return JSONResponse(routes.error_body(500, "InternalServerError", message), status_code=500)
