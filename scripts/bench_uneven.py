#!/usr/bin/env python3
"""What uneven head budgets cost while decoding: step times against equal budgets, side by side.

    scripts/bench_uneven.py [--profile FILE] [--tokens 96] [--allocators NAME ...] [--cprofile]

One process and one engine hold a batch of long prompts per allocator, all cut to the same budget.
The batches decode in turns, one step each, so that whatever else the machine does hits all alike;
ratios are medians over turns. Equal budgets run twice: what they differ by is chance. The prompts
share all but their endings, so that the longest part is computed once.

Turns are made by hiding the other batches from vLLM's scheduler: no vLLM interface does that.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import platform
import pstats
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDING = 40  # tokens in which prompts differ
WARM_UP = 3  # turns left out


@dataclass
class Batch:
    """One allocator's requests; seconds of pure decode steps, and of steps with evictions, each
    with the number of sequences evicted."""

    name: str
    requests: list[Any]
    decode: list[float] = field(default_factory=list)
    evicting: list[tuple[float, int]] = field(default_factory=list)
    profiler: cProfile.Profile = field(default_factory=cProfile.Profile)


def make_prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Prose of `length` tokens, alike but for the last tokens of each."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    ids = tokenizer.encode(text[: 8 * (length + count * ENDING)])
    shared, rest = ids[: length - ENDING], ids[length - ENDING :]
    return [shared + rest[i * ENDING : (i + 1) * ENDING] for i in range(count)]


class Bench:
    def __init__(self, args: argparse.Namespace, names: list[str]) -> None:
        from vllm import LLM

        import nexus_vllm

        knobs = {"profile": str(args.profile)} if args.profile else {}
        self.llm = LLM(
            str(args.model),
            dtype="float32",
            enforce_eager=not args.compile,
            max_model_len=args.length + args.tokens + 64,
            max_num_seqs=args.batch * len(names),
            async_scheduling=False,
            seed=0,
            **nexus_vllm.engine_args(budget=args.budget, budget_floor=128, **knobs),
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.prompts = make_prompts(self.llm.get_tokenizer(), args.batch, args.length)
        self.profiling = args.cprofile
        self.batches = [
            self.start(name, f"{i}-{name}", args.tokens) for i, name in enumerate(names)
        ]

    def start(self, allocator: str, prefix: str, tokens: int) -> Batch:
        """Compute the prompts of a batch, each up to its first token, and hide it."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=2 * tokens + WARM_UP + len(self.prompts),  # nobody ends during the turns
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_allocator": allocator},
        )
        begin = time.perf_counter()
        waiting = set()
        for index, prompt in enumerate(self.prompts):
            waiting.add(f"{prefix}-{index}")
            self.engine.add_request(f"{prefix}-{index}", {"prompt_token_ids": prompt}, params)
        while waiting:
            waiting -= {out.request_id for out in self.engine.step() if out.outputs[0].token_ids}
        batch = Batch(allocator, list(self.scheduler.running))
        self.scheduler.running.clear()
        print(f"{allocator}: prompts took {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        return batch

    def released(self) -> dict[str, int]:
        """Blocks given up so far by each sequence."""
        state: dict[str, Any] = self.llm.collective_rpc("kv_eviction_state")[0]
        return {request: told["released"] for request, told in state.items()}

    def step(self, batch: Batch) -> tuple[float, int]:
        """One step of this batch alone: its seconds, and the evictions that it began with."""
        self.scheduler.running[:] = batch.requests
        before = self.released()
        if self.profiling:
            batch.profiler.enable()
        begin = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - begin
        batch.profiler.disable()
        batch.requests = list(self.scheduler.running)
        self.scheduler.running.clear()
        return seconds, sum(before[request] != now for request, now in self.released().items())

    def turns(self, count: int) -> None:
        """`count` steps of every batch, in changing order."""
        for turn in range(-WARM_UP, count):
            order = self.batches[::-1] if turn % 2 else self.batches
            told = [(batch, *self.step(batch)) for batch in order]
            pure = not any(evictions for _, _, evictions in told)
            for batch, seconds, evictions in told if turn >= 0 else []:
                if pure:
                    batch.decode.append(seconds)
                elif evictions:
                    batch.evicting.append((seconds, evictions))

    def close(self) -> None:
        self.scheduler.running[:] = [r for batch in self.batches for r in batch.requests]
        self.engine.abort_request([request.request_id for request in self.scheduler.running])


def report(args: argparse.Namespace, batches: list[Batch]) -> str:
    """The measurements as Markdown."""
    import torch
    import vllm

    import nexus_vllm

    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
    lines = [
        f"{args.batch} sequences of {args.length} tokens cut to {args.budget}, "
        f"{len(batches[0].decode)} pure decode steps, "
        f"model {args.model.name}, float32, {'compiled' if args.compile else 'eager'}.",
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load "
        f"{os.getloadavg()[0]:.1f}; nexus-vllm {nexus_vllm.__version__}, vLLM {vllm.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| allocator | decode step, ms | fastest tenth, ms | against uniform | quartiles "
        "| eviction of one sequence, ms |",
        "|---|---|---|---|---|---|",
    ]
    for batch in batches:
        pairs = zip(batch.decode, batches[0].decode, strict=True)
        low, middle, high = statistics.quantiles([ours / theirs for ours, theirs in pairs], n=4)
        fast = sorted(batch.decode)[len(batch.decode) // 10]
        step = statistics.median(batch.decode)
        each = [(seconds - step) / count for seconds, count in batch.evicting]
        evicting = f"{statistics.median(each) * 1e3:.0f}" if each else "-"
        lines.append(
            f"| {batch.name} | {step * 1e3:.1f} | {fast * 1e3:.1f} "
            f"| {middle:.3f} | {low:.2f}-{high:.2f} | {evicting} |"
        )
    return "\n".join(lines)


def main() -> int:
    cache = os.environ.get("NEXUS_VLLM_CACHE", "~/.cache/nexus-vllm")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=Path(cache).expanduser() / "smollm2-135m-instruct"
    )
    parser.add_argument("--profile", type=Path, help="profile of the model, for allocator lu")
    parser.add_argument(
        "--allocators", nargs="+", metavar="NAME", help="default: global, and lu with a profile"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--budget", default="40%")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to decode per sequence")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model")
    parser.add_argument("--cprofile", action="store_true", help="print where Python's time goes")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are driven from here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "5")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning hurts where cores are shared
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    uneven = args.allocators or ["global", *(["lu"] if args.profile else [])]
    bench = Bench(args, ["uniform", *uneven, "uniform"])
    bench.turns(args.tokens)
    print(report(args, bench.batches))
    for batch in bench.batches if args.cprofile else []:
        print(f"\n{batch.name}:")
        pstats.Stats(batch.profiler).sort_stats("tottime").print_stats(20)
    bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
