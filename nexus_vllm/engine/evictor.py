"""The worker's half of an eviction: score, select, fill.

pages of the live window -> keys --policy--> weights --selector--> kept blocks --copies--> pages
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.engine.layout import KeyLayout, probe
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Observation, Policy
from nexus_vllm.selectors import select

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

OnError = Callable[[Exception], None]
"""Takes what a policy or an allocator has raised."""

PROFILER_RANGE = "kv_eviction"
"""What torch's profiler calls the worker's part of one eviction."""

MAX_KEYS = 1 << 20
"""Key numbers gathered at once (4 MiB in float32), unless one layer needs more: see MAX_LOGITS."""


@dataclass
class Layer:
    """One attention layer: vLLM's module, its cache, how keys lie in it, its query window."""

    index: int
    cache: Tensor
    keys: KeyLayout
    scale: float
    head_size: int
    window: LayerWindow

    @classmethod
    def of(cls, index: int, module: "Attention", window: LayerWindow) -> "Layer":
        """Probe an initialised attention layer. Raises RuntimeError for a cache of unknown form."""
        cache: Tensor = module.kv_cache
        heads, size = module.num_kv_heads, module.head_size
        if cache.ndim != 4 or cache.shape[1] != heads or cache.shape[3] != 2 * size:
            raise RuntimeError(
                f"layer {index}: KV cache {tuple(cache.shape)} is not "
                f"[pages, {heads}, block, {2 * size}]"
            )
        return cls(index, cache, probe(module, cache), module.impl.scale, size, window)

    def alike(self, other: "Layer") -> bool:
        """Whether both layers' queries and keys can be stacked."""
        return (
            self.scale == other.scale
            and self.cache.shape == other.cache.shape
            and self.window.ring.shape == other.window.ring.shape
        )


def check_agreement(sequence: Sequence, eviction: Eviction) -> None:
    """Raise RuntimeError when worker and scheduler disagree on what the sequence has released."""
    if sequence.released != eviction.released:
        raise RuntimeError(
            f"{eviction.request_id}: the scheduler counts {eviction.released} released blocks, "
            f"the worker {sequence.released}"
        )


def forced_blocks(blocks: Tensor, full: int, settings: Settings) -> Tensor:
    """Which blocks, by original id, must stay of `full`: sink blocks and the newest."""
    return (blocks < settings.sink_blocks) | (blocks >= full - settings.recency_blocks)


def newest(blocks: Tensor, forced: Tensor, keep: int) -> Tensor:
    """The `keep` blocks of each row that stay where nothing else is known: forced ones, then the
    newest. bool like `blocks`, in which a negative id is no block."""
    order = blocks + forced * (blocks.max() + 1)
    return torch.zeros_like(forced).scatter(-1, order.topk(keep).indices, True)


def window_queries(
    layers: list[Layer], sequence: Sequence, eviction: Eviction, window: int
) -> tuple[Tensor, Tensor]:
    """The newest queries [L, W, Hq, D] before the eviction, and their positions [W]."""
    count = min(window, eviction.computed)
    positions = torch.arange(eviction.computed - count, eviction.computed)
    queries = [layer.window.queries(sequence.slot, positions) for layer in layers]
    return torch.stack(queries), positions


class Evictor:
    """Carries out evictions over all layers of this rank."""

    def __init__(self, layers: list[Layer], settings: Settings) -> None:
        self.layers = layers
        self.settings = settings
        self.policies: dict[str, Policy] = {
            name: policies.make(name, settings) for name in policies.names()
        }

    def evict(
        self, sequence: Sequence, eviction: Eviction, on_error: OnError | None = None
    ) -> tuple[int, Tensor]:
        """Shrink one sequence to the pages the scheduler left it.

        on_error: told what choosing blocks has raised; then sinks and the newest ones stay.
            Without, it is raised, and nothing has changed.
        Returns the number of copied (layer, block) slices and the original ids [L, kept] of the
        blocks that stay. Raises RuntimeError when worker and scheduler disagree on the sequence.
        """
        check_agreement(sequence, eviction)
        blocks = sequence.live_blocks(len(self.layers), eviction.full)
        try:
            kept = self._choose(sequence, eviction, blocks)
        except Exception as error:
            if on_error is None:
                raise
            on_error(error)
            forced = forced_blocks(blocks, eviction.full, self.settings)
            kept = newest(blocks, forced, len(eviction.kept_pages))
        moved, origin = self._fill(eviction, blocks, kept)
        sequence.released, sequence.origin = eviction.target, origin
        return moved, origin

    def _choose(self, sequence: Sequence, eviction: Eviction, blocks: Tensor) -> Tensor:
        """Which live blocks stay: bool [layers, live]."""
        policy, settings = self.policies[eviction.policy], self.settings
        forced = forced_blocks(blocks, eviction.full, settings)
        layers = torch.tensor([layer.index for layer in self.layers])
        weights = torch.empty(blocks.shape, dtype=torch.float32)
        for rows in self._groups(policy, blocks.shape[1]):
            queries, positions, keys = None, None, None
            if policy.needs_window:
                queries, positions, keys = self._read(sequence, eviction, self.layers[rows])
            weights[rows] = policy.weights(
                Observation(
                    queries=queries,
                    query_positions=positions,
                    keys=keys,
                    block_ids=blocks[rows],
                    scale=self.layers[rows.start].scale,
                    candidates=~forced[rows],
                    seed=eviction.seed,
                    event=eviction.event,
                    layers=layers[rows],
                )
            )
        return select(
            policy.selector or settings.selector,
            weights,
            len(eviction.kept_pages),
            forced,
            seed=eviction.seed,
            event=eviction.event,
            layers=layers,
            block_ids=blocks,
            n=settings.n,
            temperature=settings.temperature,
            # A model that overflows spoils its own text; an error here would end the engine.
            validate=False,
        )

    def _groups(self, policy: Policy, live: int) -> list[slice]:
        """Runs of layers to score at once: alike, and with few enough keys to hold."""
        if not policy.needs_window:
            return [slice(0, len(self.layers))]
        groups: list[slice] = []
        for row, layer in enumerate(self.layers):
            most = max(1, MAX_KEYS // (live * layer.cache[0].numel() // 2))
            if groups and row - groups[-1].start < most and layer.alike(self.layers[row - 1]):
                groups[-1] = slice(groups[-1].start, row + 1)
            else:
                groups.append(slice(row, row + 1))
        return groups

    def _read(
        self, sequence: Sequence, eviction: Eviction, layers: list[Layer]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Window queries [L, W, Hq, D], their positions [W], keys [L, N, Hkv, b, D]."""
        queries, positions = window_queries(layers, sequence, eviction, self.settings.window)
        pages = torch.tensor(eviction.pages)
        keys = layers[0].keys.read_all([layer.cache for layer in layers], pages)
        return queries, positions, keys

    def _fill(self, eviction: Eviction, blocks: Tensor, kept: Tensor) -> tuple[int, Tensor]:
        """Copy kept blocks out of pages that go into pages that stay; returns (copies, origins).

        A page that stays and whose own block is kept is not touched. Sources and destinations are
        disjoint, so copies need no scratch and no order.
        """
        slot_of_page = {page: slot for slot, page in enumerate(eviction.kept_pages)}
        slots = torch.tensor([slot_of_page.get(page, -1) for page in eviction.pages])
        pages, kept_pages = torch.tensor(eviction.pages), torch.tensor(eviction.kept_pages)
        stays, leaves = kept & (slots >= 0), kept & (slots < 0)
        origin = torch.full((len(self.layers), len(kept_pages)), -1)
        place = slots.clamp(min=0).expand_as(kept)[stays]
        origin[stays.nonzero()[:, 0], place] = blocks[stays]
        # Every layer keeps as many blocks as there are slots: for each that leaves, one is open.
        source, target = leaves.nonzero(), (origin < 0).nonzero()
        origin[origin < 0] = blocks[leaves]
        copies = leaves.sum(1).tolist()
        for layer, old, new in zip(
            self.layers,
            pages[source[:, 1]].split(copies),
            kept_pages[target[:, 1]].split(copies),
            strict=True,
        ):
            layer.cache.index_copy_(0, new, layer.cache.index_select(0, old))
        return len(source), origin
