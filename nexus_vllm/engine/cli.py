"""`--kv-eviction` on every vLLM command, and the one door through which settings reach an engine.

    flags --parse--> args.additional_config["kv_eviction"] --create_engine_config--> VllmConfig

Flags are folded into stock arguments as soon as they are parsed, so whatever vLLM does with parsed
arguments (copy them, pickle them to spawned API servers) carries the settings along.
"""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nexus_vllm.config import ALLOCATORS, POLICIES, Settings, presets, shown
from nexus_vllm.engine.hooks import wrap

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

CONFIG_KEY = "kv_eviction"
MIDDLEWARE = "nexus_vllm.server.middleware.EvictionMiddleware"
PLUGIN_NAME = "nexus_vllm"
_FLAGS = ("kv_budget", "kv_budget_floor", "kv_allocator", "kv_profile", "kv_eviction_config")


def install_flags() -> None:
    """Wrap EngineArgs so that every vLLM command and `LLM(...)` understand KV eviction.

    Symptom without: unknown flag --kv-eviction. Cause: vLLM has no hook for a plugin's flags and
    none between engine arguments and engine config. Remove when it has both. Raises HookError.
    """
    from vllm.engine.arg_utils import EngineArgs

    # In this order: a flag that is understood is a flag that is obeyed.
    wrap(EngineArgs, "create_engine_config", ("self", "usage_context"), _activating)
    wrap(EngineArgs, "add_cli_args", ("parser",), _adding_flags)


def engine_args(
    policy: str | None = None,
    budget: str | int | None = None,
    config: str | dict[str, Any] | None = None,
    **knobs: Any,
) -> dict[str, Any]:
    """Keyword arguments for `LLM(model, **engine_args(...))` and `AsyncEngineArgs`.

    `config` is a preset's name, a YAML or JSON file, inline JSON or a dict; `policy`, `budget` and
    `knobs`, the other fields of Settings, win over it where given. Policy "none" is stock vLLM: no
    arguments at all. Raises HookError where vLLM would take the arguments and not obey them.
    """
    if policy == "none":
        return {}
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise ValueError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading KV eviction. "
            f"Add {PLUGIN_NAME!r} to it, or unset it."
        )
    settings = Settings.from_source(config, policy=policy, budget=budget, **knobs)
    install_flags()  # vLLM's plugin loader only warns when this fails
    return {
        "additional_config": {CONFIG_KEY: settings.to_json()},
        "block_size": settings.block_size,
    }


def active_settings(additional_config: object) -> Settings | None:
    """The settings in an engine's `additional_config`, or None where eviction is off."""
    if not isinstance(additional_config, dict) or additional_config.get(CONFIG_KEY) is None:
        return None
    return Settings.from_source(additional_config[CONFIG_KEY])


def _adding_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        group = parser.add_argument_group("KVEviction", "KV-cache block eviction (nexus-vllm).")
        group.add_argument(
            "--kv-eviction",
            choices=("none", *POLICIES),
            default=None,
            help="Policy that chooses which KV blocks a sequence keeps. "
            "none, the default, is stock vLLM.",
        )
        group.add_argument(
            "--kv-budget",
            metavar="BUDGET",
            default=None,
            help="KV that each sequence may keep: N or Nk tokens, P%% of its prompt, or full. "
            "The default is 20%%.",
        )
        group.add_argument(
            "--kv-budget-floor",
            metavar="N",
            type=int,
            default=None,
            help="Tokens below which a percentage never falls. The default is 1024.",
        )
        group.add_argument(
            "--kv-allocator",
            choices=("auto", *ALLOCATORS),
            default=None,
            help="How a sequence's budget is dealt out over layers and KV heads. auto, the "
            "default: lu where there is a profile of the model, else uniform.",
        )
        group.add_argument(
            "--kv-profile",
            metavar="FILE",
            default=None,
            help="Each head's share, for lu; made by `nexus-vllm profile`. The default is the one "
            "that nexus-vllm ships for the model, if any.",
        )
        group.add_argument(
            "--kv-eviction-config",
            metavar="FILE_OR_JSON",
            default=None,
            help="Every knob, and by itself enough to switch eviction on: a YAML or JSON file, "
            f"inline JSON, or a preset ({', '.join(presets())}).",
        )
        parse = parser.parse_known_args

        def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
            namespace, rest = parse(args, namespace)
            try:
                _fold(namespace)
            except ValueError as error:
                parser.error(str(error))
            return namespace, rest

        # On this one parser: argparse has no hook for "all arguments are known now".
        vars(parser)["parse_known_args"] = parse_known_args
        return parser

    return add_cli_args


def _fold(args: argparse.Namespace) -> None:
    """Turn our flags into stock arguments. Without them, touch nothing. Raises ValueError."""
    policy, source = args.kv_eviction, args.kv_eviction_config
    given = [flag for flag in _FLAGS if getattr(args, flag) is not None]
    if policy is None and source is None and given:
        flag = "--" + given[0].replace("_", "-")
        raise ValueError(f"{flag} does nothing without --kv-eviction {{{','.join(POLICIES)}}}")
    additional = args.additional_config or {}
    if policy == "none" and isinstance(additional, dict) and additional.get(CONFIG_KEY) is not None:
        raise ValueError(
            f"--kv-eviction none and --additional-config {CONFIG_KEY!r} say the opposite; drop one"
        )
    if policy != "none" and (policy is not None or source is not None):
        if not isinstance(additional, dict):
            raise ValueError(
                f"--additional-config {shown(additional)} must be an object to go with KV eviction"
            )
        if additional.get(CONFIG_KEY) is not None:
            raise ValueError(
                f"--kv-eviction and --additional-config {CONFIG_KEY!r} say the same thing twice; "
                "keep the flag and put other knobs into --kv-eviction-config"
            )
        # Explicit flags win over the file, which wins over the defaults.
        settings = Settings.from_source(
            source,
            policy=policy,
            budget=args.kv_budget,
            budget_floor=args.kv_budget_floor,
            allocator=args.kv_allocator,
            profile=args.kv_profile,
        )
        args.additional_config = {**additional, CONFIG_KEY: settings.to_json()}
    # Only a server has the argument: `vllm bench` and others parse an engine's alone.
    if active_settings(args.additional_config) is not None and hasattr(args, "middleware"):
        _prepare_server(args)


def _prepare_server(args: argparse.Namespace) -> None:
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        raise ValueError(
            "KV eviction reads its headers in vLLM's Python API server; VLLM_USE_RUST_FRONTEND=1 "
            "would ignore them. Unset it."
        )
    if MIDDLEWARE not in args.middleware:
        args.middleware = [*args.middleware, MIDDLEWARE]


def _activating(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: "EngineArgs", *args: Any, **kwargs: Any) -> Any:
        settings = active_settings(self.additional_config)
        if settings is None:
            return original(self, *args, **kwargs)
        from vllm.usage.usage_lib import UsageContext

        from nexus_vllm.engine import compat, requests

        prepare(self, settings)
        usage = args[0] if args else kwargs.get("usage_context")
        if usage == UsageContext.OPENAI_API_SERVER:
            requests.install_server()
        vllm_config = original(self, *args, **kwargs)
        compat.check_config(vllm_config)
        return vllm_config

    return create_engine_config


def prepare(engine_args: "EngineArgs", settings: Settings) -> None:
    """Hook into this process and point `engine_args` at eviction, before vLLM reads them.

    Raises HookError, UnsupportedError or, for a block size that does not fit, ValueError.
    """
    from nexus_vllm.engine import compat, requests, stats

    settings = _settle_block_size(engine_args, settings)
    requests.install()
    stats.install()
    compat.prepare_engine_args(engine_args, settings)


def _settle_block_size(engine_args: "EngineArgs", settings: Settings) -> Settings:
    """Make the engine's block size and the settings' one number, or refuse."""
    given = engine_args.block_size
    if given is not None and given != settings.block_size:
        if not settings.force_block_size:
            raise ValueError(
                f"--block-size {given} does not go with KV eviction: blocks are "
                f"{settings.block_size} tokens. Drop --block-size, or set force_block_size: true "
                "in --kv-eviction-config."
            )
        settings = Settings.from_source(settings.to_json(), block_size=given)
        engine_args.additional_config = {
            **engine_args.additional_config,
            CONFIG_KEY: settings.to_json(),
        }
    engine_args.block_size = settings.block_size
    return settings
