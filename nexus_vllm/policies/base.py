"""What a policy sees and returns, and the attention maps that policies share.

A policy gives each live block of a row one weight; a selector (`nexus_vllm.selectors`) turns
weights into the kept set. Rows are the leading dimensions of an Observation, written "..." below.
Usually they are the layers. To keep a separate set per KV head, make the KV head a leading
dimension of size Hkv instead: queries [L, Hkv, W, Hq/Hkv, D], keys [L, Hkv, N, 1, b, D],
block_ids [L, Hkv, N]. Rows are independent, so a caller short of memory may pass fewer at a time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional

from nexus_vllm.replay import MIN_PIECE

Heads = Literal["per-head", "mean"]
Pool = Literal["mean", "max"]
Tokens = Literal["sum", "max", "mean"]
Replayed = Literal["prompt", "first-cut"]

_TINY = torch.finfo(torch.float32).tiny
MAX_LOGITS = 1 << 20
"""Float32 logits held at once (4 MiB), unless one KV head of one row needs more.

A CPU reads them several times, so they should stay in its caches, and glibc takes far larger
buffers from the system anew each time.
"""


class Reader(Protocol):
    """Reads keys and values where they lie, by kernels, for a policy that need not gather them.

    What it returns is what the functions of this module return of gathered keys and values; leading
    dimensions "...", N and Hkv are those of the observation it belongs to.
    """

    def keys(self) -> Tensor:
        """All keys after all, [..., N, Hkv, b, D]."""

    def values(self) -> Tensor:
        """All values after all, [..., N, Hkv, b, D]."""

    def block_attention(
        self, queries: Tensor, positions: Tensor, scale: float, heads: Heads
    ) -> Tensor:
        """`block_attention` of queries [..., W, Hq, D] at positions [W]."""

    def summed_attention(self, queries: Tensor, positions: Tensor, scale: float) -> Tensor:
        """`summed_attention` of all of them."""

    def token_attention(
        self, queries: Tensor, positions: Tensor, scale: float, rows: Pool, heads: Pool
    ) -> Tensor:
        """`token_attention` of them."""

    def walk(
        self,
        queries: Tensor,
        positions: Tensor,
        scale: float,
        heads: Heads,
        *,
        candidates: Tensor | None,
        order: list[int],
        lam: float,
        pool_rows: Pool,
        start: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Nexus' a + lam c and c of each head, both [..., H', N] (`policies.nexus`).

        candidates: [..., N] bool, what the walk runs over; None: all. order: the rows that it
        takes, 0 the oldest. start: [..., N], what it begins with, before it is scaled to 1.
        """

    def ranked(self, scores: Tensor, candidates: Tensor, tokens: Tokens) -> Tensor:
        """`policies.tokens.ranked` of scores [..., N, Hkv, b]."""

    def key_norms(self) -> Tensor: ...

    def key_cosines(self) -> Tensor: ...

    def value_ranges(self) -> Tensor: ...


@dataclass(frozen=True)
class Observation:
    """The state of one sequence at one eviction; all tensors on one device. Read only.

    queries: [..., W, Hq, D], the last W rotated queries, oldest first.
    query_positions: [W] int64, original token positions of those queries.
    keys: [..., N, Hkv, b, D], the rotated keys of the N live full blocks.
      Queries and their positions are None for a policy that needs no window, keys for one that
      needs neither window nor keys.
    block_ids: [..., N] int64, original logical index of each live block, distinct, in no particular
      order. The key at `offset` in a block has position block_id * b + offset.
    scale: what logits are multiplied by, usually D ** -0.5.
    candidates: [..., N] bool, False for blocks that stay anyway (sink, recency).
    seed, event: address of this eviction for counter-based random numbers (`nexus_vllm.rng`).
    layers: [...] int64, the identity of each row for the same purpose.
    valid: [..., N] bool, False for padding where rows hold different numbers of blocks; None: all
      are blocks. Padding is no candidate and later than every query.
    values: [..., N, Hkv, b, D], for a policy that needs them, else None.
    state: [..., N, S] float32, what the policy said of each block at the last eviction, NaN for a
      block that filled up since; None for a policy of no state.
    new_queries: how many of the W, the newest, came after the last eviction; None: all.
    keep: how many blocks of a row will stay, forced ones included; where rows keep different
      numbers, on average. None: not known.
    prompt_blocks: blocks with an id below this are the prompt's.
    rope: how queries and keys were rotated, for a policy that needs to know, else None.
    replay: [..., N, Hkv] float32, the most attention that a token of the block has had while the
      prompt was replayed, NaN for a block that was no part of it; None: there was no replay.
    reader: what reads keys and values instead, which are then None, for a policy that does not
      gather them.
    Raises ValueError when shapes do not fit together.
    """

    queries: Tensor | None
    query_positions: Tensor | None
    keys: Tensor | None
    block_ids: Tensor
    scale: float
    candidates: Tensor
    seed: int
    event: int
    layers: Tensor
    valid: Tensor | None = None
    values: Tensor | None = None
    state: Tensor | None = None
    new_queries: int | None = None
    keep: int | None = None
    prompt_blocks: int = 0
    rope: "Rope | None" = None
    replay: Tensor | None = None
    reader: Reader | None = None

    def __post_init__(self) -> None:
        ids = self.block_ids.shape
        expected = {"candidates": (self.candidates, ids), "layers": (self.layers, ids[:-1])}
        if self.valid is not None:
            expected["valid"] = (self.valid, ids)
        if self.values is not None and self.keys is not None:
            expected["values"] = (self.values, self.keys.shape)
        if self.state is not None:
            expected["state"] = (self.state, (*ids, self.state.shape[-1]))
        if self.replay is not None:
            expected["replay"] = (self.replay, (*ids, self.replay.shape[-1]))
        if self.queries is not None and self.keys is not None and self.query_positions is not None:
            *_, window, query_heads, dim = self.queries.shape
            kv_heads, block = self.keys.shape[-3:-1]
            expected["queries"] = (self.queries, (*ids[:-1], window, query_heads, dim))
            expected["keys"] = (self.keys, (*ids, kv_heads, block, dim))
            expected["query_positions"] = (self.query_positions, (window,))
            if query_heads % kv_heads:
                raise ValueError(
                    f"Observation: {query_heads} query heads are no multiple of {kv_heads} KV heads"
                )
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(
                    f"Observation: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}"
                )

    def all_keys(self) -> Tensor:
        """keys. Raises ValueError if they were left out."""
        if self.keys is None and self.reader is not None:
            return self.reader.keys()
        if self.keys is None:
            raise ValueError("this policy needs keys; the observation lacks them")
        return self.keys

    def all_values(self) -> Tensor:
        """values. Raises ValueError if they were left out."""
        if self.values is None and self.reader is not None:
            return self.reader.values()
        if self.values is None:
            raise ValueError("this policy needs values; the observation lacks them")
        return self.values

    def remembered(self) -> Tensor:
        """state. Raises ValueError if there is none."""
        if self.state is None:
            raise ValueError("this policy has a state; the observation lacks it")
        return self.state

    def replayed(self) -> Tensor:
        """replay. Raises ValueError if there was none."""
        if self.replay is None:
            raise ValueError("this policy needs the prompt's replay; there was none")
        return self.replay

    def asked(self) -> tuple[Tensor, Tensor]:
        """(queries, query_positions). Raises ValueError if they were left out."""
        if self.queries is None or self.query_positions is None:
            raise ValueError(
                "this policy needs queries and query_positions; the observation lacks them"
            )
        return self.queries, self.query_positions

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, query_positions, keys). Raises ValueError if one of them was left out."""
        return *self.asked(), self.all_keys()


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of queries and keys.

    cos, sin: [P, R / 2] float32 by position, as the model multiplies by them: YaRN lengthens both.
    neox: whether the dimensions rotated together are i and i + R / 2, as in most models, or 2 i and
      2 i + 1. Dimensions from R on are not rotated.
    """

    cos: Tensor
    sin: Tensor
    neox: bool = True

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., D] with each pair (x, y) made (x cos - y sin, y cos + x sin); cos, sin [...,
        R / 2] broadcast, and need not be of one angle."""
        size = 2 * cos.shape[-1]
        rotated, rest = x[..., :size], x[..., size:]
        if self.neox:
            first, second = rotated.chunk(2, dim=-1)
        else:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        first, second = first * cos - second * sin, second * cos + first * sin
        if self.neox:
            rotated = torch.cat([first, second], dim=-1)
        else:
            rotated = torch.stack([first, second], dim=-1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1)


class Policy(ABC):
    """Gives each live block a weight. Frozen dataclass: its fields are the method's parameters."""

    name: ClassVar[str]
    needs_window: ClassVar[bool] = False
    """Whether it reads queries and keys."""
    needs_keys: ClassVar[bool] = False
    """Whether it reads keys, though no queries."""
    needs_values: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    """Whether keys and values must be gathered for it, since it reads them by itself. One that only
    calls functions of `policies.base` can leave that to kernels where there are some."""
    needs_rope: ClassVar[bool] = False
    needs_replay: ClassVar[bool] = False
    """Whether the prompt must be replayed before: then it is a `ReplayPolicy`."""
    selector: ClassVar[str | None] = None
    """The one selector this policy makes sense with, over the configured one; None: any."""

    @property
    def reads_keys(self) -> bool:
        """Whether keys must be there, with queries or without."""
        return self.needs_window or self.needs_keys

    @property
    def state_size(self) -> int:
        """S, numbers that it wants kept with each block from one eviction to the next."""
        return 0

    @abstractmethod
    def weights(self, obs: Observation) -> Tensor:
        """Weights [..., N] float32, finite and >= 0, higher for blocks more worth keeping.

        They must depend on block ids, not on the order of the N axis, and each row on itself alone.
        Entries of blocks that are not candidates are ignored, but must be finite too.
        """

    def remember(self, obs: Observation) -> Tensor:
        """The state [..., N, S] float32 of each block as of this eviction.

        It is `obs.state` when `weights` is called next, and comes back with the blocks that stay at
        the next eviction. What holds for weights holds for it.
        """
        raise NotImplementedError(f"{self.name} has no state")

    def reserve(self, obs: Observation, weights: Tensor) -> Tensor:
        """Weights in which the blocks that stay whatever they weigh are raised above all others.

        Called with what `weights` gave, smoothed if that is asked for; what it adds is not.
        """
        return weights


def check_choices(policy: Policy, **choices: object) -> None:
    """Raise ValueError unless each parameter named is one of those that its Literal lists."""
    for field, literal in choices.items():
        value, known = getattr(policy, field), get_args(literal)
        if value not in known:
            raise ValueError(
                f"{policy.name}: {field} is {value!r}, choose one of {', '.join(known)}"
            )


@dataclass(frozen=True)
class ReplayPolicy(Policy):
    """A policy that looks at how the model attends to the prompt while it is made to repeat it.

    piece: tokens of the prompt that are repeated at a time.
    instruction: what the model is told between the prompt and the piece.
    replay: "prompt" replays all of it, "first-cut" what comes before the first eviction: what a
      question that comes later could not change.
    Raises ValueError on a value out of range.
    """

    piece: int = 2048
    instruction: str = "\n\nRepeat the previous context exactly:\n\n"
    replay: Replayed = "prompt"

    needs_replay: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.piece < MIN_PIECE:
            raise ValueError(f"{self.name}: piece is {self.piece}, must be at least {MIN_PIECE}")
        check_choices(self, replay=Replayed)


def state_size(policy: Policy, smoothing: float) -> int:
    """S, the last dimension of the state that `score` returns; 0: it returns none."""
    return policy.state_size + _smooths(policy, smoothing)


def _smooths(policy: Policy, smoothing: float) -> bool:
    return smoothing > 0 and policy.selector is None


def score(policy: Policy, obs: Observation, smoothing: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """A policy's weights [..., N], and what is to be kept of each block, [..., N, S] or None.

    smoothing: f, 0 <= f < 1; w = f * (w at the last eviction) + (1 - f) * (what the policy says
      now). A block that filled up since has what the policy says. It needs one number more of each
      block. Not for a policy that has a selector of its own: there is nothing to smooth.
    `obs.state` is what this function has returned for these blocks at the last eviction.
    """
    smooth = _smooths(policy, smoothing)
    known, before = obs.state, None
    if smooth and known is not None:
        known, before = known[..., :-1], known[..., -1]
    state = None
    if policy.state_size:
        state = policy.remember(replace(obs, state=known))
    weights = policy.weights(replace(obs, state=state))
    if smooth:
        if before is not None:
            mixed = smoothing * before + (1 - smoothing) * weights
            weights = torch.where(before.isnan(), weights, mixed)
        last = weights[..., None]
        state = last if state is None else torch.cat([state, last], dim=-1)
    return policy.reserve(obs, weights), state


Reduce = Callable[[Tensor], Tensor]
"""From unnormalised attention [r, h, W, g, N, b], which it may overwrite, to what is wanted of it,
[r, h, ...]. All of it is 0 for a query that sees no key, the sum over N and b at least 1 else."""


def block_attention(obs: Observation, heads: Heads = "per-head") -> Tensor:
    """Block attention maps of the window (Eq. 1).

    P = softmax(scale Q K^T), S = row-normalise(BlockSum_b(P)).
    heads: "per-head" gives [..., Hq, W, N], query head h against KV head h // (Hq / Hkv); "mean"
      averages the queries over Hq and the keys over Hkv before the product, as the paper does, and
      gives [..., 1, W, N].
    Returns float32. A query does not see keys at later positions than its own. Rows sum to 1, or
    to 0 where a query sees no key at all. The softmax runs over the live full blocks only, so its
    denominator and the row normalisation are one division. Holds about MAX_LOGITS logits at a time.
    Raises ValueError on another `heads`, or without a window.
    """

    if heads not in get_args(Heads):
        raise ValueError(f"heads is {heads!r}, choose one of {', '.join(get_args(Heads))}")
    if obs.reader is not None:
        return obs.reader.block_attention(*obs.asked(), obs.scale, heads)

    def of_blocks(mass: Tensor) -> Tensor:
        blocks = mass.sum(-1)
        return blocks / blocks.sum(-1, keepdim=True).clamp_(min=_TINY)

    maps = attention(obs, of_blocks, heads).transpose(2, 3)  # [R, Hkv, g, W, N]
    return maps.reshape(*obs.block_ids.shape[:-1], -1, *maps.shape[-2:])


def summed_attention(obs: Observation, newest: int) -> Tensor:
    """Attention to each block, summed over so many of the newest queries: [..., Hq, N] float32."""
    if obs.reader is None:
        maps = block_attention(obs)
        return maps[..., maps.shape[-2] - newest :, :].sum(-2)
    queries, positions = obs.asked()
    first = len(positions) - newest
    return obs.reader.summed_attention(queries[..., first:, :, :], positions[first:], obs.scale)


def pool(x: Tensor, how: Pool, dim: int | tuple[int, ...]) -> Tensor:
    """The mean of x over `dim`, or the largest."""
    return x.mean(dim) if how == "mean" else x.amax(dim)


def token_attention(obs: Observation, rows: Pool = "mean", heads: Pool = "mean") -> Tensor:
    """What each token gets of the window: the mean over its queries, then over query heads.

    rows, heads: "max" takes the most that a query, or a query head, gives instead.
    Returns [..., Hkv, N, b] float32, for each KV head that of the query heads that share it;
    otherwise as `block_attention`.
    """

    if obs.reader is not None:
        return obs.reader.token_attention(*obs.asked(), obs.scale, rows, heads)

    def of_tokens(mass: Tensor) -> Tensor:
        shares = normalised(mass)  # [r, h, W, g, N, b]
        if rows == heads:
            return pool(shares, rows, (2, 3))
        return pool(pool(shares, rows, 2), heads, 2)

    found = attention(obs, of_tokens)
    return found.reshape(*obs.block_ids.shape[:-1], *found.shape[1:])


def key_norms(obs: Observation) -> Tensor:
    """The norm of each key, [..., N, Hkv, b] float32."""
    if obs.reader is not None:
        return obs.reader.key_norms()
    return obs.all_keys().float().norm(dim=-1)


def key_cosines(obs: Observation) -> Tensor:
    """The cosine of each key to the mean direction of its row's, head by head, [..., N, Hkv, b]
    float32; of padding, anything finite."""
    if obs.reader is not None:
        return obs.reader.key_cosines()
    unit = functional.normalize(obs.all_keys().float(), dim=-1)  # [..., N, Hkv, b, D]
    counted = unit
    if obs.valid is not None:
        counted = unit * obs.valid[..., None, None, None]
    anchor = functional.normalize(counted.sum(dim=(-4, -2), keepdim=True), dim=-1)
    return (unit * anchor).sum(-1)


def value_ranges(obs: Observation) -> Tensor:
    """The largest number of each value minus its smallest, [..., N, Hkv, b] float32."""
    if obs.reader is not None:
        return obs.reader.value_ranges()
    values = obs.all_values()
    return values.amax(-1).float() - values.amin(-1).float()


def highest_attention(obs: Observation) -> Tensor:
    """The most that a token gets of any query of the window, over the heads that share a KV head.

    Returns [..., Hkv, N, b] float32; otherwise as `block_attention`, some queries at a time.
    """
    queries, positions, keys = obs.window()
    kv_heads, block = keys.shape[-3:-1]
    per_query = queries.shape[-2] // kv_heads * block * obs.block_ids.shape[-1]
    step = max(1, MAX_LOGITS // max(1, per_query))
    highest: Tensor | None = None
    for first in range(0, len(positions), step):
        some = replace(
            obs,
            queries=queries[..., first : first + step, :, :],
            query_positions=positions[first : first + step],
        )
        found = attention(some, lambda mass: normalised(mass).amax(dim=(2, 3)))
        highest = found if highest is None else torch.maximum(highest, found)
    assert highest is not None, "a window has queries"
    return highest.reshape(*obs.block_ids.shape[:-1], *highest.shape[1:])


def normalised(mass: Tensor) -> Tensor:
    """Softmax attention, in place, of the unnormalised [..., N, b]; 0 where no key is seen."""
    return mass.div_(mass.sum(dim=(-2, -1), keepdim=True).clamp_(min=_TINY))


def _seen_in_part(last: Tensor, block: int) -> Tensor:
    """Places of blocks that some query does not see whole: few, since the window is at the end.

    last: [r, W, N], the offset that a query sees last. On a GPU all places, which need no wait.
    """
    if last.device.type != "cpu":
        return torch.arange(last.shape[-1], device=last.device)
    return (last < block - 1).flatten(0, 1).any(0).nonzero().flatten()


def attention(obs: Observation, reduce: Reduce, heads: Heads = "per-head") -> Tensor:
    """Causal attention of the window to the live tokens, some rows and heads at a time.

    Returns what `reduce` gives for all of them, [R, Hkv, ...]: R is the product of the leading
    dimensions, and Hkv is 1 with heads "mean". Otherwise as `block_attention`.
    """
    queries, positions, keys = obs.window()
    size = obs.block_ids.shape[-1]
    window, query_heads, dim = queries.shape[-3:]
    kv_heads, block = keys.shape[-3:-1]
    queries = queries.reshape(-1, window, query_heads, dim)
    keys = keys.reshape(-1, size, kv_heads, block, dim)
    ids = obs.block_ids.reshape(-1, size)
    offsets = torch.arange(block, device=ids.device)
    by_dim = keys.stride(-2) == 1  # as some caches lay keys out: the product takes either order
    if heads == "mean":
        query_heads = kv_heads = 1
    group = query_heads // kv_heads
    lowest = torch.finfo(torch.float32).min

    pieces: list[Tensor] = []
    per_head = max(1, window * group * size * block)
    row_step = max(1, MAX_LOGITS // (per_head * kv_heads))
    head_step = max(1, MAX_LOGITS // per_head)
    for first_row in range(0, len(ids), row_step):
        rows = slice(first_row, first_row + row_step)
        q_rows, k_rows = queries[rows], keys[rows]
        if heads == "mean":
            q_rows = q_rows.mean(dim=2, keepdim=True, dtype=torch.float32)
            k_rows = k_rows.mean(dim=2, keepdim=True, dtype=torch.float32)
        q_rows = q_rows.unflatten(2, (kv_heads, group))
        last = positions[:, None] - ids[rows, None, :] * block  # [r, W, N], offset seen last
        late = _seen_in_part(last, block)
        hidden = offsets > last[:, None, :, None, late, None]  # [r, 1, W, 1, n, b]
        found: list[Tensor] = []
        for first_head in range(0, kv_heads, head_step):
            some = slice(first_head, first_head + head_step)
            # To the base 2: torch's exp is several times slower on CPU, most of all near zero.
            q = q_rows[:, :, some].float().transpose(1, 2) * (obs.scale / math.log(2))
            k = k_rows[:, :, some].float()  # [r, N, h, b, D]
            if by_dim:
                k = k.permute(0, 2, 4, 1, 3).flatten(3)  # [r, h, D, Nb]
            else:
                k = k.transpose(1, 2).flatten(2, 3).mT
            logits = (q.flatten(2, 3) @ k).view(*q.shape[:-1], size, block)
            partly = logits.index_select(-2, late).masked_fill_(hidden, -torch.inf)
            logits.index_copy_(-2, late, partly)
            highest = logits.amax(dim=(-2, -1), keepdim=True).clamp_(min=lowest)
            found.append(reduce(logits.sub_(highest).exp2_()))
        pieces.append(torch.cat(found, dim=1) if len(found) > 1 else found[0])
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
