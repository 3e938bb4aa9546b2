"""The worker's half of an eviction: score, select, fill.

pages of the live window -> keys --policy--> weights --selector--> kept blocks --copies--> pages
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsInt

import torch
from torch import Tensor
from torch.nn import functional

from nexus_vllm import policies
from nexus_vllm.config import Settings
from nexus_vllm.engine import ops
from nexus_vllm.engine.layout import UnitLayout, probe
from nexus_vllm.engine.sequences import Sequence
from nexus_vllm.engine.window import LayerWindow, together
from nexus_vllm.plan import Eviction
from nexus_vllm.policies import Observation, Policy, Rope, score, state_size

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

    from nexus_vllm.engine.kernel_reader import Memory

OnError = Callable[[Exception], None]
"""Takes what a policy or an allocator has raised."""

PROFILER_RANGE = "kv_eviction"
"""What torch's profiler calls the worker's part of one eviction."""

MAX_KEYS = 1 << 20
"""Key numbers gathered at once (4 MiB in float32), unless one layer needs more: see MAX_LOGITS."""
MAX_MAPS = 1 << 24
"""Numbers of attention maps that kernels write at once (64 MiB), unless one layer needs more."""
EVICTION_BYTES = 4 * 4 * MAX_MAPS
"""Memory of a GPU that is left free for evictions: maps, and what is made of them. Keys and values
of one layer, which some policies gather, come on top."""


@dataclass
class Layer:
    """One attention layer: its cache, how keys and values lie in it, its query window, its rotary
    embedding where it is known."""

    index: int
    cache: Tensor
    keys: UnitLayout
    scale: float
    head_size: int
    window: LayerWindow
    values: UnitLayout | None = None
    rope: Rope | None = None

    @classmethod
    def of(
        cls, index: int, module: "Attention", window: LayerWindow, rope: Rope | None = None
    ) -> "Layer":
        """Probe an initialised attention layer. Raises RuntimeError for a cache of unknown form."""
        cache: Tensor = module.kv_cache
        heads, size = module.num_kv_heads, module.head_size
        if cache.ndim != 4 or cache.shape[1] != heads or cache.shape[3] != 2 * size:
            raise RuntimeError(
                f"layer {index}: KV cache {tuple(cache.shape)} is not "
                f"[pages, {heads}, block, {2 * size}]"
            )
        keys, values = probe(module, cache), probe(module, cache, values=True)
        return cls(index, cache, keys, module.impl.scale, size, window, values, rope)

    def alike(self, other: "Layer") -> bool:
        """Whether both layers' queries and keys can be stacked."""
        return (
            self.scale == other.scale
            and self.rope is other.rope
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


def selection(policy: Policy, settings: Settings, eviction: Eviction) -> dict[str, Any]:
    """Which selector cuts, and its parameters."""
    chosen = settings.selection(eviction.decoding)
    return chosen if policy.selector is None else {**chosen, "kind": policy.selector}


def circumstances(sequence: Sequence, eviction: Eviction, settings: Settings) -> dict[str, Any]:
    """What an Observation says of the eviction, whichever rows it shows."""
    return {
        "seed": eviction.seed,
        "event": eviction.event,
        "new_queries": eviction.computed - sequence.seen,
        "keep": len(eviction.kept_pages),
        "prompt_blocks": eviction.prompt_tokens // settings.block_size,
    }


def newest(blocks: Tensor, forced: Tensor, keep: int) -> Tensor:
    """The `keep` blocks of each row that stay where nothing else is known: forced ones, then the
    newest. bool like `blocks`, in which a negative id is no block."""
    order = blocks + forced * (blocks.max() + 1)
    return torch.zeros_like(forced).scatter(-1, order.topk(keep).indices, True)


def window_queries(
    layers: list[Layer], sequence: Sequence, eviction: Eviction, window: int
) -> tuple[Tensor, Tensor]:
    """The newest queries [L, W, Hq, D] before the eviction, and their positions [W]."""
    count, device = min(window, eviction.computed), layers[0].cache.device
    positions = torch.arange(eviction.computed - count, eviction.computed, device=device)
    rings = together([layer.window.ring for layer in layers])
    if rings is not None:
        return rings[:, layers[0].window.rows_of(sequence.slot, positions)], positions
    queries = [layer.window.queries(sequence.slot, positions) for layer in layers]
    return torch.stack(queries), positions


def replayed(sequence: Sequence, blocks: Tensor) -> Tensor | None:
    """What the sequence's replay has found of blocks, by original id [L, H, N]: NaN where none has
    looked. With H = 1, of all KV heads [L, Hkv, N]."""
    if sequence.replay is None:
        return None
    last = sequence.replay.shape[-1] - 1
    at = blocks.expand(-1, sequence.replay.shape[1], -1)
    return sequence.replay.gather(-1, at.clamp(0, last)).masked_fill(at > last, torch.nan)


def read_in_place(memory: "Memory | None", policy: Policy) -> bool:
    """Whether kernels read keys and values for this policy, rather than it those gathered."""
    return memory is not None and not policy.gathers


def grown_state(state: Tensor | None, live: int, size: int) -> Tensor | None:
    """State [..., live, size] from that of the blocks at the last eviction: NaN for newer ones."""
    if size == 0 or state is None:
        return None
    return functional.pad(state, (0, 0, 0, live - state.shape[-2]), value=torch.nan)


class Evictor:
    """Carries out evictions over all layers of this rank."""

    def __init__(self, layers: list[Layer], settings: Settings) -> None:
        self.layers = layers
        self.settings = settings
        self.memory = ops.memory_of(layers)
        self.device = layers[0].cache.device
        self.policies: dict[str, Policy] = {
            name: policies.served(name, settings) for name in settings.choices
        }

    def evict(
        self, sequence: Sequence, eviction: Eviction, on_error: OnError | None = None
    ) -> tuple[SupportsInt, Tensor]:
        """Shrink one sequence to the pages the scheduler left it.

        on_error: told what choosing blocks has raised; then sinks and the newest ones stay.
            Without, it is raised, and nothing has changed.
        Returns the number of copied (layer, block) slices and the original ids [L, kept] of the
        blocks that stay. Raises RuntimeError when worker and scheduler disagree on the sequence.
        """
        check_agreement(sequence, eviction)
        blocks = sequence.live_blocks(len(self.layers), eviction.full, self.device)
        state = None
        try:
            kept, state = self._choose(sequence, eviction, blocks)
        except Exception as error:
            if on_error is None:
                raise
            on_error(error)
            forced = forced_blocks(blocks, eviction.full, self.settings.of(eviction.policy))
            kept = newest(blocks, forced, len(eviction.kept_pages))
        moved, taken = self._fill(eviction, kept)
        sequence.released, sequence.origin = eviction.target, blocks.gather(1, taken)
        sequence.seen = eviction.computed
        if state is not None:
            state = state.gather(1, taken[..., None].expand(-1, -1, state.shape[-1]))
        sequence.state = state
        return moved, sequence.origin

    def _choose(
        self, sequence: Sequence, eviction: Eviction, blocks: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Which live blocks stay, bool [layers, live], and their state [layers, live, S]."""
        policy, settings = self.policies[eviction.policy], self.settings.of(eviction.policy)
        forced = forced_blocks(blocks, eviction.full, settings)
        layers = ops.sent([layer.index for layer in self.layers], self.device)
        weights = torch.empty(blocks.shape, dtype=torch.float32, device=self.device)
        size = state_size(policy, settings.smoothing)
        known = grown_state(sequence.state, blocks.shape[1], size)
        state = torch.empty(*blocks.shape, size, device=self.device) if size else None
        found = replayed(sequence, blocks[:, None])
        for rows in self._groups(policy, blocks.shape[1], settings.window):
            queries, positions = None, None
            if policy.needs_window:
                queries, positions = window_queries(
                    self.layers[rows], sequence, eviction, settings.window
                )
            weights[rows], new = score(
                policy,
                Observation(
                    queries=queries,
                    query_positions=positions,
                    block_ids=blocks[rows],
                    scale=self.layers[rows.start].scale,
                    candidates=~forced[rows],
                    layers=layers[rows],
                    state=None if known is None else known[rows],
                    rope=self.layers[rows.start].rope,
                    replay=None if found is None else found[rows].mT,
                    **self._read(policy, eviction, rows, blocks[rows]),
                    **circumstances(sequence, eviction, settings),
                ),
                settings.smoothing,
            )
            if state is not None and new is not None:
                state[rows] = new
        kept = ops.select(
            weights=weights,
            keep=len(eviction.kept_pages),
            forced=forced,
            seed=eviction.seed,
            event=eviction.event,
            layers=layers,
            block_ids=blocks,
            **selection(policy, settings, eviction),
        )
        return kept, state

    def _groups(self, policy: Policy, live: int, window: int) -> list[slice]:
        """Runs of layers to score at once: alike, and with few enough keys, or maps, to hold."""
        if not policy.reads_keys:
            return [slice(0, len(self.layers))]
        groups: list[slice] = []
        for row, layer in enumerate(self.layers):
            if read_in_place(self.memory, policy):
                most = max(1, MAX_MAPS // (live * window * layer.window.ring.shape[1]))
            else:
                most = max(1, MAX_KEYS // (live * layer.cache[0].numel() // 2))
            if groups and row - groups[-1].start < most and layer.alike(self.layers[row - 1]):
                groups[-1] = slice(groups[-1].start, row + 1)
            else:
                groups.append(slice(row, row + 1))
        return groups

    def _read(
        self, policy: Policy, eviction: Eviction, rows: slice, blocks: Tensor
    ) -> dict[str, Any]:
        """Keys and values [L, N, Hkv, b, D] of an Observation as far as the policy needs them, or
        what reads them in place. blocks: [L, N]."""
        if not policy.reads_keys:
            return {"keys": None}
        pages = ops.sent(eviction.pages, self.device)
        layers: list[Layer] = self.layers[rows]
        if self.memory is not None and read_in_place(self.memory, policy):
            units = self.memory.own(rows, pages)
            held = blocks[:, None].expand(units.shape)
            counts = torch.full(units.shape[:2], len(pages), device=self.device)
            return {"keys": None, "reader": self.memory.reader(units, held, counts)}
        caches, values = [layer.cache for layer in layers], None
        if policy.needs_values:
            layout = layers[0].values
            assert layout is not None, "the layers' values have not been probed"
            values = layout.read_all(caches, pages)
        return {"keys": layers[0].keys.read_all(caches, pages), "values": values}

    def _fill(self, eviction: Eviction, kept: Tensor) -> tuple[SupportsInt, Tensor]:
        """Copy kept blocks out of pages that go into pages that stay.

        Returns the number of copies, and which of the live blocks is in each page that stays,
        [layers, len(kept_pages)]. A page that stays and whose own block is kept is not touched.
        Sources and destinations are disjoint, so copies need no scratch and no order.
        """
        pages, kept_pages = eviction.pages, eviction.kept_pages
        slot_of_page = {page: slot for slot, page in enumerate(kept_pages)}
        slots = [slot_of_page.get(page, -1) for page in pages]
        most = min(len(kept_pages), slots.count(-1))
        places = ops.sent(slots, self.device)
        pairs = ops.pair(kept, places, len(kept_pages), most)
        source = ops.sent(pages, self.device)[pairs.source]
        target = ops.sent(kept_pages, self.device)[pairs.target]
        if self.memory is not None:
            self.memory.copy_pages(source, target, pairs.counts)
        else:
            copies = zip(self.layers, source, target, pairs.counts.tolist(), strict=True)
            for layer, old, new, count in copies:
                layer.cache.index_copy_(0, new[:count], layer.cache.index_select(0, old[:count]))
        return ops.number(pairs.counts.sum()), pairs.taken
