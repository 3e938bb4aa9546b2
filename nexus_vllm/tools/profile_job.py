"""From a model and contexts to a profile: measurements that survive interruption, then shares."""

import hashlib
import importlib
import json
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nexus_vllm
from nexus_vllm import lukv, policies
from nexus_vllm.config import POLICIES, Settings
from nexus_vllm.profile import Origin, Profile, average, rank_correlation
from nexus_vllm.tools import profile_prompts
from nexus_vllm.tools.profile_measure import Watched, block_weights

REPLAY_PROMPT = "\n\nRepeat the previous context exactly.\n\n"
REPORT_DENSITIES = (0.1, 0.2, 0.4)
PLOT_DENSITIES = (0.2, 0.4)


@dataclass(frozen=True)
class Job:
    """All that decides the numbers, apart from the model.

    oracle: "future" (what answers to questions look at) or "replay" (what repeating the context
    looks at). score, parameters: the policy that ranks the blocks of a head, and all its settings.
    contexts: pairs of name and text; empty: `synthetic` made ones. context_tokens: the most tokens
    of each. queries, answer_tokens, temperature: of "future". chunk: tokens replayed at once.
    window: queries before the cut that the policy sees. sink, recency: blocks that stay anyway.
    """

    oracle: str = "future"
    score: str = "nexus"
    parameters: Mapping[str, Any] | None = None
    contexts: tuple[tuple[str, str], ...] = ()
    synthetic: int = 2
    context_tokens: int = 4096
    queries: int = 30
    answer_tokens: int = 64
    temperature: float = 0.0
    chunk: int = 2048
    seed: int = 0
    block_size: int = 32
    window: int = 16
    sink: int = 1
    recency: int = 1

    def __post_init__(self) -> None:
        own = {self.score: dict(self.parameters or {})} if self.score in POLICIES else {}
        policy = policies.make(self.score, Settings(parameters=own))  # as when serving
        if policy.needs_values or policy.needs_rope or policy.needs_replay:
            reads = "the prompt's replay" if policy.needs_replay else "values"
            raise ValueError(
                f"score {self.score!r} reads {reads}, not recorded here; profile nexus, "
                "and ask that server with X-KV-Policy and X-KV-Allocator: lu"
            )
        object.__setattr__(self, "parameters", asdict(policy))  # type: ignore[call-overload]
        if self.oracle not in ("future", "replay"):
            raise ValueError(f"oracle is {self.oracle!r}, choose future or replay")
        at_least = {"queries": 1, "answer_tokens": 1, "block_size": 1, "window": 1, "chunk": 1}
        for name, low in {**at_least, "temperature": 0, "sink": 0, "recency": 0}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {low}")
        if not self.contexts and self.synthetic < 1:
            raise ValueError("there is no context; give --contexts, or --synthetic 1 or more")
        least = (self.sink + self.recency + 1) * self.block_size
        if self.context_tokens < least:
            raise ValueError(
                f"context_tokens is {self.context_tokens}, must be at least {least} "
                f"(sink + recency + one block of {self.block_size})"
            )

    @property
    def asked(self) -> int:
        """Measurements per context."""
        return self.queries if self.oracle == "future" else 1

    @property
    def total(self) -> int:
        """Measurements in all."""
        return self.asked * (len(self.contexts) or self.synthetic)

    def forced(self, blocks: int) -> Tensor:
        """bool [N], sink and recency."""
        index = torch.arange(blocks)
        return (index < self.sink) | (index >= blocks - self.recency)

    def key(self, watched: Watched) -> str:
        """Changes with whatever changes a measurement; the name of the model stands for it."""
        known = {"job": asdict(self), "model": asdict(watched.facts), "versions": versions()}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


class Pair(NamedTuple):
    """One measurement: what the blocks turned out to be worth, and what the policy had thought.

    context, query: indices. importance, scores: [L, H, N] float32.
    """

    context: int
    query: int
    importance: Tensor
    scores: Tensor


class Partial:
    """The side file of measurements done so far; one of other arguments is started over."""

    def __init__(self, out: Path, key: str) -> None:
        self.path = out.with_name(out.name + ".partial")
        self.key = key
        self.pairs: dict[tuple[int, int], Pair] = {}
        if self.path.exists():
            data = torch.load(self.path, weights_only=True)
            if data["key"] == key:
                self.pairs = {(row[0], row[1]): Pair(*row) for row in data["pairs"]}

    def add(self, pair: Pair) -> None:
        """Keep one more, on disk too; an interruption loses at most this one."""
        self.pairs[pair.context, pair.query] = pair
        rows = [tuple(pair) for pair in self.pairs.values()]
        fresh = self.path.with_name(self.path.name + ".new")
        torch.save({"key": self.key, "pairs": rows}, fresh)
        os.replace(fresh, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def measure(
    job: Job, watched: Watched, tokenizer: Any, partial: Partial, done: Callable[[int], object]
) -> list[Pair]:
    """All pairs in order; those in `partial` are not measured again. `done(n)` after n pairs.

    tokenizer: `encode(text, add_special_tokens=)`, `decode(ids, skip_special_tokens=)` and
    `eos_token_id`, as in transformers.
    """
    done(len(partial.pairs))
    names = job.contexts or [("", "")] * job.synthetic
    for index, (name, text) in enumerate(names):
        missing = [n for n in range(job.asked) if (index, n) not in partial.pairs]
        if not missing:
            continue
        ids = _tokens(job, tokenizer, name, text, index)
        blocks = len(ids) // job.block_size
        window = watched.read(ids, job.window)
        if job.oracle == "replay":
            prompt = tokenizer.encode(REPLAY_PROMPT, add_special_tokens=False)
            scores = watched.replay(ids, prompt, job.block_size, job.chunk)
            partial.add(Pair(index, 0, scores, scores))
            done(1)
            continue
        policy, drawn = policies.make(job.score, job.parameters), _seed(job, "policy", index)
        forced = job.forced(blocks)
        scores = block_weights(watched, policy, window, job.block_size, forced, drawn)
        questions = profile_prompts.questions(
            tokenizer.decode(ids, skip_special_tokens=True),
            () if job.contexts else profile_prompts.facts(job.seed, index),
            job.queries,
            job.seed,
            index,
        )
        stop = _stop_tokens(watched.model, tokenizer)
        for query in missing:
            peak, _ = watched.answer(
                tokenizer.encode(questions[query], add_special_tokens=False),
                job.answer_tokens,
                stop,
                job.temperature,
                _seed(job, f"answer {query}", index),
            )
            partial.add(Pair(index, query, watched.oracle(peak, job.block_size), scores))
            done(1)
    return [partial.pairs[place] for place in sorted(partial.pairs)]


def build(job: Job, watched: Watched, pairs: Iterable[Pair]) -> Profile:
    """The mean over pairs of each one's best shares."""
    made = []
    for pair in pairs:
        forced = job.forced(pair.scores.shape[-1])
        if job.oracle == "replay":
            shares = lukv.replay_shares(pair.scores, forced, lukv.DENSITIES)
        else:
            shares = lukv.solve(pair.importance, pair.scores, forced, lukv.DENSITIES)
        made.append(
            Profile(
                model=watched.facts,
                score=job.score,
                parameters=job.parameters or {},
                block_size=job.block_size,
                densities=lukv.DENSITIES,
                shares=shares,
            )
        )
    return replace(average(made), origin=_origin(job))


def report(job: Job, watched: Watched, pairs: Sequence[Pair]) -> list[str]:
    """How well each half of the pairs predicts the other, in lines of text.

    Halves are whole contexts where there are two or more, else every other query. Loss: what the
    policy's ranking loses of the oracle's importance on a half, with the shares of the other half
    or equal shares, relative to that half's own shares; the mean of both directions.
    """
    by_context = len({pair.context for pair in pairs}) > 1
    halves = [
        [pair for pair in pairs if (pair.context if by_context else pair.query) % 2 == side]
        for side in (0, 1)
    ]
    if not all(halves):
        return ["halves: a single measurement cannot be split"]
    first, second = (build(job, watched, half) for half in halves)
    lines = [f"halves ({len(halves[0])} + {len(halves[1])}, by {_unit(by_context)}):"]
    for density in REPORT_DENSITIES:
        equal = torch.full_like(first.at(density), density)
        own, other, uniform = 0.0, 0.0, 0.0
        for half, mine, yours in ((halves[0], first, second), (halves[1], second, first)):
            shares = torch.stack([mine.at(density), yours.at(density), equal])
            losses = torch.stack([_loss(job, pair, shares) for pair in half]).mean(0).tolist()
            own, other, uniform = own + losses[0], other + losses[1], uniform + losses[2]
        lines.append(
            f"  {density:4.0%}: rank correlation {rank_correlation(first, second, density):.3f}, "
            f"loss with the other half's shares {_more(other, own)}, "
            f"with equal shares {_more(uniform, own)}"
        )
    return lines


def plot(profile: Profile, path: Path) -> None:
    """Shares as layers x heads heat maps at two densities. Needs matplotlib."""
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
    for axes, density in zip(figure.subplots(1, 2), PLOT_DENSITIES, strict=True):
        image = axes.imshow(profile.at(density).numpy(), vmin=0, vmax=1, aspect="auto")
        axes.set(xlabel="KV head", ylabel="layer", title=f"share of blocks at {density:.0%}")
        axes.set_xticks(range(profile.model.kv_heads))
    figure.colorbar(image)
    figure.suptitle(f"{profile.model.name}, {profile.score}, {profile.origin.source}")
    figure.savefig(path)


def require_matplotlib() -> None:
    """Raises ValueError where it is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: `pip install matplotlib`, or leave "
            "--plot out"
        ) from error


def versions() -> dict[str, str]:
    """Of what the numbers depend on; the Python reference comes with Python."""
    import transformers

    return {
        "nexus-vllm": nexus_vllm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _origin(job: Job) -> Origin:
    names = [name for name, _ in job.contexts]
    names = names or [f"python reference with facts, {index}" for index in range(job.synthetic)]
    used = ["context_tokens", "window", "sink", "recency"]
    used += ["queries", "answer_tokens", "temperature"] if job.oracle == "future" else ["chunk"]
    settings = " ".join(f"{name}={getattr(job, name)}" for name in used)
    return Origin(
        source="oracle" if job.oracle == "future" else "replay",
        contexts=tuple(names),
        seeds=(job.seed,),
        versions=versions() | {"settings": settings},
    )


def _tokens(job: Job, tokenizer: Any, name: str, text: str, index: int) -> list[int]:
    """Whole blocks of the context, at most `context_tokens`."""
    if job.contexts:
        ids = tokenizer.encode(text, add_special_tokens=True)
    else:
        name, characters = f"synthetic context {index}", 4 * job.context_tokens
        # Characters per token differ by tokenizer: come close, so that all facts are inside.
        for _ in range(5):
            text = profile_prompts.synthetic(job.seed, index, characters)
            ids = tokenizer.encode(text, add_special_tokens=True)
            if 1 <= len(ids) / job.context_tokens <= 1.1:
                break
            characters = 1 + int(1.03 * characters * job.context_tokens / len(ids))
    ids = list(ids)[: job.context_tokens]
    least = job.sink + job.recency + 1
    if len(ids) // job.block_size < least:
        raise ValueError(
            f"{name} has {len(ids)} tokens, must have at least {least * job.block_size}"
        )
    return ids[: len(ids) // job.block_size * job.block_size]


def _stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _seed(job: Job, use: str, index: int) -> int:
    return random.Random(f"{use} {job.seed} {index}").getrandbits(31)


def _loss(job: Job, pair: Pair, shares: Tensor) -> Tensor:
    forced = job.forced(pair.scores.shape[-1])
    return lukv.total_loss(lukv.loss_curves(pair.importance, pair.scores, forced), shares)


def _more(loss: float, least: float) -> str:
    return f"{loss / least - 1:+.1%}" if least else f"{loss:.3g} (own: 0)"


def _unit(by_context: bool) -> str:
    return "context" if by_context else "query"
