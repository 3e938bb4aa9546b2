"""vLLM's entry point: runs in every vLLM process, possibly more than once.

It only teaches vLLM's arguments about KV eviction. Everything else is imported when an engine is
configured with it, so installing the package changes nothing.
"""


def register() -> None:
    """Called by vLLM (`vllm.general_plugins`)."""
    from nexus_vllm.engine.cli import install_flags

    install_flags()
