"""What the soak asks: HTTP requests drawn from a seed, each with what must come of it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nexus_vllm.config import ALLOCATORS, POLICIES, PREFILL_MODES
from nexus_vllm.tools.bench_servers import SERVED, prose

POOL_TOKENS = 3072
"""Some 16 sequences with their prompts in flight do not fit: requests wait, cached pages go."""
MODEL_TOKENS = 8192
BUDGET_FLOOR = 128
CHARACTERS = 4  # per token of prose; a little more in fact
DOCUMENTS = 4  # texts whose beginnings are shared
SHARED = 240  # tokens at most

BUDGETS = ("128", "160", "192", "256", "1k", "20%", "60%", "full")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
STOPS = (" the", ".", "is")

Body = dict[str, Any]


@dataclass(frozen=True)
class Route:
    """One endpoint: how a body says what all bodies say."""

    path: str
    name: str
    id_prefix: str  # of the ids that its requests have in the engine
    most_tokens: str = "max_tokens"
    input: str = "messages"
    stop: str | None = "stop"
    several: bool = False  # takes n, seed and logprobs

    def body(self, text: str, tokens: int) -> Body:
        asked = [{"role": "user", "content": text}] if self.input == "messages" else text
        return {"model": SERVED, self.input: asked, self.most_tokens: tokens}

    def schema(self) -> Body | None:
        """The body's words for an answer after SCHEMA; None where the route has none."""
        named = {"name": "colour", "schema": SCHEMA}
        if self.name == "responses":
            return {"text": {"format": {"type": "json_schema", **named}}}
        if self.several:
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        return None

    def logprobs(self) -> Body:
        return {"logprobs": True, "top_logprobs": 2} if self.name == "chat" else {"logprobs": 2}


COMPLETIONS = Route("/v1/completions", "completions", "cmpl-", input="prompt", several=True)
CHAT = Route("/v1/chat/completions", "chat", "chatcmpl-", several=True)
RESPONSES = Route("/v1/responses", "responses", "resp_", "max_output_tokens", "input", stop=None)
MESSAGES = Route("/v1/messages", "messages", "chatcmpl-", stop="stop_sequences")
ROUTES = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)


@dataclass(frozen=True)
class Leave:
    """When the client hangs up: after so many seconds, or after so many events of a stream."""

    seconds: float | None = None
    events: int | None = None


@dataclass(frozen=True)
class Ask:
    """One HTTP request and what must come of it."""

    kind: str
    """Its row in the summary."""
    route: Route
    name: str
    """Unique: the engine knows the request by it."""
    body: Body | bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    named: str = ""
    """What the message of a refusal must contain."""
    reason: str | None = None
    """The label of `nexus:rejected_total` that must grow."""
    directive: Mapping[str, str] = field(default_factory=dict)
    """`kv_*` as asked for, whether in headers or body."""
    leave: Leave | None = None

    @property
    def streamed(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def sequences(self) -> int:
        return self.body.get("n", 1) if isinstance(self.body, dict) else 0

    @property
    def tells(self) -> bool:
        """Whether the reply carries the record: not where a stop string may have ended it."""
        return (
            isinstance(self.body, dict) and not self.streamed and self.route.stop not in self.body
        )

    @property
    def engine_id(self) -> str:
        """Under which /kv_eviction/requests knows it."""
        return self.route.id_prefix + self.name

    def sent_headers(self) -> dict[str, str]:
        return {**self.headers, "X-Request-Id": self.name}

    def sent_body(self) -> Body | bytes:
        if self.route is RESPONSES and isinstance(self.body, dict):  # reads no X-Request-Id
            return {**self.body, "request_id": self.engine_id}
        return self.body


# Directives that must be refused: headers, more of the body, what is named, the counted reason.
MALFORMED: tuple[tuple[Mapping[str, str], Body, str, str], ...] = (
    *(
        ({"X-KV-Budget": value}, {}, "X-KV-Budget", "budget")
        for value in ("", "0", "95", "12 tokens", "101%", "1e3")
    ),
    ({"X-KV-Policy": "nexsus"}, {}, "X-KV-Policy", "policy"),
    ({"X-KV-Seed": "-1"}, {}, "X-KV-Seed", "seed"),
    ({"X-KV-Prefill": "chunked"}, {}, "X-KV-Prefill", "prefill"),
    ({"X-KV-Allocator": "even"}, {}, "X-KV-Allocator", "allocator"),
    ({"X-KV-Bugdet": "512"}, {}, "X-KV-Bugdet", "unknown"),
    ({}, {"vllm_xargs": {"kv_budget": "31"}}, "kv_budget", "budget"),
    ({"X-KV-Budget": "256"}, {"vllm_xargs": {"kv_budget": "128"}}, "X-KV-Budget", "conflict"),
    ({}, {"kv_budget": "256"}, "kv_budget", "body"),
)


# Prompts that fit neither the pool, if they keep everything, nor the model's context: characters,
# headers, and as above.
TOO_BIG: tuple[tuple[int, Mapping[str, str], str, str | None], ...] = (
    (2 * CHARACTERS * POOL_TOKENS, {"X-KV-Budget": "full"}, "kv_budget='full'", "budget"),
    (2 * CHARACTERS * MODEL_TOKENS, {}, "context length", None),
)


class Planner:
    """Draws requests: the same seed and index are the same request."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        (self.text,) = prose(1, 400_000)

    def ask(self, index: int) -> Ask:
        draw = random.Random(f"{self.seed} {index}")
        kinds = (self._answered, self._left, self._malformed, self._bad_body, self._too_big)
        (kind,) = draw.choices(kinds, weights=(79, 12, 5, 2, 2))
        return kind(draw, f"soak{index:06}")

    def _answered(self, draw: random.Random, name: str) -> Ask:
        route, stream = draw.choice(ROUTES), draw.random() < 0.5
        body = route.body(self._prompt(draw, name), draw.randint(1, 24))
        extras = []
        sampled = draw.random() < 0.5
        body["temperature"] = 0.8 if sampled else 0
        if route.several and sampled:
            body["n"] = draw.choice((1, 1, 2, 3))
            if draw.random() < 0.5:
                body["seed"] = draw.randrange(1000)
        if route.several and draw.random() < 0.15:
            body |= route.logprobs()
        if route.stop and draw.random() < 0.1:
            body[route.stop] = draw.sample(STOPS, 2)
            extras.append("stop")
        schema = route.schema()
        if schema and not extras and draw.random() < 0.1:
            body |= schema
            extras.append("schema")
        if stream:
            body["stream"] = True
        directive = self._directive(draw)
        headers = {}
        if draw.random() < 0.5:
            headers = {
                "X-KV-" + key.removeprefix("kv_").title(): value for key, value in directive.items()
            }
        elif directive:
            body["vllm_xargs"] = directive
        kind = f"{route.name}, {'streamed' if stream else 'whole'}"
        return Ask(kind, route, name, body, headers, directive=directive)

    def _left(self, draw: random.Random, name: str) -> Ask:
        """A client that hangs up."""
        route = draw.choice(ROUTES)
        how = draw.choice(("whole", "before the first token", "mid-stream"))
        body = route.body(self._prompt(draw, name), draw.randint(8, 48))
        leave = Leave(seconds=draw.choice((0.01, 0.1, 1.0)) * draw.uniform(0.5, 2))
        if how != "whole":
            body["stream"] = True
        if how == "mid-stream":
            leave = Leave(events=draw.randint(2, 8))
        headers = {"X-KV-Budget": draw.choice(BUDGETS)}
        directive = {"kv_budget": headers["X-KV-Budget"]}
        return Ask(f"hung up, {how}", route, name, body, headers, directive=directive, leave=leave)

    def _malformed(self, draw: random.Random, name: str) -> Ask:
        route = draw.choice(ROUTES)
        headers, more, named, reason = draw.choice(MALFORMED)
        body = {**route.body("Hello", 2), **more, "stream": draw.random() < 0.5}
        return Ask("bad directive", route, name, body, headers, 400, named, reason)

    def _bad_body(self, draw: random.Random, name: str) -> Ask:
        route = draw.choice(ROUTES)
        body = route.body("Hello", 2)
        bad: tuple[tuple[Body | bytes, str], ...] = (
            (b"{", "JSON"),
            ({**body, route.most_tokens: "many"}, route.most_tokens),
            ({**body, "temperature": "hot"}, "temperature"),
            ({key: value for key, value in body.items() if key != route.input}, route.input),
        )
        sent, named = draw.choice(bad)
        return Ask("bad body", route, name, sent, {"X-KV-Budget": "256"}, 400, named)

    def _too_big(self, draw: random.Random, name: str) -> Ask:
        route = draw.choice(ROUTES)
        characters, headers, named, reason = draw.choice(TOO_BIG)
        body = {**route.body(self._slice(draw, characters), 4), "stream": draw.random() < 0.5}
        return Ask("too big", route, name, body, headers, 400, named, reason)

    def _directive(self, draw: random.Random) -> dict[str, str]:
        directive = {}
        if draw.random() < 0.85:
            directive["kv_budget"] = draw.choice(BUDGETS)
        if draw.random() < 0.5:
            directive["kv_policy"] = draw.choice((*POLICIES, "none"))
        if draw.random() < 0.4:
            directive["kv_allocator"] = draw.choice((*ALLOCATORS, "auto"))
        if draw.random() < 0.4:
            directive["kv_prefill"] = draw.choice(PREFILL_MODES)
        if draw.random() < 0.3:
            directive["kv_seed"] = str(draw.randrange(1000))
        return directive

    def _prompt(self, draw: random.Random, name: str) -> str:
        """20 to 400 tokens, mostly after one of a few documents."""
        if draw.random() < 0.7:
            document = draw.randrange(DOCUMENTS) * 5000
            shared = draw.choice((SHARED // 2, SHARED)) * CHARACTERS
            return self.text[document : document + shared] + self._slice(
                draw, CHARACTERS * draw.randint(5, 80)
            )
        return f"{name} " + self._slice(draw, CHARACTERS * round(draw.triangular(20, 390, 60)))

    def _slice(self, draw: random.Random, characters: int) -> str:
        start = draw.randrange(len(self.text) - characters)
        return self.text[start : start + characters]


def canaries(turn: str) -> Sequence[Ask]:
    """The same greedy requests each time, but for their names."""
    (text,) = prose(1, 400_000)
    asked: list[Ask] = []

    def add(
        route: Route, start: int, tokens: int, directive: dict[str, str], more: Body | None = None
    ) -> None:
        passage = text[start : start + CHARACTERS * tokens]
        body = {**route.body(passage, 16), "temperature": 0, **(more or {})}
        if directive:
            body["vllm_xargs"] = directive
        name = f"canary{len(asked)}-{turn}"
        asked.append(Ask("canary", route, name, body, directive=directive))

    whole, oneshot, streaming = (
        {"kv_budget": "full"},
        {"kv_prefill": "oneshot"},
        {"kv_prefill": "streaming"},
    )
    add(COMPLETIONS, 1000, 200, whole)
    # The beginning of a document that other requests share, kept whole and evicted.
    add(COMPLETIONS, 5000, SHARED, whole)
    add(COMPLETIONS, 5000, SHARED, {"kv_budget": "128", **oneshot})
    add(COMPLETIONS, 9000, 900, {"kv_budget": "192", "kv_allocator": "uniform", **streaming})
    add(CHAT, 13000, 300, {"kv_budget": "128", "kv_allocator": "ada", **oneshot}, CHAT.logprobs())
    add(CHAT, 17000, 250, {"kv_budget": "128", "kv_policy": "streaming-llm", **oneshot})
    add(RESPONSES, 21000, 300, {"kv_budget": "20%", **oneshot})
    chance = {"kv_policy": "random", "kv_seed": "7"}
    add(MESSAGES, 25000, 300, {"kv_budget": "160", **chance, **oneshot})
    add(MESSAGES, 29000, 300, {"kv_budget": "128", **streaming}, {"stream": True})
    schema = COMPLETIONS.schema()
    add(COMPLETIONS, 33000, 250, {"kv_budget": "128", "kv_allocator": "cake", **oneshot}, schema)
    return asked
