"""The GPU path, as far as a CPU can go it: Triton's interpreter runs the kernels of an engine on
model runner V2, and the same blocks stay and the same text comes out as with the references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nexus_vllm import allocators, policies
from nexus_vllm.engine.ops import ENVIRONMENT

from . import probes, tiny
from .conftest import NEXUS
from .harness import Engine, Mode, Request
from .texts import prose

pytestmark = [pytest.mark.engine, pytest.mark.v2]

MODE = Mode("v2", "async")
Told = list[tuple[list[int], list[Any]]]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("kernels") / "model")


def told(engine: Engine, requests: list[Request]) -> Told:
    """Tokens and kept blocks, eviction by eviction, of every request."""
    found: Told = []
    for result in engine.generate(requests):
        trace = engine.do(probes.trace, result.id)
        found.append((result.tokens, [event.kept.tolist() for event in trace]))
    return found


def start(model: Path, implementation: str, **options: Any) -> Engine:
    settings = {ENVIRONMENT: implementation}
    return Engine(MODE, model, NEXUS, settings, max_model_len=2048, **options)


def ask(prompt: list[int], decoded: int = 72, at_step: int = 0, **directive: Any) -> Request:
    extra = {f"kv_{name}": value for name, value in {"seed": 3, **directive}.items()}
    return Request(prompt, {"max_tokens": decoded, "extra_args": extra}, at_step)


def test_every_policy_and_allocator_on_a_tiny_model(tiny_model: Path) -> None:
    prompts = [tiny.tokens(290 + 7 * seed, seed) for seed in range(3)]
    others = [name for name in allocators.names() if name not in ("uniform", "lu")]
    requests = [
        ask(prompts[number % 3], budget=160, policy=policy, allocator="uniform", at_step=number % 5)
        for number, policy in enumerate(policies.names())
        if policy != "kvzip"  # a replay is a request of its own
    ]
    requests += [
        ask(prompts[number % 3], budget=160, allocator=allocator, at_step=number % 5)
        for number, allocator in enumerate(others)
    ]
    requests.append(ask(prompts[0], budget=128, prefill="streaming"))
    requests.append(ask(prompts[1], budget="full"))
    with start(tiny_model, "torch", skip_tokenizer_init=True) as engine:
        expected = told(engine, requests)
    with start(tiny_model, "triton", skip_tokenizer_init=True) as engine:
        assert engine.rpc(probes.uses_kernels) == [True]
        found = told(engine, requests)
    for request, one, other in zip(requests, found, expected, strict=True):
        assert one == other, request.params
    assert all(len(kept) >= 2 for _, kept in expected[:-1])


def test_head_budgets_of_a_profile_on_the_bundled_model(model_path: Path) -> None:
    found = []
    for implementation in ("torch", "triton"):
        with start(model_path, implementation) as engine:
            requests = [
                ask(prose(engine, 260, start=50), 40, budget=128, allocator="lu"),
                ask(prose(engine, 200), 40, budget=96, allocator="uniform"),
            ]
            found.append(told(engine, requests))
    assert found[0] == found[1]
    assert all(len(kept) >= 2 for _, kept in found[0])
