"""Evictions under uneven head budgets; `unit_batch` is what attention sees afterwards.

The scheduler frees and keeps whole pages exactly as under equal budgets. Here the units of the kept
pages are dealt out over all (layer, KV head) pairs of the sequence (`units`).
"""

import torch
from torch import Tensor

from nexus_vllm.allocators import Allocator, Situation
from nexus_vllm.allocators.cake import Cake
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import (
    MAX_KEYS,
    Layer,
    check_agreement,
    forced_blocks,
    window_queries,
)
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.units import Holding, UnitSpace
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Observation, Policy, block_attention
from nexus_vllm.selectors import select

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max


class UnevenEvictor:
    """Carries out evictions of sequences whose (layer, KV head) pairs keep different numbers."""

    def __init__(self, layers: list[Layer], settings: Settings) -> None:
        self.layers = layers
        self.settings = settings
        self.space = UnitSpace.of([layer.cache for layer in layers])
        self.heads = self.space.heads

    def evict(
        self, sequence: Sequence, eviction: Eviction, policy: Policy, allocator: Allocator
    ) -> tuple[int, Tensor]:
        """Shrink one sequence to the units of the pages that the scheduler left it.

        Returns the number of copied units and the original ids [L, H, most] of the blocks that
        stay, -1 where a head keeps fewer than another. Raises RuntimeError when worker and
        scheduler disagree on the sequence.
        """
        check_agreement(sequence, eviction)
        holding = self._held(sequence, eviction)
        valid = holding.valid
        # Padding gets ids beyond every query, so that attention cannot see it.
        padding = eviction.full + torch.arange(valid.shape[-1]).expand(valid.shape)
        ids = torch.where(valid, holding.blocks, padding)
        settings = self.settings
        forced = valid & forced_blocks(ids, eviction.full, settings)
        rows = torch.tensor([layer.index for layer in self.layers])[:, None] * self.heads
        rows = rows + torch.arange(self.heads)
        weights, preference = self._score(
            sequence, eviction, policy, allocator, holding, ids, valid & ~forced, rows
        )
        counts = allocator.counts(
            Situation(
                budget=len(eviction.kept_pages),
                seen=eviction.full,
                capacity=holding.counts,
                floor=forced.sum(-1),
                weights=weights,
                candidates=valid & ~forced,
                block_ids=ids,
                preference=preference,
            )
        )
        kept = select(
            policy.selector or settings.selector,
            weights.flatten(0, 1),
            counts.flatten(),
            forced.flatten(0, 1),
            seed=eviction.seed,
            event=eviction.event,
            layers=rows.flatten(),
            block_ids=ids.flatten(0, 1),
            n=settings.n,
            temperature=settings.temperature,
            validate=False,
        ).view_as(valid)
        room = self.space.own(torch.tensor(eviction.kept_pages)).flatten()
        packed, source, target = holding.packed(kept, room)
        self.space.copy(source, target)
        if settings.check_integrity:
            packed.check_integrity(room)
        sequence.released, sequence.holding, sequence.dealt = eviction.target, packed, eviction.full
        return len(source), packed.blocks

    def _held(self, sequence: Sequence, eviction: Eviction) -> Holding:
        """The live window by units: what was dealt out, and own units of blocks filled since."""
        pages = torch.tensor(eviction.pages)
        if sequence.holding is None:
            blocks = torch.arange(eviction.released, eviction.full)
            return Holding.even(self.space, pages, blocks.expand(len(self.layers), -1))
        dealt = sequence.dealt - eviction.released
        blocks = torch.arange(sequence.dealt, eviction.full)
        return sequence.holding.grown(self.space, pages[dealt:], blocks)

    def _score(
        self,
        sequence: Sequence,
        eviction: Eviction,
        policy: Policy,
        allocator: Allocator,
        holding: Holding,
        ids: Tensor,
        candidates: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Weights [L, H, most] of every held block, and the layers' preference if asked for."""
        weights = torch.empty(ids.shape, dtype=torch.float32)
        wanted = isinstance(allocator, Cake)
        preference = torch.empty(len(self.layers), dtype=torch.float64) if wanted else None
        unit = self.layers[0].cache[0, 0].numel() // 2
        step = max(1, MAX_KEYS // (unit * ids[0].numel()))
        for first in range(0, len(self.layers), step):
            some = slice(first, min(first + step, len(self.layers)))
            queries, positions, keys = None, None, None
            if policy.needs_window or wanted:
                queries, positions, keys = self._read(sequence, eviction, holding, some)
            seen = Observation(
                queries=queries,
                query_positions=positions,
                keys=keys,
                block_ids=ids[some],
                scale=self.layers[first].scale,
                candidates=candidates[some],
                seed=eviction.seed,
                event=eviction.event,
                layers=rows[some],
            )
            weights[some] = policy.weights(seen)
            if preference is not None and isinstance(allocator, Cake):
                maps = block_attention(seen)  # [l, H, G, W, most]
                group = maps.shape[2]
                preference[some] = allocator.preference(
                    maps.flatten(1, 2), candidates[some].repeat_interleave(group, dim=1)
                )
        # A block that exists outranks padding, however little it weighs. A model that overflows
        # spoils its own text; an error here would end the engine.
        weights = weights.nan_to_num(nan=0.0, posinf=_HUGE).clamp(min=_TINY)
        if preference is not None:
            preference = preference.nan_to_num(nan=0.0, posinf=0.0)
        return torch.where(holding.valid, weights, 0.0), preference

    def _read(
        self, sequence: Sequence, eviction: Eviction, holding: Holding, some: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [l, H, W, G, D], their positions [W], keys [l, H, most, 1, b, D]."""
        layers = self.layers[some]
        queries, positions = window_queries(layers, sequence, eviction, self.settings.window)
        queries = queries.unflatten(2, (self.heads, -1)).transpose(1, 2)
        units = holding.units[some].clamp(min=0)
        keys = layers[0].keys.read(self.space.flat, units.flatten())
        return queries, positions, keys.unflatten(0, units.shape)
