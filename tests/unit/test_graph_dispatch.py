"""Steps that are unlike what was captured replay no full CUDA graph, on either runner."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from nexus_vllm.engine.runners import RunnerV1, RunnerV2

FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, 4, uniform_token_count=1)
PIECEWISE = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 4, None)


def manager(*captured: BatchExecutionDescriptor) -> Any:
    """vLLM's own, as it is when graphs of these sizes have been captured."""
    found: Any = ModelCudaGraphManager.__new__(ModelCudaGraphManager)
    found.max_num_reqs = 4
    found._graphs_captured = True
    found._lora_dispatch_map = {}
    found._candidates = {(tokens, 0): list(captured) for tokens in range(1, 5)}
    return found


@pytest.mark.parametrize(
    ("captured", "unlike", "expected"),
    [
        ((FULL, PIECEWISE), False, FULL),
        ((FULL, PIECEWISE), True, PIECEWISE),
        ((PIECEWISE,), True, PIECEWISE),
        ((FULL,), True, BatchExecutionDescriptor(CUDAGraphMode.NONE, 3, 3)),
    ],
)
def test_runner_v2(
    captured: tuple[BatchExecutionDescriptor, ...], unlike: bool, expected: Any
) -> None:
    runner = SimpleNamespace(cudagraph_manager=manager(*captured))
    RunnerV2(runner).keep_out_of_graphs(lambda: unlike)  # type: ignore[arg-type]
    assert runner.cudagraph_manager.dispatch(3, 3, 1, num_active_loras=0) == expected


@pytest.mark.parametrize(
    ("unlike", "expected"), [(False, CUDAGraphMode.FULL), (True, CUDAGraphMode.PIECEWISE)]
)
@pytest.mark.parametrize("invalid", [{}, {"invalid_modes": None}, {"invalid_modes": set()}])
def test_runner_v1(unlike: bool, expected: CUDAGraphMode, invalid: dict[str, Any]) -> None:
    dispatcher: Any = CudagraphDispatcher.__new__(CudagraphDispatcher)
    dispatcher.keys_initialized = True
    dispatcher.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    dispatcher.compilation_config = SimpleNamespace(max_cudagraph_capture_size=4)
    descriptor = BatchDescriptor(4)
    dispatcher._create_padded_batch_descriptor = lambda *_: descriptor
    dispatcher.cudagraph_keys = {
        mode: {descriptor} for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
    }
    runner = SimpleNamespace(cudagraph_dispatcher=dispatcher)
    RunnerV1(runner).keep_out_of_graphs(lambda: unlike)  # type: ignore[arg-type]
    assert dispatcher.dispatch(3, **invalid)[0] == expected
