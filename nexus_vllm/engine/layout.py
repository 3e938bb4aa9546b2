"""Where keys lie inside a KV page, found out by writing some.

Backends store a (page, KV head) unit of `block * 2 * head size` numbers in their own order: plain,
transposed or tiled for an instruction set. Moving a unit needs no knowledge of that; scoring does.
Asking the backend's own cache-update function is right for every order, and proves it.
"""

from typing import Any

import torch
from torch import Tensor

_DIGIT = 64
"""Probe values are 1.._DIGIT: exact in every float format, and not the 0 of an unwritten place."""


def key_order(layer: Any, cache: Tensor) -> Tensor:
    """For each (token, dimension) of a key, its place in a flattened unit: int64 [block * D].

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
        keys = (numbers // scale % _DIGIT + 1).to(device=cache.device, dtype=cache.dtype)
        layer.impl.do_kv_cache_update(
            layer, keys.contiguous(), torch.zeros_like(keys), scratch, slots
        )
        seen = scratch.view(heads, -1).float().cpu().long()
        written &= seen > 0
        place += (seen - 1) * scale
        digits, scale = digits + 1, scale * _DIGIT
    orders = []
    for head in range(heads):
        where = written[head].nonzero().flatten()
        found = place[head, where]
        if len(where) != total or not torch.equal(found.sort().values, torch.arange(total)):
            raise RuntimeError(f"KV eviction cannot read keys of {type(layer.impl).__name__}")
        orders.append(where[found.argsort()])
    if any(not torch.equal(order, orders[0]) for order in orders):
        raise RuntimeError(f"{type(layer.impl).__name__} stores KV heads in different orders")
    return orders[0].to(cache.device)


def read_keys(cache: Tensor, pages: Tensor, order: Tensor, dim: int) -> Tensor:
    """The keys of whole pages: [len(pages), KV heads, block, D]."""
    _, heads, block, _ = cache.shape
    units = cache[pages].view(len(pages), heads, -1)
    return units.index_select(-1, order).view(len(pages), heads, block, dim)
