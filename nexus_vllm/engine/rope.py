"""The rotary embedding of each attention layer, for policies that undo it."""

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from nexus_vllm.policies import Rope

_POSITIONS = 7
_TOLERANCE = 0.05  # the table may be in bfloat16


class RopeTables:
    """One Rope for each rotary embedding of a model: layers mostly share one."""

    def __init__(self) -> None:
        self._known: dict[int, Rope | None] = {}

    def of(self, model: Module, name: str) -> Rope | None:
        """How the attention layer `name` of vLLM's model rotates queries and keys.

        None where its parent has no `rotary_emb` of the usual kind, or where that
        does something else to a few random vectors than `Rope.turned` does with the table.
        """
        try:
            rotary: object = model.get_submodule(name.rpartition(".")[0] + ".rotary_emb")
        except AttributeError:
            return None
        if not isinstance(rotary, RotaryEmbedding):
            return None
        if id(rotary) not in self._known:
            self._known[id(rotary)] = _proved(rotary)
        return self._known[id(rotary)]


def _proved(rotary: RotaryEmbedding) -> Rope | None:
    table: Tensor = rotary.cos_sin_cache
    if table.ndim != 2:
        return None
    cos, sin = table.chunk(2, dim=-1)  # views: some tables are large
    rope = Rope(cos, sin, rotary.is_neox_style)
    draw = torch.Generator().manual_seed(0)
    positions = torch.randint(len(cos), (_POSITIONS,), generator=draw)
    given = torch.randn(_POSITIONS, rotary.head_size, generator=draw)
    given, positions = given.to(table), positions.to(table.device)
    turned, _ = rotary.forward_native(positions, given.clone(), given.clone())
    expected = rope.turned(given.float(), cos[positions].float(), sin[positions].float())
    close = turned.shape == expected.shape and torch.allclose(
        turned.float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE
    )
    return rope if close else None
