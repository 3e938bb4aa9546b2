"""Directives are validated here once more, whatever way they came, before the engine sees them.

`SamplingParams(extra_args={"kv_budget": ...})` offline, `vllm_xargs` on any route, and whatever
slips past the middleware all meet in `InputProcessor.process_inputs`.
"""

from collections.abc import Callable
from typing import Any

from nexus_vllm.config import DirectiveError, Settings
from nexus_vllm.engine.hooks import wrap


def install() -> None:
    """Wrap `InputProcessor.process_inputs` with the check.

    Symptom without: a malformed directive reaches the scheduler, where an error ends the engine.
    Cause: vLLM lets no plugin but a logits processor validate a request at admission. Remove when
    it does.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"), _validating)


def _validating(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        settings = _settings(self)
        if settings is not None:
            validate(params, settings)
        return original(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def validate(params: Any, settings: Settings) -> None:
    """Raise vLLM's own validation error (HTTP 400) when the directive in `params` is malformed."""
    from vllm.exceptions import VLLMValidationError

    from nexus_vllm.server.metrics import rejected

    try:
        settings.directive(getattr(params, "extra_args", None))
    except DirectiveError as error:
        rejected(error.reason)
        raise VLLMValidationError(str(error), parameter=error.field) from None


def _settings(processor: Any) -> Settings | None:
    """The engine's settings, read once per processor."""
    from nexus_vllm.engine.cli import active_settings

    known = vars(processor)
    if "nexus_settings" not in known:
        known["nexus_settings"] = active_settings(processor.vllm_config.additional_config)
    settings: Settings | None = known["nexus_settings"]
    return settings
