"""The entry point: it may find a vLLM it does not know, and must never stop it."""

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import nexus_vllm
from nexus_vllm import plugin
from nexus_vllm.engine.hooks import HookError, is_wrapped

HOOKED = ("add_cli_args", "create_engine_config")


@pytest.fixture(autouse=True)
def _stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineArgs as vLLM ships it, whatever other tests have installed."""
    monkeypatch.setattr(plugin, "failure", None)
    for name in HOOKED:
        raw = vars(EngineArgs)[name]
        original = getattr(getattr(raw, "__func__", raw), "__wrapped__", None)
        if original is not None:
            raw = staticmethod(original) if isinstance(raw, staticmethod) else original
        monkeypatch.setattr(EngineArgs, name, raw)
    # vLLM's logger does not hand its records on, and says each of them only once.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def hooks_in_force() -> list[str]:
    return [name for name in HOOKED if is_wrapped(EngineArgs, name)]


def parse(*argv: str) -> Any:
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(argv)


def test_register_may_run_twice() -> None:
    plugin.register()
    once = dict(vars(EngineArgs))
    plugin.register()
    assert dict(vars(EngineArgs)) == once
    assert hooks_in_force() == list(HOOKED)
    assert plugin.failure is None


@pytest.mark.parametrize("gone", HOOKED)
def test_a_changed_vllm_goes_on_without_the_flag(
    gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = parse()
    stock = EngineArgs.__dict__[gone]
    changed = staticmethod(lambda other: stock(other)) if gone == "add_cli_args" else lambda self: 0
    monkeypatch.setattr(EngineArgs, gone, changed)

    with caplog.at_level(logging.WARNING, "vllm.plugins.nexus_vllm"):
        plugin.register()
        plugin.register()  # vLLM may, in one process

    (record,) = caplog.records
    told = record.getMessage()
    assert told.startswith("nexus-vllm is disabled: KV eviction cannot hook into vLLM ")
    assert f"EngineArgs.{gone} has changed, it takes (" in told
    assert "Install vLLM 0.31.x or 0.32.x, or a" in told
    assert plugin.failure is not None
    assert plugin.failure in told
    # Closed: nothing that would be understood and not obeyed.
    assert "add_cli_args" not in hooks_in_force()
    with pytest.raises(SystemExit):
        parse("--kv-eviction", "nexus")
    assert vars(parse()) == vars(before)
    with pytest.raises(HookError, match=f"EngineArgs.{gone} has changed"):
        nexus_vllm.engine_args()


def test_a_vllm_without_engine_args_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", ModuleType("arg_utils"))
    plugin.register()
    assert plugin.failure is not None
    assert "EngineArgs" in plugin.failure
    with pytest.raises(ImportError, match="EngineArgs"):
        nexus_vllm.engine_args()


def test_engine_args_installs_the_hooks_it_relies_on() -> None:
    assert hooks_in_force() == []
    nexus_vllm.engine_args(policy="none")
    assert hooks_in_force() == []
    nexus_vllm.engine_args()
    assert hooks_in_force() == list(HOOKED)
