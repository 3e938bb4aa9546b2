"""Attention over the live window: vLLM's own backends, shown a shifted batch.

`evicting(backend)` subclasses any backend whose cache is `[pages, KV heads, block, 2 * head size]`.
Its builder shifts block tables and lengths *before* the wrapped builder runs, so that whatever that
plans ahead is right; its implementation records the window queries and calls the wrapped one.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nexus_vllm.engine.manager import EvictionSpec

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from nexus_vllm.engine.sequences import BatchView, Sequences
    from nexus_vllm.engine.window import LayerWindow, Recording

_RECORDING = "kv_eviction_recording"

BACKENDS = ("CPU_ATTN",)
"""Backends (names of AttentionBackendEnum) that have been tested with eviction."""


class EvictionBuilderMixin:
    """Over a backend's metadata builder. `sequences` is set by the worker before the first step."""

    sequences: "Sequences | None" = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Shifted tables are built anew each step, so attention stays outside of CUDA graphs."""
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: "CommonAttentionMetadata",
        fast_build: bool = False,
    ) -> Any:
        build = super().build  # type: ignore[misc]
        view = self.sequences.view(common_attn_metadata) if self.sequences else None
        if view is None:
            return build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = build(common_prefix_len, shifted(common_attn_metadata, view), fast_build)
        if view.recording is not None:
            setattr(metadata, _RECORDING, view.recording)
        return metadata


class EvictionImplMixin:
    """Over a backend's implementation. `window` is set by the worker before the first step."""

    window: "LayerWindow | None" = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        recording: Recording | None = getattr(attn_metadata, _RECORDING, None)
        if recording is not None and self.window is not None:
            self.window.record(query, recording)
        output: torch.Tensor = super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs
        )
        return output


def shifted(batch: "CommonAttentionMetadata", view: "BatchView") -> "CommonAttentionMetadata":
    """The batch as attention must see it: rows start at the live window, lengths count it alone."""
    if not view.released.any():
        return batch
    table = batch.block_table_tensor
    released = torch.from_numpy(view.released).to(table.device)
    columns = torch.arange(table.shape[1], device=table.device) + released[:, None]
    lengths = batch.seq_lens_cpu_upper_bound
    assert lengths is not None  # checked by Sequences.view
    tokens = torch.from_numpy(view.released * view.block_size)
    live = lengths - tokens.to(lengths.dtype)
    return batch.replace(
        block_table_tensor=table.gather(1, columns.clamp_(max=table.shape[1] - 1)),
        seq_lens=batch.seq_lens - tokens.to(batch.seq_lens),
        seq_lens_cpu_upper_bound=live,
        max_seq_len=int(live[: view.num_requests].max()),
    )


@functools.cache
def evicting(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """`base` with eviction: same name, same kernels, our spec, builder and implementation."""
    builder = type(
        "Eviction" + base.get_builder_cls().__name__,
        (EvictionBuilderMixin, base.get_builder_cls()),
        {},
    )
    impl = type(
        "Eviction" + base.get_impl_cls().__name__, (EvictionImplMixin, base.get_impl_cls()), {}
    )

    class EvictionBackend(base):
        @staticmethod
        def get_builder_cls() -> Any:
            return builder

        @staticmethod
        def get_impl_cls() -> Any:
            return impl

        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            """A plain full-attention spec becomes evictable; every other one is left alone."""
            spec = super().customize_spec(spec)
            return EvictionSpec.of(spec) if type(spec) is FullAttentionSpec else spec

    EvictionBackend.__name__ = EvictionBackend.__qualname__ = "Eviction" + base.__name__
    return EvictionBackend


def __getattr__(name: str) -> Any:
    """`nexus_vllm.engine.attention.CPU_ATTN`: vLLM's registry loads classes by dotted path."""
    if name in BACKENDS:
        stock: Any = _stock(name)
        return evicting(stock)
    raise AttributeError(name)


@functools.cache
def _stock(name: str) -> type[AttentionBackend]:
    """vLLM's own class, read before `install` overrides it."""
    backend: type[AttentionBackend] = AttentionBackendEnum[name].get_class()
    return backend


def install() -> None:
    """Override the tested backends in this process's registry. Safe to call again."""
    for name in BACKENDS:
        _stock(name)
        register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")
