"""The two inspection routes, answered by the middleware.

vLLM loads endpoint plugins only where VLLM_PLUGINS names them, so these are no FastAPI routes.
"""

from importlib import metadata
from typing import Any

from starlette.responses import JSONResponse

import nexus_vllm
from nexus_vllm.config import Settings
from nexus_vllm.engine.hooks import vllm_version
from nexus_vllm.server.records import recent

ROOT = "/kv_eviction"
REQUESTS = ROOT + "/requests/"


def error_body(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error format, as vLLM's `create_error_response` fills it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def answer(path: str, settings: Settings) -> JSONResponse | None:
    """The response to GET `path`, or None where the path is not ours."""
    if path == ROOT:
        return JSONResponse({"settings": settings.to_json(), "versions": _versions()})
    if not path.startswith(REQUESTS):
        return None
    request_id = path.removeprefix(REQUESTS)
    found = recent.find(request_id)
    if found:
        return JSONResponse({"id": request_id, "sequences": found})
    message = (
        f"No record of request {request_id!r}: this server remembers the last {settings.records} "
        "finished sequences, unless started with --disable-log-stats; of several API servers each "
        "remembers its own. Ask sooner, or raise `records` in --kv-eviction-config."
    )
    return JSONResponse(error_body(404, "NotFoundError", message), status_code=404)


def _versions() -> dict[str, str]:
    return {
        "nexus-vllm": nexus_vllm.__version__,
        "vllm": vllm_version(),
        "torch": metadata.version("torch"),
    }
