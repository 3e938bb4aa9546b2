"""Keys and values of live blocks, read by kernels where they lie in vLLM's one allocation."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nexus_vllm.engine import ops
from nexus_vllm.engine.layout import UnitLayout, rule_of
from nexus_vllm.kernels import ranked, score, statistics, walk
from nexus_vllm.kernels.rows import Rows
from nexus_vllm.policies.base import Heads, Pool, Tokens

if TYPE_CHECKING:
    from nexus_vllm.engine.evictor import Layer


@dataclass(frozen=True)
class Steps:
    """Where the keys, or the values, of a unit lie: the first number, and from one token and from
    one dimension to the next."""

    first: int
    token: int
    dim: int

    @classmethod
    def of(cls, layout: UnitLayout, cache: Tensor) -> "Steps | None":
        """In the memory of `cache` [pages, heads, block, content]; None where no rule gives it."""
        order, content = np.array(layout.order.tolist()), cache.shape[-1]
        places = order // content * cache.stride(2) + order % content * cache.stride(3)
        rule = rule_of(places)
        return None if rule is None else cls(*rule)


def dense(cache: Tensor) -> bool:
    """Whether a page of `cache` [pages, ...] lies in one piece, in whatever order."""
    expected = 1
    inside = zip(cache.shape[1:], cache.stride()[1:], strict=True)
    for size, stride in sorted(inside, key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Memory:
    """All layers' caches as one flat array, and where in it their units start.

    flat: [numbers]. base: [L] int64, where each layer's first unit starts. page, head: from one
    page, and from one KV head, to the next. values: None where they have not been probed.
    """

    flat: Tensor
    base: Tensor
    page: int
    head: int
    heads: int
    block: int
    head_size: int
    keys: Steps
    values: Steps | None

    @classmethod
    def of(cls, layers: "list[Layer]") -> "Memory | None":
        """None where keys or values lie in an order that kernels do not know.

        Raises ValueError where layers do not share an allocation, or differ.
        """
        first = layers[0]
        cache, storage = first.cache, first.cache.untyped_storage()
        for layer in layers:
            if (
                layer.cache.untyped_storage().data_ptr() != storage.data_ptr()
                or layer.cache.shape != cache.shape
                or layer.cache.stride() != cache.stride()
            ):
                raise ValueError(
                    f"kernels need all layers in one allocation and alike; layer {layer.index} is "
                    f"{tuple(layer.cache.shape)} with strides {layer.cache.stride()}"
                )
        if not dense(cache):
            raise ValueError(
                f"kernels need each page of a layer in one piece; strides are {cache.stride()}"
            )
        keys = Steps.of(first.keys, cache)
        values = None if first.values is None else Steps.of(first.values, cache)
        if keys is None or (values is None and first.values is not None):
            return None
        base = torch.tensor([layer.cache.storage_offset() for layer in layers])
        _, heads, block, _ = cache.shape
        return cls(
            torch.as_strided(cache, (storage.nbytes() // cache.element_size(),), (1,), 0),
            ops.sent(base, cache.device),
            cache.stride(0),
            cache.stride(1),
            heads,
            block,
            first.head_size,
            keys,
            values,
        )

    def own(self, layers: slice, pages: Tensor) -> Tensor:
        """Where each layer's and head's units of these pages start, [layers, heads, len(pages)]."""
        heads = torch.arange(self.heads, device=pages.device) * self.head
        return self.base[layers, None, None] + pages * self.page + heads[:, None]

    def copy_pages(self, source: Tensor, target: Tensor, counts: Tensor) -> None:
        """Copy whole pages, of each layer the first `counts` [L] of source and target [L, C]."""
        first = self.base[:, None]
        size = self.heads * self.block * 2 * self.head_size
        ops.copy(self.flat, first + source * self.page, first + target * self.page, size, counts)

    def reader(self, units: Tensor, blocks: Tensor, counts: Tensor) -> "KernelReader":
        """Of the units that start at `units` [..., H, N], which hold `blocks` [..., H, N].

        counts: [..., H] int64, how many of the N there are. H is 1 where every row is one KV head
        of its own, or else `heads`.
        """
        *lead, heads, size = units.shape
        rows = Rows(
            cache=self.flat,
            units=units.reshape(-1, size).contiguous(),
            blocks=blocks.reshape(-1, size).contiguous(),
            counts=counts.reshape(-1).contiguous(),
            block=self.block,
            head_size=self.head_size,
            token_step=self.keys.token,
            dim_step=self.keys.dim,
            keys=self.keys.first,
        )
        return KernelReader(rows, self, tuple(lead), heads)


@dataclass(frozen=True)
class KernelReader:
    """A `policies.base.Reader` of R = lead x heads rows."""

    rows: Rows
    memory: Memory
    lead: tuple[int, ...]
    heads: int

    def keys(self) -> Tensor:
        return self._by_block(self.rows.gather())

    def values(self) -> Tensor:
        return self._by_block(self._values().gather(values=True))

    def block_attention(
        self, queries: Tensor, positions: Tensor, scale: float, heads: Heads
    ) -> Tensor:
        lse = self._block_lse(queries, positions, scale, heads)
        maps = lse.softmax(-1).nan_to_num_(nan=0.0)  # of a query that sees nothing
        return maps.reshape(*self.lead, -1, *maps.shape[-2:])

    def walk(
        self,
        queries: Tensor,
        positions: Tensor,
        scale: float,
        heads: Heads,
        *,
        candidates: Tensor | None,
        order: list[int],
        lam: float,
        pool_rows: Pool,
        start: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        lse = self._block_lse(queries, positions, scale, heads)

        each = self.heads if heads == "per-head" else 1
        inside, before = self._by_row(candidates, each), self._by_row(start, each)
        found = walk.walk(lse, inside, tuple(order), lam, pool_rows, before)
        score, ended = (part.reshape(*self.lead, -1, part.shape[-1]) for part in found)
        return score, ended

    def summed_attention(self, queries: Tensor, positions: Tensor, scale: float) -> Tensor:
        found = walk.pooled(self._block_lse(queries, positions, scale, "per-head"), "sum")
        return found.reshape(*self.lead, -1, found.shape[-1])

    def token_attention(
        self, queries: Tensor, positions: Tensor, scale: float, rows: Pool, heads: Pool
    ) -> Tensor:
        asked = self._asked(queries, positions, "per-head")
        totals = score.block_lse(self.rows, *asked, scale).logsumexp(-1)
        found = score.token_attention(self.rows, *asked, totals, scale, rows, heads)
        return found.view(*self.lead, self.heads, *found.shape[1:])

    def ranked(self, scores: Tensor, candidates: Tensor, tokens: Tokens) -> Tensor:
        by_row = scores.transpose(len(self.lead), len(self.lead) + 1).reshape(
            *self.rows.shape, self.rows.block
        )
        inside = self._by_row(candidates, self.heads)
        assert inside is not None
        return ranked.ranked(by_row, inside, tokens).view(*self.lead, self.heads, -1)

    def key_norms(self) -> Tensor:
        return self._by_block(statistics.statistics("norm", self.rows))

    def key_cosines(self) -> Tensor:
        anchor = statistics.anchor(self.rows)
        return self._by_block(statistics.statistics("cosine", self.rows, anchor))

    def value_ranges(self) -> Tensor:
        return self._by_block(statistics.statistics("range", self._values()))

    @staticmethod
    def _by_row(told: Tensor | None, heads: int) -> Tensor | None:
        """[R, N] of [..., N], the same for so many heads."""
        if told is None:
            return None
        return told.reshape(-1, told.shape[-1]).repeat_interleave(heads, dim=0)

    def _by_block(self, found: Tensor) -> Tensor:
        """[..., N, heads, b, ...] of what was found of each row, [R, N, b, ...]."""
        found = found.view(*self.lead, self.heads, *found.shape[1:])
        return found.transpose(len(self.lead), len(self.lead) + 1)

    def _block_lse(self, queries: Tensor, positions: Tensor, scale: float, heads: Heads) -> Tensor:
        """[R, G, W, N], or with averaged heads [R / heads, 1, W, N]."""
        rows = self.rows if heads == "per-head" else self._averaged()
        return score.block_lse(rows, *self._asked(queries, positions, heads), scale)

    def _asked(self, queries: Tensor, positions: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries by row, [R, G, W, D], and positions [R, W], of queries [..., W, Hq, D]."""
        queries = queries.reshape(-1, *queries.shape[-3:])
        if heads == "mean":
            asked = queries.mean(dim=2, dtype=torch.float32)[:, None]
        else:
            asked = queries.unflatten(2, (self.heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        return asked, positions.expand(len(asked), -1).contiguous()

    def _values(self) -> Rows:
        steps = self.memory.values
        if steps is None:
            raise ValueError("this policy needs values; the layers' have not been probed")
        return replace(
            self.rows, token_step=steps.token, dim_step=steps.dim, values=steps.first, keys=0
        )

    def _averaged(self) -> Rows:
        """One row for all heads, whose keys are averaged."""
        if self.heads == 1:
            return self.rows
        rows = self.rows
        return replace(
            rows,
            units=rows.units[:: self.heads].contiguous(),
            blocks=rows.blocks[:: self.heads].contiguous(),
            counts=rows.counts[:: self.heads].contiguous(),
            heads=self.heads,
            head_step=self.memory.head,
        )
