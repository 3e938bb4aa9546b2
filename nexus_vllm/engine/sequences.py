"""The worker's table of evictable sequences, and the batch seen through it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nexus_vllm.engine.units import Holding

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from nexus_vllm.engine.runners import Runner


@dataclass
class Sequence:
    """One evictable sequence.

    `slot`: its rows in the query rings. `released`: leading logical blocks given up. `origin`
    [layers, live blocks]: the original block each live page held after the last eviction; blocks
    that filled up since hold themselves. Under uneven budgets `holding` says instead where each
    head's blocks are, as of the last eviction, which dealt out the pages up to block `dealt`.
    `state`: what the policy wants to know again of the blocks in `origin`, or in `holding`, with
    one dimension more. `seen`: tokens computed at the last eviction. `replay` [layers, KV heads,
    blocks of the prompt]: what the replay of its prompt has found, for a policy that needs it.
    """

    slot: int
    released: int = 0
    origin: Tensor | None = None
    holding: Holding | None = None
    dealt: int = 0
    state: Tensor | None = None
    seen: int = 0
    replay: Tensor | None = None

    def live_blocks(self, layers: int, full: int, device: torch.device | str = "cpu") -> Tensor:
        """Original block ids [layers, full - released] of the live window, in row order."""
        known = self.origin
        if known is None:
            known = torch.empty(layers, 0, dtype=torch.long, device=device)
        newer = torch.arange(self.released + known.shape[1], full, device=device)
        return torch.cat([known, newer.expand(layers, -1)], dim=1)


@dataclass(frozen=True)
class BatchView:
    """One step's batch: its sequences (None: not evictable), their released blocks, their tokens
    `lengths`, this step's included, first query rows `starts`, and `slots` in the query rings, -1
    for none. Arrays go on for rows that are padding."""

    rows: list[Sequence | None]
    released: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    block_size: int

    @property
    def uneven(self) -> bool:
        """Whether any of the rows has uneven head budgets in force."""
        return any(row is not None and row.holding is not None for row in self.rows)


class Sequences:
    """Evictable sequences by request id, with `slots` slots of `ring_rows` to give out."""

    def __init__(
        self, runner: "Runner", slots: int, ring_rows: int, block_size: int, device: torch.device
    ) -> None:
        self.runner = runner
        self.ring_rows = ring_rows
        self.block_size = block_size
        self.device = device
        self.by_id: dict[str, Sequence] = {}
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))

    def start(self, request_id: str) -> None:
        """The sequence is computed from its first token on; anything known of it is void."""
        known = self.by_id.get(request_id)
        self.by_id[request_id] = Sequence(known.slot if known else self._free.pop())

    def stop(self, request_id: str) -> None:
        """The sequence holds no pages any more. Unknown ids are fine: not all are evictable."""
        if sequence := self.by_id.pop(request_id, None):
            self._free.append(sequence.slot)

    def view(self, batch: "CommonAttentionMetadata") -> BatchView | None:
        """The batch's rows as sequences; None when no row is one, which costs nothing more."""
        if not self.by_id:
            return None
        rows = [self.by_id.get(i or "") for i in self.runner.batch_request_ids(batch)]
        if not any(rows):
            return None
        size = batch.seq_lens.shape[0]
        released, slots = np.zeros(size, dtype=np.int64), np.full(size, -1, dtype=np.int64)
        for index, sequence in enumerate(rows):
            if sequence is not None:
                released[index], slots[index] = sequence.released, sequence.slot
        lengths = batch.seq_lens_cpu_upper_bound
        if lengths is None:
            raise RuntimeError("vLLM built a batch without seq_lens_cpu_upper_bound")
        starts = batch.query_start_loc_cpu.numpy()[: size + 1]
        return BatchView(
            rows=rows,
            released=released,
            lengths=lengths.numpy(),
            starts=starts,
            slots=slots,
            block_size=self.block_size,
        )

    @property
    def uneven(self) -> bool:
        """Whether any sequence has uneven head budgets in force, in this step's batch or not."""
        return any(sequence.holding is not None for sequence in self.by_id.values())

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every slot has one owner and origins are distinct (I5)."""
        slots = sorted([s.slot for s in self.by_id.values()] + self._free)
        if slots != list(range(self._slots)):
            raise RuntimeError(f"ring slots {slots} are not 0..{self._slots - 1}, once each")
        for request_id, sequence in self.by_id.items():
            origin = sequence.origin
            if origin is not None and any(len(set(row)) != len(row) for row in origin.tolist()):
                raise RuntimeError(f"{request_id}: a live window holds a block twice")

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """For inspection: released blocks and origins by request id."""
        return {
            request_id: {
                "released": s.released,
                "origin": None if s.origin is None else s.origin.tolist(),
            }
            for request_id, s in self.by_id.items()
        }
