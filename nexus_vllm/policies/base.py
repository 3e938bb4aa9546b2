"""What a policy sees and returns, and the attention maps that policies share.

A policy gives each live block of a row one weight; a selector (`nexus_vllm.selectors`) turns
weights into the kept set. Rows are the leading dimensions of an Observation, written "..." below.
Usually they are the layers. To keep a separate set per KV head, make the KV head a leading
dimension of size Hkv instead: queries [L, Hkv, W, Hq/Hkv, D], keys [L, Hkv, N, 1, b, D],
block_ids [L, Hkv, N]. Rows are independent, so a caller short of memory may pass fewer at a time.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

Heads = Literal["per-head", "mean"]

MAX_LOGITS = 1 << 20
"""Float32 logits held at once (4 MiB), unless one KV head of one row needs more.

A CPU reads them several times, so they should stay in its caches, and glibc takes far larger
buffers from the system anew each time.
"""


@dataclass(frozen=True)
class Observation:
    """The state of one sequence at one eviction; all tensors on one device. Read only.

    queries: [..., W, Hq, D], the last W rotated queries, oldest first.
    query_positions: [W] int64, original token positions of those queries.
    keys: [..., N, Hkv, b, D], the rotated keys of the N live full blocks.
      All three are None for a policy that needs no window.
    block_ids: [..., N] int64, original logical index of each live block, distinct, in no particular
      order. The key at `offset` in a block has position block_id * b + offset.
    scale: what logits are multiplied by, usually D ** -0.5.
    candidates: [..., N] bool, False for blocks that stay anyway (sink, recency).
    seed, event: address of this eviction for counter-based random numbers (`nexus_vllm.rng`).
    layers: [...] int64, the identity of each row for the same purpose.
    Raises ValueError when shapes do not fit together.
    """

    queries: Tensor | None
    query_positions: Tensor | None
    keys: Tensor | None
    block_ids: Tensor
    scale: float
    candidates: Tensor
    seed: int
    event: int
    layers: Tensor

    def __post_init__(self) -> None:
        ids = self.block_ids.shape
        expected = {"candidates": (self.candidates, ids), "layers": (self.layers, ids[:-1])}
        if self.queries is not None and self.keys is not None and self.query_positions is not None:
            *_, window, query_heads, dim = self.queries.shape
            kv_heads, block = self.keys.shape[-3:-1]
            expected["queries"] = (self.queries, (*ids[:-1], window, query_heads, dim))
            expected["keys"] = (self.keys, (*ids, kv_heads, block, dim))
            expected["query_positions"] = (self.query_positions, (window,))
            if query_heads % kv_heads:
                raise ValueError(
                    f"Observation: {query_heads} query heads are no multiple of {kv_heads} KV heads"
                )
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(
                    f"Observation: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}"
                )

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, query_positions, keys). Raises ValueError if one of them was left out."""
        if self.queries is None or self.query_positions is None or self.keys is None:
            raise ValueError(
                "this policy needs queries, query_positions and keys; the observation lacks them"
            )
        return self.queries, self.query_positions, self.keys


class Policy(ABC):
    """Gives each live block a weight. Frozen dataclass: its fields are the method's parameters."""

    name: ClassVar[str]
    needs_window: ClassVar[bool]
    selector: ClassVar[str | None] = None
    """The one selector this policy makes sense with, over the configured one; None: any."""

    @abstractmethod
    def weights(self, obs: Observation) -> Tensor:
        """Weights [..., N] float32, finite and >= 0, higher for blocks more worth keeping.

        They must depend on block ids, not on the order of the N axis, and each row on itself alone.
        Entries of blocks that are not candidates are ignored, but must be finite too.
        """


def block_attention(obs: Observation, heads: Heads = "per-head") -> Tensor:
    """Block attention maps of the window (Eq. 1).

    P = softmax(scale Q K^T), S = row-normalise(BlockSum_b(P)).
    heads: "per-head" gives [..., Hq, W, N], query head h against KV head h // (Hq / Hkv); "mean"
      averages the queries over Hq and the keys over Hkv before the product, as the paper does, and
      gives [..., 1, W, N].
    Returns float32. A query does not see keys at later positions than its own. Rows sum to 1, or
    to 0 where a query sees no key at all. The softmax runs over the live full blocks only, so its
    denominator and the row normalisation are one division. Holds about MAX_LOGITS logits at a time.
    Raises ValueError on another `heads`, or without a window.
    """
    queries, positions, keys = obs.window()
    if heads not in get_args(Heads):
        raise ValueError(f"heads is {heads!r}, choose one of {', '.join(get_args(Heads))}")
    lead, size = obs.block_ids.shape[:-1], obs.block_ids.shape[-1]
    window, query_heads, dim = queries.shape[-3:]
    kv_heads, block = keys.shape[-3:-1]
    queries = queries.reshape(-1, window, query_heads, dim)
    keys = keys.reshape(-1, size, kv_heads, block, dim)
    ids = obs.block_ids.reshape(-1, size)
    offsets = torch.arange(block, device=ids.device)
    by_dim = keys.stride(-2) == 1  # as some caches lay keys out: the product takes either order
    if heads == "mean":
        query_heads = kv_heads = 1
    group = query_heads // kv_heads
    tiny, lowest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).min

    maps = queries.new_empty((len(ids), kv_heads, window, group, size), dtype=torch.float32)
    per_head = max(1, window * group * size * block)
    row_step = max(1, MAX_LOGITS // (per_head * kv_heads))
    head_step = max(1, MAX_LOGITS // per_head)
    for first_row in range(0, len(ids), row_step):
        rows = slice(first_row, first_row + row_step)
        q_rows, k_rows = queries[rows], keys[rows]
        if heads == "mean":
            q_rows = q_rows.mean(dim=2, keepdim=True, dtype=torch.float32)
            k_rows = k_rows.mean(dim=2, keepdim=True, dtype=torch.float32)
        q_rows = q_rows.unflatten(2, (kv_heads, group))
        last = positions[:, None] - ids[rows, None, :] * block  # [r, W, N], offset seen last
        # Blocks that some query does not see whole: few, since the window is at the end.
        late = (last < block - 1).flatten(0, 1).any(0).nonzero().flatten()
        hidden = offsets > last[:, None, :, None, late, None]  # [r, 1, W, 1, n, b]
        for first_head in range(0, kv_heads, head_step):
            some = slice(first_head, first_head + head_step)
            # To the base 2: torch's exp is several times slower on CPU, most of all near zero.
            q = q_rows[:, :, some].float().transpose(1, 2) * (obs.scale / math.log(2))
            k = k_rows[:, :, some].float()  # [r, N, h, b, D]
            if by_dim:
                k = k.permute(0, 2, 4, 1, 3).flatten(3)  # [r, h, D, Nb]
            else:
                k = k.transpose(1, 2).flatten(2, 3).mT
            logits = (q.flatten(2, 3) @ k).view(*q.shape[:-1], size, block)
            partly = logits.index_select(-2, late).masked_fill_(hidden, -torch.inf)
            logits.index_copy_(-2, late, partly)
            highest = logits.amax(dim=(-2, -1), keepdim=True).clamp_(min=lowest)
            mass = logits.sub_(highest).exp2_().sum(-1)
            maps[rows, some] = mass / mass.sum(-1, keepdim=True).clamp_(min=tiny)
    return maps.transpose(2, 3).reshape(*lead, query_heads, window, size)
