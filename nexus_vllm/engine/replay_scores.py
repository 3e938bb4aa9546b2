"""The worker's half of replays: how much attention each block of a prompt gets in its replay."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from nexus_vllm.engine import ops
from nexus_vllm.engine.evictor import Layer
from nexus_vllm.plan import Piece
from nexus_vllm.policies import Observation, highest_attention

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from nexus_vllm.engine.runners import Runner


@dataclass(frozen=True)
class Reading:
    """Query rows of a batch that repeat a prompt, their positions, and their sequence's pages."""

    piece: Piece
    rows: slice
    positions: Tensor
    pages: Tensor


class ReplayScores:
    """By replay, the most attention that a token of each of the prompt's blocks has had.

    Largest softmax attention over the queries that repeat the prompt and over the query heads that
    share a KV head: [layers, KV heads, blocks of the prompt] float32, of this rank's. As a maximum
    it does not mind queries that come twice, after a preemption.
    """

    def __init__(self, runner: "Runner", layers: list[Layer], block_size: int) -> None:
        self.runner = runner
        self.layers = layers
        self.block_size = block_size
        self.scores: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}

    def start(self, piece: Piece) -> None:
        """A piece is computed from now on; what was found before stays."""
        self.pieces[piece.request_id] = piece
        if piece.replay not in self.scores:
            blocks = -(-piece.prompt_tokens // self.block_size)
            cache = self.layers[0].cache
            self.scores[piece.replay] = torch.zeros(
                len(self.layers), cache.shape[1], blocks, device=cache.device
            )

    def stop(self, request_id: str) -> None:
        """A request holds no pages any more; most are no pieces."""
        self.pieces.pop(request_id, None)

    def forget(self, replay: str) -> None:
        """Nobody will need a replay any more, which may not have begun."""
        self.scores.pop(replay, None)

    def readings(self, batch: "CommonAttentionMetadata") -> list[Reading]:
        """What of a batch repeats a prompt; a batch without costs nothing."""
        if not self.pieces:
            return []
        lengths = batch.seq_lens_cpu_upper_bound
        if lengths is None:
            raise RuntimeError("vLLM built a batch without seq_lens_cpu_upper_bound")
        found, starts = [], batch.query_start_loc_cpu.tolist()
        for row, request_id in enumerate(self.runner.batch_request_ids(batch)):
            piece = self.pieces.get(request_id or "")
            if piece is None:
                continue
            length = int(lengths[row])
            begin = length - (starts[row + 1] - starts[row])  # the position of its first query
            first, end = max(begin, piece.first), min(length, piece.end)
            if first < end:
                found.append(
                    Reading(
                        piece,
                        slice(starts[row] + first - begin, starts[row] + end - begin),
                        torch.arange(first, end, device=batch.block_table_tensor.device),
                        batch.block_table_tensor[row, : -(-end // self.block_size)].long(),
                    )
                )
        return found

    def read(self, row: int, query: Tensor, readings: list[Reading]) -> None:
        """Score a step's repetitions in one layer, whose cache has the step's keys by now.

        query: [tokens, query heads, head size], rotated.
        """
        layer = self.layers[row]
        query = query.view(-1, *layer.window.ring.shape[1:])
        for reading in readings:
            keys = layer.keys.read(layer.cache, reading.pages)  # [N, Hkv, b, D]
            blocks = torch.arange(len(keys), device=keys.device)[None]
            seen = Observation(
                queries=query[None, reading.rows],
                query_positions=reading.positions,
                keys=keys[None],
                block_ids=blocks,
                scale=layer.scale,
                candidates=torch.ones_like(blocks, dtype=torch.bool),
                seed=0,
                event=0,
                layers=ops.sent([layer.index], keys.device),
            )
            highest = highest_attention(seen)[0].flatten(1)  # [Hkv, N b]
            scores = self.scores[reading.piece.replay][row]
            # The prompt's last block may go on with the instruction.
            prompt = reading.piece.prompt_tokens
            rest = scores.shape[-1] * self.block_size - prompt
            of_blocks = functional.pad(highest[:, :prompt], (0, rest)).unflatten(
                1, (-1, self.block_size)
            )
            torch.maximum(scores, of_blocks.amax(-1), out=scores)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every piece at work has scores to add to."""
        for piece in self.pieces.values():
            if piece.replay not in self.scores:
                raise RuntimeError(f"{piece.request_id}: the scores of its replay are gone")
