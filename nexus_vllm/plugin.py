"""vLLM's entry point: runs in every vLLM process, possibly more than once.

It only teaches vLLM's arguments about KV eviction. Everything else is imported when an engine is
configured with it, so installing the package changes nothing.
"""

failure: str | None = None
"""Why `register` gave up in this process, if it did."""


def register() -> None:
    """Called by vLLM (`vllm.general_plugins`), which an exception from here would stop.

    On a vLLM that has changed, stock serving must go on: there `--kv-eviction` stays an unknown
    flag, and `nexus_vllm.engine_args()` raises what is only logged here.
    """
    from nexus_vllm.engine.cli import install_flags
    from nexus_vllm.engine.hooks import HookError

    global failure
    try:
        install_flags()
        failure = None
    except (HookError, ImportError) as error:
        from vllm.logger import init_logger

        failure = str(error)
        # Below "vllm", because vLLM configures that logger alone.
        init_logger("vllm.plugins.nexus_vllm").warning_once("nexus-vllm is disabled: %s", failure)
