"""What `nexus-vllm eval` sends, in which order, and how a reply is judged. Pure.

A *job* is one question under one policy, allocator, budget and seed, in one of two settings:

- `in-window`: one cut at the prompt's end, when the question has been read (`kv_prefill=oneshot`).
- `later`: cuts while the prompt streams in (`kv_prefill=streaming`). The question comes after the
  last of those; what such a cut dropped was dropped without knowing it. A server is started for
  each budget, its `chunk` chosen so that there is one such cut, exactly at the haystack's end.

- `decode`: of suites that decode. A job is a whole stream: the haystack is the prompt, what follows
  it is said token by token and evicted from on the way, and all of its questions are in it.

The question's last token, the *lead*, is not in the prompt: it is the first that is generated. That
one comes out of the step that computes the prompt's end, before the cut there; the answer, which
comes next, is read from what the cut left.

Budgets are sent in tokens, whole blocks of the haystack's share, so that a percentage means the
same for every question and `--kv-budget-floor` has no say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nexus_vllm.config import Budget, Settings
from nexus_vllm.plan import EvictionPlan
from nexus_vllm.tools.eval_samples import Question, Sample, Stream
from nexus_vllm.tools.eval_suite import BLOCK

FORCED = "force_tokens"
"""Key of `vllm_xargs` that nexus_vllm.tools.forcing obeys."""
TOP = 20  # log-probabilities per token: the most that vLLM gives by default
TOKEN = "token_id:"


@dataclass(frozen=True)
class Method:
    policy: str
    allocator: str

    @property
    def label(self) -> str:
        return "full cache" if self == FULL else f"{self.policy}, {self.allocator}"


FULL = Method("none", "-")


@dataclass(frozen=True)
class Job:
    """One request. `blocks`: its budget; None for the full cache, which has no setting either.

    `question`: 0 where the sample has a stream, which asks them all.
    """

    sample: int
    question: int
    setting: str
    method: Method
    budget: str
    blocks: int | None
    seed: int

    @property
    def key(self) -> tuple[int, int, str, str, str, str, int]:
        """Everything that tells one job of a run from another."""
        policy, allocator = self.method.policy, self.method.allocator
        asked = self.sample, self.question, self.setting
        return (*asked, policy, allocator, self.budget, self.seed)


@dataclass(frozen=True)
class Stage:
    """Jobs for one start of the server. `chunk`: its setting, in tokens; None: as it is."""

    chunk: int | None
    jobs: list[Job]


def budget_blocks(budget: str, tokens: int, settings: Settings, decodes: bool = False) -> int:
    """Blocks that `budget` leaves of `tokens`. Raises ValueError where nothing would be evicted, or
    the server would not take it: its least is sink, recency and one block.

    tokens: of a haystack; where the suite `decodes`, with what is decoded after it.
    """
    parsed = Budget.parse(budget)
    if parsed.full:
        raise ValueError("budget 'full' is always measured; name the others")
    kept = parsed.tokens(tokens, floor=1)
    assert kept is not None
    least, blocks = settings.min_budget_tokens // BLOCK, kept // BLOCK
    most = tokens // BLOCK - 1
    if decodes:  # evicted once it has grown by an interval; the last token is not computed
        most -= settings.interval_blocks(blocks)
    if not least <= blocks <= most:
        raise ValueError(
            f"budget {budget} of {tokens} tokens is {blocks} blocks of {BLOCK}: use {least} to "
            f"{most} blocks ({least * BLOCK} to {most * BLOCK} tokens), or a share of as many"
        )
    return blocks


def stages(
    samples: Sequence[Sample],
    methods: Sequence[Method],
    budgets: Mapping[str, int],
    settings: Sequence[str],
    seeds: Sequence[int],
    limit: int | None = None,
    own: bool = True,
) -> list[Stage]:
    """All jobs: for each start of a server sample after sample, the full cache first.

    So a haystack is computed once per start and found in the prefix cache by all others. A cut
    before the question takes a chunk, and with it a start, for each budget; all else is asked in
    the first one. So a policy that replays does so once for each prompt in the window, and later
    once for each haystack and start.
    budgets: as asked -> blocks. limit: questions (or streams), of the first samples. own: the
    server is ours to start with another chunk.
    """
    asked = [(s, q) for s, sample in enumerate(samples) for q in range(sample.requests)]
    asked = asked[:limit]
    chunks = own and "later" in settings
    every = [(budget, setting) for budget in budgets for setting in settings]
    starts = [every]
    if chunks:
        starts = [[(budget, "later")] for budget in budgets]
        starts[0] = [*(pair for pair in every if pair[1] != "later"), *starts[0]]
    made = []
    for index, (chosen, budget_of_chunk) in enumerate(zip(starts, budgets, strict=False)):
        jobs: list[Job] = []
        for sample in dict.fromkeys(s for s, _ in asked):
            own_questions = [q for s, q in asked if s == sample]
            if index == 0:
                jobs += [Job(sample, q, "-", FULL, "full", None, 0) for q in own_questions]
            jobs += [
                Job(sample, q, setting, method, budget, budgets[budget], seed)
                for q in own_questions
                for budget, setting in chosen
                for method in methods
                for seed in seeds
            ]
        chunk = len(samples[0].tokens) - budgets[budget_of_chunk] * BLOCK if chunks else None
        made.append(Stage(chunk, jobs))
    return made


def body(job: Job, samples: Sequence[Sample], model: str) -> dict[str, Any]:
    """The request of a job to /v1/completions."""
    sample = samples[job.sample]
    xargs: dict[str, Any] = {"kv_policy": job.method.policy}
    if job.blocks is not None:
        xargs |= {
            "kv_budget": str(job.blocks * BLOCK),
            "kv_allocator": job.method.allocator,
            "kv_seed": str(job.seed),
            "kv_prefill": "streaming" if job.setting == "later" else "oneshot",
        }
    asked = {
        "model": model,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": xargs,
    }
    if sample.stream:
        xargs[FORCED] = list(sample.stream.tokens)
        prompt, tokens = list(sample.tokens), len(sample.stream.tokens)
        return {**asked, "prompt": prompt, "max_tokens": tokens, "logprobs": 1}
    question = sample.questions[job.question]
    *given, lead = question.tokens
    forced = [lead, *question.answer_tokens]
    tokens = len(forced)
    if question.items:
        tokens = tokens * 3 // 2 + 8  # the reply may say more than the bare list
        given.append(lead)
    else:
        xargs[FORCED] = forced
    prompt = [*sample.tokens, *given]
    return {**asked, "prompt": prompt, "max_tokens": tokens, "logprobs": TOP}


def blind_share(job: Job, sample: Sample, settings: Settings) -> float:
    """How much of the haystack the cuts before the question saw: its share, 0 without any."""
    if job.blocks is None or job.setting != "later":
        return 0.0
    settings = settings.of(job.method.policy)
    plan = EvictionPlan(
        prompt_tokens=len(sample.tokens) + len(sample.questions[job.question].tokens) - 1,
        budget=job.blocks,
        interval=settings.interval_blocks(job.blocks),
        chunk=settings.chunk // BLOCK,
        block_size=BLOCK,
        streaming=True,
    )
    return max((at for at in _cuts(plan, len(sample.tokens))), default=0) / len(sample.tokens)


def _cuts(plan: EvictionPlan, upto: int) -> Iterator[int]:
    """Where a sequence is shrunk, in tokens."""
    released = 0
    while (at := plan.next_eviction(released)) <= upto:
        yield at
        released = plan.target(at)


@dataclass(frozen=True)
class Judged:
    """What a reply is worth.

    score: 1 if the greedy answer is the right one, else 0; for a question with items the share of
        them in the reply.
    right, tokens: answer tokens that were the likeliest, of how many. 0 of 0 with items.
    logprob: of the answer's tokens, summed; None with items.
    whole: `logprob` is of all tokens. Else the server did not obey `force_tokens`: it is of those
        up to the first wrong one, the last one's at most that of the TOP-th likeliest; None where
        not even the lead was said.
    """

    score: float
    right: int = 0
    tokens: int = 0
    logprob: float | None = None
    whole: bool = True


def judge(question: Question, choice: Mapping[str, Any]) -> Judged:
    """Judge the first choice of a reply.

    Where the answer is forced, each of its tokens is scored after the right ones before it, in the
    cache that the eviction left. Greedy decoding gives the answer if and only if each of them is
    the likeliest. Raises ValueError on a reply that is too short to tell.
    """
    if question.items:
        return Judged(sum(item in choice["text"] for item in question.items) / len(question.items))
    told, count = choice["logprobs"], len(question.answer_tokens)
    if len(told["tokens"]) < 1 + count:
        raise ValueError(f"a reply of {len(told['tokens'])} tokens, not {1 + count}")
    lead, *said = told["tokens"]
    if lead != f"{TOKEN}{question.tokens[-1]}":
        return Judged(0.0, 0, count, None, whole=False)
    right, total = 0, 0.0
    for index, wanted in enumerate(question.answer_tokens):
        name, top = f"{TOKEN}{wanted}", told["top_logprobs"][1 + index]
        if said[index] != name:
            total += top.get(name, min(top.values()))
            return Judged(0.0, right, count, total, whole=False)
        own = told["token_logprobs"][1 + index]
        total += own
        right += own >= max(top.values())
    return Judged(float(right == count), right, count, total)


def judge_stream(sample: Sample, stream: Stream, choice: Mapping[str, Any]) -> dict[str, Any]:
    """What a reply that says a sample's stream is worth, question by question and in its text.

    `asked`: for each asking its place and what `judge` says of it. `passages`: for each of the
    text's its first step, the log-probability of its tokens, summed, and the token that was the
    likeliest at each. Raises ValueError where the reply is not the stream.
    """
    told = choice["logprobs"]
    if told["tokens"] != [f"{TOKEN}{token}" for token in stream.tokens]:
        raise ValueError(
            f"the server does not say the {len(stream.tokens)} tokens that it is made to: start it "
            "with --logits-processors nexus_vllm.tools.forcing:Forcing, on model runner V1"
        )
    asked = []
    for asking in stream.asked:
        question = sample.questions[asking.question]
        place = slice(asking.step - 1, asking.step + len(question.answer_tokens))
        own = {key: told[key][place] for key in ("tokens", "token_logprobs", "top_logprobs")}
        judged = asdict(judge(question, {"logprobs": own}))
        asked.append({**asdict(asking), "task": question.task, **judged})
    text = []
    for start, end in stream.text:
        likeliest = [_likeliest(top) for top in told["top_logprobs"][start:end]]
        logprob = sum(told["token_logprobs"][start:end])
        text.append({"step": start, "logprob": round(logprob, 4), "likeliest": likeliest})
    return {"asked": asked, "passages": text}


def _likeliest(top: Mapping[str, float]) -> int:
    return int(max(top, key=lambda name: top[name]).removeprefix(TOKEN))


def misled(job: Job, record: Mapping[str, Any]) -> str | None:
    """Why what the server says it did is not what the job asked for; None if it is."""
    wanted = None if job.blocks is None else job.blocks * BLOCK
    if record.get("policy") != job.method.policy:
        return f"asked for policy {job.method.policy}, served with {record.get('policy')}"
    if record.get("budget_tokens") != wanted:
        return f"asked for {wanted} tokens, served with {record.get('budget_tokens')}"
    if (record.get("evicted_blocks", 0) > 0) == (wanted is None):
        return f"{record.get('evicted_blocks')} blocks evicted with a budget of {wanted} tokens"
    if wanted and job.method.allocator not in ("auto", record.get("allocator")):
        return f"asked for {job.method.allocator}, served with {record.get('allocator')}"
    return None
