"""Another attention backend than `CPU_ATTN` on a CPU: vLLM's own Triton kernels, interpreted.

`CpuPlatform.get_attn_backend_cls` ignores `--attention-backend`. This returns the one that
NEXUS_TEST_ATTENTION names.
"""

from __future__ import annotations

import os
from typing import Any

from patching import on_import


def choose(cpu: Any) -> None:
    def get_attn_backend_cls(*_: Any, **__: Any) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum[os.environ["NEXUS_TEST_ATTENTION"]].get_path()

    cpu.CpuPlatform.get_attn_backend_cls = staticmethod(get_attn_backend_cls)


def pretend_to_be_recent(operations: Any) -> None:
    """The size of a launch is chosen by compute capability; any will do."""
    operations.torch.cuda.get_device_capability = lambda *_: (9, 0)


def install() -> None:
    on_import("vllm.platforms.cpu", choose)
    on_import("vllm.v1.attention.ops.triton_reshape_and_cache_flash", pretend_to_be_recent)
