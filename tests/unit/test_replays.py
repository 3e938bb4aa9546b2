"""Replays: how prompts are cut, what a piece finds in float64, what is refused."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from nexus_vllm.config import Settings
from nexus_vllm.engine import requests
from nexus_vllm.engine.evictor import Layer, replayed
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.replay_scores import Reading, ReplayScores
from nexus_vllm.engine.replays import KEPT, Replays
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Piece
from nexus_vllm.policies import base
from nexus_vllm.policies.kvzip import KVzip
from nexus_vllm.replay import INSTRUCTION, OVERLAP, ROOM, pieces

BLOCK, HEADS, GROUP, DIM, LAYERS = 4, 2, 3, 8, 2


@given(
    prompt=st.integers(1, 5000),
    instruction=st.integers(0, INSTRUCTION),
    piece=st.integers(32, 2048),
    longest=st.integers(1, 8192),
)
def test_pieces_repeat_every_token_within_bounds(
    prompt: int, instruction: int, piece: int, longest: int
) -> None:
    found = pieces(prompt, instruction, piece, longest)
    assert bool(found) == (prompt + ROOM <= longest)
    following = 0
    for index, repeated in enumerate(found):
        assert repeated.start == max(0, following - OVERLAP * (index > 0))
        assert following < repeated.stop
        assert len(repeated) <= piece
        assert prompt + instruction + len(repeated) <= longest
        following = repeated.stop
    assert following == (prompt if found else 0)


def layers(pages: int, seed: int) -> list[Layer]:
    """With plain layouts, keys drawn; what is written beyond a sequence is drawn as well."""
    g = torch.Generator().manual_seed(seed)
    order = torch.arange(BLOCK)[:, None] * 2 * DIM + torch.arange(DIM)
    made = []
    for index in range(LAYERS):
        cache = torch.randn(pages, HEADS, BLOCK, 2 * DIM, generator=g)
        window = LayerWindow(1, 4, HEADS * GROUP, DIM, torch.float32, torch.device("cpu"))
        made.append(Layer(index, cache, UnitLayout.of(order), 0.6, DIM, window))
    return made


def read_again(layer: Layer, query: Tensor, reading: Reading) -> Tensor:
    """The formula in float64, one query and head at a time: [KV heads, blocks]."""
    piece = reading.piece
    out = torch.zeros(HEADS, math.ceil(piece.prompt_tokens / BLOCK), dtype=torch.float64)
    keys = layer.cache[reading.pages, :, :, :DIM].double().transpose(0, 1).flatten(1, 2)
    for row, position in zip(query[reading.rows], reading.positions.tolist(), strict=True):
        for head, vector in enumerate(row):
            logits = keys[head // GROUP, : position + 1] @ vector.double() * layer.scale
            for token, share in enumerate(logits.softmax(0)[: piece.prompt_tokens].tolist()):
                at = head // GROUP, token // BLOCK
                out[at] = max(float(out[at]), share)
    return out


@pytest.mark.parametrize("prompt", [1, 4, 6, 11])
@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_what_a_piece_finds(prompt: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps, of which the second starts within a block, and over another's rows."""
    monkeypatch.setattr(base, "MAX_LOGITS", limit)
    ours = layers(9, prompt)
    replays = ReplayScores(None, ours, BLOCK)  # type: ignore[arg-type]
    first, end = prompt + 3, prompt + 3 + 7
    piece = Piece("r/replay/0", "r", prompt, first, end)
    replays.start(piece)
    query = torch.randn(9, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(1)) * 3
    pages = torch.tensor([7, 2, 5, 0, 8, 3])
    steps = [
        Reading(piece, slice(0, 3), torch.arange(first, first + 3), pages[:5]),
        Reading(piece, slice(4, 8), torch.arange(first + 3, end), pages[: -(-end // BLOCK)]),
    ]
    expected = torch.zeros(LAYERS, HEADS, math.ceil(prompt / BLOCK), dtype=torch.float64)
    for step in steps:
        for row, layer in enumerate(ours):
            replays.read(row, query, [step])
            expected[row] = expected[row].maximum(read_again(layer, query, step))
    torch.testing.assert_close(replays.scores["r"], expected.float(), rtol=1e-4, atol=1e-7)
    before = replays.scores["r"].clone()
    replays.stop("r/replay/0")
    replays.start(piece)  # preempted: it comes again, and changes nothing
    for step in steps:
        for row in range(LAYERS):
            replays.read(row, query, [step])
    assert torch.equal(replays.scores["r"], before)
    replays.stop("r/replay/0")
    replays.forget("r")
    assert not replays.scores
    assert not replays.pieces


def test_rows_of_a_batch_that_repeat() -> None:
    """Of a step, what lies in [first, end): no instruction, no prompt, no padding of drafts."""
    ids = ["other", "a", "b", "c", None]
    runner: Any = SimpleNamespace(batch_request_ids=lambda batch: ids)
    replays = ReplayScores(runner, layers(4, 0), BLOCK)
    for name, first, end in (("a", 10, 14), ("b", 20, 30), ("c", 5, 9)):
        replays.start(Piece(name, "r" + name, 4, first, end))
    batch: Any = SimpleNamespace(
        seq_lens_cpu_upper_bound=torch.tensor([50, 12, 20, 11, 0]),
        query_start_loc_cpu=torch.tensor([0, 1, 7, 10, 15, 15]),
        block_table_tensor=torch.arange(50).view(5, 10),
    )
    found = replays.readings(batch)
    assert [(r.piece.request_id, r.rows) for r in found] == [
        ("a", slice(5, 7)),  # positions 6 to 11, of which 10 and 11 repeat
        ("c", slice(10, 13)),  # positions 6 to 10, of which 6, 7 and 8 do
    ]
    assert [r.positions.tolist() for r in found] == [[10, 11], [6, 7, 8]]
    assert [r.pages.tolist() for r in found] == [[10, 11, 12], [30, 31, 32]]


def test_scores_go_by_the_blocks_original_ids() -> None:
    scores = torch.arange(2 * 3 * 4).float().view(2, 3, 4)
    ids = torch.tensor([[3, 0, 9], [4, 1, 2]])
    assert replayed(Sequence(0), ids[:, None]) is None
    found = replayed(dataclasses.replace(Sequence(0), replay=scores), ids[:, None])
    assert found is not None
    assert found.shape == (2, 3, 3)
    for layer, head, at in [(0, 0, 0), (0, 2, 1), (1, 1, 1), (1, 2, 2)]:
        assert found[layer, head, at] == scores[layer, head, ids[layer, at]]
    assert found[0, :, 2].isnan().all()
    assert found[1, :, 0].isnan().all()


def config(**changes: Any) -> Any:
    """Of an engine with a pool of 352 tokens."""
    flags = {"caching": True, "skip_tokenizer_init": False, **changes}
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=12, enable_prefix_caching=flags["caching"]),
        parallel_config=SimpleNamespace(data_parallel_size=1, local_engines_only=False),
        num_speculative_tokens=0,
        model_config=SimpleNamespace(
            max_model_len=flags.get("longest", 2048),
            skip_tokenizer_init=flags["skip_tokenizer_init"],
        ),
    )


def fit(prompt: int, engine: Any, policy: str = "kvzip", **more: Any) -> None:
    params = SamplingParams(
        max_tokens=more.pop("max_tokens", 40),
        extra_args={"kv_policy": policy, "kv_budget": more.pop("budget", "128")},
    )
    asked: dict[str, Any] = {
        "sampling_params": params,
        "prompt_token_ids": [1] * prompt,
        "prompt_embeds": None,
        "mm_features": None,
        "resumable": False,
        **more,
    }
    requests.fit(SimpleNamespace(**asked), Settings(budget_floor=128), engine)  # type: ignore[arg-type]


REFUSED: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
    (287 + 1, {}, {}, "a replay of 288 tokens needs room for 64 more, and pool and max_model_len"),
    (200, {"longest": 260}, {}, "allow 259 in all. Shorten the prompt, or ask for another"),
    (200, {"caching": False}, {}, "the prefix cache, which is off. Serve without --no-enable"),
    (200, {"skip_tokenizer_init": True}, {}, "needs a tokenizer. Serve without --skip-tok"),
    (200, {}, {"resumable": True}, "a session's next prompt has not been replayed"),
    (200, {}, {"mm_features": ["image"]}, "this prompt has images or embeddings. Ask for"),
    (200, {}, {"prompt_embeds": torch.zeros(200, 4)}, "this prompt has images or embeddings"),
]


@pytest.mark.parametrize(("prompt", "engine", "more", "why"), REFUSED)
def test_what_cannot_be_replayed_is_refused(
    prompt: int, engine: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    with pytest.raises(VLLMValidationError, match="kv_policy='kvzip' is not allowed") as refused:
        fit(prompt, config(**engine), **more)
    assert why in str(refused.value)
    fit(prompt, config(**engine), policy="knorm", **more)


def test_what_is_never_evicted_needs_no_replay() -> None:
    fit(287, config())
    fit(100, config(caching=False), max_tokens=20)
    fit(200, config(caching=False), budget="full")


def test_nobody_can_send_in_a_replay() -> None:
    """Ours are made by the scheduler; there is no key that says so."""
    for key in ("kv_replay", "kv_replays", "kv_piece"):
        params = SamplingParams(extra_args={key: "r"})
        with pytest.raises(VLLMValidationError, match="no such directive"):
            requests.validate(params, Settings())


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


PROMPT = list(range(100))


def replays(kept: int = KEPT) -> Replays:
    return Replays(Tokenizer(), 4096, kept)  # type: ignore[arg-type]


def request(prompt: list[int] | None = None, name: str = "r", **more: Any) -> Request:
    return Request(name, prompt or PROMPT, SamplingParams(max_tokens=5), None, **more)


def join(of: Replays, asking: Request, policy: KVzip | None = None, cut: int = 64) -> bool:
    """Whether it has to wait."""
    of.join(asking, policy or KVzip(), cut)
    return of.waits(asking.request_id)


def compute(of: Replays, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> None:
    """All pieces that wait, each with 10 tokens, up to its end."""
    while due := of.due():
        for replay in due:
            piece = of.begin(replay)
            of.computed({piece.request_id: 10})
            piece.status = status
            of.end(piece)


def ask(of: Replays, asking: Request, policy: KVzip | None = None, cut: int = 64) -> int:
    """Ask alone, up to the end; returns the tokens that it tells."""
    if join(of, asking, policy, cut):
        assert of.scores(asking.request_id) is None
        compute(of)
    assert of.scores(asking.request_id)
    return of.leave(asking.request_id)


def adapter(name: str = "a", path: str = "p", number: int = 1, again: bool = False) -> LoRARequest:
    return LoRARequest(name, number, path, load_inplace=again)


def test_a_replay_is_kept_for_who_asks_the_same_later() -> None:
    """By whatever id, also the same one again."""
    of = replays()
    assert ask(of, request()) == 10
    for name in ("r", "s", "r"):
        assert ask(of, request(name=name)) == 0
    assert ask(of, request(cache_salt="s", lora_request=adapter())) == 10
    assert ask(of, request(cache_salt="s", lora_request=adapter())) == 0
    assert of.forgotten == []
    assert len(of.idle()) == 2


OTHERS: list[tuple[dict[str, Any], KVzip]] = [
    ({"prompt": PROMPT[:-1]}, KVzip()),
    ({"prompt": [*PROMPT, 1]}, KVzip()),
    ({"prompt": [*PROMPT[:-1], 7]}, KVzip()),
    ({"cache_salt": "other"}, KVzip()),
    ({"cache_salt": None}, KVzip()),
    ({"lora_request": None}, KVzip()),
    ({"lora_request": adapter("b")}, KVzip()),
    ({"lora_request": adapter(number=2)}, KVzip()),  # unloaded and loaded again
    ({"lora_request": adapter(path="q")}, KVzip()),  # another one in its place
    ({"lora_request": adapter(again=True)}, KVzip()),
    ({}, KVzip(piece=64)),
    ({}, KVzip(instruction="Again:")),
    ({}, KVzip(replay="first-cut")),
]


@pytest.mark.parametrize(("changes", "policy"), OTHERS)
def test_whatever_scores_depend_on_makes_another_replay(
    changes: dict[str, Any], policy: KVzip
) -> None:
    of, usual = replays(), {"cache_salt": "s", "lora_request": adapter()}
    ask(of, request(**usual))
    first, other = request(name="first", **usual), request(name="other", **{**usual, **changes})
    assert not join(of, first)
    assert join(of, other, policy)
    compute(of)
    assert of.scores("first") != of.scores("other")


def test_of_a_first_cut_only_what_comes_before_counts() -> None:
    of, policy = replays(), KVzip(replay="first-cut")
    assert ask(of, request(), policy, 64) == 10
    assert ask(of, request([*PROMPT[:64], 5, 6]), policy, 64) == 0
    assert ask(of, request(PROMPT[:64]), KVzip(), 64) == 10  # another policy
    assert ask(of, request(), policy, 96) == 10


def test_an_adapter_that_is_loaded_for_each_request_makes_each_replay_anew() -> None:
    of = replays()
    for told in range(2):
        assert ask(of, request(lora_request=adapter(again=True))) == 10
        assert len(of.forgotten) == told + 1
    assert of.idle() == []


def test_the_one_not_needed_for_longest_is_forgotten() -> None:
    """Who is needed takes none of the room of those that are kept."""
    of, prompts = replays(kept=2), [[i] * 50 for i in range(4)]
    asked = [request(prompt, str(i)) for i, prompt in enumerate(prompts)]
    for one in asked:
        assert join(of, one)
    compute(of)
    names = [of.scores(one.request_id) for one in asked]
    assert len(set(names)) == 4
    for i in (2, 0, 1, 3):
        assert of.leave(str(i)) == 10
    assert of.forgotten == [names[2], names[0]]
    assert ask(of, request(prompts[1])) == 0
    assert ask(of, request(prompts[2])) == 10
    assert of.forgotten == [names[2], names[0], names[3]]
    assert next(replay.name for replay in of.idle()) == names[1]


def test_what_is_kept_holds_no_prompt_and_no_request() -> None:
    of = replays()
    ask(of, request())
    (replay,) = of.idle()
    assert replay.first is None
    assert replay.prompt == []


def test_what_broke_off_is_not_kept_and_nobody_joins_it() -> None:
    of = replays()
    join(of, request(name="first"))
    compute(of, RequestStatus.FINISHED_ABORTED)
    assert of.scores("first") is None
    assert ask(of, request(name="second")) == 10
    of.leave("first")
    assert len(of.forgotten) == 1
    assert ask(of, request(name="third")) == 0


def test_what_nobody_waits_for_is_not_kept() -> None:
    """Neither before its first piece nor amid one."""
    for begun in (False, True):
        of = replays()
        join(of, request())
        if begun:
            (replay,) = of.due()
            piece = of.begin(replay)
        of.leave("r")
        assert of.idle() == []
        assert of.due() == []
        assert len(of.forgotten) == 1
        if begun:
            assert of.abandoned() == [piece.request_id]
            piece.status = RequestStatus.FINISHED_ABORTED
            of.end(piece)
        assert ask(of, request()) == 10
        assert len(of.forgotten) == 1


def test_who_shares_it_while_it_runs_tells_its_cost() -> None:
    of = replays()
    for name in ("a", "b"):
        assert join(of, request(name=name))
    compute(of)
    assert not join(of, request(name="late"))
    assert [of.leave(name) for name in ("late", "a", "b", "b")] == [0, 10, 10, 0]


def test_a_reset_forgets_what_is_kept_and_hides_what_is_needed() -> None:
    of = replays()
    ask(of, request([1, 2, 3]))
    (kept,) = (replay.name for replay in of.idle())
    join(of, request(name="done"))
    compute(of)
    join(of, request([5] * 40, name="waits"))
    of.reset()
    assert of.forgotten == [kept]
    assert of.waits("waits")
    assert join(of, request([1, 2, 3], name="again"))
    assert join(of, request(name="later"))
    compute(of)
    assert of.scores("done")
    assert of.scores("later") not in (None, of.scores("done"))
    assert [of.leave(name) for name in ("done", "waits", "later", "again")] == [10] * 4
    assert len(of.forgotten) == 3
    assert len(of.idle()) == 2


def test_names_never_come_again() -> None:
    """Neither within an engine nor in another one, nor like a request's."""
    names: list[str] = []
    for of in (replays(), replays()):
        for _ in range(3):
            join(of, request())
            (replay,) = of.due()
            piece = of.begin(replay)
            assert piece.request_id.startswith(replay.name)
            names += [replay.name, piece.request_id]
            piece.status = RequestStatus.FINISHED_LENGTH_CAPPED
            of.end(piece)
            of.leave("r")
            of.reset()
    assert len(set(names)) == len(names)
    assert "r" not in names
