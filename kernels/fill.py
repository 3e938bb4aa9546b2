"""fill: copy kept units, or whole pages, into the holes that an eviction leaves."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024
"""int32 words that a program copies: 16 bytes twice for each of 64 threads."""


def reference(
    cache: Tensor, source: Tensor, target: Tensor, words: int, counts: Tensor | None = None
) -> None:
    """Copy ranges of `words` int32 words within `cache`, which is flat.

    source, target: [R, C], or [C] for one row, int64: where each range begins and goes, in words.
      No range is both read and written, so the order of copies does not matter.
    counts: [R] int64; of row r only the first `counts[r]` copies are made. None: all. So the host
      need not know how many there are, only C.
    """
    most = source.shape[-1]
    source, target = source.flatten(), target.flatten()
    if counts is not None and len(source):
        made = (torch.arange(most, device=cache.device) < counts[:, None]).flatten()
        # What is not to be made becomes one that is, or if there is none, a range copied to itself.
        one = made.int().argmax(keepdim=True)
        source, target = source.where(made, source[one]), target.where(made, target[one])
        source = source.where(made.any(), target)
    inside = torch.arange(words, device=cache.device)
    cache[target[:, None] + inside] = cache[source[:, None] + inside]


def fill(
    cache: Tensor, source: Tensor, target: Tensor, words: int, counts: Tensor | None = None
) -> None:
    """The same as `reference`, one launch. Raises ValueError unless 16-byte accesses are possible,
    which takes that `source` and `target` are multiples of 4."""
    if cache.dtype != torch.int32 or cache.ndim != 1 or not cache.is_contiguous():
        raise ValueError(f"fill: the cache must be flat int32, not {cache.dtype} {cache.shape}")
    if words % 4 or cache.data_ptr() % 16:
        raise ValueError(f"fill: {words} words at {cache.data_ptr():#x} are not 16-byte aligned")
    if source.numel():
        grid = (source.numel(), triton.cdiv(words, WORDS))
        _fill[grid](
            cache, source.contiguous(), target.contiguous(), words,
            source if counts is None else counts.contiguous(), source.shape[-1],
            GUARDED=counts is not None, WORDS=WORDS, num_warps=2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["most"])
def _fill(
    cache, source, target, words, counts, most, GUARDED: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    copy, part = tl.program_id(0), tl.program_id(1)
    # Both are multiples of 4 words: a unit is, and so is where it starts.
    old = tl.multiple_of(tl.load(source + copy), 4)
    new = tl.multiple_of(tl.load(target + copy), 4)
    if GUARDED:
        words = tl.where(copy % most < tl.load(counts + copy // most), words, 0)
    inside = part * WORDS + tl.arange(0, WORDS)
    held = inside < words
    tl.store(cache + new + inside, tl.load(cache + old + inside, mask=held), mask=held)
