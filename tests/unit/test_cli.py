"""Flags, `engine_args` and validation at admission, on vLLM's real parser and arguments."""

import argparse
import dataclasses
import os
import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

import nexus_vllm
from nexus_vllm.config import Budget, Settings
from nexus_vllm.engine import cli, requests
from nexus_vllm.engine.hooks import HookError, is_wrapped, wrap

MIDDLEWARE = "nexus_vllm.server.middleware.EvictionMiddleware"


@pytest.fixture(autouse=True)
def _flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flags installed for one test, twice, as vLLM may load a plugin twice."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("add_cli_args", "create_engine_config"):
        raw = vars(EngineArgs)[name]
        original = getattr(getattr(raw, "__func__", raw), "__wrapped__", None)
        if original is not None:
            raw = staticmethod(original) if isinstance(raw, staticmethod) else original
        monkeypatch.setattr(EngineArgs, name, raw)
    cli.install_flags()
    cli.install_flags()


def serve_parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def parse(*argv: str) -> argparse.Namespace:
    return serve_parser().parse_args(["model", *argv])


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        parse(*argv)
    return capsys.readouterr().err.strip().splitlines()[-1]


def settings_in(args: Any) -> Settings:
    return Settings.from_source(args.additional_config["kv_eviction"])


# Flags


def test_help_lists_the_flags_once() -> None:
    text = serve_parser().format_help()
    FlexibleArgumentParser._search_keyword = "kveviction"
    try:
        group = serve_parser().format_help()
    finally:
        FlexibleArgumentParser._search_keyword = None
    assert text.count("KVEviction") == 1
    for flag in ("--kv-eviction {", "--kv-budget", "--kv-budget-floor", "--kv-eviction-config"):
        assert flag in group
    assert "20%" in group
    assert "nexus-paper" in group


def test_without_the_flag_every_argument_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = AsyncEngineArgs.from_cli_args(parse())
    with_none = parse("--kv-eviction", "none", "--kv-budget", "512")
    assert with_none.middleware == []
    stock_add = vars(EngineArgs)["add_cli_args"].__func__.__wrapped__
    monkeypatch.setattr(EngineArgs, "add_cli_args", staticmethod(stock_add))
    stock_args = parse()
    stock = AsyncEngineArgs.from_cli_args(stock_args)
    assert dataclasses.asdict(ours) == dataclasses.asdict(stock)
    assert dataclasses.asdict(AsyncEngineArgs.from_cli_args(with_none)) == dataclasses.asdict(stock)
    assert stock_args.middleware == []


def test_without_settings_create_engine_config_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stub_engine(monkeypatch, lambda self, *args, **kwargs: seen.append((self, args, kwargs)))
    args = EngineArgs(model="m")
    before = dataclasses.asdict(args)
    args.create_engine_config("context", headless=True)
    assert seen == [(args, ("context",), {"headless": True})]
    assert dataclasses.asdict(args) == before
    assert not is_wrapped(InputProcessor, "process_inputs")


def test_flags_become_settings_and_middleware() -> None:
    args = parse("--kv-eviction", "random", "--kv-budget", "2k", "--kv-budget-floor", "512")
    assert settings_in(args) == Settings.from_source(policy="random", budget="2k", budget_floor=512)
    assert args.middleware == [MIDDLEWARE]


def test_flags_go_with_other_middleware_and_additional_config_in_any_order() -> None:
    mine = ("--middleware", "a.B", "--additional-config", '{"x": 1}')
    for argv in ((*mine, "--kv-eviction", "nexus"), ("--kv-eviction", "nexus", *mine)):
        args = parse(*argv)
        assert args.middleware == ["a.B", MIDDLEWARE]
        assert args.additional_config.keys() == {"x", "kv_eviction"}
    assert parse().middleware == []  # the default list was not appended to


def test_a_preset_gives_way_to_flags() -> None:
    args = parse("--kv-eviction", "random", "--kv-eviction-config", "nexus-paper")
    assert (settings_in(args).policy, settings_in(args).interval) == ("random", 32)  # of the preset
    args = parse("--kv-eviction", "nexus", "--kv-eviction-config", '{"budget": "4k", "window": 8}')
    assert (str(settings_in(args).budget), settings_in(args).window) == ("4096", 8)


def test_a_configuration_is_enough_and_names_the_policy_itself() -> None:
    args = parse("--kv-eviction-config", "streaming-llm")
    assert settings_in(args).policy == "streaming-llm"
    assert args.middleware == [MIDDLEWARE]
    assert (
        nexus_vllm.engine_args(config={"policy": "random", "budget": 512})["additional_config"][
            "kv_eviction"
        ]
        == Settings(policy="random", budget=Budget.parse(512)).to_json()
    )


def test_flags_may_come_from_vllms_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("kv-eviction: nexus\nkv-budget: 30%\n")
    args = serve_parser().parse_args(["serve", "model", "--config", str(file)][1:])
    assert str(settings_in(args).budget) == "30%"


def test_settings_in_additional_config_work_without_the_flag() -> None:
    args = parse("--additional-config", '{"kv_eviction": {"policy": "random"}}')
    assert args.middleware == [MIDDLEWARE]


def test_parsed_arguments_carry_everything_to_a_process_without_our_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spawned API server unpickles them before vLLM loads plugins there."""
    args = pickle.loads(pickle.dumps(parse("--kv-eviction", "nexus", "--kv-budget", "1k")))
    for name in ("add_cli_args", "create_engine_config"):
        monkeypatch.delattr(EngineArgs, name)
    assert str(settings_in(AsyncEngineArgs.from_cli_args(args)).budget) == "1024"
    assert args.middleware == [MIDDLEWARE]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--kv-budget", "512"], ["--kv-budget", "--kv-eviction", "nexus"]),
        (["--kv-budget-floor", "512"], ["--kv-budget-floor", "--kv-eviction"]),
        (["--kv-eviction", "nexsu"], ["nexsu", "nexus", "streaming-llm"]),
        (["--kv-eviction", "nexus", "--kv-budget", "5x"], ["5x", "20%"]),
        (["--kv-eviction", "nexus", "--kv-budget", "64"], ["64", "96"]),
        (["--kv-eviction", "nexus", "--kv-budget-floor", "64"], ["64", "96"]),
        (["--kv-eviction", "nexus", "--kv-eviction-config", "{}}"], ["inline JSON"]),
        (["--kv-eviction", "nexus", "--kv-eviction-config", '{"widnow": 1}'], ["widnow", "window"]),
        (["--kv-eviction", "nexus", "--kv-eviction-config", "nowhere"], ["nowhere", "nexus-paper"]),
        (["--kv-eviction", "nexus", "--additional-config", '{"kv_eviction": {}}'], ["twice"]),
        (
            ["--kv-eviction", "none", "--additional-config", '{"kv_eviction": {}}'],
            ["--kv-eviction none", "opposite"],
        ),
        (["--additional-config", '{"kv_eviction": {"widnow": 1}}'], ["widnow", "window"]),
        (["--additional-config", '{"kv_eviction": [1]}'], ["[1]", "mapping"]),
        (["--kv-eviction", "nexus", "--additional-config", "[1]"], ["additional", "object"]),
    ],
)
def test_bad_flags_stop_the_command_with_a_reason(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: list[str]
) -> None:
    line = refusal(capsys, *argv)
    assert "error:" in line
    for part in told:
        assert part in line


def test_the_rust_frontend_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "VLLM_USE_RUST_FRONTEND" in refusal(capsys, "--kv-eviction", "nexus")


# Offline


def test_engine_args_are_accepted_by_vllm() -> None:
    kwargs = nexus_vllm.engine_args(policy="random", budget="25%", window=8)
    settings = settings_in(EngineArgs(model="m", **kwargs))
    assert (settings.policy, str(settings.budget), settings.window) == ("random", "25%", 8)
    assert kwargs["block_size"] == 32
    assert nexus_vllm.engine_args(policy="none", budget="25%") == {}
    assert settings_in(EngineArgs(model="m", **nexus_vllm.engine_args(config="nexus-paper"))).n == 5


def test_engine_args_refuse_what_would_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Did you mean 'window'"):
        nexus_vllm.engine_args(widnow=8)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ValueError, match="VLLM_PLUGINS"):
        nexus_vllm.engine_args()
    monkeypatch.setenv("VLLM_PLUGINS", "other,nexus_vllm")
    assert nexus_vllm.engine_args()


# The door to the engine


def stub_engine(monkeypatch: pytest.MonkeyPatch, build: Any) -> list[str]:
    """Replace vLLM's config building by `build`; return what our engine side was asked to do."""
    asked: list[str] = []
    compat = ModuleType("compat")
    vars(compat).update(
        prepare_engine_args=lambda args, settings: asked.append(f"prepare {settings.block_size}"),
        check_config=lambda config: asked.append(f"check {config}"),
    )
    monkeypatch.setattr("nexus_vllm.engine.compat", compat, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "nexus_vllm.engine.compat", compat)
    for module in ("requests", "stats"):
        monkeypatch.setattr(f"nexus_vllm.engine.{module}.install", lambda m=module: asked.append(m))
    monkeypatch.setattr(EngineArgs, "create_engine_config", cli._activating(build))
    return asked


def test_hooks_are_set_before_the_config_is_built_and_checked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(self: EngineArgs) -> str:
        asked.append("build")
        return "config"

    asked = stub_engine(monkeypatch, build)
    args = EngineArgs(model="m", additional_config={"kv_eviction": {}})
    assert args.create_engine_config() == "config"
    assert asked == ["requests", "stats", "prepare 32", "build", "check config"]
    assert args.block_size == 32


def test_another_block_size_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stub_engine(monkeypatch, lambda self: "config")
    refused = EngineArgs(model="m", block_size=16, additional_config={"kv_eviction": {}})
    with pytest.raises(ValueError, match=r"--block-size 16 .* force_block_size"):
        refused.create_engine_config()
    assert asked == []
    forced = EngineArgs(
        model="m", block_size=16, additional_config={"kv_eviction": {"force_block_size": True}}
    )
    forced.create_engine_config()
    assert "prepare 16" in asked
    assert settings_in(forced).block_size == forced.block_size == 16


@pytest.fixture
def _admission(monkeypatch: pytest.MonkeyPatch) -> None:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, supported_tasks: Any
    ) -> SimpleNamespace:
        return SimpleNamespace(id=request_id, sampling_params=None)

    monkeypatch.setattr(InputProcessor, "process_inputs", process_inputs)
    requests.install()
    requests.install()


def processor(additional_config: dict[str, Any]) -> InputProcessor:
    made: InputProcessor = object.__new__(InputProcessor)
    made.vllm_config = SimpleNamespace(
        additional_config=additional_config, cache_config=SimpleNamespace(num_gpu_blocks=None)
    )
    return made


@pytest.mark.usefixtures("_admission")
@pytest.mark.parametrize(
    "extra", [{"kv_budget": "1"}, {"kv_policy": "x"}, {"kv_seed": -1}, {"kv_bugdet": 512}]
)
def test_malformed_extra_args_are_vllms_own_validation_error(extra: dict[str, Any]) -> None:
    params = SamplingParams(extra_args=extra)
    with pytest.raises(VLLMValidationError) as caught:
        processor({"kv_eviction": {}}).process_inputs("id", "prompt", params, ("generate",))
    assert caught.value.parameter == next(iter(extra))
    assert str(next(iter(extra.values()))) in str(caught.value)
    # Stock engines take the same parameters as before.
    stock = processor({}).process_inputs("id", "prompt", params, supported_tasks=("generate",))
    assert stock.id == "id"


@pytest.mark.usefixtures("_admission")
@pytest.mark.parametrize("extra", [None, {}, {"kv_budget": "512", "kv_transfer_params": {}}])
def test_good_extra_args_are_admitted(extra: dict[str, Any] | None) -> None:
    params = SamplingParams(extra_args=extra)
    on = processor({"kv_eviction": {}})
    assert on.process_inputs("id", "prompt", params, ("generate",)).id == "id"


# Hooks


def test_a_changed_symbol_is_named_with_version_and_remedy() -> None:
    class Owner:
        def method(self, a: int) -> int:
            return a

    for name, parameters in (("method", ("self", "b")), ("gone", ("self",))):
        with pytest.raises(HookError, match=rf"Owner\.{name} .*0\.32"):
            wrap(Owner, name, parameters, lambda original: original)
    assert not is_wrapped(Owner, "method")


def test_importing_the_package_imports_no_vllm() -> None:
    import subprocess
    import sys

    code = "import sys, nexus_vllm, nexus_vllm.engine.cli; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ.copy()).returncode == 0
