"""What the user asks for: the budget grammar, the engine's settings, one request's directive.

Pure data, shared by the command line, the HTTP layer, the scheduler and the worker. Imports neither
vLLM nor torch. Every error names the value, the limit and the remedy.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

ENTRY_POINTS = "nexus_vllm.policies"
"""Where other packages register their policies: a name, and the class derived from Policy."""
BUILT_IN_POLICIES = (
    "nexus",
    "snapkv",
    "tova",
    "h2o",
    "cake",
    "keydiff",
    "knorm",
    "expected-attention",
    "vase",
    "kvzip",
    "streaming-llm",
    "random",
    "random-generated",
)
POLICIES = (
    *BUILT_IN_POLICIES,
    *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - {*BUILT_IN_POLICIES}),
)
ALLOCATORS = ("uniform", "per-head", "pyramid", "ada", "cake", "lu", "global")
Selector = Literal["topk", "reservoir", "gumbel", "pareto", "systematic"]
PREFILL_MODES = ("auto", "oneshot", "streaming")
DIRECTIVE_KEYS = ("kv_budget", "kv_policy", "kv_allocator", "kv_seed", "kv_prefill")
ENGINE_WIDE = frozenset(
    {
        *("budget", "budget_floor", "allocator", "profile", "block_size", "force_block_size"),
        *("seed", "trigger", "high_water", "low_water", "prefill"),
        *("records", "check_integrity", "trace", "variants"),
    }
)
"""Settings that a variant cannot change: a request has its own word on them, or no one has."""
# Keys that vLLM itself keeps in SamplingParams.extra_args under our prefix.
VLLM_KEYS = frozenset({"kv_transfer_params", "kv_cache_report_mode"})

MAX_BUDGET = 2**30
MAX_SEED = 2**63 - 1
PRESET_SUFFIX = ".yaml"

_BUDGET_GRAMMAR = "full, N tokens (4096), Nk (4k = 4096) or P% of the prompt (20%)"
_BUDGET = re.compile(
    r"(?P<full>full)|(?P<n>[0-9]{1,12})(?P<k>k?)|(?P<p>[0-9]{1,3}(\.[0-9]{1,6})?)%"
)


class DirectiveError(ValueError):
    """One request asked for something it cannot have. `str()` names value, limit and remedy."""

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        # The client's own text: cut, and kept to what any encoding can carry.
        field = field[:80].encode("ascii", "backslashreplace").decode()
        super().__init__(f"{field}={shown(value)} is not allowed: {limit}. {remedy}")
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy

    @property
    def reason(self) -> str:
        """The label of `nexus:rejected_total`: one of few, whatever a client sends."""
        known = plain_name(self.field)
        return known.removeprefix("kv_") if known in DIRECTIVE_KEYS else "unknown"


def plain_name(name: str) -> str:
    """A name as `vllm_xargs` would have it, also where it is spelt as a header or in capitals."""
    return name.lower().replace("-", "_").removeprefix("x_")


def beam_search_refusal() -> DirectiveError:
    """Beams get no directives: vLLM resubmits each as requests for one token, without them."""
    return DirectiveError(
        "use_beam_search", True, "vLLM's beam search drops KV directives", "Drop it or them."
    )


def shown(value: object) -> str:
    """A value for an error's text, short whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, a list as deep
        text = f"<{type(value).__name__} too large to show>"
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Sequence[str]) -> str:
    """'did you mean X?' when something is near, else the whole list."""
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else "Known: " + ", ".join(known) + "."


@dataclass(frozen=True)
class Budget:
    """How many tokens of KV a sequence may keep: all, a number, or a percentage of its prompt."""

    absolute: int | None = None
    percent: Decimal | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read `full`, `N`, `Nk` (k = 1024) or `P%` (0 < P <= 100); an int is a number of tokens.

        Raises ValueError on anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"budget {shown(value)} is not one of {_BUDGET_GRAMMAR}")
        if isinstance(value, int) and not 0 < value <= MAX_BUDGET:
            raise ValueError(f"budget {shown(value)} is outside 1..{MAX_BUDGET} tokens")
        match = _BUDGET.fullmatch(str(value).strip().lower())
        if match is None:
            raise ValueError(f"budget {shown(value)} is not one of {_BUDGET_GRAMMAR}")
        if match["full"]:
            return cls()
        if match["p"]:
            percent = Decimal(match["p"])
            if not 0 < percent <= 100:
                raise ValueError(f"budget {shown(value)} is outside 0% < P <= 100%")
            return cls(percent=percent)
        tokens = int(match["n"]) * (1024 if match["k"] else 1)
        if not 0 < tokens <= MAX_BUDGET:
            raise ValueError(f"budget {shown(value)} is outside 1..{MAX_BUDGET} tokens")
        return cls(absolute=tokens)

    @property
    def full(self) -> bool:
        return self.absolute is None and self.percent is None

    def tokens(self, prompt_tokens: int, floor: int) -> int | None:
        """The budget in tokens; None is unlimited. A percentage never resolves below `floor`."""
        if self.percent is not None:
            return max(floor, int(prompt_tokens * self.percent / 100))
        return self.absolute

    def __str__(self) -> str:
        if self.percent is not None:
            text = f"{self.percent:f}"
            return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"
        return "full" if self.absolute is None else str(self.absolute)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )


@dataclass(frozen=True)
class Directive:
    """What one request asks for, with the engine's settings filled in where it asks for nothing.

    Policy "none" always comes with the full budget.
    """

    policy: str
    budget: Budget
    seed: int
    prefill: str
    allocator: str = "uniform"

    def budget_blocks(self, prompt_tokens: int, settings: "Settings") -> int | None:
        """Full blocks the sequence may keep, or None: never evicted."""
        tokens = self.budget.tokens(prompt_tokens, settings.budget_floor)
        return None if tokens is None else tokens // settings.block_size

    def header(self) -> str:
        """The value of the `X-KV-Eviction` response header."""
        told = f"policy={self.policy}; budget={self.budget}; prefill={self.prefill}"
        return told if self.allocator == "uniform" else f"{told}; allocator={self.allocator}"


class Settings(BaseModel):
    """Every knob of the engine. Immutable; plain JSON through `model_dump(mode="json")`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # What is kept
    policy: str = "nexus"
    budget: Budget = Budget(percent=Decimal(20))
    budget_floor: int = Field(default=1024, ge=1, le=MAX_BUDGET, strict=True)
    sink_blocks: int = Field(default=1, ge=0, le=1024, strict=True)
    recency_blocks: int = Field(default=1, ge=1, le=1024, strict=True)
    # Where it is kept: how a sequence's budget is dealt out over layers and KV heads
    allocator: Literal["auto", "uniform", "per-head", "pyramid", "ada", "cake", "lu", "global"] = (
        "auto"
    )
    profile: str | None = None
    # Blocks
    block_size: int = Field(default=32, ge=1, le=1024, strict=True)
    force_block_size: bool = False
    # Score (methods.md 1.1)
    window: int = Field(default=16, ge=1, le=256, strict=True)
    walk_steps: int = Field(default=3, ge=0, le=64, strict=True)
    lam: float = Field(
        default=0.5,
        ge=0,
        le=100,
        validation_alias=AliasChoices("lam", "lambda"),
        allow_inf_nan=False,
    )
    eps_tie: float = Field(default=1e-6, ge=0, le=1, allow_inf_nan=False)
    heads: Literal["per-head", "mean"] = "per-head"
    walk_rows: Literal["newest", "oldest", "spread"] = "newest"
    walk_over: Literal["candidates", "all"] = "candidates"
    walk_state: Literal["fresh", "carried"] = "fresh"
    pool_rows: Literal["mean", "max"] = "mean"
    pool_heads: Literal["mean", "max"] = "mean"
    prior: Literal["none", "knorm", "keydiff"] = "keydiff"
    prior_weight: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    # Selection
    selector: Selector = "gumbel"
    n: int = Field(default=5, ge=1, le=1024, strict=True)
    temperature: float = Field(default=0.1, ge=0, le=100, allow_inf_nan=False)
    decode_selector: Selector | None = None
    decode_n: int | None = Field(default=None, ge=1, le=1024, strict=True)
    decode_temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    smoothing: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
    parameters: dict[str, dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0, le=MAX_SEED, strict=True)
    # When
    trigger: Literal["budget", "pressure"] = "budget"
    high_water: float = Field(default=0.9, gt=0, le=1, allow_inf_nan=False)
    low_water: float = Field(default=0.8, ge=0, le=1, allow_inf_nan=False)
    interval: int | Literal["auto"] = "auto"
    chunk: int = Field(default=512, ge=1, le=MAX_BUDGET, strict=True)
    prefill: Literal["auto", "oneshot", "streaming"] = "auto"
    # Reports and checks
    records: int = Field(default=1024, ge=0, le=65536, strict=True)
    check_integrity: bool = False
    trace: bool = False
    _varied: dict[str, "Settings"] = PrivateAttr(default_factory=dict)

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str) -> str:
        if policy in POLICIES:
            return policy
        if policy == "none":
            raise PydanticCustomError(
                "policy",
                "'none' leaves nothing to set. Drop the flag for stock vLLM, or set the budget "
                "'full' to evict only for requests that ask",
            )
        raise PydanticCustomError("policy", f"unknown policy. {nearest(policy, POLICIES)}")

    @field_validator("parameters")
    @classmethod
    def _of_known_policies(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        for policy in parameters:
            if policy not in POLICIES:
                told = f"no policy {shown(policy)}. {nearest(policy, POLICIES)}"
                raise PydanticCustomError("parameters", "{told}", {"told": told})
        return parameters

    @field_validator("variants")
    @classmethod
    def _named_apart(cls, variants: dict[str, Any]) -> dict[str, Any]:
        for name, changes in variants.items():
            told = None
            if not re.fullmatch(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?", name):
                told = f"{shown(name)}: use at most 64 of a-z, 0-9, '.', '_' and '-'"
            elif name in (*POLICIES, "none"):
                told = f"{shown(name)} is a policy; use another name"
            elif fixed := sorted(ENGINE_WIDE & changes.keys()):
                told = f"{name} cannot set {', '.join(fixed)}: the same for the whole engine"
            if told:
                raise PydanticCustomError("variants", "{told}", {"told": told})
        return variants

    @field_validator(
        *("lam", "eps_tie", "prior_weight", "temperature", "decode_temperature", "smoothing"),
        *("high_water", "low_water"),
        mode="before",
    )
    @classmethod
    def _a_number(cls, value: object) -> object:
        if isinstance(value, bool):  # YAML's yes, which else is 1
            raise PydanticCustomError("number", "use a number")
        return value

    @field_validator("interval", mode="before")
    @classmethod
    def _known_interval(cls, interval: object) -> object:
        if interval != "auto" and (type(interval) is not int or not 1 <= interval <= MAX_BUDGET):
            raise PydanticCustomError("interval", f"use auto, or 1 to {MAX_BUDGET} tokens")
        return interval

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        def refuse(field: str, value: object, limit: str) -> None:
            raise PydanticCustomError("consistent", f"{field}={value} is not allowed: {limit}")

        if self.low_water > self.high_water:
            refuse("low_water", self.low_water, f"use high_water={self.high_water} or less")
        if self.block_size != 32 and not self.force_block_size:
            refuse("block_size", self.block_size, "use 32, or set force_block_size: true")
        for name in ("interval", "chunk"):
            tokens = getattr(self, name)
            if tokens != "auto" and tokens % self.block_size:
                refuse(name, tokens, f"use a multiple of block_size={self.block_size}")
        least = self.min_budget_tokens
        why = f"at least {least} tokens (sink + recency + one block of {self.block_size})"
        if self.budget_floor < least:
            refuse("budget_floor", self.budget_floor, why)
        if self.budget.absolute is not None and self.budget.absolute < least:
            refuse("budget", self.budget, why)
        base = self.model_dump(mode="json", exclude={"variants"}) if self.variants else {}
        for name, changes in self.variants.items():
            kept = {key: base[key] for key in base if key != "lam" or "lambda" not in changes}
            try:
                self._varied[name] = type(self).from_source({**kept, **changes})
            except ValueError as error:
                told = f"variant {name}: {str(error).removeprefix('KV eviction: ')}"
                raise PydanticCustomError("variants", "{told}", {"told": told}) from None
        return self

    def of(self, policy: str) -> "Settings":
        """What holds for requests that ask for this policy or variant."""
        return self._varied.get(policy, self)

    def policy_of(self, name: str) -> str:
        """The policy that a request for this policy or variant is served with."""
        return self.of(name).policy if name in self.variants else name

    @property
    def choices(self) -> tuple[str, ...]:
        """What a request may name as its policy, beside `none`."""
        return (*POLICIES, *self.variants)

    @property
    def widest_window(self) -> int:
        """Query rows that the engine has to remember."""
        return max(each.window for each in (self, *self._varied.values()))

    @property
    def min_budget_tokens(self) -> int:
        """The least a sequence can live on: sink and recency blocks, and one to choose."""
        return (self.sink_blocks + self.recency_blocks + 1) * self.block_size

    def selection(self, decoding: bool) -> dict[str, Any]:
        """`kind`, `n` and `temperature` for `selectors.select`."""
        chosen = {"kind": self.selector, "n": self.n, "temperature": self.temperature}
        if decoding:
            own = {
                "kind": self.decode_selector,
                "n": self.decode_n,
                "temperature": self.decode_temperature,
            }
            chosen |= {key: value for key, value in own.items() if value is not None}
        return chosen

    def interval_blocks(self, budget: int) -> int:
        """Blocks by which a window of `budget` blocks grows until it is shrunk again.

        An eviction costs in proportion to what it scores, so "auto" is a 32nd of the budget: the
        cost per token is then the same for every budget, for 3% more memory at most.
        """
        if self.interval == "auto":
            return max(1, budget // 32)
        return self.interval // self.block_size

    @classmethod
    def from_source(
        cls, source: str | Mapping[str, Any] | None = None, **overrides: object
    ) -> Self:
        """Settings from a YAML/JSON file, inline JSON, a preset's name or a mapping.

        `overrides` that are not None win over the source. Raises ValueError naming the key, the
        value and the limit.
        """
        knobs = dict(_load(source))
        if "lambda" in knobs and "lam" in knobs:
            told = f"lambda={shown(knobs['lambda'])} and lam={shown(knobs['lam'])}"
            raise ValueError(f"KV eviction: {told} set the same thing twice; keep one of them")
        overrides = {k: v for k, v in overrides.items() if v is not None}
        for name, other in (("lam", "lambda"), ("lambda", "lam")):
            if name in overrides:
                knobs.pop(other, None)
        knobs |= overrides
        known = [*cls.model_fields, "lambda"]
        for key in knobs:
            if key not in known:
                raise ValueError(
                    f"KV eviction: unknown setting {shown(key)}. {nearest(key, known)}"
                )
        try:
            return cls.model_validate(knobs)
        except ValidationError as error:
            raise ValueError("KV eviction: " + "; ".join(map(_told, error.errors()))) from None

    def to_json(self) -> dict[str, Any]:
        """The plain dict that travels in `VllmConfig.additional_config["kv_eviction"]`."""
        return self.model_dump(mode="json")

    def directive(self, xargs: Mapping[str, Any] | None) -> Directive:
        """Read the `kv_*` keys of a request's extra arguments. Raises DirectiveError."""
        xargs = xargs or {}
        for key in xargs:
            name = plain_name(key)
            if name.startswith("kv_") and key not in DIRECTIVE_KEYS and key not in VLLM_KEYS:
                raise DirectiveError(
                    key, xargs[key], "no such directive", nearest(name, DIRECTIVE_KEYS)
                )
        policy = self._policy(xargs)
        budget = self._budget(xargs, self.of(policy).min_budget_tokens)
        allocator = self._allocator(xargs)
        if allocator == "auto":
            allocator = "lu" if self.profile else "uniform"
        return Directive(
            policy=policy,
            budget=Budget() if policy == "none" else budget,
            seed=self._seed(xargs),
            prefill=self._prefill(xargs),
            allocator=allocator,
        )

    def _policy(self, xargs: Mapping[str, Any]) -> str:
        if "kv_policy" not in xargs:
            return self.policy
        value, known = xargs["kv_policy"], (*self.choices, "none")
        name = value.strip().lower() if isinstance(value, str) else None
        if name not in known:
            limit = "the policies are " + ", ".join(known)
            remedy = nearest(name or "", known)
            if name is None or remedy.startswith("Known"):
                remedy = "Name one of them, or leave it out for the server's default."
            raise DirectiveError("kv_policy", value, limit, remedy)
        return name

    def _budget(self, xargs: Mapping[str, Any], least: int) -> Budget:
        if "kv_budget" not in xargs:
            return self.budget
        value = xargs["kv_budget"]
        try:
            budget = Budget.parse(value)
        except ValueError as error:
            limit = "it is " + str(error).rpartition(" is ")[2]
            raise DirectiveError(
                "kv_budget", value, limit, f"Use {least} tokens or more, a percentage, or full."
            ) from None
        if budget.absolute is not None and budget.absolute < least:
            raise DirectiveError(
                "kv_budget",
                value,
                f"the least is {least} tokens (sink + recency + one block of {self.block_size})",
                f"Use {least} tokens or more, a percentage, or full.",
            )
        return budget

    def _seed(self, xargs: Mapping[str, Any]) -> int:
        if "kv_seed" not in xargs:
            return self.seed
        value = xargs["kv_seed"]
        seed = -1
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value.strip()):
            seed = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            seed = value
        if not 0 <= seed <= MAX_SEED:
            raise DirectiveError(
                "kv_seed", value, f"a seed is an integer in 0..{MAX_SEED}", "Use one, such as 7."
            )
        return seed

    def _allocator(self, xargs: Mapping[str, Any]) -> str:
        if "kv_allocator" not in xargs:
            return self.allocator
        value = xargs["kv_allocator"]
        name = value.strip().lower() if isinstance(value, str) else None
        known = ["auto", *(known for known in ALLOCATORS if known != "lu" or self.profile)]
        if name not in known:
            raise DirectiveError(
                "kv_allocator",
                value,
                "the allocators are " + ", ".join(known),
                "Name one of them. 'lu' needs a server that has a profile (--kv-profile)."
                if name == "lu"
                else "Name one of them, or leave it out for the server's default.",
            )
        return name

    def _prefill(self, xargs: Mapping[str, Any]) -> str:
        if "kv_prefill" not in xargs:
            return self.prefill
        value = xargs["kv_prefill"]
        mode = value.strip().lower() if isinstance(value, str) else None
        if mode not in PREFILL_MODES:
            raise DirectiveError(
                "kv_prefill",
                value,
                "the modes are " + ", ".join(PREFILL_MODES),
                "Name one of them, or leave it out for the server's default.",
            )
        return mode


def presets() -> list[str]:
    """Names of the shipped presets."""
    folder = config_folder()
    return sorted(
        f.name.removesuffix(PRESET_SUFFIX)
        for f in folder.iterdir()
        if f.name.endswith(PRESET_SUFFIX)
    )


def config_folder() -> Path:
    """Presets and profiles: configs/ in a checkout, `nexus_vllm.configs` where installed."""
    sibling = Path(__file__).resolve().parent.parent / "configs"
    if (sibling / "nexus.yaml").is_file():
        return sibling
    return Path(str(resources.files("nexus_vllm.configs")))


def _load(source: object) -> Mapping[str, Any]:
    if source is None:
        return {}
    name, loaded = "the configuration", source
    if isinstance(source, str):
        inline = source.lstrip().startswith("{")
        name = "the inline JSON" if inline else source
        try:
            text = source if inline else _read(source)
            # YAML is a superset of JSON but reads 1e-6 as a string, so try JSON first.
            loaded = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
        except (json.JSONDecodeError, yaml.YAMLError, OSError) as error:
            raise ValueError(f"KV eviction: cannot read {name}: {error}") from None
        except _NoSourceError:
            raise ValueError(
                f"KV eviction: {source!r} is no file, no inline JSON and no preset; "
                f"presets: {', '.join(presets())}"
            ) from None
        except Exception as error:  # PyYAML lets through what fails in it: KeyError, AttributeError
            raise ValueError(f"KV eviction: cannot read {name}: {error!r}") from None
        if loaded is None:
            return {}
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) for key in loaded):
        raise ValueError(
            f"KV eviction: {name} must be a mapping of settings to values, not {shown(loaded)}"
        )
    return loaded


class _NoSourceError(Exception):
    """There is no such file and no such preset."""


def _read(source: str) -> str:
    """The text of a preset or a file."""
    path = config_folder() / (source + PRESET_SUFFIX) if source in presets() else Path(source)
    try:
        if not path.is_file():
            raise _NoSourceError
    except OSError:  # too long for a file's name
        raise _NoSourceError from None
    return path.read_text(encoding="utf-8")


def _told(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    told = error["msg"].removeprefix("Value error, ")
    return f"{where}={shown(error['input'])}: {told}" if where else told
