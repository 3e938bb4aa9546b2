"""window: the step's last queries into each sequence's ring, from what the step has on the device.

Inside a captured graph nothing may depend on the host, so rows are found from the batch's own
tensors: one launch a layer, however many tokens the step has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def reference(
    query: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, rows: int, ring: Tensor
) -> None:
    """Store the newest `rows` queries of each request at its slot, position p at p % rows.

    query [T, Hq, D]; starts [B + 1] int32, first row of each request; lengths [B] int32, tokens of
    each sequence with this step's; slots [B] int32, -1 for a request, or padding, that has none;
    ring [slots * rows, Hq, D].
    """
    back = torch.arange(rows - 1, -1, -1, device=query.device)
    new = (starts[1:] - starts[:-1])[:, None]
    taken = (back < new) & (slots[:, None] >= 0)
    source = (starts[1:, None] - 1 - back)[taken].long()
    place = (lengths[:, None] - 1 - back) % rows
    ring[(slots[:, None] * rows + place)[taken].long()] = query[source]


def window(
    query: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, rows: int, ring: Tensor
) -> None:
    """The same as `reference`, as one launch that allocates and synchronises nothing."""
    size = ring[0].numel()
    _window[(len(slots), rows)](
        query, query.stride(0), starts, lengths, slots, rows, ring, size,
        triton.next_power_of_2(size),
    )  # fmt: skip


@triton.jit
def _window(
    query, query_step, starts, lengths, slots, rows, ring, size, SIZE: tl.constexpr
):  # fmt: skip
    request, back = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + request)
    first, end = tl.load(starts + request), tl.load(starts + request + 1)
    source = end - 1 - back
    if (slot >= 0) & (source >= first):
        place = (tl.load(lengths + request) - 1 - back) % rows
        inside = tl.arange(0, SIZE)
        row = tl.load(query + source.to(tl.int64) * query_step + inside, mask=inside < size)
        tl.store(ring + (slot.to(tl.int64) * rows + place) * size + inside, row, mask=inside < size)
