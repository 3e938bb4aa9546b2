"""Attention over the live window: vLLM's own backends, shown a shifted batch.

`evicting(backend)` subclasses any backend whose cache is `[pages, KV heads, block, 2 * head size]`.
Its builder shifts block tables and lengths *before* the wrapped builder runs, so that whatever that
plans ahead is right; its implementation records the window queries and calls the wrapped one.
"""

import copy
import functools
import operator
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nexus_vllm.engine.manager import EvictionSpec
from nexus_vllm.engine.ops import use_kernels
from nexus_vllm.engine.step_buffers import StepBuffers
from nexus_vllm.engine.unit_batch import UnitAttention, worth_folding
from nexus_vllm.engine.window import DeviceRecording, recording

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

HEADS = dict.fromkeys(UNCONFIRMED, ("num_heads_q", "num_heads_kv"))
"""What builders call their numbers of query and of KV heads, if not num_heads and num_kv_heads."""

ENVIRONMENT = "NEXUS_VLLM_UNCONFIRMED"
"""1, to evict with backends of UNCONFIRMED, too."""


def admitted() -> tuple[str, ...]:
    """Backends that this process may evict with. Raises ValueError on an unknown choice."""
    choice = os.environ.get(ENVIRONMENT, "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT} is {choice!r}, must be 0 or 1")
    return (*BACKENDS, *UNCONFIRMED) if choice == "1" else BACKENDS


class EvictionBuilderMixin:
    """Over a backend's metadata builder. The worker sets `sequences`, `tables` and `replays` before
    the first step; until then, and in dummy runs, a batch is shown as it is."""

    sequences: "Sequences | None" = None
    tables: "UnitTables | None" = None
    replays: "ReplayScores | None" = None
    buffers: StepBuffers | None = None

    # Metadata must be built, not patched: a table that is swapped later would not be shifted.
    supports_update_block_table: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The wrapped builder's, since all it is shown lies in buffers that stay.

        Without kernels tables are built anew each step, so attention stays outside of graphs. Steps
        that are not alike for every head are kept out by the worker (`Runner.keep_out_of_graphs`).
        """
        if not use_kernels(torch.device(current_platform.device_type)):
            return AttentionCGSupport.NEVER
        support: AttentionCGSupport = super().get_cudagraph_support(  # type: ignore[misc]
            vllm_config, kv_cache_spec
        )
        return support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: "CommonAttentionMetadata",
        fast_build: bool = False,
    ) -> Any:
        batch = common_attn_metadata
        view = self.sequences.view(batch) if self.sequences else None
        by_kernels = use_kernels(batch.seq_lens.device)
        live, recorded = (self._in_buffers if by_kernels else self._anew)(batch, view)
        build = super().build  # type: ignore[misc]
        if view is not None and view.uneven:
            metadata = build(0, batch, fast_build)
            setattr(metadata, _UNEVEN, self._over_units(batch, view))
        else:
            metadata = build(0, live, fast_build)  # live windows have no prefix in common
        if recorded is not None:
            setattr(metadata, _RECORDING, recorded)
        if self.replays and (readings := self.replays.readings(batch)):
            setattr(metadata, _READINGS, readings)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        raise RuntimeError("vLLM swaps a block table after eviction has shifted it")

    def _anew(
        self, batch: "CommonAttentionMetadata", view: "BatchView | None"
    ) -> "tuple[CommonAttentionMetadata, Recording | DeviceRecording | None]":
        """The live window in new tensors, and which queries to record."""
        if view is None:
            return batch, None
        assert self.sequences is not None
        rows, device = self.sequences.ring_rows, batch.seq_lens.device
        return shifted(batch, view), recording(view.starts, view.lengths, view.slots, rows, device)

    def _in_buffers(
        self, batch: "CommonAttentionMetadata", view: "BatchView | None"
    ) -> "tuple[CommonAttentionMetadata, Recording | DeviceRecording | None]":
        """The same where kernels run, also if nothing is evicted: a graph may be being captured."""
        table = batch.block_table_tensor
        if self.buffers is None:
            requests = self.vllm_config.scheduler_config.max_num_seqs  # type: ignore[attr-defined]
            block_size = self.kv_cache_spec.block_size  # type: ignore[attr-defined]
            self.buffers = StepBuffers(requests, table.shape[1], block_size, table.device)
        shown = self.buffers.show(batch, view)
        recorded = DeviceRecording(batch.query_start_loc, batch.seq_lens, shown.slots)
        live = batch.replace(block_table_tensor=shown.table, seq_lens=shown.lengths)
        return with_live_bounds(live, view), recorded

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
        # FlashAttention's buffers for captured graphs have room for max_num_seqs rows.
        vars(one)["use_full_cuda_graph"] = False
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
        recorded: Recording | DeviceRecording | None = getattr(attn_metadata, _RECORDING, None)
        if recorded is not None and self.window is not None:
            self.window.record(query, recorded)
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
        if any(more is not None for more in (*args, *kwargs.values())):
            raise RuntimeError("attention over units has no scaled output: switch such fusion off")
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
    live = batch.replace(
        block_table_tensor=table.gather(1, columns.clamp_(max=table.shape[1] - 1)),
        seq_lens=batch.seq_lens - (released * view.block_size).to(batch.seq_lens.dtype),
    )
    return with_live_bounds(live, view)


def with_live_bounds(
    batch: "CommonAttentionMetadata", view: "BatchView | None"
) -> "CommonAttentionMetadata":
    """The batch with what the host knows of lengths counting the live window alone."""
    if view is None or not view.released.any():
        return batch  # not even a bound is touched: a graph is captured for the longest sequences
    live = view.lengths - (view.released * view.block_size).astype(view.lengths.dtype)
    return batch.replace(
        seq_lens_cpu_upper_bound=torch.from_numpy(live),
        max_seq_len=int(live[: len(view.rows)].max()),
    )


def _alias(name: str) -> property:
    """What is read and written as another attribute of a builder."""

    def write(builder: EvictionBuilderMixin, value: int) -> None:
        setattr(builder, name, value)

    return property(operator.attrgetter(name), write)


@functools.cache
def evicting(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """`base` with eviction: same name, same kernels, our spec, builder and implementation."""
    names = HEADS.get(base.get_name(), ())
    builder = type(
        "Eviction" + base.get_builder_cls().__name__,
        (EvictionBuilderMixin, base.get_builder_cls()),
        dict(zip(("num_heads", "num_kv_heads"), map(_alias, names), strict=False)),
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

        @classmethod
        def supported_kv_cache_layouts(cls) -> Any:
            """The one in which each KV head of a page is contiguous, of those any backend offers:
            units are read and copied as they lie."""
            from vllm.v1.kv_cache_layout import KVCacheLayout

            return (KVCacheLayout.LBHNC,)

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
