"""One vLLM engine that is stepped from outside: the child process of parts b, e and f.

    python -m nexus_vllm.tools.bench_engine   # JSON lines in, JSON lines out

Groups of sequences live in one engine and are stepped by turns, each group alone, so that whatever
else the machine does hits all alike. Turns are made by hiding the other groups from vLLM's
scheduler: no vLLM interface does that.
"""

import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request


class Host:
    """The commands. `nexus`: keywords of `nexus_vllm.engine_args`, or None for stock vLLM."""

    def __init__(self, model: str, options: dict[str, Any], nexus: dict[str, Any] | None) -> None:
        from vllm import LLM

        ours: dict[str, Any] = {}
        if nexus is not None:
            import nexus_vllm

            ours = nexus_vllm.engine_args(**nexus)
        # Synchronous scheduling: only then is a step's time that of its own forward pass.
        self.llm = LLM(
            model, async_scheduling=False, seed=0, disable_log_stats=False, **options, **ours
        )
        self.engine: LLMEngine = self.llm.llm_engine
        client: InprocClient = self.engine.engine_core
        self.scheduler: Scheduler = client.engine_core.scheduler
        self.groups: dict[str, list[Request]] = {}
        self.tokenizer: Any = self.llm.get_tokenizer()
        self.prose: list[int] = []

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        cache = self.engine.vllm_config.cache_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "pool_blocks": cache.num_gpu_blocks_override or cache.num_gpu_blocks,
            "block_size": cache.block_size,
        }

    def bandwidth(self, mib: int = 512, times: int = 7) -> float:
        """Bytes per second of copying a tensor far larger than any cache, read and written."""
        import torch

        on = "cuda" if torch.cuda.is_available() else "cpu"
        source = torch.ones(mib * 2**18, device=on)
        target = torch.zeros_like(source)
        best = float("inf")
        for _ in range(times):
            begin = time.perf_counter()
            target.copy_(source)
            if on == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        return 2 * source.numel() * 4 / best

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prose of `length` tokens, from places of its own for each; the first is always the same.

        A longer prompt begins with the shorter one from the same place.
        """
        if not self.prose:
            from pydoc_data.topics import topics

            text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
            self.prose = self.tokenizer.encode(text)
        apart = len(self.prose) // count
        endless = self.prose * (2 + length // len(self.prose))
        return [endless[i * apart : i * apart + length] for i in range(count)]

    def start(
        self, name: str, count: int, length: int, tokens: int, extra: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Compute a group's prompts, each up to its first token, and hide it.

        Returns for each step its seconds, the tokens computed, and the pages held after it.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        waiting = set()
        for index, prompt in enumerate(self.prompts(count, length)):
            waiting.add(f"{name}-{index}")
            self.engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, params)
        steps, computed = [], 0
        while waiting:
            begin = time.perf_counter()
            waiting -= {out.request_id for out in self.engine.step() if out.outputs[0].token_ids}
            seconds = time.perf_counter() - begin
            self.groups[name] = list(self.scheduler.running)
            after = sum(request.num_computed_tokens for request in self.groups[name])
            steps.append(
                {"seconds": seconds, "tokens": after - computed, "pages": self._pages(name)}
            )
            computed = after
        self.scheduler.running.clear()
        return steps

    def turn(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Steps of this group alone: seconds of each, the evictions that it began with, the seconds
        that they took, and the pages of all sequences after it."""
        self.scheduler.running[:] = self.groups[name]
        told = []
        for _ in range(count):
            number, inside = _evictions()
            begin = time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - begin
            self.groups[name] = list(self.scheduler.running)
            after, inside_after = _evictions()
            told.append(
                {
                    "seconds": seconds,
                    "evictions": after - number,
                    "eviction_seconds": inside_after - inside,
                    "pages": self._pages(name),
                }
            )
        self.scheduler.running.clear()
        return told

    def breakdown(self, name: str, count: int) -> dict[str, float]:
        """Where `count` steps of a group spend their time, by torch's profiler: ms a step."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as seen:
            steps = self.turn(name, count)
        told = dict.fromkeys(("linear", "attention", "other operators"), 0.0)
        for event in seen.key_averages():
            kind = "other operators"
            if "attention" in event.key:
                kind = "attention"
            elif re.search(r"linear|mm\b|gemm", event.key):
                kind = "linear"
            told[kind] += event.self_cpu_time_total / 1e3 / count
        whole = 1e3 * sum(step["seconds"] for step in steps) / count
        return {**told, "between operators": whole - sum(told.values()), "step": whole}

    def eviction_breakdown(self, name: str, steps: int) -> dict[str, float]:
        """Where the evictions of `steps` steps spend their time, by torch's profiler: ms each."""
        from torch.profiler import ProfilerActivity, profile

        from nexus_vllm.engine.evictor import PROFILER_RANGE

        with profile(activities=[ProfilerActivity.CPU]) as seen:
            self.turn(name, steps)
        told = dict.fromkeys(("products", "gathering and moving", "other operators"), 0.0)
        whole, count = 0.0, 0
        for event in seen.events():
            if event.name == PROFILER_RANGE:
                whole, count = whole + event.cpu_time_total, count + 1
            elif _inside(event, PROFILER_RANGE):
                kind = "other operators"
                if re.search(r"mm\b", event.name):
                    kind = "products"
                elif re.search(r"index|copy|gather|scatter", event.name):
                    kind = "gathering and moving"
                told[kind] += event.self_cpu_time_total
        if not count:
            raise RuntimeError(f"{steps} steps of {name} have evicted nothing")
        whole, told = whole / 1e3 / count, {k: v / 1e3 / count for k, v in told.items()}
        return {**told, "between operators": whole - sum(told.values()), "eviction": whole}

    def close(self, name: str) -> None:
        """Drop a group."""
        self.scheduler.running[:] = self.groups.pop(name)
        self.engine.abort_request([request.request_id for request in self.scheduler.running], True)
        self.scheduler.running.clear()

    def _pages(self, name: str) -> int:
        manager = self.scheduler.kv_cache_manager
        rows = [manager.get_block_ids(request.request_id)[0] for request in self.groups[name]]
        return sum(page != 0 for row in rows for page in row)


def _inside(event: Any, name: str) -> bool:
    """Whether an event of torch's profiler lies in a range of this name."""
    above = event.cpu_parent
    while above is not None and above.name != name:
        above = above.cpu_parent
    return above is not None


def _evictions() -> tuple[float, float]:
    """How many so far, and their seconds, from the metrics of this process."""
    from prometheus_client import REGISTRY

    name = "nexus:eviction_seconds"
    told = [REGISTRY.get_sample_value(f"{name}_{what}") or 0.0 for what in ("count", "sum")]
    return told[0], told[1]


def main() -> int:
    """Serve commands until the end of the input. The first line makes the engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are driven from here
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    host: Host | None = None
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            if host is None:
                host = Host(**arguments)
                value: Any = host.facts()
            else:
                value = getattr(host, command)(**arguments)
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)
            continue
        print(json.dumps({"value": value}), file=replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
