"""When a sequence is shrunk and how far: pure arithmetic, shared by scheduler, worker and tests.

Evictions happen at fixed token positions that follow from the prompt's length and the budget alone.
The scheduler ends prefill chunks there, so the same request meets the same evictions whatever else
is in the batch, however its prompt was chunked, and again after a preemption (invariant I8).
"""

from dataclasses import dataclass, field
from typing import SupportsInt


@dataclass(frozen=True)
class EvictionPlan:
    """The positions at which one sequence is shrunk to its budget.

    `budget`, `interval` and `chunk` are in blocks of `block_size` tokens. With `released` leading
    blocks given up, the sequence holds the live window [released, full): it is shrunk to `budget`
    blocks at the end of its prompt, then whenever the window has grown by `interval` blocks. A
    `streaming` prompt is shrunk in addition whenever the window has grown by `chunk` blocks, and a
    session, whose prompt has been extended at `turn_start` tokens, there if it holds more.
    """

    prompt_tokens: int
    budget: int
    interval: int
    chunk: int
    block_size: int
    streaming: bool
    turn_start: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "budget", "interval", "chunk", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def next_eviction(self, released: int) -> int:
        """The token count at which the sequence must next be shrunk."""
        if self.turn_start // self.block_size - released > self.budget:
            return self.turn_start
        if self.streaming:
            position = (released + self.budget + self.chunk) * self.block_size
            if position < self.prompt_tokens:
                return position
        if self.prompt_tokens // self.block_size - released > self.budget:
            return self.prompt_tokens
        return (released + self.budget + self.interval) * self.block_size

    def target(self, computed: int) -> int:
        """How many leading blocks are released after an eviction at `computed` tokens."""
        return computed // self.block_size - self.budget

    def most_blocks(self, tokens: int) -> int:
        """The most pages ever held on the way to `tokens` tokens, the tail included."""
        whole = -(-tokens // self.block_size)
        grown = self.budget + self.interval
        if self.streaming:
            grown = self.budget + max(self.chunk, self.interval)
        else:
            grown = max(grown, -(-self.prompt_tokens // self.block_size))
        return min(whole, grown + 1)


@dataclass(frozen=True)
class Eviction:
    """One sequence's eviction in one step: what the scheduler tells the worker.

    Block indices are logical. `pages` held the live window [released, full) before the eviction;
    afterwards `kept_pages` are the row's entries [target, full), to be filled by the worker, and
    `tail_pages` its entries from `full` on, untouched. Pages of `kept_pages` that are not in
    `pages` are fresh. `replay`: the one of its prompt, where the policy needs one.
    """

    request_id: str
    policy: str
    allocator: str
    seed: int
    event: int
    computed: int
    released: int
    target: int
    pages: list[int]
    kept_pages: list[int]
    tail_pages: list[int]
    prompt_tokens: int = 0
    replay: str | None = None

    @property
    def decoding(self) -> bool:
        """Whether it is neither the first of its sequence nor in its prompt."""
        return self.event > 0 and self.computed > self.prompt_tokens

    @property
    def full(self) -> int:
        """Number of full logical blocks at the eviction, released ones included."""
        return self.released + len(self.pages)

    @property
    def row(self) -> list[int]:
        """The sequence's whole page row after the eviction; released entries name page 0 (null)."""
        return [0] * self.target + self.kept_pages + self.tail_pages


@dataclass(frozen=True)
class Piece:
    """A request that repeats a piece of a prompt, as part of `replay`.

    Its first `prompt_tokens` tokens are the prompt; those at positions [first, end) repeat it.
    """

    request_id: str
    replay: str
    prompt_tokens: int
    first: int
    end: int


@dataclass
class StepPlan:
    """What rides on one step's SchedulerOutput.

    `started`: sequences, computed from their first token on, that may be evicted later.
    `stopped`: sequences whose pages were all taken back (finished, aborted or preempted).
    `evictions`: to be filled in this order, before the step's forward pass.
    `pieces`: what is computed of replays from this step on. `forgotten`: replays that
    nobody will need.
    """

    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


@dataclass
class StepReport:
    """What the workers did with one step's evictions: statistics, and whose policy has failed.

    `moved`: copied (layer, block) slices per sequence, which a GPU may still have to tell (see
    `settle`). `seconds`: one entry per eviction, of the slowest rank. `failed`: what was raised
    while blocks were chosen, per sequence, which must end: its row is sound, but holds blocks that
    nobody chose.
    """

    moved: dict[str, SupportsInt] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def settle(self) -> "StepReport":
        """Plain numbers from now on: what a GPU had to tell has come, as the step's tokens have."""
        self.moved = {request_id: int(moved) for request_id, moved in self.moved.items()}
        return self

    def add(self, other: "StepReport") -> None:
        """Take in another rank's report of the same step. Raises RuntimeError if it is none."""
        if list(self.moved) != list(other.moved):
            raise RuntimeError(
                f"one rank has evicted from {list(self.moved)}, another from {list(other.moved)}"
            )
        for request_id, moved in other.moved.items():
            self.moved[request_id] = int(self.moved[request_id]) + int(moved)
        pairs = zip(self.seconds, other.seconds, strict=True)
        self.seconds = [max(pair) for pair in pairs]
        self.failed = {**other.failed, **self.failed}
