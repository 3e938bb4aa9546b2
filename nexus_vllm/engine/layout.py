"""Where keys and values lie inside a KV page, found out by writing some.

Backends store a (page, KV head) unit of `block * 2 * head size` numbers in their own order: plain,
transposed or tiled for an instruction set. Moving a unit needs no knowledge of that; scoring does.
Asking the backend's own cache-update function is right for every order, and proves it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

_DIGIT = 64
"""Probe values are 1.._DIGIT: exact in every float format, and not the 0 of an unwritten place."""


def rule_of(places: np.ndarray) -> tuple[int, int, int] | None:
    """The first of places [block, D], and from one token and from one dimension to the next; None
    where they follow no such rule."""
    block, dim = places.shape
    first = int(places[0, 0])
    token = int(places[1, 0]) - first if block > 1 else 0
    step = int(places[0, 1]) - first if dim > 1 else 0
    rule = first + token * np.arange(block)[:, None] + step * np.arange(dim)
    return (first, token, step) if np.array_equal(rule, places) else None


@dataclass(frozen=True)
class UnitLayout:
    """Where the keys, or the values, of a (page, KV head) unit are in its `block * 2 * D` numbers.

    `order` [block, D]: the place of each (token, dimension), and `start` that of the first one.
    `span`: the lowest place and the one after the highest. `steps`: from one token and from one
    dimension to the next, where places follow such a rule, so that they can be read as a view.
    """

    order: Tensor
    start: int
    span: tuple[int, int]
    steps: tuple[int, int] | None

    @classmethod
    def of(cls, order: Tensor) -> "UnitLayout":
        """The layout of an order [block, D], by rule if there is one."""
        first, *steps = rule_of(order.cpu().numpy()) or (int(order[0, 0]), -1, -1)
        span = int(order.min()), int(order.max()) + 1
        return cls(order, first, span, (steps[0], steps[1]) if min(steps) >= 0 else None)

    def read(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Those of whole pages, [len(pages), KV heads, block, D]; `cache` is a layer's."""
        return self.read_all([cache], pages)[0]

    def read_all(self, caches: list[Tensor], pages: Tensor) -> Tensor:
        """The same of several layers with this layout, [layers, len(pages), KV heads, block, D].

        Only the view is in this order. In memory a head's keys are next to one another, so that a
        product takes them as they are: dimension by dimension where the cache has them so.
        """
        first, end = self.span
        block, dim = self.order.shape
        sources = [cache.flatten(2)[:, :, first:end].transpose(0, 1) for cache in caches]
        heads, count = sources[0].shape[0], len(pages)
        if self.steps == (1, block):
            keys = caches[0].new_empty(len(caches), heads, dim, count, block)
            for source, into in zip(sources, keys, strict=True):
                by_dim = source.unflatten(-1, (dim, block)).transpose(1, 2)
                torch.index_select(by_dim, 2, pages, out=into)
            return keys.permute(0, 3, 1, 4, 2)
        units = caches[0].new_empty(len(caches), heads, count, end - first)
        for source, into in zip(sources, units, strict=True):
            into.copy_(source[:, pages])  # index_select would first copy the whole cache
        units = units.transpose(1, 2)
        if self.steps is None:
            taken = units.index_select(-1, self.order.flatten() - first)
            return taken.unflatten(-1, self.order.shape)
        shape = (*units.shape[:3], block, dim)
        strides = (*units.stride()[:3], *self.steps)
        return units.as_strided(shape, strides, self.start - first)


def probe(layer: "Attention", cache: Tensor, values: bool = False) -> UnitLayout:
    """Find out how a layer's backend stores keys, or values.

    `layer` is vLLM's attention layer, `cache` its KV cache [pages, KV heads, block, 2 * D], of
    which only shape and dtype are used. Raises RuntimeError unless the places are distinct and the
    same in every head.
    """
    _, heads, block, content = cache.shape
    dim = layer.head_size
    total, place = block * dim, torch.zeros(heads, block * content, dtype=torch.long)
    numbers = torch.arange(total).view(block, 1, dim).expand(block, heads, dim)
    slots = torch.arange(block, device=cache.device)
    digits, scale = 0, 1
    written = torch.ones_like(place, dtype=torch.bool)
    while scale < total or digits == 0:
        scratch = torch.zeros_like(cache[:1]).contiguous()
        given = (numbers // scale % _DIGIT + 1).to(device=cache.device, dtype=cache.dtype)
        given, nothing = given.contiguous(), torch.zeros_like(given)
        pair = (nothing, given) if values else (given, nothing)
        layer.impl.do_kv_cache_update(layer, *pair, scratch, slots)
        seen = scratch.view(heads, -1).float().cpu().long()
        written &= seen > 0
        place += (seen - 1) * scale
        digits, scale = digits + 1, scale * _DIGIT
    kind = type(layer.impl).__name__
    orders: list[Tensor] = []
    for head in range(heads):
        where = written[head].nonzero().flatten()
        found = place[head, where]
        if len(where) != total or not torch.equal(found.sort().values, torch.arange(total)):
            what = "values" if values else "keys"
            raise RuntimeError(f"KV eviction cannot read {what} of {kind}")
        orders.append(where[found.argsort()])
    if any(not torch.equal(order, orders[0]) for order in orders):
        raise RuntimeError(f"{kind} stores KV heads in different orders")
    return UnitLayout.of(orders[0].view(block, dim).to(cache.device))
