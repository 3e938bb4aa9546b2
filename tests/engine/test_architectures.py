"""I7 for other models: architectures, query heads per KV head, head sizes; I1 in 16 bits.

Then, on the same engines, options and features that must change nothing.
The models are random and tiny. The reference is transformers, its attention under a mask made of
what the engine says it kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from . import probes, tiny
from .conftest import NEXUS
from .harness import MODES, Engine, Mode, Request, Result
from .reference import Eviction, attend, causal
from .test_uneven import visibility

pytestmark = pytest.mark.engine
TOLERANCE = 1e-3
PROMPT = 230
DECODED = 44
KV_HEADS = 2
# Each architecture, each number of query heads per KV head (Phi knows only one), each head size.
MODELS = [
    ("llama", 1, 96),
    ("llama", 3, 64),
    ("llama", 8, 128),
    ("qwen3", 1, 128),
    ("qwen3", 4, 96),
    ("qwen3", 8, 64),
    ("mistral", 3, 128),
    ("mistral", 4, 64),
    ("mistral", 8, 96),
    ("phi", 1, 64),
    ("phi", 1, 96),
    ("phi3", 4, 128),
]
ON_V2 = MODELS[2], MODELS[4], MODELS[9]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 64,
}


def save(folder: Path, model_type: str, group: int, head_size: int) -> Path:
    heads = group * KV_HEADS
    # The heads of Phi divide the hidden size; others need not.
    hidden = heads * head_size if model_type.startswith("phi") else 192
    changes = {"sliding_window": None} if model_type == "mistral" else {}
    return tiny.save(folder, model_type, heads, KV_HEADS, head_size, hidden, **changes)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """`engine_of(mode, path, nexus, **options)`: one process a mode, and one more without us."""
    running: dict[tuple[Mode, bool], Engine] = {}

    def serve(
        mode: Mode, model: Path, nexus: dict[str, Any] | None = NEXUS, **options: Any
    ) -> Engine:
        key = (mode, nexus is None)
        if key in running:
            running[key].restart(model, nexus, **{**OPTIONS, **options})
        else:
            running[key] = Engine(mode, model, nexus, **{**OPTIONS, **options})
        return running[key]

    yield serve
    for engine in running.values():
        engine.close()


class Reference:
    """A transformers model whose attention sees what each layer is told."""

    def __init__(self, folder: Path) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("visible", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="visible"
        ).eval()
        self.visible: Callable[[int], Tensor] = lambda layer: torch.empty(0)
        self.layers_seen: set[int] = set()

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """[1, heads, T, D] each -> [1, T, heads, D]."""
        self.layers_seen.add(module.layer_idx)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, self.visible(module.layer_idx))[None], None

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], visible: Callable[[int], Tensor] | None) -> Tensor:
        self.visible = visible or (lambda layer: causal(len(ids)))
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        assert len(self.layers_seen) == self.model.config.num_hidden_layers
        return logits


def evicted(prompt: list[int], logits: bool = False, **params: Any) -> Request:
    """With `kv_...` among the parameters for the directive."""
    directive = {key: params.pop(key) for key in list(params) if key.startswith("kv_")}
    directive = {"kv_budget": 128, "kv_allocator": "uniform", "kv_seed": 1, **directive}
    params = {"max_tokens": DECODED, **params, "extra_args": directive}
    return Request(prompt, params, logits=logits)


def by_head(trace: list[Eviction]) -> list[Eviction]:
    """Kept sets of layers as those of all of a layer's KV heads."""
    return [
        Eviction(
            event.num_computed,
            event.full_blocks,
            event.kept if event.kept.dim() == 3 else event.kept[:, None].expand(-1, KV_HEADS, -1),
        )
        for event in trace
    ]


@pytest.mark.parametrize(
    ("mode", "model_type", "group", "head_size"),
    [
        pytest.param(mode, *model, id=f"{mode}-{model[0]}-{model[1]}-{model[2]}")
        for mode, models in ((MODES[0], MODELS), (MODES[-1], ON_V2))
        for model in models
    ],
)
def test_logits_equal_masked_attention(
    engine_of: Callable[..., Engine],
    tmp_path: Path,
    mode: Mode,
    model_type: str,
    group: int,
    head_size: int,
) -> None:
    folder = save(tmp_path / "model", model_type, group, head_size)
    engine = engine_of(mode, folder)
    requests = [
        evicted(tiny.tokens(PROMPT, seed), logits=True, kv_allocator=allocator)
        for seed, allocator in enumerate(("uniform", "global", "ada"))
    ]
    reference = Reference(folder)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        check_against_reference(engine, reference, request, result, group)


def check_against_reference(
    engine: Engine, reference: Reference, request: Request, result: Result, group: int
) -> None:
    trace = engine.do(probes.trace, result.id)
    assert len(trace) >= 2
    uneven = request.params["extra_args"]["kv_allocator"] != "uniform"
    assert {event.kept.dim() for event in trace} == {3 if uneven else 2}
    ids = [*request.prompt, *result.tokens]
    expected = reference.logits(ids, visibility(len(ids), by_head(trace), group))
    assert result.logits is not None
    # The comparison can tell what was forgotten from what was not.
    full = reference.logits(ids, None)
    difference = (full - expected)[PROMPT:].abs().amax(-1)
    assert difference.median() > 100 * TOLERANCE
    torch.testing.assert_close(result.logits, expected[PROMPT - 1 : -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_i1_a_sufficient_budget_changes_no_bit_in_16_bits(
    engine_of: Callable[..., Engine], tmp_path: Path, dtype: str
) -> None:
    folder = save(tmp_path / "model", "llama", 3, 64)
    plain = Request(tiny.tokens(100, 1), {"max_tokens": 30}, logits=True)
    (expected,) = engine_of(MODES[0], folder, None, dtype=dtype).generate([plain])
    ours = engine_of(MODES[0], folder, NEXUS, dtype=dtype)
    for budget in ("full", 160):
        ours.reset_prefix_cache()
        params = {**plain.params, "extra_args": {"kv_budget": budget}}
        (result,) = ours.generate([Request(plain.prompt, params, logits=True)])
        assert result.tokens == expected.tokens
        assert result.logits is not None
        assert expected.logits is not None
        assert torch.equal(result.logits, expected.logits)
        assert ours.do(probes.trace, result.id) == []


def test_gemma_3_with_its_sliding_window_switched_off(
    engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    """Every other layer has one otherwise, as `fail_closed[gemma_3]` says."""
    folder = tiny.save(
        tmp_path / "model",
        "gemma3_text",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=512,
        query_pre_attn_scalar=64,  # the head size
    )
    engine = engine_of(MODES[0], folder, disable_sliding_window=True)
    request = evicted(tiny.tokens(PROMPT, 1), logits=True)
    (result,) = engine.generate([request])
    check_against_reference(engine, Reference(folder), request, result, group=2)


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1]], ids=str)
def test_prompt_logprobs_are_those_of_stock_through_chunks_and_preemption(
    engine_of: Callable[..., Engine], tmp_path: Path, mode: Mode
) -> None:
    folder = save(tmp_path / "model", "llama", 3, 64)
    prompt = tiny.tokens(224, 1)
    plain = Request(prompt, {"max_tokens": 60, "prompt_logprobs": 2})
    (expected,) = engine_of(MODES[0], folder, None).generate([plain])

    scored = evicted(prompt, max_tokens=60, prompt_logprobs=2)
    engine = engine_of(mode, folder)
    for _ in range(2):  # the second time the prompt is in the prefix cache
        (undisturbed,) = engine.generate([scored])
        assert len(engine.do(probes.trace, undisturbed.id)) >= 2
        assert_same_scores(undisturbed, expected)

    small = {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 96, "max_model_len": 320}
    engine = engine_of(mode, folder, **small)
    other = engine.add(Request(tiny.tokens(150, 2), {"max_tokens": 40}))
    # In its third step from here it needs another page, and so does the prompt's third chunk.
    while engine.step().requests[other].num_computed_tokens < 158:
        pass
    name, computed = engine.add(scored), 0
    while (now := engine.step().requests[name]).status != "PREEMPTED":
        computed = now.num_computed_tokens
    assert 0 < computed < len(prompt)
    engine.run()
    (result,) = engine.results(name)
    assert result.tokens == undisturbed.tokens
    assert_same_scores(result, expected)


def assert_same_scores(result: Result, expected: Result) -> None:
    assert result.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert len(expected.prompt_logprobs) == 223
    for row, other in zip(result.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert row == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1]], ids=str)
def test_without_prefix_caching_or_chunked_prefill_the_same_is_kept(
    engine_of: Callable[..., Engine], tmp_path: Path, mode: Mode
) -> None:
    folder = save(tmp_path / "model", "llama", 3, 64)
    prompt = tiny.tokens(PROMPT, 1)
    requests = [
        evicted(prompt),
        evicted([*prompt[:100], *tiny.tokens(130, 2)], kv_allocator="global"),
        evicted(tiny.tokens(330, 3), kv_prefill="streaming"),
        evicted(prompt[:200], kv_policy="random"),
    ]
    found = []
    for options in ({}, {"enable_prefix_caching": False}, {"enable_chunked_prefill": False}):
        engine = engine_of(mode, folder, **options)
        engine.generate(requests[:1])
        results = engine.generate(requests)
        found.append([(r.tokens, kept_sets(engine, r)) for r in results])
        assert all(len(kept) >= 2 for _, kept in found[-1])
        caching = options.get("enable_prefix_caching", True)
        cached = [192, 96, 0, 160] if caching else [0, 0, 0, 0]
        assert [result.cached_tokens for result in results] == cached
        state = engine.state()
        assert state.free_blocks == state.pool_blocks
        assert (state.hashed_blocks > 0) == caching
    assert found[0] == found[1] == found[2]


def kept_sets(engine: Engine, result: Result) -> list[tuple[int, Any]]:
    trace = engine.do(probes.trace, result.id)
    return [(event.num_computed, event.kept.sort(-1).values.tolist()) for event in trace]
