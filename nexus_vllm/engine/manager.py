"""The pages of evictable sequences: a KV-cache spec of our own and the manager behind it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from nexus_vllm.admission import least_pages
from nexus_vllm.config import Settings
from nexus_vllm.engine.cli import active_settings
from nexus_vllm.plan import EvictionPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, kw_only=True)
class EvictionSpec(FullAttentionSpec):
    """A plain full-attention cache whose sequences may give blocks up."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> Self:
        """The same cache, evictable."""
        return cls(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})

    def max_memory_usage_bytes(self, vllm_config: "VllmConfig") -> int:
        """What vLLM must have room for to start, and reports concurrency by: the least that one
        sequence of `max_model_len` tokens gets along with under the engine's own budget."""
        settings = active_settings(vllm_config.additional_config) or Settings()
        longest, drafts = vllm_config.model_config.max_model_len, vllm_config.num_speculative_tokens
        pages = least_pages(settings, longest, drafts)
        return pages * self.page_size_bytes


@dataclass
class Hold:
    """What the manager must know of one sequence that may be evicted."""

    plan: EvictionPlan
    released: int = 0


@dataclass(frozen=True)
class Slide:
    """Page ids of one slide: the old live window, its successors and the tail (see `Eviction`)."""

    pages: list[int]
    kept_pages: list[int]
    tail_pages: list[int]


class EvictionManager(FullAttentionManager):
    """vLLM's full-attention manager, whose sequences can slide.

    A row starts with `released` null blocks, as in vLLM's sliding-window managers, so that row
    indices stay logical block indices.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Evictable sequences by request id, from their arrival to their end.
        self.holds: dict[str, Hold] = {}
        # Requests of which only so many tokens are worth a place in the prefix cache.
        self.published: dict[str, int] = {}

    def held_blocks(self, request_id: str) -> int:
        """Pages the sequence holds now."""
        hold = self.holds.get(request_id)
        return len(self.req_to_blocks.get(request_id, ())) - (hold.released if hold else 0)

    def slide(self, request_id: str, target: int, full: int) -> Slide | None:
        """Release pages until logical blocks [target, full) are all that is left, and the tail.

        The pages that stay are private and unpublished (I3), in this order of preference: the
        sequence's own ones of that kind; fresh ones while the pool has room, so that published
        prompt pages keep serving prefix hits (copy out); its own published pages with their hash
        withdrawn (in place). Returns None, changing nothing, when all of that is not enough, which
        takes pages shared with other sequences and an empty pool.
        """
        hold, row, pool = self.holds[request_id], self.req_to_blocks[request_id], self.block_pool
        released, keep = hold.released, full - target
        if not 0 <= released < target < full <= len(row):
            raise ValueError(f"cannot slide {request_id} from {released} to {target} of {full}")
        live = row[released:full]

        staying = [block for block in live if pool.is_block_writable(block)][-keep:]
        short = keep - len(staying)
        withdrawn: list[KVCacheBlock] = []
        if short > pool.get_num_free_blocks():
            withdrawn = [b for b in live if b.ref_cnt == 1 and b.block_hash is not None][-short:]
            short -= len(withdrawn)
        if short > pool.get_num_free_blocks():
            return None
        # Taken before anything is released: the worker copies from pages that are still whole.
        fresh = pool.get_new_blocks(short)
        if withdrawn:
            pool.evict_blocks({block.block_id for block in withdrawn})

        stay_ids = {block.block_id for block in staying + withdrawn}
        kept = _placed(row[target:full], [b for b in live if b.block_id in stay_ids], fresh)
        pages = [block.block_id for block in live]
        row[released:target] = [self._null_block] * (target - released)
        row[target:full] = kept
        # Last first: vLLM reuses what is freed first, and prefix hits need a prompt's head most.
        pool.free_blocks([b for b in reversed(live) if b.block_id not in stay_ids])
        hold.released = target
        return Slide(pages, [b.block_id for b in kept], [b.block_id for b in row[full:]])

    def pop_blocks_for_free(self, request_id: str) -> "list[KVCacheBlock]":
        """Take all pages back; a preempted sequence starts over with nothing released."""
        if hold := self.holds.get(request_id):
            hold.released = 0
        return super().pop_blocks_for_free(request_id)

    def withdraw(self, request_id: str, computed: int) -> None:
        """Take back the hashes of pages that were to be filled beyond so many tokens, but are not.

        Symptom without: prefix hits on KV that was never computed. Cause: vLLM publishes a page
        when its tokens are scheduled, and may preempt the sequence later in the same step, under
        priority scheduling. Remove when it withdraws them itself.
        """
        row = self.req_to_blocks.get(request_id, ())[computed // self.block_size :]
        self.block_pool.evict_blocks({b.block_id for b in row if b.block_hash is not None})

    def cache_blocks(
        self,
        request: "Request",
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publish nothing that was computed after the sequence's first eviction (I6)."""
        hold = self.holds.get(request.request_id)
        if hold is not None and hold.released:
            return
        num_tokens = min(num_tokens, self.published.get(request.request_id, num_tokens))
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: "Sequence[KVCacheBlock]",
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Admit a sequence by the most pages its plan ever holds, not by its whole length."""
        hold = self.holds.get(request_id)
        if apply_admission_cap and hold is not None:
            num_tokens = min(num_tokens, hold.plan.most_blocks(num_tokens) * self.block_size)
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless rows, holds, reference counts and the free queue agree (I4)."""
        pool = self.block_pool
        held: dict[int, int] = {}
        for request_id, row in self.req_to_blocks.items():
            hold = self.holds.get(request_id)
            released = hold.released if hold else 0
            nulls = [index for index, block in enumerate(row) if block.is_null]
            if nulls != list(range(released)):
                raise RuntimeError(f"{request_id}: null entries {nulls}, released {released}")
            for block in row[released:]:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        for block in pool.blocks:
            if not block.is_null and block.ref_cnt != held.get(block.block_id, 0):
                raise RuntimeError(
                    f"page {block.block_id}: {block.ref_cnt} references, "
                    f"{held.get(block.block_id, 0)} rows hold it"
                )
        if pool.get_num_free_blocks() + len(held) != pool.num_gpu_blocks - 1:
            raise RuntimeError(
                f"{pool.get_num_free_blocks()} free + {len(held)} held pages are not the pool's "
                f"{pool.num_gpu_blocks - 1}"
            )


def _placed(
    slots: "list[KVCacheBlock]", staying: "list[KVCacheBlock]", fresh: "list[KVCacheBlock]"
) -> "list[KVCacheBlock]":
    """`staying` and `fresh` pages in row order; a page that is in its slot already stays there."""
    stay_ids = {block.block_id for block in staying}
    slot_ids = {block.block_id for block in slots}
    others = iter([b for b in staying if b.block_id not in slot_ids] + fresh)
    return [slot if slot.block_id in stay_ids else next(others) for slot in slots]


def register_spec() -> None:
    """Make `EvictionSpec` known to this process's registry. Safe to call again.

    vLLM registers its own specs only while its registry is empty, so they must come first.
    """
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(
        EvictionSpec, EvictionManager, uniform_type_base_spec=FullAttentionSpec
    )


register_spec()
