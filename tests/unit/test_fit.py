"""What the front end takes one engine's pool to be, under data parallelism."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import ParallelConfig
from vllm.exceptions import VLLMValidationError

from nexus_vllm.config import Settings
from nexus_vllm.engine.requests import fit

PAGES = 12
"""Of one engine; one is vLLM's null page, the others hold 352 tokens."""


def config(pool: int, **parallel: Any) -> Any:
    """Of a front end whose engines report `pool` pages in all."""
    fields = {
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        **parallel,
    }
    stub = SimpleNamespace(**fields)
    local: Any = ParallelConfig.local_engines_only
    stub.local_engines_only = local.fget(stub)
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=pool),
        parallel_config=stub,
        num_speculative_tokens=0,
        model_config=SimpleNamespace(max_model_len=2048),
    )


def request(prompt: int, max_tokens: int = 100, resumable: bool = False) -> Any:
    return SimpleNamespace(
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args={"kv_budget": "full"}),
        prompt_token_ids=[1] * prompt,
        prompt_embeds=None,
        mm_features=None,
        resumable=resumable,
    )


@pytest.mark.parametrize(
    ("engines", "parallel"),
    [
        (1, {}),
        # Internal: one front end feeds all engines, those of other nodes included.
        (4, {"data_parallel_size": 4, "data_parallel_size_local": 4}),
        (4, {"data_parallel_size": 4, "data_parallel_size_local": 2}),
        (4, {"data_parallel_size": 4, "data_parallel_size_local": 0}),
        # External: a front end for every engine. Hybrid: one for every node.
        (1, {"data_parallel_size": 4, "data_parallel_external_lb": True}),
        (
            2,
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_hybrid_lb": True,
            },
        ),
    ],
)
def test_a_request_must_fit_one_engine(engines: int, parallel: dict[str, Any]) -> None:
    front_end = config(engines * PAGES, **parallel)
    fits = request(351)
    fit(fits, Settings(), front_end)
    assert fits.sampling_params.max_tokens == 1
    with pytest.raises(VLLMValidationError, match=r"a prompt of 352 tokens .* holds 352 tokens"):
        fit(request(352), Settings(), front_end)
    with pytest.raises(VLLMValidationError, match="max_model_len=2048, the pool holds 352 tokens"):
        fit(request(10, resumable=True), Settings(), front_end)


def test_a_front_end_that_does_not_know_the_pool_refuses_nothing() -> None:
    big = request(10_000)
    fit(big, Settings(), config(0, data_parallel_size_local=0))
    assert big.sampling_params.max_tokens == 100
