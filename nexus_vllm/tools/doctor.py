"""`nexus-vllm doctor [MODEL]`: would `vllm serve MODEL --kv-eviction` start here, and how?

Nothing is assumed: vLLM's plugins are loaded as vLLM loads them, every hook is looked at where vLLM
would meet it, and the engine's configuration is built from a real `vllm serve` command line. Only
the engine itself is not started, so what depends on loaded layers is left to it.
"""

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import os
import pkgutil
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import nexus_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

GROUP = "vllm.general_plugins"
WITHOUT = "serve this model without --kv-eviction"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for facts that are neither right nor wrong."""

    section: str
    name: str
    found: str
    ok: bool | None = None
    needed: str = ""
    remedy: str = ""


def add_to(commands: Any) -> None:
    """Add this command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="check this installation, and what would be refused for a model",
        description="Check whether `vllm serve --kv-eviction` works here. Exit code 1: no.",
        usage="nexus-vllm doctor [--json] [MODEL [-- OPTION_OF_VLLM_SERVE ...]]",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="path or name, as for vllm serve")
    parser.add_argument(
        "options", nargs="*", metavar="OPTION", help="after --: options of `vllm serve`"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 when all is well and 1 when anything would be refused."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(action="ignore"):
        found = list(examine(args.model, args.options))
    refused = any(finding.ok is False for finding in found)
    if args.json:
        report = {"ok": not refused, "findings": [dataclasses.asdict(f) for f in found]}
        print(json.dumps(report, indent=2))
    else:
        print(render(found))
    return int(refused)


def examine(model: str | None, options: list[str]) -> Iterator[Finding]:
    """Everything there is to say. Raises nothing: what goes wrong is a finding."""
    yield from versions()
    yield from hooks()
    if model is not None:
        yield from engine(model, options)


def render(found: list[Finding]) -> str:
    """The report as aligned text."""
    width = max(len(finding.name) for finding in found)
    lines: list[str] = []
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        mark = {True: "ok", False: "REFUSED", None: ""}[finding.ok]
        lines.append(f"  {mark:7}  {finding.name:{width}}  {finding.found}".rstrip())
        indent = " " * (width + 13)
        lines += [f"{indent}needed: {finding.needed}"] if finding.needed else []
        lines += [f"{indent}remedy: {finding.remedy}"] if finding.remedy else []
    refused = sum(finding.ok is False for finding in found)
    lines += ["", f"{refused} REFUSED: --kv-eviction would not start" if refused else "all is well"]
    return "\n".join(lines)


def _checked(
    section: str, name: str, check: Callable[[], str], needed: str, remedy: str
) -> Finding:
    """`check` returns what it found, or raises whatever went wrong."""
    try:
        return Finding(section, name, check(), True)
    except Exception as error:
        # A refusal says what is needed and what to do by itself.
        if hasattr(error, "refusal"):
            return Finding(section, name, error.refusal[0], False, *error.refusal[1:])
        told = str(error) or type(error).__name__
        return Finding(section, name, told, False, needed, remedy)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


# Versions


def versions() -> Iterator[Finding]:
    """What is installed, and whether this release is made for that vLLM."""
    from nexus_vllm.engine.hooks import SUPPORTED_TOLD, vllm_version

    def supported() -> str:
        from nexus_vllm.engine import compat

        compat.check_version()
        return vllm_version()

    def device() -> str:
        from vllm.platforms import current_platform

        if current_platform.is_unspecified():
            raise RuntimeError("vLLM recognises no device")
        name = current_platform.get_device_name() or current_platform.device_type
        return f"{current_platform.device_type} ({name})"

    section = "versions"
    yield Finding(section, "nexus-vllm", nexus_vllm.__version__)
    yield _checked(
        section,
        "vllm",
        supported,
        f"vLLM {SUPPORTED_TOLD}",
        f"install vLLM {SUPPORTED_TOLD}",
    )
    yield Finding(section, "torch", _version("torch"))
    yield Finding(section, "python", platform.python_version())
    yield _checked(section, "device", device, "a platform vLLM runs on", "reinstall vLLM for it")


# Hooks


def hooks() -> Iterator[Finding]:
    """Every place where vLLM must meet this plugin, after loading plugins as vLLM does."""
    section = "hooks"
    reinstall = "reinstall nexus-vllm into the environment of vLLM"
    flag, settings = "the flag --kv-eviction", "settings must reach engines"
    logger = "vllm.v1.metrics.loggers.StatLoggerManager"
    processor = "vllm.v1.engine.input_processor.InputProcessor"
    validated = partial(_wrapped_by, "nexus_vllm.engine.requests", processor, "process_inputs")
    counted = partial(_wrapped_by, "nexus_vllm.engine.stats", logger, "__init__")
    for name, check, needed, remedy in (
        ("entry point", _entry_point, f"nexus_vllm in the group {GROUP}", reinstall),
        ("VLLM_PLUGINS", _not_excluded, "nexus_vllm in it", "add nexus_vllm to it, or unset it"),
        ("plugin loading", _loaded, "vLLM must load the plugin", reinstall),
        ("EngineArgs.add_cli_args", partial(_wrapped_by_plugin, "add_cli_args"), flag, reinstall),
        ("vllm serve", _parser, flag, reinstall),
        (
            "EngineArgs.create_engine_config",
            partial(_wrapped_by_plugin, "create_engine_config"),
            settings,
            reinstall,
        ),
        ("InputProcessor.process_inputs", validated, "requests must be validated", reinstall),
        ("StatLoggerManager.__init__", counted, "metrics must be collected", reinstall),
        ("middleware", _middleware, "headers must be read", reinstall),
        ("scheduler", _schedulers, "a subclass of vLLM's own", reinstall),
        ("worker", _worker, "a subclass of the platform's own", reinstall),
        ("KV-cache spec", _spec, "EvictionSpec in vLLM's registry", reinstall),
        ("attention backends", _backends, "overrides in vLLM's registry", reinstall),
    ):
        yield _checked(section, name, check, needed, remedy)
    yield from _signatures()


def _entry_point() -> str:
    from nexus_vllm.engine.cli import PLUGIN_NAME

    found = metadata.entry_points(group=GROUP, name=PLUGIN_NAME)
    if not found:
        raise LookupError(f"no plugin {PLUGIN_NAME} is registered")
    return next(iter(found)).value


def _not_excluded() -> str:
    from nexus_vllm.engine.cli import PLUGIN_NAME

    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return "not set"
    if PLUGIN_NAME not in allowed.split(","):
        raise LookupError(f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN_NAME}")
    return allowed


def _loaded() -> str:
    from vllm.plugins import load_general_plugins

    from nexus_vllm import plugin

    load_general_plugins()
    if plugin.failure is not None:
        raise LookupError(plugin.failure)
    return "done"


def _wrapped_by_plugin(name: str) -> str:
    from vllm.engine.arg_utils import EngineArgs

    from nexus_vllm import plugin
    from nexus_vllm.engine.hooks import is_wrapped

    if not is_wrapped(EngineArgs, name):
        raise LookupError(plugin.failure or "not wrapped: vLLM has not run the plugin")
    return "wrapped"


def _parser() -> str:
    _parse("model", ["--kv-eviction", "nexus"])
    return "knows --kv-eviction"


def _wrapped_by(module: str, owner: str, name: str) -> str:
    """Hooks that are set when an engine with eviction is configured."""
    from nexus_vllm.engine.hooks import is_wrapped

    pkgutil.resolve_name(module).install()
    if not is_wrapped(pkgutil.resolve_name(owner), name):
        raise LookupError("not wrapped")
    return "wrapped"


def _middleware() -> str:
    from nexus_vllm.engine.cli import MIDDLEWARE

    return _name(pkgutil.resolve_name(MIDDLEWARE))


def _schedulers() -> str:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from nexus_vllm.engine import compat

    ours = [pkgutil.resolve_name(path) for path in (compat.SCHEDULER, compat.ASYNC_SCHEDULER)]
    for scheduler, base in zip(ours, (Scheduler, AsyncScheduler), strict=True):
        if not issubclass(scheduler, base):
            raise TypeError(f"{_name(scheduler)} is no {_name(base)}")
    return ", ".join(scheduler.__name__ for scheduler in ours)


def _worker() -> str:
    from nexus_vllm.engine import compat

    worker = pkgutil.resolve_name(compat.WORKER)
    return f"{worker.__name__} over {_name(worker.__base__)}"


def _spec() -> str:
    import torch
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from nexus_vllm.engine.manager import EvictionManager, EvictionSpec

    spec = EvictionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    manager = KVCacheSpecRegistry.get_manager_class(spec)
    if manager is not EvictionManager:
        raise LookupError(f"EvictionSpec is managed by {manager}")
    return f"EvictionSpec, managed by {manager.__name__}"


def _backends() -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from nexus_vllm.engine import attention

    # Installed by importing our worker, as in the worker's process.
    for name in attention.admitted():
        backend = AttentionBackendEnum[name].get_class()
        if not _evicts(backend):
            raise LookupError(f"{name} is vLLM's own {_name(backend)}")
    return ", ".join(attention.admitted())


def _evicts(backend: "type[AttentionBackend]") -> bool:
    from nexus_vllm.engine.attention import EvictionBuilderMixin, EvictionImplMixin

    return issubclass(backend.get_builder_cls(), EvictionBuilderMixin) and issubclass(
        backend.get_impl_cls(), EvictionImplMixin
    )


def _signatures() -> Iterator[Finding]:
    from nexus_vllm.engine import compat

    drifted = compat.drifted()
    for told in drifted:
        yield Finding("hooks", "signatures", told[0], False, *told[1:])
    if not drifted:
        yield Finding("hooks", "signatures", "all overridden methods are as expected", True)


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


# One model


def engine(model: str, options: list[str]) -> Iterator[Finding]:
    """What an engine for `model` would be, and everything that would keep it from starting."""
    section = f"engine for {model}"
    try:
        config, told = _configured(model, options)
    except Exception as error:
        yield Finding(section, "configuration", _first_lines(error), False)
        return
    cache = config.cache_config
    runner = "V2" if config.use_v2_model_runner else "V1"
    scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
    yield Finding(section, "model", ", ".join(config.model_config.architectures))
    yield Finding(section, "dtype", str(config.model_config.dtype).removeprefix("torch."))
    yield Finding(section, "model runner", runner)
    yield Finding(section, "scheduling", scheduling)
    yield Finding(section, "block size", f"{cache.block_size} tokens")
    yield from _attention(section, config)
    for refusal in told:
        yield Finding(section, "support", refusal[0], False, *refusal[1:])
    if not told:
        yield Finding(section, "support", "nothing in its configuration is refused", True)
    yield Finding(
        section,
        "layers",
        "checked at start: each layer's KV cache, its dtype and whose it is, heads, ALiBi, "
        "sinks, key order",
    )


def _configured(model: str, options: list[str]) -> "tuple[VllmConfig, list[tuple[str, str, str]]]":
    """The VllmConfig that `vllm serve` would start with, and what eviction refuses about it.

    Goes around `create_engine_config`'s wrapper, which raises the first refusal: all are wanted.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from nexus_vllm.engine import cli, compat, profiles

    engine_args: AsyncEngineArgs = AsyncEngineArgs.from_cli_args(_parse(model, options))
    settings = cli.active_settings(engine_args.additional_config)
    if settings is None:
        raise ValueError("the options turn KV eviction off")
    try:
        cli.prepare(engine_args, settings)
    except compat.UnsupportedError as error:
        refused = [error.refusal]
        engine_args.worker_cls, engine_args.scheduler_cls = compat.WORKER, None
    else:
        refused = []
    create_engine_config = inspect.unwrap(AsyncEngineArgs.create_engine_config)
    config = create_engine_config(engine_args, UsageContext.OPENAI_API_SERVER)
    refused += compat.refusals(config)
    try:
        profiles.settle(config)
    except compat.UnsupportedError as error:
        refused.append(error.refusal)
    return config, refused


def _parse(model: str, options: list[str]) -> argparse.Namespace:
    """A command line of `vllm serve`, as vLLM itself reads it. Raises ValueError."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not any(
        option.split("=")[0] in ("--kv-eviction", "--additional-config") for option in options
    ):
        options = ["--kv-eviction", "nexus", *options]
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            args = parser.parse_args([model, *options])
    except SystemExit:
        raise ValueError(complaint.getvalue().strip().splitlines()[-1]) from None
    validate_parsed_serve_args(args)
    args.model = model
    return args


def _attention(section: str, config: "VllmConfig") -> Iterator[Finding]:
    """The backend of a plain layer of this model, and where its KV cache lies."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    from nexus_vllm.engine import attention

    model = config.model_config
    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                num_heads=model.get_num_attention_heads(config.parallel_config),
            )
    except (ValueError, NotImplementedError) as error:  # vLLM has none for this model
        yield Finding(section, "attention backend", _first_lines(error), False)
        return
    evicts = _evicts(backend)
    yield Finding(
        section,
        "attention backend",
        backend.get_name() if evicts else f"{backend.get_name()} is not overridden",
        evicts,
        "" if evicts else f"one that has been tested: {', '.join(attention.BACKENDS)}",
        "" if evicts else f"{attention.remedy(backend)}, or {WITHOUT}",
    )
    layouts = backend.supported_kv_cache_layouts()
    yield Finding(
        section,
        "KV layout",
        " or ".join(layout.name for layout in layouts) if layouts else "any",
    )


def _first_lines(error: Exception) -> str:
    """An exception's message; pydantic's are long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
