"""Async scheduling on a CPU.

`CpuPlatform.check_and_update_config` switches it off for everybody; this restores what was asked
for (vLLM's own default: on). The scheduler is then the real `AsyncScheduler` with two batches in
flight, as on a GPU.
"""

from __future__ import annotations

from typing import Any

from patching import on_import


def keep_requested_scheduling(module: Any) -> None:
    platform = module.CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        requested = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = requested

    platform.check_and_update_config = classmethod(check_and_update_config)


def install() -> None:
    on_import("vllm.platforms.cpu", keep_requested_scheduling)
