"""The scheduler's half of replays: which prompts are replayed, how far they are, who waits.

    request --waits for--> replay --one after the other--> pieces, which are requests of ours

A piece's prompt is the whole prompt, an instruction and what is to be repeated. All but the first
find the prompt's pages in the prefix cache, and so does the request itself. A replay that is done
is kept for whoever asks the same prompt again.
"""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from nexus_vllm.plan import Piece
from nexus_vllm.policies import ReplayPolicy
from nexus_vllm.replay import INSTRUCTION, pieces

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike


KEPT = 32
"""Replays that are kept when nobody needs them. Their scores are float32 [layers, KV heads, blocks]
on the workers: 4 MiB each, 128 MiB in all, for prompts of 128k tokens of Llama-3.1-8B in blocks of
32 (32 layers of 8 KV heads). The scheduler keeps a digest of each prompt."""


@dataclass(eq=False)
class Replay:
    """The replay of one prompt, for all `members` that have it: those of n > 1, or who asks alike.

    `key`: what its scores depend on. `members`: each with whether it was there before the end.
    `left`: what has not begun. `piece`: the request at work. `tokens`: computed in its pieces.
    `broken`: a piece did not get to its end, so that the scores are not worth anything.
    `first` and `prompt` are what pieces are made of: gone at the end.
    """

    name: str
    key: Any
    first: Request | None
    prompt: list[int]
    instruction: list[int]
    left: list[range]
    members: dict[str, bool] = field(default_factory=dict)
    piece: str | None = None
    begun: int = 0
    tokens: int = 0
    broken: bool = False

    @property
    def done(self) -> bool:
        return self.piece is None and not self.left


class Replays:
    """All replays of an engine. `longest`: as `replay.longest_replay`. `kept`: as `KEPT`."""

    def __init__(self, tokenizer: "TokenizerLike | None", longest: int, kept: int = KEPT) -> None:
        self.tokenizer = tokenizer
        self.longest = longest
        self.kept = kept
        self.forgotten: list[str] = []
        """Replays that nobody will need any more, for the worker to drop: emptied by who tells it.
        """
        self._by_key: dict[Any, Replay] = {}
        """Those that a request can join; who was needed last is the last."""
        self._by_member: dict[str, Replay] = {}
        self._by_piece: dict[str, tuple[Replay, Piece]] = {}
        # No request has such a name, whatever ids clients send.
        engine = secrets.token_hex(8)
        self._names = (f"replay-{engine}-{number}" for number in count())

    def join(self, request: Request, policy: ReplayPolicy, first_cut: int) -> None:
        """The request needs a replay of its prompt; it is evicted at `first_cut` tokens.

        It gets none, and will find no scores, where the front end should have refused it.
        """
        prompt = request.prompt_token_ids
        if prompt is None or self.tokenizer is None:
            return
        if policy.replay == "first-cut":
            prompt = prompt[:first_cut]
        key = _key(request, policy, prompt)
        replay = self._by_key.get(key)
        if replay is None:
            told = self.tokenizer.encode(policy.instruction, add_special_tokens=False)
            told = list(told)[:INSTRUCTION]
            left = pieces(len(prompt), len(told), policy.piece, self.longest)
            if not left:
                return
            replay = Replay(next(self._names), key, request, list(prompt), told, left)
            # With an adapter that is loaded again for each request, each needs one of its own.
            if request.lora_request is None or not request.lora_request.load_inplace:
                self._by_key[key] = replay
        replay.members[request.request_id] = not replay.done
        self._by_member[request.request_id] = replay

    def leave(self, request_id: str) -> int:
        """A request has ended. Returns the tokens computed in a replay that it waited for."""
        replay = self._by_member.pop(request_id, None)
        if replay is None:
            return 0
        waited = replay.members.pop(request_id)
        if not replay.members:
            if replay.done and self._by_key.get(replay.key) is replay:
                self._by_key[replay.key] = self._by_key.pop(replay.key)
            else:
                self._forget(replay)
            for oldest in self.idle()[: -self.kept or None]:
                self._forget(oldest)
        return replay.tokens if waited else 0

    def _forget(self, replay: Replay) -> None:
        self._hide(replay)
        replay.left.clear()
        self.forgotten.append(replay.name)

    def _hide(self, replay: Replay) -> None:
        """Nobody can join it any more."""
        if self._by_key.get(replay.key) is replay:
            del self._by_key[replay.key]

    def idle(self) -> list[Replay]:
        """Replays that are kept though nobody needs them, the one not needed for longest first."""
        return [replay for replay in self._by_key.values() if not replay.members]

    def reset(self) -> None:
        """The model may be another one from now on: what is kept is forgotten.

        Requests that are there go on with the replay that they have, as with what they have said.
        """
        for replay in self.idle():
            self._forget(replay)
        self._by_key.clear()

    def of(self, request_id: str) -> Replay | None:
        """The replay that a request needs."""
        return self._by_member.get(request_id)

    def waits(self, request_id: str) -> bool:
        """Whether a request's replay is not done yet."""
        replay = self._by_member.get(request_id)
        return replay is not None and not replay.done

    def scores(self, request_id: str) -> str | None:
        """The name of the replay whose scores a request is evicted by."""
        replay = self._by_member.get(request_id)
        return None if replay is None or replay.broken or not replay.done else replay.name

    def due(self) -> list[Replay]:
        """Replays of which the next piece may begin."""
        needed = dict.fromkeys(self._by_member.values())
        return [replay for replay in needed if replay.left and replay.piece is None]

    def begin(self, replay: Replay) -> Request:
        """The request that computes a replay's next piece."""
        first, repeated = replay.first, replay.left.pop(0)
        assert first is not None
        prompt = replay.prompt
        tokens = [*prompt, *replay.instruction, *(prompt[i] for i in repeated)]
        request_id = f"{replay.name}/{replay.begun}"
        replay.begun += 1
        replay.piece = request_id
        start = len(tokens) - len(repeated)
        piece = Piece(request_id, replay.name, len(prompt), start, len(tokens))
        self._by_piece[request_id] = replay, piece
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            client_index=first.client_index,
            arrival_time=first.arrival_time,
            lora_request=first.lora_request,
            cache_salt=first.cache_salt,
            priority=first.priority,
            block_hasher=first._block_hasher,
        )

    def piece(self, request_id: str) -> Piece | None:
        """What the request computes of a replay, if it is one of ours."""
        found = self._by_piece.get(request_id)
        return None if found is None else found[1]

    def computed(self, scheduled: dict[str, int]) -> int:
        """Book the tokens of a step; returns how many were replays'."""
        total = 0
        for request_id in self._by_piece.keys() & scheduled.keys():
            self._by_piece[request_id][0].tokens += scheduled[request_id]
            total += scheduled[request_id]
        return total

    def end(self, request: Request) -> None:
        """One of our requests has ended."""
        replay, _ = self._by_piece.pop(request.request_id)
        replay.piece = None
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            replay.broken = True
            replay.left.clear()
            self._hide(replay)
        if replay.done:
            replay.first, replay.prompt = None, []

    def at_work(self) -> set[str]:
        """Our requests that have not ended."""
        return set(self._by_piece)

    def abandoned(self) -> list[str]:
        """Those that nobody waits for any more."""
        return [name for name, (replay, _) in self._by_piece.items() if not replay.members]


def _key(request: Request, policy: ReplayPolicy, prompt: Sequence[int]) -> Any:
    """What a replay's scores depend on: requests of the same key share it.

    Of a LoRA adapter all that a request says, since vLLM compares names only: a name may stand for
    another path, or an id that was loaded again.
    """
    adapter = request.lora_request and msgspec.structs.astuple(request.lora_request)
    return policy, sha256(array("q", prompt)).digest(), request.cache_salt, adapter
