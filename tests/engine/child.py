"""The child process of harness.Engine: hosts a `vllm.LLM` and obeys commands from a pipe."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from . import ranks
from .harness import Completion, Facts, Request, RequestState, Result, State

PR_SET_PDEATHSIG = 1
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}


class Host:
    """Functions sent by tests find `llm`, `core` (EngineCore) and `scheduler` here."""

    def start(self, mode: str, options: dict[str, Any], nexus: dict[str, Any] | None) -> Facts:
        if nexus is not None:
            import nexus_vllm

            options = {**options, **nexus_vllm.engine_args(**nexus)}
        from vllm import LLM, __version__

        runner, scheduling = mode.split("-")
        self.llm = LLM(**options, async_scheduling=scheduling == "async")
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        parallel = self.core.vllm_config.parallel_config
        # vLLM's output rank: the first tensor-parallel one of the last pipeline stage.
        self.output_rank = parallel.world_size - parallel.tensor_parallel_size
        told = self.rpc(ranks.watch, ())[self.output_rank]
        is_v2 = ".v1.worker.cpu." in told.runner
        queue = self.core.batch_queue_size
        is_async = self.core.vllm_config.scheduler_config.async_scheduling
        if (is_v2, is_async) != (runner == "v2", scheduling == "async"):
            raise RuntimeError(f"asked for {mode}, got {told.runner}, queue {queue}")
        self.in_flight = self.most_in_flight = 0
        self._count_batches()
        self.names: dict[str, str] = {}  # vLLM's request id -> ours
        self.prompts: dict[str, int] = {}
        self.adapters: dict[str, Any] = {}
        self.wanted: set[str] = set()  # vLLM's ids of requests whose logits are kept
        self.outputs: dict[str, Any] = {}
        self.completions: dict[str, dict[int, Completion]] = {}
        self.held: dict[str, list[int]] = {}
        self.preemptions: dict[str, int] = {}
        return Facts(
            vllm=__version__,
            runner=told.runner,
            scheduler=ranks.qualified_name(self.scheduler),
            worker=told.worker,
            attention_backend=told.attention_backend,
            step=self.core.step_fn.__name__,
            batch_queue_size=queue,
            pool_blocks=self.pool.num_gpu_blocks - 1,
            plugins=os.environ.get("VLLM_PLUGINS"),
        )

    def stop(self) -> None:
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self.shut_down()
        vars(self).clear()
        cleanup_dist_env_and_memory()
        gc.collect()

    def shut_down(self) -> None:
        """Ranks in processes of their own must not outlive this one."""
        self.core.model_executor.shutdown()

    def _count_batches(self) -> None:
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.in_flight += output.total_num_scheduled_tokens > 0
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return output

        def counted_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            self.in_flight -= output.total_num_scheduled_tokens > 0
            return update(output, *args, **kwargs)

        self.scheduler.schedule, self.scheduler.update_from_output = (
            counted_schedule,
            counted_update,
        )

    # Driving ---------------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        name = request.id or f"request-{len(self.names)}"
        if name in self.prompts:
            raise ValueError(f"request id {name!r} was used before")
        values = {**GREEDY, **request.params}
        if "structured_outputs" in values:
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        params = SamplingParams(**values)
        prompt: Any = {"prompt_token_ids": list(request.prompt)}
        internal = self.llm.llm_engine.add_request(
            name, prompt, params, lora_request=self._adapter(request.lora)
        )
        self.names[internal] = name
        if params.n > 1:
            self.names.update({f"{i}_{internal}": f"{name}/{i}" for i in range(params.n)})
        self.prompts[name] = len(request.prompt)
        if request.logits:
            self.wanted.add(internal)
            self.rpc(ranks.keep_logits, (internal,))
        return name

    def _adapter(self, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        if folder and folder not in self.adapters:
            number = len(self.adapters) + 1
            self.adapters[folder] = LoRARequest(f"adapter-{number}", number, folder)
        return self.adapters.get(folder)

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            self.outputs[output.request_id] = output
            seen = self.completions.setdefault(output.request_id, {})
            seen.update({c.index: completion_of(c) for c in output.outputs})
        self.check_pages()
        for internal, row in self._rows().items():
            if internal in self.names:
                held = self.held.setdefault(self.names[internal], [])
                held.append(sum(not block.is_null for block in row))
        for internal, request in self.scheduler.requests.items():
            self.preemptions[self.names.get(internal, internal)] = request.num_preemptions

    def steps(self, count: int) -> State:
        for _ in range(count):
            self.step()
        return self.state()

    def busy(self) -> bool:
        return (
            self.llm.llm_engine.has_unfinished_requests()
            or self.scheduler.has_requests()
            or bool(self.core.batch_queue)
        )

    def run(self) -> State:
        while self.busy():
            self.step()
        return self.state()

    def generate(self, requests: list[Request]) -> list[Result]:
        names: dict[int, str] = {}
        step = 0
        while len(names) < len(requests) or self.busy():
            for i, request in enumerate(requests):
                if i not in names and request.at_step <= step:
                    names[i] = self.add(request)
            self.step()
            step += 1
        return self.results([names[i] for i in range(len(requests))])

    def abort(self, names: Sequence[str]) -> None:
        self.llm.llm_engine.abort_request(list(names))

    # Reporting -------------------------------------------------------------------------------

    def results(self, names: Sequence[str]) -> list[Result]:
        return [self._result(name) for name in names]

    def _result(self, name: str) -> Result:
        internal = next(key for key, value in self.names.items() if value == name)
        output = self.outputs.get(name)
        completions = [c for _, c in sorted(self.completions.get(name, {}).items())]
        logits = None
        if internal in self.wanted and completions:
            wanted = (internal, self.prompts[name], len(completions[0].tokens))
            logits = self.rpc(ranks.logits, wanted)[self.output_rank]
        return Result(
            id=name,
            completions=completions,
            prompt_logprobs=by_token(output.prompt_logprobs[1:])
            if output is not None and output.prompt_logprobs
            else None,
            cached_tokens=output.num_cached_tokens if output is not None else None,
            kv_transfer_params=output.kv_transfer_params if output is not None else None,
            held_blocks=list(self.held.get(name, ())),
            preemptions=self.preemptions.get(name, 0),
            logits=logits,
        )

    def _rows(self) -> dict[str, list[Any]]:
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        return dict(manager.req_to_blocks)

    def state(self) -> State:
        rows = self._rows()
        return State(
            pool_blocks=self.pool.num_gpu_blocks - 1,
            free_blocks=self.pool.get_num_free_blocks(),
            hashed_blocks=sum(block.block_hash is not None for block in self.pool.blocks),
            ref_counts={
                block.block_id: block.ref_cnt
                for block in self.pool.blocks
                if block.ref_cnt and not block.is_null
            },
            requests={
                self.names.get(internal, internal): RequestState(
                    status=request.status.name,
                    num_tokens=request.num_tokens,
                    num_computed_tokens=request.num_computed_tokens,
                    num_in_flight_tokens=request.num_in_flight_tokens,
                    block_ids=[block.block_id for block in rows.get(internal, ())],
                )
                for internal, request in self.scheduler.requests.items()
            },
            batches_in_flight=self.in_flight,
        )

    def check_pages(self) -> None:
        """Invariant I4, and that every page counts exactly its holders."""
        holders: Counter[int] = Counter()
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for row in manager.req_to_blocks.values():
                holders.update(block.block_id for block in row if not block.is_null)
        for _, blocks in self.scheduler.deferred_frees:
            holders.update(block.block_id for block in blocks if not block.is_null)
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        pool = {block.block_id for block in self.pool.blocks if not block.is_null}
        counts = {block.block_id: block.ref_cnt for block in self.pool.blocks}
        assert len(free) == self.pool.get_num_free_blocks(), "free queue miscounts itself"
        assert not free & holders.keys(), f"free and held: {sorted(free & holders.keys())}"
        assert free | holders.keys() == pool, f"lost: {sorted(pool - free - holders.keys())}"
        wrong = {
            page: (counts[page], holders[page]) for page in pool if counts[page] != holders[page]
        }
        assert not wrong, f"page: (ref_cnt, holders) = {wrong}"

    def most_batches_in_flight(self) -> int:
        return self.most_in_flight

    def rpc(self, method: str | Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def do(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self, *args)

    def reset_prefix_cache(self) -> bool:
        return self.llm.reset_prefix_cache()

    def encode(self, text: str) -> list[int]:
        return list(self.llm.get_tokenizer().encode(text))

    def decode(self, ids: list[int]) -> str:
        return str(self.llm.get_tokenizer().decode(ids))


def completion_of(output: Any) -> Completion:
    """A copy: vLLM goes on with the lists of its own."""
    return Completion(
        tokens=list(output.token_ids),
        text=output.text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=None if output.logprobs is None else by_token(output.logprobs),
    )


def by_token(logprobs: Any) -> list[dict[int, float]]:
    return [{i: told.logprob for i, told in row.items()} for row in logprobs]


def main() -> None:
    # A killed test run must not leave engines behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    pipe = Connection(int(sys.argv[1]))
    host = Host()
    while True:
        try:
            command, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            reply = (True, getattr(host, command)(*args))
        except Exception:
            reply = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(reply))
    if hasattr(host, "core"):
        host.shut_down()
    sys.stdout.flush()
    os._exit(0)  # vLLM's shutdown has nothing to save


if __name__ == "__main__":
    main()
