"""Two ranks, tensor or pipeline parallel: the same pages, each rank's own heads and layers.

The model is random and tiny: 4 layers of 8 heads, 4 KV heads, so that both can be halved. Ranks are
processes of vLLM's own, one thread each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.policies import Observation
from nexus_vllm.policies.random_blocks import RandomBlocks
from nexus_vllm.selectors import select

from . import probes, tiny
from .conftest import NEXUS
from .harness import Engine, EngineError, Mode, Request, Result
from .reference import Eviction, Llama, attend, causal
from .test_uneven import visibility

pytestmark = pytest.mark.engine
LAYERS, HEADS, KV_HEADS, BLOCK = 4, 8, 4, 32
GROUP = HEADS // KV_HEADS
PROMPT, DECODED, BUDGET = 230, 76, 128
TOLERANCE = 5e-4
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 64,
}
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default wants a NUMA node for each rank
    "OMP_NUM_THREADS": "1",
    # Tensor parallel embeddings are compiled: seconds of a C++ compiler, and Triton's interpreter
    # cannot.
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Setup:
    mode: Mode
    tensor: int
    pipeline: int

    def __str__(self) -> str:
        return f"{self.mode}-tp{self.tensor}-pp{self.pipeline}"

    @property
    def unheard(self) -> int:
        """The rank whose outputs vLLM does not collect."""
        return 1 if self.tensor > 1 else 0

    @property
    def unheard_name(self) -> str:
        return "Worker_TP1" if self.tensor > 1 else "Worker_PP0"

    @property
    def options(self) -> dict[str, Any]:
        sizes = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        return {**OPTIONS, **sizes}

    def whole(self, kept: Sequence[Tensor]) -> Tensor:
        """What all ranks keep, [layers, KV heads, most], from [layers, B] or that of each rank."""
        heads = KV_HEADS // self.tensor
        each = [k if k.dim() == 3 else k[:, None].expand(-1, heads, -1) for k in kept]
        most = max(k.shape[-1] for k in each)
        padded = [pad(k, (0, most - k.shape[-1]), value=-1) for k in each]
        return torch.cat(padded, dim=1 if self.tensor > 1 else 0)


SINGLE = Setup(Mode("v1", "sync"), 1, 1)
SETUPS = [
    Setup(mode, *sizes)
    for mode in (Mode("v1", "sync"), Mode("v2", "async"))
    for sizes in ((2, 1), (1, 2))
]


class Processes:
    """One process a runner, with the engine of one setup at a time."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._running: dict[Mode, Engine] = {}

    def serve(self, setup: Setup, **changes: Any) -> Engine:
        nexus, options = {**NEXUS, **changes.pop("nexus", {})}, {**setup.options, **changes}
        if setup.mode in self._running:
            self._running[setup.mode].restart(self.model, nexus, **options)
        else:
            self._running[setup.mode] = Engine(
                setup.mode, self.model, nexus, ENVIRONMENT, **options
            )
        engine = self._running[setup.mode]
        if setup.pipeline > 1 and setup.mode.runner == "v1":
            # V1 makes room for what stages send each other in a first dummy batch, which vLLM's
            # CPU worker leaves out where nothing is compiled and the cache's size is given.
            engine.rpc("execute_dummy_batch")
        return engine

    def close(self) -> None:
        for engine in self._running.values():
            engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel") / "model"
    return tiny.save(folder, heads=HEADS, kv_heads=KV_HEADS, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def llama(model: Path) -> Llama:
    return Llama.load(model)


@pytest.fixture(scope="module")
def processes(model: Path) -> Iterator[Processes]:
    running = Processes(model)
    yield running
    running.close()


def ask(seed: int, budget: int | str, allocator: str, **directive: Any) -> Request:
    extra = {"kv_budget": budget, "kv_allocator": allocator, "kv_seed": 1, **directive}
    params = {"max_tokens": DECODED, "extra_args": extra}
    return Request(tiny.tokens(PROMPT, seed), params, logits=True)


REQUESTS = [
    ask(0, "full", "uniform"),
    ask(1, BUDGET, "uniform"),
    ask(2, BUDGET, "ada"),
    ask(3, BUDGET, "global", kv_prefill="streaming"),
]


@dataclass
class Run:
    """What REQUESTS got in one batch."""

    results: list[Result]
    traces: list[list[list[Eviction]]]  # by request, then by rank
    free: bool


def run(engine: Engine) -> Run:
    results = engine.generate(REQUESTS)
    state = engine.state()
    traces = [engine.do(probes.traces, result.id) for result in results]
    return Run(results, traces, state.free_blocks == state.pool_blocks)


@pytest.fixture(scope="module")
def single(model: Path) -> Run:
    with Engine(SINGLE.mode, model, NEXUS, ENVIRONMENT, **SINGLE.options) as engine:
        return run(engine)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(setup, marks=pytest.mark.v2) if setup.mode.runner == "v2" else setup
        for setup in SETUPS
    ],
    ids=str,
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture(scope="module")
def engine(setup: Setup, processes: Processes) -> Engine:
    return processes.serve(setup)


@pytest.fixture(scope="module")
def parallel(engine: Engine) -> Run:
    return run(engine)


def logits_of(result: Result) -> Tensor:
    assert result.logits is not None
    return result.logits


def check_against_reference(
    setup: Setup, llama: Llama, request: Request, result: Result, traces: list[list[Eviction]]
) -> None:
    """Logits are those of attention over what each rank says that its heads have kept."""
    trace = [
        Eviction(
            events[0].num_computed, events[0].full_blocks, setup.whole([e.kept for e in events])
        )
        for events in zip(*traces, strict=True)
    ]
    ids = [*request.prompt, *result.tokens]
    rows = slice(len(request.prompt) - 1, len(ids) - 1)
    expected = llama.logits(ids, visibility(len(ids), trace, GROUP), rows)
    torch.testing.assert_close(logits_of(result), expected, atol=TOLERANCE, rtol=0)
    full = llama.logits(ids, rows=rows)
    assert (full - expected)[1:].abs().amax(-1).median() > 100 * TOLERANCE


def test_a_full_budget_gives_what_one_process_gives(single: Run, parallel: Run) -> None:
    expected = logits_of(single.results[0])
    # No near tie that sums in another order could turn.
    assert expected.topk(2).values.diff().abs().min() > 2 * TOLERANCE
    torch.testing.assert_close(logits_of(parallel.results[0]), expected, atol=TOLERANCE, rtol=0)
    assert parallel.results[0].tokens == single.results[0].tokens
    assert parallel.traces[0] == [[], []]


def test_ranks_evict_at_the_same_places_and_hold_the_same_pages(single: Run, parallel: Run) -> None:
    assert parallel.free
    for number, (alone, result) in enumerate(zip(single.results, parallel.results, strict=True)):
        told, told_alone = (r.kv_transfer_params["kv_eviction"] for r in (result, alone))  # type: ignore[index]
        for key in ("eviction_steps", "evicted_blocks", "peak_blocks", "final_blocks"):
            assert told[key] == told_alone[key]
        first, second = parallel.traces[number]
        (expected,) = single.traces[number]
        assert len(expected) == told["eviction_steps"]
        for event, one, other in zip(expected, first, second, strict=True):
            for seen in (one, other):
                place = (seen.num_computed, seen.full_blocks)
                assert place == (event.num_computed, event.full_blocks)
                units = seen.kept >= 0
                assert int(units.sum()) == BUDGET // BLOCK * units[..., 0].numel()
            assert one.kept.shape[:-1] == other.kept.shape[:-1]


def test_logits_equal_masked_attention_of_each_ranks_heads(
    setup: Setup, llama: Llama, parallel: Run
) -> None:
    for number, request in list(enumerate(REQUESTS))[1:]:
        assert len(parallel.traces[number][0]) >= 3
        result, traces = parallel.results[number], parallel.traces[number]
        check_against_reference(setup, llama, request, result, traces)


def test_stages_keep_what_one_process_keeps_and_tensor_ranks_their_own(
    setup: Setup, single: Run, parallel: Run
) -> None:
    """Where no layer lends another room: under `global` a stage deals out its own layers'."""
    for number in (1, 2):
        (expected,) = single.traces[number]
        for event, *ranks in zip(expected, *parallel.traces[number], strict=True):
            kept = setup.whole([rank.kept for rank in ranks]).sort(-1).values
            same = torch.equal(kept, SINGLE.whole([event.kept]).sort(-1).values)
            assert same == (setup.tensor == 1)


def choose(queries: Tensor, keys: Tensor, layers: Sequence[int]) -> Tensor:
    """What `nexus` keeps of a prompt: queries [L, W, heads, D], keys [L, T, KV heads, D]."""
    settings, full = Settings(), keys.shape[1] // BLOCK
    positions = torch.arange(PROMPT - queries.shape[1], PROMPT)
    ids = torch.arange(full).expand(len(layers), -1)
    forced = (ids < settings.sink_blocks) | (ids >= full - settings.recency_blocks)
    blocks = keys[:, : full * BLOCK].unflatten(1, (full, BLOCK)).transpose(2, 3)
    of, event, seed = torch.tensor(layers), 0, 1
    scale = queries.shape[-1] ** -0.5
    policy = policies.make("nexus", settings)
    seen = Observation(queries, positions, blocks, ids, scale, ~forced, seed, event, of)
    kept = select(
        settings.selector,
        policy.weights(seen),
        BUDGET // BLOCK,
        forced,
        seed=seed,
        event=event,
        layers=of,
        block_ids=ids,
        n=settings.n,
        temperature=settings.temperature,
    )
    return kept.nonzero()[:, 1].view(len(layers), -1)


def test_each_rank_chooses_from_the_heads_it_has(setup: Setup, llama: Llama, parallel: Run) -> None:
    """The first eviction, chosen again from queries and keys of the reference's heads."""
    window, prompt = Settings().window, REQUESTS[1].prompt
    hidden, mask = llama.embed(prompt), causal(PROMPT)
    queries, keys = [], []
    for layer in range(LAYERS):
        q, k, v = llama.project(layer, hidden, torch.arange(PROMPT))
        hidden = llama.finish(layer, hidden, attend(q, k, v, mask))
        queries.append(q[-window:])
        keys.append(k)
    for rank, events in enumerate(parallel.traces[1]):
        tensor, stage = rank % setup.tensor, rank // setup.tensor
        many = LAYERS // setup.pipeline
        layers = range(stage * many, (stage + 1) * many)
        q, k = (
            torch.stack([of[i] for i in layers]).chunk(setup.tensor, 2)[tensor]
            for of in (queries, keys)
        )
        assert torch.equal(events[0].kept.sort(-1).values, choose(q, k, layers))


class Broken(RandomBlocks):
    """A policy that raises."""

    selector = None

    def weights(self, obs: Any) -> Any:
        raise ZeroDivisionError("no blocks to score")


def break_policy(worker: Any, rank: int) -> None:
    if worker.rank == rank:
        worker.evictor.policies["streaming-llm"] = Broken()


def test_a_policy_that_raises_on_one_rank_ends_its_request_only(
    setup: Setup, engine: Engine, parallel: Run
) -> None:
    engine.rpc(break_policy, setup.unheard)
    victim = ask(4, BUDGET, "uniform", kv_policy="streaming-llm")
    broken, other = engine.generate([victim, REQUESTS[1]])
    assert (broken.finish_reason, len(broken.tokens)) == ("error", 1)
    assert "(ZeroDivisionError: no blocks to score)" in str(broken.completions[0].stop_reason)
    assert other.tokens == parallel.results[1].tokens
    state = engine.state()
    assert state.free_blocks == state.pool_blocks


def forget(worker: Any, rank: int) -> None:
    """One rank's idea of what was released is wrong."""
    if worker.rank == rank:
        for sequence in worker.sequences.by_id.values():
            sequence.released += 1


def test_a_rank_that_fails_ends_the_engine_at_once(setup: Setup, engine: Engine) -> None:
    """The last test of each engine, which does not survive it."""
    engine.add(ask(5, BUDGET, "uniform"))
    engine.step(5)
    engine.rpc(forget, setup.unheard)
    with pytest.raises(EngineError, match=r"(Worker|Executor) failed"):
        engine.run(timeout=120)
    said = engine.log(lines=100_000)
    for what in (
        "This rank cannot go on, so the engine must end.",
        "the scheduler counts 3 released blocks, the worker 4",
    ):
        assert re.search(rf"\({setup.unheard_name} .*{what}", said)


def test_pressure_over_two_stages(processes: Processes, llama: Llama) -> None:
    setup = SETUPS[1]
    nexus = {"trigger": "pressure"}
    tight = processes.serve(setup, nexus=nexus, num_gpu_blocks_override=21)
    requests = [ask(seed, BUDGET, "uniform") for seed in (6, 7, 8)]
    for request, result in zip(requests, tight.generate(requests), strict=True):
        traces = tight.do(probes.traces, result.id)
        assert traces[0]
        check_against_reference(setup, llama, request, result, traces)
    state = tight.state()
    assert state.free_blocks == state.pool_blocks
