"""Replays in real engines: what they find, what they cost, and that only scores of them stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from nexus_vllm.policies.kvzip import KVzip
from nexus_vllm.replay import OVERLAP, pieces

from . import probes
from .conftest import NEXUS
from .harness import Engine, Engines, Mode, Request
from .reference import Llama
from .texts import prose

if TYPE_CHECKING:
    from .child import Host

BLOCK = 32
PROMPT = 295
PIECE = 128
LONGEST = 4095
POLICY = KVzip(piece=PIECE)


@pytest.fixture
def engine(mode: Mode, engines: Engines) -> Engine:
    """Prompts are computed in chunks, which end in the midst of pieces."""
    found = engines(
        mode,
        nexus={**NEXUS, "selector": "topk", "parameters": {"kvzip": {"piece": PIECE}}},
        max_num_batched_tokens=96,
    )
    found.do(reset)
    found.generate([Request(prose(found, 8), {"max_tokens": 2})])  # the worker hears of it
    return found


@pytest.fixture(scope="module")
def llama(model_path: Path) -> Llama:
    return Llama.load(model_path)


def ask(prompt: list[int], **more: Any) -> Request:
    directive = {"kv_budget": 128, "kv_policy": "kvzip", **more.pop("directive", {})}
    return Request(prompt, {"max_tokens": 20, **more, "extra_args": directive})


def scores(host: Host) -> dict[str, list[Any]]:
    """What the only worker has found of replays."""
    (found,) = host.rpc(_scores, ())
    return found


def _scores(worker: Any) -> dict[str, list[Any]]:
    return {name: found.tolist() for name, found in worker.replays.scores.items()}


def left(host: Host) -> list[Any]:
    """Whatever of replays anybody still knows, after one more step, but for those that are kept."""
    replays = host.scheduler.replays
    (worker,) = host.rpc(_left, ())
    known = [replays._by_member, replays._by_piece, replays.forgotten]
    kept = {replay.name for replay in replays.idle()}
    strays = set(worker[0]) ^ kept
    return [one for one in (*known, host.scheduler.pages.published, strays, worker[1]) if one]


def _left(worker: Any) -> list[Any]:
    return [list(worker.replays.scores), list(worker.replays.pieces)]


def reset(host: Host) -> None:
    """Keep nothing."""
    assert host.scheduler.reset_prefix_cache()


def nothing_is_left(engine: Engine) -> bool:
    engine.generate([Request(prose(engine, 8), {"max_tokens": 2})])  # the worker hears of it
    return engine.do(left) == []


def instruction(engine: Engine) -> list[int]:
    """Its tokens, without any that would begin a text."""
    return engine.encode(POLICY.instruction)


def expected(llama: Llama, prompt: list[int], told: list[int]) -> Tensor:
    """The replay's scores [layers, KV heads, blocks] as the formula says, in float64."""
    blocks = math.ceil(len(prompt) / BLOCK)
    found = torch.zeros(llama.num_layers, llama.num_kv_heads, blocks, dtype=torch.float64)
    group = llama.num_heads // llama.num_kv_heads
    for repeated in pieces(len(prompt), len(told), PIECE, LONGEST):
        ids = [*prompt, *told, *(prompt[i] for i in repeated)]
        first = len(prompt) + len(told)
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        hidden = llama.embed(ids)
        for layer in range(llama.num_layers):
            q, k, v = llama.project(layer, hidden, torch.arange(len(ids)))
            attended = torch.empty_like(q)
            for head in range(llama.num_heads):
                kv = head // group
                logits = q[:, head].double() @ k[:, kv].double().T * llama.head_size**-0.5
                shares = logits.masked_fill(~causal, -math.inf).softmax(-1)
                attended[:, head] = (shares @ v[:, kv].double()).float()
                for block in range(blocks):
                    tokens = slice(block * BLOCK, min((block + 1) * BLOCK, len(prompt)))
                    most = shares[first:, tokens].max()
                    found[layer, kv, block] = max(found[layer, kv, block], most)
            hidden = llama.finish(layer, hidden, attended)
    return found


def test_scores_are_the_formulas(engine: Engine, llama: Llama) -> None:
    """Two prompts side by side, of different lengths, one of them of whole blocks."""
    prompts = [prose(engine, PROMPT), prose(engine, 224, start=500)]
    names = [engine.add(ask(prompt)) for prompt in prompts]
    while not all(result.tokens for result in engine.results(*names)):
        engine.step()
    found = engine.do(scores)
    assert len(found) == 2
    told = instruction(engine)
    for prompt, of_prompt in zip(prompts, found.values(), strict=True):
        wanted = expected(llama, prompt, told).float()
        torch.testing.assert_close(torch.tensor(of_prompt), wanted, atol=2e-5, rtol=1e-3)
    engine.run()
    assert nothing_is_left(engine)


def test_the_cost_is_told(engine: Engine) -> None:
    """The prompt is computed once, by the first piece; then it is found in the prefix cache."""
    prompt, told = prose(engine, PROMPT), len(instruction(engine))
    (result,) = engine.generate([ask(prompt)])
    assert result.kv_transfer_params is not None
    record = result.kv_transfer_params["kv_eviction"]
    repeated = pieces(PROMPT, told, PIECE, LONGEST)
    assert len(repeated) == 3
    assert sum(map(len, repeated)) == PROMPT + 2 * OVERLAP
    again = PROMPT % BLOCK  # its last block goes on differently in each piece
    assert record["replay_tokens"] == PROMPT + 2 * again + 3 * told + PROMPT + 2 * OVERLAP
    assert record["eviction_steps"] > 0
    assert result.cached_tokens == (PROMPT - 16) // BLOCK * BLOCK  # but for the window
    assert nothing_is_left(engine)


def test_who_asks_again_is_evicted_by_the_replay_that_was_kept(engine: Engine) -> None:
    """It pays nothing, and has the same text and blocks; after a reset it pays all again."""
    prompt = prose(engine, PROMPT, start=900)
    told = []
    for again in range(3):
        if again == 2:
            engine.do(reset)
        name = engine.add(ask(prompt))
        engine.run()
        (result,) = engine.results(name)
        assert result.kv_transfer_params is not None
        cost = result.kv_transfer_params["kv_eviction"]["replay_tokens"]
        (event,) = engine.do(probes.trace, name)
        told.append((cost, result.tokens, event.kept.tolist()))
        assert nothing_is_left(engine)
    assert [cost for cost, _, _ in told] == [told[0][0], 0, told[0][0]]
    assert told[0][0] > PROMPT
    assert told[0][1:] == told[1][1:] == told[2][1:]


def test_who_is_not_evicted_or_did_not_ask_pays_nothing(engine: Engine) -> None:
    prompt = prose(engine, PROMPT)
    ample = ask(prompt, directive={"kv_budget": 1024})
    other = ask(prompt, directive={"kv_policy": "snapkv"})
    first, second = engine.generate([ample, other])
    assert first.kv_transfer_params is not None
    assert first.kv_transfer_params["kv_eviction"]["replay_tokens"] == 0
    assert second.kv_transfer_params is not None
    assert "replay_tokens" not in second.kv_transfer_params["kv_eviction"]


def test_all_of_n_share_a_replay(engine: Engine) -> None:
    prompt, told = prose(engine, PROMPT, start=100), len(instruction(engine))
    name = engine.add(ask(prompt, n=3, temperature=1.0, seed=0))
    engine.step()
    assert len(engine.do(of_members)) == 3
    assert len(set(engine.do(of_members))) == 1
    engine.run()
    (result,) = engine.results(name)
    assert result.kv_transfer_params is not None
    total = PROMPT + 2 * (PROMPT % BLOCK) + 3 * told + PROMPT + 2 * OVERLAP
    assert result.kv_transfer_params["kv_eviction"]["replay_tokens"] == total
    assert nothing_is_left(engine)


def of_members(host: Host) -> list[str]:
    return [replay.name for replay in host.scheduler.replays._by_member.values()]


@pytest.mark.parametrize("steps", [1, 2, 5, 8, 12])
def test_an_abort_ends_the_replay(engine: Engine, steps: int) -> None:
    name = engine.add(ask(prose(engine, PROMPT, start=steps)))
    engine.step(steps)
    engine.abort(name)
    state = engine.run()
    assert state.free_blocks == state.pool_blocks
    assert nothing_is_left(engine)


def test_a_streamed_prompt_is_cut_by_its_replay(engine: Engine) -> None:
    prompt = prose(engine, PROMPT)
    streaming = ask(prompt, directive={"kv_prefill": "streaming", "kv_seed": 1})
    (result,) = engine.generate([streaming])
    assert result.kv_transfer_params is not None
    record = result.kv_transfer_params["kv_eviction"]
    assert record["prefill"] == "streaming"
    assert record["eviction_steps"] > 1
    assert record["replay_tokens"] > PROMPT
    assert nothing_is_left(engine)


def test_the_best_blocks_stay(engine: Engine) -> None:
    """Each head keeps the block that its replay finds best; three of four are kept anyway."""
    prompt = prose(engine, 288)
    name = engine.add(ask(prompt, directive={"kv_allocator": "per-head"}, max_tokens=2))
    while not engine.results(name)[0].tokens:
        engine.step()
    (found,) = engine.do(scores).values()
    engine.run()
    (event,) = engine.do(probes.trace, name)
    best = torch.tensor(found)[..., 1:-2].argmax(-1) + 1
    assert (event.kept == best[..., None]).any(-1).all()
