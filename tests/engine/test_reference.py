"""The oracle must be beyond doubt: against transformers, and against forgetting done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .reference import Eviction, Llama, attend, causal, visibility

TEXT = (
    "In the beginning of the year the harbour froze, and the ships that had come late lay still "
    "between the quays. Numbers such as 36443 or 7,021 were painted on their sides. Nobody could "
    "say when the ice would go. 'In March,' said the pilot; 'in April,' said his wife, who had "
    "been right before. So the crews learned to skate.\n\n"
)
BLOCK = 4


def test_without_evictions_it_equals_transformers(model_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model_path).encode(TEXT * 4)[:300]
    assert len(ids) == 300
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    reference = Llama.load(model_path)
    ours = reference.logits(ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    everything = Eviction(128, 4, torch.arange(4).expand(reference.num_layers, 4))
    kept_all = reference.logits(ids, visibility(300, [everything]), rows=slice(290, 300))
    torch.testing.assert_close(kept_all, ours[290:], atol=1e-4, rtol=0)


@pytest.fixture
def tiny() -> Llama:
    """A random Llama: 2 layers, 4 heads over 2 KV heads of size 8, 50 tokens."""
    random = torch.Generator().manual_seed(0)
    sizes = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = size
        shapes[prefix + "mlp.gate_proj.weight"] = (48, 32)
        shapes[prefix + "mlp.up_proj.weight"] = (48, 32)
        shapes[prefix + "mlp.down_proj.weight"] = (32, 48)
        shapes[prefix + "input_layernorm.weight"] = (32,)
        shapes[prefix + "post_attention_layernorm.weight"] = (32,)
    weights = {name: torch.randn(s, generator=random) / 3 for name, s in shapes.items()}
    return Llama(
        weights,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        rope_theta=100.0,
        norm_eps=1e-5,
    )


def forget_by_hand(model: Llama, ids: list[int], trace: list[Eviction]) -> Tensor:
    """Token by token, with a cache per layer from which an eviction deletes entries."""
    cache: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(model.num_layers)]
    rows = []
    for position, token in enumerate(ids):
        for event in trace:
            if event.num_computed == position:
                for layer, entries in enumerate(cache):
                    kept = set(event.kept[layer].tolist())
                    for old in list(entries):
                        if old < event.full_blocks * BLOCK and old // BLOCK not in kept:
                            del entries[old]
        hidden = model.embed([token])
        for layer, entries in enumerate(cache):
            q, k, v = model.project(layer, hidden, torch.tensor([position]))
            entries[position] = (k, v)
            keys, values = (torch.cat(x) for x in zip(*entries.values(), strict=True))
            all_seen = torch.ones(1, len(entries), dtype=torch.bool)
            hidden = model.finish(layer, hidden, attend(q, keys, values, all_seen))
        rows.append(model.unembed(hidden))
    return torch.cat(rows)


TRACE = [
    Eviction(14, 3, torch.tensor([[0, 2], [1, 2]])),  # 2 tokens of block 3 are there: a tail
    Eviction(20, 5, torch.tensor([[0, 4], [3, 2]])),
    Eviction(21, 5, torch.tensor([[4], [3]])),  # again at once, smaller
    Eviction(33, 8, torch.tensor([[4, 7, 6], [3, 6, 5]])),
]


@pytest.mark.parametrize("count", range(5))
def test_the_mask_equals_forgetting_by_hand(tiny: Llama, count: int) -> None:
    ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    trace = TRACE[:count]
    by_hand = forget_by_hand(tiny, ids, trace)
    at_once = tiny.logits(ids, visibility(len(ids), trace, BLOCK))
    torch.testing.assert_close(at_once, by_hand, atol=1e-5, rtol=0)
    if count:
        difference = (tiny.logits(ids) - by_hand).abs().amax(-1)
        assert difference[:14].max() < 1e-5
        assert difference[14:].min() > 1e-3


def test_a_mask_may_be_given_as_a_tensor(tiny: Llama) -> None:
    ids = list(range(12))
    full = tiny.logits(ids)
    mask = causal(12)
    torch.testing.assert_close(tiny.logits(ids, mask), full)
    torch.testing.assert_close(tiny.logits(ids, mask.expand(2, 12, 12), slice(5, 7)), full[5:7])


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        ([Eviction(11, 3, torch.zeros(2, 1, dtype=torch.long))], "not full yet"),
        ([TRACE[1], TRACE[0]], "older"),
        ([Eviction(12, 3, torch.tensor([[0, 0], [1, 2]]))], "layer 0"),
        ([Eviction(12, 3, torch.tensor([[0, 1], [1, 3]]))], "layer 1"),
        ([TRACE[0], Eviction(20, 5, torch.tensor([[0, 4], [0, 4]]))], "layer 1"),  # resurrected
    ],
)
def test_an_impossible_trace_is_refused(trace: list[Eviction], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        visibility(40, trace, BLOCK)
