"""Functions that tests send into the engine's process: `engine.do(function, ...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .reference import Eviction

if TYPE_CHECKING:
    from .child import Host


def trace(host: Host, name: str) -> list[Eviction]:
    """Every eviction of a request, as the worker carried it out."""
    internal = next(key for key, value in host.names.items() if value == name)
    events = host.rpc("kv_eviction_trace", ()).get(internal, [])
    return [Eviction(**event | {"kept": torch.tensor(event["kept"])}) for event in events]
