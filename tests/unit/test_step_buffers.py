"""A batch shown in buffers is the batch shown anew, and lies where it lay before.

The kernels are replaced by their references, which they equal (tests/kernels). That model runner V2
can capture and replay what is built like this: engine/test_graphs.py.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from nexus_vllm.engine.attention import EvictionBuilderMixin, EvictionImplMixin
from nexus_vllm.engine.ops import ENVIRONMENT
from nexus_vllm.engine.sequences import Sequence, Sequences
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.kernels import shift, window

from .fake_gpu import GPU, fake_gpu

BLOCK, WIDTH, REQUESTS, WINDOW = 32, 12, 6, 4
CPU = torch.device("cpu")


class Metadata(SimpleNamespace):
    common: CommonAttentionMetadata


class Builder:
    """Builds what it is shown."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS))
    kv_cache_spec = SimpleNamespace(block_size=BLOCK)

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        return AttentionCGSupport.ALWAYS

    def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool) -> Metadata:
        assert prefix == 0
        return Metadata(common=common)


class EvictionBuilder(EvictionBuilderMixin, Builder):
    pass


class Impl:
    def forward(self, *args: Any) -> Any:
        return args[-1]


class EvictionImpl(EvictionImplMixin, Impl):
    pass


class Runner:
    def batch_request_ids(self, batch: CommonAttentionMetadata) -> list[str | None]:
        return [str(i) if i >= 0 else None for i in batch.req_idx]


@pytest.fixture
def references() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shift, "shift", shift.reference)
        patch.setattr(window, "window", window.reference)
        yield


class Known:
    """A tensor of the host, which has contents even where those of the GPU have none."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def numpy(self) -> np.ndarray:
        return self.array


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """Per row: released blocks, tokens behind them, new tokens among these, whether evictable."""
    row = st.tuples(st.integers(0, 5), st.integers(1, 6 * BLOCK), st.integers(1, 9), st.booleans())
    rows = draw(st.lists(row, min_size=1, max_size=REQUESTS))
    return [(gone if known else 0, live, min(new, live), known) for gone, live, new, known in rows]


class Side:
    """A builder and one layer, by kernels or not."""

    def __init__(self, device: torch.device) -> None:
        self.sequences = Sequences(Runner(), REQUESTS, WINDOW, BLOCK, device)  # type: ignore[arg-type]
        self.builder, self.impl = EvictionBuilder(), EvictionImpl()
        self.builder.sequences = self.sequences
        self.window = LayerWindow(REQUESTS, WINDOW, 2, 4, torch.float32, device)
        self.impl.window = self.window

    def know(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Slots are not those of the rows, and not all slots are in use."""
        self.sequences.by_id = {
            str(i): Sequence(REQUESTS - 1 - i, released=gone)
            for i, (gone, _, _, known) in enumerate(rows)
            if known
        }

    def step(self, batch: CommonAttentionMetadata, query: torch.Tensor) -> CommonAttentionMetadata:
        metadata = self.builder.build(0, batch)
        nothing = torch.empty(0, device=query.device)
        self.impl.forward(None, query, nothing, nothing, nothing, metadata, nothing)
        return metadata.common


def batch_of(
    rows: list[tuple[int, int, int, bool]], padding: int, device: torch.device, seed: int = 0
) -> CommonAttentionMetadata:
    size = min(len(rows) + padding, REQUESTS)
    lengths, starts = np.zeros(size, dtype=np.int32), np.zeros(size + 1, dtype=np.int32)
    for i, (gone, live, new, _) in enumerate(rows):
        lengths[i], starts[i + 1 :] = gone * BLOCK + live, starts[i] + new
    table = np.random.default_rng(seed).integers(1, 99, (size, WIDTH), dtype=np.int32)
    table[len(rows) :] = 0
    on_device = [torch.from_numpy(array).to(device) for array in (starts, lengths, table)]
    return CommonAttentionMetadata(
        query_start_loc=on_device[0],
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=on_device[1],
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        num_reqs=size,
        num_actual_tokens=int(starts[-1]),
        max_query_len=9,
        max_seq_len=int(lengths.max()),
        block_table_tensor=on_device[2],
        slot_mapping=torch.empty(0, device=device),
        req_idx=np.arange(len(rows)),
    )


@pytest.mark.usefixtures("references")
@given(steps=st.lists(st.tuples(batches(), st.integers(0, 3)), min_size=1, max_size=4))
def test_buffers_show_what_new_tensors_show(
    steps: list[tuple[list[tuple[int, int, int, bool]], int]],
) -> None:
    anew, buffered, places = Side(CPU), Side(CPU), set()
    for seed, (rows, padding) in enumerate(steps):
        batch = batch_of(rows, padding, CPU, seed)
        query = torch.randn(int(batch.query_start_loc[-1]) + 2, 2, 4)
        shown = []
        for side, choice in ((anew, "torch"), (buffered, "triton")):
            side.know(rows)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(ENVIRONMENT, choice)
                shown.append(side.step(batch, query))
        expected, found = shown
        assert found.max_seq_len == expected.max_seq_len
        for name in ("seq_lens", "seq_lens_cpu_upper_bound", "query_start_loc"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        for i, (_, live, _, _) in enumerate(rows):
            used = slice(-(-live // BLOCK))
            one, other = found.block_table_tensor[i], expected.block_table_tensor[i]
            assert torch.equal(one[used], other[used])
        assert not found.block_table_tensor[len(rows) :].any()
        assert not found.seq_lens[len(rows) :].any()
        assert torch.equal(buffered.window.ring, anew.window.ring)
        places.add((found.block_table_tensor.data_ptr(), found.seq_lens.data_ptr()))
    assert len(places) == 1


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("known", [False, True])
def test_a_graph_is_captured_where_steps_will_be_shown(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Whether or not the worker has connected the builder, with the bound of the longest sequence,
    and with no place in a ring."""
    monkeypatch.setenv(ENVIRONMENT, "triton")
    side = Side(CPU)
    if not known:
        side.builder.sequences = None
    dummy = batch_of([(0, 1, 1, False)] * 3, 0, CPU).replace(max_seq_len=4096)
    metadata: Any = side.builder.build(0, dummy)
    assert metadata.common.max_seq_len == 4096
    recorded = metadata.kv_eviction_recording
    assert recorded.slots.tolist() == [-1, -1, -1]
    side.builder.sequences = side.sequences
    rows = [(2, 40, 1, True), (0, 7, 1, True)]
    side.know(rows)
    later: Any = side.builder.build(0, batch_of(rows, 1, CPU))
    assert later.common.seq_lens.data_ptr() == metadata.common.seq_lens.data_ptr()
    table, before = later.common.block_table_tensor, metadata.common.block_table_tensor
    assert table.data_ptr() == before.data_ptr()
    assert recorded.slots.tolist() == [5, 4, -1]
    assert metadata.common.seq_lens.tolist() == [40, 7, 0]


@pytest.mark.usefixtures("references")
def test_a_batch_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "triton")
    side = Side(CPU)
    batch = batch_of([(0, 1, 1, False)], 0, CPU)
    side.builder.build(0, batch)
    wider = batch.replace(block_table_tensor=torch.zeros(1, WIDTH + 1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"1 rows of 13 blocks does not fit buffers \(6, 12\)"):
        side.builder.build(0, wider)


@pytest.mark.parametrize(
    ("choice", "support"),
    [("triton", AttentionCGSupport.ALWAYS), ("torch", AttentionCGSupport.NEVER)],
)
def test_graphs_are_supported_where_buffers_are_used(
    monkeypatch: pytest.MonkeyPatch, choice: str, support: AttentionCGSupport
) -> None:
    monkeypatch.setenv(ENVIRONMENT, choice)
    assert EvictionBuilder.get_cudagraph_support(None, None) == support


def test_a_table_is_never_swapped() -> None:
    assert not EvictionBuilder.supports_update_block_table
    with pytest.raises(RuntimeError, match="shifted"):
        EvictionBuilder().update_block_table(None, None, None)


@pytest.mark.parametrize("released", [0, 3])
def test_a_step_waits_for_no_device(monkeypatch: pytest.MonkeyPatch, released: int) -> None:
    """On a GPU that is not there; launches do nothing."""
    monkeypatch.setenv(ENVIRONMENT, "triton")
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
    rows = [(released, 40, 1, True), (0, 7, 1, False)]
    host = batch_of(rows, 1, CPU)
    starts, lengths = host.query_start_loc.numpy(), host.seq_lens.numpy()
    with fake_gpu():
        side = Side(GPU)
        side.know(rows)
        batch = host.replace(
            query_start_loc_cpu=Known(starts),
            seq_lens_cpu_upper_bound=Known(lengths),
            query_start_loc=torch.empty(4, dtype=torch.int32, device=GPU),
            seq_lens=torch.empty(3, dtype=torch.int32, device=GPU),
            block_table_tensor=torch.empty(3, WIDTH, dtype=torch.int32, device=GPU),
        )
        shown = side.step(batch, torch.empty(5, 2, 4, device=GPU))
        assert shown.seq_lens.device == shown.block_table_tensor.device == GPU
    assert launched == ["_shift", "_window"]
    assert shown.max_seq_len == (40 if released else host.max_seq_len)
