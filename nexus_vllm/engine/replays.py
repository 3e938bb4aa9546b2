"""The scheduler's half of replays: which prompts are replayed, how far they are, who waits.

    request --waits for--> replay --one after the other--> pieces, which are requests of ours

A piece's prompt is the whole prompt, an instruction and what is to be repeated. All but the first
find the prompt's pages in the prefix cache, and so does the request itself.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from nexus_vllm.plan import Piece
from nexus_vllm.policies import ReplayPolicy
from nexus_vllm.replay import INSTRUCTION, pieces

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike


@dataclass(eq=False)
class Replay:
    """The replay of one prompt, for all `members` that have it: those of n > 1, or who asks alike
    while another one is there.

    `left`: what has not begun. `piece`: the request at work. `tokens`: computed in its pieces.
    `broken`: a piece did not get to its end, so that the scores are not worth anything.
    """

    name: str
    key: Any
    first: Request
    prompt: list[int]
    instruction: list[int]
    left: list[range]
    members: set[str] = field(default_factory=set)
    piece: str | None = None
    begun: int = 0
    tokens: int = 0
    broken: bool = False

    @property
    def done(self) -> bool:
        return self.piece is None and not self.left


class Replays:
    """All replays of an engine. `longest`: as `replay.longest_replay`."""

    def __init__(self, tokenizer: "TokenizerLike | None", longest: int) -> None:
        self.tokenizer = tokenizer
        self.longest = longest
        self.forgotten: list[str] = []
        """Replays that nobody needs any more, for the worker to drop: emptied by who tells it."""
        self._by_key: dict[Any, Replay] = {}
        self._by_member: dict[str, Replay] = {}
        self._by_piece: dict[str, tuple[Replay, Piece]] = {}

    def join(self, request: Request, policy: ReplayPolicy, first_cut: int) -> None:
        """The request needs a replay of its prompt; it is evicted at `first_cut` tokens.

        It gets none, and will find no scores, where the front end should have refused it.
        """
        prompt = request.prompt_token_ids
        if prompt is None or self.tokenizer is None:
            return
        if policy.replay == "first-cut":
            prompt = prompt[:first_cut]
        key = (policy, tuple(prompt), request.cache_salt, request.lora_request)
        replay = self._by_key.get(key)
        if replay is None:
            told = self.tokenizer.encode(policy.instruction, add_special_tokens=False)
            told = list(told)[:INSTRUCTION]
            left = pieces(len(prompt), len(told), policy.piece, self.longest)
            if not left:
                return
            replay = Replay(request.request_id, key, request, list(prompt), told, left)
            self._by_key[key] = replay
        replay.members.add(request.request_id)
        self._by_member[request.request_id] = replay

    def leave(self, request_id: str) -> Replay | None:
        """A request has ended. Returns the replay that it needed."""
        replay = self._by_member.pop(request_id, None)
        if replay is not None:
            replay.members.discard(request_id)
            if not replay.members:
                del self._by_key[replay.key]
                replay.left.clear()
                self.forgotten.append(replay.name)
        return replay

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
        return [r for r in self._by_key.values() if r.left and r.piece is None]

    def begin(self, replay: Replay) -> Request:
        """The request that computes a replay's next piece."""
        first, repeated = replay.first, replay.left.pop(0)
        prompt = replay.prompt
        tokens = [*prompt, *replay.instruction, *(prompt[i] for i in repeated)]
        request_id = f"{replay.name}/replay/{replay.begun}"
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

    def at_work(self) -> set[str]:
        """Our requests that have not ended."""
        return set(self._by_piece)

    def abandoned(self) -> list[str]:
        """Those that nobody waits for any more."""
        return [name for name, (replay, _) in self._by_piece.items() if not replay.members]
