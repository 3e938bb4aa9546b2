"""CUDA graphs without a GPU: vLLM's model runner V2 captures and replays, on tapes.

What stands for `torch.cuda.graph` records every operator of torch and every launch of a Triton
kernel with its arguments. What stands for a replay does just these again, on the same tensors: no
Python of the model runs, all numbers and addresses are those of the capture, as in a CUDA graph.
Asking for a number on the host raises, as it would on a GPU. Not shown: streams, memory pools, and
whether a kernel that was compiled can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .child import Host

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique"}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Tape(TorchDispatchMode):
    """What was done while it was the mode, to be done again."""

    running: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], Any]] = []
        self.launches = 0
        self.held: list[Any] = []  # results keep their memory, as in a graph's pool
        self._launching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self._launching:
            return func(*args, **kwargs)
        assert name not in WAITING, f"{func} waits for the device while a graph is captured"
        result = func(*args, **kwargs)
        self.held.append(result)
        if func._schema.is_mutable:
            self.actions.append(lambda: func(*args, **kwargs))
        elif name not in EMPTY and not shares_memory(result, (args, kwargs)):
            self.actions.append(lambda: copy_into(result, func(*args, **kwargs)))
        return result

    def launch(self, run: Callable[[], Any]) -> Any:
        self.actions.append(run)
        self.launches += 1
        self._launching = True
        try:
            return run()
        finally:
            self._launching = False

    def __enter__(self) -> Any:
        Tape.running = self
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        Tape.running = None
        super().__exit__(*raised)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def shares_memory(result: Any, given: Any) -> bool:
    """Whether an operator only made views, which need not be made again."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors(given)}
    return any(tensor.untyped_storage().data_ptr() in known for tensor in tensors(result))


def copy_into(result: Any, again: Any) -> None:
    for old, new in zip(tensors(result), tensors(again), strict=True):
        old.copy_(new)


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1
        for action in self.tape.actions:
            action()


@contextmanager
def record(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    graph.tape = Tape()
    with graph.tape:
        yield


def record_launches() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = Tape.running
        if tape is None or tape._launching:
            return run(self, *args, **kwargs)
        return tape.launch(lambda: run(self, *args, **kwargs))

    InterpretedFunction.run = recorded


def capture_on_rank(worker: Any, sizes: list[int]) -> dict[str, Any]:
    """Let V2 capture full graphs for decoding; the mode it chose, and launches of each graph."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import attn_utils, cudagraph_utils

    record_launches()
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, record
    vars(cudagraph_utils).update(
        graph_capture=lambda **_: nullcontext(), capture_pool=lambda *_: nullcontext()
    )
    type(current_platform).get_global_graph_pool = lambda *_: None
    runner, config = worker.model_runner, worker.vllm_config
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = max(sizes)
    support = attn_utils.get_attn_cg_support(runner.attn_groups, config)
    mode = compilation.resolve_cudagraph_mode_and_sizes(
        support.min_cg_support,
        support.min_cg_attn_backend,
        runner.decode_query_len,
        use_v2_model_runner=True,
        kv_cache_config=runner.kv_cache_config,
        max_num_reqs=runner.max_num_reqs,
        piecewise_capture_available=False,
    )
    manager = runner.cudagraph_manager = cudagraph_utils.ModelCudaGraphManager(
        config, runner.device, mode, runner.decode_query_len
    )
    worker.worker.runner.keep_out_of_graphs(worker.worker._unlike_captured)
    for layer in compilation.static_forward_context.values():
        layer.use_direct_call = True  # else a layer's attention is one operator, and not taped
    manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
    )
    launches = {desc.num_reqs: graph.tape.launches for desc, graph in manager.graphs.items()}
    return {"mode": mode.name, "support": support.min_cg_support.name, "launches": launches}


def capture(host: Host, sizes: list[int]) -> dict[str, Any]:
    (told,) = host.rpc(capture_on_rank, (sizes,))
    return told


def replays(host: Host) -> int:
    return Graph.replays


def use_few_programs_on_rank(worker: Any) -> None:
    for builder in worker.worker.runner.builders():
        builder.seq_threshold_3D = 0


def use_few_programs(host: Host) -> None:
    """One program for a decoding head, not 16 that each take a part: the interpreter takes time for
    each, whatever it does."""
    host.rpc(use_few_programs_on_rank, ())


def rings_on_rank(worker: Any) -> torch.Tensor:
    return torch.stack([window.ring for window in worker.worker._windows.values()])


def rings(host: Host) -> torch.Tensor:
    """Every layer's query rings."""
    (found,) = host.rpc(rings_on_rank, ())
    return found.clone()
