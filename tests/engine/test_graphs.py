"""Attention by vLLM's Triton kernels, and model runner V2's full CUDA graphs, both interpreted.

`graphs.py` says what its graphs show, and what they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import graphs, probes, tiny
from .conftest import NEXUS
from .harness import Engine, Mode, Request

pytestmark = [pytest.mark.engine, pytest.mark.v2]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
}
KERNELS = {
    "NEXUS_TEST_ATTENTION": "TRITON_ATTN",
    "NEXUS_VLLM_UNCONFIRMED": "1",
    "NEXUS_VLLM_KERNELS": "triton",
}
SIZES = [1, 2, 4]  # three requests are padded to four


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "llama", 4, 2, 32, 64)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """Kernels in the interpreter, two batches in flight, as on a GPU."""
    with Engine(Mode("v2", "async"), model, NEXUS, env=KERNELS, **OPTIONS) as engine:
        assert engine.facts.attention_backend.endswith(".EvictionTritonAttentionImpl")
        engine.do(graphs.use_few_programs)
        yield engine


def requests(**third: Any) -> list[Request]:
    asked: list[tuple[int, int, dict[str, Any]]] = [
        (120, 44, {"kv_budget": 96, "kv_policy": "nexus", "kv_seed": 3}),
        (50, 20, {}),
        (150, 44, {"kv_budget": 128, "kv_policy": "nexus", **third}),
    ]
    return [
        Request(tiny.tokens(prompt, seed), {"max_tokens": count, "extra_args": directive})
        for seed, (prompt, count, directive) in enumerate(asked)
    ]


def generate(engine: Engine, **third: Any) -> tuple[list[list[int]], list[Any]]:
    """Texts and kept sets, both of all requests."""
    engine.reset_prefix_cache()
    results = engine.generate(requests(**third), timeout=600)
    kept = [
        [(event.num_computed, event.kept.sort(-1).values.tolist()) for event in events]
        for events in (engine.do(probes.trace, result.id) for result in results)
    ]
    assert len(kept[0]) >= 2
    assert len(kept[2]) >= 2
    return [result.tokens for result in results], kept


def even(generated: tuple[list[list[int]], list[Any]]) -> bool:
    """Whether all heads of the third request keep as many blocks."""
    return all(block >= 0 for _, kept in generated[1][2] for block in torch.tensor(kept).flatten())


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    """What CPU_ATTN and plain torch give, by allocator of the third request."""
    with Engine(Mode("v2", "sync"), model, NEXUS, **OPTIONS) as engine:
        return {name: generate(engine, kv_allocator=name) for name in ("uniform", "pyramid")}


def test_triton_attention_gives_the_texts_and_keeps_the_blocks_of_cpu_attention(
    engine: Engine, expected: dict[str, Any]
) -> None:
    assert generate(engine) == expected["uniform"]
    assert generate(engine, kv_allocator="pyramid") == expected["pyramid"]


def test_full_graphs_replay_what_eager_steps_compute(
    engine: Engine, expected: dict[str, Any]
) -> None:
    told = engine.do(graphs.capture, SIZES)
    assert (told["mode"], told["support"]) == ("FULL_DECODE_ONLY", "ALWAYS")
    assert told["launches"].keys() == set(SIZES)
    before = engine.do(graphs.replays)
    assert generate(engine) == expected["uniform"]
    assert engine.do(graphs.replays) - before >= 40  # all steps but those that prefill

    before = engine.do(graphs.replays)
    assert generate(engine, kv_allocator="pyramid") == expected["pyramid"]
    assert not even(expected["pyramid"])
    # Not from the first uneven eviction on, while that sequence lives.
    assert 0 < engine.do(graphs.replays) - before < 20


def test_a_dummy_batch_touches_no_ring(engine: Engine) -> None:
    """As when other data-parallel ranks have a step and this one has none: its rows are numbered as
    if they were those of the four requests here."""
    names = [engine.add(requests()[0]) for _ in range(OPTIONS["max_num_seqs"])]
    engine.step(5)
    assert len(engine.state().requests) == len(names)
    before = engine.do(graphs.rings)
    assert before.flatten(2).any(-1).sum() > 0
    engine.rpc("execute_dummy_batch")
    assert torch.equal(engine.do(graphs.rings), before)
    engine.abort(*names)
    engine.run()
