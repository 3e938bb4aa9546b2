"""The worker: vLLM's own, which fills before each forward pass.

Importing this module, which vLLM does only where eviction is on, installs the attention backends of
this process.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nexus_vllm.engine import attention, compat, ops
from nexus_vllm.engine.evictor import EVICTION_BYTES, PROFILER_RANGE, Evictor, Layer
from nexus_vllm.engine.manager import EvictionSpec
from nexus_vllm.engine.profiles import rank_heads, servable
from nexus_vllm.engine.replay_scores import ReplayScores
from nexus_vllm.engine.reports import Reports
from nexus_vllm.engine.rope import RopeTables
from nexus_vllm.engine.runners import Runner, adapt
from nexus_vllm.engine.sequences import Sequences
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.unit_batch import UnitTables
from nexus_vllm.engine.warm_up import warm_up
from nexus_vllm.engine.window import LayerWindow, ring_rows
from nexus_vllm.plan import Eviction, StepPlan, StepReport

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

attention.install()


class _ReportedOutput(AsyncModelRunnerOutput):
    """An output still on its way to the host, with the report of its step."""

    def __init__(self, output: AsyncModelRunnerOutput, report: StepReport) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        return compat.with_report(self._output.get_output(), self._report)


class EvictionWorker(PlatformWorker):
    """vLLM's worker with eviction. `collective_rpc` reaches its `kv_eviction_*` methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eviction = compat.settings_of(self.vllm_config)
        if self.vllm_config.scheduler_config.scheduler_cls not in (
            compat.SCHEDULER,
            compat.ASYNC_SCHEDULER,
        ):
            raise compat.UnsupportedError(
                "this engine's scheduler does not evict",
                "worker and scheduler work together",
                "start with --kv-eviction, or nexus_vllm.engine_args() offline",
            )
        self._windows: dict[str, LayerWindow] = {}
        self._report: StepReport | None = None
        self._failed: set[str] = set()
        self._warming_up = False
        self._trace: dict[str, list[dict[str, Any]]] = {}

    # Start-up

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then allocate the query windows, before vLLM sizes the KV pool."""
        super().load_model(*args, **kwargs)
        slots = self.vllm_config.scheduler_config.max_num_seqs
        layers = self._attention_layers()
        for name, layer in layers.items():
            _check_layer(name, layer, self.model_config)
        _check_alike(layers)
        _warn_if_unconfirmed(layers)
        first = next(iter(layers.values()))
        windows = LayerWindow.of_layers(
            len(layers),
            slots,
            self._ring_rows,
            first.num_heads,
            first.head_size,
            self.model_config.dtype,
            self.device,
        )
        for row, (name, layer) in enumerate(layers.items()):
            self._windows[name] = layer.impl.window = windows[row]
            layer.impl.row = row

    @property
    def _ring_rows(self) -> int:
        batches = self.vllm_config.max_concurrent_batches
        return ring_rows(
            self.eviction.widest_window, batches, self.vllm_config.num_speculative_tokens
        )

    def _attention_layers(self) -> "dict[str, Attention]":
        """This rank's attention layers, in model order."""
        found = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        return dict(sorted(found.items(), key=lambda item: extract_layer_index(item[0])))

    def get_kv_cache_spec(self) -> "dict[str, KVCacheSpec]":
        """vLLM's specs, proved to be ours."""
        specs = super().get_kv_cache_spec()
        for name, spec in specs.items():
            if not isinstance(spec, EvictionSpec):
                raise compat.UnsupportedError(
                    f"layer {name} has the cache {type(spec).__name__}",
                    "every layer must be plain full attention and evictable (EvictionSpec)",
                    "serve this model without --kv-eviction",
                )
        return specs

    def determine_available_memory(self) -> int:
        """What vLLM finds for the KV cache, less what an eviction may hold at once.

        vLLM measures a forward pass. What that leaves idle between passes is usually enough, but
        not where batches are small.
        """
        available: int = super().determine_available_memory()
        if self.device.type == "cpu":  # the pool's size is not measured there
            return available
        layer = next(iter(self._attention_layers().values()))
        token = 2 * layer.num_kv_heads * layer.head_size * self.model_config.dtype.itemsize
        return available - EVICTION_BYTES - self.model_config.max_model_len * token

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Allocate the cache, then connect builders, windows and evictor, proving each hook."""
        super().initialize_from_config(kv_cache_config)
        self.runner: Runner = adapt(self.model_runner)
        self.sequences = Sequences(
            self.runner,
            self.vllm_config.scheduler_config.max_num_seqs,
            self._ring_rows,
            self.eviction.block_size,
            self.device,
        )
        builders: list[attention.EvictionBuilderMixin] = list(self.runner.builders())
        if not builders:
            raise compat.UnsupportedError(
                f"{type(self.model_runner).__name__} has no attention metadata builder",
                "eviction shows attention a shifted batch through it",
                "serve this model without --kv-eviction",
            )
        for builder in builders:
            if not isinstance(builder, attention.EvictionBuilderMixin):
                raise compat.UnsupportedError(
                    f"attention metadata is built by {type(builder).__name__}",
                    "only a builder of nexus-vllm hides evicted blocks from attention",
                    "remove whatever replaces the attention backend, or serve without "
                    "--kv-eviction",
                )
            builder.sequences = self.sequences
        model, ropes = self.get_model(), RopeTables()
        layers = [
            Layer.of(extract_layer_index(name), layer, self._windows[name], ropes.of(model, name))
            for name, layer in self._attention_layers().items()
        ]
        self.evictor = Evictor(layers, self.eviction)
        self.uneven = UnevenEvictor(layers, self.eviction)
        self.replays = ReplayScores(self.runner, layers, self.eviction.block_size)
        for layer in self._attention_layers().values():
            layer.impl.replays = self.replays
        for builder in builders:
            builder.tables = UnitTables(self.uneven.space)
            builder.replays = self.replays
        heads = rank_heads(self.vllm_config, get_tensor_model_parallel_rank())
        first = layers[0].index
        self.allocators = servable(self.vllm_config, (first, first + len(layers)), heads)
        self.reports = Reports()
        self.runner.keep_out_of_graphs(self._unlike_captured)

    def _unlike_captured(self) -> bool:
        """Whether attention may do in this step what it does not where only budgets are equal."""
        return self.sequences.uneven or bool(self.replays.pieces)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's own, whose steps no scheduler has planned, and evictions."""
        self._warming_up = True
        try:
            done = super().compile_or_warm_up_model()
        finally:
            self._warming_up = False
        if self.device.type != "cpu" and ops.use_kernels(self.device):
            longest = self.model_config.max_model_len // self.eviction.block_size
            with torch.inference_mode():
                warm_up(self.evictor, self.uneven, longest)
        return done

    # One step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """Carry out the step's plan, then run the step."""
        if self._warming_up:
            return super().execute_model(scheduler_output)
        with self._fatal_where_unheard(), self.runner.step():
            self._carry_out(compat.plan_of(scheduler_output))
            return self._told(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The second half of a step on runners that split it."""
        with self.runner.sampling():
            output = super().sample_tokens(grammar_output)
        return self._told(output)

    @contextmanager
    def _fatal_where_unheard(self) -> Iterator[None]:
        """End this process with an error that nobody would hear of.

        Symptom without: ranks wait for each other, or go on with different steps. Cause: vLLM's
        `WorkerProc` only logs what is raised on a rank whose output is not collected, and takes the
        next step. Its executor does notice a process that ends. Remove when it hears all ranks.
        """
        try:
            yield
        except Exception:
            if self.reports.heard:
                raise
            logger.exception("This rank cannot go on, so the engine must end.")
            os._exit(1)

    def _carry_out(self, plan: StepPlan) -> None:
        report = StepReport()
        for request_id in plan.stopped:
            self.sequences.stop(request_id)
            self.replays.stop(request_id)
            self._failed.discard(request_id)
        for eviction in plan.evictions:
            with record_function(PROFILER_RANGE):
                self._evict(eviction, report)
        self._report = None
        if plan.evictions:
            if not self.reports.alone:
                report.settle()  # ranks add up what each has moved: waits for the evictions
            self._report = self.reports.gather(report)
            self.runner.commit_rows(self.eviction.check_integrity)
        for request_id in plan.started:
            self.sequences.start(request_id)
            self._trace.pop(request_id, None)
        for piece in plan.pieces:
            self.replays.start(piece)
        for replay in plan.forgotten:
            self.replays.forget(replay)
        if self.eviction.check_integrity:
            self.replays.check_integrity()
            self.sequences.check_integrity()
            for eviction in plan.evictions:
                if self.runner.row(eviction.request_id) != eviction.row:
                    raise RuntimeError(f"{eviction.request_id}: the worker's page row is stale")

    def _evict(self, eviction: Eviction, report: StepReport) -> None:
        begin = time.perf_counter()
        sequence = self.sequences.by_id[eviction.request_id]
        sequence.replay = self.replays.scores.get(eviction.replay or "")

        def failed(error: Exception) -> None:
            report.failed[eviction.request_id] = f"{type(error).__name__}: {error}"
            if eviction.request_id not in self._failed:
                self._failed.add(eviction.request_id)
                logger.error(
                    "%s: policy %s, allocator %s could not choose what stays; the request ends.",
                    eviction.request_id,
                    eviction.policy,
                    eviction.allocator,
                    exc_info=error,
                )

        if eviction.allocator == "uniform":
            moved, kept = self.evictor.evict(sequence, eviction, failed)
        else:
            moved, kept = self.uneven.evict(
                sequence,
                eviction,
                self.evictor.policies[eviction.policy],
                self.allocators[eviction.allocator],
                failed,
            )
        self.runner.overwrite_row(eviction.request_id, eviction.row)
        report.moved[eviction.request_id] = moved
        report.seconds.append(time.perf_counter() - begin)
        if self.eviction.trace:
            self._trace.setdefault(eviction.request_id, []).append(
                {
                    "num_computed": eviction.computed,
                    "full_blocks": eviction.full,
                    "kept": kept.tolist(),  # vLLM's RPC takes tensors apart
                }
            )

    def _told(self, output: Any) -> Any:
        """The step's output with the report on it, once there is an output."""
        report = self._report
        if report is None or output is None:
            return output
        self._report = None
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportedOutput(output, report)
        return compat.with_report(output, report)

    # Inspection

    def kv_eviction_state(self) -> dict[str, dict[str, Any]]:
        """Released blocks and original block ids of every evictable sequence on this rank."""
        return self.sequences.snapshot()

    def kv_eviction_trace(self) -> dict[str, list[dict[str, Any]]]:
        """With `trace` on: every eviction of every request so far.

        "kept": original block ids, [L][B], or [L][H][most] and -1 where a head keeps fewer.
        """
        return self._trace


def _check_layer(name: str, layer: "Attention", model_config: "ModelConfig") -> None:
    """Refuse a layer whose attention eviction would get wrong, or whose hooks are not live."""
    impl = getattr(layer, "impl", None)  # state-space layers have none
    if not isinstance(impl, attention.EvictionImplMixin):
        tested = ", ".join(attention.BACKENDS)
        backend = getattr(layer, "attn_backend", None)
        raise compat.UnsupportedError(
            f"layer {name} uses {type(impl or layer).__name__}",
            f"eviction has been tested with the attention backends {tested}",
            f"{attention.remedy(backend)}, or serve without --kv-eviction",
        )
    if layer.kv_sharing_target_layer_name is not None:
        raise compat.UnsupportedError(
            f"layer {name} shares the KV cache of {layer.kv_sharing_target_layer_name}",
            "every layer must have a KV cache of its own to evict from",
            "serve this model without --kv-eviction",
        )
    if not compat.in_model_dtype(layer.kv_cache_dtype, model_config):
        raise compat.UnsupportedError(
            f"layer {name} has a KV cache of {layer.kv_cache_dtype}",
            compat.keys_needed(model_config),
            "serve this model without --kv-eviction",
        )
    if layer.impl.alibi_slopes is not None:
        raise compat.UnsupportedError(
            f"layer {name} uses ALiBi",
            "its bias depends on how many blocks lie between",
            "serve this model without --kv-eviction",
        )
    if layer.impl.sinks is not None:
        raise compat.UnsupportedError(
            f"layer {name} has attention sinks of its own",
            "they are not part of the scores, and attention over units would mix up their heads",
            "serve this model without --kv-eviction",
        )


def _warn_if_unconfirmed(layers: "dict[str, Attention]") -> None:
    """Say loudly that this engine relies on what no GPU has confirmed."""
    used = {layer.attn_backend.get_name() for layer in layers.values()}
    for name in used.intersection(attention.UNCONFIRMED):
        logger.warning(
            "%s is set: KV eviction runs with the attention backend %s, which has NOT been "
            "confirmed on a GPU. Replies may be wrong. What is known, and what is not: "
            "docs/gpu.md; what confirms it on this machine: scripts/gpu_check.sh.",
            attention.ENVIRONMENT,
            name,
        )


def _check_alike(layers: "dict[str, Attention]") -> None:
    """Refuse layers that differ in shape: a head's blocks may lie in the pages of any other."""
    shapes = {
        name: f"{layer.num_heads} query heads and {layer.num_kv_heads} KV heads of size "
        f"{layer.head_size}"
        for name, layer in layers.items()
    }
    first, shape = next(iter(shapes.items()))
    for name, other in shapes.items():
        if other != shape:
            raise compat.UnsupportedError(
                f"layer {name} has {other}, but {first} has {shape}",
                "all layers must be alike to deal blocks out among their heads",
                "serve this model without --kv-eviction",
            )
