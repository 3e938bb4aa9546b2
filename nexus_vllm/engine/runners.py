"""vLLM's two model runners behind one small interface."""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nexus_vllm.engine import ops
from nexus_vllm.engine.hooks import vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1


class Runner(Protocol):
    """What eviction needs to know of a model runner."""

    def batch_request_ids(self, batch: "CommonAttentionMetadata") -> list[str | None]:
        """The request of each batch row, in row order, padding left out; none of a dummy batch."""

    def overwrite_row(self, request_id: str, row: list[int]) -> None:
        """Replace a sequence's whole page row; the worker must not keep a stale entry."""

    def row(self, request_id: str) -> list[int]:
        """A sequence's page row as the runner has it now."""

    def commit_rows(self, now: bool) -> None:
        """Make overwritten rows visible with the step's own writes; now: already to `row`."""

    def builders(self) -> "Iterator[AttentionMetadataBuilder]":
        """Every attention metadata builder."""

    def sampling(self) -> AbstractContextManager[None]:
        """Entered around the sampling of a step's tokens."""

    def step(self) -> AbstractContextManager[None]:
        """Entered around a step that the scheduler has planned. All other batches are dummies."""

    def keep_out_of_graphs(self, other: "Callable[[], bool]") -> None:
        """Steps for which `other()` holds replay no full CUDA graph: what they do in attention is
        not what was captured. They run piecewise, or without graphs."""


class _AnyRunner:
    """Both runners make dummy batches: to capture graphs, to warm up, and where other data-parallel
    ranks have a step and this one has none. Their rows are numbered as if they were requests'.
    """

    def __init__(self, runner: "GPUModelRunnerV1 | GPUModelRunnerV2") -> None:
        self._runner = runner
        self._stepping = False

    @contextmanager
    def step(self) -> "Iterator[None]":
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def builders(self) -> "Iterator[AttentionMetadataBuilder]":
        for groups in self._runner.attn_groups:
            for group in groups:
                yield from group.metadata_builders


class RunnerV1(_AnyRunner):
    """`vllm/v1/worker/gpu_model_runner.py`: rows live in request states and a persistent batch."""

    _runner: "GPUModelRunnerV1"

    def batch_request_ids(self, batch: "CommonAttentionMetadata") -> list[str | None]:
        if not self._stepping:
            return []
        ids: list[str | None] = self._runner.input_batch.req_ids
        return ids[: batch.num_reqs]

    def overwrite_row(self, request_id: str, row: list[int]) -> None:
        self._runner.requests[request_id].block_ids = (row,)
        index = self._runner.input_batch.req_id_to_index.get(request_id)
        if index is not None:
            prepared = self._runner.prepare_inputs_event
            if self._runner.device.type == "cuda" and prepared is not None:
                # The step before may still wait for its copy of the table to the device.
                ops.wait_for(prepared)
            self._runner.input_batch.block_table.add_row((row,), index)

    def row(self, request_id: str) -> list[int]:
        row: list[int] = self._runner.requests[request_id].block_ids[0]
        return row

    def commit_rows(self, now: bool) -> None:
        """Rows are copied to the device as part of every step."""

    def keep_out_of_graphs(self, other: "Callable[[], bool]") -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        dispatcher = self._runner.cudagraph_dispatcher

        def dispatch(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
            if other():
                invalid_modes = {CUDAGraphMode.FULL, *(invalid_modes or ())}
            return CudagraphDispatcher.dispatch(
                dispatcher, *args, invalid_modes=invalid_modes, **kwargs
            )

        vars(dispatcher)["dispatch"] = dispatch

    def sampling(self) -> AbstractContextManager[None]:
        return self._seeds_kept() if self._runner.device.type == "cpu" else nullcontext()

    @contextmanager
    def _seeds_kept(self) -> "Iterator[None]":
        """Rows whose token will be dropped are sampled without their request's generator.

        Symptom without: a request with a seed whose prompt is computed in chunks, as a streamed one
        always is, ends the engine: "CPU Generator does not use offset". Cause: vLLM samples a token
        at the end of each chunk, drops it, and sets the generator back by an offset that a CPU's
        does not have. Remove when it sets that back some other way.
        """
        generators, dropped = self._runner.input_batch.generators, self._runner.discard_request_mask
        kept = {row: generators.pop(row) for row in list(generators) if dropped.np[row]}
        try:
            yield
        finally:
            generators.update(kept)


class RunnerV2(_AnyRunner):
    """`vllm/v1/worker/gpu/model_runner.py`: rows live on the device, written in stages."""

    _runner: "GPUModelRunnerV2"

    def batch_request_ids(self, batch: "CommonAttentionMetadata") -> list[str | None]:
        if not self._stepping:
            return []
        assert batch.req_idx is not None, "vLLM built a step's batch without req_idx"
        ids = self._runner.req_states.index_to_req_id
        return [ids.get(int(index)) for index in batch.req_idx[: batch.num_reqs]]

    def overwrite_row(self, request_id: str, row: list[int]) -> None:
        index = self._runner.req_states.req_id_to_index[request_id]
        self._runner.block_tables.append_block_ids(index, (row,), overwrite=True)

    def row(self, request_id: str) -> list[int]:
        index = self._runner.req_states.req_id_to_index[request_id]
        tables = self._runner.block_tables
        length = int(tables.num_blocks.np[0, index])
        row: list[int] = tables.block_tables[0].gpu[index, :length].tolist()
        return row

    def commit_rows(self, now: bool) -> None:
        """vLLM stages writes in buffers for two applications in flight, one a step.

        On a GPU an application of our own could take a buffer that the device has yet to read. So
        rows are left to the step's, whose writes to a row begin where ours end; unless they must be
        there now, or vLLM 0.31, whose buffers have room for one write a request, could not hold
        both. Then the device is waited for.
        """
        on_cpu = self._runner.device.type == "cpu"
        if on_cpu or now or vllm_version().startswith("0.31."):
            self._runner.block_tables.apply_staged_writes()
            if not on_cpu:
                torch.accelerator.synchronize()

    def keep_out_of_graphs(self, other: "Callable[[], bool]") -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        manager = self._runner.cudagraph_manager
        assert manager is not None

        def dispatch(num_reqs: int, *args: Any, **kwargs: Any) -> Any:
            found = ModelCudaGraphManager.dispatch(manager, num_reqs, *args, **kwargs)
            if found.cg_mode != CUDAGraphMode.FULL or not other():
                return found
            # Full graphs have so many rows at most, piecewise ones any number.
            most = manager.max_num_reqs
            found = ModelCudaGraphManager.dispatch(manager, most + 1, *args, **kwargs)
            return found if found.num_reqs is None else replace(found, num_reqs=num_reqs)

        vars(manager)["dispatch"] = dispatch

    def sampling(self) -> AbstractContextManager[None]:
        return nullcontext()  # its random numbers are keyed by seed and position


def adapt(model_runner: Any) -> Runner:
    """The adapter for vLLM's runner. Raises RuntimeError for one that is neither."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

    if isinstance(model_runner, GPUModelRunnerV1):
        return RunnerV1(model_runner)
    if isinstance(model_runner, GPUModelRunnerV2):
        return RunnerV2(model_runner)
    raise RuntimeError(f"KV eviction does not know the model runner {type(model_runner)}")
