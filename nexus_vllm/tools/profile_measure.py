"""What a transformers model looks at: oracle importance, replay scores and a policy's weights.

An attention function registered with transformers computes what "sdpa" computes, and shows each
layer's rotated queries, keys and values to a watcher. So every model that goes through that
interface can be watched (Llama, Qwen, Mistral, ...), whatever norms or biases it puts before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nexus_vllm.policies import Observation, Policy, score
from nexus_vllm.profile import ModelFacts

Seen = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""layer, queries [Hq, Tq, D], keys [Hkv, Tk, D], values [Hkv, Tk, D], scale of the logits."""

_NAME = "nexus_profile"
_ROWS = 256
"""Queries whose attention to all keys is held at once."""


class Watched:
    """A model on the CPU in float32, one context in its cache, and the weights W_O by head."""

    def __init__(self, model: Any, name: str) -> None:
        """Raises ValueError for a model this cannot measure."""
        config = model.config.get_text_config()
        sliding = getattr(config, "sliding_window", None)
        every = "sliding_attention" if sliding else "full_attention"
        kinds = set(getattr(config, "layer_types", None) or [every])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"{name} has layers of kind {', '.join(sorted(kinds))}; only models with full "
                "attention in every layer can be profiled"
            )
        self._attention = [part for part in model.modules() if hasattr(part, "o_proj")]
        self._attention = [part for part in self._attention if hasattr(part, "layer_idx")]
        if len(self._attention) != config.num_hidden_layers:
            raise ValueError(
                f"{name}: {len(self._attention)} attention modules with o_proj found in "
                f"{config.num_hidden_layers} layers; only Llama-like models can be profiled"
            )
        self.model = model
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.facts = ModelFacts(name, len(self._attention), int(config.num_key_value_heads), size)
        self.group = heads // self.facts.kv_heads
        self.watcher: Seen | None = None
        self._cache: Any = None
        self._norms: list[Tensor] = []
        self.length = 0
        _register()
        model.set_attn_implementation(_NAME)
        for part in self._attention:
            part.nexus_watched = self

    @torch.inference_mode()
    def read(self, context: Sequence[int], window: int) -> tuple[list[Tensor], float]:
        """Prefill the context; the last W rotated queries of each layer [Hq, W, D], the scale."""
        last: list[Tensor] = []
        scales: list[float] = []

        def keep(_: int, queries: Tensor, __: Tensor, ___: Tensor, scale: float) -> None:
            last.append(queries[:, -window:].clone())
            scales.append(scale)

        self._cache, self.length = None, 0
        with self._watch(keep):
            self.forward(context)
        self.length = len(context)
        self._norms = [self._value_norms(layer) for layer in range(self.facts.layers)]
        return last, scales[0]

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] after these tokens, which join the cache."""
        out = self.model(
            input_ids=torch.tensor([list(ids)]),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        return out.logits[0, -1]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What is read inside is forgotten at the end; the context stays."""
        try:
            yield
        finally:
            self._cache.crop(-(self._cache.get_seq_length() - self.length))

    @contextmanager
    def _watch(self, watcher: Seen) -> Iterator[None]:
        self.watcher = watcher
        try:
            yield
        finally:
            self.watcher = None

    def keys(self) -> Tensor:
        """The context's rotated keys, [L, Hkv, T, D]."""
        return torch.stack([layer.keys[0, :, : self.length] for layer in self._cache.layers])

    def _value_norms(self, layer: int) -> Tensor:
        """nu [Hkv, G, T]: ||W_O v_j|| of each query head, divided by its sum over the layer."""
        values = self._cache.layers[layer].values[0, :, : self.length].to(torch.float64)
        part = self._attention[layer].o_proj.weight.to(torch.float64)  # [hidden, Hq D]
        split = part.unflatten(1, (self.facts.kv_heads, self.group, self.facts.head_size))
        gram = torch.einsum("ohgd,ohge->hgde", split, split)  # ||W v||^2 = v' (W' W) v
        norms = torch.einsum("htd,hgde,hte->hgt", values, gram, values).clamp(min=0).sqrt()
        return norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)

    @torch.inference_mode()
    def answer(
        self, question: Sequence[int], steps: int, stop: set[int], temperature: float, seed: int
    ) -> tuple[Tensor, list[int]]:
        """(largest attention to the context over the steps [L, Hq, T] float32, the answer's ids).

        Greedy at temperature 0. Each generated token is one step; the question's own tokens, which
        are read together, do not count. The first token is never a stop token.
        """
        peak = torch.zeros(self.facts.layers, self.facts.kv_heads * self.group, self.length)

        def see(layer: int, queries: Tensor, keys: Tensor, _: Tensor, scale: float) -> None:
            logits = queries.unflatten(0, (len(keys), -1))[:, :, 0] @ keys.mT * scale
            seen = logits.softmax(-1).flatten(0, 1)[:, : self.length]
            torch.maximum(peak[layer], seen, out=peak[layer])

        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        with self.asking():
            logits = self.forward(question)
            logits[list(stop)] = -torch.inf
            with self._watch(see):
                while True:
                    token = _pick(logits, temperature, generator)
                    if token in stop:
                        break
                    ids.append(token)
                    logits = self.forward([token])
                    if len(ids) == steps:
                        break
        return peak, ids

    @torch.inference_mode()
    def oracle(self, peak: Tensor, block_size: int) -> Tensor:
        """Importance [L, Hkv, N] float32: max over the group of peak x nu, summed per block."""
        rows = []
        for layer in range(self.facts.layers):
            seen = peak[layer].to(torch.float64).unflatten(0, (self.facts.kv_heads, self.group))
            worth = (seen * self._norms[layer]).amax(1)
            rows.append(worth.unflatten(-1, (-1, block_size)).sum(-1))
        return torch.stack(rows).to(torch.float32)

    @torch.inference_mode()
    def replay(
        self, context: Sequence[int], prompt: Sequence[int], block_size: int, chunk: int
    ) -> Tensor:
        """Largest attention to each block while the context is repeated, [L, Hkv, N] float32.

        KVzip's score: after the context the model reads `prompt` and the context once more, in
        chunks that each start from the cached context (and, after the first, from the 8 tokens
        before). Where KVzip's softmax runs over the sink, the chunk and its replay only, to save
        time, this one is the model's own attention. Max over queries and query heads of the group.
        """
        size = self.length // block_size
        peak = torch.zeros(self.facts.layers, self.facts.kv_heads, size)

        def see(layer: int, queries: Tensor, keys: Tensor, _: Tensor, scale: float) -> None:
            positions = torch.arange(keys.shape[1])
            first = keys.shape[1] - queries.shape[1]
            for row in range(0, queries.shape[1], _ROWS):
                q = queries[:, row : row + _ROWS].unflatten(0, (len(keys), -1))
                logits = q @ keys[:, None].mT * scale  # [Hkv, G, rows, Tk]
                own = first + row + torch.arange(q.shape[2])
                logits.masked_fill_(positions > own[:, None], -torch.inf)
                seen = logits.softmax(-1).amax((1, 2))[:, : size * block_size]
                blocks = seen.unflatten(-1, (size, block_size)).amax(-1)
                torch.maximum(peak[layer], blocks, out=peak[layer])

        for start in range(0, len(context), chunk):
            part = [*prompt, *context[max(0, start - 8) : start + chunk]]
            with self.asking(), self._watch(see):
                self.forward(part)
        return peak


def block_weights(
    watched: Watched,
    policy: Policy,
    window: tuple[list[Tensor], float],
    block_size: int,
    forced: Tensor,
    seed: int,
) -> Tensor:
    """The policy's weights per (layer, KV head), [L, H, N] float32, at the end of the context.

    window: what `Watched.read` returned. forced: bool [N], the blocks that stay anyway.
    """
    queries, scale = window
    facts, blocks = watched.facts, len(forced)
    rows = torch.stack(queries).unflatten(1, (facts.kv_heads, -1)).transpose(2, 3)
    keys = watched.keys().unflatten(2, (blocks, 1, block_size))
    shape = (facts.layers, facts.kv_heads)
    ids = torch.arange(blocks).expand(*shape, blocks)
    seen = rows.shape[2]
    observation = Observation(
        queries=rows.contiguous() if policy.needs_window else None,
        query_positions=torch.arange(watched.length - seen, watched.length)
        if policy.needs_window
        else None,
        keys=keys if policy.reads_keys else None,
        block_ids=ids,
        scale=scale,
        candidates=(~forced).expand(ids.shape),
        seed=seed,
        event=0,
        layers=torch.arange(facts.layers * facts.kv_heads).view(shape),
    )
    return score(policy, observation)[0]


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    return int((logits / temperature).softmax(-1).multinomial(1, generator=generator))


def _register() -> None:
    """Make the watching attention known to transformers; its masks are those of "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
            raise ValueError("models with capped logits or sink logits cannot be profiled")
        watched = module.nexus_watched
        if watched.watcher is not None:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            watched.watcher(module.layer_idx, query[0], key[0], value[0], scale)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
