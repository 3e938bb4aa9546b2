"""Keys and values are read right out of a page however a backend stores them, or not at all."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nexus_vllm.engine.layout import probe

BLOCK, DIM, HEADS = 32, 8, 3


def layer(place: Tensor) -> SimpleNamespace:
    """A stand-in for vLLM's layer, whose backend puts key (token, dim) at place[token, dim], and
    values, in order, where no key is."""
    others = torch.ones(2 * BLOCK * DIM, dtype=torch.bool)
    others[place.flatten()] = False
    left = others.nonzero().flatten()[: BLOCK * DIM].view(BLOCK, DIM)

    def do_kv_cache_update(
        layer: object, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        units = cache.view(len(cache), HEADS, -1)
        for token, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, BLOCK)
            for head in range(HEADS):
                units[page, head, place[offset]] = key[token, head]
                units[page, head, left[offset]] = value[token, head]

    return SimpleNamespace(
        head_size=DIM, impl=SimpleNamespace(do_kv_cache_update=do_kv_cache_update)
    )


tokens, dims = torch.arange(BLOCK)[:, None], torch.arange(DIM)
LAYOUTS = {
    "keys, then values": tokens * DIM + dims,
    "transposed": dims * BLOCK + tokens,
    "values first, descending": 2 * BLOCK * DIM - 1 - (tokens * DIM + dims),
    "key and value of a token side by side": tokens * 2 * DIM + dims,
    "tiled by pairs of tokens": (tokens // 2) * 2 * DIM + dims * 2 + tokens % 2,
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_are_read_from_any_layout(name: str, dtype: torch.dtype) -> None:
    backend = layer(LAYOUTS[name])
    # All layers of vLLM share one allocation: a layer's pages are a view with strides of its own.
    pool = torch.zeros(4, 2, HEADS, BLOCK, 2 * DIM, dtype=dtype)
    cache = pool[:, 1]
    keys, values = torch.randn(2, 2 * BLOCK, HEADS, DIM).to(dtype)
    slots = torch.cat([torch.arange(BLOCK) + 3 * BLOCK, torch.arange(BLOCK) + BLOCK])
    filled = cache.contiguous()
    backend.impl.do_kv_cache_update(backend, keys, values, filled, slots)
    cache.copy_(filled)
    for written, layout in ((keys, probe(backend, cache)), (values, probe(backend, cache, True))):
        read = layout.read(cache, torch.tensor([3, 1]))
        assert torch.equal(read, written.view(2, BLOCK, HEADS, DIM).transpose(1, 2))


def test_an_unreadable_layout_is_refused() -> None:
    """Two keys in one place: nothing could read them back."""
    with pytest.raises(RuntimeError, match="cannot read keys"):
        probe(layer(torch.zeros(BLOCK, DIM, dtype=torch.long)), torch.zeros(1, HEADS, BLOCK, 16))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [1, HEADS], ids=["units of uneven heads", "pages"])
def test_reading_some_pages_costs_nothing_of_the_others(name: str, heads: int) -> None:
    """The pool is most of a machine's memory; copying it for one sequence takes seconds."""
    backend = layer(LAYOUTS[name])
    scratch = torch.zeros(1, HEADS, BLOCK, 2 * DIM)
    cache = torch.zeros(4096, 2, heads, BLOCK, 2 * DIM)[:, 1]
    pages = torch.tensor([3, 1, 4000])
    for values in (False, True):
        layout = probe(backend, scratch, values)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            layout.read(cache, pages)
        taken = sum(max(0, event.self_cpu_memory_usage) for event in recorded.events())
        asked = len(pages) * heads * BLOCK * 2 * DIM * cache.element_size()
        assert 0 < taken <= 4 * asked
