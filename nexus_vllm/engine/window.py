"""The last W queries of every evictable sequence, per layer, written inside the forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """Which query rows of a step go where: `source` in the batch, `target` in the ring.

    `source` is None where they are the batch's first rows, in order, as in most decode steps.
    """

    source: Tensor | None
    target: Tensor

    def taken(self, rows: Tensor) -> Tensor:
        """Those of a batch's rows that are recorded."""
        if self.source is None:
            return rows[: len(self.target)]
        return rows.index_select(0, self.source)


@dataclass(frozen=True)
class DeviceRecording:
    """The same as a kernel finds it, from tensors that lie where they did when it was captured.

    `starts` [requests + 1], `lengths` [requests] (with this step's tokens, released ones included)
    and `slots` [requests]: int32, as in `recording`. Rows that are padding have no queries.
    """

    starts: Tensor
    lengths: Tensor
    slots: Tensor


def ring_rows(window: int, batches: int, drafts: int) -> int:
    """Rows of a sequence's ring, with so many batches in flight and drafts proposed at a time.

    All batches but one may compute a token behind the one that ends a session's turn, and any draft
    may be rejected. The sequence starts over from there, and what was recorded beyond must not have
    taken the place of the window before.
    """
    return window + batches - 1 + drafts


class LayerWindow:
    """One layer's ring buffer: `[slots * rows, query heads, head size]`.

    A sequence owns `rows` consecutive rows (`ring_rows`); the query at position p is in row
    p % rows of them.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ring: Tensor | None = None,
    ) -> None:
        """ring: the memory to use, zeros; None: its own."""
        shape = (slots * rows, num_heads, head_size)
        self.size = rows
        self.ring = torch.zeros(shape, dtype=dtype, device=device) if ring is None else ring
        if self.ring.shape != shape:
            raise ValueError(f"a ring of shape {tuple(self.ring.shape)}, expected {shape}")

    @classmethod
    def of_layers(
        cls,
        layers: int,
        slots: int,
        rows: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "list[LayerWindow]":
        """One for each layer, their rings in one tensor (`together`)."""
        shape = (layers, slots * rows, num_heads, head_size)
        rings = torch.zeros(shape, dtype=dtype, device=device)
        return [cls(slots, rows, num_heads, head_size, dtype, device, ring) for ring in rings]

    def record(self, query: Tensor, recording: Recording | DeviceRecording) -> None:
        """Store the step's window queries. `query`: [tokens, query heads, head size], rotated."""
        query = query.view(-1, *self.ring.shape[1:])
        if isinstance(recording, Recording):
            self.ring.index_copy_(0, recording.target, recording.taken(query))
            return
        from nexus_vllm.kernels.window import window  # needs Triton

        window(query, recording.starts, recording.lengths, recording.slots, self.size, self.ring)

    def queries(self, slot: int, positions: Tensor) -> Tensor:
        """The queries [len(positions), query heads, head size] at these (recent) positions."""
        return self.ring[self.rows_of(slot, positions)]

    def rows_of(self, slot: int, positions: Tensor) -> Tensor:
        """Where in a ring the queries at these positions are."""
        return slot * self.size + positions % self.size


def together(rings: list[Tensor]) -> Tensor | None:
    """The rings as one tensor [layers, *shape], without a copy; None where they do not lie so."""
    first, second = rings[0], rings[-1]
    step = (second.storage_offset() - first.storage_offset()) // max(1, len(rings) - 1)
    for layer, ring in enumerate(rings):
        if (
            ring.untyped_storage()._cdata != first.untyped_storage()._cdata
            or ring.storage_offset() != first.storage_offset() + layer * step
            or (ring.shape, ring.stride()) != (first.shape, first.stride())
        ):
            return None
    return first.as_strided((len(rings), *first.shape), (step, *first.stride()))


def recording(
    starts: np.ndarray, lengths: np.ndarray, slots: np.ndarray, rows: int, device: torch.device
) -> Recording | None:
    """Which rows of a batch to record.

    `starts` [requests + 1]: first query row of each request. `lengths` [requests]: tokens of each
    sequence, this step's included. `slots` [requests]: ring slot of so many `rows`, or -1. None:
    nothing to record.
    """
    counts = np.where(slots >= 0, np.minimum(np.diff(starts), rows), 0)
    total = int(counts.sum())
    if total == 0:
        return None
    # Rows counted back from each request's last: c-1, ..., 1, 0 for its c newest queries.
    back = np.repeat(counts.cumsum(), counts) - 1 - np.arange(total)
    source = np.repeat(starts[1:], counts) - 1 - back
    position = np.repeat(lengths, counts) - 1 - back
    target = np.repeat(slots, counts) * rows + position % rows
    first_rows = np.array_equal(source, np.arange(total))
    return Recording(
        None if first_rows else torch.from_numpy(source.astype(np.int64)).to(device),
        torch.from_numpy(target.astype(np.int64)).to(device),
    )
