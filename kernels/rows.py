"""What kernels are told about the rows of an eviction step.

A *row* is one (sequence, layer, KV head). Its keys and values are units of `block * 2 * head size`
numbers, anywhere in the pool's one allocation; where they start is known to the host, which is why
nothing here reads from the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The live blocks of R rows, N of them or fewer each.

    cache: flat view of the KV allocation, [numbers], in its own dtype.
    units: [R, N] int64, where in `cache` each block of each row starts.
    blocks: [R, N] int64, its original block id.
    counts: [R] int64, how many blocks a row has, the first ones; the rest is never looked at.
    block, head_size: tokens of a block, numbers of a key.
    token_step, dim_step: from one token's key to the next one's, and from one of its numbers to the
      next; 1 but for the caches of some CPU backends.
    keys, values: from the start of a unit to its first key, and to its first value.
    heads: KV heads whose keys a row averages, each `head_step` numbers after the one before.
    scales: [2, R] float32, what a row's stored keys, and values, are multiplied by (fp8: vLLM's
      `_k_scale` and `_v_scale` of a layer, one for all of it or one for each KV head); None: 1.
    """

    cache: Tensor
    units: Tensor
    blocks: Tensor
    counts: Tensor
    block: int
    head_size: int
    token_step: int
    dim_step: int = 1
    keys: int = 0
    values: int = 0
    heads: int = 1
    head_step: int = 0
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """R and N."""
        rows, blocks = self.units.shape
        return rows, blocks

    @property
    def exists(self) -> Tensor:
        """Which blocks there are, [R, N] bool."""
        return torch.arange(self.shape[1], device=self.counts.device) < self.counts[:, None]

    @property
    def alignment(self) -> int:
        """The most numbers, up to 16 bytes' worth, that all offsets are a multiple of."""
        most = 16 // self.cache.element_size()
        unit = self.block * 2 * self.head_size
        steps = self.token_step | self.head_size | self.keys | self.values | self.head_step | unit
        return min(most, steps & -steps)

    def gather(self, values: bool = False) -> Tensor:
        """Keys, or values, [R, N, block, D], in the cache's dtype, or in float32 if they are
        averaged over heads, or fp8. What a row lacks is zeros.
        """
        device = self.cache.device
        first = self.units + (self.values if values else self.keys)
        token = torch.arange(self.block, device=device) * self.token_step
        inside = token[:, None] + torch.arange(self.head_size, device=device) * self.dim_step
        place = first.masked_fill(~self.exists, 0)[..., None, None] + inside
        told = self.cache[place]
        if told.element_size() == 1:
            told = told.float()
        if self.heads > 1:
            told = told.float()
            for head in range(1, self.heads):
                told = told + self.cache[place + head * self.head_step].float()
            told = told / self.heads
        if self.scales is not None:
            told = told * self.scales[int(values)][:, None, None, None]
        return told.masked_fill(~self.exists[..., None, None], 0)
