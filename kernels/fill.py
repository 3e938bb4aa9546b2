"""fill: copy kept units, or whole pages, into the holes that an eviction leaves."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024
"""int32 words that a program copies: 16 bytes twice for each of 64 threads."""


def reference(cache: Tensor, source: Tensor, target: Tensor, words: int) -> None:
    """cache [int32 words]; source, target [C] int64, where copies of `words` words begin and go.

    No range is both read and written, so the order of copies does not matter.
    """
    inside = torch.arange(words, device=cache.device)
    cache[target[:, None] + inside] = cache[source[:, None] + inside]


def fill(cache: Tensor, source: Tensor, target: Tensor, words: int) -> None:
    """The same as `reference`. Raises ValueError unless 16-byte accesses are possible."""
    if cache.dtype != torch.int32 or cache.ndim != 1 or not cache.is_contiguous():
        raise ValueError(f"fill: the cache must be flat int32, not {cache.dtype} {cache.shape}")
    if words % 4 or cache.data_ptr() % 16:
        raise ValueError(f"fill: {words} words at {cache.data_ptr():#x} are not 16-byte aligned")
    if len(source):
        grid = (len(source), triton.cdiv(words, WORDS))
        _fill[grid](cache, source, target, words, WORDS, num_warps=2)


@triton.jit
def _fill(cache, source, target, words, WORDS: tl.constexpr):
    copy, part = tl.program_id(0), tl.program_id(1)
    # Both are multiples of 4 words: a unit is, and so is where it starts.
    old = tl.multiple_of(tl.load(source + copy), 4)
    new = tl.multiple_of(tl.load(target + copy), 4)
    inside = part * WORDS + tl.arange(0, WORDS)
    held = inside < words
    tl.store(cache + new + inside, tl.load(cache + old + inside, mask=held), mask=held)
