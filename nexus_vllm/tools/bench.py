"""`nexus-vllm bench MODEL`: stock vLLM, with its own defaults, against the plugin.

Servers and engines of both are up at the same time and take turns at the same load, so that
whatever else the machine does hits both; what counts are ratios. The report is written anew after
each part.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import nexus_vllm
from nexus_vllm.tools import bench_servers, bench_steps
from nexus_vllm.tools.bench_plots import draw
from nexus_vllm.tools.bench_report import Part, as_json, kept_parts, kv_gib, render
from nexus_vllm.tools.bench_servers import (
    Load,
    Pair,
    compare,
    device_options,
    run_command,
    say,
)

LOAD = "PROMPT+OUTPUTxREQUESTS tokens and requests, all at once or with @CONCURRENCY"


def add_to(commands: Any) -> None:
    """Add this command to the parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure stock vLLM against eviction, side by side",
        description="Write report.md and report.json: "
        + "; ".join(TITLES.values())
        + ". Parts that a report in DIR has already, and --parts does not name, stay as they are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a model")
    option = parser.add_argument
    option("--out", type=Path, required=True, metavar="DIR", help="folder of the report")
    option("--parts", type=_parts, default=",".join(PARTS), help="letters, as in a,c,f")
    option("--rounds", type=int, default=2, metavar="N", help="a, d: loads on each server")
    option("--seed", type=int, default=1)
    option("--budget", default="20%", help="c, d: --kv-budget of ours")
    option("--budget-floor", type=int, default=128, metavar="N", help="c, d: of ours")
    option("--serve-args", type=shlex.split, default=[], metavar="ARGS", help="for both servers")
    option("--our-args", type=shlex.split, default=[], metavar="ARGS", help="for our server")
    option("--stock-block-size", type=int, default=128, help="a guess; found out if wrong")
    small = parser.add_argument_group("c: a small pool, which holds two whole sequences")
    small.add_argument("--loads", type=_loads, default="900+220x8", metavar="LOAD,...", help=LOAD)
    small.add_argument("--small-rounds", type=int, default=1, metavar="N")
    small.add_argument("--pool-sequences", type=int, default=2, metavar="N")
    ample = parser.add_argument_group("a, d: an ample pool")
    ample.add_argument("--ample-loads", type=_loads, default="512+96x8@4", help=LOAD)
    ample.add_argument("--starts", type=int, default=1, metavar="N", help="a, d: of both servers")
    ample.add_argument("--step-tokens", type=int, default=512, metavar="N", help="d: single steps")
    ample.add_argument("--step-batch", type=int, default=4, metavar="N", help="d: single steps")
    ample.add_argument("--texts", type=int, default=4, metavar="N", help="a, d: texts compared")
    decode = parser.add_argument_group("b: decode speed")
    decode.add_argument("--contexts", type=_numbers, default="2048", metavar="N,...")
    decode.add_argument("--batches", type=_numbers, default="1,4", metavar="N,...")
    decode.add_argument("--densities", type=_numbers, default="100,50,20,10", metavar="PERCENT,...")
    decode.add_argument("--turns", type=int, default=24, metavar="N", help="steps of each")
    stream = parser.add_argument_group("e: a long stream")
    stream.add_argument("--fed-tokens", type=int, default=4000, metavar="N")
    stream.add_argument("--stream-tokens", type=int, default=600, metavar="N", help="generated")
    stream.add_argument("--stream-budget", type=int, default=512, metavar="N")
    stream.add_argument("--stream-allocators", type=_words, default="uniform", metavar="NAME,...")
    longer = parser.add_argument_group("g: a prompt longer than the pool")
    longer.add_argument("--long-prompt-tokens", type=int, default=7000, metavar="N")
    longer.add_argument("--long-pool-tokens", type=int, default=2048, metavar="N")
    longer.add_argument("--long-output-tokens", type=int, default=64, metavar="N")
    cost = parser.add_argument_group("f: cost of an eviction")
    cost.add_argument("--live-tokens", type=_numbers, default="512,1024", metavar="N,...")
    cost.add_argument("--live-density", type=float, default=0.5, help="of the prompt's tokens")
    cost.add_argument("--allocators", type=_words, default="uniform,lu", metavar="NAME,...")
    cost.add_argument("--evictions", type=int, default=8, metavar="N", help="for each row")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and write. Returns 1 when something is refused or fails, with the reason."""
    return run_command("bench", lambda: _run(args), "stopped; the parts that were done are written")


def _run(args: argparse.Namespace) -> int:
    args.given, args.model = args.model, model_folder(args.model)
    args.cpu = not gpu()
    args.out.mkdir(parents=True, exist_ok=True)
    told = machine(args.cpu)
    told |= {"model": args.model.name, "command": _typed(args)}
    parts = _kept(args, told)
    with tempfile.TemporaryDirectory(prefix="nexus-bench-") as work:
        args.work = Path(work)
        for letter in args.parts:
            load, began = os.getloadavg()[0], time.monotonic()
            try:
                part = PARTS[letter](args)
            except RuntimeError:
                for log in args.work.glob("*.log"):  # the temporary folder goes
                    shutil.copy(log, args.out)
                raise
            part.data |= {"load_before": load, "seconds": time.monotonic() - began}
            part.setup += (
                f" Measured {told['date']}, load of the machine before: {load:.1f}, took "
                f"{part.data['seconds']:.0f} s."
            )
            parts = sorted([*parts, part], key=lambda part: part.letter)
            (args.out / "report.json").write_text(as_json(told, parts))
            (args.out / "report.md").write_text(render(told, parts, draw(parts, args.out)))
            for line in part.summary:
                say(f"part {letter}: {line}")
    print(args.out / "report.md")
    return 0


def _kept(args: argparse.Namespace, told: dict[str, Any]) -> list[Part]:
    """Parts of the report in DIR that are not measured again."""
    report = args.out / "report.json"
    found = kept_parts(report.read_text(), told) if report.exists() else []
    kept = [part for part in found if part.letter not in args.parts]
    if kept:
        say(f"{report} keeps its part(s) {', '.join(part.letter for part in kept)}")
    elif report.exists():
        say(f"{report} is written anew")
    return kept


def _typed(args: argparse.Namespace) -> str:
    """This command, without the folders of this machine."""
    shown, before = ["nexus-vllm"], ""
    for item in sys.argv[1:]:
        shown.append("DIR" if before == "--out" else "MODEL" if item == str(args.given) else item)
        before = item
    return shlex.join(shown)


def model_folder(model: Path) -> Path:
    """As an absolute path. Raises ValueError where it is none."""
    if not (model / "config.json").is_file():
        raise ValueError(
            f"{model} is not the folder of a model (it has no config.json): download the model and "
            "name its folder; in the clone, scripts/prepare_model.py prints that of the bundled one"
        )
    return model.resolve()


def gpu() -> bool:
    """As scripts/serve.sh tells."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return listed.stdout.startswith("GPU")


def machine(cpu: bool) -> dict[str, Any]:
    """Where and with what this runs."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB" + ("" if cpu else ", GPU"),
        "versions": ", ".join(
            [
                f"nexus-vllm {nexus_vllm.__version__}",
                *(f"{name} {_version(name)}" for name in ("vllm", "torch")),
                f"Python {platform.python_version()}",
                platform.platform(),
            ]
        ),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?"


def _shared(args: argparse.Namespace) -> list[str]:
    """Options of both servers."""
    return [*device_options(args.cpu), *args.serve_args]


def _pair(args: argparse.Namespace, ours: list[str], length: int, sequences: int) -> Pair:
    length = -(-length // 128) * 128
    tokens = length * sequences
    return Pair(
        model=args.model,
        shared=_shared(args),
        stock=[],
        ours=[*ours, *args.our_args],
        pool_tokens=tokens,
        max_model_len=length,
        stock_block=args.stock_block_size,
        kv_gib=kv_gib(json.loads((args.model / "config.json").read_text()), tokens),
        out=args.work,
    )


def _evicting(args: argparse.Namespace) -> list[str]:
    return [
        *("--kv-eviction", "nexus", "--kv-budget", args.budget),
        *("--kv-budget-floor", str(args.budget_floor)),
    ]


def _longest(loads: Sequence[Load]) -> int:
    # The client makes text of its random tokens, which may come back as a few tokens more.
    return max(load.prompt + load.output for load in loads) + 16


def _small_pool(args: argparse.Namespace) -> Part:
    pair = _pair(args, _evicting(args), _longest(args.loads), args.pool_sequences)
    part = Part(
        "c",
        TITLES["c"],
        f"A pool of {pair.pool_tokens} tokens, which holds {args.pool_sequences} sequences of "
        f"{pair.max_model_len}. {_said(args.loads)} Ours: {' '.join(pair.ours)}.",
    )
    return compare(part, pair, args.loads, args.small_rounds, args.seed)


def _ample(args: argparse.Namespace, letter: str, ours: list[str], tokens: int) -> Part:
    loads = args.ample_loads
    longest = max(_longest(loads), 600 + tokens)
    pair = _pair(args, ours, longest, 4 * max(load.concurrency for load in loads))
    part = Part(
        letter,
        TITLES[letter],
        f"A pool of {pair.pool_tokens} tokens, more than the load needs. {_said(loads)} "
        f"Servers started {args.starts} times. Ours: {' '.join(pair.ours)}.",
    )
    same = bench_servers.same_text(args.texts, tokens, 1500) if args.texts else None
    return compare(part, pair, loads, args.rounds, args.seed, same, args.starts)


def _said(loads: Sequence[Load]) -> str:
    return " ".join(
        f"Load: {load.requests} requests of {load.prompt} + {load.output} tokens per round, "
        f"{load.concurrency} in flight."
        for load in loads
    )


def _idle(args: argparse.Namespace) -> Part:
    return _ample(args, "a", ["--kv-eviction", "nexus", "--kv-budget", "full"], 48)


def _pressure(args: argparse.Namespace) -> Part:
    # A file's settings give way to flags, and the trigger has none.
    knobs = ["--kv-eviction-config", '{"trigger": "pressure"}']
    part = _ample(args, "d", [*_evicting(args), *knobs], 48)
    ours = {"budget": args.budget, "budget_floor": args.budget_floor, "trigger": "pressure"}
    return bench_steps.step_cost(
        part,
        args.model,
        args.work,
        args.cpu,
        ours,
        args.step_tokens,
        args.step_batch,
        args.turns,
        args.starts,
    )


def _decode(args: argparse.Namespace) -> Part:
    setup = (
        f"Medians of {args.turns} decode steps of batches of different prompts, which take turns; "
        "synchronous scheduling. The ideal reads weights and live KV once, at the bandwidth of a "
        "large copy. Steps that evict are left out: see f. Where the time goes is torch's profile "
        "of eight further steps, evictions among them."
    )
    return bench_steps.decode_speed(
        Part("b", TITLES["b"], setup),
        args.model,
        args.work,
        args.cpu,
        args.contexts,
        args.batches,
        args.densities,
        args.turns,
    )


def _stream(args: argparse.Namespace) -> Part:
    setup = (
        f"One sequence at a time is fed {args.fed_tokens} tokens of prose, chunk by chunk, and "
        f"generates {args.stream_tokens} more, whatever it says; it may keep "
        f"{args.stream_budget}. Step times include evictions."
    )
    return bench_steps.long_stream(
        Part("e", TITLES["e"], setup),
        args.model,
        args.work,
        args.cpu,
        args.fed_tokens,
        args.stream_tokens,
        args.stream_budget,
        args.stream_allocators,
    )


def _longer(args: argparse.Namespace) -> Part:
    length = args.long_prompt_tokens + args.long_output_tokens
    pair = _pair(args, _evicting(args), length, 1)
    pair.pool_tokens = args.long_pool_tokens
    part = Part(
        "g",
        TITLES["g"],
        f"A prompt of {args.long_prompt_tokens} tokens on a pool of {pair.pool_tokens}. "
        f"Ours: {' '.join(pair.ours)}.",
    )
    return bench_servers.longer_than_memory(
        part, pair, args.long_prompt_tokens, args.long_output_tokens
    )


def _cost(args: argparse.Namespace) -> Part:
    setup = (
        f"One sequence whose prompt was cut to {args.live_density:.0%} decodes on and is evicted "
        "at the default interval: seconds of the worker (nexus:eviction_seconds) beside "
        "the steps between that evict nothing. Where the time goes is torch's profile of two "
        "further evictions; the products are those of the window's queries with the live keys."
    )
    return bench_steps.eviction_cost(
        Part("f", TITLES["f"], setup),
        args.model,
        args.work,
        args.cpu,
        args.live_tokens,
        args.live_density,
        args.allocators,
        args.evictions,
    )


TITLES = {
    "a": "idle: a budget that covers every sequence",
    "b": "decode speed by context, batch and density",
    "c": "a small pool",
    "d": "an ample pool, evicting under pressure only",
    "e": "a long stream",
    "f": "the cost of an eviction",
    "g": "a prompt longer than the pool",
}
PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "a": _idle,
    "b": _decode,
    "c": _small_pool,
    "d": _pressure,
    "e": _stream,
    "f": _cost,
    "g": _longer,
}


def _parts(text: str) -> list[str]:
    letters = text.split(",")
    for letter in letters:
        if letter not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {letter!r}: choose from {','.join(PARTS)}")
    return letters


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _loads(text: str) -> list[Load]:
    try:
        return [Load.of(item) for item in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _words(text: str) -> list[str]:
    return text.split(",")
