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

from nexus_vllm.config import Settings
from nexus_vllm.engine import requests
from nexus_vllm.engine.evictor import Layer, replayed
from nexus_vllm.engine.layout import UnitLayout
from nexus_vllm.engine.replay_scores import Reading, ReplayScores
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Piece
from nexus_vllm.policies import base
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


def ask(prompt: int, engine: Any, policy: str = "kvzip", **more: Any) -> None:
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
        ask(prompt, config(**engine), **more)
    assert why in str(refused.value)
    ask(prompt, config(**engine), policy="knorm", **more)


def test_what_is_never_evicted_needs_no_replay() -> None:
    ask(287, config())
    ask(100, config(caching=False), max_tokens=20)
    ask(200, config(caching=False), budget="full")


def test_nobody_can_send_in_a_replay() -> None:
    """Ours are made by the scheduler; there is no key that says so."""
    for key in ("kv_replay", "kv_replays", "kv_piece"):
        params = SamplingParams(extra_args={key: "r"})
        with pytest.raises(VLLMValidationError, match="no such directive"):
            requests.validate(params, Settings())
