"""`nexus-vllm profile MODEL`: measure how many blocks each (layer, KV head) of a model deserves.

On the CPU, with transformers: let the model repeat each context and let all blocks of all heads
compete by the largest attention they get. `--oracle future` is LU-KV's own protocol (arXiv
2602.08585): ask questions about the contexts, see which blocks the answers needed, and deal a
budget out so that least is lost under the policy's ranking. docs/head-budgets.md compares them.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add this command to the parser's subcommands."""
    parser = commands.add_parser(
        "profile",
        help="measure the share of the KV budget that each head of a model deserves",
        description="Write a profile for `--kv-allocator lu`: shares per layer and KV head.",
    )
    parser.add_argument("model", metavar="MODEL", help="path or name, as for vllm serve")
    option = parser.add_argument
    option("--out", type=Path, metavar="FILE", help="default: NAME-SCORE[-replay].json, here")
    option("--score", default="nexus", help="policy that ranks blocks inside heads (nexus)")
    option(
        "--score-parameter",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of that policy; may be repeated",
    )
    option(
        "--oracle",
        choices=("future", "replay"),
        default="replay",
        help="what repeating the context looks at (the default: it served better and takes less "
        "time), or what answers to questions look at",
    )
    option("--contexts", nargs="+", type=Path, default=[], metavar="FILE", help="UTF-8 texts")
    option("--synthetic", type=int, default=2, metavar="N", help="made contexts without files (2)")
    option("--context-tokens", type=int, default=4096, metavar="N", help="most of each (4096)")
    option("--queries", type=int, default=30, metavar="N", help="questions per context (30)")
    option("--answer-tokens", type=int, default=64, metavar="N", help="most per question (64)")
    option("--temperature", type=float, default=0.0, help="of the answers; 0: greedy (0)")
    option("--chunk", type=int, default=2048, metavar="N", help="tokens replayed at once (2048)")
    option("--seed", type=int, default=0)
    for name, what in (
        ("block-size", "tokens per block"),
        ("window", "last queries that the policy sees"),
        ("sink-blocks", "first blocks that stay anyway"),
    ):
        option(f"--{name}", type=int, metavar="N", help=f"{what}; default: as when serving")
    option(
        "--recency-blocks",
        type=int,
        metavar="N",
        help="last blocks that stay anyway; default: one more than when serving, which leaves even "
        "the least head a block to choose",
    )
    option("--plot", type=Path, metavar="FILE", help="heat maps as PNG (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, save, print the report. Returns 1 when something is refused, with the reason."""
    try:
        _run(args)
    except (ValueError, OSError) as error:
        print(f"nexus-vllm profile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnexus-vllm profile: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    # transformers and torch take seconds to import: only here, so that other commands start fast.
    from tqdm import tqdm  # type: ignore[import-untyped]

    from nexus_vllm.config import Settings
    from nexus_vllm.tools import profile_job

    def serving(name: str) -> int:
        given: int | None = getattr(args, name)
        return Settings.model_fields[name].default if given is None else given

    job = profile_job.Job(
        oracle=args.oracle,
        score=args.score,
        parameters=_parameters(args.score_parameter),
        contexts=tuple((path.name, path.read_text(encoding="utf-8")) for path in args.contexts),
        synthetic=args.synthetic,
        context_tokens=args.context_tokens,
        queries=args.queries,
        answer_tokens=args.answer_tokens,
        temperature=args.temperature,
        chunk=args.chunk,
        seed=args.seed,
        block_size=serving("block_size"),
        window=serving("window"),
        sink=serving("sink_blocks"),
        recency=_recency(args.recency_blocks),
    )
    if args.plot:
        profile_job.require_matplotlib()
    out = args.out or _default_out(args)
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")

    watched, tokenizer = _load(args.model)
    partial = profile_job.Partial(out, job.key(watched))
    began = time.monotonic()
    with tqdm(total=job.total, unit="query", desc="profile") as bar:
        pairs = profile_job.measure(job, watched, tokenizer, partial, bar.update)
    profile = profile_job.build(job, watched, pairs)
    profile.save(out)
    partial.remove()
    print(f"{out}: {len(pairs)} measurements, {time.monotonic() - began:.0f} s")
    print("\n".join(profile_job.report(job, watched, pairs)))
    if args.plot:
        profile_job.plot(profile, args.plot)
        print(args.plot)


def _load(model: str) -> tuple[Any, Any]:
    """A model to watch, in float32 on the CPU, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nexus_vllm.tools.profile_measure import Watched

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return Watched(loaded, model), AutoTokenizer.from_pretrained(model)


def _parameters(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE with JSON values; what is no JSON is a string."""
    parameters: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--score-parameter {item!r} must be KEY=VALUE")
        try:
            parameters[key] = json.loads(value)
        except json.JSONDecodeError:
            parameters[key] = value
    return parameters


def _recency(given: int | None) -> int:
    """Blocks that count as newest: with one more than stays by force, each head has one to choose.

    Without it small budgets went to few heads, and questions that the window had seen were lost.
    """
    from nexus_vllm.config import Settings

    default: int = Settings.model_fields["recency_blocks"].default
    return default + 1 if given is None else given


def _default_out(args: argparse.Namespace) -> Path:
    name = args.model.rstrip("/").rsplit("/", 1)[-1]
    return Path(f"{name}-{args.score}{'-replay' if args.oracle == 'replay' else ''}.json")
