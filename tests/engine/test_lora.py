"""LoRA: adapters and the base model side by side in one batch, evicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from . import probes, tiny
from .conftest import NEXUS
from .harness import MODES, Engine, Engines, Mode, Request
from .reference import Llama, visibility

pytestmark = pytest.mark.engine
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Adapted:
    """A model and two adapters of it: folders, and the weights that each amounts to."""

    model: Path
    folders: tuple[str, ...]  # "" is the model itself
    merged: dict[str, Llama]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    root = tmp_path_factory.mktemp("lora")
    model = tiny.save(root / "model")
    added: dict[str, dict[str, Tensor]] = {"": {}}
    for seed in (1, 2):
        folder = root / f"adapter-{seed}"
        added[str(folder)] = tiny.save_adapter(folder, model, seed)
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    merged = {
        folder: Llama.build({k: w + more.get(k, 0) for k, w in weights.items()}, config)
        for folder, more in added.items()
    }
    return Adapted(model, tuple(added), merged)


@pytest.fixture(scope="module", params=[MODES[0], MODES[-1]], ids=str)
def engine(request: pytest.FixtureRequest, engines: Engines, adapted: Adapted) -> Engine:
    mode: Mode = request.param
    return engines(
        mode,
        nexus=NEXUS,
        model=adapted.model,
        enable_lora=True,
        # One slot stays empty: on CPUs vLLM 0.32 takes -1, "no adapter", for the last slot as
        # soon as another request of the batch has an adapter.
        max_loras=3,
        max_lora_rank=8,
        skip_tokenizer_init=True,
        max_model_len=512,
    )


def test_adapters_are_evicted_each_by_its_own_attention(engine: Engine, adapted: Adapted) -> None:
    prompt = tiny.tokens(230, 1)
    requests = [
        Request(
            prompt,
            {"max_tokens": 60, "extra_args": {"kv_budget": 128, "kv_seed": 1}},
            at_step=i,  # the prompt of the one before is in the prefix cache by then
            logits=True,
            lora=folder,
        )
        for i, folder in enumerate(adapted.folders)
    ]
    together = engine.generate(requests)
    assert [result.cached_tokens for result in together] == [0, 0, 0], "foreign KV was hit"
    assert len({tuple(result.tokens) for result in together}) == 3
    kept = []
    for request, result in zip(requests, together, strict=True):
        trace = engine.do(probes.trace, result.id)
        assert len(trace) >= 2
        kept.append([event.kept.sort().values.tolist() for event in trace])
        ids = [*prompt, *result.tokens]
        rows = slice(len(prompt) - 1, len(ids) - 1)
        model = adapted.merged[request.lora]
        expected = model.logits(ids, visibility(len(ids), trace), rows)
        assert result.logits is not None
        torch.testing.assert_close(result.logits, expected, atol=TOLERANCE, rtol=0)
    assert kept[0] != kept[1] != kept[2]
    for request, result, sets in zip(requests, together, kept, strict=True):
        # An adapter's own prefix is hit.
        (alone,) = engine.generate([request])
        assert alone.cached_tokens == 192
        assert alone.tokens == result.tokens
        trace = engine.do(probes.trace, alone.id)
        assert [event.kept.sort().values.tolist() for event in trace] == sets
