"""The worker's half of an eviction: score, select, fill.

pages of the live window -> keys --policy--> weights --selector--> kept blocks --copies--> pages
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.engine.layout import key_order, read_keys
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Observation, Policy
from nexus_vllm.selectors import select


@dataclass
class Layer:
    """One attention layer: vLLM's module, its cache, how keys lie in it, its query window."""

    index: int
    cache: Tensor
    key_order: Tensor
    scale: float
    head_size: int
    window: LayerWindow

    @classmethod
    def of(cls, index: int, module: Any, window: LayerWindow) -> "Layer":
        """Probe an initialised attention layer. Raises RuntimeError for a cache of unknown form."""
        cache: Tensor = module.kv_cache
        heads, size = module.num_kv_heads, module.head_size
        if cache.ndim != 4 or cache.shape[1] != heads or cache.shape[3] != 2 * size:
            raise RuntimeError(
                f"layer {index}: KV cache {tuple(cache.shape)} is not "
                f"[pages, {heads}, block, {2 * size}]"
            )
        return cls(index, cache, key_order(module, cache), module.impl.scale, size, window)


class Evictor:
    """Carries out evictions over all layers of this rank."""

    def __init__(self, layers: list[Layer], settings: Settings) -> None:
        self.layers = layers
        self.settings = settings
        self.policies: dict[str, Policy] = {
            name: policies.make(name, settings) for name in policies.names()
        }

    def evict(self, sequence: Sequence, eviction: Eviction) -> tuple[int, Tensor]:
        """Shrink one sequence to the pages the scheduler left it.

        Returns the number of copied (layer, block) slices and the original ids [L, kept] of the
        blocks that stay. Raises RuntimeError when worker and scheduler disagree on the sequence.
        """
        if sequence.released != eviction.released:
            raise RuntimeError(
                f"{eviction.request_id}: the scheduler counts {eviction.released} released blocks, "
                f"the worker {sequence.released}"
            )
        blocks = sequence.live_blocks(len(self.layers), eviction.full)
        kept = self._choose(sequence, eviction, blocks)
        moved, origin = self._fill(eviction, blocks, kept)
        sequence.released, sequence.origin = eviction.target, origin
        return moved, origin

    def forced(self, blocks: Tensor, full: int) -> Tensor:
        """Which live blocks must stay: sink blocks and the newest."""
        settings = self.settings
        return (blocks < settings.sink_blocks) | (blocks >= full - settings.recency_blocks)

    def _choose(self, sequence: Sequence, eviction: Eviction, blocks: Tensor) -> Tensor:
        """Which live blocks stay: bool [layers, live]."""
        policy, settings = self.policies[eviction.policy], self.settings
        forced = self.forced(blocks, eviction.full)
        rows = range(len(self.layers))
        # One layer at a time bounds the memory of a score that reads keys.
        groups = [[row] for row in rows] if policy.needs_window else [list(rows)]
        kept = torch.empty_like(forced)
        for group in groups:
            index = torch.tensor([self.layers[row].index for row in group])
            queries, positions, keys = None, None, None
            if policy.needs_window:
                queries, positions, keys = self._read(sequence, eviction, group[0])
            observation = Observation(
                queries=queries,
                query_positions=positions,
                keys=keys,
                block_ids=blocks[group],
                scale=self.layers[group[0]].scale,
                candidates=~forced[group],
                seed=eviction.seed,
                event=eviction.event,
                layers=index,
            )
            kept[group] = select(
                policy.selector or settings.selector,
                policy.weights(observation),
                len(eviction.kept_pages),
                forced[group],
                seed=eviction.seed,
                event=eviction.event,
                layers=index,
                block_ids=blocks[group],
                n=settings.n,
                temperature=settings.temperature,
            )
        return kept

    def _read(
        self, sequence: Sequence, eviction: Eviction, row: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One layer's window queries [1, W, Hq, D], their positions [W], keys [1, N, Hkv, b, D]."""
        layer = self.layers[row]
        count = min(self.settings.window, eviction.computed)
        positions = torch.arange(eviction.computed - count, eviction.computed)
        queries = layer.window.queries(sequence.slot, positions)
        pages = torch.tensor(eviction.pages)
        keys = read_keys(layer.cache, pages, layer.key_order, layer.head_size)
        return queries[None], positions, keys[None]

    def _fill(self, eviction: Eviction, blocks: Tensor, kept: Tensor) -> tuple[int, Tensor]:
        """Copy kept blocks out of pages that go into pages that stay; returns (copies, origins).

        A page that stays and whose own block is kept is not touched. Sources and destinations are
        disjoint, so copies need no scratch and no order.
        """
        slot_of_page = {page: slot for slot, page in enumerate(eviction.kept_pages)}
        slots = torch.tensor([slot_of_page.get(page, -1) for page in eviction.pages])
        pages, kept_pages = torch.tensor(eviction.pages), torch.tensor(eviction.kept_pages)
        origin = torch.empty(len(self.layers), len(kept_pages), dtype=torch.long)
        moved = 0
        for row, layer in enumerate(self.layers):
            stays = kept[row] & (slots >= 0)
            leaves = kept[row] & (slots < 0)
            taken = torch.zeros(len(kept_pages), dtype=torch.bool)
            taken[slots[stays]] = True
            holes = (~taken).nonzero().flatten()
            layer.cache[kept_pages[holes]] = layer.cache[pages[leaves]]
            origin[row, slots[stays]] = blocks[row, stays]
            origin[row, holes] = blocks[row, leaves]
            moved += len(holes)
        return moved, origin
