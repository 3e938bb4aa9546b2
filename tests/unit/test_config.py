"""Settings, the budget grammar and directives."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus_vllm import allocators, policies
from nexus_vllm.admission import plans
from nexus_vllm.config import (
    ALLOCATORS,
    MAX_BUDGET,
    MAX_SEED,
    POLICIES,
    Budget,
    DirectiveError,
    Settings,
    presets,
)


def test_the_command_line_offers_exactly_the_registered_policies() -> None:
    assert set(POLICIES) == set(policies.POLICIES)


# Budget grammar


@pytest.mark.parametrize(
    ("text", "canonical", "tokens"),
    [
        ("full", "full", None),
        ("FULL", "full", None),
        ("512", "512", 512),
        (512, "512", 512),
        (" 2k ", "2048", 2048),
        ("2K", "2048", 2048),
        ("20%", "20%", 2000),
        ("12.50%", "12.5%", 1250),
        ("100%", "100%", 10_000),
        ("0.001%", "0.001%", 256),
    ],
)
def test_budget_reads_the_documented_grammar(text: Any, canonical: str, tokens: int | None) -> None:
    budget = Budget.parse(text)
    assert str(budget) == canonical
    assert budget.tokens(prompt_tokens=10_000, floor=256) == tokens
    assert Budget.parse(canonical) == budget


@pytest.mark.parametrize(
    "value",
    [
        *("", "0", "0k", "-1", "1.5k", "2m", "20 %", "0%", "100.1%", "%", "1e3", "0x20", "٣", "²"),
        *("nan", "inf", "full%", "k", "9" * 40, MAX_BUDGET + 1, 0, -5, True, None, 1.5, [512]),
    ],
)
def test_budget_refuses_everything_else(value: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget.parse(value)


@given(st.text(max_size=12))
def test_budget_either_reads_a_text_or_raises_value_error(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except ValueError:
        return
    assert Budget.parse(str(budget)) == budget


@given(st.integers(1, MAX_BUDGET))
def test_an_absolute_budget_is_taken_as_given(tokens: int) -> None:
    assert Budget.parse(tokens) == Budget.parse(str(tokens)) == Budget(absolute=tokens)
    assert Budget.parse(tokens).tokens(prompt_tokens=1, floor=4096) == tokens


@given(st.decimals("0.000001", "100", places=6, allow_nan=False), st.integers(1, 10**7), st.data())
def test_a_percentage_is_exact_and_never_below_the_floor(
    percent: Decimal, prompt: int, data: st.DataObject
) -> None:
    floor = data.draw(st.integers(1, 4096))
    tokens = Budget.parse(f"{percent:f}%").tokens(prompt, floor)
    assert tokens == max(floor, int(percent * prompt / 100))


# Settings


def test_the_shipped_default_preset_spells_out_the_defaults() -> None:
    assert Settings.from_source("nexus") == Settings()


def test_the_paper_preset_is_the_papers_setting() -> None:
    paper = Settings.from_source("nexus-paper")
    assert (paper.window, paper.walk_steps, paper.lam, paper.eps_tie) == (16, 3, 0.5, 1e-6)
    assert (paper.heads, paper.selector, paper.n, paper.walk_over) == (
        "mean",
        "reservoir",
        5,
        "all",
    )
    assert (paper.interval, paper.block_size, str(paper.budget)) == (32, 32, "20%")
    assert (paper.prior, paper.allocator) == ("none", "uniform")


def test_large_budgets_are_shrunk_less_often() -> None:
    auto = Settings()
    assert [auto.interval_blocks(n) for n in (4, 32, 63, 64, 128)] == [1, 1, 1, 2, 4]
    assert Settings(interval=64).interval_blocks(128) == 2


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_survives_json(name: str) -> None:
    settings = Settings.from_source(name)
    travelled = json.loads(json.dumps(settings.to_json()))
    assert Settings.from_source(travelled) == settings


@pytest.mark.parametrize(
    "source",
    ['{"lambda": 0.25, "eps_tie": 1e-6}', "lambda: 0.25\neps_tie: 1.0e-6\n"],
    ids=["json", "yaml"],
)
def test_files_and_inline_json_are_read(source: str, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text(source)
    assert Settings.from_source(str(file)).lam == 0.25
    if source.startswith("{"):
        assert Settings.from_source(source).lam == 0.25


def test_overrides_win_and_none_means_not_given() -> None:
    settings = Settings.from_source(
        {"budget": "2k", "lambda": 0.1}, budget="1k", lam=0.2, seed=None
    )
    assert (settings.budget, settings.lam, settings.seed) == (Budget(absolute=1024), 0.2, 0)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"widnow": 8}, ["widnow", "window"]),
        ({"window": 0}, ["window=0", "1"]),
        ({"window": True}, ["window=True"]),
        ({"n": 2.5}, ["n=2.5"]),
        ({"lambda": float("nan")}, ["lambda=nan"]),
        ({"lam": 0.1, "lambda": 0.2}, ["lam=0.1", "lambda=0.2", "twice"]),
        ({"temperature": -1}, ["temperature=-1", "0"]),
        ({"policy": "nexsu"}, ["nexsu", "nexus"]),
        ({"policy": "none"}, ["none", "full"]),
        ({"heads": "avg"}, ["avg", "per-head"]),
        ({"interval": 33}, ["interval=33", "block_size=32"]),
        ({"interval": 0}, ["interval=0", "1"]),
        ({"interval": "often"}, ["interval='often'", "auto"]),
        ({"block_size": 16}, ["block_size=16", "force_block_size"]),
        ({"budget": "9x"}, ["9x", "20%"]),
        ({"budget": "95"}, ["budget=95", "96"]),
        ({"budget_floor": 64}, ["budget_floor=64", "96"]),
        ({"recency_blocks": 0}, ["recency_blocks=0"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"variants": {"snapkv": {}}}, ["variants", "'snapkv'", "a policy"]),
        ({"variants": {"none": {}}}, ["variants", "'none'", "a policy"]),
        ({"variants": {"A b": {}}}, ["variants", "'A b'", "a-z"]),
        ({"variants": {"a": {"seed": 1, "budget": "10%"}}}, ["a cannot set budget, seed"]),
        ({"variants": {"a": {"variants": {}}}}, ["a cannot set variants"]),
        ({"variants": {"a": {"widnow": 8}}}, ["variant a", "widnow", "window"]),
        ({"variants": {"a": {"window": 0}}}, ["variant a", "window=0", "1"]),
        ({"variants": {"a": {"sink_blocks": 40}}}, ["variant a", "budget_floor=1024", "1344"]),
        ({"variants": {"a": 3}}, ["variants.a=3"]),
        ("{broken", ["inline JSON"]),
        ("[1]", ["[1]", "nexus-paper"]),
        ("no-such-file.yaml", ["no-such-file.yaml", "nexus-paper"]),
    ],
)
def test_a_bad_setting_is_named_with_its_limit(source: Any, told: list[str]) -> None:
    with pytest.raises(ValueError, match="KV eviction") as error:
        Settings.from_source(source)
    for part in told:
        assert part in str(error.value)


def test_another_block_size_must_be_forced() -> None:
    settings = Settings(block_size=16, force_block_size=True)
    assert settings.min_budget_tokens == 48


# Directives


def test_an_empty_directive_is_the_settings() -> None:
    settings = Settings(seed=3, prefill="streaming")
    for xargs in (None, {}, {"other": 1, "kv_transfer_params": {}}):
        assert settings.directive(xargs).header() == "policy=nexus; budget=20%; prefill=streaming"
        assert settings.directive(xargs).seed == 3


def test_a_directive_reads_all_four_keys_as_strings_or_numbers() -> None:
    settings = Settings()
    text = {"kv_budget": "512", "kv_policy": "Random", "kv_seed": "7", "kv_prefill": "ONESHOT"}
    directive = settings.directive(text)
    assert directive.header() == "policy=random; budget=512; prefill=oneshot"
    assert directive == settings.directive(text | {"kv_budget": 512, "kv_seed": 7})
    assert settings.directive({"kv_seed": MAX_SEED}).seed == MAX_SEED


@pytest.mark.parametrize(
    ("xargs", "prompt", "blocks"),
    [
        ({}, 3000, 32),  # 20% is 600 tokens: the floor of 1024 holds
        ({}, 10_000, 62),  # 2000 tokens
        ({"kv_budget": "512"}, 10, 16),
        ({"kv_budget": "96"}, 10, 3),
        ({"kv_budget": "full"}, 10_000, None),
        ({"kv_policy": "none", "kv_budget": "512"}, 10_000, None),
    ],
)
def test_budget_blocks(xargs: dict[str, Any], prompt: int, blocks: int | None) -> None:
    settings = Settings()
    assert settings.directive(xargs).budget_blocks(prompt, settings) == blocks


MALFORMED: list[tuple[str, Any, str, str]] = [
    # key, value, what must be told, reason
    *(("kv_budget", value, "96", "budget") for value in ("95", "1", "0", "-3", 64, "banana", "")),
    *(
        ("kv_budget", value, "full", "budget")
        for value in ("0%", "101%", "1.5k", True, None, [512])
    ),
    *(("kv_budget", value, "percentage", "budget") for value in (1.5, "1e9", "9" * 30)),
    *(
        ("kv_policy", value, "nexus", "policy")
        for value in ("nexsu", "", "full", 3, None, ["nexus"])
    ),
    *(
        ("kv_seed", value, str(MAX_SEED), "seed")
        for value in ("-1", "x", 2**63, 1.0, True, "", None)
    ),
    *(("kv_prefill", value, "oneshot", "prefill") for value in ("once", "", 1, None, True)),
    ("kv_bugdet", "512", "kv_budget", "unknown"),
    ("kv_", "512", "kv_", "unknown"),
    ("kv_x" * 60, "512", "kv_budget", "unknown"),
]


@pytest.mark.parametrize(("key", "value", "told", "reason"), MALFORMED)
def test_a_malformed_directive_names_value_limit_and_remedy(
    key: str, value: Any, told: str, reason: str
) -> None:
    with pytest.raises(DirectiveError) as caught:
        Settings().directive({key: value})
    error = caught.value
    assert (error.field, error.reason) == (key[:80], reason)
    assert error.limit
    assert error.remedy
    assert told in str(error)
    assert f"{key}={value!r}"[:40] in str(error)


def test_a_long_value_is_not_echoed_in_full() -> None:
    with pytest.raises(DirectiveError) as caught:
        Settings().directive({"kv_budget": "x" * 10_000})
    assert len(str(caught.value)) < 400


@given(
    st.dictionaries(
        st.sampled_from(["kv_budget", "kv_policy", "kv_seed", "kv_prefill", "kv_oops", "other"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    )
)
def test_any_directive_is_read_or_refused(xargs: dict[str, Any]) -> None:
    settings = Settings()
    try:
        directive = settings.directive(xargs)
    except DirectiveError:
        return
    blocks = directive.budget_blocks(5000, settings)
    assert blocks is None or blocks >= 4


def test_a_request_may_name_its_allocator_but_lu_needs_a_profile() -> None:
    settings = Settings()
    assert settings.directive({"kv_allocator": "Global"}).allocator == "global"
    assert settings.directive({}).header().endswith("prefill=auto")
    assert settings.directive({"kv_allocator": "ada"}).header().endswith("allocator=ada")
    for value in ("lu", "best", 3):
        with pytest.raises(DirectiveError, match="kv_allocator"):
            settings.directive({"kv_allocator": value})
    with pytest.raises(DirectiveError, match="--kv-profile"):
        settings.directive({"kv_allocator": "lu"})
    assert Settings(allocator="lu", profile="heads.json").directive({}).allocator == "lu"


def test_without_a_word_a_profile_is_used_for_every_policy() -> None:
    settings = Settings(profile="heads.json", variants={"other": {"policy": "tova"}})
    for asked in ({}, {"kv_policy": "random"}, {"kv_policy": "other"}, {"kv_allocator": "auto"}):
        assert settings.directive(asked).allocator == "lu"
    assert settings.directive({"kv_allocator": "uniform"}).allocator == "uniform"
    assert Settings().directive({}).allocator == "uniform"
    uniform = Settings(profile="heads.json", allocator="uniform")
    assert uniform.directive({}).allocator == "uniform"


def test_a_variant_is_a_policy_with_settings_of_its_own() -> None:
    changes = {"lambda": 2, "window": 32, "sink_blocks": 0, "chunk": 1024}
    settings = Settings.from_source(
        {"n": 7, "variants": {"wide": changes, "flat": {"policy": "snapkv", "selector": "topk"}}}
    )
    wide, flat = settings.of("wide"), settings.of("flat")
    assert (wide.lam, wide.window, wide.sink_blocks, wide.chunk, wide.n) == (2, 32, 0, 1024, 7)
    assert (flat.policy, flat.selector, flat.window, flat.n) == ("snapkv", "topk", 16, 7)
    assert settings.of("nexus") is settings.of("snapkv") is settings.of("none") is settings
    asked = ("wide", "flat", "tova")
    assert [settings.policy_of(name) for name in asked] == ["nexus", "snapkv", "tova"]
    assert (settings.window, settings.widest_window) == (16, 32)
    assert Settings(window=48, variants={"a": {"window": 8}}).widest_window == 48
    assert Settings.from_source(settings.to_json()).of("wide") == wide
    cut = Settings(decode_selector="topk", variants={"as-prefill": {"decode_selector": None}})
    assert cut.of("as-prefill").decode_selector is None
    directive = settings.directive({"kv_policy": "WIDE", "kv_budget": "64"})
    assert directive.header() == "policy=wide; budget=64; prefill=auto"
    for policy in ("nexus", "flat"):
        with pytest.raises(DirectiveError, match="the least is 96"):
            settings.directive({"kv_policy": policy, "kv_budget": "64"})
    with pytest.raises(DirectiveError, match="wide"):
        settings.directive({"kv_policy": "wdie"})
    (plan, _) = plans(directive, 5000, 10, settings, 1000)
    assert plan.chunk == 32


def test_the_allocators_are_those_of_the_registry() -> None:
    assert tuple(allocators.names()) == ALLOCATORS


FRACTIONS = [
    name
    for name, field in Settings.model_fields.items()
    if field.annotation in (float, float | None)
]


def test_yes_is_no_number() -> None:
    assert {"prior_weight", "temperature", "decode_temperature"} <= {*FRACTIONS}
    for name in [*FRACTIONS, "lambda"]:
        with pytest.raises(ValueError, match=f"{name}=True: use a number"):
            Settings.from_source({name: True})
