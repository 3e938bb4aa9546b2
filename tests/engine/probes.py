"""Functions that tests send into the engine's process: `engine.do(function, ...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .reference import Eviction

if TYPE_CHECKING:
    from .child import Host


def trace(host: Host, name: str) -> list[Eviction]:
    """Every eviction of a request, as the only worker carried it out."""
    (events,) = traces(host, name)
    return events


def traces(host: Host, name: str) -> list[list[Eviction]]:
    """Every eviction of a request, as each rank carried it out."""
    internal = next(key for key, value in host.names.items() if value == name)
    return [
        [Eviction(**event | {"kept": torch.tensor(event["kept"])}) for event in told]
        for told in (of_rank.get(internal, []) for of_rank in host.rpc("kv_eviction_trace", ()))
    ]


def uses_kernels(worker: Any) -> bool:
    """Whether a rank's evictions run kernels."""
    return worker.evictor.memory is not None and worker.uneven.memory is not None


def abort_amid_eviction(host: Host, names: Sequence[str]) -> None:
    """Abort each request while its next eviction is under way: after schedule, before update."""
    from nexus_vllm.engine.compat import plan_of

    due = {internal: name for internal, name in host.names.items() if name in names}
    schedule = host.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for eviction in plan_of(output).evictions:
            if name := due.pop(eviction.request_id, None):
                # As a server's front end does; vLLM reads the queue just before it updates.
                host.llm.llm_engine.output_processor.abort_requests([name], internal=False)
                host.core.aborts_queue.put([eviction.request_id])
        if not due:
            host.scheduler.schedule = schedule
        return output

    host.scheduler.schedule = watched


def reset_running(host: Host) -> None:
    """Take all pages from all requests; they start again from their first token."""
    assert host.llm.reset_prefix_cache(reset_running_requests=True)


def sleep(host: Host, mode: str) -> None:
    host.llm.sleep(level=1, mode=mode)


def wake_up(host: Host) -> None:
    assert host.llm.wake_up()
