"""The oracle of invariant I7: a Llama forward pass in plain PyTorch with an explicit mask.

Nothing here knows vLLM, pages or slides. An eviction is only what it means: from some query on, a
layer no longer sees the keys of the blocks that it gave up. One pass over all tokens of a finished
sequence gives the logits that every step should have had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

Visible = Callable[[int], Tensor]
"""Layer -> [T, T] bool: may query row i see key column j? Causality is part of it."""


@dataclass(frozen=True)
class Eviction:
    """One shrink of a sequence, as seen from the attention.

    num_computed: tokens whose keys existed then. Queries at this position and after it are bound.
    full_blocks: N. Keys at block_size * N and after it stay visible to all layers.
    kept: [layers, B] original indices of the blocks that each layer kept of [0, N).
    """

    num_computed: int
    full_blocks: int
    kept: Tensor


def causal(num_tokens: int) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()


def visibility(num_tokens: int, trace: Sequence[Eviction], block_size: int = 32) -> Visible:
    """The mask of each layer after these evictions.

    Raises:
        ValueError: the trace is impossible: out of order, a block beyond the full ones, kept twice,
            or kept although an earlier eviction gave it up.
    """
    _check(trace, block_size)

    def visible(layer: int) -> Tensor:
        mask = causal(num_tokens)
        for event in trace:
            # A later event says it all: its kept blocks and the tail replace those before it.
            keys = torch.zeros(num_tokens, dtype=torch.bool)
            keys[event.full_blocks * block_size :] = True
            for block in event.kept[layer].tolist():
                keys[block * block_size : (block + 1) * block_size] = True
            rows = slice(event.num_computed, None)
            mask[rows] = causal(num_tokens)[rows] & keys
        return mask

    return visible


def _check(trace: Sequence[Eviction], block_size: int) -> None:
    before: Eviction | None = None
    for number, event in enumerate(trace):
        if event.num_computed < event.full_blocks * block_size:
            raise ValueError(f"event {number}: {event.full_blocks} blocks are not full yet")
        if before is not None and (
            event.num_computed < before.num_computed or event.full_blocks < before.full_blocks
        ):
            raise ValueError(f"event {number} is older than the one before it")
        for layer, kept in enumerate(event.kept.tolist()):
            alive = set(range(event.full_blocks))
            if before is not None:
                given_up = set(range(before.full_blocks)) - set(before.kept[layer].tolist())
                alive -= given_up
            if len(set(kept)) != len(kept) or not set(kept) <= alive:
                raise ValueError(
                    f"event {number}, layer {layer}: kept {sorted(kept)}, but only "
                    f"{sorted(alive)} were alive, each once"
                )
        before = event


@dataclass(frozen=True)
class Llama:
    """Weights under their names on the Hub, and the few numbers of config.json that matter."""

    weights: Mapping[str, Tensor]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def load(cls, folder: Path) -> Llama:
        weights = {k: w.float() for k, w in load_file(folder / "model.safetensors").items()}
        return cls.build(weights, json.loads((folder / "config.json").read_text()))

    @classmethod
    def build(cls, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Llama:
        rope = config["rope_parameters"]
        plain = (
            config["model_type"] == "llama"
            and rope["rope_type"] == "default"
            and config["hidden_act"] == "silu"
            and not config["attention_bias"]
            and not config["mlp_bias"]
        )
        if not plain:
            raise ValueError(f"not a plain Llama: {dict(config)}")
        return cls(
            weights=weights,
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            rope_theta=rope["rope_theta"],
            norm_eps=config["rms_norm_eps"],
        )

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Sequence[int],
        visible: Visible | Tensor | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Next-token logits after each token.

        Args:
            visible: the mask of each layer, [T, T] or [layers, T, T] or a function of the layer;
                None for plain causal attention.
            rows: the positions wanted; the vocabulary is large.
        Returns: [len(rows), vocab] float32.
        """
        hidden = self.embed(token_ids)
        positions = torch.arange(len(token_ids))
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, hidden, positions)
            mask = self._mask(visible, layer, len(token_ids))
            hidden = self.finish(layer, hidden, attend(q, k, v, mask))
        return self.unembed(hidden[rows])

    def _mask(self, visible: Visible | Tensor | None, layer: int, num_tokens: int) -> Tensor:
        if visible is None:
            return causal(num_tokens)
        if isinstance(visible, Tensor):
            return visible if visible.dim() == 2 else visible[layer]
        return visible(layer)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self.weights["model.embed_tokens.weight"][list(token_ids)]

    def unembed(self, hidden: Tensor) -> Tensor:
        output = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return linear(self._norm(hidden, "model.norm.weight"), output)

    def project(
        self, layer: int, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden] -> q [T, heads, D] and k [T, kv_heads, D], both rotated, and v."""
        x = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (
            linear(x, self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"])
            for name in "qkv"
        )
        shape = (len(hidden), -1, self.head_size)
        return (
            self._rotate(q.view(shape), positions),
            self._rotate(k.view(shape), positions),
            v.view(shape),
        )

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer, after attention: [T, heads, D] -> [T, hidden]."""
        prefix = f"model.layers.{layer}."
        output = self.weights[prefix + "self_attn.o_proj.weight"]
        hidden = hidden + linear(attended.flatten(1), output)
        x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = silu(linear(x, self.weights[prefix + "mlp.gate_proj.weight"]))
        up = linear(x, self.weights[prefix + "mlp.up_proj.weight"])
        return hidden + linear(gate * up, self.weights[prefix + "mlp.down_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return x * scale * self.weights[name]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on [T, H, D]: the pair (i, i + D/2) turns by position * theta^(-2i/D)."""
        exponent = torch.arange(0, self.head_size, 2) / self.head_size
        angle = positions[:, None, None] * self.rope_theta**-exponent
        first, second = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of q [T, heads, D] over k, v [S, kv_heads, D] under a mask [T, S].

    Query head h reads KV head h // (heads // kv_heads).
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)
