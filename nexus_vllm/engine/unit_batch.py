"""A batch as attention over units sees it, where a sequence's heads hold different numbers of them.

Every (KV head, request) pair is a sequence of its own, in a flat cache with one KV head. Tables and
lengths differ by layer.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.units import Holding, UnitSpace


@dataclass(frozen=True)
class UnevenBatch:
    """A batch as attention over units must see it: one sequence per (KV head, request).

    `tables` [layers, heads * requests, width] int32 unit numbers; `lengths` [layers, heads *
    requests] int32 tokens; `starts` [heads * requests + 1] int32 first query row of each, where
    queries are ordered by KV head, then as in the batch.
    """

    flat: Tensor
    heads: int
    tables: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def of(
        cls,
        space: UnitSpace,
        rows: list[Sequence | None],
        table: Tensor,
        lengths: np.ndarray,
        starts: np.ndarray,
        block_size: int,
    ) -> "UnevenBatch":
        """From the batch's page table [requests, width] and lengths, released blocks included."""
        layers, heads, requests = len(space.base), space.heads, len(rows)
        parts: list[tuple[Tensor | None, Tensor, Tensor]] = []
        tokens = torch.empty(layers, heads, requests, dtype=torch.int32)
        for index, sequence in enumerate(rows):
            length = int(lengths[index])
            holding, first = dealt_out(sequence)
            tail = space.own(table[index, first : -(-length // block_size)].long())
            counts = holding.counts if holding else torch.zeros(layers, heads, dtype=torch.long)
            parts.append((holding.units if holding else None, counts, tail))
            tokens[:, :, index] = counts * block_size + (length - first * block_size)
        width = max(int(counts.max()) + tail.shape[-1] for _, counts, tail in parts)
        tables = torch.zeros(layers, heads, requests, width, dtype=torch.int32)
        for index, (units, counts, tail) in enumerate(parts):
            row = tables[:, :, index]
            if units is not None:
                row[..., : units.shape[-1]] = units.clamp(min=0)
            place = counts[..., None] + torch.arange(tail.shape[-1])
            row.scatter_(2, place, tail.int())
        return cls(
            space.flat,
            heads,
            tables.flatten(1, 2),
            tokens.flatten(1, 2),
            per_head_starts(starts[: requests + 1], heads),
        )


def dealt_out(sequence: Sequence | None) -> tuple[Holding | None, int]:
    """What a row's heads hold apart from each other, and the first block that all hold alike."""
    if sequence is None:
        return None, 0
    return sequence.holding, sequence.dealt if sequence.holding else sequence.released


def per_head_starts(starts: np.ndarray, heads: int) -> Tensor:
    """First query rows [heads * requests + 1] int32 of a batch repeated per head, from its own."""
    each = starts[:-1] + starts[-1] * np.arange(heads)[:, None]
    return torch.from_numpy(np.append(each.ravel(), heads * starts[-1]).astype(np.int32))


class UnitTables:
    """The tables of the last step, for as long as nothing but tokens in tail pages is new.

    They are reused only if every row's holding, first block and tail pages are the same: compared
    by content at each step, so nobody has to tell of evictions, moved rows or restarted requests.
    """

    def __init__(self, space: UnitSpace) -> None:
        self.space = space
        self._known: tuple[list[tuple[Holding | None, int, bytes]], np.ndarray, UnevenBatch] | None
        self._known = None

    def batch(
        self,
        rows: list[Sequence | None],
        table: Tensor,
        lengths: np.ndarray,
        starts: np.ndarray,
        block_size: int,
    ) -> UnevenBatch:
        """The same as `UnevenBatch.of(space, ...)`."""
        requests = len(rows)
        lengths, starts = lengths[:requests], starts[: requests + 1]
        pages = table.numpy()
        key = []
        for sequence, row, length in zip(rows, pages, lengths.tolist(), strict=False):
            holding, first = dealt_out(sequence)
            key.append((holding, first, row[first : -(-length // block_size)].tobytes()))
        if self._known is not None and self._known[0] == key:
            _, before, batch = self._known
            more = torch.from_numpy((lengths - before).astype(np.int32))
            batch = replace(
                batch,
                lengths=batch.lengths + more.repeat(self.space.heads),
                starts=per_head_starts(starts, self.space.heads),
            )
        else:
            batch = UnevenBatch.of(self.space, rows, table, lengths, starts, block_size)
        self._known = key, lengths.copy(), batch
        return batch


def worth_folding(sequences: int, threads: int) -> bool:
    """Whether decoding should show a KV head's query heads to the kernel as tokens of one head.

    vLLM's CPU kernel cuts sequences so that all threads get equal shares, and its threads then wait
    for each other, spinning: on cores that others use too, a layer took twice as long. It does not
    cut sequences of several query tokens. Each thread then leaves about half a sequence to the last
    one, which therefore gets threads * (threads - 1) / 2 / sequences more than its share: at most
    a tenth is taken.
    """
    return 5 * threads * (threads - 1) <= sequences


class UnitAttention:
    """One step's attention over units: `layers` is the wrapped backend's metadata of each layer.

    `fold`: a decoding token's query heads are tokens of one head, all of which see everything.
    """

    def __init__(self, batch: UnevenBatch, layers: list[Any], fold: bool) -> None:
        self.flat = batch.flat
        self.heads = batch.heads
        self.layers = layers
        self.fold = fold
        self._buffers: tuple[Tensor, Tensor] | None = None  # shared by all layers

    def queries(self, query: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Queries [tokens, Hq, D] ordered by KV head, and an empty tensor for their results.

        Both are [heads * tokens, Hq / heads, D], or [tokens * Hq, 1, D] if folded. They are valid
        until the next call.
        """
        group, size = query.shape[1] // self.heads, query.shape[2]
        if self._buffers is None:
            shape = (self.heads, tokens, group, size)
            self._buffers = query.new_empty(shape), query.new_empty(shape)
        buffer, results = self._buffers
        buffer.transpose(0, 1).copy_(query[:tokens].view(tokens, self.heads, group, size))
        rows = (-1, 1, size) if self.fold else (-1, group, size)
        return buffer.view(rows), results.view(rows)

    def restore(self, output: Tensor) -> None:
        """Write the results to the output [tokens, Hq, D] (or [tokens, Hq * D])."""
        assert self._buffers is not None
        results = self._buffers[1].transpose(0, 1)
        output[: len(results)].view(results.shape).copy_(results)
