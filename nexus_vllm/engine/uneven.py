"""Evictions under uneven head budgets; `unit_batch` is what attention sees afterwards.

The scheduler frees and keeps whole pages exactly as under equal budgets. Here the units of the kept
pages are dealt out over all (layer, KV head) pairs of the sequence (`units`).
"""

from typing import Any, SupportsInt

import torch
from torch import Tensor

from nexus_vllm.allocators import Allocator, Situation, on_host
from nexus_vllm.allocators.cake import Cake, spread
from nexus_vllm.config import Settings
from nexus_vllm.engine import ops
from nexus_vllm.engine.evictor import (
    MAX_KEYS,
    MAX_MAPS,
    Layer,
    OnError,
    check_agreement,
    circumstances,
    forced_blocks,
    grown_state,
    newest,
    read_in_place,
    replayed,
    selection,
    window_queries,
)
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.units import Holding, UnitSpace, packed_state
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Observation, Policy, block_attention, score, state_size

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max


class UnevenEvictor:
    """Carries out evictions of sequences whose (layer, KV head) pairs keep different numbers."""

    def __init__(self, layers: list[Layer], settings: Settings) -> None:
        self.layers = layers
        self.settings = settings
        self.space = UnitSpace.of([layer.cache for layer in layers])
        self.heads = self.space.heads
        self.memory = ops.memory_of(layers)
        index = torch.tensor([layer.index for layer in layers])[:, None] * self.heads
        self.rows = ops.sent(index + torch.arange(self.heads), self.space.device)

    def evict(
        self,
        sequence: Sequence,
        eviction: Eviction,
        policy: Policy,
        allocator: Allocator,
        on_error: OnError | None = None,
    ) -> tuple[SupportsInt, Tensor]:
        """Shrink one sequence to the units of the pages that the scheduler left it.

        on_error: as `Evictor.evict`.
        Returns the number of copied units and the original ids [L, H, most] of the blocks that
        stay, -1 where a head keeps fewer than another. Raises RuntimeError when worker and
        scheduler disagree on the sequence.

        On a GPU nothing waits for it, unless the allocator reads weights (`allocators.on_host`) or
        something fails.
        """
        check_agreement(sequence, eviction)
        holding = self._held(sequence, eviction)
        valid = holding.valid
        # Padding gets ids beyond every query, so that attention cannot see it.
        padding = eviction.full + torch.arange(valid.shape[-1], device=self.space.device)
        ids = torch.where(valid, holding.blocks, padding)
        forced = valid & forced_blocks(ids, eviction.full, self.settings.of(eviction.policy))
        room = self.space.own(ops.sent(eviction.kept_pages, self.space.device)).flatten()
        gone = set(eviction.pages).difference(eviction.kept_pages)
        moves = len(gone) * holding.counts.numel()
        state = None
        try:
            kept, counts, state = self._choose(
                sequence, eviction, policy, allocator, holding, ids, forced
            )
            packed, copies = holding.packed(self.space, kept, counts, room, moves)
        except Exception as error:
            if on_error is None:
                raise
            on_error(error)
            blocks = torch.where(valid, ids, -1).flatten()
            kept = newest(blocks, forced.flatten(), len(room)).view_as(valid)
            counts = on_host(kept.sum(-1))
            packed, copies = holding.packed(self.space, kept, counts, room, moves)
        self.space.copy(copies)
        if self.settings.check_integrity:
            packed.check_integrity(room)
        sequence.released, sequence.holding, sequence.dealt = eviction.target, packed, eviction.full
        sequence.seen = eviction.computed
        sequence.state = None
        if state is not None:
            sequence.state = packed_state(state, kept, packed.units.shape[-1])
        return ops.number(copies.count), packed.blocks

    def _choose(
        self,
        sequence: Sequence,
        eviction: Eviction,
        policy: Policy,
        allocator: Allocator,
        holding: Holding,
        ids: Tensor,
        forced: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Which held blocks stay, bool [L, H, most], how many of each head [L, H], on the host, and
        the state [L, H, most, S] of all."""
        settings, valid, rows = self.settings.of(eviction.policy), holding.valid, self.rows
        weights, preference, state = self._score(
            sequence, eviction, policy, allocator, holding, ids, valid & ~forced, rows
        )
        counts = allocator.counts(
            Situation(
                budget=len(eviction.kept_pages),
                seen=eviction.full,
                capacity=holding.counts,
                floor=self._floor(sequence, eviction, holding),
                weights=weights,
                candidates=valid & ~forced,
                block_ids=ids,
                preference=preference,
            )
        )
        kept = ops.select(
            weights=weights.flatten(0, 1),
            keep=ops.sent(counts, self.space.device).flatten(),
            forced=forced.flatten(0, 1),
            seed=eviction.seed,
            event=eviction.event,
            layers=rows.flatten(),
            block_ids=ids.flatten(0, 1),
            **selection(policy, settings, eviction),
        )
        return kept.view_as(valid), counts, state

    def _held(self, sequence: Sequence, eviction: Eviction) -> Holding:
        """The live window by units: what was dealt out, and own units of blocks filled since."""
        device = self.space.device
        pages = ops.sent(eviction.pages, device)
        if sequence.holding is None:
            blocks = torch.arange(eviction.released, eviction.full, device=device)
            return Holding.even(self.space, pages, blocks.expand(len(self.layers), -1))
        dealt = sequence.dealt - eviction.released
        blocks = torch.arange(sequence.dealt, eviction.full, device=device)
        return sequence.holding.grown(self.space, pages[dealt:], blocks)

    def _floor(self, sequence: Sequence, eviction: Eviction, holding: Holding) -> Tensor:
        """How many forced blocks each head holds [L, H], on the host: all that there are, since
        what is forced once was forced at every eviction before."""
        first = eviction.released if sequence.holding is None else 0
        blocks = torch.arange(first, eviction.full)
        forced = forced_blocks(blocks, eviction.full, self.settings.of(eviction.policy))
        return torch.full_like(holding.counts, int(forced.sum()))

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
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights [L, H, most] of every held block, the layers' preference if asked for, and the
        state [L, H, most, S].

        (Layer, head) pairs are scored in groups that hold about as many blocks each.
        """
        cake = allocator if isinstance(allocator, Cake) else None
        settings = self.settings.of(eviction.policy)
        smoothing = settings.smoothing
        looking = policy.needs_window or cake is not None
        reading = policy.reads_keys or cake is not None
        valid, size = holding.valid, state_size(policy, smoothing)
        known = grown_state(sequence.state, ids.shape[-1], size)
        device = self.space.device
        state = torch.full((*ids.shape, size), torch.nan, device=device) if size else None
        found = replayed(sequence, ids)
        weights = torch.zeros(ids.shape, dtype=torch.float32, device=device).flatten(0, 1)
        terms = torch.zeros(len(weights), 2, dtype=torch.float64, device=device)
        queries, positions = None, None
        if looking:
            queries, positions = window_queries(self.layers, sequence, eviction, settings.window)
            queries = queries.unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
        in_place = read_in_place(self.memory, policy)
        groups = self._groups(holding.counts.flatten(), reading, in_place, settings.window)
        for listed, most in groups:
            pairs = ops.sent(listed, device)
            layer, head = pairs // self.heads, pairs % self.heads
            units, blocks = holding.units[layer, head, :most], ids[layer, head, :most]
            seen = Observation(
                queries=None if queries is None else queries[pairs],
                query_positions=positions,
                block_ids=blocks,
                scale=self.layers[0].scale,
                candidates=candidates[layer, head, :most],
                layers=rows[layer, head],
                valid=valid[layer, head, :most],
                state=None if known is None else known[layer, head, :most],
                rope=self.layers[0].rope,
                replay=None if found is None else found[layer, head, :most, None],
                **self._read(policy, reading, units, blocks, holding.counts_there[layer, head]),
                **circumstances(sequence, eviction, settings),
            )
            weights[pairs, :most], new = score(policy, seen, smoothing)
            if state is not None and new is not None:
                state[layer, head, :most] = new
            if cake:
                terms[pairs] = spread(block_attention(seen), seen.candidates)
        # A block that exists outranks padding, however little it weighs. A model that overflows
        # spoils its own text; an error here would end the engine.
        weights = weights.view_as(ids).nan_to_num(nan=0.0, posinf=_HUGE).clamp(min=_TINY)
        preference = None
        if cake:
            of_layers = terms.nan_to_num(nan=0.0, posinf=0.0).view(-1, self.heads, 2).sum(1)
            preference = cake.combined(of_layers)
        return torch.where(valid, weights, 0.0), preference, state

    def _groups(
        self, counts: Tensor, reading: bool, in_place: bool, window: int
    ) -> list[tuple[Tensor, int]]:
        """Pairs to score at once, with the most blocks that one of them holds.

        counts: [L * H], on the host, as the pairs are. in_place: kernels read the keys, so what
          counts are the maps they write.
        """
        if not reading:
            return [(torch.arange(len(counts)), int(counts.max()))]
        unit = self.layers[0].cache[0, 0].numel() // 2
        held = MAX_KEYS // max(1, unit)
        if in_place:
            held = MAX_MAPS // (window * (self.layers[0].window.ring.shape[1] // self.heads))
        most, order = counts.sort(descending=True, stable=True)
        sizes, groups, first = most.tolist(), [], 0
        while first < len(sizes):
            # The first of a group holds the most: the others are padded to it.
            end = first + max(1, held // max(1, sizes[first]))
            groups.append((order[first:end], sizes[first]))
            first = end
        return groups

    def _read(
        self, policy: Policy, reading: bool, units: Tensor, blocks: Tensor, counts: Tensor
    ) -> dict[str, Any]:
        """Keys and values [R, most, 1, b, D] of an Observation as far as the policy needs them, or
        what reads them in place; a row's padding has those of its first unit.

        units, blocks: [R, most]. counts: [R].
        """
        if not reading:
            return {"keys": None}
        first, flat = self.layers[0], self.space.flat
        if self.memory is not None and read_in_place(self.memory, policy):
            start = flat.storage_offset() + units * flat.stride(0)
            return {
                "keys": None,
                "reader": self.memory.reader(start[:, None], blocks[:, None], counts[:, None]),
            }
        places = torch.where(units < 0, units[:, :1], units)
        keys = first.keys.read(flat, places.flatten()).unflatten(0, places.shape)
        values = None
        if policy.needs_values:
            assert first.values is not None, "the layers' values have not been probed"
            values = first.values.read(flat, places.flatten()).unflatten(0, places.shape)
        return {"keys": keys, "values": values}
