"""What a step's attention is shown on a GPU, in memory whose addresses stay.

A captured CUDA graph reads and writes where it did when it was captured. So the live window's block
table and lengths, and each row's ring slot, lie in the first rows of the same tensors at every
step, written before the graph is replayed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from nexus_vllm.engine.sequences import BatchView


@dataclass(frozen=True)
class Shown:
    """Rows of the buffers: the live window's `table` [requests, width] and `lengths` [requests],
    and ring `slots` [requests], -1 for none; all int32, padding included."""

    table: Tensor
    lengths: Tensor
    slots: Tensor


class StepBuffers:
    """The buffers of one metadata builder, for batches of up to `requests` rows."""

    def __init__(self, requests: int, width: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.table = torch.zeros(requests, width, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        self._told = torch.zeros(2, requests, dtype=torch.int32, device=device)
        self._host = np.empty((2, requests), dtype=np.int32)

    def show(self, batch: "CommonAttentionMetadata", view: "BatchView | None") -> Shown:
        """Write a step's rows; without a view nothing is released and nothing recorded.

        Copies from the host and launches a kernel, but waits for neither. Raises RuntimeError for a
        batch that does not fit, since other buffers would have other addresses.
        """
        table, size = batch.block_table_tensor, len(batch.seq_lens)
        if size > len(self.table) or table.shape[1] != self.table.shape[1]:
            raise RuntimeError(
                f"a batch of {size} rows of {table.shape[1]} blocks does not fit buffers "
                f"{tuple(self.table.shape)}"
            )
        self._tell(view)
        released, slots = self._told
        shown = Shown(self.table[:size], self.lengths[:size], slots[:size])
        from nexus_vllm.kernels.shift import shift  # needs Triton

        out = (shown.table, shown.lengths)
        shift(table[:size], batch.seq_lens, released[:size], self.block_size, out)
        return shown

    def _tell(self, view: "BatchView | None") -> None:
        """Released blocks and ring slots of all rows, used or not, to the device.

        vLLM stages the copy in pinned memory of its own that is not used again before the device
        has read it. One buffer for all steps would be overwritten while a step that has been
        scheduled ahead still waits for its copy.
        """
        self._host[0], self._host[1] = 0, -1
        if view is not None:
            rows = len(view.released)
            self._host[0, :rows], self._host[1, :rows] = view.released, view.slots
        async_tensor_h2d(self._host, out=self._told)
