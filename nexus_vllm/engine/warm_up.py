"""Evictions before the first request, so that no request waits for a kernel to be compiled.

Triton compiles a kernel as it is first launched, for the constants and types that it is launched
with. That takes a second or so, in which the whole server would stand still.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from nexus_vllm import allocators
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.unit_batch import UnitTables
from nexus_vllm.plan import Eviction

if TYPE_CHECKING:
    from nexus_vllm.engine.evictor import Evictor
    from nexus_vllm.engine.uneven import UnevenEvictor

SHORTEST = 8
"""Blocks of the shortest sequence, if half of it can hold what must stay: fewer make no difference
to any kernel."""


def warm_up(even: "Evictor", uneven: "UnevenEvictor", longest: int) -> None:
    """Evict from sequences that are not there, with every policy that needs no replay.

    With equal heads and with uneven ones, at each length up to `longest` blocks for which a kernel
    is compiled anew. Nothing may be in the pool yet: pages from 1 on are overwritten.
    """
    cache = even.layers[0].cache
    longest, block = min(longest, len(cache) - 1), cache.shape[2]
    for name, policy in even.policies.items():
        if policy.needs_replay:
            continue
        settings = even.settings.of(name)
        shortest = 2 * (settings.sink_blocks + settings.recency_blocks + 1)
        dealt = policy, allocators.make("per-head")
        for size in lengths(shortest, longest):
            for allocator in ("uniform", "per-head"):
                sequence = Sequence(0)
                for eviction in _evictions(name, allocator, size, block):
                    if allocator == "uniform":
                        even.evict(sequence, eviction)
                    else:
                        uneven.evict(sequence, eviction, *dealt)
            _show(uneven, sequence, size + 1)


def lengths(shortest: int, longest: int) -> Iterator[int]:
    """Of sequences, in blocks: powers of two, by which kernels differ, and the longest."""
    size = SHORTEST
    while size < shortest:
        size *= 2
    while size < longest:
        yield size
        size *= 2
    if longest >= max(shortest, SHORTEST):
        yield longest


def _evictions(policy: str, allocator: str, size: int, block: int) -> Iterator[Eviction]:
    """Two: of half the blocks, right after the prompt, and of one more once as many have come."""
    pages, target, tokens = list(range(1, size + 1)), size // 2, size * block
    kept = pages[target:]
    yield Eviction("", policy, allocator, 0, 0, tokens, 0, target, pages, kept, [], tokens)
    live = [*kept, 1]
    yield Eviction(
        "", policy, allocator, 0, 1, tokens + block, target, target + 1, live, live[1:], [], tokens
    )


def _show(uneven: "UnevenEvictor", sequence: Sequence, size: int) -> None:
    """The tables of a step in which the sequence, evicted from, gets its next token."""
    block, device = uneven.layers[0].cache.shape[2], uneven.space.device
    length = np.array([size * block])
    UnitTables(uneven.space).batch(
        [sequence],
        torch.zeros(1, size, dtype=torch.int32, device=device),
        length,
        np.array([0, 1]),
        block,
        torch.full((1,), size * block, dtype=torch.int32, device=device),
    )
