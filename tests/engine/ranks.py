"""Functions that run in the process of every rank: `engine.rpc(function, ...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Told:
    """What really runs on one rank."""

    worker: str
    runner: str
    attention_backend: str


def watch(worker: Any) -> Told:
    """Hang a LogitsTap into the rank that samples, which needs one for `keep_logits`."""
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if get_pp_group().is_last_rank:
        runner.logits_tap = LogitsTap(runner, worker.vllm_config.use_v2_model_runner)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return Told(
        worker=qualified_name(worker.worker),
        runner=qualified_name(runner),
        attention_backend=next(
            qualified_name(layer.impl) for layer in layers if hasattr(layer, "impl")
        ),
    )


def keep_logits(worker: Any, request: str) -> None:
    if tap := getattr(worker.model_runner, "logits_tap", None):
        tap.wanted.add(request)


def logits(worker: Any, request: str, start: int, count: int) -> torch.Tensor | None:
    tap = getattr(worker.model_runner, "logits_tap", None)
    return tap and tap.take(request, start, count)


def qualified_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


class LogitsTap:
    """Keeps the logits that the model hands to the sampler, by request and by the index of the
    token they predict. Both runners compute one row per request of the batch, V1 one per draft.
    """

    def __init__(self, runner: Any, is_v2: bool) -> None:
        self.wanted: set[str] = set()
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.last_counts = not is_v2 and runner.speculative_config is not None
        self._last: torch.Tensor | None = None
        self._watch_model(runner.model)
        if is_v2:
            self._watch_v2(runner)
        else:
            self._watch_v1(runner)

    def _watch_model(self, model: Any) -> None:
        compute_logits = model.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._last = compute_logits(*args, **kwargs)
            return self._last

        model.compute_logits = watched

    def _watch_v1(self, runner: Any) -> None:
        execute_model = runner.execute_model

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._last = None
            output = execute_model(scheduler_output, *args, **kwargs)
            batch = runner.input_batch
            scheduled = scheduler_output.num_scheduled_tokens
            if self._last is not None and scheduled:
                ids: list[str] = []
                seen: list[int] = []
                for i, request in enumerate(batch.req_ids):
                    end = int(batch.num_computed_tokens_cpu[i]) + scheduled[request]
                    drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request, ()))
                    ids += [request] * (drafts + 1)
                    seen += range(end - drafts, end + 1)
                self._keep(ids, seen)
            return output

        runner.execute_model = watched

    def _watch_v2(self, runner: Any) -> None:
        sample = runner.sample

        def watched(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = sample(hidden_states, input_batch, *args, **kwargs)
            seen = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
            self._keep(input_batch.req_ids, seen.tolist())
            return output

        runner.sample = watched

    def _keep(self, ids: Sequence[str], seen: Sequence[int]) -> None:
        assert self._last is not None
        assert len(self._last) == len(ids) == len(seen), (self._last.shape, ids, seen)
        for row, request, index in zip(self._last, ids, seen, strict=True):
            # The first time counts: a preempted request computes old tokens again. The last one
            # where there are drafts: what follows a rejected one is computed again.
            new = self.last_counts or (request, index) not in self.rows
            if new and request in self.wanted:
                self.rows[request, index] = row.float().cpu().clone()

    def take(self, request: str, start: int, count: int) -> torch.Tensor:
        import torch

        return torch.stack([self.rows[request, start + i] for i in range(count)])
