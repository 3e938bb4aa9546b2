"""A batch as attention over units sees it, where a sequence's heads hold different numbers of them.

Every (KV head, request) pair is a sequence of its own, in a flat cache with one KV head. Tables and
lengths differ by layer.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nexus_vllm.engine.ops import sent, use_kernels
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.units import Holding, UnitSpace, unit_tables


@dataclass(frozen=True)
class UnevenBatch:
    """A batch as attention over units must see it: one sequence per (KV head, request).

    `tables` [layers, heads * requests, width] int32 unit numbers; `lengths` [layers, heads *
    requests] int32 tokens; `starts` [heads * requests + 1] int32 first query row of each, where
    queries are ordered by KV head, then as in the batch. `starts_cpu`: the same on the host.
    `lengths_cpu`: the lengths as far as the host knows, which may be more.
    """

    flat: Tensor
    heads: int
    tables: Tensor
    lengths: Tensor
    lengths_cpu: Tensor
    starts: Tensor
    starts_cpu: Tensor

    @classmethod
    def of(
        cls,
        space: UnitSpace,
        rows: list[Sequence | None],
        table: Tensor,
        lengths: np.ndarray,
        starts: np.ndarray,
        block_size: int,
        exact: Tensor | None = None,
    ) -> "UnevenBatch":
        """From the batch's page table [requests, width] and lengths, released blocks included.

        Both may have more rows than `rows`. `exact`: lengths where the table is, for a host that
        knows only upper bounds: there must be pages for those. Nothing waits for a GPU.
        """
        layers, heads, requests = len(space.base), space.heads, len(rows)
        lengths = lengths[:requests].astype(np.int64)
        dealt = [dealt_out(sequence) for sequence in rows]
        first = np.array([block for _, block in dealt])
        pages = np.minimum(-(-lengths // block_size), table.shape[1])
        tail = np.maximum(pages - first, 0)
        nothing = torch.zeros(layers, heads, dtype=torch.long)
        counts = torch.stack([held.counts if held else nothing for held, _ in dealt], -1)
        known = counts * block_size + torch.from_numpy(lengths - first * block_size)
        width = int((counts.amax((0, 1)) + torch.from_numpy(tail)).max())
        if space.device.type != "cpu":
            width = -(-width // 16) * 16  # kernels are compiled anew for widths that are not
        if use_kernels(space.device):
            from nexus_vllm.kernels.units import tables as build
        else:
            build = unit_tables
        tables, tokens = build(
            [(held.units, held.counts_there) if held else None for held, _ in dealt],
            first.tolist(),
            tail.tolist(),
            table,
            sent(torch.from_numpy(lengths), space.device) if exact is None else exact,
            space.base,
            heads,
            block_size,
            width,
        )
        first_rows = per_head_starts(starts[: requests + 1], heads)
        return cls(
            flat=space.flat,
            heads=heads,
            tables=tables,
            lengths=tokens,
            lengths_cpu=known.flatten(1, 2).int(),
            starts=sent(first_rows, space.device),
            starts_cpu=first_rows,
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


@dataclass(frozen=True)
class _Known:
    """A step's batch, what it was made from, and how long its rows were."""

    key: list[tuple[Holding | None, int, bytes]]
    lengths: Tensor
    exact: Tensor
    batch: UnevenBatch


class UnitTables:
    """The batch over units, step by step.

    On a GPU it is built anew at each step, by one kernel for all layers: it writes a few megabytes,
    and the page table that it reads is never read by the host, so nobody has to tell of evictions,
    moved rows, restarted requests or other pages.

    On a CPU the tables of the last step are kept for as long as nothing but tokens in tail pages is
    new: if every row's holding, first block and tail pages are the same, compared by content.
    """

    def __init__(self, space: UnitSpace) -> None:
        self.space = space
        self._known: _Known | None = None

    def batch(
        self,
        rows: list[Sequence | None],
        table: Tensor,
        lengths: np.ndarray,
        starts: np.ndarray,
        block_size: int,
        exact: Tensor | None = None,
    ) -> UnevenBatch:
        """The same as `UnevenBatch.of(space, ...)`."""
        if table.device.type != "cpu":
            return UnevenBatch.of(self.space, rows, table, lengths, starts, block_size, exact)
        requests, heads = len(rows), self.space.heads
        lengths, starts = lengths[:requests].copy(), starts[: requests + 1]
        told = torch.from_numpy(lengths)
        exact = told if exact is None else exact[:requests].clone()
        pages = table.numpy()
        key = []
        for sequence, row, length in zip(rows, pages, lengths.tolist(), strict=False):
            holding, first = dealt_out(sequence)
            key.append((holding, first, row[first : -(-length // block_size)].tobytes()))
        known = self._known
        if known is not None and known.key == key:
            first_rows = per_head_starts(starts, heads)
            batch = replace(
                known.batch,
                lengths=known.batch.lengths + (exact - known.exact).int().repeat(heads),
                lengths_cpu=known.batch.lengths_cpu + (told - known.lengths).int().repeat(heads),
                starts=first_rows,
                starts_cpu=first_rows,
            )
        else:
            batch = UnevenBatch.of(self.space, rows, table, lengths, starts, block_size, exact)
        self._known = _Known(key, told, exact, batch)
        return batch


def worth_folding(sequences: int, threads: int) -> bool:
    """Whether decoding on a CPU should show a KV head's query heads to the kernel as tokens of one
    head.

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
