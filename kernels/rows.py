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
    """The live blocks of R rows, ragged: row r has those from `starts[r]` to `starts[r + 1]`.

    cache: flat view of the KV allocation, [numbers], in its own dtype.
    units: [M] int64, where in `cache` each block of each row starts.
    blocks: [M] int64, its original block id.
    starts: [R + 1] int64.
    longest: the most blocks of a row, a number that the host knows.
    block, head_size: tokens of a block, numbers of a key.
    token_step: numbers from one token's key to the next one's, in a unit.
    values: numbers from a key to the same token's value.
    heads: KV heads whose keys a row averages, each `head_step` numbers after the one before.
    """

    cache: Tensor
    units: Tensor
    blocks: Tensor
    starts: Tensor
    longest: int
    block: int
    head_size: int
    token_step: int
    values: int
    heads: int = 1
    head_step: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def padded(self) -> tuple[Tensor, Tensor]:
        """Index into `units` and `blocks` [R, longest], and which entries exist."""
        place = torch.arange(self.longest, device=self.starts.device)
        exists = place < self.starts.diff()[:, None]
        index = (self.starts[:-1, None] + place).clamp(max=max(0, len(self.units) - 1))
        return index, exists

    def gather(self, index: Tensor, values: bool = False) -> Tensor:
        """Keys, or values, of blocks by their place in `units`: [*index.shape, block, D]."""
        first = self.units[index] + (self.values if values else 0)
        token = torch.arange(self.block, device=first.device) * self.token_step
        inside = token[:, None] + torch.arange(self.head_size, device=first.device)
        told = self.cache[first[..., None, None] + inside]
        if self.heads == 1:
            return told
        total = told.float()
        for head in range(1, self.heads):
            total = total + self.cache[first[..., None, None] + inside + head * self.head_step]
        return total / self.heads
