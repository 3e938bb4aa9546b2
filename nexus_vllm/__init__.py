"""Block-granular KV-cache eviction for vLLM: pages a sequence gives up are free at once."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "engine_args"]


def __getattr__(name: str) -> Any:
    # Lazy: vLLM's plugin loader imports this package in every process, used or not.
    if name == "engine_args":
        from nexus_vllm.engine.cli import engine_args

        return engine_args
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
