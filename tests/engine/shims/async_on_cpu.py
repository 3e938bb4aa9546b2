"""Async scheduling on a CPU.

`CpuPlatform.check_and_update_config` switches it off for everybody; this restores what was asked
for (vLLM's own default: on). The scheduler is then the real `AsyncScheduler` with two batches in
flight, as on a GPU.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TARGET = "vllm.platforms.cpu"


class _PatchingLoader(Loader):
    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.wrapped.exec_module(module)
        keep_requested_scheduling(module.CpuPlatform)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != TARGET:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


def keep_requested_scheduling(platform: Any) -> None:
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        requested = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = requested

    platform.check_and_update_config = classmethod(check_and_update_config)


def install() -> None:
    # A hook on the import: importing vLLM here would be too early for its plugins, and too slow
    # for the many processes that never need it.
    sys.meta_path.insert(0, _Finder())
