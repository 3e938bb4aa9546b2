"""Attention over the live window: vLLM's own backends, shown a shifted batch.

`evicting(backend)` subclasses any backend whose cache is `[pages, KV heads, block, 2 * head size]`.
Its builder shifts block tables and lengths *before* the wrapped builder runs, so that whatever that
plans ahead is right; its implementation records the window queries and calls the wrapped one.
"""

import copy
import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nexus_vllm.engine.manager import EvictionSpec
from nexus_vllm.engine.unit_batch import UnitAttention, worth_folding

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from nexus_vllm.engine.replay_scores import Reading, ReplayScores
    from nexus_vllm.engine.sequences import BatchView, Sequences
    from nexus_vllm.engine.unit_batch import UnitTables
    from nexus_vllm.engine.window import LayerWindow, Recording

_RECORDING = "kv_eviction_recording"
_UNEVEN = "kv_eviction_uneven"
_READINGS = "kv_eviction_readings"

BACKENDS = ("CPU_ATTN",)
"""Backends (names of AttentionBackendEnum) that have been tested with eviction."""

UNCONFIRMED = ("FLASH_ATTN", "TRITON_ATTN")
"""Backends that should work, and that scripts/gpu_check.sh has yet to confirm: docs/gpu.md."""

ENVIRONMENT = "NEXUS_VLLM_UNCONFIRMED"
"""1, to evict with backends of UNCONFIRMED, too."""


def admitted() -> tuple[str, ...]:
    """Backends that this process may evict with. Raises ValueError on an unknown choice."""
    choice = os.environ.get(ENVIRONMENT, "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT} is {choice!r}, must be 0 or 1")
    return (*BACKENDS, *UNCONFIRMED) if choice == "1" else BACKENDS


class EvictionBuilderMixin:
    """Over a backend's metadata builder. The worker sets all fields before the first step."""

    sequences: "Sequences | None" = None
    tables: "UnitTables | None" = None
    replays: "ReplayScores | None" = None

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
            metadata = build(common_prefix_len, common_attn_metadata, fast_build)
        elif view.uneven:
            metadata = build(common_prefix_len, common_attn_metadata, fast_build)
            setattr(metadata, _UNEVEN, self._over_units(common_attn_metadata, view))
        else:
            metadata = build(common_prefix_len, shifted(common_attn_metadata, view), fast_build)
        if view is not None and view.recording is not None:
            setattr(metadata, _RECORDING, view.recording)
        if self.replays and (readings := self.replays.readings(common_attn_metadata)):
            setattr(metadata, _READINGS, readings)
        return metadata

    def _over_units(self, batch: "CommonAttentionMetadata", view: "BatchView") -> UnitAttention:
        """The batch over units, and the wrapped builder's metadata of it for every layer."""
        assert self.tables is not None, "uneven budgets are refused where there are no units"
        uneven = self.tables.batch(
            view.rows,
            batch.block_table_tensor,
            view.lengths,
            view.starts,
            view.block_size,
            batch.seq_lens,
        )
        sequences = uneven.lengths.shape[1]
        group = self.num_heads // self.num_kv_heads  # type: ignore[attr-defined]
        fold = (
            batch.max_query_len == 1
            and batch.causal is True
            and uneven.flat.device.type == "cpu"
            and worth_folding(sequences, torch.get_num_threads())
        )
        times = group if fold else 1
        one = copy.copy(self)
        one.num_heads, one.num_kv_heads = 1 if fold else group, 1  # type: ignore[attr-defined]
        common = batch.replace(
            query_start_loc=uneven.starts * times,
            query_start_loc_cpu=uneven.starts_cpu * times,
            num_reqs=sequences,
            num_actual_tokens=int(uneven.starts_cpu[-1]) * times,
            max_query_len=group if fold else batch.max_query_len,
            causal=False if fold else batch.causal,
        )
        build = super(EvictionBuilderMixin, one).build  # type: ignore[misc]
        layers = [
            build(
                0,
                common.replace(
                    block_table_tensor=table,
                    seq_lens=lengths,
                    seq_lens_cpu_upper_bound=known,
                    max_seq_len=longest,
                ),
            )
            for table, lengths, known, longest in zip(
                uneven.tables,
                uneven.lengths,
                uneven.lengths_cpu,
                uneven.lengths_cpu.amax(1).tolist(),
                strict=True,
            )
        ]
        return UnitAttention(uneven, layers, fold)


class EvictionImplMixin:
    """Over a backend's implementation. `window`, `replays` and `row`, the layer's place among this
    rank's, are set by the worker before the first step."""

    window: "LayerWindow | None" = None
    replays: "ReplayScores | None" = None
    row: int = 0

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        recording: Recording | None = getattr(attn_metadata, _RECORDING, None)
        if recording is not None and self.window is not None:
            self.window.record(query, recording)
        readings: list[Reading] | None = getattr(attn_metadata, _READINGS, None)
        if readings and self.replays is not None:
            self.replays.read(self.row, query, readings)
        forward = super().forward  # type: ignore[misc]
        units: UnitAttention | None = getattr(attn_metadata, _UNEVEN, None)
        if units is None:
            result: torch.Tensor = forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return result
        queries, results = units.queries(query, attn_metadata.num_actual_tokens)
        forward(layer, queries, key, value, units.flat, units.layers[self.row], results)
        units.restore(output)
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
        max_seq_len=int(live[: len(view.rows)].max()),
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
            plain = type(spec) is FullAttentionSpec and not (spec.kv_quant_mode or spec.non_causal)
            return EvictionSpec.of(spec) if plain else spec

    EvictionBackend.__name__ = EvictionBackend.__qualname__ = "Eviction" + base.__name__
    return EvictionBackend


def __getattr__(name: str) -> Any:
    """`nexus_vllm.engine.attention.CPU_ATTN`: vLLM's registry loads classes by dotted path."""
    if name in (*BACKENDS, *UNCONFIRMED):
        stock: Any = _stock(name)
        return evicting(stock)
    raise AttributeError(name)


@functools.cache
def _stock(name: str) -> type[AttentionBackend]:
    """vLLM's own class, read before `install` overrides it."""
    backend: type[AttentionBackend] = AttentionBackendEnum[name].get_class()
    return backend


def remedy(backend: type[AttentionBackend] | None) -> str:
    """What to do about a backend that is not overridden; None: a layer that has none."""
    if backend is not None and backend.get_name() in UNCONFIRMED:
        return f"run scripts/gpu_check.sh and, where it passes, set {ENVIRONMENT}=1 (docs/gpu.md)"
    return "choose one with --attention-backend"


def install() -> None:
    """Override the admitted backends in this process's registry. Safe to call again."""
    for name in admitted():
        _stock(name)
        register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")
