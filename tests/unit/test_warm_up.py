"""What has been compiled before the first request is all that requests need."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.jit import JITFunction

from nexus_vllm import allocators
from nexus_vllm.config import Settings
from nexus_vllm.engine.evictor import Evictor
from nexus_vllm.engine.ops import ENVIRONMENT
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.uneven import UnevenEvictor
from nexus_vllm.engine.warm_up import lengths, warm_up
from nexus_vllm.plan import Eviction

from .counting_host import CountingHost
from .test_fake_gpu import BLOCK, layers

KERNELS = {
    *("_block_lse", "_walk", "_pooled", "_token_attention", "_tokens", "_sums", "_ranked"),
    *("_select", "_pairs", "_fill", "_tables"),
}
"""All but those of every step, which vLLM's own warm-up launches."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """What each launch so far would have been compiled for."""
    found: set[Any] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        known = [(name, kind(kernel, name, value)) for name, value in sorted(given.items())]
        found.add((kernel.__name__, *known))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setenv(ENVIRONMENT, "triton")
    with CountingHost():
        yield found


def kind(kernel: Any, name: str, value: Any) -> Any:
    """What Triton tells values of a parameter apart by; tensors are all aligned."""
    param = next((param for param in kernel.params if param.name == name), None)
    if isinstance(value, Tensor):
        return value.dtype
    if param is None or param.is_constexpr:  # or an option, as the number of warps
        return value
    if isinstance(value, int) and not param.do_not_specialize:
        return value == 1, value % 16 == 0
    return type(value)


def test_lengths() -> None:
    assert list(lengths(6, 100)) == [8, 16, 32, 64, 100]
    assert list(lengths(6, 64)) == [8, 16, 32, 64]
    assert list(lengths(6, 7)) == []
    assert list(lengths(20, 40)) == [32, 40]
    assert list(lengths(20, 19)) == []


SETTINGS = {
    "default": Settings(),
    "other": Settings(
        sink_blocks=3, recency_blocks=2, walk_state="carried", decode_selector="reservoir",
        variants={"paper": {"policy": "nexus", "heads": "mean", "walk_over": "all"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [13, 17, 20, 33, 48, 77])
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_compiled_later(compiled: set[Any], name: str, size: int) -> None:
    settings = SETTINGS[name]
    made = layers(settings)
    even, uneven = Evictor(made, settings), UnevenEvictor(made, settings)
    warm_up(even, uneven, 79)
    before = set(compiled)
    assert {name for name, *_ in before} == KERNELS
    names = [name for name, policy in even.policies.items() if not policy.needs_replay]
    for policy in names:
        for allocator in ("uniform", "per-head"):
            sequence = Sequence(0)
            live, released = list(range(1, size + 1)), 0
            for event, target in enumerate((size // 3, size // 3 + 1)):
                full = size + event
                stay = live[target - released :]
                eviction = Eviction(
                    "r", policy, allocator, 5, event, full * BLOCK, released, target, live, stay, []
                )
                if allocator == "uniform":
                    even.evict(sequence, eviction)
                else:
                    dealt = even.policies[policy], allocators.make(allocator)
                    uneven.evict(sequence, eviction, *dealt)
                live, released = [*stay, 79], target
    assert compiled == before
